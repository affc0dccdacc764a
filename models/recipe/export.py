"""GGUF files of the family. Needs no PyTorch: weights are numpy arrays by the names of their tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from pyfly_cpp.heads.export import Weights, with_adjacent_rope, write_gguf
from recipe.shapes import DFlashShape, Eagle3Shape, LlamaShape, Qwen35Shape
from recipe.vocabulary import CHAT_TEMPLATE, CONTROL, ENDOFTEXT, IM_END, Vocabulary


@dataclass(frozen=True)
class Header:
    """What a file says besides its sizes."""

    name: str
    licence: str | None
    vocabulary: Vocabulary
    mask_token: int | None = None

    def __call__(self, writer: gguf.GGUFWriter) -> None:
        """Writes it."""
        writer.add_name(self.name)
        writer.add_description("tiny test model, made by the recipe of pyfly-cpp")
        if self.licence:
            writer.add_license(self.licence)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(self.vocabulary.tokens)
        kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
        writer.add_token_types([kinds[token in CONTROL] for token in self.vocabulary.tokens])
        writer.add_token_merges(self.vocabulary.merges)
        writer.add_bos_token_id(ENDOFTEXT)
        writer.add_eos_token_id(IM_END)
        writer.add_eot_token_id(IM_END)
        writer.add_pad_token_id(ENDOFTEXT)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)
        if self.mask_token is not None:
            writer.add_mask_token_id(self.mask_token)


def export_llama(path: Path, header: Header, shape: LlamaShape, weights: Weights) -> None:
    """A llama: target or draft."""
    write_gguf(path, "llama", header, shape, with_adjacent_rope(weights, shape))


def export_eagle3(path: Path, header: Header, shape: Eagle3Shape, weights: Weights) -> None:
    """An EAGLE-3 head; `d2t` among the weights."""
    write_gguf(path, "eagle3", header, shape, with_adjacent_rope(weights, shape))


def export_dflash(path: Path, header: Header, shape: DFlashShape, weights: Weights) -> None:
    """A DFlash or DSpark head. Its RoPE turns the pairs that it was trained with."""
    write_gguf(path, "dflash", header, shape, weights)


def export_qwen35(path: Path, header: Header, shape: Qwen35Shape, trunk: Weights, mtp: Weights) -> None:
    """Trunk and MTP block in one file; the block's tensors are numbered on from the trunk's."""
    weights = {**trunk, **{f"blk.{shape.n_layer}.{tensor}": array for tensor, array in mtp.items()}}
    tensors = {}
    for tensor, array in weights.items():
        if tensor.endswith("ssm_a_log"):
            tensor, array = tensor.replace("ssm_a_log", "ssm_a"), -np.exp(array)
        tensors[tensor.replace("ssm_dt_bias", "ssm_dt.bias")] = array
    write_gguf(path, "qwen35", header, shape, tensors)
