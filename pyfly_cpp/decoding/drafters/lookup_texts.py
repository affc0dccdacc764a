"""Texts that prompt lookup searches besides the request itself: texts that the user names, and a file that keeps the
answers of earlier runs.

The file holds a header of 64 bytes (what it is, the vocabulary, how many tokens there are, their SHA-256) and the
tokens, each 4 bytes, all little-endian; -1 stands between two answers.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from pyfly_cpp._native.boundary import TokenArray
from pyfly_cpp.machine.files import files_in, first_bytes, only_writer, require_writable, write_atomically
from pyfly_cpp.machine.threads import physical_cores
from pyfly_cpp.models.tokenizing import in_short_words

_HEADER = struct.Struct("<16sQQ32s")
_MAGIC = b"pyfly lookup 1\n\0"
_PIECE = 2**18  # bytes that are tokenised at a time, about
_SEPARATOR = np.array([-1], dtype=np.int32)


# ---- The answers of earlier runs -------------------------------------------------------------------------------------


def read_answers(path: str | os.PathLike[str], vocabulary: int) -> TokenArray:
    """The tokens [n] that a memory file keeps; none if it is not there yet.

    Args:
        vocabulary: What tells the model's vocabulary from others.

    Raises:
        ValueError: it is no such file, is damaged or of another vocabulary, or cannot be written later.
    """
    require_writable(Path(path).absolute().parent)
    if not os.path.lexists(path):
        return np.zeros(0, dtype=np.int32)
    begin = first_bytes(os.fspath(path), "lookup memory", "lookup memory", _HEADER.size)
    if len(begin) < _HEADER.size or not begin.startswith(_MAGIC):
        raise ValueError(f"{os.fspath(path)} is not a lookup memory; name one, or a new file.")
    _, theirs, n, digest = _HEADER.unpack(begin)
    if theirs != vocabulary:
        raise ValueError(
            f"the lookup memory {os.fspath(path)} is of a model with another vocabulary; give another path for this "
            "model."
        )
    content = Path(path).read_bytes()[_HEADER.size :]
    if len(content) != 4 * n or hashlib.sha256(content).digest() != digest:
        raise ValueError(f"the lookup memory {os.fspath(path)} is damaged; remove it, and a new one will be written.")
    return np.frombuffer(content, dtype="<i4").astype(np.int32)


def add_answers(
    path: str | os.PathLike[str], vocabulary: int, remembered: TokenArray, kept: TokenArray, most: int
) -> None:
    """Keeps the answers that are remembered, behind those that other processes have added to the file meanwhile.

    Args:
        kept: What was remembered when the file was last read or written.
        most: Tokens that the file may hold; of more, the newest count.

    Raises:
        OSError, ValueError: the file cannot be written, or is no longer one that `read_answers` reads.
    """
    with only_writer(f"{os.fspath(path)}.lock", lambda: None):
        answers = np.concatenate([read_answers(path, vocabulary), _behind(kept, remembered)])
        write_answers(path, vocabulary, answers[-most:])


def _behind(kept: TokenArray, remembered: TokenArray) -> TokenArray:
    """What is remembered behind an end of `kept`, the longest that it begins with: older answers may have made room."""
    for i in np.flatnonzero(kept == remembered[0]) if len(remembered) else ():
        n = len(kept) - int(i)
        if np.array_equal(kept[i : i + 16], remembered[: min(n, 16)]) and np.array_equal(kept[i:], remembered[:n]):
            return remembered[n:]
    return remembered


def write_answers(path: str | os.PathLike[str], vocabulary: int, answers: TokenArray) -> None:
    """Keeps these tokens: the whole file or nothing is written. Raises OutputError."""
    content = answers.astype("<i4").tobytes()
    write_atomically(path, (_HEADER.pack(_MAGIC, vocabulary, len(answers), hashlib.sha256(content).digest()), content))


# ---- Texts that the user names ---------------------------------------------------------------------------------------


def read_texts(paths: Sequence[str | os.PathLike[str]], vocabulary: Any) -> TokenArray:
    """The tokens [n] of texts in UTF-8 and of folders of them, with a -1 behind each text.

    Args:
        paths: What in a folder is hidden, or no text, is passed over.
        vocabulary: A llama_vocab as llama_cpp holds it (a ctypes pointer).

    Raises:
        ValueError: a file that was named cannot be read or is no text, or there is no text in all of them.
    """
    with ThreadPoolExecutor(physical_cores()) as pool:
        files = pool.map(lambda file: _tokens(file[0], file[1], vocabulary), text_files(paths))
        parts = [part for tokens in files if len(tokens) for part in (tokens, _SEPARATOR)]
    if paths and not parts:
        raise ValueError(
            f"there is no text in {', '.join(str(path) for path in paths)}; name text files, or folders of them."
        )
    return np.concatenate([np.zeros(0, dtype=np.int32), *parts])


def text_files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[tuple[Path, bool]]:
    """Each of these files and of the files in these folders once, and whether it was named itself. Raises ValueError if
    one that was named cannot be read."""
    seen = set()
    for path in paths:
        if not os.path.isdir(path):
            first_bytes(os.fspath(path), "text", "text file", 1)
        for file in files_in(path, "**/*") if os.path.isdir(path) else (Path(path),):
            parts = file.relative_to(path).parts if file != Path(path) else ()
            is_hidden = any(part.startswith(".") for part in parts)
            if not is_hidden and os.path.isfile(file) and (real := os.path.realpath(file)) not in seen:
                seen.add(real)
                yield file, not parts


def _tokens(path: Path, is_named: bool, vocabulary: Any) -> TokenArray:
    try:
        content = path.read_bytes()
        text = "" if b"\0" in content else content.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        content, text = b"\0", ""
    if is_named and content and not text:
        raise ValueError(f"{path} is not UTF-8 text; convert it, or leave it out.")
    pieces = [piece for part in _parts(text) for piece in in_short_words(part)]
    return np.concatenate([np.zeros(0, dtype=np.int32), *(_tokenize(piece.encode(), vocabulary) for piece in pieces)])


def _parts(text: str) -> Iterator[str]:
    """The text in parts of whole lines."""
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + _PIECE) + 1 or len(text)
        yield text[begin:end]
        begin = end


def _tokenize(text: bytes, vocabulary: Any) -> TokenArray:
    """Without control tokens, even if their names stand in the text."""
    capacity = len(text) + 16
    out = (llama_cpp.llama_token * capacity)()
    n = llama_cpp.llama_tokenize(vocabulary, text, len(text), out, capacity, False, False)
    if n < 0:
        raise ValueError("llama.cpp could not tokenise a text; this is a bug in its tokenizer.")
    return np.frombuffer(ctypes.string_at(out, 4 * n), dtype=np.int32)
