"""A GGUF file of a popular model's shape with made-up weights: for times and memory, which do not depend on weights.

    python benchmarks/shapes.py FROM.gguf OUT.gguf [--shape 7b]

The shapes are those of Qwen2.5: 3b, 7b, 14b and 32b. Types of weights are those of Q4_K_M; architecture and vocabulary
are those of FROM, a file of a smaller Qwen2.5 (or of a Llama, with the same matrices). The answers of such a model are
noise.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFValueType, GGUFWriter

SEED, N_DIFFERENT = 1, 4096
"""So many blocks of weights differ, and are repeated."""

GENERATED = ("GGUF.", "general.architecture")
"""Keys that the writer adds itself begin so."""


class Shape(NamedTuple):
    """Of a Qwen2.5."""

    n_embd: int
    n_ff: int
    n_layers: int
    n_heads: int
    n_groups: int


SHAPES = {
    "tiny": Shape(256, 512, 2, 4, 2),  # to try the script
    "3b": Shape(2048, 11008, 36, 16, 2),
    "7b": Shape(3584, 18944, 28, 28, 4),
    "14b": Shape(5120, 13824, 48, 40, 8),
    "32b": Shape(5120, 27648, 64, 40, 8),
}


def blocks(kind: Type, random: np.random.Generator) -> np.ndarray:
    """N_DIFFERENT blocks of 256 weights of random bits, whose scales make weights of about the usual size."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    out = random.integers(0, 256, (N_DIFFERENT, size), dtype=np.uint8)
    scales = {Type.Q4_K: ((0, 0.0004), (2, 0.003)), Type.Q6_K: ((208, 0.00002),)}
    for at, scale in scales[kind]:
        out[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return out


class Writer:
    """Writes matrices of such blocks, vectors, and the header of another file."""

    def __init__(self, path: str, architecture: str) -> None:
        self.file = GGUFWriter(path, architecture, use_temp_file=True)
        random = np.random.default_rng(SEED)
        self.blocks = {kind: blocks(kind, random) for kind in (Type.Q4_K, Type.Q6_K)}

    def copy_header(self, reader: GGUFReader, changed: dict[str, int]) -> None:
        for key, field in reader.fields.items():
            value = changed.get(key, field.contents())
            if key.startswith(GENERATED):
                continue
            if field.types[0] == GGUFValueType.ARRAY:
                self.file.add_array(key, value)
            else:
                self.file.add_key_value(key, value, field.types[0])

    def matrix(self, name: str, n_out: int, n_in: int, kind: Type = Type.Q4_K) -> None:
        n_each = n_in // 256
        own = np.resize(self.blocks[kind], (n_out * n_each, self.blocks[kind].shape[1]))
        self.file.add_tensor(f"{name}.weight", own.reshape(n_out, -1), raw_dtype=kind)

    def vector(self, name: str, size: int, value: float) -> None:
        self.file.add_tensor(name, np.full(size, value, np.float32))

    def close(self) -> None:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def write(source: str, out: str, shape: Shape) -> None:
    """Writes the file, with the header and the vocabulary of another."""
    reader = GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    n_vocab = int(next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight").shape[1])
    writer = Writer(out, architecture)
    changed = {
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "block_count": shape.n_layers,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.n_groups,
        "rope.dimension_count": shape.n_embd // shape.n_heads,
    }
    writer.copy_header(reader, {f"{architecture}.{name}": value for name, value in changed.items()})
    writer.matrix("token_embd", n_vocab, shape.n_embd)
    writer.matrix("output", n_vocab, shape.n_embd, Type.Q6_K)
    writer.vector("output_norm.weight", shape.n_embd, 1.0)
    n_kv = shape.n_embd // shape.n_heads * shape.n_groups
    eighth = shape.n_layers // 8
    for i in range(shape.n_layers):
        # Q4_K_M has more bits for some matrices in the first and last eighth of the layers, and every third between.
        has_more = i < eighth or i >= 7 * shape.n_layers // 8 or (i - eighth) % 3 == 2
        finer = Type.Q6_K if has_more else Type.Q4_K
        layer = f"blk.{i}"
        writer.vector(f"{layer}.attn_norm.weight", shape.n_embd, 1.0)
        writer.vector(f"{layer}.ffn_norm.weight", shape.n_embd, 1.0)
        for name, size, kind in (("q", shape.n_embd, Type.Q4_K), ("k", n_kv, Type.Q4_K), ("v", n_kv, finer)):
            writer.matrix(f"{layer}.attn_{name}", size, shape.n_embd, kind)
            writer.vector(f"{layer}.attn_{name}.bias", size, 0.0)
        writer.matrix(f"{layer}.attn_output", shape.n_embd, shape.n_embd)
        writer.matrix(f"{layer}.ffn_gate", shape.n_ff, shape.n_embd)
        writer.matrix(f"{layer}.ffn_up", shape.n_ff, shape.n_embd)
        writer.matrix(f"{layer}.ffn_down", shape.n_embd, shape.n_ff, finer)
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="FROM.gguf")
    parser.add_argument("out", metavar="OUT.gguf")
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    given = parser.parse_args()
    write(given.source, given.out, SHAPES[given.shape])


if __name__ == "__main__":
    main()
