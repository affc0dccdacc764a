"""Writing files without losing one: whole or not at all, by one process at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


class OutputError(ValueError):
    """A result cannot be written, or would overwrite another."""


def sha256(path: str | os.PathLike[str]) -> str:
    """Of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a whole file or nothing: a reader, or a crash, sees the old content or the new.

    The file keeps the permissions that it had; a link is replaced, not followed. The folder must exist.

    Raises:
        OutputError: the folder cannot be written to, or something that is no file has this name.
    """
    target = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = ""
    try:
        mode = _mode(target)
        # A name of its own: whatever lies beside the file belongs to somebody else.
        descriptor, temporary = tempfile.mkstemp(prefix=".pyfly-", dir=target.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)  # mkstemp's file is the owner's alone
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if not isinstance(error, OSError):
            raise
        raise OutputError(f"{target} cannot be written ({error.strerror}); choose another place.") from None


def _mode(target: Path) -> int:
    """The permissions of a file that is there, or those of a new one; raises OutputError for a device or a folder."""
    if target.exists():
        _require_regular(target)
        return stat.S_IMODE(target.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def _require_regular(target: Path) -> None:
    if target.exists() and not target.is_file():
        what = "a folder" if target.is_dir() else "a device"
        raise OutputError(f"{target} is {what}; give the name of a file.")


def require_free(path: str | os.PathLike[str], force: bool) -> None:
    """Before any work: that `path` can be written, and overwrites nothing unless `force`.

    Raises:
        OutputError: it exists and `force` is off, is a folder or a device, or its folder cannot be written to.
    """
    target = Path(path)
    _require_regular(target)
    if target.exists() and not force:
        raise OutputError(f"{target} exists already; choose another name, or overwrite it with --force.")
    require_writable(target.parent)


def require_writable(folder: str | os.PathLike[str]) -> None:
    """Makes a folder if need be and checks, by writing, that files can be made in it; raises OutputError."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"{folder} cannot be written to ({error.strerror}); choose another place.") from None


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Holds a lock file; raises OutputError if another process holds it. Without effect where flock does not exist."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path, "w", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputError(
                f"another process is writing to {path.parent}; wait for it, or choose another folder."
            ) from None
        yield
