"""What a grammar costs: `Probe` reads and tries the constraint of a request.

A schema becomes a grammar first. A grammar is tried by writing a few random texts that follow it: the server's other
requests wait while a step of a grammar is made, so one whose steps take long is refused. So is one that takes long to
read or to copy, or much memory: each request reads it, and steps with drafts copy it. A call of llama.cpp cannot be
interrupted, so one that takes far too long ends the process (SIGVTALRM), as does a lack of memory within llama.cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import llama_cpp
import numpy as np

from pyfly_cpp.grammar.guides import Guide, GuideTokens, tokens_of
from pyfly_cpp.grammar.schemas import Framed, SchemaGrammar, grammar_of_any, schema_from

MEMORY = 2**28
"""Bytes that reading a grammar may take."""
TOO_SLOW = "takes too long to read, or with each token; make it simpler"
TOO_LARGE = "takes too much memory; make it smaller"

_N_CANDIDATES = 1024
_N_TEXTS, _N_STEPS = 4, 64
_TRY_SECONDS = 0.5
_STEP_SECONDS = 0.1
_READ_SECONDS, _READ_BYTES = 0.1, 2**25
"""Of a request: for reading its grammar and copying it once."""
_CALL_SECONDS = 0.25
"""Processor time after which a call of llama.cpp is not waited for; above both limits, as signals may be late."""


class _Refused(Exception):
    pass


class Probe:
    """The vocabulary that grammars are tried with."""

    def __init__(self, model_path: str, max_bytes: int) -> None:
        """
        Args:
            model_path: The file of the vocabulary.
            max_bytes: Most bytes of a grammar.

        Raises:
            OSError: the file cannot be read.
        """
        self._max_bytes = max_bytes
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(os.fsencode(model_path), params)
        if not model:
            raise OSError(f"{model_path} cannot be read.")
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self._row = _candidates(self._vocab)
        self._tokens = tokens_of(self._vocab)

    def answer(self, constraint: dict[str, Any]) -> dict[str, Any]:
        """Reads and tries a constraint (`Constraint` as a dict).

        Returns:
            `grammar` (GBNF, or of a schema `SchemaGrammar.text`) and `loose` (keywords that it does not enforce), or
            `error` (words for the client).
        """
        try:
            grammar = self._read(constraint)
        except _Refused as error:
            return {"error": str(error)}
        except MemoryError:
            return {"error": TOO_LARGE}
        return {"grammar": grammar.text, "loose": grammar.loose}

    def _read(self, constraint: dict[str, Any]) -> SchemaGrammar:
        if constraint["kind"] == "schema":
            return self._read_schema(constraint)
        sampler = _sampler(constraint["text"], self._vocab)
        try:
            for seed in range(_N_TEXTS):
                text = llama_cpp.llama_sampler_clone(sampler)
                try:
                    _try(functools.partial(_next_of_sampler, text, self._row), random.Random(seed))
                finally:
                    llama_cpp.llama_sampler_free(text)
        finally:
            llama_cpp.llama_sampler_free(sampler)
        return SchemaGrammar(constraint["text"])

    def _read_schema(self, constraint: dict[str, Any]) -> SchemaGrammar:
        try:
            framed = [Framed(*parts) for parts in schema_from(constraint["text"])]
            grammar = grammar_of_any(framed, constraint["is_repeated"])
        except ValueError as error:
            raise _Refused(str(error)) from None
        if len(grammar.text.encode("utf-8")) > self._max_bytes:
            raise _Refused(f"becomes a grammar of more than {self._max_bytes} bytes; make it smaller")
        try:
            with _light(), _bounded():
                guide = Guide(self._tokens, grammar)
            for seed in range(_N_TEXTS):
                _try(functools.partial(_next_of_guide, guide, self._tokens, []), random.Random(seed))
        except ValueError:
            raise _Refused("cannot be followed: nothing follows it, or it is too complex; make it simpler") from None
        return grammar


def _candidates(vocab: Any) -> Any:
    """Tokens to try grammars with, as llama.cpp takes them: all that are single characters, and some longer ones."""
    buffer = ctypes.create_string_buffer(8)
    ids = range(llama_cpp.llama_vocab_n_tokens(vocab))
    writing = [token for token in ids if not llama_cpp.llama_vocab_is_eog(vocab, token)]
    sizes = {token: llama_cpp.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, False) for token in writing}
    chosen = [token for token, size in sizes.items() if size == 1]
    others = [token for token, size in sizes.items() if size != 1]
    chosen += random.Random(0).sample(others, min(len(others), max(0, _N_CANDIDATES - len(chosen))))
    out = np.zeros(len(chosen), dtype=np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)]))
    out["id"] = chosen
    return out


def limit_memory() -> None:
    """Lets this process take no more than `MEMORY` in addition, where the system can see to that."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            n = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (n, n))


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Around a call of llama.cpp or llguidance, which may end the process."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    signal.setitimer(signal.ITIMER_VIRTUAL, _CALL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@contextlib.contextmanager
def _light() -> Iterator[None]:
    """Around what each request does with its grammar: it is to take little time and memory."""
    n_bytes, begun = _allocated(), time.process_time()
    yield
    if _allocated() - n_bytes > _READ_BYTES or time.process_time() - begun > _READ_SECONDS:
        raise _Refused("takes too much time or memory for each text; repeat less in it")


def _sampler(grammar: str, vocab: Any) -> Any:
    with _light():
        with _bounded():
            sampler = llama_cpp.llama_sampler_init_grammar(vocab, grammar.encode("utf-8"), b"root")
        if not sampler:
            raise _Refused("is not a GBNF grammar with a rule `root`, or one of its rules begins with itself")
        with _bounded():
            copy = llama_cpp.llama_sampler_clone(sampler)
    llama_cpp.llama_sampler_free(copy)
    return sampler


class _Allocations(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]  # fmt: skip


def _allocated() -> int:
    """Bytes that this process has allocated, if the C library counts them (glibc)."""
    count = getattr(ctypes.CDLL(None), "mallinfo2", None) if os.name == "posix" else None
    if count is None:
        return 0
    count.restype = _Allocations
    now = count()
    return int(now.uordblks + now.hblkhd)


def _try(follow: Callable[[int | None], Any], choose: random.Random) -> None:
    """Writes a random text. `follow`: from the last token to those that may be next."""
    begun, token = time.process_time(), None
    for _ in range(_N_STEPS):
        before = time.process_time()
        with _bounded():
            allowed = follow(token)
        if not len(allowed):
            return
        token = int(choose.choice(allowed))
        now = time.process_time()
        if now - before > _STEP_SECONDS:
            raise _Refused(TOO_SLOW)
        if now - begun > _TRY_SECONDS:
            return


def _next_of_sampler(sampler: Any, candidates: Any, token: int | None) -> Any:
    if token is not None:
        llama_cpp.llama_sampler_accept(sampler, token)
    row = candidates.copy()
    data = row.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
    array = llama_cpp.llama_token_data_array(data=data, size=len(row), selected=-1, sorted=False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    return row["id"][np.isfinite(row["logit"])]


def _next_of_guide(guide: Guide, tokens: GuideTokens, text: list[int], token: int | None) -> Any:
    text += [] if token is None else [token]
    bits = np.zeros((tokens.texts.vocab_size + 31) // 32, dtype=np.uint32)
    guide.fill(np.array(text, dtype=np.int32), bits)
    return np.setdiff1d(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")), tokens.ends)
