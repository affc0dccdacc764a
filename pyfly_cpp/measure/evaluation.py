"""Runs a task with several settings on the same items, so that it can be stopped at any moment and taken up again.

A run is a folder (journal.py), with a line for each item and setting. A line is written whole and flushed before the
next generation begins. Who runs when: runner.py. With several requests at a time the lines come as they are finished,
so their order differs from run to run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.repetition import find_loop
from pyfly_cpp.errors import PyflyError
from pyfly_cpp.machine.files import only_writer, require_writable
from pyfly_cpp.machine.rows import Row
from pyfly_cpp.measure.generator import Asked, Generated, Generator, Sampling
from pyfly_cpp.measure.journal import open_run
from pyfly_cpp.measure.runner import answer
from pyfly_cpp.measure.tasks.task import UNJUDGED, Item, Task, Verdict

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
    sampling: Sampling = Sampling()  # noqa: RUF009 - frozen
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
            **asdict(self.sampling),
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
    asked = _render(plan, generator)
    path = Path(folder)
    require_writable(path)
    with only_writer(path / ".lock"):
        n_total = len(plan.items) * len(plan.settings)
        kept = open_run(path, plan.identity(), n_total, force, machine)
        lines = list(kept.rows)
        done = {(line["item"], line["setting"]) for line in lines}
        if len(done) < n_total:

            def is_there(one: Asked, setting: Decoding) -> bool:
                return (one.key.id, str(setting)) in done

            for one, setting, made in answer(generator, asked, plan.settings, is_there):
                lines.append(kept.append(_line(plan, generator, one, setting, made)))
                if progress is not None:
                    progress(len(lines), n_total, lines[-1])
    return _in_order(plan, lines)


def _render(plan: Plan, generator: Generator) -> list[Asked]:
    """What to generate for each item; raises if a prompt, with its answer, does not fit."""
    asked = []
    room = generator.n_ctx
    for i, item in enumerate(plan.items):
        examples = plan.task.pick_examples(item, plan.examples, plan.few_shot) if plan.few_shot else []
        messages = plan.task.messages(item, examples)
        prompt = generator.render(messages, plan.task.prefix(item), plan.task.stop(item))
        if len(prompt.tokens) + plan.max_tokens > room:
            raise ValueError(
                f"item {item.id!r} has a prompt of {len(prompt.tokens)} tokens, which with {plan.max_tokens} of an "
                f"answer does not fit in the context of {room}; raise --n-ctx, or lower --few-shot or --max-tokens."
            )
        asked.append(Asked(item, prompt, plan.max_tokens, plan.sampling.temperature, plan.sampling.seed_of(i)))
    return asked


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


def _line(plan: Plan, generator: Generator, asked: Asked, setting: Decoding, generated: Generated) -> Row:
    item: Item = asked.key
    verdict = judge(plan.task, item, generated)
    text = generator.llm.detokenize(list(asked.prompt.tokens), special=True).decode("utf-8", "replace")
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
        "drafted_rounds": sum(1 for one in generated.steps if one.drafted),
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
