"""Runs Python that a model wrote, in a child process that can do little and is always ended.

`run_program(source)` gives an empty folder, limits on CPU time, memory, file size, threads and wall time, and no
network. Two things can contain a program (`Containment`), and without one of them nothing is run unless the caller asks
for it:

* `"bubblewrap"`: `bwrap`, where it is installed and works. The program sees the interpreter, the system's libraries
  and a small tmpfs, and no other file.
* `"namespaces"`: our own use of Linux's user namespaces. All files can be read, but written to only in a small tmpfs.

In both, the program has no network, process ids of its own, and seccomp leaves it the system calls that Python needs:
no sockets, no processes or programs, no signals to others, no shared memory, no changes of limits. Limits (setrlimit)
bound CPU time, address space, file size, open files and threads; the kernel exempts root from the last. An audit hook
in Python refuses sockets, subprocesses and writes elsewhere with a PermissionError that says so.

`"none"` has limits, the audit hook and, on Linux, seccomp: a program can read all files, and one that evades Python's
checks can change them, fill the disk and forge its verdict; without seccomp it can reach the network and other
processes, too.

A program has passed if the guard wrote a secret after the program's last statement. While the program runs, the secret
is in no variable, argument, file or descriptor of its process; only native code, which the audit hook refuses, could
search the memory for it. No sandbox can prevent that a function which is tested in its own interpreter returns an
object that equals everything.

For code from an adversary use a virtual machine: a hole in the kernel is a way out.

Model code runs only where the caller says so: every task that needs it asks for `allow_code_execution`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

from pyfly_cpp.errors import PyflyError

Containment = Literal["auto", "bubblewrap", "namespaces", "none"]
"""What contains a program; `"auto"` is bubblewrap, else namespaces, never none."""

_GUARD = Path(__file__).with_name("_sandbox_guard.py")
_SECRET_BYTES, _READY, _MAX_REPORT = 32, "pyfly-sandbox-ready", 1 << 12
_INSIDE = "/tmp"
"""The work folder under bubblewrap."""


class SandboxError(PyflyError):
    """The sandbox itself cannot work here; the message says what is missing."""


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    wall_seconds: float = 10.0
    """Then it is killed."""
    cpu_seconds: int = 8
    """Of the process; then the kernel kills it."""
    memory_bytes: int = 1 << 30
    """Address space."""
    file_bytes: int = 8 << 20
    """Largest file; all files together four times that, where the program is contained."""
    processes: int = 64
    """Threads, where the program is contained; the kernel exempts root from it."""


@dataclass(frozen=True)
class Outcome:
    """What became of a program."""

    status: str
    """`"passed"`: ran to its end; `"failed"`: raised, the tests' AssertionError included; `"timeout"`: wall or CPU
    limit; `"memory"`: out of memory; `"exited"`: ended early without an exception; `"crashed"`: killed by a signal."""
    detail: str
    """The exception, or the signal."""
    seconds: float
    """Wall time."""
    layers: tuple[str, ...] = ()
    """What contained it, from the outside in; empty where the time was up before it began."""

    @property
    def passed(self) -> bool:
        """Whether the program ran to its end."""
        return self.status == "passed"


def run_program(
    source: str, limits: Limits = Limits(), containment: Containment = "auto", audit_hook: bool = True
) -> Outcome:
    """Runs `source` as a script and waits for its end; nothing of it is left when this returns.

    Args:
        audit_hook: Whether Python refuses what is forbidden; without, only what is beneath does.

    Raises:
        SandboxError: what shall contain the program does not work here.
    """
    way = find_containment(containment)[0]
    return _run(way, source, limits, audit_hook)


@functools.cache
def find_containment(wanted: Containment = "auto") -> tuple[str, ...]:
    """What contains programs here, from the outside in, found by running an empty one; the first is the way wanted.

    Raises:
        SandboxError: it does not work here; nothing does, for `"auto"`; or this is Windows.
    """
    if os.name != "posix":
        raise SandboxError("running model code needs Linux or macOS; on Windows run the evaluation inside WSL.")
    reasons = []
    for way in ("bubblewrap", "namespaces") if wanted == "auto" else (wanted,):
        try:
            outcome = _run(way, "", Limits(), True)
        except SandboxError as error:
            reasons.append(f"{way}: {error}")
        else:
            if outcome.passed:
                return outcome.layers
            reasons.append(f"{way}: {outcome.detail or outcome.status} with an empty program")
    raise SandboxError(
        f"the model's code cannot be contained here ({'; '.join(reasons)}); install bubblewrap 0.7 or later, permit "
        "user namespaces, or run it uncontained with --containment none, in a machine that you can throw away."
    )


def uncontained_warning(layers: tuple[str, ...]) -> str:
    """What is not contained, for people; empty if all is."""
    if layers[0] != "none":
        return ""
    more = "" if "seccomp" in layers else " and reach the network and other processes"
    return (
        "Nothing contains the model's code here: it can read your files, and code that evades Python's checks can "
        f"change them{more}. Use this only in a container or a virtual machine that you can throw away."
    )


def _run(way: str, source: str, limits: Limits, audit_hook: bool) -> Outcome:
    """Raises SandboxError where the program could not be started."""
    secret = secrets.token_hex(_SECRET_BYTES // 2).encode()
    given = secret + source.encode("utf-8", "surrogatepass")
    try:
        with _work_folder() as folder, tempfile.TemporaryFile() as verdict:
            command = _command(way, folder, limits, audit_hook)
            started = time.monotonic()
            notes, returncode = _run_command(command, given, verdict, limits.wall_seconds)
            seconds = time.monotonic() - started
            report = os.pread(verdict.fileno(), _MAX_REPORT, 0)
    except OSError as error:
        raise SandboxError(f"the sandbox cannot be set up ({error})") from None
    # The notes end before the program begins, so they are the guard's own.
    _, is_ready, sealed_by = notes.decode("utf-8", "replace").rpartition(_READY)
    if not is_ready and returncode is not None:
        raise SandboxError(" ".join(sealed_by.split())[-200:] or f"the guard ended with status {returncode}")
    layers = (way, *sealed_by.strip().split(",")) if is_ready else ()
    return Outcome(*_judge(report, secret, returncode, seconds >= limits.cpu_seconds), seconds, layers)


def _run_command(command: list[str], given: bytes, verdict: IO[bytes], seconds: float) -> tuple[bytes, int | None]:
    """What it wrote to standard error, and its status; None if it had to be killed after so many seconds."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=verdict,
        stderr=subprocess.PIPE,
        cwd="/",
        start_new_session=True,
        env={"LANG": "C.UTF-8", "PATH": os.defpath},
    )
    try:
        return process.communicate(given, seconds)[1], process.returncode
    except subprocess.TimeoutExpired:
        _kill_group(process)
        return process.communicate()[1], None
    finally:
        if process.returncode is None:  # interrupted
            _kill_group(process)
            process.wait()


def _command(way: str, folder: str, limits: Limits, audit_hook: bool) -> list[str]:
    # Not the link of a virtual environment: the standard library is all that a program gets.
    python = [os.path.realpath(sys.executable), "-I", "-S"]
    config = {**asdict(limits), "folder": folder, "contained": way != "none", "audit_hook": audit_hook}
    config.update(secret_bytes=_SECRET_BYTES, ready=_READY)
    if way != "bubblewrap":
        stage = "enter" if way == "namespaces" else "run"
        return [*python, str(_GUARD), stage, json.dumps({**config, "parent": os.getpid()})]
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("bwrap is not installed")
    visible = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/nix/store", "/gnu/store"]
    command = [program, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--die-with-parent"]
    command += ["--size", str(4 * limits.file_bytes), "--tmpfs", _INSIDE, "--dev-bind", os.devnull, os.devnull]
    for path in (*visible, sys.base_prefix, sys.base_exec_prefix, os.path.dirname(python[0])):
        command += ["--ro-bind-try", path, path]
    command += ["--ro-bind", str(_GUARD), "/guard.py", "--remount-ro", "/", "--chdir", _INSIDE]
    return [*command, *python, "/guard.py", "run", json.dumps({**config, "folder": _INSIDE})]


@contextlib.contextmanager
def _work_folder() -> Iterator[str]:
    """An empty folder. Nothing comes to be in it but from a program that is not contained."""
    folder = os.path.realpath(tempfile.mkdtemp(prefix="pyfly-sandbox-"))
    try:
        yield folder
    finally:
        try:
            os.rmdir(folder)
        except OSError:  # folders without permissions, or nested deeper than Python's own removal can follow
            for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
                with contextlib.suppress(OSError):
                    subprocess.run([*command, folder], stderr=subprocess.DEVNULL, check=False)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # not waited for yet, so its number is still its own


def _judge(report: bytes, secret: bytes, returncode: int | None, had_its_time: bool) -> tuple[str, str]:
    """Status and detail. Only the guard knows the secret; anything else that the program may have written is no pass,
    whatever it says."""
    if returncode is None:
        return "timeout", "the wall limit was reached"
    if report == secret:
        return "passed", ""
    number = returncode - 128 if returncode > 128 else -returncode
    if number == signal.SIGXCPU or (number == signal.SIGKILL and had_its_time):
        return "timeout", "the CPU limit was reached"
    if number > 0:
        return "crashed", f"killed by signal {number}"
    status, _, detail = report.decode("utf-8", "replace").partition("\n")
    if status in ("failed", "memory"):
        return status, detail[:400]
    if report:
        return "failed", "something other than a verdict was written in its place"
    return "exited", f"the program ended early with status {returncode}"
