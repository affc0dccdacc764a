"""Datastores for `Retrieval`: building one from texts, and looking at one (pyfly.h has the format).

A datastore is built for a vocabulary and serves every model that has it. It takes 8 bytes for each token, and building
it about 10 (so 3 to 4 for each byte of English or of code), beside a few megabytes.
"""

from __future__ import annotations

import array
import collections
import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import numpy as np

from pyfly_cpp import _native
from pyfly_cpp.files import first_bytes, require_free, require_gguf, require_space, write_atomically
from pyfly_cpp.metadata import open_metadata
from pyfly_cpp.threads import physical_cores
from pyfly_cpp.tokenizing import in_short_words

PIECE = 1 << 18
"""Bytes that are tokenised at a time."""

MAX_TOKENS = 2**31 - 1

Progress = Callable[[str, float, float], None]
"""Called with what is being done, and how much of how much is done."""


class Built(NamedTuple):
    """What came of building a datastore."""

    n_files: int
    """Texts that are in it."""
    n_skipped: int
    """Files in folders that are no UTF-8 text, or empty."""
    n_bytes: int
    """Of the texts."""
    n_tokens: int


class Inspected(NamedTuple):
    """What a datastore says of itself."""

    n_tokens: int
    n_vocab: int
    n_bytes: int
    """Of the file."""
    fits: bool | None
    """Whether the model that was named has its vocabulary."""


def build_datastore(
    model: str | os.PathLike[str],
    sources: Iterable[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    force: bool = False,
    on_progress: Progress | None = None,
) -> Built:
    """Builds a datastore: whole or not at all.

    Args:
        model: A GGUF file with the vocabulary; its weights are not read.
        sources: Texts in UTF-8, and folders: every text in them that is not hidden.
        path: The file to write.
        force: Overwrite it.
        on_progress: Called every now and then; what it raises stops the building.

    Raises:
        ValueError: a file is missing or no text, or there is nothing in them.
        OutputError: the file exists already, or cannot be written.
    """
    progress = on_progress or (lambda what, done, total: None)
    require_gguf(os.fspath(model))
    require_free(path, force)
    files = _files(sources, Path(path))
    with open_metadata(Path(model), vocab_only=True) as opened:
        vocabulary = llama_cpp.llama_model_get_vocab(opened)
        n_vocab, mark = llama_cpp.llama_vocab_n_tokens(vocabulary), _native.model_vocabulary(opened)
        if llama_cpp.llama_vocab_type(vocabulary) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
            raise ValueError(f"the model {os.fspath(model)!r} has no tokenizer, so it cannot read texts.")
        text, built = _tokenize_all(vocabulary, files, progress)
    if built.n_tokens == 0:
        raise ValueError("there is no text in what was given; name text files, or folders with some.")
    require_space(Path(path).parent, 8 * built.n_tokens, "make room, or write to another disk")
    header, suffixes = _native.build_store(text, n_vocab, mark, lambda done: progress("sorting", done, 1.0))
    write_atomically(path, (header, text, suffixes))
    return built


def inspect_datastore(
    path: str | os.PathLike[str], model: str | os.PathLike[str] | None = None, check: bool = False
) -> Inspected:
    """Reads the header; `check`: everything. Raises ValueError if it is no datastore or damaged,
    or if llama.cpp cannot load the model."""
    first_bytes(os.fspath(path), "datastore", "datastore", 1)
    try:
        info = _native.read_store(path, check)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None
    fits = None
    if model is not None:
        require_gguf(os.fspath(model))
        with open_metadata(Path(model), vocab_only=True) as opened:
            fits = _native.model_vocabulary(opened) == info.vocabulary
    return Inspected(info.n_tokens, info.n_vocab, os.path.getsize(path), fits)


# ---- Texts -----------------------------------------------------------------------------------------------------------


class _File(NamedTuple):
    path: Path
    is_found: bool
    """In a folder: what is no text in it is passed over."""


def _files(sources: Iterable[str | os.PathLike[str]], output: Path) -> list[_File]:
    """The files of the sources, each once, in order; raises ValueError for one that cannot be read."""
    out: dict[str, _File] = {os.path.realpath(output): _File(output, True)}
    for source in sources:
        if os.path.isdir(source):
            for folder, folders, names in os.walk(source):
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                for name in sorted(name for name in names if not name.startswith(".")):
                    found = Path(folder, name)
                    if found.is_file():
                        out.setdefault(os.path.realpath(found), _File(found, True))
        else:
            first_bytes(os.fspath(source), "text", "text file", 1)
            out.setdefault(os.path.realpath(source), _File(Path(source), False))
    return list(out.values())[1:]


def _pieces(file: _File) -> Iterator[bytes]:
    """The text in pieces of about PIECE bytes, cut behind a line, if there is one, and in words that are too long to
    tokenise. Raises ValueError where it is no text."""
    with open(file.path, "rb") as stream:
        rest = b""
        while block := stream.read(PIECE):
            rest += block
            cut = _last_line(rest) if len(block) == PIECE else len(rest)
            yield from _text(rest[:cut], file)
            rest = rest[cut:]
        if rest:
            yield from _text(rest, file)


def _last_line(text: bytes) -> int:
    """Where the last line begins; if there is but one, where the last character does, which may not be complete."""
    if end := text.rfind(b"\n") + 1:
        return end
    return next((len(text) - n for n in (1, 2, 3) if text[-n] >= 0xC0), len(text))


def _text(piece: bytes, file: _File) -> Iterator[bytes]:
    try:
        if b"\0" in piece:
            raise ValueError
        text = piece.decode("utf-8")
    except ValueError:
        raise ValueError(f"{file.path} is not UTF-8 text; convert it, or leave it out.") from None
    return (part.encode("utf-8") for part in in_short_words(text))


# ---- Tokens ----------------------------------------------------------------------------------------------------------


def _tokenize(vocabulary: Any, text: bytes) -> bytes:
    """The tokens of a text, as the bytes of int32. May run in any thread."""
    capacity = len(text) + 16
    out = (llama_cpp.llama_token * capacity)()
    n = llama_cpp.llama_tokenize(vocabulary, text, len(text), out, capacity, False, False)
    if n < 0:
        raise ValueError("llama.cpp could not tokenise a text; this is a bug in its tokenizer.")
    return ctypes.string_at(out, 4 * n)


def _tokenize_all(vocabulary: Any, files: list[_File], progress: Progress) -> tuple[Any, Built]:
    """All tokens, int32, with a -1 between two texts."""
    text = array.array("i")
    n_files = n_skipped = n_bytes = 0
    total = sum(file.path.stat().st_size for file in files)
    n_threads = physical_cores()
    with ThreadPoolExecutor(n_threads) as pool:
        waiting: collections.deque[Future[bytes]] = collections.deque()

        def take(n_left: int) -> None:
            while len(waiting) > n_left:
                text.frombytes(waiting.popleft().result())
                if len(text) > MAX_TOKENS:
                    raise ValueError(f"a datastore holds at most {MAX_TOKENS} tokens; build several.")

        for file in files:
            progress("tokenising", n_bytes, total)
            n_before = n_bytes
            pieces = _pieces(file)
            while True:
                try:
                    piece = next(pieces, None)
                except (ValueError, OSError):
                    if not file.is_found:
                        raise
                    break
                if piece is None:
                    break
                waiting.append(pool.submit(_tokenize, vocabulary, piece))
                n_bytes += len(piece)
                progress("tokenising", n_bytes, total)
                take(2 * n_threads)
            if n_bytes == n_before:
                n_skipped += 1
                continue
            n_files += 1
            waiting.append(pool.submit(np.array([-1], dtype=np.int32).tobytes))
        take(0)
    if text:
        text.pop()
    return np.frombuffer(text, dtype=np.int32), Built(n_files, n_skipped, n_bytes, len(text))
