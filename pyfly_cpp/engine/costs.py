"""Costs of batches and drafts: measured for each setup before somebody waits, and kept in the cache folder.

The governor begins with these and corrects them by what it sees (docs/how-it-decides.md). It sees nothing of a drafter
that seems too dear to try, so the costs are measured again at the second load, and the lower ones count: other work
only adds to a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp

from pyfly_cpp import _native
from pyfly_cpp._version import __version__
from pyfly_cpp.decoding.drafters import Drafter, OwnDrafter
from pyfly_cpp.errors import PyflyError
from pyfly_cpp.machine.cache import keeping, kept_path
from pyfly_cpp.machine.devices import devices
from pyfly_cpp.machine.files import file_identity, write_atomically
from pyfly_cpp.models.named import model_file

VARIABLE = "PYFLY_COSTS"
"""Environment variable: 0 to measure nothing beforehand, 1 to measure every time and to keep nothing."""

_WAY = 2
"""Of measuring; costs that were measured in another way are measured again. 2: drafts of another vocabulary behind a
text that people write."""

_TIMES = 2
"""Loads at which a setup's costs are measured."""


def setup_of(
    model_path: str | os.PathLike[str],
    drafters: Sequence[tuple[Drafter, int]],
    model_params: Any,
    context_params: Any,
    changes: Sequence[object] = (),
) -> dict[str, Any]:
    """All that costs hang on, fit for JSON.

    Args:
        model_path: The target.
        drafters: What the batch is configured with: each drafter and its draft_max, in its order.
        model_params: The llama_model_params that the target was loaded with.
        context_params: The llama_context_params of its context.
        changes: What else changes the model or where its parts are; what tells their values apart is their repr.
    """
    features = llama_cpp.llama_print_system_info().decode("utf-8", errors="replace")
    return {
        "model": file_identity(model_path),
        "drafters": [[*_describe(drafter), draft_max] for drafter, draft_max in drafters],
        "model_params": _numbers(model_params),
        "context_params": _numbers(context_params),
        "changes": [repr(change) for change in changes],
        "build": [__version__, llama_cpp.__version__, features, _native.kernels_isa(), _WAY],
        "devices": [[device["backend"], device["name"], device["description"]] for device in devices()],
    }


def expect_costs(
    batch: _native.Batch, setup: dict[str, Any], *, may_measure: bool = True, verbose: bool = False
) -> bool:
    """Tells the governor of a batch the cost of batches and drafts: measured now, kept for this setup, or at the
    second load the lower of both. Never fails: what cannot be measured the governor learns while it decodes.

    Args:
        batch: Configured with its drafters.
        setup: See `setup_of`.
        may_measure: No request runs, and whatever the slots hold may be dropped. Without, only what is kept counts.
        verbose: Print a line to stderr when something was measured.

    Returns:
        Whether that was all that can be done; False: call again when it may measure.

    Raises:
        ValueError: `PYFLY_COSTS` has a value that means nothing.
    """
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} is {wish!r}; set it to 0 or 1, or not at all.")
    if wish == "0":
        return True
    kept = None if wish else _expect_kept(batch, setup)
    if kept is not None and (kept.times >= _TIMES or not may_measure):
        return True
    if not may_measure:
        return False
    started = time.monotonic()
    try:
        costs = batch.measure()
        if kept is not None:
            costs = _lower(kept.costs, costs)
        batch.expect(costs)
    except (PyflyError, ValueError, MemoryError):  # the first request will say it better
        return True
    if verbose:
        seconds = time.monotonic() - started
        print(f"pyfly-cpp: measured the cost of batches and drafts in {seconds:.1f} s", file=sys.stderr)
    if costs.rows and not wish:
        _keep(_Kept(costs, kept.times + 1 if kept is not None else 1), setup)
    return True


def _lower(one: _native.Costs, other: _native.Costs) -> _native.Costs:
    """Of each size, the lower cost; the price of a change, a difference of two, is the other one's."""
    rows = dict(sorted((*one.rows, *other.rows), reverse=True))
    drafts = {of[:3]: of[3] for of in sorted((*one.drafts, *other.drafts), reverse=True)}
    return _native.Costs(
        tuple(sorted(rows.items())),
        tuple((*of, us) for of, us in sorted(drafts.items())),
        tuple(map(min, zip(one.catch_up, other.catch_up))),
        other.change,
    )


# ---- What is kept: a file for each setup -----------------------------------------------------------------------------


class _Kept(NamedTuple):
    costs: _native.Costs
    times: int
    """How often they were measured."""


def _file(setup: dict[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(setup, sort_keys=True).encode("utf-8", "backslashreplace")).hexdigest()
    return kept_path("costs") / f"{key[:32]}.json"


def _expect_kept(batch: _native.Batch, setup: dict[str, Any]) -> _Kept | None:
    """What is kept of this setup, which the governor then expects; a damaged file is nothing."""
    with contextlib.suppress(OSError, ArithmeticError, RuntimeError, ValueError, RecursionError, KeyError, TypeError):
        read = json.loads(_file(setup).read_text(encoding="utf-8"))
        costs = _native.Costs(
            tuple((int(n), float(us)) for n, us in read["costs"]["rows"]),
            tuple((int(drafter), int(n), int(k), float(us)) for drafter, n, k, us in read["costs"]["drafts"]),
            tuple(map(float, read["costs"]["catch_up"])),
            float(read["costs"]["change"]),
        )
        times = max(int(read["times"]), 1)
        if costs.rows and len(costs.catch_up) == len(setup["drafters"]):
            batch.expect(costs)
            return _Kept(costs, times)
    return None


def _keep(kept: _Kept, setup: dict[str, Any]) -> None:
    """If it cannot be kept, it is measured again the next time."""
    with keeping():
        path = _file(setup)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"setup": setup, "times": kept.times, "costs": kept.costs._asdict()}, indent=1)
        write_atomically(path, text + "\n")


# ---- What they hang on -----------------------------------------------------------------------------------------------


def _describe(drafter: Drafter) -> list[Any]:
    if not isinstance(drafter, OwnDrafter):
        return ["callable", None]
    return [repr(drafter), None if drafter.file is None else file_identity(model_file(drafter.file))]


def _numbers(params: Any) -> dict[str, float]:
    """The fields of a C struct that are numbers, and no pointers."""
    fields = ((name, getattr(params, name)) for name, kind in params._fields_ if kind is not ctypes.c_void_p)
    return {name: value for name, value in fields if isinstance(value, (bool, int, float))}
