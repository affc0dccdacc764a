"""One prompt, one setting, one measured generation: what evaluation and benchmark have in common.

Speed is that of decoding: the tokens after the first step over the seconds after it. The first step's batch also
holds the end of the prompt, so it is charged to neither; and since the prompt is not timed, settings that are measured
on one prompt may share its KV cache. A caller that forgets to look at the prompt's cost finds it in `seconds_prompt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pyfly_cpp.decoding import PLAIN, Decoding
from pyfly_cpp.decoding.drafters import PromptLookup, has_head
from pyfly_cpp.decoding.resolve import Resolved
from pyfly_cpp.engine.output import Piece
from pyfly_cpp.engine.request import Request
from pyfly_cpp.engine.stats import Record, Stats, Step
from pyfly_cpp.llama.fly_llama import FlyLlama
from pyfly_cpp.llama.prompting import render_chat

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt."""

    tokens: tuple[int, ...]
    stop: tuple[str, ...]
    """Texts that end the answer: the task's and the chat format's."""


@dataclass(frozen=True)
class Asked:
    """A request to make: the prompt, and how to answer it."""

    key: Any
    """Whose it is, for the caller."""
    prompt: Prompt
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    temperature: float = 0.0
    """0: the most probable ones."""
    seed: int = 0
    """Seed of the first generation; each has its own, independent of the setting."""

    def seed_of(self, i: int) -> int | None:
        """The seed of generation i; None if nothing is drawn. (The largest 32-bit number is llama.cpp's word for any
        seed.)"""
        return (self.seed + i) % (2**32 - 1) if self.temperature > 0 else None

    def described(self, n: int) -> str:
        """For people, with n generations."""
        if self.temperature == 0:
            return "greedy"
        seeds = f"seed {self.seed}" if n == 1 else f"seeds {self.seed} to {self.seed_of(n - 1)}"
        return f"temperature {self.temperature:g}, {seeds}"


@dataclass(frozen=True)
class Generated:
    """One generation."""

    text: str
    """Without the stop text and what follows it."""
    tokens: tuple[int, ...]
    """All that came out, the end-of-text token excluded."""
    finish: str
    """`"eog"`, `"stop"`, `"length"` (max_tokens) or `"context"` (full)."""
    seconds_prompt: float
    """Until the first step's tokens were there."""
    decode_tokens: int
    """Tokens after the first step, an end-of-text token included."""
    decode_seconds: float
    """Until the last of them was there."""
    stats: Stats
    """Counters of this generation, its first step included."""
    records: tuple[Record, ...] = ()
    """With trace, one for each token, an end-of-text token included."""
    steps: tuple[Step, ...] = ()
    arrivals: tuple[float, ...] = ()
    """When the tokens of each step came, which come together: seconds of wall time after the beginning."""


class Generator:
    """Decodes prompts with changing settings on one loaded target."""

    def __init__(self, llm: FlyLlama, drafters: Resolved = Resolved((PromptLookup(),))) -> None:  # noqa: B008 - frozen
        """
        Args:
            llm: The target; gate, window, drafter, draft_max and adaptive are set by every generation. Settings that
                use its own MTP head need it loaded with that head.
            drafters: What drafts, and what the drafter words of settings stand for.
        """
        self.llm = llm
        self.drafters = drafters

    @property
    def n_ctx(self) -> int:
        """Most tokens of a request."""
        return int(self.llm.n_ctx())

    def require(self, settings: Sequence[Decoding]) -> None:
        """Loads every drafter once, so that what is not there or does not fit is known before hours are spent.

        Raises:
            ValueError, IncompatibleDraftError: a setting asks for what cannot be.
        """
        for setting in settings:
            if setting.draft_max is not None and setting.draft_max > self.llm.n_batch - 1:
                raise ValueError(
                    f"the setting {str(setting)!r} drafts {setting.draft_max} tokens, but a batch holds "
                    f"{self.llm.n_batch}; "
                    "lower k."
                )
            if has_head(self.llm.drafter):
                self.llm.drafter = None  # loaded anew, it is checked against this setting's K
            self.configure(setting)
            self.llm.loaded.warn_of_gate()

    def render(self, messages: Sequence[dict[str, str]], prefix: str = "", stop: Sequence[str] = ()) -> Prompt:
        """Applies the model's chat template, by the base class's own chat handler, and puts `prefix` into the
        assistant's mouth."""
        tokens, own_stop, _ = render_chat(self.llm, messages)
        if prefix:
            tokens += self.llm.tokenize(prefix.encode("utf-8"), add_bos=False, special=False)
        return Prompt(tuple(tokens), tuple(dict.fromkeys([*stop, *own_stop])))

    def share_prefix(self, prompts: Sequence[Prompt]) -> int:
        """Evaluates what all prompts begin with, once, so that every one of them starts from the very same cache, in
        whatever order and after however many interruptions they are run. Warms up on the way.

        Returns:
            Its length; pass it to `forget` before every prompt.
        """
        first = prompts[0].tokens
        n = min(len(p.tokens) for p in prompts) - 1
        for prompt in prompts[1:]:
            n = next((i for i in range(n) if prompt.tokens[i] != first[i]), n)
        self.llm.reset()
        self._first_step(first[: n + 1], PLAIN)
        self.forget(n)
        return n

    def hold(self, prompt: Prompt, settings: Sequence[Decoding]) -> int:
        """Makes ready for generations from `prompt` with all of `settings`, in whatever order: evaluates all of it but
        its last token, with the target and with what drafts for the first setting that drafts. Kernels round by the
        size of a batch, and a near-tie in the prompt's end must not hang on who evaluated it.

        Nothing is held if a setting has a head, which must see the target evaluate the prompt, or if the memory
        (recurrent layers) cannot go back: then every generation evaluates the prompt anew.

        Returns:
            How much to keep; pass it to `forget` before every generation from `prompt`.
        """
        drafting = [setting for setting in settings if not setting.is_plain]
        if not self.llm.can_speculate or any(has_head(self.drafters.of(setting).drafter) for setting in drafting):
            return 0
        # An adaptive setting would take this for a request.
        for setting in (PLAIN, *[setting for setting in drafting if not setting.adaptive][:1]):
            self._first_step(prompt.tokens, setting)
            self.forget(len(prompt.tokens) - 1)
        return len(prompt.tokens) - 1

    def _first_step(self, tokens: Sequence[int], setting: Decoding) -> None:
        self.configure(setting)
        stream = self.llm.generate(list(tokens), temp=0.0)
        next(stream)
        stream.close()

    def forget(self, n_keep: int) -> None:
        """Leaves at most the first `n_keep` tokens of the context; none if the model's memory (recurrent layers)
        cannot go back to them."""
        if not self.llm.can_speculate:
            n_keep = 0
        self.llm.n_tokens = min(self.llm.n_tokens, n_keep)

    def configure(self, setting: Decoding) -> None:
        """Makes the target decode with `setting`. A plain one leaves a draft model loaded and asks it for nothing."""
        llm = self.llm
        k = 0 if setting.is_plain else setting.draft_max
        llm.decoding = replace(setting, draft_max=k, adaptive=bool(setting.adaptive))
        if setting.is_plain:
            if has_head(llm.drafter):
                llm.drafter = None  # as long as there is a head, the target keeps hidden states for it
            return
        wanted = self.drafters.of(setting)
        if llm.resolved != wanted:
            llm.drafter = wanted

    def generate(
        self,
        prompt: Prompt,
        setting: Decoding,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> Generated:
        """Generates at most `max_tokens` tokens.

        Raises:
            ContextFullError: the prompt does not fit. An answer that does not fit ends with finish `"context"`.
        """
        self.configure(setting)
        if seed is not None:
            self.llm.set_seed(seed)
        self.llm.reset_stats()
        request = request_for(self.llm, prompt, max_tokens, temperature)
        return generated(request, self.llm.run(request), self.llm.stats)


def rotated(entries: Sequence[T], i: int) -> list[T]:
    """Entries in the order in which they take their i-th turn: another one begins each time."""
    first = i % len(entries)
    return [*entries[first:], *entries[:first]]


def request_for(llm: FlyLlama, prompt: Prompt, max_tokens: int, temperature: float) -> Request:
    """The request that a generation is."""
    output = llm.new_output(prompt.tokens, prompt.stop, max_tokens)
    request = llm.new_request(prompt.tokens, output, sampling={"temp": temperature})
    request.log_steps = True
    return request


def generated(request: Request, pieces: Sequence[Piece], stats: Stats) -> Generated:
    """The result of a request that has ended."""
    assert request.output is not None and request.output.cause is not None
    tokens, arrivals, n_arrived = request.tokens, request.arrivals, request.n_arrived
    return Generated(
        "".join(piece.text for piece in pieces), tuple(tokens[:-1] if request.output.cause == "eog" else tokens),
        request.output.cause, arrivals[0] - request.begun, sum(n_arrived[1:]), arrivals[-1] - arrivals[0], stats,
        tuple(request.records), tuple(request.steps), tuple(moment - request.begun for moment in arrivals),
    )  # fmt: skip
