"""Texts with words that are longer than a stack is deep."""

from __future__ import annotations

import random
import re
import subprocess
import sys

import llama_cpp
import pytest
from gguf_edit import edit_gguf

from pyfly_cpp import FlyLlama
from pyfly_cpp.models import special_tokens
from pyfly_cpp.models.special_tokens import SpecialTokens
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


# ---- Special tokens --------------------------------------------------------------------------------------------------

TEXTS = ["a", " word", "  ", "\n", "<", "|", ">", "\u00e9", "12"]


def test_cut_at_special_tokens(tiny_target, tiny_qwen35, monkeypatch):
    """The tokens of the parts are those of the text: whatever stands before and behind, with tokens that overlap."""
    monkeypatch.setattr(special_tokens, "_MANY", 2)
    monkeypatch.setattr(special_tokens, "_RETRY", 1)
    rng = random.Random(1)
    for path in (tiny_target, tiny_qwen35):
        llm = llama_cpp.Llama(path, vocab_only=True, verbose=False)
        vocab, n = llm._model.vocab, llm.n_vocab()
        found = {llama_cpp.llama_vocab_get_text(vocab, i).decode() for i in range(n) if kind_of(vocab, i)}
        special = SpecialTokens(vocab, llm.metadata, True)
        n_parts = 0
        for _ in range(300):
            bits = rng.choices([*found, *(text[:3] for text in found), *(text[-3:] for text in found), *TEXTS], k=40)
            text = "".join(bits).encode()
            parts = special.parts(text)
            n_parts += len(parts)
            assert b"".join(parts) == text
            tokens = [token for part in parts for token in llm._model.tokenize(part, False, True)]
            assert tokens == llm._model.tokenize(text, False, True)
        assert n_parts > 600
        llm.close()


def kind_of(vocab, token):
    return llama_cpp.llama_vocab_get_attr(vocab, token) & (
        llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
    )


def test_special_tokens_that_overlap(monkeypatch):
    """A vocabulary of its own: ends of lines, and texts that begin with the end of others. A longer one wins."""
    texts = [b"\n", b"\n\n", b"\n\n\n\n", b"ab", b"bcd", b"<s>", b"s>\n", b"x" * 300]
    monkeypatch.setattr(special_tokens, "_MANY", 0)
    monkeypatch.setattr(special_tokens, "_RETRY", 0)
    monkeypatch.setattr(llama_cpp, "llama_vocab_n_tokens", len)
    monkeypatch.setattr(llama_cpp, "llama_vocab_get_attr", lambda vocab, i: llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED)
    monkeypatch.setattr(llama_cpp, "llama_vocab_get_text", lambda vocab, i: vocab[i])
    known = SpecialTokens(texts[:7], {"tokenizer.ggml.model": "gpt2"}, False)
    assert known.parts(b"q\nq\n\nq") == [b"q", b"\nq", b"\n\nq"]
    assert known.parts(b"q\n\n\n\n\nq") == [b"q", b"\n\n\n\n\nq"]
    assert known.parts(b"qabcd") == [b"qabcd"] and known.parts(b"qabd") == [b"q", b"abd"]
    assert known.parts(b"q<s>\nq") == [b"q<s>\nq"]
    for model, own in (("t5", texts[:7]), ("gpt2", texts), ("gpt2", [])):  # not known, too long, none
        assert SpecialTokens(own, {"tokenizer.ggml.model": model}, False).parts(b"q\nq") == [b"q\nq"]


def test_many_special_tokens_come_to_llama_cpp_in_parts(tiny_target, monkeypatch):
    llm = FlyLlama(tiny_target, **OPTIONS)
    seen = []
    tokenize = llm._model.tokenize

    def look(text, add_bos, special):
        seen.append((text.count(b"<|im_start|>"), add_bos))
        return tokenize(text, add_bos, special)

    monkeypatch.setattr(llm._model, "tokenize", look)
    text = b"Hi<|im_start|>user\n" * 5000
    tokens = llm.tokenize(text, special=True)
    assert max(n for n, _ in seen) <= 1024 and sum(n for n, _ in seen) == 5000
    assert [has_bos for _, has_bos in seen] == [True] + [False] * (len(seen) - 1)
    assert tokens == tokenize(text, True, True)
    llm.close()
