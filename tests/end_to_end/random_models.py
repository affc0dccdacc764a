"""Models of a few random layers, for architectures of which there is no tiny model."""

from __future__ import annotations

import gguf
import numpy as np
from gguf_write import copy_field, write
from heads import LLAMA, N_VOCAB

N, N_FF = 64, 96  # width of the model, and of its feed-forward layers
OUTPUT = {"output": (N_VOCAB, N), "output_norm": (N,)}
FEED_FORWARD = {"ffn_norm": (N,), "ffn_gate": (N_FF, N), "ffn_up": (N_FF, N), "ffn_down": (N, N_FF)}


def lfm2(destination, n_swa):
    """Attention within the last n_swa tokens, then a convolution over three."""
    attention = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (N, N))
    attention |= {"attn_norm": (N,), "attn_q_norm": (N // 2,), "attn_k_norm": (N // 2,)}
    convolution = {"attn_norm": (N,), "shortconv.conv": (N, 3)}
    convolution |= {"shortconv.in_proj": (3 * N, N), "shortconv.out_proj": (N, N)}
    fields = {
        "attention.head_count": [2, 0], "attention.head_count_kv": [2, 0], "attention.sliding_window": n_swa,
        "shortconv.l_cache": 3,
    }  # fmt: skip
    layers = [attention | FEED_FORWARD, convolution | FEED_FORWARD]
    return _write(destination, "lfm2", fields, layers, {"output": (N_VOCAB, N), "token_embd_norm": (N,)})


def rwkv6qwen2(destination):
    """Two layers of linear attention that shift by one token."""
    n_mix, n_decay = 16, 16
    layer = {
        "attn_norm": (N,), "time_mix_w1": (5 * n_mix, N), "time_mix_w2": (5, N, n_mix), "time_mix_lerp_x": (1, 1, N),
        "time_mix_lerp_fused": (5, 1, 1, N), "time_mix_decay": (N,), "time_mix_decay_w1": (n_decay, N),
        "time_mix_decay_w2": (N, n_decay), "time_mix_key": (N, N), "time_mix_value": (N, N),
        "time_mix_receptance": (N, N), "time_mix_gate": (N, N), "time_mix_output": (N, N), **FEED_FORWARD,
    }  # fmt: skip
    fields = {
        "attention.head_count": 2, "attention.head_count_kv": 2, "wkv.head_size": N // 2, "token_shift_count": 1,
        "time_mix_extra_dim": n_mix, "time_decay_extra_dim": n_decay,
    }  # fmt: skip
    return _write(destination, "rwkv6qwen2", fields, [layer, layer], OUTPUT)


def plamo2(destination):
    """Attention, then a state space of two heads."""
    n_inner, n_state, n_dt = 2 * N, 16, 64
    common = {
        "attn_norm": (N,), "post_attention_norm.": (N,), "ffn_norm": (N,), "ffn_up": (2 * N_FF, N),
        "ffn_down": (N, N_FF), "post_ffw_norm.": (N,),
    }  # fmt: skip
    attention = {"attn_qkv": (3 * N, N), "attn_q_norm": (2, N // 2), "attn_k_norm": (2, N // 2), "attn_output": (N, N)}
    space = {
        "ssm_in": (2 * n_inner, N), "ssm_conv1d": (n_inner, 4), "ssm_x": (n_dt + 2 * n_state, n_inner),
        "ssm_dt": (2, n_dt), "ssm_dt.bias": (2,), "ssm_a.": (2,), "ssm_d.": (2,), "ssm_out": (N, n_inner),
        "ssm_dt_norm.": (n_dt,), "ssm_b_norm.": (n_state,), "ssm_c_norm.": (n_state,),
    }  # fmt: skip
    fields = {
        "attention.head_count": [2, 0], "attention.head_count_kv": [2, 0], "ssm.conv_kernel": 4,
        "ssm.inner_size": n_inner, "ssm.state_size": n_state, "ssm.time_step_rank": 2, "ssm.group_count": 0,
    }  # fmt: skip
    return _write(destination, "plamo2", fields, [common | attention, common | space], OUTPUT)


def plm(destination):
    """Latent attention, of which llama.cpp has no graph with flash attention."""
    n_rank, n_rope, n_key, n_value = 32, 8, 24, 16
    layer = {
        "attn_norm": (N,), "attn_q": (2 * n_key, N), "attn_kv_a_mqa": (n_rank + n_rope, N), "attn_kv_a_norm": (n_rank,),
        "attn_kv_b": (2 * (n_key - n_rope + n_value), n_rank), "attn_output": (N, 2 * n_value), "ffn_norm": (N,),
        "ffn_up": (N_FF, N), "ffn_down": (N, N_FF),
    }  # fmt: skip
    fields = {
        "attention.head_count": 2, "attention.head_count_kv": 2, "attention.kv_lora_rank": n_rank,
        "attention.key_length": n_key, "attention.value_length": n_value, "rope.dimension_count": n_rope,
    }  # fmt: skip
    return _write(destination, "plm", fields, [layer, layer], {"output_norm": (N,)})


def _write(destination, architecture, fields, layers, tensors):
    """Writes the model. Shapes by the names of tensors: "x" is "x.weight", "x." is "x". Norms are 1."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(destination), architecture)
    for name, entry in gguf.GGUFReader(LLAMA).fields.items():
        if name.startswith("tokenizer."):
            copy_field(writer, name, entry)
    sizes = {"context_length": 1024, "embedding_length": N, "block_count": len(layers), "feed_forward_length": N_FF}
    for name, value in (sizes | fields).items():
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    shapes = {"token_embd": (N_VOCAB, N), **tensors}
    shapes |= {f"blk.{i}.{name}": shape for i, layer in enumerate(layers) for name, shape in layer.items()}
    arrays = {}
    for name, shape in shapes.items():
        values = np.ones(shape) if "norm" in name else rng.normal(size=shape) / np.sqrt(shape[-1])
        whole = name[:-1] if name.endswith(".") else name if name.endswith(".bias") else f"{name}.weight"
        arrays[whole] = values.astype(np.float32)
    write(writer, arrays)
    return str(destination)
