"""Completions, from a prompt to the dictionaries of the base class: of a `FlyLlama`, and of a `FlyBatch`.

They are ours, since the base class's own gives another text than it should: of several stop strings the first of the
list wins, characters vanish at the end of a stream and from log-probabilities, tokens of more than 32 bytes everywhere,
and a limit of tokens in the middle of a character is passed by.
"""

from __future__ import annotations

import functools
import math
import random
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_cpp import llama_chat_format
from llama_cpp.llama import LogitsProcessorList, StoppingCriteriaList
from llama_cpp.llama_grammar import LlamaGrammar

from pyfly_cpp.engine.output import Logprobs, Output, Piece, Token, completion_logprobs, prompt_tokens
from pyfly_cpp.engine.processors import bias_processor, listed
from pyfly_cpp.engine.request import Request
from pyfly_cpp.engine.request_limits import require_request
from pyfly_cpp.errors import ContextFullError
from pyfly_cpp.grammar.response_format import named_tool
from pyfly_cpp.llama.prompting import chat_handler, hear_chat, only_formats
from pyfly_cpp.llama.strict_grammars import with_strict_strings

_INFILL = 0
"""What the base class puts for the tokens around prefix, suffix and middle."""
_MARK = "\u263a"
"""Goes before a suffix, for a tokenizer that puts a space before a text; two tokens with that space."""

Chunk = dict[str, Any]


class Completion:
    """A completion: the request that it is, and what a response or its chunks tell of the pieces of its answer."""

    def __init__(
        self,
        llm: Any,
        prompt: str | list[int],
        suffix: str | None = None,
        max_tokens: float | None = 16,
        temperature: float = 0.8,
        *,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | list[str] | None = None,
        stream: bool = False,
        seed: int | None = None,
        model: str | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: Mapping[Any, float] | None = None,
        **sampling: Any,
    ) -> None:
        """Arguments as of `create_completion`, of a `FlyLlama`.

        Raises:
            ContextFullError: the prompt leaves no room for an answer.
        """
        require_request(max_tokens, seed)
        self._llm = llm
        self._given = prompt
        self._n_logprobs = logprobs
        self._echo = echo
        self._prompt_text = prompt if isinstance(prompt, str) else ""
        self._echoed = list[Token]()
        self._seed = seed
        self._texts = dict[int, str]()  # of tokens that were probable
        self.prompt = _tokens_of(llm, prompt, suffix)
        """The prompt's tokens."""
        n_ctx = llm.loaded.n_ctx
        n_room = n_ctx - len(self.prompt)
        if n_room < 1:
            failure = ContextFullError(  # in the words that llama_cpp.server looks for
                f"Requested tokens ({len(self.prompt)}) exceed context window of {n_ctx}, the answer "
                "included; shorten the prompt or raise {n_ctx}."
            )
            failure.n_prompt = len(self.prompt)
            raise failure
        most = n_room if max_tokens is None or not max_tokens > 0 else math.ceil(min(max_tokens, n_room))
        if logit_bias is not None:
            bias = bias_processor([(int(token), float(value)) for token, value in logit_bias.items()])
            logits_processor = LogitsProcessorList([*listed(logits_processor), bias])
        self.output: Output = llm.new_output(
            self.prompt, [stop] if isinstance(stop, str) else stop or (), most, logprobs
        )
        self.request: Request = llm.new_request(
            self.prompt, self.output, n_prompt_logprobs=logprobs if echo and not stream else None,
            logits_processor=logits_processor, stopping_criteria=_needed(stopping_criteria, llm),
            sampling={**sampling, "temp": temperature, "grammar": grammar and with_strict_strings(grammar)},
        )  # fmt: skip
        if logprobs is not None or echo:
            self.request.on_piece = self._keep_texts
        self._head = {
            "id": f"cmpl-{uuid.uuid4()}", "object": "text_completion", "created": int(time.time()),
            "model": llm.model_path if model is None else model,
        }  # fmt: skip

    def _keep_texts(self, piece: Piece) -> None:
        """Asks for all texts that a response needs, which may be told when the model is closed."""
        tokens = list(piece.tokens)
        if self._echo and not isinstance(self._given, str) and not self._prompt_text:
            self._prompt_text = self._text(self._given)
        if piece.prompt is not None:
            self._echoed = self._echo_of(piece.prompt)
            tokens += self._echoed
        told = [(token.id, token.logprobs[1]) for token in tokens if token.logprobs is not None]
        named = {other for own, probable in told for other in (own, *(other for other, _ in probable))}
        self._texts.update({token: self._text([token]) for token in named - self._texts.keys()})

    def next_seed(self, last: int) -> int:
        """The seed of this completion, behind one with the seed `last`."""
        return random.Random(last).randint(0, 2**32) if self._seed is None else self._seed

    def new_stream(self) -> Callable[[Piece], list[Chunk]]:
        """Tells one piece after the other in chunks."""
        n_before = len(self._given)

        def tell(piece: Piece) -> list[Chunk]:
            nonlocal n_before
            chunks = []
            for one in piece.tokens:
                if one.text or self._n_logprobs is not None:
                    chunks.append(self._tell(one.text, [one], n_before, self._n_logprobs))
                n_before += len(one.text)
            if piece.finish is not None:
                chunks.append(self._tell("", [], 0, None, piece.finish))
            return chunks

        return tell

    def response(self, pieces: Sequence[Piece]) -> Chunk:
        """Tells all pieces together."""
        tokens = [token for piece in pieces for token in piece.tokens]
        text = "".join(piece.text for piece in pieces)
        offset, n = len(self._given), pieces[-1].n_tokens
        if self._echo:
            text = self._prompt_text + text
            offset = 0
            tokens = [*self._echoed, *tokens]
        usage = {
            "prompt_tokens": len(self.prompt), "completion_tokens": n, "total_tokens": len(self.prompt) + n,
        }  # fmt: skip
        return {**self._tell(text, tokens, offset, self._n_logprobs, pieces[-1].finish), "usage": usage}

    def _tell(
        self, text: str, tokens: list[Token], offset: int, n_logprobs: int | None, finish: str | None = None
    ) -> Chunk:
        """A response without usage. `offset`: characters before its tokens."""
        logprobs = None if n_logprobs is None else completion_logprobs(tokens, offset, self._texts.__getitem__)
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "choices": [choice]}

    def _echo_of(self, logprobs: Sequence[Logprobs]) -> list[Token]:
        """The prompt's tokens as a response shows them: without BOS, and with nothing known of the first one."""
        tokens = prompt_tokens(self.prompt, self._llm.pieces([]), logprobs)
        if tokens[0].id == self._llm.token_bos():
            del tokens[0]
        return [token._replace(logprobs=token.logprobs if i else None) for i, token in enumerate(tokens)]

    def _text(self, tokens: list[int]) -> str:
        text: str = self._llm.detokenize(tokens).decode("utf-8", "ignore")
        return text


class Chat(Completion):
    """A completion that is the whole answer of a chat."""

    @staticmethod
    def is_served(llm: Any) -> bool:
        """Whether the chat format of a model consists of a prompt alone, see `only_formats`."""
        return only_formats(chat_handler(llm))

    def __init__(self, llm: Any, arguments: Mapping[str, Any]) -> None:
        """Arguments of `create_chat_completion`, with their defaults, of a `FlyLlama`."""
        has_tools = arguments.get("tools") is not None or arguments.get("functions") is not None
        tool = named_tool(arguments) if has_tools else None
        self._convert: Callable[..., Any] = llama_chat_format._convert_completion_to_chat
        if tool is not None:
            self._convert = functools.partial(llama_chat_format._convert_completion_to_chat_function, tool)
        super().__init__(llm, **hear_chat(llm, **arguments))

    def new_stream(self) -> Callable[[Piece], list[Chunk]]:
        """A function from pieces to chunks of a chat."""
        tell_piece, begin = super().new_stream(), 0

        def tell(piece: Piece) -> list[Chunk]:
            nonlocal begin
            chunks: list[Chunk] = []
            for chunk in tell_piece(piece):
                # [the beginning of a stream, this chunk, and of a call the end]
                converted = list(self._convert(iter([chunk]), stream=True))
                chunks += converted[begin : 2 if chunk["choices"][0]["finish_reason"] is None else None]
                begin = 1
            return chunks

        return tell

    def response(self, pieces: Sequence[Piece]) -> Chunk:
        """The response of a chat, from its pieces."""
        response: Chunk = self._convert(super().response(pieces), stream=False)
        return response


def _needed(criteria: StoppingCriteriaList | None, llm: Any) -> StoppingCriteriaList | None:
    """Without the criteria of the base class's chat templates that name nothing but end-of-text tokens: each would cost
    a copy of every token's row."""

    def is_needed(criterion: Any) -> bool:
        if getattr(criterion, "__qualname__", "") != "Jinja2ChatFormatter.__call__.<locals>.stop_on_last_token":
            return True
        return not all(map(llm.vocabulary.ends_text, criterion.__closure__[0].cell_contents.stop_token_ids))

    return StoppingCriteriaList([criterion for criterion in listed(criteria) if is_needed(criterion)]) or None


def _tokens_of(llm: Any, prompt: str | list[int], suffix: str | None) -> list[int]:
    """The tokens of a prompt, as the base class puts them together. Raises ValueError: it is bytes."""
    if isinstance(prompt, (bytes, bytearray)):
        raise ValueError(f"a prompt is a string or a list of token ids, not {prompt!r}; decode() it.")
    if isinstance(prompt, list) and suffix is None:
        return _warned_of_two(llm.token_bos(), list(prompt))
    model, bos = llm._model, llm.token_bos()
    cls, sep = model.token_cls(), model.token_sep()
    first = bos if cls == -1 else cls
    begin = [first] if model.add_bos_token() and first != -1 else []
    end = [llm.token_eos() if sep == -1 else sep] if model.add_eos_token() or sep != -1 else []
    tokens = _tokenized(llm, prompt, special=suffix is None) if isinstance(prompt, str) else list(prompt)
    if suffix is not None:
        has_mark = bool(suffix) and llm.metadata.get("tokenizer.ggml.add_space_prefix", "true") == "true"
        behind = _tokenized(llm, _MARK + suffix if has_mark else suffix)[2 * has_mark :]
        first_part, second = (behind, tokens) if llm.spm_infill else (tokens, behind)
        tokens = [_INFILL, *first_part, _INFILL, *second, _INFILL]
    return _warned_of_two(bos, [*begin, *tokens, *end])


def _warned_of_two(bos: int, tokens: list[int]) -> list[int]:
    if tokens[:2] == [bos, bos]:
        warnings.warn(
            "the prompt begins with two BOS tokens, its own and the one that the model adds; leave its own out.",
            RuntimeWarning,
            stacklevel=5,
        )
    return tokens


def _tokenized(llm: Any, text: str, special: bool = False) -> list[int]:
    return list(llm.tokenize(text.encode("utf-8"), add_bos=False, special=special)) if text else []
