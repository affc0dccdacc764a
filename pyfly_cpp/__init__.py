"""pyfly-cpp: loosely speculative decoding (FLy) for GGUF models, on llama-cpp-python."""

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
        Retrieval,
        TokenRecycling,
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
        Overshoot,
        Ratio,
        Regions,
        Relaxed,
        Stochastic,
        Typical,
        parse_gate,
        regions_of,
    )
    from pyfly_cpp.stats import Record, Round, Stats
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
    "Handle",
    "IncompatibleDraftError",
    "Margin",
    "MultiLevel",
    "NativeError",
    "NotFiniteError",
    "Overshoot",
    "PromptLookup",
    "PyflyError",
    "Ratio",
    "Record",
    "Regions",
    "Relaxed",
    "Retrieval",
    "Round",
    "RpcError",
    "Stats",
    "Stochastic",
    "TokenRecycling",
    "Typical",
    "Verification",
    "VersionMismatchError",
    "Window",
    "parse_gate",
    "regions_of",
    "verify",
]
