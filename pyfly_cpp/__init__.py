"""pyfly-cpp: loosely speculative decoding (FLy) for GGUF models, on llama-cpp-python."""

from pyfly_cpp.drafters import MTP, Drafter, DraftModel, Eagle3, PromptLookup
from pyfly_cpp.errors import (
    BusyError,
    ContextFullError,
    IncompatibleDraftError,
    NativeError,
    NotFiniteError,
    PyflyError,
    VersionMismatchError,
)
from pyfly_cpp.gates import All, Any, Entropy, Exact, Gate, Margin, parse_gate
from pyfly_cpp.llama import FlyLlama
from pyfly_cpp.stats import Record, Stats
from pyfly_cpp.verify import Decision, Verification, verify
from pyfly_cpp.window import Window

__version__ = "0.1.0"

__all__ = [
    "MTP",
    "All",
    "Any",
    "BusyError",
    "ContextFullError",
    "Decision",
    "DraftModel",
    "Drafter",
    "Eagle3",
    "Entropy",
    "Exact",
    "FlyLlama",
    "Gate",
    "IncompatibleDraftError",
    "Margin",
    "NativeError",
    "NotFiniteError",
    "PromptLookup",
    "PyflyError",
    "Record",
    "Stats",
    "Verification",
    "VersionMismatchError",
    "Window",
    "parse_gate",
    "verify",
]
