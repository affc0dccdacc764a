"""Programs that are run alongside this one: they heed no interrupt of ours and print nothing, so they are watched."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from pyfly_cpp.errors import PyflyError


def run_quietly(command: list[str], environment: dict[str, str], poll: Callable[[], None], failure: str) -> None:
    """Runs a program to its end, quietly, calling `poll` meanwhile; it does not outlive an interrupt."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            while process.poll() is None:
                poll()
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode != 0:
            errors.seek(0)
            lines = [line for line in errors.read().decode("utf-8", errors="replace").splitlines() if line.strip()]
            lines = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no reason given"]
            raise PyflyError(f"{failure}: {lines[0].strip().rstrip('.')}.")


def quantize(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    ftype: int,
    poll: Callable[[], None],
    failure: str,
) -> None:
    """Writes a model in another type, calling `poll` meanwhile: llama.cpp's quantiser reports nothing, but its file
    grows. On an error or an interrupt the file is there in part.

    Args:
        ftype: `llama_ftype` of llama.h.
        failure: What the PyflyError begins with if llama.cpp fails.
    """
    command = [sys.executable, "-c", _QUANTIZE, os.fspath(source), os.fspath(destination), str(ftype)]
    run_quietly(command, dict(os.environ), poll, failure)


_QUANTIZE = """
import ctypes, sys
import llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = int(sys.argv[3]), True
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params)))
"""
