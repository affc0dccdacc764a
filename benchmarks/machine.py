"""Everything that is measured about a machine, in one command: `python benchmarks/machine.py` writes its record.

    python benchmarks/machine.py                       what is missing in this machine's record
    python benchmarks/machine.py --list                the steps, their minutes on two cores, and which are there
    python benchmarks/machine.py --steps "answers *"   those alone (a pattern, or several separated by commas)
    python benchmarks/machine.py --again --steps loading
    PYFLY_ISA=avx2 python benchmarks/machine.py        kernels of older processors: a record of its own, named as forced

It needs the models `qwen2.5-coder-1.5b`, `-q8_0` and `-f16` of `fetch.py`, a quiet machine, and 20 GB of disk for the
files of larger shapes ($TMPDIR has them while they are timed). It refuses a busy machine. Every step runs in processes
of its own. When others used the processor meanwhile, it waits until they are done and does the step again.

The record (`records/machine-NAME.json.gz`) is written after every step, so an interrupted run resumes. It holds every
single timing with its conditions: processor, instruction set, threads, memory, versions, compilers, commit. A record of
other versions, or of other sources of the kernels or the governor, is not continued: `--again` begins it anew.
`tables.py` makes tables of records.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import end_to_end
import fetch
import kernels
import loading
import moe_model
import over_http
import provenance
import shapes
import task_prompts
import throughput
from common import add_threads, read_record

from pyfly_cpp.errors import counted
from pyfly_cpp.machine.conditions import Watch, describe_model, disturbance, is_disturbing, used_by_others

RECORDS = Path(__file__).parent / "records"
TINY = Path(__file__).parents[1] / "models" / "tiny" / "tiny-llama-target-f16.gguf"

MODELS = {
    "q4_k_m": "qwen2.5-coder-1.5b", "q8_0": "qwen2.5-coder-1.5b-q8_0", "f16": "qwen2.5-coder-1.5b-f16",
}  # fmt: skip
"""By their word in the names of steps: their names in `fetch.py`."""

ATTEMPTS = 3
"""Times that a step is done, at most, until nobody disturbs it."""

PATIENCE = 1200.0
"""Seconds to wait for a machine that became busy."""


@dataclass(frozen=True)
class Step:
    """A part of the record."""

    name: str
    minutes: float
    """On two cores of a server, about."""
    model: str | None
    """Its key in MODELS; None: it needs none."""
    measure: Callable[..., Any]
    """Measures, in a process of its own, with the model's path (if it needs one); returns what JSON can hold."""


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rows: Sequence[int] = kernels.ROWS
    few_rows: Sequence[int] = (1, 2, 4, 8, 16, 32)
    prompt_rows: Sequence[int] = (1, 8, 512)
    behind: Sequence[int] = (0, 4096, 16384)
    repeats: int = 3
    n: int = 96
    """Tokens of an answer of Q4_K_M."""
    n_slow: int = 48
    """Of the slower files."""
    n_ctx: int = end_to_end.CONTEXT
    n_ctx_long: int = 10240
    kinds: Sequence[str] = tuple(kind for kind in task_prompts.KINDS if kind != "summary-8k")
    some_kinds: Sequence[str] = ("edit", "summary-2k", "tests", "chat", "story")
    """One of each row of README's table, for the slower files."""
    few_kinds: Sequence[str] = ("edit", "chat", "story")
    """For these at a temperature above 0."""
    copying_kinds: Sequence[str] = ("spelling", "edit", "extract", "summary-2k")
    """For llama-cpp-python's own prompt lookup."""
    long_kinds: Sequence[str] = ("summary-8k",)
    per_kind: int = 2
    requests: Sequence[int] = (1, 4, 8, 16)
    n_requests: int = 16
    """Prompts of all requests."""
    sizes: Sequence[str] = ("3b", "7b", "14b")
    apart: Sequence[str] = ("14b",)
    """Sizes that do not fit in memory twice."""
    experts: moe_model.Experts = field(default_factory=moe_model.Experts)
    turns: int = 3


FULL = Scale()
QUICK = Scale(
    rows=(1, 2), few_rows=(1, 2), prompt_rows=(1, 8), behind=(0, 16), repeats=1, n=16, n_slow=16, n_ctx=512,
    n_ctx_long=512, kinds=("explain",), some_kinds=("story",), few_kinds=("story",), copying_kinds=("story",),
    long_kinds=("maths",), per_kind=1, requests=(1, 2), n_requests=4, sizes=("tiny",), apart=(), turns=1,
    experts=moe_model.Experts(1, n_embd=256, n_heads=4, n_groups=2, n_experts=4, n_used=2, n_expert=256, n_vocab=256),
)  # fmt: skip
"""To see that every step works: its figures mean nothing."""


# ---- The steps -------------------------------------------------------------------------------------------------------


def plan(scale: Scale, threads: int) -> list[Step]:
    """All steps, in their order."""
    costs = functools.partial(kernels.measure, threads=threads)
    ask = functools.partial(_ask, n_ctx=scale.n_ctx, threads=threads)
    steps = [
        Step("roofline", 0.3, None, functools.partial(kernels.roofline, threads)),
        Step("loading", 0.7, "q4_k_m", functools.partial(loading.measure, turns=scale.turns, threads=threads)),
        Step("costs q4_k_m", 1, "q4_k_m", functools.partial(costs, rows=scale.rows, repeats=scale.repeats)),
        Step(
            "costs q4_k_m long", 4, "q4_k_m",
            functools.partial(costs, rows=scale.prompt_rows, behind=scale.behind, repeats=min(2, scale.repeats)),
        ),
        Step(
            "answers q4_k_m 0", 10, "q4_k_m",
            functools.partial(ask, kinds=scale.kinds, per_kind=scale.per_kind, n=scale.n, temperature=0.0),
        ),
        Step(
            "answers q4_k_m 0.7", 5, "q4_k_m",
            functools.partial(ask, kinds=scale.kinds, per_kind=1, n=scale.n, temperature=0.7),
        ),
        Step(
            "stock lookup q4_k_m", 3, "q4_k_m",
            functools.partial(
                ask, kinds=scale.copying_kinds, per_kind=1, n=scale.n, temperature=0.0,
                names=("llama.cpp", "stock lookup", "stock lookup 2", "auto"),
            ),
        ),
        Step(
            "long documents q4_k_m", 5, "q4_k_m",
            functools.partial(
                ask, kinds=scale.long_kinds, per_kind=1, n=scale.n, temperature=0.0, n_ctx=scale.n_ctx_long,
                names=("llama.cpp", "auto"),
            ),
        ),
    ]  # fmt: skip
    for word, minutes in (("q8_0", 2), ("f16", 3.5)):
        steps.append(
            Step(f"costs {word}", 1, word, functools.partial(costs, rows=scale.few_rows, repeats=scale.repeats))
        )
        for temperature, kinds in ((0.0, scale.some_kinds), (0.7, scale.few_kinds)):
            own = functools.partial(ask, kinds=kinds, per_kind=1, n=scale.n_slow, temperature=temperature)
            steps.append(Step(f"answers {word} {temperature:g}", minutes, word, own))
    prompts = [str(task_prompts.FOLDER / f"{kind}.jsonl") for kind in ("explain", "maths", "story", "code")]
    words = ["--prompts", *prompts, "--limit", str(scale.n_requests), "--threads", str(threads)]
    words += ["--tokens", str(min(48, scale.n))]
    parallel = ["--parallel", ",".join(map(str, scale.requests)), "--ways", "plain,lookup:governed", "--repeats", "1"]
    steps.append(Step("requests q4_k_m", 3, "q4_k_m", functools.partial(_requests, words=[*words, *parallel])))
    if (server := shutil.which("llama-server")) is not None:
        own = ["--server", server, "--slots", "1", "--clients", "1", "--turns", "1"]
        steps.append(Step("server q4_k_m", 5, "q4_k_m", functools.partial(_server, words=[*words, *own])))
    for size in scale.sizes:
        is_apart = size in scale.apart
        minutes = {"3b": 1.0, "7b": 2.0}.get(size, 4.0)
        own_costs = functools.partial(costs, rows=scale.few_rows, repeats=scale.repeats, apart=is_apart)
        steps.append(Step(f"shape {size}", minutes, "q4_k_m", functools.partial(_shape, size=size, measure=own_costs)))
    own_costs = functools.partial(costs, rows=scale.few_rows, repeats=scale.repeats)
    steps.append(Step("shape experts", 1, None, functools.partial(_experts, shape=scale.experts, measure=own_costs)))
    return steps


def _ask(
    model: str, *, kinds: Sequence[str], per_kind: int, n: int, temperature: float, n_ctx: int, threads: int,
    names: Sequence[str] = ("llama.cpp", "plain", "auto"),
) -> list[end_to_end.Row]:  # fmt: skip
    prompts = task_prompts.pick(kinds, per_kind)
    return end_to_end.ask(model, prompts, names=names, n=n, temperature=temperature, n_ctx=n_ctx, threads=threads)


def _requests(model: str, words: Sequence[str]) -> list[dict[str, Any]]:
    return throughput.measure(["--target", model, *words])[1]


def _server(model: str, words: Sequence[str]) -> list[dict[str, Any]]:
    return over_http.measure(["--target", model, *words])[1]


def _shape(source: str, size: str, measure: Callable[..., Any]) -> list[kernels.Costs]:
    """The costs of a model of a larger one's shape."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/{size}.gguf"
        shapes.write(source, path, shapes.SHAPES[size])
        os.sync()  # else the system writes it to the disk while it is timed
        return list(measure(path))


def _experts(shape: moe_model.Experts, measure: Callable[..., Any]) -> list[kernels.Costs]:
    """Those of a mixture of experts."""
    with tempfile.TemporaryDirectory() as folder:
        moe_model.write(f"{folder}/experts.gguf", shape)
        path = kernels.quantised(f"{folder}/experts.gguf", "Q4_K_M", folder)
        os.sync()
        return list(measure(path))


# ---- The record ------------------------------------------------------------------------------------------------------


class Record:
    """A machine's, in a file that is whole after every step."""

    def __init__(self, path: Path, machine: dict[str, Any], begin_anew: bool, is_quick: bool) -> None:
        """Raises SystemExit if the file is of other conditions."""
        self.path = path
        self.data: dict[str, Any] = {"machine": machine, "quick": is_quick, "models": {}, "steps": {}}
        if not path.exists() or begin_anew:
            return
        found = read_record(path)
        other = [name for name in provenance.SAME if found["machine"].get(name) != machine[name]]
        if other or found["quick"] != is_quick:
            raise SystemExit(
                f"{path} was measured with another {' and '.join(other) or 'scale'}; --again begins it anew, and "
                "--record names another file."
            )
        self.data = found

    def require_model(self, word: str, path: Path) -> None:
        """Notes a model that a step is measured with. Raises SystemExit if it is not that of earlier steps."""
        about = describe_model(path)
        known = self.data["models"].setdefault(word, about)
        if known != about:
            raise SystemExit(f"{path} is not the file of the steps that {self.path} has; --again begins it anew.")

    def add(self, name: str, step: dict[str, Any]) -> None:
        """Adds a step, or replaces it, and writes the file: all of it or nothing. Raises SystemExit if it cannot."""
        self.data["steps"][name] = step
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.partial")
        try:
            partial.write_bytes(gzip.compress(json.dumps(self.data, indent=1).encode(), mtime=0))
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise SystemExit(f"{self.path} cannot be written: {error}") from None
        os.replace(partial, self.path)


def default_path(machine: dict[str, Any]) -> Path:
    """Where a machine's record is."""
    words = [provenance.slug(machine["processor"]), *([machine["isa"], "forced"] if machine["isa_is_forced"] else [])]
    return RECORDS / f"machine-{'-'.join(words)}.json.gz"


def in_process(step: Step, model: Path | None) -> Any:
    """What a step measures, in a process of its own, so that no thread and no memory of it is left."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_end_with_parent) as pool:
        arguments = () if model is None else (str(model),)
        return pool.submit(step.measure, *arguments).result()


def _end_with_parent() -> None:
    """This process ends when its parent is killed: else it would go on, and disturb the run that resumes."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def wait_until_quiet() -> None:
    """Raises SystemExit if that takes too long."""
    end = time.monotonic() + PATIENCE
    while is_disturbing(used := used_by_others(2.0)):
        if time.monotonic() > end:
            raise SystemExit(f"Other programs use {used:.1f} cores; run the same command to resume when they are done.")
        print(f"other programs use {used:.1f} cores; waiting", flush=True)
        time.sleep(15)


def undisturbed(step: Step, model: Path | None, commit: str | None, is_quick: bool) -> dict[str, Any]:
    """A step as the record has it, done again if others used the processor meanwhile. Raises SystemExit if they never
    stop."""
    for _ in range(ATTEMPTS):
        if not is_quick:
            wait_until_quiet()
        watch, begin = Watch(), time.monotonic()
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        measured = in_process(step, model)
        used, seconds = watch.used(), round(time.monotonic() - begin, 1)
        if is_quick or not is_disturbing(used):
            return {
                "command": f"python benchmarks/machine.py --steps '{step.name}'", "commit": commit, "started": started,
                "seconds": seconds, "used_by_others": used, "measured": measured,
            }  # fmt: skip
        print(f"{step.name}: other programs used {used:.1f} cores meanwhile; it is done again", flush=True)
    raise SystemExit(f"{step.name} was disturbed {ATTEMPTS} times; run the same command to resume on a quiet machine.")


# ---- The command -----------------------------------------------------------------------------------------------------


def chosen(steps: Sequence[Step], patterns: str | None) -> list[Step]:
    """The steps that are asked for, in their order. Raises SystemExit if a pattern fits none."""
    if patterns is None:
        return list(steps)
    words = [word.strip() for word in patterns.split(",")]
    for word in words:
        if not any(fnmatch(step.name, word) for step in steps):
            raise SystemExit(f"no step is called {word!r}; there are {', '.join(step.name for step in steps)}.")
    return [step for step in steps if any(fnmatch(step.name, word) for word in words)]


def path_of(word: str, is_quick: bool) -> Path:
    """A model's file. Raises SystemExit if it is not here."""
    path = TINY if is_quick else fetch.locate(MODELS[word])
    if path is None:
        raise SystemExit(f"{MODELS[word]} is not here; run `python benchmarks/fetch.py {MODELS[word]}`.")
    return path


def show(steps: Sequence[Step], done: Sequence[str]) -> None:
    """The steps, as `--list` shows them."""
    for step in steps:
        print(f"{'*' if step.name in done else ' '} {step.minutes:4.1f} min  {step.name}")
    missing = [step.minutes for step in steps if step.name not in done]
    print(f"{counted(len(missing), 'step')} to do, about {sum(missing):.0f} minutes; * is in the record")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", metavar="PATTERN,...", help="names of steps, with * for anything")
    parser.add_argument("--list", action="store_true", help="show the steps and measure nothing")
    parser.add_argument(
        "--again", action="store_true", help="measure steps that are there; without --steps, begin anew"
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="another file than that of this machine")
    add_threads(parser)
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and a few tokens, to see that every step works"
    )
    given = parser.parse_args(words)
    scale = QUICK if given.quick else FULL
    steps = chosen(plan(scale, given.threads), given.steps)
    provenance.require_installed()
    machine = provenance.describe(given.threads)
    if given.quick and given.record is None:
        parser.error("--quick needs --record: its figures mean nothing.")
    record = Record(given.record or default_path(machine), machine, given.again and given.steps is None, given.quick)
    if given.list:
        return show(steps, record.data["steps"])
    if not given.quick and (why := disturbance(machine)) is not None:
        raise SystemExit(f"{why[0].upper()}{why[1:]} A busy machine is not measured.")
    missing = [step for step in steps if given.again or step.name not in record.data["steps"]]
    paths = {step.model: path_of(step.model, given.quick) for step in missing if step.model is not None}
    try:
        for i, step in enumerate(missing, 1):
            print(f"[{i} of {len(missing)}] {step.name}, about {step.minutes:g} minutes", flush=True)
            if step.model is not None:
                record.require_model(step.model, paths[step.model])
            record.add(step.name, undisturbed(step, paths.get(step.model), machine["commit"], given.quick))
    except KeyboardInterrupt:
        raise SystemExit("Interrupted. Run the same command to resume.") from None
    print(
        f"{record.path} has {counted(len(record.data['steps']), 'step')}; "
        "`python benchmarks/tables.py` makes the tables."
    )


if __name__ == "__main__":
    main()
