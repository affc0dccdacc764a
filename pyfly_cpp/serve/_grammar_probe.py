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
from llama_cpp.llama_grammar import json_schema_to_gbnf

_MEMORY = 2**30
"""Bytes that a grammar may take."""
_N_CANDIDATES = 4096
_N_TEXTS, _N_STEPS = 3, 40
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
    vocab = llama_cpp.llama_model_get_vocab(model)
    _limit_memory()
    out.write("ready\n")
    out.flush()
    for line in sys.stdin:
        try:
            answer = {"grammar": _read(json.loads(line), vocab, max_bytes)}
        except _Refused as error:
            answer = {"error": str(error)}
        except MemoryError:
            answer = {"error": "it takes too much memory"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            n = int(file.read().split()[0]) * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (n, n))


def _read(constraint: dict[str, Any], vocab: Any, max_bytes: int) -> str:
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
        _try(grammar, vocab, random.Random(seed))
    return str(grammar)


def _from_schema(text: str) -> str:
    try:
        return str(json_schema_to_gbnf(text))
    except MemoryError:
        raise
    except Exception as error:  # the converter asserts and indexes where a schema is none, or is of a kind it lacks
        reason = str(error).rstrip(".")[:200] or type(error).__name__
        raise _Refused(f"it is no JSON schema that llama-cpp-python can follow ({reason})") from None


def _try(grammar: str, vocab: Any, choose: random.Random) -> None:
    sampler = llama_cpp.llama_sampler_init_grammar(vocab, grammar.encode("utf-8"), b"root")
    if not sampler:
        raise _Refused("it is no GBNF grammar with a rule `root`, or one of its rules begins with itself")
    n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
    ids = choose.sample(range(n_vocab), min(n_vocab, _N_CANDIDATES))
    data = (llama_cpp.llama_token_data * len(ids))()
    begun = time.process_time()
    try:
        for _ in range(_N_STEPS):
            for entry, token in zip(data, ids):
                entry.id, entry.logit, entry.p = token, 0.0, 0.0
            array = llama_cpp.llama_token_data_array(data=data, size=len(ids), selected=-1, sorted=False)
            before = time.process_time()
            llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
            allowed = [entry.id for entry in data if entry.logit > -1e30]
            allowed = [token for token in allowed if not llama_cpp.llama_vocab_is_eog(vocab, token)]
            if not allowed:
                return
            llama_cpp.llama_sampler_accept(sampler, choose.choice(allowed))
            now = time.process_time()
            if now - before > _STEP_SECONDS:
                raise _Refused("its steps take too long; make it simpler")
            if now - begun > _TRY_SECONDS:
                return
    finally:
        llama_cpp.llama_sampler_free(sampler)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
