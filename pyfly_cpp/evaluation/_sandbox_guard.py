"""What runs inside the sandbox: `python -I -S _sandbox_guard.py STAGE CONFIG`, started by sandbox.py and by nobody
else.

A file of its own that imports only the standard library, so that the process that runs a model's code never had numpy,
llama.cpp or the caller's objects in it.

Stage `enter` gets new namespaces where the kernel permits (user, network, mount, pid, ipc), makes every file system
read-only, and puts an empty tmpfs over the work folder and over /proc. Stage `run` (a fresh exec: it drops the
capabilities that came with the user namespace) sets limits, seals itself with Landlock, seccomp and an audit hook, and
runs the program. The verdict goes to file descriptor RESULT as JSON, with a token that a program that merely exits does
not know.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys
import traceback

RESULT = 3
"""File descriptor of the verdict."""

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 1, 2, 4, 1 << 14, 1 << 18
AT_RECURSIVE, MOUNT_ATTR_RDONLY, SYS_MOUNT_SETATTR = 0x8000, 1, 442
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# ---- Namespaces ------------------------------------------------------------------------------------------------------


def enter_namespaces(folder: str, tmpfs_bytes: int) -> None:
    """Leaves the caller's network, processes and writable file systems. Raises OSError where the kernel forbids it.

    After it, the next fork is process 1 of a new pid namespace; when that one dies, the kernel kills all the others.
    """
    libc = _libc()
    uid, gid = os.geteuid(), os.getegid()
    _checked(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC), "unshare")
    # Inside, the caller is no root, whoever it is outside: the exec after the fork then drops all capabilities.
    for name, line in (("setgroups", "deny"), ("uid_map", f"65534 {uid} 1"), ("gid_map", f"65534 {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(line)
    _checked(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mount private")
    _make_everything_readonly(libc)
    options = f"size={tmpfs_bytes},mode=0700".encode()
    _checked(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options), "mount work folder")
    _checked(libc.mount(b"tmpfs", b"/proc", b"tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, None), "cover /proc")


def _make_everything_readonly(libc: ctypes.CDLL) -> None:
    attributes = struct.pack("=QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)  # struct mount_attr: set, clear, propagation, userns
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    result = libc.syscall(
        ctypes.c_long(SYS_MOUNT_SETATTR), ctypes.c_int(-100), b"/", ctypes.c_uint(AT_RECURSIVE), buffer,
        ctypes.c_size_t(len(attributes)),
    )  # fmt: skip
    _checked(result, "mount_setattr")


# ---- Landlock --------------------------------------------------------------------------------------------------------

SYS_LANDLOCK_CREATE_RULESET, SYS_LANDLOCK_ADD_RULE, SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446


def forbid_writing_elsewhere(folder: str) -> None:
    """Leaves this process nothing to write to but `folder` and /dev/null (Linux 5.13; needs no privilege and no
    namespace, so it also holds where those are forbidden). Raises OSError if the kernel has no Landlock."""
    libc = _libc()

    def call(number: int, *arguments: object) -> int:
        result = int(libc.syscall(ctypes.c_long(number), *arguments))
        _checked(min(result, 0), "landlock")
        return result

    zero = ctypes.c_uint(0)
    version = call(SYS_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    write_file = 1 << 1
    access = write_file | sum(1 << bit for bit in range(4, 13))  # remove and make files, folders, links, ...
    access |= (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)  # link across folders, truncate
    attribute = ctypes.create_string_buffer(struct.pack("=Q", access), 8)
    ruleset = call(SYS_LANDLOCK_CREATE_RULESET, attribute, ctypes.c_size_t(8), zero)
    try:
        for path, allowed in ((folder, access), (os.devnull, write_file)):
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, parent), 12)
                call(SYS_LANDLOCK_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(1), rule, zero)
            finally:
                os.close(parent)
        call(SYS_LANDLOCK_RESTRICT_SELF, ctypes.c_int(ruleset), zero)
    finally:
        os.close(ruleset)


# ---- seccomp ---------------------------------------------------------------------------------------------------------

# System calls that no solution of a programming exercise needs: sockets, new processes and programs, tracing, signals
# to others, leaving the process group or the parent that ends it, mounts and namespaces, kernel interfaces with a
# history of holes.
_FORBIDDEN = {
    "x86_64": (
        0xC000003E,
        [41, 42, 43, 49, 50, 53, 57, 58, 59, 62, 101, 109, 112, 129, 155, 157, 161, 165, 166, 169, 175, 200, 234, 246,
         248, 249, 250, 272, 288, 297, 298, 304, 308, 310, 311, 313, 321, 322, 323, 424, 425, 426, 427, 428, 429, 430,
         431, 432, 434, 438, 442],
        56,
    ),
    "aarch64": (
        0xC00000B7,
        [198, 199, 200, 201, 202, 203, 221, 117, 129, 130, 131, 138, 154, 157, 167, 39, 40, 41, 51, 97, 104, 105, 106,
         142, 217, 218, 219, 240, 241, 242, 265, 268, 270, 271, 273, 280, 281, 282, 424, 425, 426, 427, 428, 429, 430,
         431, 432, 434, 438, 442],
        220,
    ),
}  # fmt: skip
SYS_CLONE3, CLONE_THREAD = 435, 0x10000
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
EPERM, ENOSYS = 1, 38


def forbid_system_calls() -> None:
    """Seals this process and all its threads: no sockets, no new processes or programs. Raises OSError if it cannot."""
    entry = _FORBIDDEN.get(platform.machine())
    if entry is None or not sys.platform.startswith("linux"):
        raise OSError(ENOSYS, f"no system call list for {sys.platform} on {platform.machine()}")
    arch, forbidden, sys_clone = entry

    def statement(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, jump_true, jump_false, k)

    load, equal, at_least, test, give = 0x20, 0x15, 0x35, 0x45, 0x06
    program = [statement(load, 4), statement(equal, arch, 1, 0), statement(give, KILL), statement(load, 0)]
    program += [statement(at_least, 0x40000000, 0, 1), statement(give, ERRNO | EPERM)]  # the x32 numbers
    program += [statement(equal, SYS_CLONE3, 0, 1), statement(give, ERRNO | ENOSYS)]  # libc falls back to clone
    # clone: a thread may be made, a process not.
    program += [statement(equal, sys_clone, 0, 4), statement(load, 16), statement(test, CLONE_THREAD, 1, 0)]
    program += [statement(give, ERRNO | EPERM), statement(give, ALLOW)]
    for number in forbidden:
        program += [statement(equal, number, 0, 1), statement(give, ERRNO | EPERM)]
    program.append(statement(give, ALLOW))
    code = b"".join(program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(buffer)))
    _checked(_libc().prctl(PR_SET_SECCOMP, 2, ctypes.c_void_p(ctypes.addressof(header)), 0, 0), "seccomp")


# ---- Python's own second line ----------------------------------------------------------------------------------------

_FORBIDDEN_EVENTS = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "pty.",
    "ctypes.dlopen", "os.startfile", "ftplib.", "smtplib.", "urllib.", "http.", "signal.pthread_kill", "syslog.",
)  # fmt: skip
_PATH_EVENTS = {
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate",
    "os.utime", "os.setxattr", "os.removexattr", "os.mkfifo", "os.mknod", "shutil.rmtree", "shutil.move",
    "shutil.copyfile",
}  # fmt: skip


def install_audit_hook(folder: str) -> None:
    """Refuses, with PermissionError, what Python code does through the standard library to reach outside `folder`."""
    inside = os.path.realpath(folder) + os.sep
    realpath, fspath, join = os.path.realpath, os.fspath, os.path.join
    write_flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def is_outside(path: object) -> bool:
        if isinstance(path, int) or path is None:
            return False
        text = fspath(path)  # type: ignore[call-overload]
        text = os.fsdecode(text)
        return not (realpath(join(folder, text)) + os.sep).startswith(inside)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments[0], arguments[1], arguments[2]
            writes = isinstance(flags, int) and flags & write_flags
            writes = writes or (isinstance(mode, str) and any(letter in mode for letter in "wax+"))
            if writes and path != os.devnull and is_outside(path):
                raise PermissionError(f"the sandbox forbids writing {path!r}")
        elif event in _PATH_EVENTS:
            if any(is_outside(a) for a in arguments[:2] if isinstance(a, (str, bytes, os.PathLike))):
                raise PermissionError(f"the sandbox forbids {event} outside the work folder")
        elif event.startswith(_FORBIDDEN_EVENTS) and not (event == "ctypes.dlopen" and arguments[0] is None):
            raise PermissionError(f"the sandbox forbids {event}")

    sys.addaudithook(hook)


# ---- Stages ----------------------------------------------------------------------------------------------------------


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def stage_enter(config: dict[str, object]) -> None:
    """Namespaces, then stage `run` in a child; ends with the child's status."""
    layers: list[str] = []
    failure = ""
    folder = str(config["folder"])
    if not (config["namespaces"] and sys.platform.startswith("linux")):
        failure = "they are not tried for"
    else:
        try:
            enter_namespaces(folder, int(str(config["file_bytes"])) * 4)
            layers.append("namespaces")
        except OSError as error:
            failure = str(error)
    if failure and config["require_namespaces"]:
        os.write(RESULT, json.dumps({"status": "refused", "detail": failure}).encode())
        os._exit(1)
    config["layers"] = layers
    os.set_inheritable(RESULT, True)
    child = os.fork()
    if child == 0:
        try:
            if sys.platform.startswith("linux"):
                libc = _libc()
                libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
                libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            os.chdir(folder)
            os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, "run", json.dumps(config)])
        finally:
            os._exit(70)
    os.close(RESULT)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        os._exit(128 + os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def stage_run(config: dict[str, object]) -> None:
    """Limits, seals, and the program; its source comes on standard input."""
    folder, token = str(config["folder"]), str(config["token"])
    layers = list(config["layers"])  # type: ignore[call-overload]
    source = sys.stdin.buffer.read().decode("utf-8")
    _limit(resource.RLIMIT_CPU, int(str(config["cpu_seconds"])))
    _limit(resource.RLIMIT_FSIZE, int(str(config["file_bytes"])))
    _limit(resource.RLIMIT_NOFILE, 64)
    _limit(resource.RLIMIT_CORE, 0)
    if sys.platform.startswith("linux"):  # macOS does not honour it
        _limit(resource.RLIMIT_AS, int(str(config["memory_bytes"])))
    layers.append("limits")
    os.environ.clear()
    os.environ.update({"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, "LANG": "C.UTF-8"})
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for the program's lifetime
    if sys.platform.startswith("linux"):
        try:
            forbid_writing_elsewhere(folder)
            layers.append("landlock")
        except OSError:
            pass
    try:
        forbid_system_calls()
        layers.append("seccomp")
    except OSError:
        pass
    # Without namespaces the kernel counts all processes of the user, a whole desktop: the limit would forbid threads
    # too. It is needed only where seccomp does not forbid processes.
    if "namespaces" in layers or "seccomp" not in layers:
        _limit(resource.RLIMIT_NPROC, int(str(config["processes"])))
    layers.append("audit")
    os.set_inheritable(RESULT, False)
    install_audit_hook(folder)
    try:
        code = compile(source, "<program>", "exec")
        exec(code, {"__builtins__": __builtins__})  # as `code_eval`: no `__main__`, so its blocks do not run
        report = {"status": "passed", "detail": "", "token": token, "layers": layers}
    except MemoryError:
        report = {"status": "memory", "detail": "MemoryError", "layers": layers}
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1:]
        line = f" (line {last[0].lineno})" if last and last[0].filename == "<program>" else ""
        detail = f"{type(error).__name__}: {str(error)[:300]}{line}"
        report = {"status": "failed", "detail": detail, "layers": layers}
    os.write(RESULT, json.dumps(report).encode("utf-8", "replace"))
    os._exit(0)


if __name__ == "__main__":
    stages = {"enter": stage_enter, "run": stage_run}
    stages[sys.argv[1]](json.loads(sys.argv[2]))
