"""The options that `chat` and `complete` share, under the names they have in Python."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from pyfly_cpp.auto import choose_drafter
from pyfly_cpp.drafters import MTP, AnyDrafter, DraftModel, Eagle3, PromptLookup, require_drafters
from pyfly_cpp.files import require_gguf
from pyfly_cpp.gates import All, Gate, Margin, parse_gate
from pyfly_cpp.gates import Any as AnyGate
from pyfly_cpp.models import resolve_model
from pyfly_cpp.presets import drafter_as_dict, load_preset
from pyfly_cpp.threads import AUTO
from pyfly_cpp.window import RULES, Window

DEFAULT_N_CTX = 4096
LOSSLESS = "exact"
CHAT_GATE = "margin:0.3"

# One token is no evidence of a repetition; two often are. The governor decides how many drafts are worth verifying.
LOOKUP_MIN_NGRAM = 2
LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Options:
    """The shared options as given."""

    model: str | None
    draft: str | None
    drafter: str
    draft_max: int | None
    p_min: float
    draft_n_ctx: int | None
    max_ngram_size: int
    min_ngram_size: int
    num_pred_tokens: int
    adaptive: bool
    gate: Gate
    window: int
    window_rule: str
    window_tail: int | None
    across_rounds: bool | None
    n_ctx: int | None
    n_batch: int
    n_gpu_layers: int
    n_threads: int | str
    flash_attn: bool
    chat_format: str | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int | None
    max_tokens: int
    verbose: bool
    preset: str | None = None
    """A preset file; what it says stands in the fields above already, where no option said otherwise."""
    preset_drafter: AnyDrafter | None = None
    """Its drafter, unless --drafter or --draft said otherwise."""

    def choose_drafter(self, model: Path) -> tuple[AnyDrafter | None, str]:
        """What drafts for this model, and why. With `auto`: the preset's drafter, else the MTP head that the model
        carries, else the draft model that was given, else prompt lookup."""
        if self.preset_drafter is not None:
            return self.preset_drafter, f"the preset {Path(self.preset or '').name}"
        why = f"--drafter {self.drafter}"
        if self.drafter in ("draft", "both", "eagle3") and self.draft is None:
            raise click.UsageError(f"--drafter {self.drafter} needs --draft PATH.")
        if self.drafter in ("lookup", "none") and self.draft is not None:
            raise click.UsageError(f"--draft and --drafter {self.drafter} contradict each other; leave one out.")
        if self.drafter == "none":
            return None, why
        draft = None if self.draft is None else resolve_model(self.draft)
        limit: dict[str, int] = {} if self.draft_max is None else {"draft_max": max(1, self.draft_max)}
        lookup = PromptLookup(
            max_ngram_size=self.max_ngram_size,
            min_ngram_size=min(self.min_ngram_size, self.max_ngram_size),
            num_pred_tokens=self.num_pred_tokens,
        )
        if self.drafter == "lookup":
            return lookup, why
        if self.drafter == "mtp":
            return MTP(draft, p_min=self.p_min, **limit), why
        if self.drafter == "eagle3":
            assert draft is not None
            return Eagle3(draft, p_min=self.p_min, **limit), why
        given = None
        if draft is not None:
            given = DraftModel(draft, p_min=self.p_min, n_ctx=self.draft_n_ctx, **limit)
        if self.drafter == "both":
            assert given is not None
            return (lookup, given), why
        if self.drafter == "draft":
            return given, why
        require_gguf(str(model))
        chosen = choose_drafter(model, given)
        return (lookup if isinstance(chosen.drafter, PromptLookup) else chosen.drafter), chosen.reason

    def make_window(self, gate: Gate) -> Window:
        """The window. With `auto` its rule follows the gate: reconverge for margins, which is what they were made with
        (short drafts could never fulfil agree), agree for everything else."""
        rule = self.window_rule
        if rule == "auto":
            rule = "reconverge" if _bounded_by_margin(gate) else "agree"
        return Window(size=self.window, rule=rule, tail=self.window_tail, across_rounds=self.across_rounds)

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of `create_completion` and `create_chat_completion`."""
        names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty")
        return {**{name: getattr(self, name) for name in names}, "seed": self.seed, "max_tokens": self.max_tokens}

    def as_dict(self) -> dict[str, Any]:
        """All of them, fit for JSON."""
        out = {field.name: getattr(self, field.name) for field in fields(self)}
        drafters = [drafter_as_dict(drafter) for drafter in require_drafters(self.preset_drafter)]
        return {**out, "gate": str(self.gate), "preset_drafter": drafters}


_DRAFTER_OPTIONS = {
    PromptLookup: ("max_ngram_size", "min_ngram_size", "num_pred_tokens"),
    DraftModel: ("p_min", "draft_n_ctx"),
    MTP: ("p_min",),
    Eagle3: ("p_min",),
}
"""The options that change a field of a preset's drafter."""


def _with_preset(options: dict[str, Any], is_given: Callable[[str], bool]) -> dict[str, Any]:
    """The options with what the preset says, where they were not given; raises PresetError.

    A preset was measured with drafts of full length, so the governor is off unless --adaptive says so."""
    preset = load_preset(options["preset"])
    window = preset.window
    said = {
        "model": preset.model,
        "gate": preset.gate,
        "window": window.size,
        "window_rule": window.rule,
        "window_tail": window.tail,
        "across_rounds": window.across_rounds,
        "draft_max": preset.draft_max if preset.drafter is not None else options["draft_max"],
        "adaptive": False,
    }
    out = {**options, **{name: value for name, value in said.items() if not is_given(name)}}
    drafters = require_drafters(preset.drafter)
    has_draft = any(isinstance(drafter, DraftModel) for drafter in drafters)
    if is_given("drafter") or (is_given("draft") and not has_draft):
        return out
    if not drafters:
        return {**out, "drafter": "none"}
    parts = []
    for drafter in drafters:
        names = [name for name in _DRAFTER_OPTIONS[type(drafter)] if is_given(name)]
        changes = {name.replace("draft_n_ctx", "n_ctx"): options[name] for name in names}
        if isinstance(drafter, DraftModel) and is_given("draft"):
            changes["model_path"] = resolve_model(options["draft"])
        parts.append(replace(drafter, **changes))
    return {**out, "preset_drafter": parts[0] if len(parts) == 1 else tuple(parts)}


def _bounded_by_margin(gate: Gate) -> bool:
    if isinstance(gate, All):
        return any(_bounded_by_margin(part) for part in gate.gates)
    if isinstance(gate, AnyGate):
        return all(_bounded_by_margin(part) for part in gate.gates)
    return isinstance(gate, Margin)


class _GateType(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A gate in its written form."""

    name = "gate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return parse_gate(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


THREADS_HELP = "Threads; auto: the physical cores, fewer while other programs use some."


class ThreadCount(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A number of threads, or "auto"."""

    name = "threads"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == AUTO:
            return AUTO
        try:
            return int(click.IntRange(min=1).convert(value, param, ctx))
        except click.BadParameter:
            self.fail(f"{value!r} is not a number of threads from 1 on, or 'auto'.", param, ctx)


_Function = TypeVar("_Function", bound=Callable[..., Any])
_Decorator = Callable[[_Function], _Function]


class _Int(click.IntRange):
    """An integer that fits into C's int."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not -(2**31) <= number < 2**31:
            self.fail(f"{number} is too large; the largest is {2**31 - 1}.", param, ctx)
        return number


class _Real(click.FloatRange):
    """A number: neither infinite nor NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


_COUNT = _Int(min=1)
_SIZE = _Int(min=0)


def shared_options(*, gate: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command the shared options; it gets them as one argument, `options: Options`.

    Args:
        gate: The default of --gate, in its written form.
    """
    lossy = " (may differ from plain decoding; `exact` never does)" if gate != LOSSLESS else " (lossless)"
    options: list[Callable[[Any], Any]] = [
        click.option("-m", "--model", metavar="MODEL", help="GGUF file, or a name of `pyfly-cpp models list`.  "
                     "[default: the demo model]"),
        click.option("--preset", metavar="FILE",
                     help="Preset of `pyfly-cpp tune`: its models, drafter, gate and window; options go before it."),
        click.option("-d", "--draft", metavar="MODEL", help="Small GGUF model of the same vocabulary, or a head."),
        click.option("--drafter", type=click.Choice(["auto", "lookup", "draft", "mtp", "eagle3", "both", "none"]),
                     default="auto", show_default=True,
                     help="What proposes tokens; auto: the model's MTP head, else --draft, else prompt lookup."),
        click.option("--adaptive/--no-adaptive", default=True, show_default=True,
                     help="Draft only what pays here: measured as it goes. Without it every round drafts in full."),
        click.option("--draft-max", metavar="N", type=_SIZE, help="Most tokens in a round (K); 0 decodes plainly."),
        click.option("--p-min", metavar="X", type=_Real(0, 1), default=0.0, show_default=True,
                     help="Draft model: stop where its top probability falls under this."),
        click.option("--draft-n-ctx", metavar="N", type=_Int(min=16),
                     help="Draft model: its context.  [default: the target's]"),
        click.option("--max-ngram-size", metavar="N", type=click.IntRange(1, 64), default=4, show_default=True,
                     help="Prompt lookup: longest n-gram."),
        click.option("--min-ngram-size", metavar="N", type=click.IntRange(1, 64), default=LOOKUP_MIN_NGRAM,
                     show_default=True, help="Prompt lookup: shortest n-gram."),
        click.option("--num-pred-tokens", metavar="N", type=_COUNT, default=LOOKUP_TOKENS, show_default=True,
                     help="Prompt lookup: most tokens in a round."),
        click.option("--gate", type=_GateType(), default=gate, show_default=True,
                     help="exact, margin:TAU, entropy:THETA or entropy-normalized:THETA" + lossy + "."),
        click.option("--window", metavar="N", type=_SIZE, default=6, show_default=True,
                     help="Positions W that decide on a mismatch."),
        click.option("--window-rule", type=click.Choice(["auto", *RULES]), default="auto", show_default=True,
                     help="What must happen in them; auto: reconverge for margin gates, else agree."),
        click.option("--window-tail", metavar="N", type=_SIZE, help="Strict positions at the end of a round."),
        click.option("--across-rounds/--no-across-rounds", default=None,
                     help="Whether an undecided mismatch outlives its round.  [default: with reconverge]"),
        click.option("-c", "--n-ctx", metavar="N", type=_SIZE,
                     help=f"Context in tokens; 0: the model's.  [default: {DEFAULT_N_CTX}, or the model's if less]"),
        click.option("--n-batch", metavar="N", type=_COUNT, default=512, show_default=True,
                     help="Largest batch in tokens."),
        click.option("--n-gpu-layers", metavar="N", type=_Int(min=-1), default=-1,
                     help="Layers on the GPU.  [default: all, if llama-cpp-python was built for one]"),
        click.option("-t", "--n-threads", metavar="N", type=ThreadCount(), default=AUTO, show_default=True,
                     help=THREADS_HELP),
        click.option("--flash-attn/--no-flash-attn", default=False, help="Flash attention.  [default: off]"),
        click.option("--chat-format", metavar="NAME", help="Chat format.  [default: the model's own template]"),
        click.option("--temperature", metavar="X", type=_Real(min=0), default=0.0, show_default=True,
                     help="0 takes the most probable token; more is more varied (0.7 is usual)."),
        click.option("--top-k", metavar="N", type=_Int(), default=40, show_default=True, help="0: off."),
        click.option("--top-p", metavar="X", type=_Real(0, 1), default=0.95, show_default=True,
                     help="1: off."),
        click.option("--min-p", metavar="X", type=_Real(0, 1), default=0.05, show_default=True,
                     help="0: off."),
        click.option("--repeat-penalty", metavar="X", type=_Real(), default=1.0, show_default=True, help="1: off."),
        click.option("--frequency-penalty", metavar="X", type=_Real(), default=0.0, show_default=True, help="0: off."),
        click.option("--presence-penalty", metavar="X", type=_Real(), default=0.0, show_default=True, help="0: off."),
        click.option("--seed", metavar="N", type=click.IntRange(0, 2**32 - 1), help="Seed of the sampling."),
        click.option("-n", "--max-tokens", metavar="N", type=_SIZE, default=1024, show_default=True,
                     help="Longest answer in tokens; 0: as the context allows."),
        click.option("--verbose", is_flag=True, help="Show llama.cpp's log."),
    ]  # fmt: skip

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(**given: Any) -> Any:
            own = {field.name: given.pop(field.name) for field in fields(Options) if field.name in given}
            if own["preset"] is not None:
                source = click.get_current_context().get_parameter_source
                own = _with_preset(own, lambda name: source(name) is not ParameterSource.DEFAULT)
            return function(options=Options(**own), **given)

        decorated: Callable[..., Any] = wrapper
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate
