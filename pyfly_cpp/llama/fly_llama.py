"""`FlyLlama`: a `llama_cpp.Llama` that generates speculatively.

A subclass: chat formats, tools, grammars, caches, embeddings and `from_pretrained` are the base class's own. It
replaces `generate` (the native steps of `csrc/batch.cpp`), the loop of a completion (`engine/output.py` makes
its text), and saving and loading of states.

Here are the settings, the start of a generation, and its results; the model and its context are in `guarded_llama.py`,
completions in `completions.py`, the loop around the steps in `generation.py`, the native objects in `decoder.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any

import llama_cpp
from llama_cpp.llama import LogitsProcessorList
from typing_extensions import Self, Unpack

from pyfly_cpp import _native
from pyfly_cpp.decoding import OF_REQUEST, Decoding
from pyfly_cpp.decoding.drafters import Drafter, OwnDrafter, has_own_head
from pyfly_cpp.decoding.gates import Exact, Gate, require_gate, why_all, why_beyond, why_strict
from pyfly_cpp.decoding.resolve import Resolved, draft_max_of, resolve
from pyfly_cpp.decoding.windows import Window, require_window
from pyfly_cpp.engine.arguments import require_base_arguments, require_fitting, require_names
from pyfly_cpp.engine.output import Output, Piece
from pyfly_cpp.engine.request import Request
from pyfly_cpp.engine.stats import Record, Stats
from pyfly_cpp.errors import BusyError, PyflyError
from pyfly_cpp.llama.arguments import LlamaArguments
from pyfly_cpp.llama.completions import CompletingLlama
from pyfly_cpp.llama.generation import Generation
from pyfly_cpp.machine.files import require_gguf
from pyfly_cpp.models.named import model_file

_GENERATE = inspect.signature(llama_cpp.Llama.generate)
_OPEN: weakref.WeakSet[FlyLlama] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes what nobody closed while llama.cpp can still log, which is a function of a Python module."""
    for llm in list(_OPEN):
        with contextlib.suppress(BusyError):
            llm.close()


class FlyLlama(CompletingLlama):
    """A drop-in `llama_cpp.Llama` with speculative decoding, exact or loose.

    Without `drafter` it decodes plainly. Two lines that speculate:

        with FlyLlama("model.gguf", drafter="auto") as llm:
            print(llm.create_chat_completion([{"role": "user", "content": "Hi"}]), llm.stats.summary())

    Every argument and method of `llama_cpp.Llama` works as there. Two defaults differ. `flash_attn` is on if attention
    is ours. `n_threads` and `n_threads_batch` are "auto": the physical cores, and fewer while other programs use some
    of them (docs/threads.md). A number means exactly that many; with a number for `n_threads` alone, batches take all
    physical cores. The base class takes half of the logical cores for generation.
    An object serves one generation at a time; use one object per thread.
    """

    _public_name = "FlyLlama"  # for errors; a subclass may be part of something else
    _closes_at_exit = True

    trace: bool
    """Whether the next generation keeps a `Record` of every token in `records`."""
    records: list[Record]
    """How each token of the last generation was produced, prompt excluded, if `trace` was on; else empty."""
    on_prefill: Callable[[int, int], None] | None
    """Called with (evaluated, all) prompt tokens after every batch of a prompt of several batches."""

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        drafter: Drafter | Sequence[Drafter] | Resolved | str | None = None,
        gate: Gate | str = Exact(),  # noqa: B008 - frozen
        window: Window | str | None = None,
        draft_max: int | None = None,
        adaptive: bool | None = None,
        protected: Iterable[int] = (),
        rpc_servers: Sequence[str] = (),
        devices: Sequence[str] | None = None,
        kernels: str | None = None,
        trace: bool = False,
        on_load: Callable[[float], None] | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        **kwargs: Unpack[LlamaArguments],
    ) -> None:
        """Loads a model.

        Args:
            model_path: Path of the GGUF file, or a name of `pyfly-cpp models list`.
            drafter: `DraftModel(...)`, `PromptLookup(...)` or another of `pyfly_cpp.decoding.drafters`, a llama_cpp
                `LlamaDraftModel`, several of these (the cheapest first), a string ("lookup", "draft:FILE"), or None for
                plain decoding. The base class's `draft_model=` does the same. "auto": the model's own MTP
                head; else `draft_model` or the best file on this machine that could draft for it, with lookup as well;
                else lookup and, without a GPU, the demo model if it is far smaller. What comes as well drafts under the
                governor alone, for one request at a time. `drafter_reason` has the reason.
            gate: The rule for a draft that is not the target's choice; `Exact()`, `Stochastic()` are lossless.
            window: The condition under which a deferred mismatch stands, or its written form ("reconverge:6"); None:
                the gate's own.
            draft_max: Tokens in a step (K), 0..n_batch-1; 0 decodes plainly. None: the drafter's own.
            adaptive: Let the governor choose drafter and draft length (0 included) for every step, by their costs
                and gains (docs/governor.md). False: the first drafter that proposes something, at full length;
                exactly reproducible. None: the governor, unless a `draft_max` is set, here or in a drafter.
            protected: Token ids that are never accepted loosely, besides the vocabulary's control tokens and the
                markers of its chat template. Markers that several ordinary tokens write are in `protected_texts`.
            rpc_servers: Other machines that hold parts of the model: rpc-servers of llama.cpp, "host:port". They
                share the layers with this machine's GPUs, by free memory or by `tensor_split`. Not for open
                networks: there is no encryption and no password (docs/rpc.md).
            devices: Where to put the model: these devices only, in this order. "CUDA0"; "host:port", all devices of a
                server; "host:port/1", its second one. An empty list is the CPU alone. A draft model has its own,
                `DraftModel(devices=...)`.
            kernels: "auto": packs weights for our own kernels unless those are slower on this machine, which
                makes batches on x86-64 CPUs cheaper (`pyfly_cpp.kernels`); "stock": llama.cpp's own. None: the
                environment variable PYFLY_KERNELS, else "auto". The draft model follows.
            trace: Keep a `Record` of every token of the last generation in `records`. A recurrent model that was
                brought to the end of the prompt by `eval` has none of the first token.
            on_load: Called with the loaded fraction, 0..1, while the model is read.
            on_prefill: Called with (evaluated, all) prompt tokens after every batch of a prompt of several batches.
            **kwargs: Arguments of `llama_cpp.Llama`. Without `flash_attn` it is on if attention is ours (`kernels`).

        Raises:
            ValueError: an argument is unknown or out of range, or the file is missing or no usable GGUF.
            IncompatibleDraftError: the draft has another vocabulary.
            RpcError: an RPC server does not answer, or has another version.
        """
        more: dict[str, Any] = {**kwargs}
        own = (*inspect.signature(FlyLlama.__init__).parameters, *inspect.signature(type(self).__init__).parameters)
        said = {name: more.pop(name) for name in OF_REQUEST if name in more}  # that are no arguments of their own
        require_base_arguments(more, own, self._public_name)
        draft_model = more.pop("draft_model", None)
        if draft_model is not None and drafter not in (None, "auto"):
            raise ValueError("give either drafter= or draft_model=, not both.")
        self._decoding = Decoding(require_gate(gate), require_window(window), draft_max, adaptive=adaptive, **said)
        self._protected = frozenset(protected)
        self.trace = trace
        self.on_prefill = on_prefill
        self.records = []
        self._resolved = Resolved()
        self._warned: set[str] = set()
        model_path = model_file(model_path)
        require_gguf(model_path)
        resolved = resolve(model_path, drafter, draft_model)
        resolved = resolved.kept(self._decoding.is_governed_with(resolved.drafters))
        self._decoding.require_distributions(resolved.drafters)
        # Deeper drafts of what may be left out are rolled back from checkpoints.
        needed = resolved.needed.drafters if not more.get("embedding") else ()
        wanted = [draft_max_of(one, draft_max) for one in needed]
        super().__init__(
            model_path,
            # An MTP head is read with the model or never.
            has_own_head=has_own_head(resolved.drafter),
            n_snapshots=max(wanted, default=0),
            rpc_servers=rpc_servers,
            devices=devices,
            protected=self._protected,
            kernel_choice=kernels,
            on_load=on_load,
            **more,
        )
        self._draft_with(resolved, draft_model if drafter is None else drafter)
        self._decoding.require_distributions(self._resolved.drafters)  # without what could not be opened
        require_fitting(draft_max, self.n_batch)
        self.warn_of_gate()
        if self._closes_at_exit:
            _OPEN.add(self)

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
        from pyfly_cpp.decoding.presets import load_preset

        preset = load_preset(path)
        window = preset.setting().but(gate=overrides.get("gate"), window=overrides.get("window")).window
        arguments = {**preset.arguments(), "window": window, **overrides}
        if arguments.get("model_path") is None:
            raise ValueError(f"the preset {os.fspath(path)} names no model; give model_path=.")
        return cls(**arguments)

    def __enter__(self) -> Self:
        """Closes the model behind a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        drafters = ", ".join(map(str, self._resolved.drafters)) or "no drafter"
        name, closed = os.path.basename(self.model_path), ", closed" if self._access.is_closed else ""
        return f"<{type(self).__name__} {name}: {self._n_ctx} tokens of context, {drafters}, gate {self.gate}{closed}>"

    # ---- Settings that can change between requests -------------------------------------------------------------------

    @property
    def decoding(self) -> Decoding:
        """How it decodes, in one value. Assigning takes over everything except the drafter, which `drafter` loads."""
        return self._decoding

    @decoding.setter
    def decoding(self, decoding: Decoding) -> None:
        require_fitting(decoding.draft_max, self.n_batch)
        self._decoding = replace(decoding, drafter=self._decoding.drafter)

    @property
    def drafter(self) -> Drafter | Sequence[Drafter] | None:
        """The drafter. Assigning loads a draft model immediately, and "auto" chooses as at loading (a head must have
        been loaded with the model); on an error the old drafter stays."""
        return self._decoding.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | Sequence[Drafter] | Resolved | str | None) -> None:
        self._draft_with(resolve(self.model_path, drafter), drafter)

    @property
    def resolved(self) -> Resolved:
        """The drafters, which of them may be left out, and why these. Assigning it to `drafter` restores them."""
        return self._resolved

    @property
    def drafter_reason(self) -> str | None:
        """The reason for this drafter, if it was chosen automatically; a sentence without its full stop."""
        return self._resolved.reason

    def _draft_with(self, wanted: Resolved, said: Any) -> None:
        """Opens the drafters. `said`: how somebody has named them; a list that is drafted with as it is stays one."""
        usable = wanted.kept(n_requests=self.n_parallel, embeds=bool(self.context_params.embeddings))
        with self._access.exclusive():
            self.decoder.keep_answers()  # the new one may begin with them
            resolved, opened = self._open(usable)
            self._supersede()
            self.decoder.drafters = opened
            self._resolved = resolved
            is_as_said = isinstance(said, (list, tuple)) and resolved.drafters == wanted.drafters
            self._decoding = replace(self._decoding, drafter=said if is_as_said else resolved.drafter)
            if opened and self.adaptive and self.n_tokens == 0 and not self.context_params.embeddings:
                self._configure(self._drafting(), True)

    def _open(self, wanted: Resolved) -> tuple[Resolved, list[_native.Drafter]]:
        """What drafts, without what may be left out if that cannot be opened, and its native drafters."""
        k, is_fixed = self._decoding.draft_max, not self._decoding.adaptive
        try:
            return wanted, self.decoder.open_drafters(wanted.drafters, k, self.n_batch, is_fixed)
        except (PyflyError, ValueError, MemoryError):
            if not wanted.may_be_left_out:
                raise
            return self._open(wanted.needed)

    @property
    def draft_model(self) -> Any:
        """The base class's name for a drafter that is a callable; assigning to it is assigning to `drafter`."""
        return None if isinstance(self.drafter, (OwnDrafter, list, tuple)) else self.drafter

    @draft_model.setter
    def draft_model(self, draft_model: Drafter | None) -> None:
        if "decoder" in self.__dict__:  # the base class assigns to it while it loads
            self.drafter = draft_model

    @property
    def gate(self) -> Gate:
        """The gate: the rule for draft tokens that are not the target's choice."""
        return self._decoding.gate

    @gate.setter
    def gate(self, gate: Gate | str) -> None:
        self._decoding = replace(self._decoding, gate=require_gate(gate))

    @property
    def window(self) -> Window:
        """The window, which a deferred mismatch needs to stand. None: the gate's own."""
        return self._decoding.window or self._decoding.gate.window

    @window.setter
    def window(self, window: Window | str | None) -> None:
        self._decoding = replace(self._decoding, window=require_window(window))

    @property
    def draft_max(self) -> int:
        """Most tokens in a step (K). Assigning None hands the decision back to the drafter, or to the governor."""
        return max(self.draft_lengths(self._decoding), default=0)

    @draft_max.setter
    def draft_max(self, draft_max: int | None) -> None:
        self.decoding = replace(self._decoding, draft_max=draft_max)

    def prepare(self) -> None:
        """Makes the next request draft as the settings are now; while none runs. The governor learns the
        cost."""
        self._configure(self._drafting(), self.adaptive)

    def draft_lengths(self, decoding: Decoding) -> list[int]:
        """Most tokens that each drafter proposes in a step of such a request. Whether that is governed is not its
        own."""
        return self._resolved.lengths(decoding.draft_max, self.adaptive, self.n_batch)

    def _drafting(self) -> list[tuple[Drafter, int]]:
        """Each drafter and its K."""
        return list(zip(self._resolved.drafters, self.draft_lengths(self._decoding)))

    @property
    def adaptive(self) -> bool:
        """Whether the governor chooses. None: unless a `draft_max` is set."""
        return self._decoding.is_governed_with(self._resolved.drafters)

    @adaptive.setter
    def adaptive(self, adaptive: bool | None) -> None:
        self._decoding = replace(self._decoding, adaptive=adaptive)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            **vars(self._decoding),
            "drafter": None if self.draft_model is not None else self._resolved,
            "protected": self._protected,
            "trace": self.trace,
        }

    def warn_of_gate(self) -> None:
        """Warns, once of each, of a gate that with this window and draft length can accept nothing loosely, of one
        whose threshold lets everything pass, and of a margin larger than advised."""
        gate, n = self.gate, self.draft_max
        for why in (why_strict(gate, self.window, n), why_all(gate, n), why_beyond(gate, n)):
            if why is not None and why not in self._warned:
                self._warned.add(why)
                warnings.warn(why, stacklevel=3)

    # ---- Results -----------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Counters since the object was made or `reset_stats()` was called."""
        return self.decoder.stats(self.adaptive)

    def reset_stats(self) -> None:
        """Sets all counters to 0."""
        self.decoder.reset_stats()

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

    def new_request(self, prompt: Sequence[int], output: Output | None = None, **wanted: Any) -> Request:
        """A request of this model that has not begun: arguments as of `Request`."""
        return Request(prompt, output, keeps_all_rows=bool(self._logits_all), **wanted)

    def run(self, request: Request) -> list[Piece]:
        """Runs a request that has an output to its end; raises as `generate` does."""
        return list(Generation(self, request).run())

    def new_sampler(self, request: Request, seed: int | None = None) -> Any:
        """The llama_cpp `LlamaSampler` of a request. `seed`: of its random numbers; None: the one that is set."""
        processors = request.processors and LogitsProcessorList([request.processors])
        llama = self if seed is None else _Seeded(self, seed)
        return type(self)._init_sampler(llama, logits_processor=processors, **request.sampling)


class _Seeded:
    """Stands in for a Llama whose seed another thread may set."""

    def __init__(self, llama: FlyLlama, seed: int) -> None:
        self._llama = llama
        self._seed = seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llama, name)
