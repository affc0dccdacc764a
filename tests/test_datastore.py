"""Datastores and retrieval, against a search that looks everywhere; damaged and foreign files; building from texts."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf_edit import edit_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from pyfly_cpp import IncompatibleDraftError, PromptLookup, Retrieval
from pyfly_cpp import datastore as datastores
from pyfly_cpp._native import build_store, read_store
from pyfly_cpp.datastore import build_datastore, inspect_datastore
from pyfly_cpp.files import OutputError

N_VOCAB, MARK = 7, 12345
HEADER = 64


def write_store(path, text, n_vocab=N_VOCAB, mark=MARK):
    header, suffixes = build_store(text, n_vocab, mark, lambda done: None)
    path.write_bytes(header + np.asarray(text, dtype=np.int32).tobytes() + suffixes.tobytes())
    return path


# ---- The suffix array ------------------------------------------------------------------------------------------------


def sorted_slowly(text):
    return sorted(range(len(text)), key=lambda i: text[i:])


@given(
    st.one_of(
        st.lists(st.integers(-1, N_VOCAB - 1), min_size=1, max_size=80),
        st.lists(st.integers(-1, 0), min_size=1, max_size=80),
        st.builds(lambda a, n, b: (a * n + b)[:200], st.lists(st.integers(-1, 3), min_size=1), st.integers(1, 50),
                  st.lists(st.integers(-1, 3))),
    )
)  # fmt: skip
@settings(max_examples=300)
def test_suffixes_are_sorted(text):
    _, suffixes = build_store(text, N_VOCAB, MARK, lambda done: None)
    assert suffixes.tolist() == sorted_slowly(text)


@pytest.mark.parametrize(
    "kind", ["random", "one symbol", "period", "Fibonacci", "rising", "falling", "large vocabulary"]
)
def test_suffixes_of_long_texts(kind):
    n, rng = 200_000, np.random.default_rng(1)
    fibonacci, last = [1], [0]
    while len(fibonacci) < n:
        fibonacci, last = fibonacci + last, fibonacci
    text = {
        "random": lambda: rng.integers(-1, 5, n),
        "one symbol": lambda: np.zeros(n, dtype=np.int64),
        "period": lambda: np.arange(n) % 7,
        "Fibonacci": lambda: np.array(fibonacci[:n]),
        "rising": lambda: np.arange(n),
        "falling": lambda: np.arange(n)[::-1],
        "large vocabulary": lambda: rng.integers(0, 150_000, n),
    }[kind]()
    _, suffixes = build_store(text, n, MARK, lambda done: None)
    assert np.array_equal(np.sort(suffixes), np.arange(n))
    # Neighbours are in order: by their first tokens, then by the ranks of what follows.
    rank = np.full(n + 1, -1)
    rank[suffixes] = np.arange(n)
    a, b = suffixes[:-1], suffixes[1:]
    assert np.all((text[a] < text[b]) | ((text[a] == text[b]) & (rank[a + 1] < rank[b + 1])))


def test_what_cannot_be_built():
    for text, message in (([], "no tokens"), ([-2], "-2 is outside"), ([N_VOCAB], "7 is outside the vocabulary of 7")):
        with pytest.raises(ValueError, match=message):
            build_store(text, N_VOCAB, MARK, lambda done: None)


# ---- Retrieval -------------------------------------------------------------------------------------------------------


def retrieved_slowly(text, history, drafter):
    """Scans the text for the longest suffix of the history that something follows."""
    for n in range(min(drafter.max_ngram_size, len(history)), drafter.min_ngram_size - 1, -1):
        found = [i + n for i in range(len(text) - n + 1) if text[i : i + n] == history[-n:]]
        found.sort(key=lambda i: text[i:])
        size, most = len(found), min(len(found), drafter.max_matches)
        found = [found[size * i // most] for i in range(most)]
        out = []
        while len(out) < drafter.num_pred_tokens:
            following = Counter(text[i] for i in found if i < len(text) and text[i] >= 0)
            if not following:
                break
            token = min(following, key=lambda t: (-following[t], t))
            out.append(token)
            found = [i + 1 for i in found if i < len(text) and text[i] == token]
        if out:
            return out
    return []


def test_what_is_retrieved(tmp_path):
    rng = random.Random(5)
    n_found = 0
    for _ in range(150):
        text = [rng.choice([-1, *range(rng.choice([2, 3, N_VOCAB]))]) for _ in range(rng.choice([1, 5, 60, 300]))]
        longest = rng.randrange(1, 8)
        drafter = Retrieval(
            write_store(tmp_path / "store", text), longest, rng.randrange(1, longest + 1), rng.randrange(1, 9),
            rng.choice([1, 2, 5, 64]),
        )  # fmt: skip
        with drafter.open() as opened:
            for _ in range(20):
                at = rng.randrange(len(text) + 1)
                history = [max(t, 0) for t in text[max(0, at - rng.randrange(9)) : at]]
                history += [rng.randrange(N_VOCAB) for _ in range(rng.choice([0, 0, 1]) or not history)]
                found = opened.propose(history, drafter.num_pred_tokens)
                assert found == retrieved_slowly(text, history, drafter)
                assert opened.propose(history, 2) == found[:2]
                n_found += len(found) > 2
    assert n_found > 400


def test_the_most_frequent_goes_on(tmp_path):
    store = write_store(tmp_path / "s", [1, 2, 3, 4, -1, 1, 2, 5, 6, -1, 1, 2, 5, 3, -1, 1, 2, 5, 6, -1, 0, 2])
    assert Retrieval(store).propose([0, 1, 2]) == [5, 6]
    assert Retrieval(store).propose([6, 4, 2]) == []  # only the 2 alone occurs
    assert Retrieval(store, min_ngram_size=1).propose([6, 4, 2]) == [5, 6]
    assert Retrieval(store, min_ngram_size=1).propose([0, 2]) == [5, 6]  # "0 2" occurs, but ends a document
    assert Retrieval(store).propose([]) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_ngram_size": 0}, "max_ngram_size must be an integer in 1..64"),
        ({"max_ngram_size": 65}, "max_ngram_size"),
        ({"min_ngram_size": 17}, "min_ngram_size must be an integer in 1..16"),
        ({"num_pred_tokens": 0}, "num_pred_tokens"),
        ({"max_matches": 0}, "max_matches"),
        ({"max_matches": 4097}, "max_matches"),
        ({"max_matches": 2.5}, "max_matches"),
    ],
)
def test_fields_out_of_range(fields, message):
    with pytest.raises(ValueError, match=message):
        Retrieval("store", **fields)


# ---- Damage ----------------------------------------------------------------------------------------------------------


def refused(path, content, message):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        Retrieval(path).open()
    assert str(path) in str(caught.value) and str(caught.value).count("\n") == 0
    with pytest.raises(ValueError, match=message):
        inspect_datastore(path)


def test_every_byte_of_the_header_counts(tmp_path):
    good = write_store(tmp_path / "good", [1, 2, 3] * 9).read_bytes()
    for i in range(HEADER):
        for flip in (1, 0x80, 0xFF):
            bad = bytearray(good)
            bad[i] ^= flip
            refused(tmp_path / "bad", bytes(bad), "is not one" if i < 8 else "damaged header")


def test_another_length(tmp_path):
    good = write_store(tmp_path / "good", [1, 2, 3] * 9).read_bytes()
    refused(tmp_path / "bad", b"", "is empty; build it again")
    for n in [*range(1, HEADER + 2), *range(HEADER + 2, len(good), 7), len(good) - 1]:
        refused(tmp_path / "bad", good[:n], "cut short" if n < HEADER else f"has {n} bytes instead of {len(good)}")
    refused(tmp_path / "bad", good + b"\0", f"has {len(good) + 1} bytes")
    refused(tmp_path / "bad", b"GGUF" + good[4:], "is not one: it begins differently")


def test_files_that_are_none(tmp_path):
    for path, message in (
        (tmp_path / "missing", "No such file"),
        (tmp_path, "is a folder"),
        ("/dev/null", "is a device"),
    ):
        with pytest.raises(ValueError, match=message):
            Retrieval(path).open()


def test_a_damaged_body_is_memory_safe(tmp_path):
    """Nothing is noticed before everything is read, and nothing outside the file is."""
    rng = random.Random(3)
    good = write_store(tmp_path / "good", [rng.randrange(3) for _ in range(200)]).read_bytes()
    for _ in range(200):
        bad = bytearray(good)
        for _ in range(rng.choice([1, 3, 400])):
            word = rng.randrange(HEADER // 4, len(bad) // 4)
            value = rng.choice([-1, 0, 2**31 - 1, -(2**31), rng.randrange(-300, 300)])
            bad[4 * word : 4 * word + 4] = value.to_bytes(4, "little", signed=True)
        path = tmp_path / "bad"
        path.write_bytes(bad)
        with Retrieval(path, min_ngram_size=1).open() as opened:
            for _ in range(20):
                proposal = opened.propose([rng.randrange(3) for _ in range(rng.randrange(1, 6))], 10)
                assert all(0 <= token < N_VOCAB for token in proposal)
        if bytes(bad) != good:
            with pytest.raises(ValueError, match="the datastore is damaged; build it again"):
                read_store(path, reads_all=True)
    read_store(tmp_path / "good", reads_all=True)


# ---- Building --------------------------------------------------------------------------------------------------------

TEXTS = {
    "a.md": "Natalia sold clips to 48 of her friends.\n" * 3,
    "b/c.py": "def f():\n    return 'ü€😀'\n",
    "b/.hidden": "not this one",
    "b/empty.txt": "",
    "b/binary": b"\0\1\2",
    "b/latin1.txt": "ü".encode("latin-1"),
    ".git/objects": "nor this one",
}


@pytest.fixture
def texts(tmp_path):
    for name, content in TEXTS.items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return tmp_path / "texts"


def tokens_of(path):
    info = read_store(path, reads_all=True)
    return np.frombuffer(Path(path).read_bytes(), dtype=np.int32, offset=HEADER, count=info.n_tokens).tolist()


def test_a_datastore_of_texts(tiny_target, texts, tmp_path):
    llm = llama_cpp.Llama(tiny_target, vocab_only=True, verbose=False)
    wanted = [llm.tokenize(TEXTS[name].encode(), add_bos=False) for name in ("a.md", "b/c.py")]
    store, seen = tmp_path / "store", []
    built = build_datastore(tiny_target, [texts], store, on_progress=lambda *what: seen.append(what))
    assert tokens_of(store) == [*wanted[0], -1, *wanted[1]]
    assert built == (2, 3, sum(len(TEXTS[name].encode()) for name in ("a.md", "b/c.py")), len(tokens_of(store)))
    assert seen[0][0] == "tokenising"
    with pytest.raises(OutputError, match="exists already"):
        build_datastore(tiny_target, [texts], store)
    build_datastore(tiny_target, [texts / "b" / "c.py", texts, texts / "a.md"], store, force=True)  # each once
    assert tokens_of(store) == [*wanted[1], -1, *wanted[0]]
    assert inspect_datastore(store, tiny_target, check=True).fits is True
    history = wanted[0][: len(wanted[0]) // 3 + 4]
    assert Retrieval(store).propose(history) == wanted[0][len(history) : len(history) + 10]


def test_pieces_of_a_long_text(tiny_target, tmp_path, monkeypatch):
    """Whatever is cut where, no byte is lost, no character is torn, and lines stay whole."""
    monkeypatch.setattr(datastores, "PIECE", 16)
    text = "One line.\n\n  And a much longer one, of " + "ü€😀" * 20 + "\n" + "ab\n" * 30
    (tmp_path / "text").write_text(text, encoding="utf-8")
    pieces = list(datastores._pieces(datastores._File(tmp_path / "text", False)))
    assert b"".join(pieces).decode() == text and len(pieces) > 10
    assert all(piece.decode() for piece in pieces)
    assert pieces[0] == b"One line.\n\n"
    build_datastore(tiny_target, [tmp_path / "text"], tmp_path / "store")
    llm = llama_cpp.Llama(tiny_target, vocab_only=True, verbose=False)
    assert llm.detokenize(tokens_of(tmp_path / "store")).decode().strip() == text.strip()


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["missing.txt"], "the text 'missing.txt' cannot be read"),
        (["b/binary"], "b/binary is not UTF-8 text; convert it, or leave it out"),
        (["b/latin1.txt"], "not UTF-8 text"),
        (["b/empty.txt"], "there is no text in what was given"),
        ([".git/none"], "cannot be read"),
        (["/dev/zero"], "is a device"),
        ([], "there is no text"),
    ],
)
def test_sources_that_are_no_texts(sources, message, tiny_target, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(texts)
    with pytest.raises(ValueError, match=message):
        build_datastore(tiny_target, sources, tmp_path / "store")
    assert not (tmp_path / "store").exists() and not list(tmp_path.glob(".pyfly-*"))


def test_a_full_disk_is_noticed_first(tiny_target, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(OutputError, match="make room, or write to another disk"):
        build_datastore(tiny_target, [texts], tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("when", ["tokenising", "sorting"])
def test_ctrl_c_leaves_what_was_there(when, tiny_target, tmp_path):
    text, store = tmp_path / "text", tmp_path / "store"
    text.write_text("A robe takes 2 bolts of blue fiber.\n" * 30_000)  # a million tokens: sorting reports in between
    store.write_bytes(b"old")

    def interrupt(what, done, total):
        if what == when and done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_datastore(tiny_target, [text], store, force=True, on_progress=interrupt)
    assert store.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["store", "text"]


def test_a_foreign_vocabulary(tiny_target, tmp_path):
    """One token's text makes another vocabulary."""

    gguf = pytest.importorskip("gguf")
    tokens = gguf.GGUFReader(tiny_target).fields["tokenizer.ggml.tokens"].contents()
    tokens[700] += "x"
    (tmp_path / "text").write_text("some text")
    build_datastore(tiny_target, [tmp_path / "text"], tmp_path / "store")
    other = edit_gguf(tiny_target, tmp_path / "other.gguf", fields={"tokenizer.ggml.tokens": tokens})
    assert inspect_datastore(tmp_path / "store", other).fits is False
    from pyfly_cpp import FlyLlama

    with pytest.raises(IncompatibleDraftError, match=r"store: .* another vocabulary; build one with this model\."):
        FlyLlama(str(other), drafter=Retrieval(tmp_path / "store"), n_ctx=64, n_threads=1, verbose=False)


@pytest.mark.skipif(sys.platform == "win32", reason="a file that is mapped cannot be replaced there")
def test_a_datastore_is_replaced_while_it_is_read(tmp_path):
    store = write_store(tmp_path / "store", [1, 2, 3, 4])
    with Retrieval(store).open() as opened:
        os.replace(write_store(tmp_path / "new", [1, 2, 5]), store)
        assert opened.propose([1, 2], 5) == [3, 4]
    assert Retrieval(store).propose([1, 2]) == [5]


def test_a_description_reads_nothing():
    assert Retrieval("nowhere").path == "nowhere"
    assert str(Retrieval("a/mine.store")) == "retrieval from mine.store"
    assert PromptLookup().file is None and Retrieval("x").file == "x"
