"""GGUF files, as far as they are looked at before llama.cpp reads them."""

from __future__ import annotations

from pyfly_cpp.files import is_stream


def require_gguf(path: str, what: str = "model") -> None:
    """Raises ValueError unless the file is there and begins as a GGUF file does."""
    if is_stream(path):
        raise ValueError(f"the {what} {path!r} is a device or a pipe; give the path of a .gguf file.")
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except IsADirectoryError:
        raise ValueError(f"the {what} {path!r} is a folder; give the path of the .gguf file in it.") from None
    except OSError as error:
        raise ValueError(f"the {what} {path!r} cannot be read ({error.strerror}); check the path.") from None
    if magic != b"GGUF":
        raise ValueError(f"the {what} {path!r} is not a GGUF file; convert the model to GGUF, or download it again.")
