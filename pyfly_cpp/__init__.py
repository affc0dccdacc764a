"""pyfly-cpp: loosely speculative decoding (FLy) for GGUF models, on llama-cpp-python."""

from pyfly_cpp.drafters import DraftModel, Drafter, PromptLookup
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
