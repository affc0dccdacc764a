"""`LoadedModel`: a model in memory, by public names, for whoever runs requests on it or computes something besides.

`llama/` makes it, from a `llama_cpp.Llama` that has loaded: nobody else reads the private attributes of one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llama_cpp

from pyfly_cpp.engine.vocabulary import Vocabulary


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A loaded model. It is freed with the `llama_cpp.Llama` that it was loaded by, not with this."""

    path: str
    """The GGUF file."""
    metadata: dict[str, str]
    """What the file says of it."""
    native: Any
    """The llama_model, as llama_cpp has it."""
    model_params: Any
    """The llama_model_params that it was loaded with."""
    context_params: Any
    """The llama_context_params of its context."""
    vocabulary: Vocabulary
    lora: Any
    """The LoRA adapter that it was loaded with, as llama_cpp has it; None: without."""
    lora_scale: float
    lora_path: str | None
    on_close: Callable[..., Any]
    """Has a function called, with arguments, before the model is freed; the newest first."""

    def apply_lora(self, context: Any) -> bool:
        """Has another context of this model apply the LoRA adapter, if there is one; False: it does not fit."""
        if self.lora is None:
            return True
        adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(self.lora)
        scales = (ctypes.c_float * 1)(self.lora_scale)
        code: int = llama_cpp.llama_set_adapters_lora(context, adapters, 1, scales)
        return code == 0
