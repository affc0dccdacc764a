"""`DraftingLlama`: a `llama_cpp.Llama` that is loaded together with its drafters and makes requests; it runs none."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, overload

from llama_cpp.llama import LogitsProcessorList
from typing_extensions import Self, Unpack

from pyfly_cpp._native import ChainMask
from pyfly_cpp.decoding import OF_REQUEST, Decoding
from pyfly_cpp.decoding.drafters import Drafter, OwnDrafter, has_own_head
from pyfly_cpp.decoding.gates import Exact, Gate, require_gate
from pyfly_cpp.decoding.resolve import Resolved, draft_max_of, resolve
from pyfly_cpp.decoding.windows import Window, require_window
from pyfly_cpp.engine.output import Output
from pyfly_cpp.engine.request import Request
from pyfly_cpp.engine.request_limits import as_divisible, require_fitting
from pyfly_cpp.engine.stats import Record
from pyfly_cpp.errors import BusyError
from pyfly_cpp.grammar.guides import Guide
from pyfly_cpp.grammar.schemas import SchemaGrammar
from pyfly_cpp.llama.arguments import LlamaArguments
from pyfly_cpp.llama.guarded_llama import GuardedLlama
from pyfly_cpp.llama.load_limits import require_base_arguments
from pyfly_cpp.machine.files import require_gguf
from pyfly_cpp.models.named import model_file

T = TypeVar("T")

_OPEN: weakref.WeakSet[DraftingLlama] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes what nobody closed while llama.cpp can still log, which is a function of a Python module."""
    for llm in list(_OPEN):
        with contextlib.suppress(BusyError):
            llm.close()


class _Setting(Generic[T]):
    """A field of `decoding` as an attribute of its own."""

    def __init__(self, get: Callable[[DraftingLlama], T]) -> None:
        """`get`: its value, with what stands for None filled in."""
        self._get = get

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, llm: None, kind: type) -> Self: ...

    @overload
    def __get__(self, llm: DraftingLlama, kind: type) -> T: ...

    def __get__(self, llm: DraftingLlama | None, kind: type) -> Self | T:
        return self if llm is None else self._get(llm)

    def __set__(self, llm: DraftingLlama, value: Any) -> None:
        llm.decoding = replace(llm.decoding, **{self._name: value})


class DraftingLlama(GuardedLlama):
    """Loads a model and its drafters; how it decodes can be changed between requests."""

    _closes_at_exit = False

    trace: bool
    """Whether the next generation keeps a `Record` of every token in `records`."""
    records: list[Record]
    """How each token of the last generation was produced, prompt excluded, if `trace` was on; else empty. A notebook
    shows them as the text, coloured by origin."""
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
            model_path: Path of the GGUF file, or a name from `pyfly-cpp models list`.
            drafter: `DraftModel(...)`, `PromptLookup(...)` or another of `pyfly_cpp.decoding.drafters`, a llama_cpp
                `LlamaDraftModel`, several of these (the cheapest first), a string ("lookup", "draft:FILE"), or None for
                plain decoding. The base class's `draft_model=` does the same. "auto": the model's own MTP
                head; else `draft_model` or the best file on this machine that could draft for it, with lookup as well;
                else lookup and, without a GPU, the demo model if it is far smaller. What comes as well drafts under the
                governor alone, for one request at a time. `drafter_reason` has the reason.
            gate: The rule for a draft that is not the target's choice; `Exact()`, `Stochastic()` are lossless.
            window: The condition under which a deferred mismatch stands, or its written form ("agree:6"); None:
                the gate's own.
            draft_max: Tokens in a step (K), 0..n_batch-1; 0 decodes plainly. None: the drafter's own.
            adaptive: Let the governor choose drafter and draft length (0 included) for every step, by their costs
                and gains (docs/how-it-decides.md). False: the first drafter that proposes something, at full length;
                exactly reproducible, if the gate is exact or prompt lookup has no memory. None: the governor, unless a
                `draft_max` is set, here or in a drafter.
            protected: Token ids that are never accepted loosely, besides the vocabulary's control tokens and the
                markers of its chat template. Markers that several ordinary tokens write are in `protected_texts`.
            rpc_servers: Other machines that hold parts of the model: rpc-servers of llama.cpp, "host:port". They
                share the layers with this machine's GPUs, by free memory or by `tensor_split`. Not for open
                networks: there is no encryption and no password (docs/rpc.md).
            devices: Where to put the model: these devices only, in this order. "CUDA0"; "host:port", all devices of a
                server; "host:port/1", its second one. An empty list is the CPU alone. A draft model has its own,
                `DraftModel(devices=...)`.
            kernels: "auto": packs weights for our own kernels unless those are slower on this machine, which
                makes batches on CPUs cheaper (`pyfly_cpp.kernels`); "stock": llama.cpp's own. None: the
                environment variable PYFLY_KERNELS, else "auto". The draft model follows.
            trace: Keep a `Record` of every token of the last generation in `records`. A recurrent model that was
                brought to the end of the prompt by `eval` has none of the first token.
            on_load: Called with the loaded fraction, 0..1, while the model is read.
            on_prefill: Called with (evaluated, all) prompt tokens after every batch of a prompt of several batches.
            **kwargs: Arguments of `llama_cpp.Llama`. Without `flash_attn` it is on if attention is ours (`kernels`), or
                if the V cache is quantised.

        Raises:
            ValueError: an argument is unknown or out of range, or the file is missing or no usable GGUF.
            IncompatibleDraftError: the draft has another vocabulary.
            RpcError: an RPC server does not answer, or has another version.
        """
        more: dict[str, Any] = {**kwargs}
        own = (
            *inspect.signature(DraftingLlama.__init__).parameters,
            *inspect.signature(type(self).__init__).parameters,
        )
        said = {name: more.pop(name) for name in OF_REQUEST if name in more}  # that are no arguments of their own
        require_base_arguments(more, own, self._public_name)
        draft_model = more.pop("draft_model", None)
        if draft_model is not None and drafter not in (None, "auto"):
            raise ValueError("give either drafter= or draft_model=, not both.")
        decoding = Decoding(require_gate(gate), require_window(window), draft_max, adaptive=adaptive, **said)
        self._protected = frozenset(protected)
        self.trace = trace
        self.on_prefill = on_prefill
        self.records = []
        model_path = model_file(model_path)
        require_gguf(model_path)
        resolved = resolve(model_path, drafter, draft_model)
        resolved = resolved.kept(decoding.is_governed_with(resolved.drafters))
        decoding.require_distributions(resolved.drafters)
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
        try:
            self.loaded.decoding = decoding
            self._draft_with(resolved, draft_model if drafter is None else drafter)
            decoding.require_distributions(self.resolved.drafters)  # without what could not be opened
            require_fitting(draft_max, self.n_batch)
            self.loaded.warn_of_gate()
        except BaseException:
            self.close()  # the traceback may keep this object until Python frees what it needs
            raise
        if self._closes_at_exit:
            _OPEN.add(self)

    def __enter__(self) -> Self:
        """Closes the model behind a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- Settings that can change between requests -------------------------------------------------------------------

    @property
    def decoding(self) -> Decoding:
        """How it decodes, in one value. Assigning takes over everything except the drafter, which `drafter` loads."""
        return self.loaded.decoding

    @decoding.setter
    def decoding(self, decoding: Decoding) -> None:
        require_fitting(decoding.draft_max, self.n_batch)
        self.loaded.decoding = replace(decoding, drafter=self.drafter)

    @property
    def drafter(self) -> Drafter | Sequence[Drafter] | None:
        """The drafter. Assigning loads a draft model immediately, and "auto" chooses as at loading (a head must have
        been loaded with the model); on an error the old drafter stays."""
        return self.decoding.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | Sequence[Drafter] | Resolved | str | None) -> None:
        self._draft_with(resolve(self.model_path, drafter), drafter)

    @property
    def resolved(self) -> Resolved:
        """The drafters, which of them may be left out, and why these. Assigning it to `drafter` restores them."""
        return self.loaded.resolved

    @property
    def drafter_reason(self) -> str | None:
        """The reason for this drafter, if it was chosen automatically; a sentence without its full stop."""
        return self.resolved.reason

    def _draft_with(self, wanted: Resolved, said: Any) -> None:
        """Opens the drafters. `said`: how somebody has named them; a list that is drafted with as it is stays one."""
        usable = wanted.kept(n_requests=self.n_parallel, embeds=bool(self.context_params.embeddings))
        model = self.loaded
        with self._access.exclusive():
            model.decoder.keep_answers()  # the new one may begin with them
            resolved, opened = model.opened(usable)
            self._supersede()
            is_as_said = isinstance(said, (list, tuple)) and resolved.drafters == wanted.drafters
            model.draft_with(resolved, opened, said if is_as_said else resolved.drafter)
            if opened and self.adaptive and self.n_tokens == 0 and not self.context_params.embeddings:
                model.configure(may_measure=True)

    @property
    def draft_model(self) -> Any:
        """The base class's name for a drafter that is a callable; assigning to it is assigning to `drafter`."""
        return None if isinstance(self.drafter, (OwnDrafter, list, tuple)) else self.drafter

    @draft_model.setter
    def draft_model(self, draft_model: Drafter | None) -> None:
        if "loaded" in self.__dict__:  # the base class assigns to it while it loads
            self.drafter = draft_model

    gate = _Setting[Gate](lambda llm: llm.decoding.gate)
    """The gate: the rule for draft tokens that are not the target's choice."""
    window = _Setting[Window](lambda llm: llm.decoding.effective_window)
    """The window, which a deferred mismatch needs to stand. None: the gate's own."""
    draft_max = _Setting[int](lambda llm: llm.loaded.draft_max)
    """Most tokens in a step (K). Assigning None hands the decision back to the drafter, or to the governor."""
    adaptive = _Setting[bool](lambda llm: llm.loaded.is_governed)
    """Whether the governor chooses. None: unless a `draft_max` is set."""

    def prepare(self) -> None:
        """Makes the next request draft as the settings are now; while none runs. The governor learns the cost."""
        self.loaded.configure(may_measure=self.n_tokens == 0)

    # ---- The end of a generation -------------------------------------------------------------------------------------

    def _supersede(self) -> None:
        """Ends the generation that runs, if one does; its generator will find out."""
        self._access.generation += 1
        slot = self.loaded.decoder.running
        if slot is not None:
            # What lies behind n_tokens (drafts that nobody asked for) goes; n_tokens is what the caller has seen.
            try:
                slot.end(self.n_tokens)
            finally:
                self.n_tokens = min(self.n_tokens, slot.n_evaluated)  # fewer after a failure of the backend

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            **vars(self.decoding),
            "drafter": None if self.draft_model is not None else self.resolved,
            "protected": self._protected,
            "trace": self.trace,
        }

    # ---- Requests ----------------------------------------------------------------------------------------------------

    def new_request(self, prompt: Sequence[int], output: Output | None = None, **wanted: Any) -> Request:
        """A request of this model that has not begun: arguments as of `Request`."""
        piece_of = self.vocabulary.piece
        return Request(prompt, output, keeps_all_rows=bool(self._logits_all), piece_of=piece_of, **wanted)

    def new_sampler(self, request: Request, seed: int | None = None) -> Any:
        """The llama_cpp `LlamaSampler` of a request. `seed`: of its random numbers; None: the one that is set."""
        processors = request.processors and LogitsProcessorList([request.processors])
        llama = self if seed is None else _Seeded(self, seed)
        sampling = dict(request.sampling)
        grammar = sampling.pop("grammar", None)
        if "temp" in sampling:
            sampling["temp"] = as_divisible(sampling["temp"])
        if not isinstance(grammar, SchemaGrammar):
            return type(self)._init_sampler(llama, logits_processor=processors, grammar=grammar, **sampling)
        sampler = type(self)._init_sampler(llama, logits_processor=processors, **sampling)
        guide = Guide(self.vocabulary.guide_tokens(), grammar)
        request.mask = sampler.mask = ChainMask(sampler.sampler, self.n_vocab(), guide.fill)  # lives as long as either
        return sampler


class _Seeded:
    """Stands in for a Llama whose seed another thread may set."""

    def __init__(self, llama: DraftingLlama, seed: int) -> None:
        self._llama = llama
        self._seed = seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llama, name)
