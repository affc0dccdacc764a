"""Texts with words that are longer than a stack is deep."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from gguf_edit import edit_gguf

from pyfly_cpp import FlyLlama
from pyfly_cpp.models.tokenizing import in_short_words, tokenized

OPTIONS = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
BY_REGEX = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken"}
LONG = 2**17 - 20
CHILD = f"""
import sys
from pyfly_cpp import FlyLlama
llm = FlyLlama(sys.argv[1], **{OPTIONS})
for word in (b"x", b"!", b" "):
    assert len(llm.tokenize(b"some words before " * 9 + word * {LONG})) > 9
"""


@pytest.fixture(scope="module")
def tekken(tiny_target, tmp_path_factory):
    """The tiny model, with a vocabulary that is split by std::regex."""
    return str(edit_gguf(tiny_target, tmp_path_factory.mktemp("tekken") / "tekken.gguf", BY_REGEX))


READ = """
import sys
import llama_cpp
from pyfly_cpp.decoding.drafters.lookup_texts import read_texts
llm = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
print(len(read_texts(sys.argv[2:], llama_cpp.llama_model_get_vocab(llm.model))))
"""


def test_long_words_do_not_end_the_process(tekken, tmp_path):
    done = subprocess.run([sys.executable, "-c", CHILD, tekken], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
    text = tmp_path / "picture.txt"
    text.write_text("A picture follows. " + "\u00e9x" * LONG)
    command = [sys.executable, "-c", READ, tekken, str(text)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) > 1000, (done.returncode, done.stderr)


@pytest.mark.parametrize(
    "text", ["", "a b", "x" * 2000, "x" * 4001, "a " + " " * 5000 + "b" * 1999 + " c", "\u00e9" * 9999]
)
def test_cut_words(text):
    parts = list(in_short_words(text))
    assert "".join(parts) == text and "" not in parts
    assert all(len(word) <= 2000 for part in parts for word in [*part.split(), *re.findall(r"\s+", part)])


def test_longer_words_are_refused(tekken, tiny_target):
    llm = FlyLlama(tekken, **OPTIONS)
    for text in (b"x" * 140_000, b"a b " * 9 + b"c" + b"\n" * 140_000):
        with pytest.raises(ValueError, match=r"140000 bytes without a space .* 131072 at most: break the line"):
            llm.tokenize(text)
    assert llm.tokenize(b"a b c " * 30_000)
    llm.close()
    llm = FlyLlama(tiny_target, **OPTIONS)  # llama.cpp splits its texts by code of its own
    assert llm.tokenize(b"x" * 140_000)
    llm.close()


@pytest.mark.parametrize(
    "metadata, text, is_tried",
    [
        (BY_REGEX, b"x" * 2048, True),
        (BY_REGEX, b"x y " * 50_000, True),
        (BY_REGEX, b"x" * 2**17, True),
        (BY_REGEX, b"x" * (2**17 + 1), False),
        (BY_REGEX, b"y\n" + b" " * (2**17 + 1), False),
        ({"tokenizer.ggml.model": "gpt2"}, b"x" * (2**17 + 1), False),
        ({**BY_REGEX, "tokenizer.ggml.pre": "qwen2"}, b"x" * (2**17 + 1), True),
        ({"tokenizer.ggml.model": "llama"}, b"x" * (2**17 + 1), True),
        ({}, b"x" * (2**17 + 1), True),
    ],
)
def test_which_texts_are_tried(metadata, text, is_tried):
    if is_tried:
        assert tokenized(lambda: len(text), text, metadata) == len(text)
    else:
        with pytest.raises(ValueError, match="break the line"):
            tokenized(lambda: len(text), text, metadata)


def test_failures_come_through():
    with pytest.raises(KeyError):
        tokenized(lambda: {}["x"], b"x" * 3000, BY_REGEX)
