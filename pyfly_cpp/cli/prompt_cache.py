"""A file that keeps what a model has read, so that a later command with the same beginning need not read it again.

One line of JSON (what the state belongs to, its tokens, its digest), then llama.cpp's state as it is in memory, and
behind it what was kept of a recurrent memory (llama/states.py).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pyfly_cpp.cli.terminal import note
from pyfly_cpp.llama.fly_llama import FlyLlama
from pyfly_cpp.llama.states import made_state
from pyfly_cpp.machine.files import is_stream, write_atomically

_FORMAT = "pyfly-cpp prompt cache"
_MAX_HEADER = 64 << 20


def load(path: Path, llm: FlyLlama) -> None:
    """Brings back what the file keeps, if it is of this model and these settings; else a note reports that it is not.

    Raises:
        ValueError: the file is something else, or cannot be read; nothing was changed.
    """
    if not path.exists():
        return
    header, content = _read(path)
    if header.get("of") != _identity(llm):
        note(f"({path} was saved with another model, release or other settings, and will be overwritten)")
        return
    n_bytes = len(content) - sum(size for _, size in header["kept"])
    state, kept = content[:n_bytes], []
    for n, size in header["kept"]:
        kept.append((n, content[n_bytes : n_bytes + size]))
        n_bytes += size
    llm.load_state(made_state(llm, header["tokens"], state, kept))


def save(path: Path, llm: FlyLlama) -> None:
    """Keeps all that the model has read and written; raises ValueError as `load` does, OutputError."""
    if path.exists():
        _read(path)
    state = llm.save_state()
    content = b"".join([state.llama_state, *(part for _, part in state.kept)])
    header = {
        "format": _FORMAT,
        "of": _identity(llm),
        "tokens": state.input_ids[: state.n_tokens].tolist(),
        "kept": [[n, len(part)] for n, part in state.kept],
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    write_atomically(path, json.dumps(header).encode() + b"\n" + content)


def _identity(llm: FlyLlama) -> dict[str, Any]:
    """The conditions of the state."""
    return {**llm.kv_key, "n_ctx": llm.n_ctx()}


def _is_kept(entry: Any, n_tokens: int) -> bool:
    """Whether this is [tokens, bytes] of a kept state."""
    is_pair = isinstance(entry, list) and len(entry) == 2 and all(type(n) is int for n in entry)
    return is_pair and 1 <= entry[0] <= n_tokens and entry[1] >= 1


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    header: Any = None
    try:
        if not is_stream(path):
            with open(path, "rb") as file:
                line = file.readline(_MAX_HEADER)
                header = json.loads(line) if line.startswith(b"{") else None
                content = file.read() if isinstance(header, dict) and header.get("format") == _FORMAT else b""
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read ({error.strerror}); check the path.") from None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ValueError(f"{str(path)!r} is not a prompt cache of pyfly-cpp; choose another name.")
    tokens, kept = header.get("tokens"), header.setdefault("kept", [])
    fits = (
        isinstance(tokens, list)
        and all(isinstance(token, int) and 0 <= token < 2**31 for token in tokens)
        and isinstance(kept, list)
        and all(_is_kept(one, len(tokens)) for one in kept)
        and sum(size for _, size in kept) <= len(content)
    )
    if not fits or header.get("sha256") != hashlib.sha256(content).hexdigest():
        raise ValueError(f"the prompt cache {str(path)!r} is damaged; delete it.")
    return header, content
