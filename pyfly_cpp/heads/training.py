"""Training a head: texts, states, learning, the file, and its speed."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyfly_cpp.decoding.drafters import Eagle3, PromptLookup
from pyfly_cpp.decoding.resolve import resolve
from pyfly_cpp.errors import PyflyError, counted
from pyfly_cpp.heads.asking import ask_for_prompts, read_asked
from pyfly_cpp.heads.plan import LEAST_TOKENS, TrainingPlan
from pyfly_cpp.heads.state_file import read_states, write_states
from pyfly_cpp.heads.texts import N_TEXT, FilesRead, Tell, Text, in_turn, texts_of_files, write_answers
from pyfly_cpp.llama.fly_llama import FlyLlama
from pyfly_cpp.machine.files import only_writer, require_writable, resumable, write_atomically
from pyfly_cpp.machine.rows import DataError
from pyfly_cpp.models.metadata import TARGET_KEY, fingerprint

if TYPE_CHECKING:
    from pyfly_cpp.heads.fit import Fit
    from pyfly_cpp.heads.target import TargetFile

N_PASSES = 8
"""Most passes over the texts."""

SHARE_OF_TEXTS = 0.5
"""Share of the time for texts and states; the rest is for learning."""

SHARE_OF_WRITING = 0.63
"""Share of that for answers of the target; the rest is for reading them: 33 and 19 ms a token (1.5B, Zen 3). Where
reading is faster, learning begins earlier; what could not be read is lost."""

SHARE_OF_ASKING = 0.1
"""Most of the time for writing that the target may take to make up prompts; 0.013 was enough (1.5B, 150,000
tokens in 0.8 hours, Zen 5)."""

TOKENS_OF_TURN = 1500
"""Tokens of one prompt of each kind with its answer: five built-in ones of 272 and a made-up one of 207 in the mean
(1.5B)."""

MADE_UP = "made up"
"""The kind of these prompts."""


@dataclass(frozen=True)
class Speeds:
    """Tokens per second, governed."""

    plain: float
    """Without drafts."""
    without_head: float
    """With what drafts by default where there is no head."""
    with_head: float
    """With prompt lookup and the head."""

    @property
    def is_worth_it(self) -> bool:
        """Whether the head makes decoding faster than it is by default without it."""
        return self.with_head > self.without_head


@dataclass(frozen=True)
class Trained:
    """The result of a training."""

    path: Path
    n_tokens: int
    """Number of tokens that it learned from."""
    acceptance: tuple[float, ...]
    """How often the first 1, 2, 3 drafts are all right, on answers that were not learned from."""
    by_kind: dict[str, tuple[float, ...]]
    speeds: Speeds | None
    """None: not measured."""


def train_head(
    plan: TrainingPlan,
    *,
    tell: Tell | None = None,
    log: Callable[[str], None] | None = None,
    measure: bool = True,
    seed: int = 0,
    **arguments: Any,
) -> Trained:
    """Trains a head as planned. Run again with the same plan, it resumes after an interruption; from the
    learning on, the output is a head that can be used.

    Args:
        tell: Called with a name for the work and the share done, 0..1; an exception from it stops everything.
        log: Called with a line after each pass, and with the reason if the speeds cannot be measured.
        measure: Whether the speeds with and without the head are measured at the end.
        seed: Seed of the first weights and of the order of the texts.
        **arguments: Arguments of the target's `FlyLlama` (threads, GPU layers).

    Raises:
        DataError: there are too few texts, one of the files that were read has changed, or the folder holds a training
            of another target.
        NotFiniteError: the target's hidden states or weights are not numbers; some texts with such states are left out.
        OutputError: the disk is full, or another process trains here.
    """
    from pyfly_cpp.heads.fit import Dataset, Fit, spans_of
    from pyfly_cpp.heads.target import TargetFile

    tell, log = tell or (lambda what, done: None), log or (lambda line: None)
    settings = {"verbose": False, **arguments}
    begun = time.monotonic()
    require_writable(plan.folder)
    with only_writer(plan.folder / "lock"):
        print_of_target = _require_same(plan)
        texts = _texts(plan, begun, tell, settings)
        states = plan.folder / "states.bin"
        with contextlib.closing(FlyLlama(plan.target, n_ctx=N_TEXT, n_batch=N_TEXT, **settings)) as llm:
            n_texts = write_states(states, llm, texts, plan.layers, begun + SHARE_OF_TEXTS * plan.hours * 3600, tell)
        target = TargetFile(plan.target)
        rows = read_states(states, target.n_embd)
        spans = spans_of(rows, texts)
        if n_lost := n_texts - len(spans):
            log(f"{counted(n_lost, 'text')} left out, because hidden states of theirs are not numbers")
        _require_enough(sum(span.end - span.begin for span in spans))
        data = Dataset(rows, spans, target)
        n = sum(span.end - span.begin for span in data.training)
        fit = Fit(data, target, plan.layers, seed, N_PASSES)
        checkpoint = plan.folder / "checkpoint.pt"
        if checkpoint.exists():
            fit.load(checkpoint)
        else:
            fit.begin()
        deadline, begun = begun + plan.hours * 3600, time.monotonic()
        if fit.best is None:  # the linear map, or there are more texts now
            fit.judge()
        _export(plan, target, fit, print_of_target, n)  # of another type, perhaps, than in the last run
        while not fit.has_ended and time.monotonic() < deadline:
            for done in fit.learn(deadline, begun):
                tell(f"learning, pass {fit.n_done + 1} of {N_PASSES}", done)
            found, is_best = fit.judge()
            log(f"pass {fit.n_done}: {_percent(found.by_depth)} of drafts right at depth 1, 2, 3 on other texts")
            if is_best:
                _export(plan, target, fit, print_of_target, n)
            with resumable(checkpoint, (OSError, RuntimeError)):  # PyTorch's own of a full disk
                fit.save(checkpoint)
    assert fit.best is not None
    speeds = _measure(plan, data.prompts()[:N_MEASURED], tell, log, settings) if measure else None
    return Trained(plan.output, n, fit.best.by_depth, fit.best.by_kind, speeds)


def _require_same(plan: TrainingPlan) -> str:
    """Checks that the files in the folder were made from this target and these layers. Returns the target's
    fingerprint."""
    made_from = {
        "target": fingerprint(plan.target),
        "layers": list(plan.layers),
        "texts": str(plan.texts and plan.texts.resolve()),
        "head": "eagle3",
        "held_out": 2,  # the second rule of which texts these are
    }
    if plan.origin.exists() and json.loads(plan.origin.read_text(encoding="utf-8")) != made_from:
        raise DataError(
            f"{plan.folder} holds a training of another target, kind, version or texts; remove it, or choose another "
            "output."
        )
    write_atomically(plan.origin, json.dumps(made_from))
    return str(made_from["target"])


def _require_enough(n: int) -> None:
    if n < LEAST_TOKENS:
        raise DataError(
            f"{n} tokens of texts could be read, and a head needs at least {LEAST_TOKENS}; give more texts, or raise "
            "--hours."
        )


def _texts(plan: TrainingPlan, begun: float, tell: Tell, settings: dict[str, Any]) -> list[Text]:
    """All texts, written first if they are not there."""
    path, asked = plan.folder / "texts.jsonl", plan.folder / "prompts.jsonl"
    written = Text.read(path)
    kept = {text.prompt for text in written if not (plan.asks and text.kind == MADE_UP)}
    if plan.texts is None and not kept <= {prompt for of in plan.prompts.values() for prompt in of}:
        raise DataError(f"{plan.folder} holds answers to other prompts; remove it, or choose another output.")
    files = plan.texts and FilesRead(plan.folder / "files.jsonl", plan.texts)
    n = sum(len(text.tokens) for text in written)
    if plan.texts is None and n < plan.n_tokens:
        seconds, prompts = SHARE_OF_WRITING * SHARE_OF_TEXTS * plan.hours * 3600, dict(plan.prompts)
        if plan.asks:
            n_own = sum(text.kind == MADE_UP for text in written) + -(-(plan.n_tokens - n) // TOKENS_OF_TURN)
            ask_for_prompts(plan.target, asked, n_own, begun + SHARE_OF_ASKING * seconds, tell, **settings)
            prompts[MADE_UP] = read_asked(asked)
        write_answers(plan.target, list(in_turn(prompts)), path, plan.n_tokens, begun + seconds, tell, **settings)
    elif plan.texts and files and n < plan.n_tokens:
        with (
            resumable(path),
            contextlib.closing(FlyLlama(plan.target, vocab_only=True, **settings)) as llm,
            path.open("a", encoding="utf-8") as file,
        ):
            seen = {tuple(text.tokens) for text in written}  # a text that is there twice could be learned and held out
            for text in texts_of_files(plan.texts, llm, plan.folder, files.add):
                if tuple(text.tokens) not in seen:
                    seen.add(tuple(text.tokens))
                    text.append(file)
                    n += len(text.tokens)
                if n >= plan.n_tokens:
                    break
    texts = Text.read(path)
    _require_enough(sum(len(text.tokens) for text in texts))
    return texts


def _percent(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.1%}" for share in shares)


def _export(plan: TrainingPlan, target: TargetFile, fit: Fit, print_of_target: str, n_tokens: int) -> None:
    from pyfly_cpp.heads.export import write_gguf

    assert fit.best is not None
    best = fit.best

    def describe(writer: Any) -> None:
        writer.add_name(f"{target.name} EAGLE-3 head")
        writer.add_description("EAGLE-3 head, trained by pyfly-cpp from the target's GGUF file")
        if plan.licence:
            writer.add_license(plan.licence)
        writer.add_string("pyfly.target.name", target.name)
        writer.add_string(TARGET_KEY, print_of_target)
        writer.add_uint32("pyfly.texts.tokens", n_tokens)
        writer.add_array("pyfly.texts.kinds", sorted(best.by_kind))
        writer.add_array("pyfly.acceptance", [float(share) for share in best.by_depth])
        target.write_vocabulary(writer)

    with resumable(plan.output):
        write_gguf(plan.output, "eagle3", describe, fit.head.shape, fit.weights(), plan.kind)


N_MEASURED = 8
"""Prompts that the speed is measured with."""


def _measure(
    plan: TrainingPlan,
    prompts: Sequence[list[int]],
    tell: Tell,
    log: Callable[[str], None],
    settings: dict[str, Any],
) -> Speeds | None:
    """The speeds behind these prompts; None if the answers are too few or too short, or if they cannot be measured,
    of which `log` gets the reason: the head is written by then."""
    if not prompts:
        return None
    try:
        return _speeds(plan, prompts, tell, settings)
    except (PyflyError, ValueError, MemoryError) as error:  # of a default drafter's file, for instance
        log(f"the speed could not be measured: {f'{error}'.rstrip('.') or 'there is not enough memory'}")
        return None


def _speeds(plan: TrainingPlan, prompts: Sequence[list[int]], tell: Tell, settings: dict[str, Any]) -> Speeds | None:
    sides: tuple[Any, ...] = (
        None, resolve(plan.target, takes_heads=False), [PromptLookup(), Eagle3(plan.output)]
    )  # fmt: skip
    speeds = []
    for n_done, drafter in enumerate(sides):
        with contextlib.closing(FlyLlama(plan.target, n_ctx=2 * N_TEXT, drafter=drafter, **settings)) as llm:
            for i, prompt in enumerate(prompts):
                tell("measuring the speed", (n_done + i / len(prompts)) / len(sides))
                llm.create_completion(prompt, max_tokens=96, temperature=0.0)
            speeds.append(llm.stats.tokens_per_second)
    return None if math.isnan(sum(speeds)) else Speeds(*speeds)
