"""pyfly-cpp: loosely speculative decoding (FLy) for GGUF models, on llama-cpp-python.

`FlyLlama` is a `llama_cpp.Llama` that generates speculatively. `FlyBatch` serves many requests at once on one model,
and returns a `Handle` for each. Both take

- a *drafter*, which proposes tokens: `DraftModel`, `PromptLookup`, `MTP`, `Eagle3`, `DFlash`, `DSpark`, `MultiLevel`,
  `CrossVocabulary`, or any llama_cpp `LlamaDraftModel` (`Drafter` is one of these);
- a *gate*, which says what may happen to a draft that is not the target's choice: `Exact` and `Stochastic` are
  lossless; `Margin`, `Entropy`, `Typical`, `Relaxed`, `Ratio` and `Fuzzy` are not; `Regions`, `AllOf` and
  `AnyOf` combine others, and `ExactFirst`, `Budget` and `NoRepeat` restrict them. `Gate` is their base; `parse_gate`
  reads a written form;
- a `Window`: what must happen after a mismatch that the gate let pass, for it to stand.

`Stats` has what was counted (`Governor` and `Threads` are parts of it), `Record` says how one token was produced, and
`Round` what one round did. `verify` judges a round on arrays, without a model; it returns a `Verification` with a
`Decision` on every position. `regions_of` shows what `Regions` sees in a text.

All errors at run time are a `PyflyError`; a wrong argument is a `ValueError`.
"""

import sys
from pathlib import Path

from pyfly_cpp.errors import (
    BusyError,
    ContextFullError,
    IncompatibleDraftError,
    NativeError,
    NotFiniteError,
    PyflyError,
    RpcError,
    VersionMismatchError,
)

try:
    from pyfly_cpp.drafters import (
        MTP,
        CrossVocabulary,
        DFlash,
        Drafter,
        DraftModel,
        DSpark,
        Eagle3,
        MultiLevel,
        PromptLookup,
    )
    from pyfly_cpp.handles import Handle
    from pyfly_cpp.llama import FlyLlama
    from pyfly_cpp.parallel import FlyBatch
    from pyfly_cpp.rules import (
        AllOf,
        AnyOf,
        Budget,
        Entropy,
        Exact,
        ExactFirst,
        Fuzzy,
        Gate,
        Margin,
        NoRepeat,
        Ratio,
        Regions,
        Relaxed,
        Stochastic,
        Typical,
        parse_gate,
        regions_of,
    )
    from pyfly_cpp.stats import Governor, Record, Round, Stats, Threads
    from pyfly_cpp.verify import Decision, Verification, verify
    from pyfly_cpp.windows import Window
except VersionMismatchError as error:
    # Our own commands cannot catch it: Python imports this file before theirs. `-m` stands there while it does.
    if Path((sys.argv or [""])[0]).stem not in ("pyfly-cpp", "-m"):
        raise
    sys.exit(f"Error: {error}")

__version__ = "0.1.0"

__all__ = [
    "MTP",
    "AllOf",
    "AnyOf",
    "Budget",
    "BusyError",
    "ContextFullError",
    "CrossVocabulary",
    "DFlash",
    "DSpark",
    "Decision",
    "DraftModel",
    "Drafter",
    "Eagle3",
    "Entropy",
    "Exact",
    "ExactFirst",
    "FlyBatch",
    "FlyLlama",
    "Fuzzy",
    "Gate",
    "Governor",
    "Handle",
    "IncompatibleDraftError",
    "Margin",
    "MultiLevel",
    "NativeError",
    "NoRepeat",
    "NotFiniteError",
    "PromptLookup",
    "PyflyError",
    "Ratio",
    "Record",
    "Regions",
    "Relaxed",
    "Round",
    "RpcError",
    "Stats",
    "Stochastic",
    "Threads",
    "Typical",
    "Verification",
    "VersionMismatchError",
    "Window",
    "parse_gate",
    "regions_of",
    "verify",
]
