"""`CompletingLlama`: completions, from a prompt to the dictionaries of the base class.

The loop is ours, since the base class's own gives another text than it should: of several stop strings the first of the
list wins, characters vanish at the end of a stream and from log-probabilities, tokens of more than 32 bytes everywhere,
and a limit of tokens in the middle of a character is passed by.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llama_cpp.llama import LogitsProcessorList, StoppingCriteriaList
from llama_cpp.llama_grammar import LlamaGrammar
from llama_cpp.llama_tokenizer import LlamaTokenizer

from pyfly_cpp.engine.generation import Generation
from pyfly_cpp.engine.output import Output, Token, completion_logprobs, prompt_tokens
from pyfly_cpp.engine.processors import bias_processor
from pyfly_cpp.engine.request import Request
from pyfly_cpp.errors import ContextFullError
from pyfly_cpp.llama.guarded_llama import GuardedLlama
from pyfly_cpp.llama.schemas import with_strict_strings

_INFILL = 0
"""What the base class puts for the tokens around prefix, suffix and middle."""
_MARK = "\u263a"
"""Goes before a suffix, for a tokenizer that puts a space before a text; two tokens with that space."""


class CompletingLlama(GuardedLlama):
    """A `GuardedLlama` whose subclass starts generations."""

    def start(self, prompt: Sequence[int], request: Request, **arguments: Any) -> Generation:
        """See `FlyLlama.start`."""
        raise NotImplementedError

    def new_output(
        self,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        n_logprobs: int | None = None,
    ) -> Output:
        """What makes the text of an answer to a prompt of these tokens; the other arguments are those of `Output`."""
        pieces = self._pieces(prompt)
        if len(prompt) == 0 or list(prompt) == [self.token_bos()]:
            pieces = _without_space(pieces)
        return Output(pieces, self.vocabulary.ends_text, stop, max_tokens, n_logprobs)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """As in the base class, which leaves out tokens of more than 32 bytes."""
        if not isinstance(self.tokenizer_, LlamaTokenizer):
            text: bytes = super().detokenize(tokens, prev_tokens, special)
            return text
        text = b"".join([self.vocabulary.piece(token, special) for token in tokens])
        return text[1:] if text[:1] == b" " and tokens[0] == self.token_bos() else text

    def _pieces(self, before: Sequence[int]) -> Callable[[int], bytes]:
        """The bytes of each token of a text behind others."""
        if isinstance(self.tokenizer_, LlamaTokenizer):
            pieces: Callable[[int], bytes] = self.vocabulary.piece
            return pieces
        return _Growth(self.detokenize, list(before))

    def _create_completion(
        self,
        prompt: str | list[int],
        suffix: str | None = None,
        max_tokens: float | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | list[str] | None = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: Mapping[Any, float] | None = None,
    ) -> Iterator[Any]:
        """The base class's completion: yields its chunks, or one response.

        Raises:
            ContextFullError: the prompt leaves no room for an answer.
        """
        tokens = self._completion_prompt(prompt, suffix)
        n_room = self._n_ctx - len(tokens)
        if n_room < 1:
            failure = ContextFullError(  # in the words that llama_cpp.server looks for
                f"Requested tokens ({len(tokens)}) exceed context window of {self._n_ctx}, the answer included; "
                "shorten the prompt or raise n_ctx."
            )
            failure.n_prompt = len(tokens)
            raise failure
        most = n_room if max_tokens is None or not max_tokens > 0 else math.ceil(min(max_tokens, n_room))
        if logit_bias is not None:
            bias = bias_processor([(int(token), float(value)) for token, value in logit_bias.items()])
            logits_processor = LogitsProcessorList([*(logits_processor or ()), bias])
        if self.verbose:
            self._ctx.reset_timings()
        self._load_cached(tokens)
        self.set_seed(random.Random(self._seed).randint(0, 2**32) if seed is None else seed)
        n_of_prompt = logprobs if echo and not stream else None
        generation = self.start(
            tokens, Request(most, keeps_rows=logprobs is not None, n_prompt_logprobs=n_of_prompt),
            logits_processor=logits_processor, stopping_criteria=stopping_criteria, temp=temperature, top_p=top_p,
            min_p=min_p, typical_p=typical_p, frequency_penalty=frequency_penalty, presence_penalty=presence_penalty,
            repeat_penalty=repeat_penalty, top_k=top_k, tfs_z=tfs_z, mirostat_mode=mirostat_mode,
            mirostat_tau=mirostat_tau, mirostat_eta=mirostat_eta,
            grammar=None if grammar is None else with_strict_strings(grammar),
        )  # fmt: skip
        output = self.new_output(tokens, [stop] if isinstance(stop, str) else stop or (), most, logprobs)
        head = {
            "id": f"cmpl-{uuid.uuid4()}", "object": "text_completion", "created": int(time.time()),
            "model": self.model_path if model is None else model,
        }  # fmt: skip
        committed: list[int] = []
        told: list[Token] = []
        n_before = len(prompt)
        with contextlib.closing(generation.run()) as run:
            while output.cause is None:
                token = next(run, None)
                if token is None:  # a stopping criterion said so
                    piece = output.end("stop")
                else:
                    committed.append(token)
                    piece = output.add(token, generation.row)
                for one in piece.tokens:
                    if stream and (one.text or logprobs is not None):
                        yield {**head, "choices": [self._choice(one.text, [one], n_before, logprobs)]}
                    n_before += len(one.text)
                told += piece.tokens
        finish = piece.finish
        if stopping_criteria is not None and stopping_criteria(self._input_ids, generation.row):
            finish = "stop"
        if self.verbose:
            self._ctx.print_timings()
        if stream:
            yield {**head, "choices": [self._choice("", [], 0, None, finish)]}
        if self.cache:
            self.cache[[*tokens, *committed[: output.n_tokens]]] = self.save_state()
        if stream:
            return
        text = "".join(one.text for one in told)
        offset = len(prompt)
        if echo:
            text = (prompt if isinstance(prompt, str) else self._text(prompt)) + text
            offset = 0
            if logprobs is not None:
                told = [*self._echoed(tokens, generation), *told]
        yield {
            **head,
            "choices": [self._choice(text, told, offset, logprobs, finish)],
            "usage": {
                "prompt_tokens": len(tokens),
                "completion_tokens": output.n_tokens,
                "total_tokens": len(tokens) + output.n_tokens,
            },
        }

    def _choice(
        self, text: str, tokens: list[Token], offset: int, n_logprobs: int | None, finish: str | None = None
    ) -> dict[str, Any]:
        """The only choice of a response. `offset`: characters before its tokens."""
        logprobs = (
            None if n_logprobs is None else completion_logprobs(tokens, offset, lambda token: self._text([token]))
        )
        return {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish}

    def _echoed(self, prompt: list[int], generation: Generation) -> list[Token]:
        """The prompt's tokens as a response shows them: without BOS, and with nothing known of the first one."""
        tokens = prompt_tokens(prompt, self._pieces([]), generation.prompt_logprobs)
        if tokens[0].id == self.token_bos():
            del tokens[0]
        return [token._replace(logprobs=token.logprobs if i else None) for i, token in enumerate(tokens)]

    def _text(self, tokens: list[int]) -> str:
        return self.detokenize(tokens).decode("utf-8", "ignore")

    def _completion_prompt(self, prompt: str | list[int], suffix: str | None) -> list[int]:
        """The tokens of a prompt, as the base class puts them together."""
        if isinstance(prompt, list) and suffix is None:
            return list(prompt)
        model, bos = self._model, self.token_bos()
        cls, sep = model.token_cls(), model.token_sep()
        first = bos if cls == -1 else cls
        begin = [first] if model.add_bos_token() and first != -1 else []
        end = [self.token_eos() if sep == -1 else sep] if model.add_eos_token() or sep != -1 else []
        tokens = self._part(prompt, special=suffix is None) if isinstance(prompt, str) else list(prompt)
        if suffix is not None:
            has_mark = bool(suffix) and self.metadata.get("tokenizer.ggml.add_space_prefix", "true") == "true"
            behind = self._part(_MARK + suffix if has_mark else suffix)[2 * has_mark :]
            first_part, second = (behind, tokens) if self.spm_infill else (tokens, behind)
            tokens = [_INFILL, *first_part, _INFILL, *second, _INFILL]
        tokens = [*begin, *tokens, *end]
        if tokens[:2] == [bos, bos]:
            warnings.warn(
                "the prompt begins with two BOS tokens, its own and the one that the model adds; leave its own out.",
                RuntimeWarning,
                stacklevel=3,
            )
        return tokens

    def _part(self, text: str, special: bool = False) -> list[int]:
        return self.tokenize(text.encode("utf-8"), add_bos=False, special=special) if text else []

    def _load_cached(self, prompt: list[int]) -> None:
        """Loads the state of the cache, if there is one, where it serves the prompt better than the context does."""
        if self.cache:
            with contextlib.suppress(KeyError):
                state = self.cache[prompt]
                lengths = [
                    self.longest_token_prefix(ids.tolist(), prompt) for ids in (state.input_ids, self._input_ids)
                ]
                if lengths[0] > lengths[1]:
                    self.load_state(state)


class _Growth:
    """The pieces of a tokenizer that knows whole texts alone: what the text has grown by with each token."""

    def __init__(self, detokenize: Callable[..., bytes], before: list[int]) -> None:
        self._detokenize = detokenize
        self._before = before
        self._tokens: list[int] = []
        self._n = 0

    def __call__(self, token: int) -> bytes:
        self._tokens.append(token)
        text = self._detokenize(self._tokens, prev_tokens=self._before)
        if text.endswith(b"\xef\xbf\xbd"):  # U+FFFD: in the middle of a character
            return b""
        piece, self._n = text[self._n :], len(text)
        return piece


def _without_space(pieces: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Without the space that vocabularies put before a text."""
    is_first = True

    def piece(token: int) -> bytes:
        nonlocal is_first
        was_first, is_first = is_first, False
        return pieces(token).removeprefix(b" ") if was_first else pieces(token)

    return piece
