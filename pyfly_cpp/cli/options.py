"""The options that `chat` and `complete` share, under the names they have in Python."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from pyfly_cpp.cli.headings import acceptance, drafting, machine, sampling
from pyfly_cpp.cli.kinds import COUNT, SEED, SIZE, THREAD_COUNT, GateType, Int, Real
from pyfly_cpp.cli.where import KERNELS_OPTION, WHERE_OPTIONS, Where
from pyfly_cpp.decoding.data import drafter_as_data
from pyfly_cpp.decoding.drafters import (
    DRAFTERS,
    WORDS,
    AnyDrafter,
    Option,
    OwnDrafter,
    PathOption,
    PromptLookup,
    as_given,
    options_of,
    require_drafters,
)
from pyfly_cpp.decoding.drafting import AUTO, choose_drafters, with_draft
from pyfly_cpp.decoding.gates import Gate, examples
from pyfly_cpp.decoding.presets import SHIPPED, load_preset
from pyfly_cpp.decoding.windows import RULES, Window
from pyfly_cpp.machine.cache_types import CACHE_WORDS
from pyfly_cpp.machine.threads import AUTO as AUTO_THREADS
from pyfly_cpp.models.named import resolve_model

DEFAULT_N_CTX = 4096
_SEEDS = 2**32 - 1  # the largest 32-bit number asks llama.cpp for a seed of its own

DRAFTER_OPTIONS = options_of(DRAFTERS.values())
WINDOW_OPTIONS = {"window": "size", "window_tail": "tail", "across_rounds": "across_rounds"}
"""The options that change a field of the window, and the fields; --window-rule, which has a word for none, besides."""


@dataclass(frozen=True)
class Options:
    """The shared options as given."""

    model: str | None
    draft: str | None
    drafter: str
    draft_max: int | None
    drafting: dict[str, Any]
    """`DRAFTER_OPTIONS` by their names."""
    adaptive: bool
    gate: Gate
    window: int | None
    window_rule: str
    window_tail: int | None
    across_rounds: bool | None
    n_ctx: int | None
    n_batch: int
    n_gpu_layers: int
    n_threads: int | str
    flash_attn: bool | None
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
    kernels: str | None = None
    where: Where = Where()  # noqa: RUF009 - frozen
    preset: str | None = None
    """A preset file; what it says stands in the fields above already, where no option said otherwise."""
    preset_drafter: AnyDrafter | None = None
    """Its drafter, unless --drafter or --draft said otherwise."""

    lora: str | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"

    def choose_drafter(self, model: Path) -> tuple[AnyDrafter | None, str]:
        """What drafts for this model, and why, as `choose_drafters` has it."""
        drafter, why = self._choose_drafter(model)
        if not any(isinstance(one, PromptLookup) for one in require_drafters(drafter)):
            for flag in ("lookup_texts", "lookup_memory"):
                if self.drafting[flag]:
                    words = flag.replace("_", "-")
                    raise click.UsageError(f"--{words} is for prompt lookup; add --drafter lookup, or both.")
        return self.where.place(drafter), why

    def _choose_drafter(self, model: Path) -> tuple[AnyDrafter | None, str]:
        if self.preset_drafter is not None:
            return self.preset_drafter, f"the preset {Path(self.preset or '').name}"
        kinds = WORDS.get(self.drafter, ())
        if self.draft is None and any(kind.needs_file for kind in kinds):
            raise click.UsageError(f"--drafter {self.drafter} needs --draft PATH.")
        if self.draft is not None and self.drafter != AUTO and not any(kind.takes_file for kind in kinds):
            raise click.UsageError(f"--draft and --drafter {self.drafter} contradict each other; leave one out.")
        if self.drafter == "none":
            return None, "--drafter none"
        draft = None if self.draft is None else resolve_model(self.draft)
        drafters, why = choose_drafters(model, draft, self.drafter, make=self._make)
        return drafters.default, why

    def _make(self, kind: type[OwnDrafter], file: Path | None = None) -> Any:
        fields = {option.field: self.drafting[option.name] for option in kind.options}
        if self.draft_max is not None:
            fields["draft_max"] = max(1, self.draft_max)
        return kind.make(file, **fields)

    def make_window(self, gate: Gate) -> Window | None:
        """The window for a gate: its own but for what was given; None, its own, where nothing was."""
        changes = {field: getattr(self, name) for name, field in WINDOW_OPTIONS.items()}
        changes["rule"] = None if self.window_rule == "auto" else self.window_rule
        given = {field: value for field, value in changes.items() if value is not None}
        return gate.window.but(**given) if given else None

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of `create_completion` and `create_chat_completion`, for one request: without --seed each
        that samples gets another seed."""
        names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty")
        seed = secrets.randbelow(_SEEDS) if self.seed is None and self.temperature > 0 else self.seed
        return {**{name: getattr(self, name) for name in names}, "seed": seed, "max_tokens": self.max_tokens}

    def as_dict(self) -> dict[str, Any]:
        """All of them, fit for JSON."""
        out = {field.name: getattr(self, field.name) for field in fields(self)}
        drafters = [drafter_as_data(drafter) for drafter in require_drafters(self.preset_drafter)]
        where = out.pop("where").as_dict()
        return {**out.pop("drafting"), **out, **where, "gate": str(self.gate), "preset_drafter": drafters}


def _with_preset(options: dict[str, Any], is_given: Callable[[str], bool]) -> dict[str, Any]:
    """The options with what the preset says, where they were not given; raises PresetError.

    A preset with a drafter was measured with drafts of full length, so the governor is off unless --adaptive says so.
    """
    preset = load_preset(options["preset"])
    decoding = preset.decoding
    said = {
        "model": preset.model,
        "gate": decoding.gate,
        "draft_max": decoding.draft_max if decoding.drafter != "none" else options["draft_max"],
        "adaptive": preset.leaves_drafter if decoding.adaptive is None else decoding.adaptive,
    }
    gate = options["gate"] if is_given("gate") else decoding.gate
    if decoding.window is not None and not gate.draws:
        said["window_rule"] = decoding.window.rule
        said.update({name: getattr(decoding.window, field) for name, field in WINDOW_OPTIONS.items()})
    out = {**options, **{name: value for name, value in said.items() if not is_given(name)}}
    if preset.leaves_drafter or is_given("drafter"):
        return out
    if not preset.drafters:
        return out if is_given("draft") else {**out, "drafter": "none"}
    parts = [
        drafter.but(**{o.field: options["drafting"][o.name] for o in drafter.options if is_given(o.name)})
        for drafter in with_draft(preset.drafters, resolve_model(options["draft"]) if is_given("draft") else None)
    ]
    return {**out, "preset_drafter": as_given(parts)}


TEMPERATURE_HELP = "0 takes the most probable token; more is more varied (0.7 is usual)."
THREADS_HELP = "Threads; auto: the physical cores, fewer while other programs use some."


_Function = TypeVar("_Function", bound=Callable[..., Any])
_Decorator = Callable[[_Function], _Function]


def _drafter_option(option: Option | PathOption) -> Callable[[Any], Any]:
    flag = f"--{option.name.replace('_', '-')}"
    if isinstance(option, PathOption):
        return drafting(flag, option.name, metavar="PATH", multiple=option.is_many, help=option.help)
    is_share = isinstance(option.default, float)
    high = None if option.high is None else int(option.high)
    kind = Real(option.low, option.high) if is_share else Int(int(option.low), high)
    return drafting(
        flag, option.name, metavar="X" if is_share else "N", type=kind, default=option.default,
        show_default=option.default is not None, help=option.help,
    )  # fmt: skip


def shared_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the shared options; it gets them as one argument, `options: Options`."""
    options: list[Callable[[Any], Any]] = [
        click.option("-m", "--model", metavar="MODEL", help="GGUF file, or a name of `pyfly-cpp models list`.  "
                     "[default: the demo model]"),
        click.option("--preset", metavar="PRESET",
                     help=f"{', '.join(SHIPPED)} (how much is accepted loosely), or a file of `pyfly-cpp tune`: its "
                          "models, drafter, gate and window; options override it."),
        click.option("-d", "--draft", metavar="FILE",
                     help="Small GGUF model (with --drafter cross, of any vocabulary), or a head."),
        click.option("--drafter", metavar="WORD", type=click.Choice([AUTO, *WORDS, "none"]),
                     default=AUTO, show_default=True,
                     help=f"What proposes tokens: {', '.join(WORDS)} or none; auto: the model's MTP head, else "
                          "--draft, else a fitting file on this machine (see `models pair`), else prompt lookup."),
        click.option("--gate", type=GateType(), default="exact", show_default=True,
                     help=f"{examples(combined=False)}; all but exact and stochastic may differ from plain "
                          "decoding. With guards: all(margin:0.3,exact-first:8,budget:2,no-repeat:8)."),
        click.option("-c", "--n-ctx", metavar="N", type=SIZE,
                     help=f"Context in tokens; 0: the model's.  [default: {DEFAULT_N_CTX}, or the model's if less]"),
        click.option("-t", "--n-threads", metavar="N", type=THREAD_COUNT, default=AUTO_THREADS, show_default=True,
                     help=THREADS_HELP),
        click.option("--temperature", metavar="X", type=Real(min=0), default=0.0, show_default=True,
                     help=TEMPERATURE_HELP),
        click.option("--seed", metavar="N", type=SEED,
                     help="Seed of the sampling.  [default: another for each answer]"),
        click.option("-n", "--max-tokens", metavar="N", type=SIZE, default=1024, show_default=True,
                     help="Longest answer in tokens; 0: as the context allows."),
        drafting("--adaptive/--no-adaptive", default=True, show_default=True,
                 help="Draft only what pays here, as measured on the way. Without it every round drafts in full."),
        drafting("--draft-max", metavar="N", type=SIZE, help="Most tokens in a round (K); 0 decodes plainly."),
        *(_drafter_option(option) for option in DRAFTER_OPTIONS),
        acceptance("--window", metavar="N", type=SIZE,
                   help="How many positions (W) decide on a mismatch.  [default: the gate's own]"),
        acceptance("--window-rule", type=click.Choice(["auto", *RULES]), default="auto", show_default=True,
                   help="What must happen in them; auto: the gate's own rule."),
        acceptance("--window-tail", metavar="N", type=SIZE, help="Strict positions at the end of a round."),
        acceptance("--across-rounds/--no-across-rounds", default=None,
                   help="Whether an undecided mismatch outlives its round.  [default: the rule's own]"),
        sampling("--top-k", metavar="N", type=Int(), default=40, show_default=True, help="0: off."),
        sampling("--top-p", metavar="X", type=Real(0, 1), default=0.95, show_default=True,
                 help="1: off."),
        sampling("--min-p", metavar="X", type=Real(0, 1), default=0.05, show_default=True,
                 help="0: off."),
        sampling("--repeat-penalty", metavar="X", type=Real(), default=1.0, show_default=True, help="1: off."),
        sampling("--frequency-penalty", metavar="X", type=Real(), default=0.0, show_default=True, help="0: off."),
        sampling("--presence-penalty", metavar="X", type=Real(), default=0.0, show_default=True, help="0: off."),
        machine("--chat-format", metavar="NAME", help="Chat format.  [default: the model's own template]"),
        machine("--n-batch", metavar="N", type=COUNT, default=512, show_default=True,
                help="Largest batch in tokens."),
        machine("--n-gpu-layers", metavar="N", type=Int(min=-1), default=-1,
                help="Layers on the GPU.  [default: all, if llama-cpp-python was built for one]"),
        *WHERE_OPTIONS,
        KERNELS_OPTION,
        machine("--flash-attn/--no-flash-attn", default=None,
                help="Flash attention.  [default: on if our kernels compute it, see --kernels]"),
        machine("--cache-type-k", type=click.Choice(list(CACHE_WORDS)), default="f16", show_default=True,
                help="Type of the K cache."),
        machine("--cache-type-v", type=click.Choice(list(CACHE_WORDS)), default="f16", show_default=True,
                help="Type of the V cache; a quantised one needs --flash-attn."),
        machine("--lora", metavar="FILE", help="LoRA adapter of the model."),
        machine("--verbose", is_flag=True, help="Show llama.cpp's log."),
    ]  # fmt: skip

    @functools.wraps(function)
    def wrapper(**given: Any) -> Any:
        own = {field.name: given.pop(field.name) for field in fields(Options) if field.name in given}
        own["where"] = Where.take(given)
        own["drafting"] = {option.name: given.pop(option.name) for option in DRAFTER_OPTIONS}
        if own["preset"] is not None:
            source = click.get_current_context().get_parameter_source
            own = _with_preset(own, lambda name: source(name) is not ParameterSource.DEFAULT)
        return function(options=Options(**own), **given)

    decorated: Callable[..., Any] = wrapper
    for option in reversed(options):
        decorated = option(decorated)
    return decorated
