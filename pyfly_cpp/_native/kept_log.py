"""llama.cpp's log, kept instead of printed. A callback in Python would lose Ctrl-C: ctypes prints what the handler of a
signal raises in it, and goes on."""

from __future__ import annotations

from pyfly_cpp._native.library import ffi, lib


def keep_log() -> None:
    """From now on llama.cpp's log is not printed, in the whole process; the last ten lines of errors are kept."""
    lib.pyfly_log_keep()


def take_log_errors() -> list[str]:
    """The kept lines of errors, oldest first; they are forgotten."""
    out = ffi.new("char[]", 1 << 16)
    lib.pyfly_log_take_errors(out, len(out))
    return str(ffi.string(out), "utf-8", errors="replace").splitlines()
