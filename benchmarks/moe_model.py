"""A mixture of experts with random weights, to time batches of: `python benchmarks/moe_model.py FILE.gguf`.

The shape is that of Qwen3-30B-A3B made small: 32 experts of which a token uses four, twelve layers, 640 M parameters of
which 100 M are active. It is written in F16 (1.3 GB); `kernels.py --as Q4_K_M` quantises it. It has no vocabulary.
"""

from __future__ import annotations

import argparse

import gguf
import numpy as np

N_LAYERS, N_EMBD, N_HEADS, N_GROUPS, SIZE, N_EXPERTS, N_USED, N_EXPERT, N_VOCAB = 12, 1024, 16, 4, 64, 32, 4, 512, 8192
"""SIZE is that of a head, N_EXPERT the width of an expert."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    writer = gguf.GGUFWriter(parser.parse_args().file, "qwen3moe")
    writer.add_context_length(4096)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYERS)
    writer.add_feed_forward_length(N_EXPERT)
    writer.add_expert_feed_forward_length(N_EXPERT)
    writer.add_expert_count(N_EXPERTS)
    writer.add_expert_used_count(N_USED)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_GROUPS)
    writer.add_key_length(SIZE)
    writer.add_value_length(SIZE)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(N_VOCAB)
    writer.add_tokenizer_model("none")
    random = np.random.default_rng(1)

    def add(name: str, *shape: int) -> None:
        weights = random.standard_normal(shape, dtype=np.float32) / np.sqrt(np.float32(shape[-1]))
        writer.add_tensor(f"{name}.weight", weights.astype(np.float16))

    def add_norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))

    add("token_embd", N_VOCAB, N_EMBD)
    add("output", N_VOCAB, N_EMBD)
    add_norm("output_norm", N_EMBD)
    for layer in (f"blk.{i}" for i in range(N_LAYERS)):
        add(f"{layer}.attn_q", N_HEADS * SIZE, N_EMBD)
        add(f"{layer}.attn_k", N_GROUPS * SIZE, N_EMBD)
        add(f"{layer}.attn_v", N_GROUPS * SIZE, N_EMBD)
        add(f"{layer}.attn_output", N_EMBD, N_HEADS * SIZE)
        add(f"{layer}.ffn_gate_inp", N_EXPERTS, N_EMBD)
        add(f"{layer}.ffn_gate_exps", N_EXPERTS, N_EXPERT, N_EMBD)
        add(f"{layer}.ffn_up_exps", N_EXPERTS, N_EXPERT, N_EMBD)
        add(f"{layer}.ffn_down_exps", N_EXPERTS, N_EMBD, N_EXPERT)
        for name, size in (("attn_norm", N_EMBD), ("ffn_norm", N_EMBD), ("attn_q_norm", SIZE), ("attn_k_norm", SIZE)):
            add_norm(f"{layer}.{name}", size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
