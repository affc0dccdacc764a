"""What the tests of the MTP and EAGLE-3 heads share: models, prompts, checks, and damaged copies of the files."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

TESTS = Path(__file__).parents[1]
TINY = TESTS.parent / "models" / "tiny"
HYBRID = TINY / "tiny-qwen35-mtp-f16.gguf"
LLAMA = TINY / "tiny-llama-target-f16.gguf"
EAGLE3 = TINY / "tiny-llama-eagle3-f16.gguf"
DRAFT = TINY / "tiny-llama-draft-f16.gguf"
SETTINGS = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
N_VOCAB = 1536
TOLERANCE = {HYBRID: 4e-3, LLAMA: 1e-3}  # twice the noise between batched and single evaluation


def prompts(n):
    lines = (TESTS / "data" / "half_documents.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:n]]


def generate(llm, prompt, n=96):
    """Greedy tokens from an empty context up to the end of the text; returns (prompt's tokens, new tokens)."""
    tokens = llm.tokenize(prompt.encode("utf-8"), add_bos=False, special=True)
    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    llm.reset()
    stream, out = llm.generate(tokens, temp=0.0), []
    for token in itertools.islice(stream, n):
        out.append(token)
        if llama_cpp.llama_vocab_is_eog(vocab, token):
            break
    stream.close()
    return tokens, out


def single_rows(reference, prompt, tokens):
    """The row behind the prompt and behind each token but the last, each evaluated alone."""
    reference.reset()
    reference.eval(prompt)
    rows = []
    for token in tokens:
        rows.append(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(reference.ctx, -1), (N_VOCAB,)).copy())
        reference.eval([token])
    return rows


def worst_gap(reference, prompt, tokens):
    """Teacher forcing: the most that any token is below the maximum of the row behind its own context."""
    return max(float(row.max() - row[token]) for row, token in zip(single_rows(reference, prompt, tokens), tokens))


def edit_gguf(source, destination, fields=None, tensors=None):
    """A copy of a GGUF file. `fields`: value by name, replaced or added (as float32 or uint32); `tensors(tensors)`:
    changes a dict of arrays by name."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(source)
    fields = dict(fields or {})
    architecture = fields.pop("general.architecture", reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(str(destination), architecture)
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = fields.pop(name, entry.contents())
        writer.add_key_value(name, value, entry.types[0], entry.types[-1] if len(entry.types) > 1 else None)
    for name, value in fields.items():
        kind = gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
        writer.add_key_value(name, value, kind)
    arrays = {entry.name: entry.data.copy() for entry in reader.tensors}
    if tensors is not None:
        tensors(arrays)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(destination)


def error_in_subprocess(code, *paths):
    """Runs code that should raise; returns "Type: message". A process that ends otherwise fails the test."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom pyfly_cpp import *\n"
        "settings = dict(n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)\n"
        "paths = [Path(p) for p in sys.argv[1:]]\n"
        "try:\n" + "".join(f"    {line}\n" for line in code.splitlines()) + "except Exception as e:\n"
        "    print(f'{type(e).__name__}: {e}')\n"
        "else:\n    print('no error')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, paths)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"the process ended with {done.returncode}: {done.stderr[-500:]}"
    return done.stdout.strip().splitlines()[-1]
