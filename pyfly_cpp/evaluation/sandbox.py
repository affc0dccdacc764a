"""Runs Python that a model wrote, in a child process that can do little and is always ended.

`run_program(source)` gives a throw-away folder, limits on CPU time, memory, file size, processes and wall time, and no
network. What contains the program, from the outside in (`Outcome.layers` says what was active):

* `namespaces` (Linux, where unprivileged user namespaces are permitted): a network without interfaces; every file
  system read-only but a tmpfs over the work folder; process ids of its own, so nothing survives the program; /proc
  covered.
* `limits`: CPU, memory, file size, open files, processes (setrlimit). The kernel exempts root from the limit on
  processes.
* `landlock` (Linux 5.13 and later): writing is possible in the work folder alone, also where namespaces are forbidden.
* `seccomp` (Linux on x86-64 and arm64): no sockets, no new processes or programs, no tracing, no mounts.
* `audit`: Python's audit hook refuses sockets, subprocesses and writes outside the folder. Native code passes under it.
* The process group is killed at the wall limit, and again when the program has ended.

What it does **not** protect from: a program may *read* every file that the user may read (nothing can be sent out, but
on systems without namespaces and seccomp that is only as good as the audit hook); it may burn one core until the CPU
limit; a hole in the kernel is a way out; a program that searches the interpreter's memory can forge its own verdict,
one that merely exits cannot. On macOS only `limits` (without memory) and `audit` exist. For code from an adversary use
a virtual machine; this is for the accidents of a language model.

Model code runs only where the caller says so: every task that needs it asks for `allow_code_execution`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pyfly_cpp.errors import PyflyError

_GUARD = Path(__file__).with_name("_sandbox_guard.py")
_MAX_REPORT = 1 << 16
_RESULT = 3


class SandboxError(PyflyError):
    """The sandbox itself cannot work here; the message says what is missing."""


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    wall_seconds: float = 10.0
    """Then its process group is killed."""
    cpu_seconds: int = 8
    """Of the process; then the kernel kills it."""
    memory_bytes: int = 1 << 30
    """Address space."""
    file_bytes: int = 8 << 20
    """Largest file; all files together four times that, where namespaces are permitted."""
    processes: int = 64
    """Processes and threads. Not set where seccomp forbids processes and only namespaces would let the kernel count
    those of the program alone; the kernel exempts root from it."""
    namespaces: bool = True
    """Whether to try for namespaces."""
    require_namespaces: bool = False
    """Whether to refuse (SandboxError) where the kernel forbids them."""


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
    """What contained it; empty where it died before it could say."""

    @property
    def passed(self) -> bool:
        """Whether the program ran to its end."""
        return self.status == "passed"


def run_program(source: str, limits: Limits = Limits()) -> Outcome:
    """Runs `source` as a script and waits for its end; nothing of it is left when this returns.

    Raises:
        SandboxError: this system has no process limits (Windows), or namespaces are required and forbidden.
    """
    if os.name != "posix":
        raise SandboxError("running model code needs Linux or macOS; on Windows run the evaluation inside WSL.")
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="pyfly-sandbox-") as folder:
        config = {**asdict(limits), "folder": os.path.realpath(folder), "token": token}
        read_end, write_end = os.pipe()
        command = [sys.executable, "-I", "-S", str(_GUARD), "enter", json.dumps(config)]
        # The guard expects the verdict's pipe at a fixed number; a shell-free way to say so is a tiny first program.
        opener = f"import os,sys; os.dup2({write_end},{_RESULT}); os.execv(sys.argv[1], sys.argv[1:])"
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", opener, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                pass_fds=(write_end,),
                start_new_session=True,
                env={"LANG": "C.UTF-8", "PATH": os.defpath},
            )
        finally:
            os.close(write_end)
        try:
            deadline = started + limits.wall_seconds
            _feed(process, source)
            report = _read_report(read_end, deadline)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()) if report is not None else 0.0)
        finally:
            _kill_group(process)
            os.close(read_end)
        seconds = time.monotonic() - started
    return _judge(report, process.returncode, token, seconds)


@functools.lru_cache(maxsize=1)
def available_layers() -> tuple[str, ...]:
    """What contains programs on this system, found by running an empty one."""
    return run_program("").layers


def _feed(process: subprocess.Popen[bytes], source: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(source.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()


def _read_report(descriptor: int, deadline: float) -> bytes | None:
    """All that is written until the pipe is closed; None at the deadline."""
    report = b""
    while len(report) < _MAX_REPORT:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return None
        part = os.read(descriptor, 4096)
        if not part:
            break
        report += part
    return report


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # the group's number stays taken while any member lives
    process.wait()


def _judge(report: bytes | None, returncode: int, token: str, seconds: float) -> Outcome:
    if report is None:
        return Outcome("timeout", "the wall limit was reached", seconds)
    try:
        verdict = json.loads(report)
    except ValueError:
        verdict = None
    if not isinstance(verdict, dict):
        number = returncode - 128 if returncode > 128 else -returncode
        if number == signal.SIGXCPU or (number == signal.SIGKILL and seconds > 1):
            return Outcome("timeout", "the CPU limit was reached", seconds)
        if number > 0:
            return Outcome("crashed", f"killed by signal {number}", seconds)
        return Outcome("exited", f"the program ended early with status {returncode}", seconds)
    if verdict.get("status") == "refused":
        raise SandboxError(
            f"this system permits no namespaces ({verdict.get('detail')}); allow unprivileged user namespaces, or run "
            "without require_namespaces and read what the sandbox does not protect from."
        )
    status = str(verdict.get("status"))
    if status == "passed" and verdict.get("token") != token:
        status = "exited"
    return Outcome(status, str(verdict.get("detail", "")), seconds, tuple(verdict.get("layers", ())))
