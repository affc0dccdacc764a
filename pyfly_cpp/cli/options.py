"""The options of the commands that answer (`chat`, `complete`, `serve`), under the names they have in Python."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
from click.core import ParameterSource

from pyfly_cpp.cli.headings import Declared, acceptance, declares, drafting, number, sampling
from pyfly_cpp.cli.kinds import GATE, SEED, SIZE, WINDOW, Int, Length, Real
from pyfly_cpp.cli.loading import MEMORY_OPTIONS, Models, model_options
from pyfly_cpp.decoding import Decoding
from pyfly_cpp.decoding.gates import Gate, examples
from pyfly_cpp.decoding.resolve import Resolved

T = TypeVar("T")

_SEEDS = 2**32 - 1  # the largest 32-bit number asks llama.cpp for a seed of its own


class _Sampling(NamedTuple):
    kind: click.ParamType  # type: ignore[type-arg,unused-ignore]
    default: float | None
    help: str


_SAMPLING = {
    "temperature": _Sampling(Real(min=0), 0.0, "0: always the most probable token; higher: more varied."),
    "seed": _Sampling(SEED, None, "Seed for sampling.  [default: another for each answer]"),
    "max_tokens": _Sampling(Length(), 1024, "Maximum answer length in tokens; 0 or -1: as the context allows."),
    "top_k": _Sampling(Int(), 40, "0: off."),
    "top_p": _Sampling(Real(0, 1), 0.95, "1: off."),
    "min_p": _Sampling(Real(0, 1), 0.05, "0: off."),
    "repeat_penalty": _Sampling(Real(), 1.0, "1: off."),
    "frequency_penalty": _Sampling(Real(), 0.0, "0: off."),
    "presence_penalty": _Sampling(Real(), 0.0, "0: off."),
}
"""Arguments of `create_completion`, and what a conversation keeps besides gate and window."""

_RECOMMENDED = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repeat_penalty": "penalty_repeat",
}  # fmt: skip
"""Keys of a GGUF file's metadata, behind `general.sampling.`."""

_CHAT_TEMPERATURE = 0.7

_KINDS = {"gate": GATE, "window": WINDOW, **{name: option.kind for name, option in _SAMPLING.items()}}
_MAY_BE_NONE = ("window", "seed")


@dataclass(frozen=True)
class Options:
    """How to answer: what is loaded, how it is decoded, how it is sampled."""

    models: Models
    gate: Gate | None
    """None: the preset's, or exact."""
    window: str | None
    """Words that change the window of the preset, or of the gate."""
    draft_max: int | None
    adaptive: bool | None
    sampling: Mapping[str, Any]
    """Arguments of `create_completion`; without a seed each answer gets its own."""
    given: frozenset[str] = frozenset()
    """Which of these somebody asked for."""

    @property
    def decoding(self) -> Decoding:
        """The setting of the options; the preset has the rest. Raises ValueError: gate and window do not go
        together."""
        return self.models.setting(
            window_words=self.window, gate=self.gate, draft_max=self.draft_max, adaptive=self.adaptive
        )

    def load(self, kind: Callable[..., T], *first: Any, **arguments: Any) -> T:
        """Loads the model as a `FlyLlama` or `FlyBatch`, with what drafts for it.

        Args:
            first: Arguments behind the model's path.

        Raises:
            ValueError, PyflyError, UsageError: a file is missing or unfit, or options do not go together.
        """
        decoding = self.decoding
        if decoding.drafter == "none":
            self.models.require_use([])
            resolved = Resolved(reason="--drafter none" if self.models.drafter == "none" else "the preset sets it")
        else:
            resolved = self.models.resolved()
        return self.models.load(kind, *first, **{**vars(decoding), "drafter": resolved, **arguments})

    def request(self) -> dict[str, Any]:
        """Keyword arguments of `create_completion` and `create_chat_completion`, for one request."""
        seed = self.sampling["seed"]
        if seed is None and self.sampling["temperature"] > 0:
            seed = secrets.randbelow(_SEEDS)
        return {**self.sampling, "seed": seed}

    def for_chat(self, metadata: Mapping[str, str]) -> Options:
        """These for talking: sampled as the model's metadata recommends, or else at 0.7, except for what was set."""
        wanted: dict[str, Any] = {"temperature": _CHAT_TEMPERATURE}
        for name, key in _RECOMMENDED.items():
            with contextlib.suppress(KeyError, ValueError):
                wanted[name] = _read(name, metadata[f"general.sampling.{key}"])
        sampling = {**self.sampling, **{name: wanted[name] for name in wanted if name not in self.given}}
        return replace(self, sampling=sampling)

    # ---- What a conversation keeps of them ---------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Gate, window and sampling, fit for JSON."""
        decoding = self.decoding
        words = [str(part) for part in (self.models.setting().window, self.window) if part is not None]
        window = None if decoding.window is None else " ".join(words)
        return {"gate": str(decoding.gate), "window": window, **self.sampling}

    def restored(self, path: Path, settings: Mapping[str, Any]) -> Options:
        """These with what `saved` has kept in the file `path`. Raises ValueError: a value is none of its option."""
        known = {name: settings[name] for name in _KINDS if name in settings}
        try:
            return self._with({name: _read(name, value) for name, value in known.items()})
        except ValueError as error:
            raise ValueError(f"{str(path)!r} has a wrong setting: {error} Nothing was loaded.") from None

    def changed(self, text: str) -> tuple[Options, str]:
        """These after `/set NAME VALUE`, and the new setting for people; all of them if the text is empty.

        Raises:
            ValueError: there is no such setting, or it cannot have that value.
        """
        if not text:
            return self, ", ".join(map(self._shown, self.sampling))
        name, _, value = text.partition(" ")
        name, value = {"temp": "temperature"}.get(name, name.replace("-", "_")), value.strip()
        if name not in _SAMPLING:
            names = ", ".join(_SAMPLING).replace("_", "-")
            raise ValueError(f"there is no setting {name!r} to change here. The settings are {names}.")
        said = {name: _read(name, None if value == "none" else value)} if value else {}
        options = self._with(said) if said else self
        return options, options._shown(name)

    def _shown(self, name: str) -> str:
        """A sampling setting as /set takes it."""
        value = self.sampling[name]
        return f"{name.replace('_', '-')} {'none' if value is None else value}"

    def _with(self, said: dict[str, Any]) -> Options:
        of_sampling = {name: said.pop(name) for name in _SAMPLING if name in said}
        return replace(self, sampling={**self.sampling, **of_sampling}, **said)


def _read(name: str, value: Any) -> Any:
    """A value as its option takes it; raises ValueError."""
    if value is None and name in _MAY_BE_NONE:
        return None
    try:
        return _KINDS[name].convert(f"{value}", None, None)
    except click.BadParameter as error:
        message = error.message[:100].rstrip(".")
        raise ValueError(f"{name.replace('_', '-')} cannot be {f'{value}'[:60]!r}: {message}.") from None


def _sampling_option(name: str, in_chat: bool) -> Declared:
    option = _SAMPLING[name]
    is_recommended = in_chat and name in _RECOMMENDED  # see `Options.for_chat`
    default = _CHAT_TEMPERATURE if name == "temperature" else option.default
    shown = f"  [default: the model's own recommendation, or {default}]" if is_recommended else ""
    names = ["-n"] * (name == "max_tokens") + [f"--{name.replace('_', '-')}"] + ["--temp"] * (name == "temperature")
    declare = click.option if name in ("temperature", "max_tokens") else sampling
    return number(
        *names, declare=declare, kind=option.kind, default=option.default, show_default=not is_recommended,
        help=option.help + shown,
    )  # fmt: skip


TEMPERATURE_OPTION = number(
    "--temperature", "--temp", declare=sampling, kind=_SAMPLING["temperature"].kind, default=0.0,
    help=_SAMPLING["temperature"].help,
)  # fmt: skip
SAMPLING_OPTIONS = [
    TEMPERATURE_OPTION,
    number("--seed", declare=sampling, kind=SEED, default=0,
           help="Seed for sampling; with several prompts, for the first."),
]  # fmt: skip
"""The sampling options of commands that measure, greedy by default."""


def _options(in_chat: bool) -> list[Declared]:
    return [
        acceptance("--gate", type=GATE,
                   help=f"{examples(combined=False)}. exact: the same answer as without drafts, also when sampling. "
                   "stochastic: same probabilities. All others can change answers. Several together: "
                   "all(margin:0.3,exact-first:8).  [default: the preset's, or exact]"),
        *(_sampling_option(name, in_chat) for name in _SAMPLING),
        drafting("--adaptive/--no-adaptive", default=None,
                 help="Draft only when that is faster, as measured while decoding. Off: always draft the full length.  "
                 "[default: adaptive unless --draft-max, or a preset with a drafter, sets the length]"),
        drafting("--draft-max", metavar="N", type=SIZE, help="Maximum number of drafted tokens per step (K); 0: none."),
        *MEMORY_OPTIONS,
        acceptance("--window", metavar="WORDS", type=WINDOW,
                   help="Condition for keeping a mismatch: agree:W or reconverge:W, tail=N, across or in-round; "
                   "the rest is as in the gate's own window."),
    ]  # fmt: skip


def shared_options(in_chat: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command these options, and those of `model_options`; it gets them as one argument, `options: Options`.

    Args:
        in_chat: The command samples by `Options.for_chat`, which the help then shows.
    """

    def give(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_options(
            *, models: Models, gate: Gate | None, window: str | None, draft_max: int | None, adaptive: bool | None,
            **given: Any,
        ) -> Any:  # fmt: skip
            of_sampling = {name: given.pop(name) for name in _SAMPLING}
            source = click.get_current_context().get_parameter_source
            asked = frozenset(name for name in _SAMPLING if source(name) is not ParameterSource.DEFAULT)
            return function(options=Options(models, gate, window, draft_max, adaptive, of_sampling, asked), **given)

        return model_options(declares(_options(in_chat))(with_options))

    return give
