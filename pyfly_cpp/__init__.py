"""pyfly-cpp: loosely speculative decoding (FLy) for GGUF models, on llama-cpp-python.

`FlyLlama` is a `llama_cpp.Llama` that generates speculatively. `FlyBatch` serves many requests at a time on one model.
Both take

- a *drafter*, which proposes tokens: `DraftModel`, `PromptLookup`, `MTP`, `Eagle3`, `DFlash`, `DSpark`,
  `CrossVocabulary`, or any llama_cpp `LlamaDraftModel`;
- a *gate*, the rule for a draft that is not the target's choice: `Exact` and `Stochastic` are lossless; `Entropy`,
  `Margin` and `Fuzzy` are not;
- a `Window`: the condition under which a mismatch that the gate let pass stands.

`Decoding` is these and the draft length as one value, `load_preset` reads one from a file. `verify` judges a step on
arrays, without a model. `kernels` also gives a plain `llama_cpp.Llama` our kernels.

All errors at run time are a `PyflyError`; a wrong argument is a `ValueError`. `pyfly_cpp.errors` has the others.

More gates are in `pyfly_cpp.decoding.gates`, counters and traces (`Stats`, `Record`, `Step`) in
`pyfly_cpp.engine.stats`, the handle of a request in `pyfly_cpp.engine.handle`.
"""

import sys as _sys
from pathlib import Path as _Path

from pyfly_cpp._version import __version__ as __version__
from pyfly_cpp.errors import BusyError, ContextFullError, PyflyError, VersionMismatchError

try:
    from pyfly_cpp import _native as _native  # before anything that imports llama_cpp
    from pyfly_cpp.decoding.drafters import (
        MTP,
        CrossVocabulary,
        DFlash,
        DraftModel,
        DSpark,
        Eagle3,
        PromptLookup,
    )
    from pyfly_cpp.decoding.gates import Entropy, Exact, Fuzzy, Margin, Stochastic
    from pyfly_cpp.decoding.presets import load_preset
    from pyfly_cpp.decoding.setting import Decoding
    from pyfly_cpp.decoding.verify import verify
    from pyfly_cpp.decoding.windows import Window
    from pyfly_cpp.llama.fly_batch import FlyBatch
    from pyfly_cpp.llama.fly_llama import FlyLlama
    from pyfly_cpp.machine import kernels
except (VersionMismatchError, KeyboardInterrupt) as error:
    # Our own commands cannot catch it: Python imports this file before theirs. `-m` stands there while it does.
    if _Path((_sys.argv or [""])[0]).stem not in ("pyfly-cpp", "-m"):
        raise
    _sys.exit(130 if isinstance(error, KeyboardInterrupt) else f"Error: {error}")

__all__ = [  # noqa: RUF022 - the API pages begin with what most people use
    "FlyLlama",
    "DraftModel",
    "FlyBatch",
    "MTP",
    "BusyError",
    "ContextFullError",
    "CrossVocabulary",
    "DFlash",
    "DSpark",
    "Decoding",
    "Eagle3",
    "Entropy",
    "Exact",
    "Fuzzy",
    "Margin",
    "PromptLookup",
    "PyflyError",
    "Stochastic",
    "Window",
    "kernels",
    "load_preset",
    "verify",
]

_ROOMS = ("decoding", "engine", "errors")
"""Packages and modules with more public names."""


def __dir__() -> list[str]:
    return [*__all__, *_ROOMS, *(name for name in globals() if name.startswith("__"))]
