"""Limits of Linux's control groups, which hold containers and services of systemd: memory and CPU time.

A limit of any group that this process is in holds, its own or one above, in both versions of control groups. Of groups
that a container does not show nothing is known. Everything that cannot be read is no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_SYSTEM = Path("/")

_NO_LIMIT = 2**62
"""Version 1 writes a number of bytes near 2**63 for no limit."""


def free_memory(root: Path = _SYSTEM) -> int | None:
    """Bytes of memory that this process's groups leave it, >= 0; None without a limit. Files that were read count as
    used there, but make room when it is needed. `root`: where proc and the groups are."""
    frees = [free for is_v2, folder in _groups("memory", root) if (free := _free(folder, is_v2)) is not None]
    return min(frees, default=None)


def cpu_quota(root: Path = _SYSTEM) -> float | None:
    """CPUs whose time this process's groups may use, > 0 and rarely whole; None without a limit. `root`: as above."""
    quotas = [quota for is_v2, folder in _groups("cpu", root) if (quota := _quota(folder, is_v2)) is not None]
    return min(quotas, default=None)


def _free(folder: Path, is_v2: bool) -> int | None:
    limits, usage = (("max", "high"), "current") if is_v2 else (("limit_in_bytes",), "usage_in_bytes")
    limit = min((n for name in limits if (n := _number(folder / f"memory.{name}")) is not None), default=_NO_LIMIT)
    used = _number(folder / f"memory.{usage}")
    if limit >= _NO_LIMIT or used is None:
        return None
    stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    below = "" if is_v2 else "total_"  # with the groups below, as the usage is
    files = (stat.get(f"{below}{name}", "0") for name in ("inactive_file", "active_file"))
    return max(0, limit - used + sum(int(n) for n in files if n.isdigit()))


def _quota(folder: Path, is_v2: bool) -> float | None:
    """The CPU quota of one group, in CPUs; None without a limit."""
    try:
        if is_v2:
            quota, period = map(int, _lines(folder / "cpu.max")[0].split())  # "max" is no limit
        else:
            quota, period = (int(_lines(folder / f"cpu.cfs_{name}_us")[0]) for name in ("quota", "period"))
    except (IndexError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None


def _groups(controller: str, root: Path) -> Iterator[tuple[bool, Path]]:
    """The folders of the groups with this controller that this process is in, from its own up to the topmost one that
    is mounted; each with whether it is of version 2."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        names, _, path = line.partition(":")[2].partition(":")
        paths.update(dict.fromkeys(names.split(","), path))  # version 2 names no controller
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, system = line.partition(" - ")
        fields, kind, options = mount.split(" "), system.split(" ")[0], system.split(" ")[-1]
        is_v2 = kind == "cgroup2"
        is_it = is_v2 or (kind == "cgroup" and controller in options.split(","))
        own = paths.get("" if is_v2 else controller)
        if not is_it or own is None or len(fields) < 5:
            continue
        top, place = fields[3:5]  # the group that is mounted, and where
        folder = root / place.replace("\\040", " ").lstrip("/")
        below = PurePosixPath(own)
        parts = below.relative_to(top).parts if below.is_relative_to(top) and ".." not in below.parts else ()
        for n in range(len(parts), -1, -1):
            yield is_v2, folder.joinpath(*parts[:n])


def _number(path: Path) -> int | None:
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    """The lines of a file; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
