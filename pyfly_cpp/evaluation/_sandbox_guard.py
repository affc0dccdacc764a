"""What runs inside the sandbox: `python -I -S _sandbox_guard.py STAGE CONFIG`, started by sandbox.py and by nobody
else.

A file of its own that imports only the standard library, so that the process that runs a model's code never had numpy,
llama.cpp or the caller's objects in it.

Stage `enter` gets new namespaces (user, network, mount, pid, ipc), makes every file system read-only, and puts an empty
tmpfs over the work folder and over /proc; then stage `run` in a child (a fresh exec: it drops the capabilities that
came with the user namespace). Where bubblewrap has done all that, and where nothing does it, `run` comes at once. It
sets limits, seals itself with seccomp and an audit hook, and runs the program.

Standard input is a secret, then the program. On standard error goes what seals it, or why it could not start; that is
closed before the program begins. On standard output goes the verdict, at the program's end: the secret itself where it
ran to its end, else `failed` or `memory` and a reason.
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

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 1 << 12, 1 << 14, 1 << 18
AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NODEV, SYS_MOUNT_SETATTR = 0x8000, 1, 4, 442
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
    null = os.devnull.encode()
    _checked(libc.mount(null, null, None, MS_BIND, None), "mount /dev/null")
    # A file system that is read-only still lets devices be written to.
    _change_mount(libc, b"/", AT_RECURSIVE, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV, 0)
    _change_mount(libc, null, 0, 0, MOUNT_ATTR_NODEV)
    # Empty files take memory, too, and count as nothing in `size`.
    options = f"size={tmpfs_bytes},nr_inodes=4096,mode=0700".encode()
    _checked(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options), "mount work folder")
    _checked(libc.mount(b"tmpfs", b"/proc", b"tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, None), "cover /proc")


def _change_mount(libc: ctypes.CDLL, path: bytes, flags: int, gain: int, lose: int) -> None:
    attributes = struct.pack("=QQQQ", gain, lose, 0, 0)  # struct mount_attr: set, clear, propagation, user namespace
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    result = libc.syscall(
        ctypes.c_long(SYS_MOUNT_SETATTR), ctypes.c_int(-100), path, ctypes.c_uint(flags), buffer,
        ctypes.c_size_t(len(attributes)),
    )  # fmt: skip
    _checked(result, "mount_setattr")


# ---- seccomp ---------------------------------------------------------------------------------------------------------

# The system calls that Python needs for a programming exercise, with their numbers on x86-64 and on arm64. What is not
# here (sockets, processes, signals to others, shared memory, tracing, mounts, limits, what a later kernel adds) fails
# with ENOSYS.
_ALLOWED = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222,
mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124,
mremap 25 216, msync 26 227, madvise 28 233, dup 32 23, dup2 33 -, pause 34 -, nanosleep 35 101, getitimer 36 102,
alarm 37 -, setitimer 38 103, getpid 39 172, sendfile 40 71, exit 60 93, uname 63 160, flock 73 32, fsync 74 82,
fdatasync 75 83, truncate 76 45, ftruncate 77 46, getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49,
fchdir 81 50, rename 82 -, mkdir 83 -, rmdir 84 -, creat 85 -, link 86 -, unlink 87 -, symlink 88 -, readlink 89 -,
umask 95 166, gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174,
getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -, getgroups 115 158,
getresuid 118 148, getresgid 120 150, rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133,
sigaltstack 131 132, restart_syscall 219 128, statfs 137 43, fstatfs 138 44, getpriority 140 141, arch_prctl 158 -,
gettid 186 178, time 201 -, futex 202 98, sched_getaffinity 204 123, set_tid_address 218 96, fadvise64 221 223,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94, epoll_create 213 -,
epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, openat 257 56, mkdirat 258 34,
newfstatat 262 79, unlinkat 263 35, renameat 264 38, renameat2 316 276, linkat 265 37, symlinkat 266 36,
readlinkat 267 78, faccessat 269 48, faccessat2 439 439, pselect6 270 72, ppoll 271 73, set_robust_list 273 99,
dup3 292 24, pipe2 293 59, preadv 295 69, pwritev 296 70, eventfd2 290 19, fallocate 285 47, getrandom 318 278,
copy_file_range 326 285, statx 332 291, rseq 334 293, close_range 436 436, getcpu 309 168, membarrier 324 283,
mincore 27 232
"""
# Where a read-only file system does not keep these from other files, they are left out.
_METADATA = """
chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, utime 132 -,
utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, getxattr 191 8,
lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13, removexattr 197 14,
lremovexattr 198 15, fremovexattr 199 16, fchmodat2 452 452
"""
# Column in the lists, AUDIT_ARCH, and the numbers of clone, fcntl, prlimit64 and ioctl, which depend on what is asked.
_MACHINES = {
    "x86_64": (1, 0xC000003E, 56, 72, 302, 16),
    "aarch64": (2, 0xC00000B7, 220, 25, 261, 29),
}
CLONE_THREAD, F_SETOWN, F_DUPFD_CLOEXEC = 0x10000, 8, 1030
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
EPERM, ENOTTY, ENOSYS = 1, 25, 38


def forbid_system_calls(metadata: bool) -> None:
    """Seals this process and all its threads: nothing is left but the calls listed above.

    Args:
        metadata: Whether modes, owners, times and attributes of files may be changed.

    Raises:
        OSError: the kernel has no seccomp, or this machine no list.
    """
    entry = _MACHINES.get(platform.machine())
    if entry is None or not sys.platform.startswith("linux"):
        raise OSError(ENOSYS, f"no system call list for {sys.platform} on {platform.machine()}")
    column, arch, clone, fcntl, prlimit, ioctl = entry
    names = _ALLOWED + "," + _METADATA if metadata else _ALLOWED
    numbers = [name.split()[column] for name in names.split(",")]
    load, equal, at_least, any_of, give = 0x20, 0x15, 0x35, 0x45, 0x06
    first, second, third = 16, 24, 32  # where the arguments are; each has 8 bytes, the lower half first

    def statement(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, jump_true, jump_false, k)

    def rule(number: int, *body: bytes) -> list[bytes]:
        return [statement(equal, number, 0, len(body)), *body]

    allow, deny, missing = statement(give, ALLOW), statement(give, ERRNO | EPERM), statement(give, ERRNO | ENOSYS)
    program = [statement(load, 4), statement(equal, arch, 1, 0), statement(give, KILL), statement(load, 0)]
    for number in numbers:
        if number != "-":
            program += rule(int(number), allow)
    # A thread may be made, a process not; clone3 hides which it is behind a pointer, and libc falls back to clone.
    program += rule(clone, statement(load, first), statement(any_of, CLONE_THREAD, 1, 0), deny, allow)
    # Everything up to the locks; not the calls that have a signal sent to others.
    fcntl_checks = [statement(at_least, F_SETOWN, 0, 2), statement(equal, F_DUPFD_CLOEXEC, 1, 0), deny, allow]
    program += rule(fcntl, statement(load, second), *fcntl_checks)
    # Reading a limit of its own: process 0, no new value.
    parts = (first, first + 4, third, third + 4)
    checks = [part for at in parts for part in (statement(load, at), statement(equal, 0, 1, 0), deny)]
    program += rule(prlimit, *checks, allow)
    program += rule(ioctl, statement(give, ERRNO | ENOTTY))  # what open() expects of something that is no terminal
    program.append(missing)
    code = b"".join(program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(buffer)))
    libc = _libc()
    _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _checked(libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_void_p(ctypes.addressof(header)), 0, 0), "seccomp")


# ---- Python's own second line ----------------------------------------------------------------------------------------

_FORBIDDEN_EVENTS = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "pty.",
    "ctypes.", "os.startfile", "ftplib.", "smtplib.", "urllib.", "http.", "signal.pthread_kill", "syslog.",
    "resource.prlimit", "gc.get_", "sys.settrace", "sys.setprofile", "sys.addaudithook",
)  # fmt: skip
_PATH_EVENTS = {
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate",
    "os.utime", "os.setxattr", "os.removexattr", "os.chflags", "shutil.rmtree", "shutil.move", "shutil.copyfile",
}  # fmt: skip


def install_audit_hook(folder: str) -> None:
    """Refuses, with PermissionError, what Python code does through the standard library to reach outside `folder`."""
    inside = os.path.realpath(folder) + os.sep
    realpath, fspath, fsdecode = os.path.realpath, os.fspath, os.fsdecode
    write_flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def resolve(path: object) -> str:
        return realpath(fsdecode(fspath(path))) + os.sep  # type: ignore[call-overload]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments[0], arguments[1], arguments[2]
            if isinstance(path, int) or path is None:
                return
            place = resolve(path)
            if place.startswith("/proc/"):  # the memory of this process, and of others
                raise PermissionError(f"the sandbox forbids reading {path!r}")
            writes = isinstance(flags, int) and flags & write_flags
            writes = writes or (isinstance(mode, str) and any(letter in mode for letter in "wax+"))
            if writes and path != os.devnull and not place.startswith(inside):
                raise PermissionError(f"the sandbox forbids writing {path!r}")
        elif event in _PATH_EVENTS:
            paths = [path for path in arguments[:2] if isinstance(path, (str, bytes, os.PathLike))]
            if not all(resolve(path).startswith(inside) for path in paths):
                raise PermissionError(f"the sandbox forbids {event} outside the work folder")
        elif event.startswith(_FORBIDDEN_EVENTS):
            raise PermissionError(f"the sandbox forbids {event}")

    sys.addaudithook(hook)


# ---- Stages ----------------------------------------------------------------------------------------------------------


def _limit(kind: int, value: int | str) -> None:
    _, hard = resource.getrlimit(kind)
    least = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
    resource.setrlimit(kind, (least, least))


def _silence() -> None:
    """Standard input, output and error are empty from here on."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _end_with(parent: int) -> None:
    """Has the kernel kill this process when `parent` dies, also where that has happened already."""
    if sys.platform.startswith("linux"):
        _checked(_libc().prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0), "parent's death")
        if os.getppid() != parent:
            os._exit(1)


def stage_enter(config: dict[str, int | str]) -> None:
    """Namespaces, then stage `run` in a child; ends with the child's status."""
    folder = str(config["folder"])
    enter_namespaces(folder, int(config["file_bytes"]) * 4)
    _end_with(int(config["parent"]))
    child = os.fork()
    if child == 0:
        try:
            run = json.dumps({**config, "parent": 0})  # of another pid namespace
            os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, "run", run])
        finally:
            os._exit(70)
    _silence()
    _, status = os.waitpid(child, 0)
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def stage_run(config: dict[str, int | str]) -> None:
    """Limits, seals, and the program."""
    folder, contained = str(config["folder"]), bool(config["contained"])
    if "parent" in config:
        _end_with(int(config["parent"]))
    os.chdir(folder)
    received = [sys.stdin.buffer.read()]
    verdict = os.dup(1)
    os.environ.clear()
    os.environ.update({"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, "LANG": "C.UTF-8"})
    _limit(resource.RLIMIT_CPU, config["cpu_seconds"])
    _limit(resource.RLIMIT_FSIZE, config["file_bytes"])
    _limit(resource.RLIMIT_NOFILE, 64)
    _limit(resource.RLIMIT_CORE, 0)
    if sys.platform.startswith("linux"):  # macOS does not honour it
        _limit(resource.RLIMIT_AS, config["memory_bytes"])
    if contained:  # outside a user namespace the kernel counts all processes of the user, a whole desktop
        _limit(resource.RLIMIT_NPROC, config["processes"])
    layers = ["limits"]
    try:
        forbid_system_calls(metadata=contained)
        layers.append("seccomp")
    except OSError:
        if contained:
            raise
    if config["audit_hook"]:
        install_audit_hook(folder)
        layers.append("audit hook")
    os.write(2, f"{config['ready']} {','.join(layers)}\n".encode())
    _silence()
    os.write(verdict, _run_program(received, int(config["secret_bytes"]), verdict))
    os._exit(0)


def _run_program(received: list[bytes], secret_bytes: int, verdict: int) -> bytes:
    """Runs the program. Where it ends, the secret is written to `verdict`; where it raises, the report is returned."""
    secret, source = [received[0][:secret_bytes]], received.pop()[secret_bytes:]
    try:
        code = compile(source.decode("utf-8", "surrogatepass"), "<program>", "exec")
        names = {"__builtins__": __builtins__}  # as `code_eval`: no `__main__`, so its blocks do not run
        # Operands are evaluated from left to right, so while the program runs, the secret is in no variable and no
        # container: Python code cannot get at it, in the frames above it or anywhere.
        os.write(verdict, (secret.pop(), exec(code, names))[0])  # type: ignore[func-returns-value]
        return b""
    except MemoryError:
        return b"memory\nMemoryError"
    except BaseException as error:
        try:
            last = traceback.extract_tb(error.__traceback__)[-1:]
            line = f" (line {last[0].lineno})" if last and last[0].filename == "<program>" else ""
            return f"failed\n{type(error).__name__}: {str(error)[:300]}{line}".encode("utf-8", "replace")
        except BaseException:  # of the program's own making
            return b"failed\nan exception that cannot be shown"


if __name__ == "__main__":
    stages = {"enter": stage_enter, "run": stage_run}
    try:
        stages[sys.argv[1]](json.loads(sys.argv[2]))
    except OSError as error:
        os.write(2, str(error).encode("utf-8", "replace"))
        os._exit(1)
