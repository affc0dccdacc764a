"""The child process of test_headers.py: loads one corrupted file for each seed that it is told, and says what came.

usage: load_corrupted.py FOLDER [ROLE ...], seeds on standard input; answers `SEED TAB ROLE TAB OUTCOME` line by line.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import sys
from pathlib import Path

from corruption import corrupted
from gguf_header import read_header

from pyfly_cpp import MTP, DFlash, DraftModel, DSpark, Eagle3, FlyLlama
from pyfly_cpp.errors import ArgumentError, IncompatibleDraftError, NativeError, NotFiniteError

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
LLAMA, DRAFT = TINY / "tiny-llama-target-f16.gguf", TINY / "tiny-llama-draft-f16.gguf"
HYBRID, EAGLE3 = TINY / "tiny-qwen35-mtp-f16.gguf", TINY / "tiny-llama-eagle3-f16.gguf"
DFLASH, DSPARK = TINY / "tiny-llama-dflash-f16.gguf", TINY / "tiny-llama-dspark-f16.gguf"
SETTINGS = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
N_BYTES = 6 * 2**30  # of address space: a header may not make it allocate what the file does not hold

ROLES = {
    "target": (LLAMA, lambda path: FlyLlama(path, **SETTINGS)),
    "small target": (DRAFT, lambda path: FlyLlama(path, drafter=DraftModel(path), adaptive=False, **SETTINGS)),
    "hybrid target": (HYBRID, lambda path: FlyLlama(path, drafter=MTP(), adaptive=False, **SETTINGS)),
    "draft": (DRAFT, lambda path: FlyLlama(LLAMA, drafter=DraftModel(path), adaptive=False, **SETTINGS)),
    "hybrid draft": (HYBRID, lambda path: FlyLlama(LLAMA, drafter=DraftModel(path), adaptive=False, **SETTINGS)),
    "MTP head": (HYBRID, lambda path: FlyLlama(HYBRID, drafter=MTP(path), adaptive=False, **SETTINGS)),
    "EAGLE-3 head": (EAGLE3, lambda path: FlyLlama(LLAMA, drafter=Eagle3(path), adaptive=False, **SETTINGS)),
}
BLOCK_ROLES = {
    "DFlash head": (DFLASH, lambda path: FlyLlama(LLAMA, drafter=DFlash(path), adaptive=False, **SETTINGS)),
    "DSpark head": (DSPARK, lambda path: FlyLlama(LLAMA, drafter=DSpark(path), adaptive=False, **SETTINGS)),
}
"""Apart from the others, because a seed means what it meant when it was found."""
ALL_ROLES = {**ROLES, **BLOCK_ROLES}
ERRORS = (ValueError, ArgumentError, IncompatibleDraftError, NativeError, NotFiniteError)


def outcome(role: str, path: Path) -> str:
    """`ok`, the error, or, with FAILED in front, what should not have come."""
    try:
        with contextlib.closing(ALL_ROLES[role][1](path)) as llm:
            for _ in itertools.islice(llm.generate([5, 6, 7, 8], temp=0.0), 2):
                pass
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        is_right = type(error) in ERRORS and "\n" not in said
        return ("" if is_right else "FAILED ") + repr(said)
    return "ok"


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (N_BYTES, N_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whoever else prints does not answer
    headers = {path: read_header(path) for path, _ in ALL_ROLES.values()}
    path = Path(sys.argv[1]) / "corrupted.gguf"
    for line in sys.stdin:
        rng = random.Random(int(line))
        role = rng.choice(sys.argv[2:] or list(ROLES))
        path.unlink(missing_ok=True)  # not overwritten: it may be mapped
        path.write_bytes(corrupted(headers[ALL_ROLES[role][0]], rng))
        print(f"{int(line)}\t{role}\t{outcome(role, path)}", file=answers, flush=True)


if __name__ == "__main__":
    main()
