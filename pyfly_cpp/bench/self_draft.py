"""A draft of a model made of itself: requantised, the type chosen by measuring on this machine.

Which type is the fastest draft cannot be told from its size: kernels differ, and so does how well a type drafts. So
each candidate is made, drafts for the target on a few bundled prompts, and is timed next to it:

    speed(k) = (1 + A(1) + ... + A(k)) / (C(k + 1) + D(k)),    plain: 1 / C(1)

with A(i) the share of steps in which its first i drafts were right, C(n) the time of a batch of n tokens of the
target, D(k) that of k drafts. The best k counts; the governor finds it again while decoding.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import numpy as np

from pyfly_cpp import _native
from pyfly_cpp.bench.prompts import read_prompts
from pyfly_cpp.decoding.drafters import DraftModel
from pyfly_cpp.errors import PyflyError
from pyfly_cpp.llama.fly_llama import FlyLlama
from pyfly_cpp.machine.files import require_free, require_gguf, require_other, require_space
from pyfly_cpp.machine.programs import quantize
from pyfly_cpp.models.metadata import metadata, open_metadata

DEPTH = 6
"""Tokens that candidates draft in a step."""

MAX_TOKENS = 48
"""The longest answer."""

N_CTX = 2048

PAYS = 1.05
"""A draft is kept from this gain on: what was measured is no more exact than that."""

_UNQUANTISED = {"0", "1", "32"}
"""`general.file_type` (llama_ftype of llama.h) of F32, F16 and BF16."""


class Kind(NamedTuple):
    """A type that a draft may have."""

    name: str
    ftype: int
    """`llama_ftype` of llama.h."""
    bits: float
    """Bits of a weight, a little too many: some matrices are kept in larger types."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("q4_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, 4.9),
        Kind("q2_k", llama_cpp.LLAMA_FTYPE_MOSTLY_Q2_K, 3.6),
        Kind("q3_k_s", llama_cpp.LLAMA_FTYPE_MOSTLY_Q3_K_S, 3.9),
        Kind("q4_k_m", llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, 5.3),
    )
}
"""The candidates by their names."""


class Plan(NamedTuple):
    """The candidates to try."""

    target: Path
    source: Path
    """The model to requantise: the target, or the same model in a better form."""
    kinds: tuple[Kind, ...]
    n_bytes: int
    """Most that lies on the disk meanwhile, about: the best candidate so far, and the next one."""
    output: Path | None
    """The draft's name; None: next to the target, by its type."""
    is_quantised: bool
    """Whether the source is quantised already: the draft then has the errors of both types."""

    def output_of(self, kind: Kind) -> Path:
        return self.output or self.target.with_name(f"{self.target.stem}.draft-{kind.name}.gguf")

    @property
    def folder(self) -> Path:
        return (self.output or self.target).absolute().parent


@dataclass(frozen=True)
class Trial:
    """The gain of a candidate."""

    kind: str
    n_bytes: int
    draft_ms: float
    """Milliseconds of drafting a token."""
    target_ms: float
    """Milliseconds of a token of the target, decoded plainly."""
    acceptance: tuple[float, ...]
    """Share of steps whose first 1, 2, ... drafts were right."""
    draft_max: int
    """The best number of tokens in a step."""
    speed: float
    """Expected tokens per second with that number."""

    @property
    def gain(self) -> float:
        """Over plain decoding."""
        return self.speed * self.target_ms / 1e3


class Observations(NamedTuple):
    """What a candidate showed."""

    n_bytes: int
    acceptance: tuple[float, ...]
    costs: _native.Costs


class Found(NamedTuple):
    """The result."""

    trials: tuple[Trial, ...]
    best: Trial
    path: Path | None
    """The draft; None if it is not faster, and so was not kept."""


def plan_draft(
    target: str | os.PathLike[str],
    source: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    kinds: Sequence[str] = tuple(KINDS),
    force: bool = False,
) -> Plan:
    """Looks at the files, not at their weights.

    Args:
        target: The model to draft for.
        source: The same model, less quantised; None: the target.
        output: The draft to write; None: next to the target.
        kinds: Names of `KINDS`.
        force: Overwrite it.

    Raises:
        ValueError: a file is no model, a type is unknown, source and target have different vocabularies, the output is
            one of them, or no type is smaller than the target.
        OutputError: the output exists, or its folder cannot be written to or is too full.
    """
    unknown = [name for name in kinds if name not in KINDS]
    if unknown or not kinds:
        named = f"the type {unknown[0]!r} is unknown" if unknown else "no type is given"
        raise ValueError(f"{named}; the types are {', '.join(KINDS)}.")
    target_path, source_path = Path(target), Path(target if source is None else source)
    header = _Header.read(target_path)
    original = header if source is None else _Header.read(source_path)
    if original.vocabulary != header.vocabulary or original.n_params != header.n_params:
        raise ValueError(f"{source_path} is another model than {target_path}; give the same one, less quantised.")
    sizes = {KINDS[name]: int(header.n_params * KINDS[name].bits / 8) for name in dict.fromkeys(kinds)}
    smaller = {kind: size for kind, size in sizes.items() if size < 0.9 * header.n_bytes}
    if not smaller:
        raise ValueError(
            f"{target_path.name} is as small as {' and '.join(kind.name for kind in sizes)}: a draft of itself would "
            "cost as much as it does; use a smaller model of its family, or prompt lookup."
        )
    plan = Plan(
        target_path, source_path, tuple(smaller), sum(sorted(smaller.values())[-2:]),
        None if output is None else Path(output), original.file_type not in _UNQUANTISED,
    )  # fmt: skip
    for kind in plan.kinds:
        require_other(plan.output_of(kind), target_path, source_path)
        require_free(plan.output_of(kind), force)
    require_space(plan.folder, plan.n_bytes, "make room, or write to another disk with --output")
    return plan


def make_draft(
    plan: Plan, *, keep: bool = False, on_progress: Callable[[str, float], None] | None = None, **arguments: Any
) -> Found:
    """Makes and measures the candidates of a plan, and keeps the best one if it is faster.

    Args:
        keep: Also if it does not.
        on_progress: Called with what is being done and how much of it, 0..1; what it raises stops everything.
        **arguments: Of the target's `FlyLlama` (threads, GPU layers).

    Raises:
        PyflyError: llama.cpp cannot requantise the model, or it cannot be decoded speculatively.
    """
    progress = on_progress or (lambda what, done: None)
    measured: dict[Kind, Observations] = {}
    with tempfile.TemporaryDirectory(prefix=".pyfly-draft-", dir=plan.folder) as folder:

        def file_of(kind: Kind) -> Path:
            return Path(folder, f"{kind.name}.gguf")

        progress(f"loading {plan.target.name}", 0.0)
        settings = {"n_ctx": N_CTX, "n_batch": 512, "verbose": False, **arguments}
        with contextlib.closing(FlyLlama(plan.target, adaptive=False, **settings)) as llm:
            for kind in plan.kinds:
                _quantize(plan, kind, file_of(kind), progress)
                measured[kind] = _try(llm, kind, file_of(kind), progress)
                llm.drafter = None  # lets go of the file
                trials = weigh(measured)
                best = max((tried for tried in trials if file_of(tried).exists()), key=lambda tried: trials[tried].gain)
                for tried in trials:
                    if tried != best:
                        file_of(tried).unlink(missing_ok=True)
        output = None
        if trials[best].gain >= PAYS or keep:
            output = plan.output_of(best)
            os.replace(file_of(best), output)
    return Found(tuple(trials.values()), trials[best], output)


class _Header(NamedTuple):
    n_params: int
    n_bytes: int
    vocabulary: int
    file_type: str | None

    @classmethod
    def read(cls, path: Path) -> _Header:
        require_gguf(str(path))
        _native.inspect_model(str(path))
        with open_metadata(path) as model:
            return cls(
                llama_cpp.llama_model_n_params(model), llama_cpp.llama_model_size(model),
                _native.model_vocabulary(model), metadata(model, "general.file_type"),
            )  # fmt: skip


def _quantize(plan: Plan, kind: Kind, path: Path, progress: Callable[[str, float], None]) -> None:
    n_expected = plan.source.stat().st_size

    def poll() -> None:
        with contextlib.suppress(OSError):
            progress(f"{kind.name}: quantising", min(1.0, path.stat().st_size / n_expected))

    progress(f"{kind.name}: quantising", 0.0)
    quantize(plan.source, path, kind.ftype, poll, f"llama.cpp could not make {plan.source.name!r} {kind.name}")


def _try(llm: FlyLlama, kind: Kind, path: Path, progress: Callable[[str, float], None]) -> Observations:
    """Lets a candidate draft for the target, and times both."""
    llm.drafter = DraftModel(path, draft_max=DEPTH)
    if not llm.can_speculate:
        raise PyflyError("this model's memory cannot be rolled back, so no draft makes it faster.")
    prompts = list({prompt.category: prompt for prompt in read_prompts()}.values())
    llm.reset_stats()
    for i, prompt in enumerate(prompts):
        progress(f"{kind.name}: drafting", i / len(prompts))
        messages: Any = [{"role": "user", "content": prompt.turns[0]}]
        llm.create_chat_completion(messages, max_tokens=MAX_TOKENS, temperature=0.0)
    acceptance = llm.stats.acceptance_at_depth[:DEPTH]
    progress(f"{kind.name}: measuring its cost", 1.0)
    return Observations(path.stat().st_size, acceptance, llm.measure_costs())


def weigh(measured: Mapping[Kind, Observations]) -> dict[Kind, Trial]:
    """The gain of candidates, from how often they were right and the cost of batches and drafts. The target is the
    same with all of them: whatever else the machine did only added to a time, so the shortest ones count. What slowed
    the target down then also slowed down the draft next to it."""
    target_us: dict[int, float] = {}
    for one in measured.values():
        for n, us in one.costs.rows:
            target_us[n] = min(us, target_us.get(n, us))
    sizes = sorted(target_us)
    target = [target_us[n] for n in sizes]
    out = {}
    for kind, (n_bytes, acceptance, costs) in measured.items():
        slowed = dict(costs.rows)[sizes[0]] / target[0]
        lengths, draft = zip(*((k, us / slowed) for _, n_texts, k, us in costs.drafts if n_texts == 1))
        speeds = [
            1e6 * (1 + sum(acceptance[:k])) / float(np.interp(k + 1, sizes, target) + np.interp(k, lengths, draft))
            for k in range(1, max(len(acceptance), 1) + 1)
        ]
        best = int(np.argmax(speeds))
        out[kind] = Trial(
            kind.name, n_bytes, draft[-1] / lengths[-1] / 1e3, target[0] / 1e3, acceptance, best + 1, speeds[best]
        )  # fmt: skip
    return out
