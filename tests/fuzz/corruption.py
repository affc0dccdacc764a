"""Random damage to the header of a GGUF file."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path

from gguf_header import ARRAY, FORMATS, INTEGERS, STRING, Field, Header

NUMBERS = (0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 63, 64, 65, 100, 128, 255, 256, 511, 512, 513, 1024, 1025, 1535,
           1536, 1537, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -1, -2)  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-6, -1e-6, 1e-45, 1e30, -1e30, math.inf, -math.inf, math.nan, 10000.0)
STRINGS = (b"", b"\xff\xfe", b"none", b"linear", b"yarn", b"longrope", b"no_vocab", b"llama", b"gpt2", b"bert", b"t5",
           b"rwkv", b"plamo2", b"gemma4", b"default", b"qwen2", b"x" * 300, b"%s%n", b"a\0b")  # fmt: skip
ARCHITECTURES = (b"llama", b"qwen2", b"qwen3", b"qwen35", b"qwen35moe", b"qwen3next", b"eagle3", b"gemma", b"gemma2",
                 b"gemma3", b"gemma3n", b"gemma4", b"mamba", b"mamba2", b"rwkv6", b"rwkv7", b"jamba", b"falcon",
                 b"falcon-h1", b"granite", b"granitehybrid", b"phi2", b"phi3", b"llama4", b"gpt2", b"gptneox", b"bloom",
                 b"mpt", b"stablelm", b"xverse", b"internlm2", b"minicpm", b"olmo", b"olmo2", b"command-r", b"cohere2",
                 b"deepseek", b"deepseek2", b"chatglm", b"glm4", b"t5", b"bert", b"starcoder2", b"smollm3", b"lfm2",
                 b"nemotron_h", b"exaone4", b"gpt-oss", b"hunyuan-dense", b"seed_oss", b"arcee", b"clip", b"dflash",
                 b"nowhere", b"")  # fmt: skip
KEYS = (Path(__file__).parent / "gguf_keys.txt").read_text(encoding="ascii").split()
"""Names of fields that llama.cpp looks for."""


def corrupted(header: Header, rng: random.Random) -> bytes:
    """The file with one to three things changed in its header, or cut off."""
    header = header.copy()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choices(
            (_change_field, _add_field, _drop_field, _change_tensor, _change_architecture, _change_counts),
            (60, 15, 4, 12, 4, 1),
        )[0](header, rng)
    data = header.to_bytes()
    if rng.random() < 0.1:
        data = _flip_bytes(data, len(data) - len(header.data), rng)
    if rng.random() < 0.03:
        n_head = len(data) - len(header.data)
        data = data[: rng.choice((rng.randrange(n_head), rng.randrange(len(data)), n_head))]
    return data


def _scalar(kind: int, rng: random.Random, old: object = None) -> object:
    if kind == STRING:
        return rng.choice(STRINGS)
    if kind == 7:
        return rng.random() < 0.5
    if kind in (6, 12):
        value = rng.choice(FLOATS)
        return value if kind == 12 or not math.isfinite(value) else struct.unpack("<f", struct.pack("<f", value))[0]
    form = FORMATS[kind]
    value = rng.choice(NUMBERS)
    if isinstance(old, int) and rng.random() < 0.3:
        value = rng.choice((old + 1, old - 1, old * 2, old // 2, old * 3))
    n_bits = 8 * struct.calcsize("<" + form)
    value %= 2**n_bits
    return value - 2**n_bits if form.islower() and value >= 2 ** (n_bits - 1) else value


def _any_value(rng: random.Random, kind: int | None = None) -> tuple[int, object]:
    kind = kind if kind is not None else rng.choice((4, 4, 5, 6, 6, 7, STRING, ARRAY, rng.choice(INTEGERS), 12))
    if kind != ARRAY:
        return kind, _scalar(kind, rng)
    element = rng.choice((4, 4, 5, 6, 7, STRING, rng.choice(INTEGERS)))
    n = rng.choice((0, 1, 2, 3, 4, 5, 6, 8, 512, 513))
    return kind, (element, [_scalar(element, rng) for _ in range(n)])


def _change_field(header: Header, rng: random.Random) -> None:
    plain = [f for f in header.fields if not f.key.startswith((b"tokenizer.", b"general."))]
    field = rng.choice(plain if plain and rng.random() < 0.75 else header.fields or [Field(b"x", 4, 0)])
    how = rng.random()
    if how < 0.15:
        field.kind, field.value = _any_value(rng)
    elif field.kind != ARRAY:
        field.value = _scalar(field.kind, rng, field.value)
    else:
        element, values = field.value
        values = list(values)
        where = rng.randrange(len(values)) if values else 0
        if how < 0.35:
            values = values[: rng.choice((0, 1, len(values) // 2, max(0, len(values) - 1)))]
        elif how < 0.5:
            values = values + values[: rng.choice((1, 2, len(values)))]
        elif how < 0.6 and values:
            other = rng.randrange(len(values))
            values[where] = values[other]
        elif how < 0.7:
            element = rng.choice((4, 5, 6))
            values = [0] * len(values)
        elif values and element != ARRAY:
            for _ in range(rng.choice((1, 1, 3, 20))):
                values[rng.randrange(len(values))] = _scalar(element, rng, values[where])
        field.value = element, values


def _add_field(header: Header, rng: random.Random) -> None:
    architecture = next((f.value for f in header.fields if f.key == b"general.architecture"), None)
    prefix = architecture.decode("latin-1") if isinstance(architecture, bytes) else "llama"
    key = rng.choice(KEYS).replace("{arch}", prefix)
    kind = 6 if any(word in key for word in ("epsilon", "base", "factor", "scale", "softcap", "beta")) else 4
    kind, value = _any_value(rng, kind if rng.random() < 0.6 else None)
    field = next((f for f in header.fields if f.key == key.encode()), None)
    if field is None or rng.random() < 0.02:
        header.fields.append(Field(key.encode("latin-1"), kind, value))
        header.n_fields += 1
    else:
        field.kind, field.value = kind, value


def _drop_field(header: Header, rng: random.Random) -> None:
    if header.fields:
        del header.fields[rng.randrange(len(header.fields))]
        header.n_fields -= 1


def _change_tensor(header: Header, rng: random.Random) -> None:
    if not header.tensors:
        return
    tensor = rng.choice(header.tensors)
    how = rng.randrange(6)
    if how == 0:
        tensor.kind = rng.choice((*range(43), 255, 2**31 - 1, 2**32 - 1))
    elif how == 1:
        dimension = rng.randrange(len(tensor.shape))
        tensor.shape[dimension] = _scalar(10, rng, tensor.shape[dimension])
    elif how == 2:
        tensor.offset = rng.choice((_scalar(10, rng), tensor.offset + 32, tensor.offset - 32)) % 2**64
    elif how == 3:
        tensor.name = rng.choice((rng.choice(header.tensors).name, b"", b"x" * 63, b"x" * 70, tensor.name + b"x"))
    elif how == 4:
        tensor.shape = rng.choice(([], tensor.shape[::-1], [*tensor.shape, 1], [*tensor.shape, 2], [1] * 5))
    else:
        header.tensors.remove(tensor)
        header.n_tensors -= 1


def _change_architecture(header: Header, rng: random.Random) -> None:
    """Another architecture is given the hyperparameters of this one."""
    name = rng.choice(ARCHITECTURES)
    old = b""
    for field in header.fields:
        if field.key == b"general.architecture" and isinstance(field.value, bytes):
            old, field.value, field.kind = field.value, name, STRING
    for field in header.fields:
        if old and field.key.startswith(old + b"."):
            field.key = name + field.key[len(old) :]


def _change_counts(header: Header, rng: random.Random) -> None:
    name = rng.choice(("version", "n_tensors", "n_fields"))
    old = getattr(header, name)
    setattr(header, name, _scalar(4 if name == "version" else 10, rng, old))


def _flip_bytes(data: bytes, n_head: int, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        changed[rng.randrange(n_head)] = rng.randrange(256)
    return bytes(changed)
