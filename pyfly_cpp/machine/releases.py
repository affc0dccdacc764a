"""What depends on the release of llama.cpp and what no header tells: looked up in its source, and to be looked up again
with each release. csrc/llama/release*.h have what the core needs of it."""

from __future__ import annotations

RPC_PROTOCOLS = {"0.3.35": (5, 0), "0.3.36": (7, 0)}
"""RPC_PROTO_MAJOR_VERSION and RPC_PROTO_MINOR_VERSION of ggml-rpc.h, by release of llama-cpp-python. A server must have
the same major number and no higher minor one."""

MOST_THREADS = 512
"""GGML_MAX_N_THREADS of ggml.h; more end the process."""

CACHE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 20: "IQ4_NL", 30: "BF16",
}  # fmt: skip
"""Names of the types that a KV cache may have, by the number of the ggml type. llama.cpp ends the process over most
others."""

WITHOUT_FLASH_ATTENTION = ("plm",)
"""Architectures whose graph ends the process if flash attention is on."""

# fmt: off
SPLIT_BY_OWN_CODE = frozenset({
    "chatglm-bpe", "codeshell", "command-r", "dbrx", "deepseek-r1-qwen", "exaone", "exaone4", "falcon3", "gemma4",
    "glm4", "gpt-2", "hunyuan", "jais", "kimi-k2", "llama-bpe", "llama-v3", "llama3", "megrez", "minerva-7b", "mpt",
    "olmo", "phi-2", "pixtral", "qwen2", "qwen35", "refact", "smaug-bpe", "smollm", "stablelm2", "starcoder",
    "trillion",
})
# fmt: on
"""Values of tokenizer.ggml.pre for which llama.cpp splits texts without std::regex."""

CUT_BY_SPECIAL_TOKENS = ("llama", "gpt2", "gemma4")
"""Values of tokenizer.ggml.model whose tokens depend on nothing beyond a special token."""
