"""Runs a program under limits: `python -I -S _limited.py LIMITS FOLDER`, started by sandbox.py alone.

A file of its own that imports only the standard library, so that the process that runs a model's code never had numpy,
llama.cpp or the caller's objects in it. Standard input is a secret, then the program. Standard output gets the verdict:
the secret if the program ran to its end, else `failed` or `memory` and a reason. Standard error ends before the program
begins.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
import traceback

SECRET_BYTES = 32


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    least = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (least, least))


def _run(received: list[bytes], verdict: int) -> bytes:
    """Runs the program. When it ends, the secret is written to `verdict`; if it raises, the report is returned."""
    secret, source = [received[0][:SECRET_BYTES]], received.pop()[SECRET_BYTES:]
    try:
        code = compile(source.decode("utf-8", "surrogatepass"), "<program>", "exec", dont_inherit=True)
        names = {"__builtins__": __builtins__}  # as `code_eval`: no `__main__`, so its blocks do not run
        # Operands are evaluated from left to right, so while the program runs, the secret is in no variable.
        os.write(verdict, (secret.pop(), exec(code, names))[0])  # type: ignore[func-returns-value]
        return b""
    except MemoryError:
        return b"memory\nMemoryError"
    except BaseException as error:
        try:
            last = traceback.extract_tb(error.__traceback__)[-1:]
            line = f" (line {last[0].lineno})" if last and last[0].filename == "<program>" else ""
            return f"failed\n{type(error).__name__}: {str(error)[:300]}{line}".encode("utf-8", "replace")
        except BaseException:  # of the program's own making
            return b"failed\nan exception that cannot be shown"


def main(limits: dict[str, float], folder: str) -> None:
    """Sets the limits and runs the program of standard input in the folder; ends the process."""
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder)
    received = [sys.stdin.buffer.read()]
    verdict = os.dup(1)
    _limit(resource.RLIMIT_CPU, int(limits["cpu_seconds"]))
    _limit(resource.RLIMIT_FSIZE, int(limits["file_bytes"]))
    _limit(resource.RLIMIT_NOFILE, 64)
    _limit(resource.RLIMIT_CORE, 0)
    if sys.platform.startswith("linux"):  # macOS does not honour it
        _limit(resource.RLIMIT_AS, int(limits["memory_bytes"]))
    if limits["processes"]:
        _limit(resource.RLIMIT_NPROC, int(limits["processes"]))
    signal.alarm(math.ceil(limits["wall_seconds"]) + 1)  # should nobody be left to kill it
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.write(verdict, _run(received, verdict))
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
