"""Files: writing them whole or not at all, by one process at a time, and recognising those that cannot be read."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_SAMPLE, _SAMPLES = 1 << 16, 256
"""Bytes of each sample of a large file, and their number: files of up to 16 MiB are read whole."""


class OutputError(ValueError):
    """A result cannot be written, or would overwrite another."""


def files_in(folder: str | os.PathLike[str], pattern: str) -> list[Path]:
    """The paths below a folder that match a pattern of `Path.glob`, in order; none of what cannot be read."""
    found = []
    with contextlib.suppress(OSError):
        for path in Path(folder).glob(pattern):
            found.append(path)
    return sorted(found)


def files_of_model(path: str | os.PathLike[str]) -> list[Path]:
    """A GGUF file with the other parts of a split model that are there, in order; empty if there is no file."""
    pattern = re.sub(r"-\d{5}(-of-\d{5}\.gguf)$", r"-[0-9][0-9][0-9][0-9][0-9]\1", glob.escape(Path(path).name))
    return [part for part in files_in(Path(path).parent, pattern) if os.path.isfile(part)]


def sha256(*paths: str | os.PathLike[str], report: Callable[[int], None] | None = None) -> str:
    """The hash of a file's content, or of that of several in turn, in hexadecimal; `report` is called with the bytes
    done."""
    out, done = hashlib.sha256(), 0
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                out.update(block)
                done += len(block)
                if report is not None:
                    report(done)
    return out.hexdigest()


def file_identity(path: str | os.PathLike[str]) -> list[Any]:
    """An identity that no other file has, nor this one after a change; made without reading it."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return [os.path.realpath(path), status.st_size, status.st_mtime_ns]
    return [os.fspath(path)]


def fingerprint(path: str | os.PathLike[str]) -> str:
    """An identity of the content of a model or adapter, wherever it lies: its size and a hash, for large files a hash
    of samples. Raises OSError."""
    size = os.stat(path).st_size
    step = max(_SAMPLE, size // _SAMPLES)
    out = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for begin in (*range(0, size, step), max(0, size - _SAMPLE)):
            file.seek(begin)
            out.update(file.read(_SAMPLE))
    return out.hexdigest()


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether this is a device or a pipe: reading it may wait or continue for ever."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def file_text(path: str | os.PathLike[str], most: int | None = None) -> str:
    """The text of a file, without the mark that some programs put before UTF-8.

    Args:
        most: Bytes that it may have.

    Raises:
        ValueError: it cannot be read, has more, or is not UTF-8.
    """
    try:
        if is_stream(path):
            raise ValueError(f"{os.fspath(path)!r} is a device or a pipe; give the path of a file.")
        if most is not None and Path(path).stat().st_size > most:
            raise ValueError(f"{os.fspath(path)!r} is far longer than the context; use part of it.")
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{os.fspath(path)!r} cannot be read ({error.strerror}); check the path.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)!r} is not UTF-8 at byte {error.start}; save the file as UTF-8.") from None


def write_atomically(path: str | os.PathLike[str], content: str | bytes | Sequence[Any]) -> None:
    """Writes a whole file or nothing: a reader, or a crash, sees the old content or the new. A large content may come
    in parts: bytes, or what else has a buffer.

    The file keeps the permissions that it had; a link is replaced, not followed. The folder must exist. Text is written
    as UTF-8, what UTF-8 cannot hold (names of files that are not UTF-8) as JSON's \\udcff.

    Raises:
        OutputError: the folder cannot be written to, or something that is no file has this name.
    """
    target = Path(path)
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")
    parts: Sequence[Any] = [content] if isinstance(content, bytes) else content
    temporary = ""
    try:
        there = _status(target)
        mode = 0o666 if there is None else stat.S_IMODE(there.st_mode)
        # A name of its own: whatever lies beside the file belongs to somebody else.
        name = str(target.parent / f".pyfly-{secrets.token_hex(8)}")
        with open(name, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
            temporary = name
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        if there is not None:
            os.chmod(temporary, mode)  # also what the umask takes away from new files
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if not isinstance(error, OSError):
            raise
        raise OutputError(f"{target} cannot be written ({error.strerror}); choose another place.") from None


def _status(target: Path) -> os.stat_result | None:
    """The status of a file that is there; raises OutputError for a device, a folder, or a name that cannot be."""
    try:
        found = os.stat(target)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise OutputError(f"{target} cannot be written ({error.strerror}); choose another place.") from None
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "a device"
        raise OutputError(f"{target} is {what}; give the name of a file.")
    return found


def require_other(output: str | os.PathLike[str], *models: str | os.PathLike[str]) -> None:
    """Raises ValueError if a file of these models has this name."""
    parts = [part for model in models for part in files_of_model(model)]
    if os.path.exists(output) and any(os.path.samefile(output, part) for part in parts):
        raise ValueError(f"{os.fspath(output)} is a model that is read for this; choose another --output.")


def require_free(path: str | os.PathLike[str], force: bool) -> None:
    """Checks, before any work, that `path` can be written and overwrites nothing unless `force`.

    Raises:
        OutputError: it exists and `force` is off, is a folder or a device, or its folder cannot be written to.
    """
    target = Path(path)
    if _status(target) is not None and not force:
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


def require_space(folder: str | os.PathLike[str], n_bytes: int, remedy: str) -> None:
    """Raises OutputError unless so many bytes are free; `remedy` ends the sentence."""
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise OutputError(
            f"{os.fspath(folder)} has {free / 1e9:.1f} GB free and {n_bytes / 1e9:.1f} GB are needed; {remedy}."
        )


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file for writers that take its name: yields another name, whose file becomes `path` at the end. If the block
    raises, it goes away, and `path` is as it was. Raises OutputError if another process is writing it."""
    unfinished = path.with_name(path.name + ".partial")
    with only_writer(f"{unfinished}.lock"):
        try:
            yield unfinished
            unfinished.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise


@contextlib.contextmanager
def resumable(path: Path, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Around the writing of a file by a run that resumes: a full disk is an OutputError.

    Args:
        errors: Those of the writer for that.
    """
    try:
        yield
    except errors as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"{path} cannot be written ({why}); make room and run the same command to resume.") from None


@contextlib.contextmanager
def only_writer(path: str | os.PathLike[str], wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds a lock file, which goes away at the end. The system frees the lock of a process that was killed.

    Args:
        wait: Called again and again while another process holds it. None: raise OutputError.

    Without effect on a file system that has no locks.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            is_free = _lock(descriptor)
            if is_free and _is_open_as(descriptor, path):  # or else whoever held it has removed it meanwhile
                break
            if not is_free and wait is None:
                folder = os.path.dirname(os.path.abspath(path))
                raise OutputError(f"another process is writing to {folder}; wait for it, or choose another folder.")
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if not is_free and wait is not None:
            wait()
            time.sleep(0.1)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows removes no file that is open
            os.unlink(path)
        os.close(descriptor)


def _is_open_as(descriptor: int, path: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _lock(descriptor: int) -> bool:
    """Whether nobody else holds the lock; then this descriptor holds it until it is closed."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
    return True


_LFS_POINTER = b"version https://git-lfs"


def require_gguf(path: str, what: str = "model") -> None:
    """Raises ValueError unless the file is there and begins as a GGUF file does."""
    begin = first_bytes(path, what, ".gguf file", len(_LFS_POINTER))
    if begin == _LFS_POINTER:
        raise ValueError(f"the {what} {path!r} is only a pointer of Git LFS; run `git lfs pull` in its repository.")
    if not begin.startswith(b"GGUF"):
        raise ValueError(f"the {what} {path!r} is not a GGUF file; convert it to GGUF, or download it again.")


def first_bytes(path: str, what: str, kind: str, n: int) -> bytes:
    """The first n bytes of a file, or all if it has fewer; raises ValueError unless it is one that can be read.

    Args:
        what: The file's role, for the message: "draft model".
        kind: The kind of file that is wanted, for the message.
    """
    if is_stream(path):
        raise ValueError(f"the {what} {path!r} is a device or a pipe; give the path of a {kind}.")
    try:
        with open(path, "rb") as file:
            return file.read(n)
    except IsADirectoryError:
        raise ValueError(f"the {what} {path!r} is a folder; give the path of the {kind} in it.") from None
    except OSError as error:
        raise ValueError(f"the {what} {path!r} cannot be read ({error.strerror}); check the path.") from None
