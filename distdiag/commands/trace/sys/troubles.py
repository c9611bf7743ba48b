"""The errors that strace saw, as findings: which are faults, which may be, and what to do about them. Pure."""

from __future__ import annotations

import shlex
from collections import defaultdict
from typing import TYPE_CHECKING

from distdiag.commands.trace.sys.words import several, thread, where
from distdiag.report import Finding, Fix, Level

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from distdiag.commands.trace.sys.model import Subject
    from distdiag.node.strace.types import CallError

_REPEATED = 3
_SHOWN = 5
_KERNELS = ("/dev", "/proc", "/sys")
_GRAVE = {
    "ENOSPC": ("no space is left", "make room, or write elsewhere", ("df -h {folder}", "df -i {folder}")),
    "EDQUOT": ("a quota is used up", "remove files, or ask for more", ("quota -s", "df -h {folder}")),
    "EIO": ("the disk or file server fails", "see what the kernel says of it", ("dmesg -T | tail -n 30",)),
    "ESTALE": ("the file server has forgotten the file", "mount it again, or restart the job", ("df {folder}",)),
    "EMFILE": (
        "the process has as many files open as it may",
        "find what it has open (trace fds); close it, use fewer DataLoader workers, or allow more",
        ("ulimit -n 65536",),
    ),
    "ENFILE": ("the machine has as many files open as it may", "allow more", ("sysctl fs.file-max fs.file-nr",)),
    "EUCLEAN": ("the file system is damaged", "see what the kernel says of it", ("dmesg -T | tail -n 30",)),
}
_WARNED = {
    "EROFS": ("the file system may only be read", "write elsewhere"),
    "ENOMEM": ("the kernel gave no memory", "see `free -m`, limits of the cgroup, and ulimit -v and -l"),
    "ECONNREFUSED": ("nobody listens there", "see whether that rank or service lives, and its address and port"),
    "EHOSTUNREACH": ("the host cannot be reached", "see its route, and whether its network is up"),
    "ENETUNREACH": ("there is no way to that network", "see `ip route`; NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"),
    "ETIMEDOUT": ("it did not answer", "see whether it lives, and whether a firewall drops the packets"),
    "ECONNRESET": ("the other end has gone away", "see the log of that rank: it ended or crashed first"),
    "EPIPE": ("the other end has gone away", "see the log of that rank: it ended or crashed first"),
    "EADDRINUSE": ("somebody has that address already", "see who: ss -tlnp; or use another port"),
    "EADDRNOTAVAIL": ("that address is not of this host", "see MASTER_ADDR and the names of hosts"),
    "EACCES": ("that may not be done", "see the rights of the file and of the folders above it: namei -l PATH"),
}


def errors(subjects: Sequence[Subject]) -> Iterator[Finding]:
    """Name the errors that are worth it, the same one of several threads together."""
    groups: dict[tuple[str, Level], list[tuple[Subject, CallError]]] = defaultdict(list)
    for one in subjects:
        for trouble in one.log.errors if one.log is not None else ():
            level = _level(trouble)
            if level is not None:
                groups[trouble.error, level].append((one, trouble))
    for (error, how_bad), rows in groups.items():
        yield _error(error, how_bad, rows)


def _level(trouble: CallError) -> Level | None:
    error, target = trouble.error, trouble.target
    if error in _GRAVE:
        return Level.FAIL
    if error == "ENOENT":
        return Level.INFO if trouble.weight == 6 else None
    if error == "ECONNREFUSED" and (trouble.count < _REPEATED or target.startswith("/")):
        return None
    if error == "EACCES" and (not target.startswith("/") or target.startswith(_KERNELS)):
        return None
    if error == "ETIMEDOUT" and trouble.weight == 1:
        return None
    return Level.WARN if error in _WARNED else None


def _error(error: str, level: Level, rows: list[tuple[Subject, CallError]]) -> Finding:
    first = rows[0][1]
    count = sum(trouble.count for _, trouble in rows)
    who = several(one for one, _ in rows)
    times = "once" if count == 1 else f"{count} times"
    if error == "ENOENT":
        title = f"{who} looked in vain for {_names([trouble for _, trouble in rows])}"
        fix = Fix(text="nothing, if the job works without it; else install it, or name its folder in LD_LIBRARY_PATH")
        return _finding(f"error-{error.lower()}", level, title, rows, fix)
    means, text = (_GRAVE[error] if error in _GRAVE else _WARNED[error])[:2]
    on = f" on {first.target}" if first.target else ""
    title = f"{who} got {error} {times}: {first.name}{on}: {means}"
    folder = first.target.rpartition("/")[0] if first.target.startswith("/") else "."
    commands = tuple(
        command.format(folder=shlex.quote(folder or "/")) for command in (_GRAVE[error][2] if error in _GRAVE else ())
    )
    return _finding(f"error-{error.lower()}", level, title, rows, Fix(text=text, commands=commands))


def _names(troubles: Iterable[CallError]) -> str:
    names = list(dict.fromkeys(one.target for one in troubles))
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _finding(
    name: str, level: Level, title: str, rows: Sequence[tuple[Subject, CallError]], fix: Fix | None
) -> Finding:
    evidence = [
        f"{thread(one)}: {trouble.name}{f' {trouble.target}' if trouble.target else ''}: {trouble.error}"
        + (f", {trouble.count} times" if trouble.count > 1 else "")
        for one, trouble in rows[:_SHOWN]
    ]
    shown = tuple(evidence) if len(rows) > 1 else ()
    return Finding(
        id=f"trace.{name}", level=level, title=title, where=where(one for one, _ in rows), evidence=shown, fix=fix
    )
