"""Writes the C source of the cffi extension: `emit_bindings.py pyfly.h out.c`.

cffi parses pyfly.h itself (the part between its "cffi" marks), so there is one declaration of the ABI. In API mode the
C compiler checks it against the header once more.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cffi

# Python functions that C may call, with the signatures of the callbacks of pyfly.h.
CALLBACKS = """
extern "Python" int32_t pyfly_py_row(void *, const int32_t *, size_t, float *);
extern "Python" int32_t pyfly_py_mask(void *, const int32_t *, size_t, uint32_t *, size_t);
extern "Python" int32_t pyfly_py_stop(void);
extern "Python" int32_t pyfly_py_draft(void *, const int32_t *, size_t, int32_t *, float *, size_t);
"""


def declarations(header: str) -> str:
    """The part of pyfly.h that cffi reads."""
    return header.split("/* cffi: begin */")[1].split("/* cffi: end */")[0]


def main(header: Path, out: Path) -> None:
    ffi = cffi.FFI()
    ffi.cdef(declarations(header.read_text(encoding="utf-8")) + CALLBACKS)
    ffi.set_source("pyfly_cpp._pyfly", '#include "pyfly.h"', py_limited_api=True)
    ffi.emit_c_code(str(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
