"""Copies of GGUF files with something changed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf_write import write


def edit_gguf(source, destination, fields=None, tensors=None):
    """Writes a copy. `fields`: value by name, replaced or added (bool, int, float, str, or a list of one), or None to
    leave it out; `tensors(arrays)`: changes a dict of arrays by name. Returns the destination as a Path."""
    kinds = {
        bool: gguf.GGUFValueType.BOOL,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
        str: gguf.GGUFValueType.STRING,
    }
    reader = gguf.GGUFReader(source)
    fields = dict(fields or {})
    architecture = fields.pop("general.architecture", reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(str(destination), architecture)
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        if isinstance(fields.get(name), list) and entry.types[0] != gguf.GGUFValueType.ARRAY:
            continue  # one value becomes a list
        value = fields.pop(name) if name in fields else entry.contents()
        if value is not None:
            writer.add_key_value(name, value, entry.types[0], entry.types[-1] if len(entry.types) > 1 else None)
    for name, value in fields.items():
        if isinstance(value, list):
            writer.add_key_value(name, value, gguf.GGUFValueType.ARRAY, kinds[type(value[0])])
        else:
            writer.add_key_value(name, value, kinds[type(value)])
    arrays = {entry.name: entry.data.copy() for entry in reader.tensors}
    if tensors is not None:
        tensors(arrays)
    write(writer, arrays)
    return Path(destination)


def without(*names):
    """For `tensors`: leaves these out."""

    def edit(arrays):
        for name in names:
            del arrays[name]

    return edit


def with_nan(arrays):
    """For `tensors`: makes every logit NaN."""
    arrays["output_norm.weight"][3] = float("nan")


def as_architecture(source, architecture):
    """For `fields`: the source's own hyperparameters under the name of another architecture."""
    fields = gguf.GGUFReader(source).fields
    prefix = fields["general.architecture"].contents() + "."
    return {"general.architecture": architecture} | {
        f"{architecture}.{name[len(prefix) :]}": entry.contents()
        for name, entry in fields.items()
        if name.startswith(prefix)
    }


def without_vocabulary(source):
    """For `fields`: no tokens, only their number."""
    fields = gguf.GGUFReader(source).fields
    names = [name for name in fields if name.startswith("tokenizer.")]
    architecture = fields["general.architecture"].contents()
    n_vocab = len(fields["tokenizer.ggml.tokens"].contents())
    return {**dict.fromkeys(names), "tokenizer.ggml.model": "no_vocab", f"{architecture}.vocab_size": n_vocab}


def with_padding(source, n, is_likely=False):
    """For `fields` and `tensors`: n more tokens at the end, never likely, or often the likeliest."""
    fields = gguf.GGUFReader(source).fields
    tokens, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    unused = int(gguf.TokenType.UNUSED)
    padded = {
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{len(tokens) + i}]" for i in range(n))],
        "tokenizer.ggml.token_type": [*types, *[unused] * n],
        fields["general.architecture"].contents() + ".vocab_size": len(tokens) + n,
    }

    def edit(arrays):
        for name in ("token_embd.weight", "output.weight"):
            if name in arrays:
                row = arrays[name][200:400].astype("float32").mean(axis=0) * (3 if is_likely else 0)
                arrays[name] = np.concatenate([arrays[name], np.tile(row, (n, 1)).astype(arrays[name].dtype)])

    return padded, edit


def other_token(source, *texts):
    """For `fields`: a vocabulary in which the tokens from 700 on have these texts."""
    tokens = gguf.GGUFReader(source).fields["tokenizer.ggml.tokens"].contents()
    tokens[700 : 700 + len(texts)] = texts
    return {"tokenizer.ggml.tokens": tokens}


def write_adapter(path, model, names, *, rank, seed, strength):
    """Writes a LoRA adapter of a model for these matrices, its scale 1: normal random numbers of this deviation.
    Returns the path as text."""
    reader = gguf.GGUFReader(model)
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    writer = gguf.GGUFWriter(str(path), reader.fields["general.architecture"].contents())
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    rng = np.random.default_rng(seed)
    arrays = {}
    for name in names:
        n_in, n_out = shapes[f"{name}.weight"]
        for part, shape in (("a", (rank, n_in)), ("b", (n_out, rank))):
            arrays[f"{name}.weight.lora_{part}"] = rng.normal(scale=strength, size=shape).astype(np.float32)
    write(writer, arrays)
    return str(path)
