"""Makes a model out of a description, a GGUF file with metadata alone: `python weights.py DESCRIPTION MODEL`.

llama.cpp itself says which tensors an architecture has (`llama_model_init_from_user`), so that nobody else has to. It
may end the process over a description that it does not like.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from gguf_write import copy_field, write
from llama_cpp._ggml import libggml

HERE = Path(__file__).parent
_UNSCALED = {"gemma3n", "gemma4"}
"""Whose attention leaves the division by the square root of a head's width to the norms of the queries."""
_READ_ALIBI = {"jais", "mpt"}
"""Whose bias by distance is a key of the file. The generator writes it for all."""


class Tensor(ctypes.Structure):
    """How ggml_tensor begins."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


class ReadParams(ctypes.Structure):
    """gguf_init_params."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


libggml.gguf_init_from_file.argtypes = (ctypes.c_char_p, ReadParams)
libggml.gguf_init_from_file.restype = ctypes.c_void_p
libggml.gguf_free.argtypes = (ctypes.c_void_p,)
libggml.ggml_get_name.argtypes = (ctypes.POINTER(Tensor),)
libggml.ggml_get_name.restype = ctypes.c_char_p


def values(name, shape, seed):
    """Random weights of a tensor, float32, shape [..., n_in]: scaled so that what a layer adds is as large as what it
    is given, and attention looks at single tokens. Only then does a wrong cache show in the rows."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = random.standard_normal(shape, dtype=np.float32)
    if "ssm_a" in name:
        return -np.abs(0.1 * noise)  # states decay
    if "rope_f" in name:
        return (4.0 if "rope_factors_long" in name else 1.0) + 0.1 * noise
    if "norm" in name and name.endswith(".weight"):
        return 1.0 + 0.1 * noise
    if "_embd" in name:
        return 0.05 * noise
    if sum(n > 1 for n in shape) < 2:
        return 0.1 * noise
    return 2.5 / np.sqrt(np.float32(shape[-1])) * noise


def tensors_of(description, seed):
    """The tensors that llama.cpp creates for a description, arrays by name. Raises ValueError where it refuses it."""
    found = {}

    @llama_cpp.llama_model_set_tensor_data_t
    def fill(address, _):
        tensor = ctypes.cast(address, ctypes.POINTER(Tensor))
        name = libggml.ggml_get_name(tensor).decode()
        shape = tuple(tensor.contents.ne)[::-1]
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
        kind = np.float16 if tensor.contents.type == gguf.GGMLQuantizationType.F16 else np.float32
        found[name] = values(name, shape, seed).astype(kind)

    metadata = libggml.gguf_init_from_file(str(description).encode(), ReadParams(True, None))
    params = llama_cpp.llama_model_default_params()
    params.load_mtp = True
    model = llama_cpp.llama_model_init_from_user(metadata, fill, None, params)
    libggml.gguf_free(metadata)
    if not model:
        raise ValueError(f"llama.cpp cannot make a model of {description}")
    llama_cpp.llama_model_free(model)
    return found


def with_nextn_tensors(fields, tensors, seed):
    """The tensors, by name, with those that NextN blocks have in files and that llama.cpp does not create of itself:
    where there are no tensors yet, DeepSeek 4 counts its block to the trunk, and MiMo 2 makes three of one."""
    architecture = fields["general.architecture"].contents()
    n_nextn, n_blocks, n = (
        fields[f"{architecture}.{key}"].contents() if f"{architecture}.{key}" in fields else 0
        for key in ("nextn_predict_layers", "block_count", "embedding_length")
    )
    tensors = dict(tensors)
    for block in range(n_blocks - n_nextn, n_blocks):
        for name, shape in (("eh_proj", (n, 2 * n)), ("enorm", (n,)), ("hnorm", (n,))):
            whole = f"blk.{block}.nextn.{name}.weight"
            tensors.setdefault(whole, values(whole, shape, seed))
        if architecture == "mimo2":
            parts = [tensors.pop(f"blk.{block}.attn_{part}.weight") for part in "qkv"]
            tensors[f"blk.{block}.attn_qkv.weight"] = np.concatenate(parts)
    return tensors


def write_model(description, path, seed=1, left_out=()):
    """Writes a description with its weights.

    Args:
        description, path: GGUF files.
        seed: Of the weights.
        left_out: Texts; a tensor whose name contains one is not written. llama.cpp must take it for optional.
    """
    reader = gguf.GGUFReader(description)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(path), architecture)
    for name, field in reader.fields.items():
        is_for_others = name.endswith(".max_alibi_bias") and architecture not in _READ_ALIBI
        if not name.startswith("GGUF.") and name != "general.architecture" and not is_for_others:
            copy_field(writer, name, field)
    arrays = {}
    for name, array in with_nextn_tensors(reader.fields, tensors_of(description, seed), seed).items():
        if architecture in _UNSCALED and "attn_q_norm" in name:
            array *= 0.1
        # Scales belong to quantised weights.
        if not name.endswith("scale") and not any(text in name for text in left_out):
            arrays[name] = array
    write(writer, arrays)


if __name__ == "__main__":
    write_model(sys.argv[1], sys.argv[2], left_out=sys.argv[3:])
