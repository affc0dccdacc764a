"""Runs a task with several settings on the same items, so that it can be stopped at any moment and taken up again.

A run is a folder: `run.json` describes it, `items.jsonl` has one line for each item and setting, `table.json` and
`table.md` are written at the end. A line is written whole and flushed before the next generation begins; what a killed
process left of a line is cut off when the run resumes. A folder of another run is refused.

Settings take turns on every item, and who begins changes from item to item, so that a machine that slows down slows all
of them. All settings start an item from one and the same cache (`Generator.share_prefix`, `Generator.hold`), so what
comes out depends neither on who begins nor on where the run was interrupted.

With a `ParallelGenerator` they take turns on blocks of items, each setting alone. The lines come as they are finished,
so their order differs from run to run; what a text is does not depend on its neighbours, except for the rounding
of kernels, which goes by the size of a batch.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.repetition import find_loop
from pyfly_cpp.errors import PyflyError
from pyfly_cpp.machine.files import only_writer, require_writable
from pyfly_cpp.machine.rows import Row
from pyfly_cpp.measure.generator import Generated, Generator, Prompt, Sampling, rotated
from pyfly_cpp.measure.journal import open_run
from pyfly_cpp.measure.parallel import Order, ParallelGenerator
from pyfly_cpp.measure.tasks.task import UNJUDGED, Item, Task, Verdict

_BLOCK = 4
"""Items in a block, for each text that runs at a time: at its end there are fewer texts than could run."""

Made = tuple[int, Decoding, Generated]
"""Generations by item and setting."""

Progress = Callable[[int, int, Row], None]
"""Called with (lines there are, lines there will be, the newest line)."""


class CodeExecutionError(ValueError):
    """A task would run what the model writes, and the caller has not allowed it."""


@dataclass(frozen=True)
class Plan:
    """The plan of a run; two runs of one plan are one run."""

    task: Task
    items: Sequence[Item]
    settings: Sequence[Decoding]
    examples: Sequence[Item] = ()
    few_shot: int = 0
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    allow_code_execution: bool = False
    conditions: tuple[tuple[str, Any], ...] = ()
    """Other conditions of the results, by name: model files, data file, threads, versions."""

    def identity(self) -> dict[str, Any]:
        """Conditions that must be equal for lines to stand in one table, fit for JSON."""
        return {
            "task": self.task.name,
            "items": [item.id for item in self.items],
            "settings": [str(setting) for setting in self.settings],
            "few_shot": self.few_shot,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            **dict(self.conditions),
        }


def require_permission(task: Task, allow_code_execution: bool) -> None:
    """Raises CodeExecutionError if the task runs code and that is not allowed, SandboxError if nothing contains it."""
    if task.runs_code and not allow_code_execution:
        raise CodeExecutionError(
            f"the task {task.name} executes code that the model writes; allow it with --allow-code-execution (how "
            "it is contained is in docs/tasks.md)."
        )
    task.require()


def run(
    plan: Plan,
    generator: Generator,
    folder: str | os.PathLike[str],
    force: bool = False,
    machine: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """Runs `plan`, or what is left of it, and returns all its lines.

    Args:
        folder: Of the run; made if need be.
        force: Start over if the folder holds a run. Other files are neither touched nor a reason to resume.
        machine: Noted in run.json with every start, for the record.

    Raises:
        CodeExecutionError: the task runs code and `allow_code_execution` is off.
        SandboxError: the task runs code and nothing contains it here.
        OutputError: the folder holds another run or other files, cannot be written to, or is being written to.
        ValueError: a prompt and its answer do not fit in the context, or a setting needs a drafter that is not there.
    """
    require_permission(plan.task, plan.allow_code_execution)
    generator.require(plan.settings)
    prompts = _render(plan, generator)
    path = Path(folder)
    require_writable(path)
    with only_writer(path / ".lock"):
        n_total = len(plan.items) * len(plan.settings)
        kept = open_run(path, plan.identity(), n_total, force, machine)
        lines = list(kept.rows)
        done = {(line["item"], line["setting"]) for line in lines}
        if len(done) < n_total:
            for made in _generate(plan, generator, prompts, done):
                lines.append(kept.append(_line(plan, generator, prompts[made[0]], made)))
                if progress is not None:
                    progress(len(lines), n_total, lines[-1])
    return _in_order(plan, lines)


def _render(plan: Plan, generator: Generator) -> list[Prompt]:
    """All prompts; raises if one, with its answer, does not fit."""
    prompts = []
    room = generator.n_ctx
    for item in plan.items:
        examples = plan.task.pick_examples(item, plan.examples, plan.few_shot) if plan.few_shot else []
        messages = plan.task.messages(item, examples)
        prompt = generator.render(messages, plan.task.prefix(item), plan.task.stop(item))
        if len(prompt.tokens) + plan.max_tokens > room:
            raise ValueError(
                f"item {item.id!r} has a prompt of {len(prompt.tokens)} tokens, which with {plan.max_tokens} of an "
                f"answer does not fit in the context of {room}; raise --n-ctx, or lower --few-shot or --max-tokens."
            )
        prompts.append(prompt)
    return prompts


def _generate(
    plan: Plan, generator: Generator, prompts: Sequence[Prompt], done: set[tuple[str, str]]
) -> Iterator[Made]:
    if isinstance(generator, ParallelGenerator):
        yield from _generate_in_parallel(plan, generator, prompts, done)
        return
    n_shared = generator.share_prefix(prompts)
    for i, (item, prompt) in enumerate(zip(plan.items, prompts)):
        settings = [setting for setting in rotated(plan.settings, i) if (item.id, str(setting)) not in done]
        if not settings:
            continue
        generator.forget(n_shared)
        n_held = generator.hold(prompt, plan.settings)
        for setting in settings:
            generator.forget(n_held)
            yield i, setting, generator.generate(prompt, setting, plan.max_tokens, plan.temperature, _seed(plan, i))


def _generate_in_parallel(
    plan: Plan, generator: ParallelGenerator, prompts: Sequence[Prompt], done: set[tuple[str, str]]
) -> Iterator[Made]:
    size = _BLOCK * generator.n_parallel
    for block, begin in enumerate(range(0, len(plan.items), size)):
        for setting in rotated(plan.settings, block):
            orders = [
                Order(i, prompts[i], plan.max_tokens, plan.temperature, _seed(plan, i))
                for i in range(begin, min(begin + size, len(plan.items)))
                if (plan.items[i].id, str(setting)) not in done
            ]
            if not orders:
                continue
            with contextlib.closing(generator.generate_all(orders, setting)) as made:
                for order, generated in made:
                    yield order.key, setting, generated


def _seed(plan: Plan, i: int) -> int | None:
    return Sampling(plan.temperature, plan.seed).seed_of(i)


def judge(task: Task, item: Item, generated: Generated) -> Verdict:
    """The task's verdict. An output that the task cannot judge is wrong: an error would meet every resumed run again.

    Raises PyflyError if it is not the output's fault (there is no sandbox any more).
    """
    try:
        return task.score(item, generated.text, generated.tokens)
    except PyflyError:
        raise
    except Exception as error:
        return Verdict(False, "", "", {UNJUDGED: f"{type(error).__name__}: {error}"[:300]})


def _line(plan: Plan, generator: Generator, prompt: Prompt, made: Made) -> Row:
    i, setting, generated = made
    item = plan.items[i]
    verdict = judge(plan.task, item, generated)
    text = generator.llm.detokenize(list(prompt.tokens), special=True).decode("utf-8", "replace")
    return {
        "item": item.id,
        "setting": str(setting),
        "group": item.unit,
        "correct": verdict.correct,
        "extracted": verdict.extracted,
        "expected": verdict.expected,
        "detail": verdict.detail,
        "loop": find_loop(generated.tokens) is not None,
        "finish": generated.finish,
        "drafted_rounds": sum(1 for one in generated.rounds if one.drafted),
        "margins": _margins(generated),
        "decode_tokens": generated.decode_tokens,
        "decode_seconds": generated.decode_seconds,
        "seconds_prompt": generated.seconds_prompt,
        "stats": generated.stats.as_dict(),
        "prompt": text,
        "output": generated.text,
        "tokens": list(generated.tokens),
    }


def _margins(generated: Generated) -> dict[str, list[float]]:
    """The margins in a traced generation: of loosely accepted tokens, and of tokens that a window took back."""
    kinds = {"loose": "loose", "window": "taken back"}
    margins: dict[str, list[float]] = {kind: [] for kind in kinds.values()}
    for record in generated.records:
        if record.reason in kinds and math.isfinite(record.margin):
            margins[kinds[record.reason]].append(round(record.margin, 4))
    return margins


def _in_order(plan: Plan, lines: Sequence[Row]) -> list[Row]:
    """The lines by item and setting of the plan; of one pair, the first counts."""
    by_pair: dict[tuple[str, str], Row] = {}
    for line in lines:
        by_pair.setdefault((line["item"], line["setting"]), line)
    pairs = [(item.id, str(setting)) for item in plan.items for setting in plan.settings]
    return [by_pair[pair] for pair in pairs if pair in by_pair]
