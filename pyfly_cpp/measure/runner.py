"""Who runs when: settings take turns on prompts, for a benchmark (`measure`) and for the items of a task (`answer`).

One request alone: the settings take turns on every prompt, and another begins each time, so that a machine that slows
down slows all of them. All settings start from one and the same cache (`Generator.share_prefix`, `Generator.hold`), so
what comes out depends neither on who begins nor on where the run was interrupted.

Several requests at a time, on a `ParallelGenerator`: the settings take turns on blocks of prompts. A benchmark keeps
the number of requests constant: when a block has no more for the slots that become free, some of its prompts run again
there, uncounted; so a block is measured as a whole. A task wants each answer once, in any order: what an answer is does
not depend on its neighbours, except for the rounding of kernels, which goes by the size of a batch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.machine.prompt_sets import BenchPrompt
from pyfly_cpp.measure.generator import Asked, Generated, Generator, Prompt, Sampling, rotated
from pyfly_cpp.measure.parallel import ParallelGenerator
from pyfly_cpp.measure.speed import Key, Measured, warm_up

_BLOCK_OF_BENCH = 2
"""Prompts in a block, for each of the most requests at a time, at least: so often does a slot become free."""

_BLOCK_OF_TASK = 4
"""Items in a block, for each request that runs at a time: at its end there are fewer requests than could run."""

_WARM_UP = 16  # tokens


def _in_turns(
    generator: Generator, asked: Asked, settings: Sequence[Decoding], i: int, there: Collection[str]
) -> Iterator[tuple[Decoding, Generated | None]]:
    """All settings on one prompt, from one and the same cache, in the order of their i-th turn; with None for those
    that are `there`."""
    n_held = 0 if all(str(setting) in there for setting in settings) else generator.hold(asked.prompt, settings)
    for setting in rotated(settings, i):
        if str(setting) in there:
            yield setting, None
            continue
        generator.forget(n_held)
        yield setting, generator.generate(asked.prompt, setting, asked.max_tokens, asked.temperature, asked.seed)


# ---- Tasks -----------------------------------------------------------------------------------------------------------


def answer(
    generator: Generator,
    asked: Sequence[Asked],
    settings: Sequence[Decoding],
    is_there: Callable[[Asked, Decoding], bool],
) -> Iterator[tuple[Asked, Decoding, Generated]]:
    """Generates with every setting for everything asked, once, but for what `is_there`; yields what is finished."""
    if isinstance(generator, ParallelGenerator):
        yield from _answer_in_blocks(generator, asked, settings, is_there)
        return
    n_shared = generator.share_prefix([one.prompt for one in asked])
    for i, one in enumerate(asked):
        there = {str(setting) for setting in settings if is_there(one, setting)}
        generator.forget(n_shared)
        for setting, made in _in_turns(generator, one, settings, i, there):
            if made is not None:
                yield one, setting, made


def _answer_in_blocks(
    generator: ParallelGenerator,
    asked: Sequence[Asked],
    settings: Sequence[Decoding],
    is_there: Callable[[Asked, Decoding], bool],
) -> Iterator[tuple[Asked, Decoding, Generated]]:
    size = _BLOCK_OF_TASK * generator.n_parallel
    for i, begin in enumerate(range(0, len(asked), size)):
        for setting in rotated(settings, i):
            wanted = [one for one in asked[begin : begin + size] if not is_there(one, setting)]
            if not wanted:
                continue
            with contextlib.closing(generator.generate_all(wanted, setting)) as finished:
                for one, made in finished:
                    yield one, setting, made


# ---- Benchmarks ------------------------------------------------------------------------------------------------------


def require_enough(prompts: Sequence[BenchPrompt], counts: Sequence[int]) -> None:
    """Raises ValueError if there are fewer prompts than requests at a time: they would share their prompts."""
    if len(prompts) < max(counts):
        raise ValueError(
            f"{max(counts)} requests at a time need as many prompts, and there are {len(prompts)}; give more, or lower "
            "--parallel."
        )


@dataclass
class _Measurements:
    """What was measured earlier, and what is measured now."""

    known: Mapping[Key, Measured]
    keep: Callable[[Measured], None] | None
    progress: Callable[[int, str], None] | None
    rows: list[Measured] = field(default_factory=list)

    def take_over(self, key: Key) -> Measured:
        """One that is known."""
        self.rows.append(self.known[key])
        return self.rows[-1]

    def add(self, row: Measured) -> None:
        """A new one, which is kept and told, in the place of one that may be known."""
        self.rows.append(row)
        if self.keep is not None:
            self.keep(row)
        if self.progress is not None:
            more = f", {row.n_parallel} requests" if row.n_parallel > 1 else ""
            self.progress(len(self.rows), f"{row.prompt.id} {row.setting}{more}")


def measure(
    generator: Generator,
    prompts: Sequence[BenchPrompt],
    settings: Sequence[Decoding],
    max_tokens: int,
    repeats: int = 1,
    progress: Callable[[int, str], None] | None = None,
    known: Mapping[Key, Measured] | None = None,
    keep: Callable[[Measured], None] | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    counts: Sequence[int] | None = None,
) -> list[Measured]:
    """Runs every setting on every prompt. A warm-up comes first and is not kept.

    In a conversation of several turns all settings get the history with the answers of the first setting, so that they
    are measured on the same prompts.

    Args:
        known: What was measured earlier and is not measured again.
        keep: Is given everything else as soon as it is measured.
        sampling: Every prompt of every pass has its own seed, the same for all settings.
        counts: Requests at a time, 1..n_parallel, on a `ParallelGenerator`: every setting runs with every number of
            them, of conversations the first turn. A block of prompts is known as a whole or measured again.

    Raises:
        ValueError: a prompt and its answer do not fit in the context, there are fewer prompts than requests at a time,
            or a setting needs a drafter that is not there.
    """
    if counts:
        require_enough(prompts, counts)
    generator.require(settings)
    measurements = _Measurements(known or {}, keep, progress)
    if counts:
        assert isinstance(generator, ParallelGenerator)
        _measure_several(generator, prompts, settings, max_tokens, repeats, sampling, counts, measurements)
    else:
        _measure_alone(generator, prompts, settings, max_tokens, repeats, sampling, measurements)
    return measurements.rows


def _measure_alone(
    generator: Generator, prompts: Sequence[BenchPrompt], settings: Sequence[Decoding], max_tokens: int, repeats: int,
    sampling: Sampling, measurements: _Measurements,
) -> None:  # fmt: skip
    known = measurements.known
    for prompt in prompts:
        # With answers of full length; nothing is lost in the middle because the last turn does not fit.
        turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": "."}] for text in prompt.turns]
        _render(generator, prompt, [message for turn in turns for message in turn][:-1], max_tokens * len(turns))
    warm_up(generator, prompts[0], settings)
    for repeat, (i, prompt) in itertools.product(range(repeats), enumerate(prompts)):
        messages: list[dict[str, str]] = []
        generator.forget(0)
        seed = sampling.seed_of(repeat * len(prompts) + i)
        for turn, text in enumerate(prompt.turns):
            messages.append({"role": "user", "content": text})
            rendered = _render(generator, prompt, messages, max_tokens)
            asked = Asked(None, rendered, max_tokens, sampling.temperature, seed)
            keys: dict[str, Key] = {str(setting): (prompt.id, turn, repeat, str(setting), 1) for setting in settings}
            there = {name for name, key in keys.items() if key in known}
            answers = {}
            for setting, made in _in_turns(generator, asked, settings, i + repeat, there):
                name = str(setting)
                if made is None:
                    row = measurements.take_over(keys[name])
                else:
                    row = Measured(prompt, turn, repeat, name, len(rendered.tokens), replace(made, records=()))
                    measurements.add(row)
                answers[name] = row.result.text
            messages.append({"role": "assistant", "content": answers[str(settings[0])]})


def _measure_several(
    generator: ParallelGenerator, prompts: Sequence[BenchPrompt], settings: Sequence[Decoding], max_tokens: int,
    repeats: int, sampling: Sampling, counts: Sequence[int], measurements: _Measurements,
) -> None:  # fmt: skip
    unseeded = []
    for i, prompt in enumerate(prompts):
        rendered = _render(generator, prompt, [{"role": "user", "content": prompt.turns[0]}], max_tokens)
        unseeded.append(Asked(i, rendered, max_tokens, sampling.temperature))
    n_blocks = max(1, len(unseeded) // (_BLOCK_OF_BENCH * max(counts)))
    blocks = [unseeded[i::n_blocks] for i in range(n_blocks)]
    cells = [(n, setting) for setting in settings for n in counts]
    for setting in settings:
        warm = [replace(one, max_tokens=_WARM_UP) for one in unseeded[: max(counts)]]
        for _ in generator.generate_all(warm, setting):
            pass
    for i, (repeat, some) in enumerate(itertools.product(range(repeats), blocks)):
        block = [replace(one, seed=sampling.seed_of(repeat * len(unseeded) + one.key)) for one in some]
        for n, setting in rotated(cells, i):
            keys = [(prompts[one.key].id, 0, repeat, str(setting), n) for one in block]
            if all(key in measurements.known for key in keys):
                for key in keys:
                    measurements.take_over(key)
                continue
            generator.forget_all()
            more = (replace(one, key=None) for one in itertools.cycle(block))
            n_wanted = len(measurements.rows) + len(block)
            with contextlib.closing(generator.generate_all(itertools.chain(block, more), setting, n)) as finished:
                while len(measurements.rows) < n_wanted:
                    one, made = next(finished)
                    if one.key is not None:
                        measurements.add(Measured(
                            prompts[one.key], 0, repeat, str(setting), len(one.prompt.tokens), made, n_parallel=n
                        ))  # fmt: skip


def _render(generator: Generator, prompt: BenchPrompt, messages: list[dict[str, str]], n_answers: int) -> Prompt:
    """The prompt of a conversation; raises ValueError if it does not fit with n_answers tokens of answers."""
    rendered = generator.render(messages)
    room = generator.n_ctx
    if len(rendered.tokens) + n_answers > room:
        raise ValueError(
            f"prompt {prompt.id!r} has {len(rendered.tokens)} tokens, which with {n_answers} of answers does not fit "
            f"in the context of {room}; raise --n-ctx, or lower --max-tokens."
        )
    return rendered
