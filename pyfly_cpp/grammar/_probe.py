"""What a grammar costs: `Probe` reads and tries the constraint of a request.

A schema, or what was written for llama.cpp, becomes a grammar of llguidance first. A grammar is tried by writing a few
random texts that follow it: the server's other requests wait while a step of a grammar is made, so one whose steps take
long is refused (what is not tried is limited by llguidance itself). So is one that takes long to read, or much memory:
each request reads it. A call of llguidance cannot be interrupted, so one that takes far too long ends the process
(SIGVTALRM), as does a lack of memory there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import llama_cpp
import numpy as np

from pyfly_cpp.grammar.gbnf import from_gbnf
from pyfly_cpp.grammar.guides import Guide, GuideTokens, tokens_of
from pyfly_cpp.grammar.schemas import Framed, SchemaGrammar, grammar_of_any, schema_from
from pyfly_cpp.machine.threads import DEEP_STACK, stacks_of

MEMORY = 2**28
"""Bytes that reading a grammar may take."""
TOO_SLOW = "takes too long to read, or with each token; make it simpler"
TOO_LARGE = "takes too much memory; make it smaller"

_N_TEXTS, _N_STEPS = 4, 64
_TRY_SECONDS = 0.5
_STEP_SECONDS = 0.1
_READ_SECONDS, _READ_BYTES = 0.1, 2**25
"""Of a request: for reading its grammar."""
_CALL_SECONDS = 0.25
"""Processor time after which a call is not waited for; above both limits, as signals may be late."""


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
        self._tokens = tokens_of(llama_cpp.llama_model_get_vocab(model))

    def answer(self, constraint: dict[str, Any]) -> dict[str, Any]:
        """Reads and tries a constraint (`Constraint` as a dict).

        Returns:
            The fields of a `SchemaGrammar`, or `error` (words for the client).
        """
        found = []

        def read() -> None:
            try:
                found.append(self._read(constraint)._asdict())
            except _Refused as error:
                found.append({"error": str(error)})
            except MemoryError:
                found.append({"error": TOO_LARGE})

        with stacks_of(DEEP_STACK // 4):
            thread = threading.Thread(target=read)
            thread.start()
        thread.join()
        return found[0]

    def _read(self, constraint: dict[str, Any]) -> SchemaGrammar:
        try:
            grammar = _grammar_of(constraint)
        except ValueError as error:
            raise _Refused(str(error)) from None
        if len(grammar.text.encode("utf-8")) > self._max_bytes and constraint["kind"] == "schema":
            raise _Refused(f"becomes a grammar of more than {self._max_bytes} bytes; make it smaller")
        try:
            with _light(), _bounded():
                guide = Guide(self._tokens, grammar)
            for seed in range(_N_TEXTS):
                _try(functools.partial(_next_of_guide, guide, self._tokens, []), random.Random(seed))
        except ValueError:
            raise _Refused("cannot be followed: nothing follows it, or it is too complex; make it simpler") from None
        return grammar


def _grammar_of(constraint: dict[str, Any]) -> SchemaGrammar:
    if constraint["kind"] != "schema":
        return from_gbnf(constraint["text"])
    framed = [Framed(*parts) for parts in schema_from(constraint["text"])]
    return grammar_of_any(framed, constraint["is_repeated"])


def limit_memory() -> None:
    """Lets this process take no more than `MEMORY` in addition, where the system can see to that."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            n = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (n, n))


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Around a call of llguidance, which may end the process."""
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
        raise _Refused("takes too much time or memory for each request; repeat less in it")


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


def _next_of_guide(guide: Guide, tokens: GuideTokens, text: list[int], token: int | None) -> Any:
    text += [] if token is None else [token]
    bits = np.zeros((tokens.texts.vocab_size + 31) // 32, dtype=np.uint32)
    guide.fill(np.array(text, dtype=np.int32), bits)
    return np.setdiff1d(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")), tokens.ends)
