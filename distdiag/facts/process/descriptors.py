"""Open descriptors of a process, from /proc alone: files, pipes, sockets, devices, and the processes at the other ends.

Size and type of a file need stat, which waits for its file system, so each mount has its own deadline, and a missed one
is a fact. All other links and tables of /proc answer at once.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import replace
from functools import cached_property

from distdiag.facts import deadlines, machine
from distdiag.facts.network.sockets import Socket, Tables
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

PATIENCE_S = 0.5
"""Deadline for one file system, or the memory of one process."""
_GPU = re.compile(r"/dev/nvidia(\d+)|/dev/nvidia[-a-z].*|/dev/kfd|/dev/dxg|/dev/dri/renderD\d+")
_WATCHED = re.compile(r"tfd:\s*(\d+) events:\s*([0-9a-f]+)")
_READABLE, _WRITABLE = 0x1 | 0x2, 0x4  # EPOLLIN | EPOLLPRI, EPOLLOUT; those of poll(2) are the same
_DELETED = " (deleted)"
_BY_LINK = (("socket:[", "socket"), ("pipe:[", "pipe"), ("/memfd:", "memfd"), ("/dmabuf:", "anon"))
_SIZED = ("file", "deleted file", "shm", "memfd")
_PROTOCOLS = {"tcpv6": "tcp6", "udpv6": "udp6", "unix-stream": "unix"}


@record
class End:
    """A process with an end of a pipe or a unix socket open. `mode`: "r", "w", "rw"."""

    pid: int
    fd: int
    mode: str


@record
class Watch:
    """A watched descriptor. `wants`: "r" until readable, "w" until writable; "" for neither."""

    fd: int
    wants: str


@record
class Descriptor:
    """One open file descriptor; fields not applicable or unknown are None or empty.

    `kind`: file, directory, pipe, fifo, socket, device, gpu, anon, deleted file, memfd, shm, unknown. `target`: the
    path as seen by the process, or "pipe:[n]", "socket:[n]", "anon_inode:[eventpoll]". `mode`: "r", "w", "rw"; `flags`
    as in open(2). `deleted`: its name was removed. `position` and `size_bytes` of files. `silent`: its file system did
    not answer. `gpu`: the minor number of an NVIDIA device, n of /dev/nvidia<n>. `ends`: processes with the other end
    of a pipe, FIFO or unix socket, including this process. `watches` of an epoll.
    """

    fd: int
    kind: str
    target: str
    mode: str
    flags: int
    inode: int | None = None
    position: int | None = None
    size_bytes: int | None = None
    deleted: bool = False
    silent: bool = False
    gpu: int | None = None
    socket: Socket | None = None
    ends: tuple[End, ...] = ()
    watches: tuple[Watch, ...] = ()


@record
class Descriptors:
    """All descriptors of a process, by number. `unread`: "denied", "gone", "no-proc" (not Linux), else "".

    `hidden`: the number of processes with unreadable descriptors, any of which may have an end not listed. None: not
    counted.
    """

    descriptors: tuple[Descriptor, ...]
    unread: str = ""
    hidden: int | None = None


class Look:
    """A snapshot of a machine: tables shared by its processes are read once, at first use."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.clocks: dict[int, float] = {}
        """By processor: seconds its scheduler's clock is ahead of time.monotonic()."""

    def ends(self, link: str) -> tuple[End, ...]:
        """List the descriptors with this target in /proc/PID/fd/N."""
        return tuple(End(pid, fd, _mode(f"/proc/{pid}/fd/{fd}")) for pid, fd in self._all_descriptors[0].get(link, ()))

    @property
    def hidden(self) -> int | None:
        """The number of processes with unreadable descriptors; None if not counted."""
        return self._all_descriptors[1] if "_all_descriptors" in vars(self) else None

    @cached_property
    def _all_descriptors(self) -> tuple[dict[str, list[tuple[int, int]]], int]:
        found: dict[str, list[tuple[int, int]]] = {}
        hidden = 0
        for pid in filter(str.isdigit, os.listdir("/proc")):
            links, unread = _links(int(pid))
            hidden += unread == "denied"
            for fd, link in links.items():
                if not link.startswith(("anon_inode:", "/dev/")) or link.startswith("/dev/shm/"):
                    found.setdefault(link, []).append((int(pid), fd))
        return found, hidden


def descriptors(pid: int, look: Look | None = None, *, patience_s: float = PATIENCE_S) -> Descriptors:
    """Read the descriptors of a process. Pass one `look` for all processes of a reading."""
    look = look or Look()
    links, unread = _links(pid)
    infos = {fd: machine.read_text(f"/proc/{pid}/fdinfo/{fd}") for fd in links}
    answers, silent = _ask_files(pid, links, infos, patience_s)
    found = []
    for fd, link in sorted(links.items()):
        plain = _describe(pid, fd, link, infos[fd], answers.get(fd))
        watches = tuple(Watch(int(number), wants(int(events, 16))) for number, events in _WATCHED.findall(infos[fd]))
        found.append(replace(_connect(pid, plain, look), silent=fd in silent, watches=watches))
    return Descriptors(tuple(found), unread, look.hidden)


def wants(events: int) -> str:
    """Encode events of poll(2) or epoll_ctl(2) as letters, see Watch."""
    return ("r" if events & _READABLE else "") + ("w" if events & _WRITABLE else "")


def _links(pid: int) -> tuple[dict[int, str], str]:
    """Read the targets of descriptors: (by number, why none could be read)."""
    if not os.path.isdir("/proc/self"):
        return {}, "no-proc"
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return {}, "denied" if machine.process_state(pid).letter not in ("", "Z", "X") else "gone"
    except OSError:
        return {}, "gone"
    found = {}
    for entry in entries:
        try:
            found[int(entry)] = os.readlink(f"/proc/{pid}/fd/{entry}")
        except PermissionError:
            return {}, "denied"
        except OSError:  # closed meanwhile
            continue
    return found, ""


def _ask_files(
    pid: int, links: dict[int, str], infos: dict[int, str], patience_s: float
) -> tuple[dict[int, os.stat_result], set[int]]:
    """Stat files, mount by mount: (results, descriptors on mounts that did not answer)."""
    mounts: dict[str, list[int]] = {}
    for fd, link in links.items():
        if link.startswith("/"):
            mounts.setdefault(_field(infos[fd], "mnt_id"), []).append(fd)
    by_mount, mute = deadlines.each(mounts, lambda mount: _stat_all(pid, mounts[mount]), patience_s=patience_s)
    answers = {fd: answer for answered in by_mount.values() for fd, answer in answered.items()}
    return answers, {fd for mount in mute for fd in mounts[mount]}


def _stat_all(pid: int, fds: Iterable[int]) -> dict[int, os.stat_result]:
    found = {}
    for fd in fds:
        try:
            found[fd] = os.stat(f"/proc/{pid}/fd/{fd}")
        except OSError:  # closed meanwhile, or unknown to its file server
            continue
    return found


def _describe(pid: int, fd: int, link: str, info: str, answer: os.stat_result | None) -> Descriptor:
    deleted = link.endswith(_DELETED) and (answer is None or answer.st_nlink == 0)
    target = link[: -len(_DELETED)] if deleted else link
    kind = _kind(target, answer, deleted=deleted)
    position, gpu = _field(info, "pos"), _GPU.fullmatch(target)
    return Descriptor(
        fd=fd,
        kind=kind,
        target=target,
        mode=_mode(f"/proc/{pid}/fd/{fd}"),
        flags=int(_field(info, "flags") or "0", 8),
        inode=_inode(link, info, answer),
        position=int(position) if kind in _SIZED and position else None,
        size_bytes=answer.st_size if kind in _SIZED and answer else None,
        deleted=deleted,
        gpu=int(gpu[1]) if gpu and gpu[1] else None,
    )


def _kind(target: str, answer: os.stat_result | None, *, deleted: bool) -> str:
    for start, kind in _BY_LINK:
        if target.startswith(start):
            return kind
    if _GPU.fullmatch(target):
        return "gpu"
    if not target.startswith("/"):
        return "anon"
    if answer is None:
        return "unknown"
    if stat.S_ISREG(answer.st_mode):
        return "shm" if target.startswith("/dev/shm/") else "deleted file" if deleted else "file"
    kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "fifo", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
    return kinds.get(stat.S_IFMT(answer.st_mode), "unknown")


def _connect(pid: int, descriptor: Descriptor, look: Look) -> Descriptor:
    """Add the socket, and the processes at the other end."""
    if descriptor.kind == "socket" and descriptor.inode is not None:
        known = look.tables.of(pid).sockets.get(descriptor.inode)
        if known is None:  # of another namespace, neither bound nor connected, or of a family without a table
            return replace(descriptor, socket=Socket(descriptor.inode, _protocol(pid, descriptor.fd), state=""))
        ends = look.ends(f"socket:[{known.peer_inode}]") if known.peer_inode else ()
        return replace(descriptor, socket=known, ends=ends)
    if descriptor.kind in ("pipe", "fifo"):
        opposite = set("rw") - set(descriptor.mode) or set("rw")
        others = (end for end in look.ends(descriptor.target) if (end.pid, end.fd) != (pid, descriptor.fd))
        return replace(descriptor, ends=tuple(end for end in others if opposite & set(end.mode)))
    return descriptor


def _protocol(pid: int, fd: int) -> str:
    """Name the protocol of a socket in no table: "tcp", "netlink", "packet"; empty if closed."""
    try:
        name = os.getxattr(f"/proc/{pid}/fd/{fd}", "system.sockprotoname")
    except OSError:
        return ""
    plain = name.rstrip(b"\0").decode("ascii", "replace").lower()
    return _PROTOCOLS.get(plain, plain)


def _inode(link: str, info: str, answer: os.stat_result | None) -> int | None:
    inside = re.search(r"^(?:pipe|socket):\[(\d+)\]$", link)
    inode = inside[1] if inside else _field(info, "ino")  # in fdinfo since Linux 5.14
    return int(inode) if inode else answer.st_ino if answer else None


def _mode(link: str) -> str:
    """Derive the open mode from the link's permissions; empty for O_PATH."""
    try:
        rights = os.lstat(link).st_mode
    except OSError:
        return ""
    return ("r" if rights & stat.S_IRUSR else "") + ("w" if rights & stat.S_IWUSR else "")


def _field(info: str, name: str) -> str:
    found = re.search(rf"^{name}:\s*(\S+)", info, re.MULTILINE)
    return found[1] if found else ""
