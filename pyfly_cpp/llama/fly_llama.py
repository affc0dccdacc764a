"""`FlyLlama`: a `llama_cpp.Llama` that generates speculatively.

A subclass: chat formats, tools, grammars, caches, embeddings and `from_pretrained` are the base class's own. It
replaces `generate` (the native steps of `csrc/batch.cpp`), the loop of a completion (`engine/output.py` makes
its text), and saving and loading of states.

Here are its sequence, the start of a generation or completion, and its results; loading is in `guarded_llama.py`, what
drafts in `drafting_llama.py`, the text of a completion in `completions.py`, the loop around the steps in
`generation.py`. What is not the base class's, a loaded model and its native objects, is in `engine/`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import inspect
import os
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import llama_cpp
from llama_cpp.llama import LlamaState
from typing_extensions import Unpack

from pyfly_cpp.decoding import OF_REQUEST
from pyfly_cpp.decoding.presets import load_preset
from pyfly_cpp.decoding.resolve import resolve_setting
from pyfly_cpp.engine.adapters import Applied, applied
from pyfly_cpp.engine.kv_key import difference, kv_key
from pyfly_cpp.engine.output import Piece
from pyfly_cpp.engine.request import Request
from pyfly_cpp.engine.request_limits import require_names
from pyfly_cpp.engine.stats import Stats
from pyfly_cpp.errors import ContextFullError
from pyfly_cpp.llama import states
from pyfly_cpp.llama.arguments import ChatArguments, CompletionArguments, described_by
from pyfly_cpp.llama.completions import Chat, Completion
from pyfly_cpp.llama.drafting_llama import DraftingLlama
from pyfly_cpp.llama.generation import Generation
from pyfly_cpp.llama.prompting import chat_handler, only_formats
from pyfly_cpp.llama.strict_grammars import asking_a_format
from pyfly_cpp.machine.files import files_of_model, fingerprint

_GENERATE = inspect.signature(llama_cpp.Llama.generate)
_COMPLETE = inspect.signature(llama_cpp.Llama.create_completion)
_EMBED = inspect.signature(llama_cpp.Llama.embed)
_SAMPLE = inspect.signature(llama_cpp.Llama.sample)


_INTERNAL = frozenset((
    "chat_arguments", "has_row", "kv_key", "loaded", "n_parallel", "new_output", "new_request", "new_sampler", "pieces",
    "prepare", "resolved", "run", "vocabulary", "why_not_usable",
))  # fmt: skip
"""Attributes for other modules of this package, which completion leaves out."""


class FlyLlama(DraftingLlama):
    """A drop-in `llama_cpp.Llama` with speculative decoding, exact or loose.

    Without `drafter` it decodes plainly. Two lines that speculate:

        with FlyLlama("model.gguf", drafter="auto") as llm:
            print(llm.create_chat_completion([{"role": "user", "content": "Hi"}]), llm.stats.summary())

    Every argument and method of `llama_cpp.Llama` works as there. Two defaults differ. `flash_attn` is on if attention
    is ours or the V cache is quantised. `n_threads` and `n_threads_batch` are "auto": the physical cores, and fewer
    while other programs use some of them (docs/how-it-decides.md). A number means exactly that many; with a number for
    `n_threads` alone, batches take all physical cores. The base class takes half of the logical cores for generation.
    An object serves one generation at a time; use one object per thread.

    Whatever changes the sequence from outside a generation (eval, embed, load_state, a new drafter) ends the one that
    runs; two threads at the same time are refused.

    What a caller may notice besides: `draft_model=` does not switch `logits_all` on, so `scores` stays empty. While a
    logits processor runs, `n_tokens` is what it was before the step, and the object cannot be used; the tokens are the
    processor's argument. Completions call no `generate`, `sample` or `detokenize` that a subclass overrides. Ctrl-C
    ends the reading of a prompt on a CPU within a tenth of a second or so, by llama.cpp's abort callback; one of your
    own is gone then. An argument or attribute that nothing reads is a ValueError, but for arguments that
    `llama_cpp.Llama` had once.
    """

    _closes_at_exit = True

    has_row = False
    """Whether the context's last row of logits is that of the last token."""

    @classmethod
    def from_preset(cls, path: str | os.PathLike[str], **overrides: Any) -> FlyLlama:
        """Loads a model with the settings of a preset (`pyfly_cpp.decoding.presets`).

        Args:
            path: A file (`pyfly-cpp bench --write-preset` writes them), or the name of an included preset:
                `"fast"` or `"paper"`. Those name no model.
            **overrides: Arguments of `FlyLlama` that override the preset's; `model_path` if it names no model. A gate
                that has no use for a window leaves out the preset's.

        Raises:
            ValueError: the preset cannot be read, or neither names a model.
        """
        preset = load_preset(path)
        said = {name: overrides.get(name) for name in (*OF_REQUEST, "adaptive")}
        arguments = {**vars(resolve_setting(preset, **said)), **preset.arguments(), **overrides}
        if arguments.get("model_path") is None:
            raise ValueError(f"the preset {os.fspath(path)} names no model; give model_path=.")
        return cls(**arguments)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__()} - _INTERNAL)

    def __repr__(self) -> str:
        drafters = ", ".join(map(str, self.resolved.drafters)) or "no drafter"
        name, closed = os.path.basename(self.model_path), ", closed" if self._access.is_closed else ""
        return f"<{type(self).__name__} {name}: {self._n_ctx} tokens of context, {drafters}, gate {self.gate}{closed}>"

    # ---- Results -----------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Counters since the object was made or `reset_stats()` was called."""
        return self.loaded.decoder.stats(self.adaptive)

    def reset_stats(self) -> None:
        """Sets all counters to 0."""
        self.loaded.decoder.reset_stats()

    # ---- The sequence ------------------------------------------------------------------------------------------------

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluates tokens behind the sequence, as in the base class. Ends a running generation.

        Raises:
            ContextFullError: they do not fit in the context; nothing was evaluated.
        """
        with self._access.exclusive():
            self._supersede()
            if self.n_tokens + len(tokens) > self._n_ctx:
                raise ContextFullError(
                    f"{len(tokens)} tokens do not fit after the {self.n_tokens} of the sequence: the context holds "
                    f"{self._n_ctx}; reset() it or raise {{n_ctx}}."
                )
            self._require_weights()
            if self.n_tokens == 0:
                self.loaded.decoder.take_adapters()
            super().eval(tokens)
            self.has_row = True

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """A token by the row of the last evaluated one, as in the base class.

        Raises:
            ValueError: that row is not there: a state was loaded, or drafts were evaluated behind it.
        """
        idx = _SAMPLE.bind(self, *args, **kwargs).arguments.get("idx")
        with self._access.exclusive():
            if not self.has_row or not self._ctx.get_logits_ith(-1 if idx is None else idx - self.n_tokens):
                raise ValueError(
                    "sample() needs logits that the context does not hold (drafts replace them, and a saved state has "
                    "none); eval() tokens first, or take tokens from generate()."
                )
            return super().sample(*args, **kwargs)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Embeddings, as in the base class. Ends a running generation.

        Raises:
            RuntimeError: the model was loaded without embedding=True.
            ValueError: a text has no tokens, which would end the process.
        """
        with self._access.exclusive():
            if not self.context_params.embeddings:
                raise RuntimeError("this FlyLlama makes no embeddings; load the model with embedding=True.")
            self._require_weights()
            given = _EMBED.bind(self, *args, **kwargs).arguments["input"]
            for text in [given] if isinstance(given, str) else given:
                if not self.tokenize(text.encode("utf-8")):
                    raise ValueError(f"embed() needs texts that have tokens, not {text!r}; leave it out.")
            self._supersede()
            self.n_tokens = 0  # the base class clears the memory
            return super().embed(*args, **kwargs)

    def _require_weights(self) -> None:
        if self.model_params.vocab_only:
            raise ValueError("this model was loaded with vocab_only=True and computes nothing; load it without.")

    def save_state(self) -> LlamaState:
        """The state of the sequence, as in the base class. Logits are not part of it (unless logits_all)."""
        with self._access.exclusive():
            slot = self.loaded.decoder.running
            if slot is not None:
                slot.park(self.n_tokens)  # what it holds beyond is not part of the state
            state = super().save_state() if self._logits_all else states.save_state(self)
            state.kv_key = self.kv_key
            state.kept = states.kept_states(self)
            return state

    def load_state(self, state: LlamaState) -> None:
        """Restores a state of this model, also one that a plain `llama_cpp.Llama` saved. Ends a running generation.

        Raises:
            ValueError: it does not fit in the context, or was computed with another model, other adapters or other
                settings (a plain Llama's state does not tell); nothing was changed.
            NativeError: llama.cpp refuses it; the sequence is reset.
        """
        with self._access.exclusive():
            why = self.why_not_usable(state)
            if why is not None:
                raise ValueError(
                    f"the saved state was computed with {why}; load it where they are the same, or let the prompt be "
                    "read again."
                )
            states.load_state(self, state, self._logits_all, before=self._begin_anew)
            states.restore_kept(self, getattr(state, "kept", []))
            self.has_row = False

    def _begin_anew(self) -> None:
        """The context is about to hold something else, computed with the adapters of now."""
        self._supersede()
        self.loaded.decoder.take_adapters()

    def why_not_usable(self, state: LlamaState) -> str | None:
        """By what this object computes differently than the one that saved a state; None: by nothing that is known."""
        key = getattr(state, "kv_key", None)
        return None if key is None else difference(key, self._kv_key(applied(self._ctx.ctx)))

    @property
    def kv_key(self) -> dict[str, Any]:
        """What the context's memory depends on besides its tokens, see `engine.kv_key`."""
        return self._kv_key(self.loaded.decoder.computed_with)

    def _kv_key(self, adapters: Applied) -> dict[str, Any]:
        has_long_rope = 0 < self._n_ctx_short < self._n_ctx
        return kv_key(
            self._fingerprint, self.kv_overrides, self.context_params, adapters, self._may_rotate, has_long_rope
        )

    @functools.cached_property
    def _fingerprint(self) -> str:
        return hashlib.sha256("".join(map(fingerprint, files_of_model(self.model_path))).encode()).hexdigest()

    def _follow_adapters(self) -> None:
        """Drops what the context holds if it was computed with other adapters than those that it applies now."""
        if self.loaded.decoder.has_new_adapters:
            self.n_tokens = 0
            self.loaded.decoder.take_adapters()

    # ---- Generation --------------------------------------------------------------------------------------------------

    def generate(self, *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """Generates tokens after a prompt, speculatively. Arguments and protocol are those of the base class.

        Yields:
            Token ids, without end; end-of-text tokens included. Tokens sent into the generator are appended to the
            sequence after the yielded one.

        Raises:
            ContextFullError: the prompt, or the next token, does not fit in the context.
            BusyError: another thread or another generation uses this object.
        """
        require_names("generate", _GENERATE, kwargs)
        sampling = _GENERATE.bind(self, *args, **kwargs).arguments
        del sampling["self"]
        tokens, reset = sampling.pop("tokens"), sampling.pop("reset", True)
        wanted = {name: sampling.pop(name, None) for name in ("logits_processor", "stopping_criteria")}
        return Generation(self, self.new_request(tokens, sampling=sampling, **wanted), reset=reset).run()

    generate.__signature__ = _GENERATE  # type: ignore[attr-defined]

    def run(self, request: Request) -> list[Piece]:
        """Runs a request that has an output to its end; raises as `generate` does."""
        return list(Generation(self, request).run())

    # ---- Completions -------------------------------------------------------------------------------------------------

    @described_by(llama_cpp.Llama.create_chat_completion)
    def create_chat_completion(self, messages: Sequence[Any], *more: Any, **arguments: Unpack[ChatArguments]) -> Any:
        asked = self.chat_arguments(messages, *more, **arguments)
        with asking_a_format():
            response = super().create_chat_completion(**asked)
            if not isinstance(response, Generator) or only_formats(chat_handler(self)):
                return response
            context = contextvars.copy_context()
        return _within(context, response)  # functionary converts schemas while it streams

    @described_by(llama_cpp.Llama.create_completion)
    def create_completion(self, prompt: str | list[int], *more: Any, **arguments: Unpack[CompletionArguments]) -> Any:
        require_names("create_completion", _COMPLETE, arguments)
        return super().create_completion(prompt, *more, **arguments)

    @described_by(llama_cpp.Llama.__call__)
    def __call__(self, prompt: str | list[int], *more: Any, **arguments: Unpack[CompletionArguments]) -> Any:
        return self.create_completion(prompt, *more, **arguments)

    def write(self, prompt: str | list[int], **arguments: Any) -> Generator[Piece, None, None]:
        """The pieces of a completion, each with its tokens, as they come; ended early by `close()`.

        Args:
            prompt, **arguments: As of `create_completion`.

        Raises:
            ContextFullError: the prompt leaves no room for an answer.
        """
        return self._run(Completion(self, prompt, **arguments))

    def write_chat(self, messages: Sequence[Any], **arguments: Any) -> Generator[Piece, None, None]:
        """The pieces of the first completion of a chat (most formats have one); as of `create_chat_completion`."""
        return self._run(Chat(self, self.chat_arguments(messages, **arguments)))

    def _create_completion(self, prompt: str | list[int], *, stream: bool = False, **arguments: Any) -> Iterator[Any]:
        """The base class's completion: yields its chunks, or one response. Raises as `write` does."""
        completion = Completion(self, prompt, stream=stream, **arguments)
        if self.verbose:
            self._ctx.reset_timings()
        self._load_cached(completion.prompt)
        tell, pieces = completion.new_stream(), list[Piece]()
        with contextlib.closing(self._run(completion)) as run:
            for piece in run:
                if not stream:
                    pieces.append(piece)
                    continue
                yield from tell(piece)
        if self.verbose:
            self._ctx.print_timings()
        if self.cache:
            self.cache[[*completion.prompt, *completion.request.tokens[: completion.output.n_tokens]]] = (
                self.save_state()
            )
        if not stream:
            yield completion.response(pieces)

    def _run(self, completion: Completion) -> Generator[Piece, None, None]:
        return Generation(self, completion.request, next_seed=completion.next_seed).run()

    def _load_cached(self, prompt: list[int]) -> None:
        """Loads the state of the cache, if there is one that serves the prompt better than the context does."""
        if self.cache:
            with contextlib.suppress(KeyError):
                state = self.cache[prompt]
                if self.why_not_usable(state) is not None:
                    return
                evaluated = (state.input_ids[: state.n_tokens], self._input_ids)
                lengths = [self.longest_token_prefix(ids.tolist(), prompt) for ids in evaluated]
                if lengths[0] > lengths[1]:
                    self.load_state(state)


def _within(context: contextvars.Context, stream: Generator[Any, None, None]) -> Generator[Any, None, None]:
    """The same stream, read in that context."""
    with contextlib.closing(stream):
        while (chunk := context.run(next, stream, None)) is not None:
            yield chunk
