"""The model of a server: its tokens, its chat format, and the batch that writes with it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llama_cpp
from llama_cpp import llama_chat_format
from llama_cpp.llama import LogitsProcessorList

from pyfly_cpp.decoding import Decoding
from pyfly_cpp.engine.handle import Handle
from pyfly_cpp.engine.markers import READ, THOUGHTS
from pyfly_cpp.engine.processors import bias_processor
from pyfly_cpp.engine.stats import Stats
from pyfly_cpp.engine.vocabulary import Vocabulary
from pyfly_cpp.llama.fly_batch import FlyBatch
from pyfly_cpp.llama.prompting import Rendered, chat_handler, render_chat
from pyfly_cpp.serve.answer_requests import AnswerRequest
from pyfly_cpp.serve.api_errors import ApiError, bad_request
from pyfly_cpp.serve.requests import read_object

_MOST_BYTES_OF_TOKEN = 64
"""A text that is longer than so many bytes for each token of the context is refused before it is read."""


class Model:
    """May be used by any thread."""

    def __init__(self, batch: FlyBatch, template: str = "") -> None:
        """
        Args:
            batch: Closed by whoever made it.
            template: A chat template instead of the model's own, see `handler_of`.

        Raises:
            ValueError: the template cannot be read.
        """
        self.batch = batch
        self._llm: Any = batch.llama
        self._loaded = batch.model
        self.n_vocab = int(self._llm.n_vocab())
        self.n_batch = self._loaded.n_batch
        self.template = str(self._loaded.metadata.get("tokenizer.chat_template", ""))
        if self._llm.chat_format != "chat_template.default":
            self.template = ""
        ends = {"bos_token": int(self._llm.token_bos()), "eos_token": int(self._llm.token_eos())}
        self._ends = {name: None if token < 0 else self.text([token], special=True) for name, token in ends.items()}
        self._handler = None
        if template:
            self.template, self._handler = template, self._handler_of(template)
        self.decoding: Decoding = batch.decoding if self.drafters else batch.decoding.but(drafter="none")
        """How requests are decoded by default."""

    @property
    def path(self) -> str:
        """The GGUF file."""
        return self._loaded.path

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary. Raises ValueError if the batch has failed."""
        return self.batch.model.vocabulary

    @property
    def drafters(self) -> list[str]:
        """The drafters."""
        return [str(drafter) for drafter in self._loaded.resolved.drafters]

    @property
    def has_failed(self) -> bool:
        """Whether the batch has ended by a failure: nothing more comes of it."""
        return self.batch.has_failed

    def stats(self) -> Stats:
        """Counters of all requests; waits for the running step."""
        return self.batch.stats

    # ---- Tokens ------------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, special: bool = True, add_bos: bool = True) -> list[int]:
        """The tokens of a text. Raises ApiError: it is far too long, or has too long a word."""
        content = text.encode("utf-8")
        if len(content) > _MOST_BYTES_OF_TOKEN * self.batch.n_ctx:
            raise bad_request(
                f"the text has {len(content)} bytes, far more than the {self.batch.n_ctx} tokens of the context hold; "
                "shorten it.",
                code="context_length_exceeded",
            )
        try:
            return self.batch.tokenize(content, add_bos, special)
        except ValueError as error:
            if self.has_failed:
                raise
            raise bad_request(str(error)) from None

    def known(self, tokens: Sequence[float], param: str) -> list[int]:
        """Token ids of a request's field. Raises ApiError: one is none of the vocabulary."""
        strange = next((token for token in tokens if token >= self.n_vocab), None)
        if strange is not None:
            raise bad_request(f"{param} has the token {strange:.0f}; tokens are under {self.n_vocab}.", param)
        return [int(token) for token in tokens]

    def text(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of tokens."""
        piece = self.vocabulary.piece
        return b"".join(piece(token, special) for token in tokens).decode("utf-8", "ignore")

    def read(self, prompt: Any, param: str, special: bool = True) -> list[int]:
        """The tokens of a prompt: a text, token ids, both in one list, or an object with a text. Raises ApiError: one
        is none of the vocabulary, or there is something else than text."""
        if not isinstance(prompt, (str, list)):
            prompt = read_object(prompt, param)
        if isinstance(prompt, str):
            return self.tokenize(prompt, special) if prompt else self.beginning()
        tokens: list[int] = []
        if str not in set(map(type, prompt)):
            return self.known(prompt, param)
        for i, part in enumerate(prompt):
            if isinstance(part, str):
                tokens += self.tokenize(part, special, add_bos=i == 0)
            else:
                tokens += self.known([part], param)
        return tokens

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The end-of-text tokens."""
        return tuple(filter(self.vocabulary.ends_text, range(self.n_vocab)))

    @functools.cached_property
    def marker_tokens(self) -> frozenset[int]:
        """The control tokens that spell a marker which is looked for in the text of a chat's answer."""
        alone = [tokens[0] for marker in READ if len(tokens := self.tokenize(marker, add_bos=False)) == 1]
        return frozenset(token for token in alone if not self.vocabulary.piece(token))

    def chat_pieces(self) -> Callable[[int], bytes]:
        """What tells the bytes of a token in the answer of a chat, also while the batch is being closed."""
        vocabulary, shown = self.vocabulary, self.marker_tokens
        return lambda token: vocabulary.piece(token, token in shown)

    @functools.cached_property
    def closings(self) -> dict[str, list[int]]:
        """The tokens of the markers that close thoughts, and of their ends, as far as tokens can spell these alone."""
        out = {closing: self.tokenize(closing, add_bos=False) for _, closing in THOUGHTS}
        piece_of = self.chat_pieces()
        ends = {closing[n:] for closing in out for n in range(1, len(closing))}
        for end in sorted(ends - out.keys()):
            tokens = self.tokenize(end, add_bos=False)
            if b"".join(map(piece_of, tokens)).decode("utf-8", "ignore") == end:
                out[end] = tokens
        return out

    def beginning(self) -> list[int]:
        """The token before a text that has nothing before it. Raises ApiError: the model has no such token."""
        bos = int(self._llm.token_bos())
        if bos < 0:
            raise bad_request("the prompt is empty, and this model has no token to begin with; give a prompt.")
        return [bos]

    def own_beginning(self) -> list[int]:
        """What `tokenize` puts before a text of its own accord."""
        return self.beginning() if self.vocabulary.adds_bos else []

    def plain_tokens(self, text: str) -> list[int]:
        """The tokens of a text in the middle of a prompt, in which no control token is looked for. Raises as
        `tokenize`."""
        return self.tokenize(text, special=False, add_bos=False) if text else []

    def infill(self, before: Sequence[int], behind: Sequence[int], others: Sequence[int] = ()) -> list[int]:
        """The prompt for the text between two others; `others`: tokens of other files. Raises ApiError: the model has
        no tokens for that."""
        prefix, suffix, middle = self.vocabulary.infill_tokens()
        if min(prefix, suffix, middle) < 0:
            raise bad_request("this model cannot fill in: it has no tokens for a suffix; leave suffix out.", "suffix")
        return [*self.own_beginning(), *others, prefix, *before, suffix, *behind, middle]

    def tokenizer_info(self) -> dict[str, Any]:
        """The tokenizer, for lm-eval."""
        return {**self._ends, "pad_token": None, "chat_template": self.template or None}

    def _handler_of(self, template: str, adds_prompt: bool = True) -> Any:
        return handler_of(template, self._ends["bos_token"] or "", self._ends["eos_token"] or "", adds_prompt)

    def render(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None, more: Mapping[str, Any] | None = None,
        behind: str = "", adds_prompt: bool = True,
    ) -> Rendered:  # fmt: skip
        """The prompt of a chat.

        Args:
            more: What the template is told besides.
            behind: What the answer begins with.
            adds_prompt: Whether the prompt ends with the beginning of an answer.

        Raises:
            ApiError: the chat format does not take such messages, or they are too long.
        """
        n = sum(len(message["content"]) for message in messages if isinstance(message["content"], str))
        if n > _MOST_BYTES_OF_TOKEN * self.batch.n_ctx or len(messages) > self.batch.n_ctx:
            raise bad_request("the messages are far longer than the context; shorten them.", "messages",
                              "context_length_exceeded")  # fmt: skip
        functions = (self._handler or chat_handler(self._llm), render_chat)
        own = {name for function in functions for name in inspect.signature(function).parameters}
        taken = next((name for name in more or {} if name in own), None)
        if taken is not None:
            raise bad_request(f"chat_template_kwargs cannot set {taken[:100]!r}; leave it out.", "chat_template_kwargs")
        now = time.localtime()
        # What llama.cpp tells templates: those of Llama 3 and of Firefunction ask for the day.
        told = {"date_string": time.strftime("%d %b %Y", now), "datetime": time.strftime("%b %d %Y", now),
                "enable_thinking": True, **(more or {})}  # fmt: skip
        handler = self._handler
        if not adds_prompt:
            template = self.template or self._loaded.metadata.get("tokenizer.chat_template", "")
            if not template:
                raise bad_request("this model's chat format always begins an answer; leave add_generation_prompt out.",
                                  "add_generation_prompt")  # fmt: skip
            handler = self._handler_of(template, adds_prompt=False)
        try:
            return render_chat(self._llm, messages, behind=behind, handler=handler, tools=tools, **told)
        except Exception as error:  # a template is a program of whoever made the model
            texts = _with_arguments_as_texts(messages)
            if texts != list(messages):
                with contextlib.suppress(ApiError):  # else the first reason counts
                    return self.render(texts, tools, more, behind, adds_prompt)
            raise bad_request(f"the model's chat template refuses these messages: {str(error)[:200]}.", "messages") \
                from None  # fmt: skip

    # ---- Requests ----------------------------------------------------------------------------------------------------

    def write(self, wanted: AnswerRequest, on_progress: Callable[[int], None]) -> Handle:
        """Has a request answered; its chunks are pieces (engine/output.py).

        Args:
            on_progress: Called in the thread that steps with how many tokens of the prompt are known: at the beginning,
                behind each step that has evaluated more of them, and when all are.

        Raises:
            ValueError: the decoding or the sampling cannot be.
        """
        llm = self._llm
        sampling = dict(wanted.sampling)
        if wanted.grammar is not None:
            sampling["grammar"] = wanted.grammar.for_sampler()
        processors = [bias_processor(wanted.logit_bias)] if wanted.logit_bias else []
        processors += [wanted.new_processor()] if wanted.new_processor else []
        output = llm.new_output(
            wanted.prompt, wanted.stop, wanted.max_tokens, wanted.n_logprobs, wanted.line_seconds, wanted.shown,
            wanted.stops_loops,
        )  # fmt: skip
        request = llm.new_request(
            wanted.prompt,
            output,
            n_prompt_logprobs=wanted.n_logprobs if wanted.echo else None,
            logits_processor=LogitsProcessorList(processors) if processors else None,
            sampling=sampling,
        )
        request.owner = wanted.owner

        told = -1

        def tell(event: str) -> None:
            nonlocal told
            if event in ("begun", "prompt") and request.slot.n_evaluated != told:  # the same while it waits
                told = request.slot.n_evaluated
                on_progress(told)
            elif event == "step" and len(request.arrivals) == 1:
                on_progress(len(wanted.prompt))

        return self.batch.write(
            request, seed=wanted.seed, decoding=wanted.decoding, trace=wanted.records, on_event=tell
        )


def _with_arguments_as_texts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for the few templates that take the arguments of a call as JSON, not as an object."""

    def call_of(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    return [
        {**message, "tool_calls": list(map(call_of, message["tool_calls"]))} if message.get("tool_calls") else message
        for message in messages
    ]


def built_in() -> list[str]:
    """Names of llama.cpp's own templates."""
    n = llama_cpp.llama_chat_builtin_templates(None, 0)
    names = (ctypes.c_char_p * n)()
    llama_cpp.llama_chat_builtin_templates(ctypes.cast(names, ctypes.POINTER(ctypes.c_char_p)), n)
    return [name.decode() for name in names if name is not None]


def handler_of(template: str, bos: str, eos: str, adds_prompt: bool = True) -> Any:
    """A chat handler of llama-cpp-python.

    Args:
        template: In Jinja, or the name of a built-in one.
        bos, eos: Texts of the tokens that a text begins and ends with.
        adds_prompt: Whether the prompt ends with the beginning of an answer.

    Raises:
        ValueError: the template cannot be read.
    """
    if template in built_in():
        return llama_chat_format.chat_formatter_to_chat_completion_handler(_BuiltIn(template, eos, adds_prompt))
    try:
        return llama_chat_format.Jinja2ChatFormatter(template, eos, bos, adds_prompt).to_chat_handler()
    except Exception as error:  # what a template may raise when it is compiled
        raise ValueError(f"the chat template cannot be read: {error}; give one in Jinja, or a name.") from error


class _BuiltIn:
    """A formatter of llama-cpp-python."""

    def __init__(self, name: str, eos: str, adds_prompt: bool) -> None:
        self._name = name.encode()
        self._eos = eos
        self._adds_prompt = adds_prompt

    def __call__(self, *, messages: Sequence[Any], **_: Any) -> llama_chat_format.ChatFormatterResponse:
        given = [(message["role"].encode(), message["content"].encode()) for message in messages]
        if any(b"\0" in text for one in given for text in one):
            raise ValueError("they have a NUL character")
        chat = (llama_cpp.llama_chat_message * len(given))(*given)
        first: tuple[Any, ...] = (self._name, chat, len(given), self._adds_prompt)
        n = max(0, llama_cpp.llama_chat_apply_template(*first, None, 0))
        buffer = ctypes.create_string_buffer(n + 1)
        llama_cpp.llama_chat_apply_template(*first, buffer, n + 1)
        return llama_chat_format.ChatFormatterResponse(
            prompt=buffer.raw[:n].decode(), stop=[self._eos] if self._eos else []
        )
