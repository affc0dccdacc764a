"""Runs Python that a model wrote, in a child process under limits that is always ended.

`run_program(source)` gives an empty folder, and limits on CPU time, memory, file size and wall time. Bubblewrap
(`bwrap`, Linux) contains the program: it sees the interpreter, its libraries, `/usr` and a small tmpfs, but no other
file, no network and no other process. Without bubblewrap nothing is run unless the caller asks for `"none"`: limits
alone, under which a program can read and change the user's files, reach the network and forge its verdict.

A program has passed if a secret was written after its last statement, so one that merely exits or prints has not. Code
that searches its own interpreter for the secret can forge a pass, and nothing can prevent that a function which is
tested in its own interpreter returns an object that equals everything.

For code from an adversary use a virtual machine: a hole in the kernel is a way out.

Model code runs only if the caller permits it: every task that needs it asks for `allow_code_execution`.
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
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

from pyfly_cpp.errors import PyflyError
from pyfly_cpp.measure.tasks._limited import SECRET_BYTES

Containment = Literal["bubblewrap", "none"]
"""The container of a program."""

NOT_CONTAINED = (
    "Nothing contains the model's code: it can read and change your files and reach the network. Use this only in a "
    "container or a virtual machine that you can throw away."
)
"""The meaning of `"none"`, for people."""

_PROGRAM = Path(__file__).with_name("_limited.py")
_MAX_REPORT = 1 << 12
_INSIDE = "/tmp"
"""The work folder under bubblewrap."""


class SandboxError(PyflyError):
    """Nothing can contain a program here; the message names what is missing."""


@dataclass(frozen=True)
class Limits:
    """The limits of a program."""

    wall_seconds: float = 10.0
    """Then it is killed."""
    cpu_seconds: int = 8
    """CPU time of the process; then the kernel kills it."""
    memory_bytes: int = 1 << 30
    """Address space; not on macOS."""
    file_bytes: int = 8 << 20
    """Largest file; all files together four times that, under bubblewrap."""
    processes: int = 64
    """And threads, under bubblewrap; the kernel exempts root from it."""


@dataclass(frozen=True)
class Outcome:
    """The fate of a program."""

    status: str
    """`"passed"`: ran to its end; `"failed"`: raised, the tests' AssertionError included; `"timeout"`: wall or CPU
    limit; `"memory"`: out of memory; `"exited"`: ended early without an exception; `"crashed"`: killed by a signal."""
    detail: str
    """The exception, or the signal."""
    seconds: float
    """Wall time."""

    @property
    def passed(self) -> bool:
        """Whether the program ran to its end."""
        return self.status == "passed"


@functools.cache
def require_containment(containment: Containment = "bubblewrap") -> None:
    """Runs an empty program.

    Raises:
        SandboxError: bubblewrap is not installed or does not work here, or this is Windows.
    """
    if os.name != "posix":
        raise SandboxError("running model code needs Linux or macOS; on Windows run the evaluation inside WSL.")
    try:
        outcome = run_program("", containment=containment)
    except SandboxError as error:
        why = str(error)
    else:
        if outcome.passed:
            return
        why = f"an empty program ends with: {outcome.detail or outcome.status}"
    raise SandboxError(
        f"the model's code cannot be contained here ({why}); install bubblewrap 0.7 or later and permit user "
        "namespaces, or run it uncontained with --containment none, in a machine that you can throw away."
    )


def run_program(source: str, limits: Limits = Limits(), containment: Containment = "bubblewrap") -> Outcome:
    """Runs `source` as a script and waits for its end; under bubblewrap, nothing of it is left when this returns.

    Raises:
        SandboxError: the program could not be started.
    """
    secret = secrets.token_hex(SECRET_BYTES // 2).encode()
    given = secret + source.encode("utf-8", "surrogatepass")
    try:
        with _work_folder() as folder, tempfile.TemporaryFile() as verdict:
            command = _command(containment, folder, limits)
            started = time.monotonic()
            said, returncode = _run_command(command, given, verdict, limits.wall_seconds)
            seconds = time.monotonic() - started
            report = os.pread(verdict.fileno(), _MAX_REPORT, 0)
    except OSError as error:
        raise SandboxError(f"the program could not be started ({error})") from None
    if said:  # the program itself has no standard error
        raise SandboxError(" ".join(said.decode("utf-8", "replace").split())[-200:])
    return Outcome(*_judge(report, secret, returncode, seconds >= limits.cpu_seconds), seconds)


def _run_command(command: list[str], given: bytes, verdict: IO[bytes], seconds: float) -> tuple[bytes, int | None]:
    """Its standard error and its status; None if it had to be killed after so many seconds."""
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


def _command(containment: Containment, folder: str, limits: Limits) -> list[str]:
    # Not the link of a virtual environment: the standard library is all that a program gets.
    python = [os.path.realpath(sys.executable), "-I", "-S"]
    if containment == "none":  # the kernel would count all processes of the user, a whole desktop
        return [*python, str(_PROGRAM), json.dumps({**asdict(limits), "processes": 0}), folder]
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError("bwrap is not installed")
    command = [bwrap, "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    command += ["--die-with-parent", "--new-session", "--size", str(4 * limits.file_bytes), "--tmpfs", _INSIDE]
    command += ["--dev-bind", os.devnull, os.devnull]  # --dev would come with a tmpfs of any size
    visible = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/nix/store", "/gnu/store"]
    # Not the prefix, which may be a home folder.
    library = [sysconfig.get_path(name, vars={"platbase": sys.base_exec_prefix}) for name in ("stdlib", "platstdlib")]
    for path in (*visible, python[0], *library, os.path.join(sys.base_exec_prefix, "lib")):
        command += ["--ro-bind-try", path, path]
    command += ["--ro-bind", str(_PROGRAM), "/limited.py", "--remount-ro", "/", "--chdir", _INSIDE, "--"]
    return [*command, *python, "/limited.py", json.dumps(asdict(limits)), _INSIDE]


@contextlib.contextmanager
def _work_folder() -> Iterator[str]:
    """An empty folder. Nothing comes to be in it but from a program that is not contained."""
    folder = os.path.realpath(tempfile.mkdtemp(prefix="pyfly-program-"))
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
    """Status and detail. Nobody else knows the secret; anything else that the program may have written is no pass,
    whatever it contains."""
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
