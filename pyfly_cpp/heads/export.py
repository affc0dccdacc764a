"""GGUF files out of weights: numpy arrays by the names of their tensors, as llama.cpp's converter lays them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from pyfly_cpp.heads.shapes import Shape, Value
from pyfly_cpp.machine.files import replaced

Weights = Mapping[str, npt.NDArray[np.generic]]

_TYPES = {
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}


def adjacent_pairs(matrix: npt.NDArray[np.generic], n_heads: int) -> npt.NDArray[np.generic]:
    """Rows of a query or key matrix [n_heads * head_dim, n_in] for the RoPE that turns pairs (2 i, 2 i + 1) of a head,
    out of rows for the one that turns pairs (i, i + head_dim / 2)."""
    halves = matrix.reshape(n_heads, 2, -1, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def with_adjacent_rope(weights: Weights, shape: Shape) -> Weights:
    """Weights whose queries and keys are turned so."""
    n_heads = {"attn_q.weight": shape.n_head, "attn_k.weight": shape.n_head_kv}
    turned = {}
    for tensor, array in weights.items():
        kind = tensor.split(".", 2)[-1]
        turned[tensor] = adjacent_pairs(array, n_heads[kind]) if kind in n_heads else array
    return turned


def write_gguf(
    path: Path,
    architecture: str,
    describe: Callable[[gguf.GGUFWriter], None],
    shape: Shape,
    tensors: Weights,
    kind: str = "f16",
) -> None:
    """Matrices in the type `kind` ("f16", "q8_0", "q4_0"), or F16 if their rows are no multiple of its blocks; all
    else as F32 or as it is. Under another name first, so that what is there is whole. `describe` writes the metadata
    besides the sizes."""
    with replaced(path) as unfinished:
        writer = gguf.GGUFWriter(str(unfinished), architecture)
        type_of_matrices, type_of_file = _TYPES[kind]
        writer.add_file_type(type_of_file)
        describe(writer)
        for key, value in shape.fields().items():
            _add(writer, f"{architecture}.{key}", value)
        for tensor, array in tensors.items():
            raw: Any = None
            if array.dtype == np.float32 and array.ndim == 2 and "ssm_conv1d" not in tensor:
                if kind == "f16" or array.shape[1] % 32:
                    array = array.astype(np.float16)
                else:
                    raw = type_of_matrices
                    array = gguf.quants.quantize(np.ascontiguousarray(array), raw)
            writer.add_tensor(tensor, np.ascontiguousarray(array), raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_array(key, value)
