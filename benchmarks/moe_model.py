"""A mixture of experts with random weights, to time batches of: `python benchmarks/moe_model.py FILE.gguf`.

The shape is that of Qwen3-30B-A3B made small: 32 experts of which a token uses four, twelve layers, 640 M parameters of
which 100 M are active. It is written in F16 (1.3 GB); `kernels.py --as Q4_K_M` quantises it. It has no vocabulary.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import gguf
import numpy as np


class Experts(NamedTuple):
    """A shape."""

    n_layers: int = 12
    n_embd: int = 1024
    n_heads: int = 16
    n_groups: int = 4
    size: int = 64
    """Of a head."""
    n_experts: int = 32
    n_used: int = 4
    n_expert: int = 512
    """Width of an expert."""
    n_vocab: int = 8192


def write(path: str, shape: Experts) -> None:
    """Writes the file."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.n_expert)
    writer.add_expert_feed_forward_length(shape.n_expert)
    writer.add_expert_count(shape.n_experts)
    writer.add_expert_used_count(shape.n_used)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_groups)
    writer.add_key_length(shape.size)
    writer.add_value_length(shape.size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_tokenizer_model("none")
    random = np.random.default_rng(1)

    def add(name: str, *sizes: int) -> None:
        weights = random.standard_normal(sizes, dtype=np.float32) / np.sqrt(np.float32(sizes[-1]))
        writer.add_tensor(f"{name}.weight", weights.astype(np.float16))

    def add_norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))

    add("token_embd", shape.n_vocab, shape.n_embd)
    add("output", shape.n_vocab, shape.n_embd)
    add_norm("output_norm", shape.n_embd)
    for layer in (f"blk.{i}" for i in range(shape.n_layers)):
        add(f"{layer}.attn_q", shape.n_heads * shape.size, shape.n_embd)
        add(f"{layer}.attn_k", shape.n_groups * shape.size, shape.n_embd)
        add(f"{layer}.attn_v", shape.n_groups * shape.size, shape.n_embd)
        add(f"{layer}.attn_output", shape.n_embd, shape.n_heads * shape.size)
        add(f"{layer}.ffn_gate_inp", shape.n_experts, shape.n_embd)
        add(f"{layer}.ffn_gate_exps", shape.n_experts, shape.n_expert, shape.n_embd)
        add(f"{layer}.ffn_up_exps", shape.n_experts, shape.n_expert, shape.n_embd)
        add(f"{layer}.ffn_down_exps", shape.n_experts, shape.n_embd, shape.n_expert)
        for name in ("attn_norm", "ffn_norm"):
            add_norm(f"{layer}.{name}", shape.n_embd)
        for name in ("attn_q_norm", "attn_k_norm"):
            add_norm(f"{layer}.{name}", shape.size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    write(parser.parse_args().file, Experts())


if __name__ == "__main__":
    main()
