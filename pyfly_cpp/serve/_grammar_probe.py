"""Reads and tries grammars: `python -m pyfly_cpp.serve._grammar_probe MODEL MAX_BYTES`.

For each line of stdin, a constraint as JSON, writes a line: `{"grammar": ...}` or `{"error": ...}`. A schema becomes a
grammar first. A grammar is tried by writing a few random texts that follow it: the server's other texts wait while a
step of a grammar is made, so one whose steps take long is refused. What takes too long here, or ends the process, is
refused by whoever waits for the line.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import re
import signal
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

from pyfly_cpp.llama.schemas import schema_from, schema_to_gbnf

_MEMORY = 2**30
"""Bytes that a grammar may take."""
_N_CANDIDATES = 1024
_N_TEXTS, _N_STEPS = 4, 64
_TRY_SECONDS = 0.5
_STEP_SECONDS = 0.1
_ROOT = "pyfly-own-root"


class _Refused(Exception):
    pass


def main(model_path: str, max_bytes: int) -> None:
    """Serves lines until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    out = os.fdopen(os.dup(1), "w")
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(os.fsencode(model_path), params)
    if not model:
        sys.exit(1)  # the file is not there any more, as its missing line tells
    vocab = llama_cpp.llama_model_get_vocab(model)
    candidates = _candidates(vocab)
    _limit_memory()
    out.write("ready\n")
    out.flush()
    for line in sys.stdin:
        try:
            answer = {"grammar": _read(json.loads(line), vocab, candidates, max_bytes)}
        except _Refused as error:
            answer = {"error": str(error)}
        except MemoryError:
            answer = {"error": "it takes too much memory"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


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


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            n = int(file.read().split()[0]) * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (n, n))


def _read(constraint: dict[str, Any], vocab: Any, candidates: Any, max_bytes: int) -> str:
    grammar = constraint["text"]
    if constraint["kind"] == "schema":
        grammar = _from_schema(grammar)
    if constraint["opening"] or constraint["closing"]:
        inner = re.sub(r"(?m)^root ::=", f"{_ROOT} ::=", grammar)
        literals = (json.dumps(constraint["opening"]), _ROOT, json.dumps(constraint["closing"]))
        grammar = f"root ::= {' '.join(literals)}\n{inner}"
    if len(grammar.encode("utf-8")) > max_bytes:
        raise _Refused(f"it becomes a grammar of more than {max_bytes} bytes; make it smaller")
    for seed in range(_N_TEXTS):
        _try(grammar, vocab, candidates, random.Random(seed))
    return str(grammar)


def _from_schema(text: str) -> str:
    try:
        return schema_to_gbnf(schema_from(text))
    except MemoryError:
        raise
    except Exception as error:  # the converter asserts and indexes where a schema is none, or is of a kind it lacks
        reason = str(error).rstrip(".")[:200] or type(error).__name__
        raise _Refused(f"it is not a JSON schema that llama-cpp-python can follow ({reason})") from None


def _try(grammar: str, vocab: Any, candidates: Any, choose: random.Random) -> None:
    sampler = llama_cpp.llama_sampler_init_grammar(vocab, grammar.encode("utf-8"), b"root")
    if not sampler:
        raise _Refused("it is not a GBNF grammar with a rule `root`, or one of its rules begins with itself")
    begun = time.process_time()
    try:
        for _ in range(_N_STEPS):
            row = candidates.copy()
            data = row.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
            array = llama_cpp.llama_token_data_array(data=data, size=len(row), selected=-1, sorted=False)
            before = time.process_time()
            llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
            allowed = row["id"][np.isfinite(row["logit"])]
            if not len(allowed):
                return
            llama_cpp.llama_sampler_accept(sampler, int(choose.choice(allowed)))
            now = time.process_time()
            if now - before > _STEP_SECONDS:
                raise _Refused("its steps take too long; make it simpler")
            if now - begun > _TRY_SECONDS:
                return
    finally:
        llama_cpp.llama_sampler_free(sampler)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
