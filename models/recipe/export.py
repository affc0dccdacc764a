"""GGUF files out of weights. Needs no PyTorch: weights are numpy arrays by the names of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from recipe.shapes import DFlashShape, Eagle3Shape, LlamaShape, Qwen35Shape, Shape
from recipe.vocabulary import CHAT_TEMPLATE, CONTROL, ENDOFTEXT, IM_END, Vocabulary

Weights = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Header:
    """What a file says besides its sizes."""

    name: str
    licence: str | None
    vocabulary: Vocabulary


def export_llama(path: Path, header: Header, shape: LlamaShape, weights: Weights) -> None:
    """A llama: target or draft."""
    _write(path, "llama", header, shape, _with_adjacent_rope(weights, shape))


def export_eagle3(path: Path, header: Header, shape: Eagle3Shape, weights: Weights) -> None:
    """An EAGLE-3 head; `d2t` among the weights."""
    _write(path, "eagle3", header, shape, _with_adjacent_rope(weights, shape))


def export_dflash(path: Path, header: Header, shape: DFlashShape, weights: Weights) -> None:
    """A DFlash or DSpark head. Its RoPE turns the pairs that it was trained with."""
    _write(path, "dflash", header, shape, weights, shape.mask_token)


def export_qwen35(path: Path, header: Header, shape: Qwen35Shape, trunk: Weights, mtp: Weights) -> None:
    """Trunk and MTP block in one file; the block's tensors are numbered on from the trunk's."""
    weights = {**trunk, **{f"blk.{shape.n_layer}.{tensor}": array for tensor, array in mtp.items()}}
    tensors = {}
    for tensor, array in weights.items():
        if tensor.endswith("ssm_a_log"):
            tensor, array = tensor.replace("ssm_a_log", "ssm_a"), -np.exp(array)
        tensors[tensor.replace("ssm_dt_bias", "ssm_dt.bias")] = array
    _write(path, "qwen35", header, shape, tensors)


def adjacent_pairs(matrix: npt.NDArray[np.generic], n_heads: int) -> npt.NDArray[np.generic]:
    """Rows of a query or key matrix [n_heads * head_dim, n_in] for the RoPE that turns pairs (2 i, 2 i + 1) of a head,
    out of rows for the one that turns pairs (i, i + head_dim / 2)."""
    halves = matrix.reshape(n_heads, 2, -1, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def _with_adjacent_rope(weights: Weights, shape: Shape) -> Weights:
    n_heads = {"attn_q.weight": shape.n_head, "attn_k.weight": shape.n_head_kv}
    turned = {}
    for tensor, array in weights.items():
        kind = tensor.split(".", 2)[-1]
        turned[tensor] = adjacent_pairs(array, n_heads[kind]) if kind in n_heads else array
    return turned


def _write(
    path: Path, architecture: str, header: Header, shape: Shape, tensors: Weights, mask_token: int | None = None
) -> None:
    """Matrices as F16, all else as F32 or as it is. Under another name first, so that what is there is whole."""
    unfinished = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(str(unfinished), architecture)
    writer.add_name(header.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_description("tiny test model, made by the recipe of pyfly-cpp")
    if header.licence:
        writer.add_license(header.licence)
    for key, value in shape.fields().items():
        _add(writer, f"{architecture}.{key}", value)
    _add_vocabulary(writer, header.vocabulary)
    if mask_token is not None:
        writer.add_mask_token_id(mask_token)
    for tensor, array in tensors.items():
        if array.dtype == np.float32 and array.ndim == 2 and "ssm_conv1d" not in tensor:
            array = array.astype(np.float16)
        writer.add_tensor(tensor, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(path)


def _add(writer: gguf.GGUFWriter, key: str, value: int | float | bool | list[int]) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_array(key, value)


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary.tokens)
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    writer.add_token_types([kinds[token in CONTROL] for token in vocabulary.tokens])
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(ENDOFTEXT)
    writer.add_eos_token_id(IM_END)
    writer.add_eot_token_id(IM_END)
    writer.add_pad_token_id(ENDOFTEXT)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
