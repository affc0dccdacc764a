"""GGUF headers over which llama.cpp would end the process: refused before it sees them."""

from __future__ import annotations

import math
import re
import textwrap
import time

import pytest
from gguf_edit import edit_gguf
from gguf_header import read_header
from heads import DFLASH, DRAFT, EAGLE3, HYBRID, LLAMA, error_in_subprocess

LLAMA_FIELDS = {
    "block_count": [(513, "at most 512"), (2**32 - 1, "at most")],
    "attention.layer_norm_rms_epsilon": [(-1e-6, "at least 0"), (math.nan, "epsilon = nan")],
    "rope.dimension_count": [(0, "even and from 2 to the 64"), (63, "even and from 2"), (66, "even and")],
}
HYBRID_FIELDS = {
    "block_count": [(2**32 - 1, "at most 512")],
    "attention.layer_norm_rms_epsilon": [(-1.0, "at least 0")],
    "rope.dimension_count": [(0, "even and from 2 to the 64"), (15, "even and from 2"), (66, "even and")],
    "rope.dimension_sections": [
        ([0, 0, 0, 0], "rope.dimension_sections = 0"),
        ([64, 64, 0, 0], "= 128, for heads of 64"),
    ],
    "full_attention_interval": [(0, "full_attention_interval = 0")],
    "embedding_length_out": [(512, "embedding_length_out = 512 beside embedding_length"), (2**31, "beside")],
}
HEAD_FIELDS = {
    "attention.layer_norm_rms_epsilon": [(-1e-6, "at least 0"), (math.nan, "epsilon = nan")],
    "rope.dimension_count": [(0, "even and from 2"), (7, "even and from 2"), (128, "even and from 2")],
    "block_count": [(2**32 - 1, "at most 512")],
    "embedding_length_out": [(512, "embedding_length_out = 512 beside")],
}
BLOCK_HEAD_FIELDS = HEAD_FIELDS | {"rope.dimension_sections": [([0, 0, 0, 9], "rope.dimension_sections = 9")]}


def hostile_headers(folder):
    """Yields (file, what loads it, part of the error) of copies with one field, or the type of one tensor, changed."""
    models = {"target": (LLAMA, LLAMA_FIELDS), "draft": (DRAFT, LLAMA_FIELDS), "hybrid": (HYBRID, HYBRID_FIELDS),
              "head": (EAGLE3, HEAD_FIELDS), "block head": (DFLASH, BLOCK_HEAD_FIELDS)}  # fmt: skip
    for role, (source, fields) in models.items():
        header = read_header(source)
        prefix = next(f.value for f in header.fields if f.key == b"general.architecture").decode()
        changes = [(f"{prefix}.{name}", value, why) for name, cases in fields.items() for value, why in cases]
        for i, (name, value, why) in enumerate(changes):
            copy = header.copy()
            copy.set(name.encode(), value)
            path = folder / f"{role} {i}.gguf"
            path.write_bytes(copy.to_bytes())
            yield path, role, why
    types = [(b"output_norm.weight", 26, "type i32"), (b"token_embd.weight", 25, "type i16")]  # of the same size
    for i, (name, kind, why) in enumerate(types):
        header = read_header(LLAMA)
        next(tensor for tensor in header.tensors if tensor.name == name).kind = kind
        path = folder / f"tensor {i}.gguf"
        path.write_bytes(header.to_bytes())
        yield path, "target", why


def test_headers_that_would_end_the_process(tmp_path):
    """In a child: it would abort, divide by zero, loop for hours, or allocate what nobody has."""
    cases = list(hostile_headers(tmp_path))
    code = """
        target, draft = FlyLlama(paths[0], **settings), paths[1]
        def load(path, role):
            if role in ("target", "hybrid"):
                FlyLlama(path, drafter=MTP() if role == "hybrid" else None, adaptive=False, **settings)
            target.drafter = {"head": Eagle3, "block head": DFlash}.get(role, DraftModel)(path)
        for path, (role, why) in zip(paths[1:], CASES):
            try:
                load(path, role)
            except (ValueError, IncompatibleDraftError) as error:
                assert why in str(error) and str(path) in str(error) and str(error).count(". ") == 0, (role, why, error)
            else:
                raise AssertionError((path, role, why))"""
    code = textwrap.dedent(code).replace("CASES", repr([(role, why) for _, role, why in cases]))
    begun = time.monotonic()
    assert error_in_subprocess(code, LLAMA, *(path for path, _, _ in cases)) == "no error"
    assert time.monotonic() - begun < 60


def test_a_tensor_larger_than_the_file(tmp_path):
    """d2t, which is read before llama.cpp sees the file: a claim of 16 GiB is not believed."""
    header = read_header(EAGLE3)
    next(tensor for tensor in header.tensors if tensor.name == b"d2t").shape = [2**31]
    path = tmp_path / "head.gguf"
    path.write_bytes(header.to_bytes())
    code = """
        import resource
        llm = FlyLlama(paths[0], **settings)
        resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
        llm.drafter = Eagle3(paths[1])"""
    error = error_in_subprocess(textwrap.dedent(code), LLAMA, path)
    assert re.match("(IncompatibleDraft|Value|Argument)Error: .*(d2t|complete GGUF)", error), error


def test_an_assertion_that_no_check_foresaw(tmp_path):
    """The net below the checks: llama.cpp asserts while it loads the file, and no check was asked."""
    empty = edit_gguf(LLAMA, tmp_path / "empty.gguf", {"llama.block_count": 0})
    code = """
        import llama_cpp
        from pyfly_cpp import _native
        if NET:
            with _native.load_guard():
                llama_cpp.Llama(str(paths[0]), **settings)
        llama_cpp.Llama(str(paths[0]), **settings)"""
    code = textwrap.dedent(code)
    assert "Failed to load model" in error_in_subprocess(code.replace("NET", "True"), empty)
    with pytest.raises(AssertionError):  # so it is the net that holds
        error_in_subprocess(code.replace("NET", "False"), empty)
