"""pyfly.h as Python objects: the only package that touches cffi. It takes and gives numbers, tokens and arrays; what
they are called elsewhere (gates, windows, records, counters) is for those who call it. Of pyfly_cpp it needs the
errors alone.

`library` loads the extension, `boundary` is how every call goes through, the others are the objects of pyfly.h.
A handle belongs to one thread at a time; what C borrows is kept alive on the Python object.
"""

from pyfly_cpp._native.batch import Batch, Costs, GovernorState, RawRecord, Slot, SlotProgress
from pyfly_cpp._native.counters import Counters
from pyfly_cpp._native.drafters import CallbackDrafter, Drafter, LookupDrafter, ModelDrafter, RowDrafter
from pyfly_cpp._native.kept_log import keep_log, take_log_errors
from pyfly_cpp._native.kernel_calls import (
    KERNELS_ATTENTION,
    KERNELS_LOCKED,
    KernelTrial,
    batches_with_other_bits,
    enable_kernels,
    ggml_build,
    install_kernels,
    kernel_types,
    kernels_isa,
    kernels_taken,
    leave_out,
    take_kernels_everywhere,
    try_attention,
    try_kernels,
)
from pyfly_cpp._native.library import (
    GATE_KINDS,
    LOOKUP_MATCHES,
    MAX_LOOKUP,
    MAX_TOP,
    ORIGINS,
    REASONS,
    WINDOW_RULES,
    simd_level,
)
from pyfly_cpp._native.masks import ChainMask
from pyfly_cpp._native.targets import (
    ContextMemory,
    GraphProduct,
    LayerTap,
    LlamaTarget,
    ModelInfo,
    ScriptedTarget,
    States,
    Target,
    companion_word,
    context_memory,
    graph_products,
    inspect_model,
    load_guard,
)
from pyfly_cpp._native.verification import RawDecision, verify

__all__ = [
    "GATE_KINDS",
    "KERNELS_ATTENTION",
    "KERNELS_LOCKED",
    "LOOKUP_MATCHES",
    "MAX_LOOKUP",
    "MAX_TOP",
    "ORIGINS",
    "REASONS",
    "WINDOW_RULES",
    "Batch",
    "CallbackDrafter",
    "ChainMask",
    "ContextMemory",
    "Costs",
    "Counters",
    "Drafter",
    "GovernorState",
    "GraphProduct",
    "KernelTrial",
    "LayerTap",
    "LlamaTarget",
    "LookupDrafter",
    "ModelDrafter",
    "ModelInfo",
    "RawDecision",
    "RawRecord",
    "RowDrafter",
    "ScriptedTarget",
    "Slot",
    "SlotProgress",
    "States",
    "Target",
    "batches_with_other_bits",
    "companion_word",
    "context_memory",
    "enable_kernels",
    "ggml_build",
    "graph_products",
    "inspect_model",
    "install_kernels",
    "keep_log",
    "kernel_types",
    "kernels_isa",
    "kernels_taken",
    "leave_out",
    "load_guard",
    "simd_level",
    "take_kernels_everywhere",
    "take_log_errors",
    "try_attention",
    "try_kernels",
    "verify",
]
