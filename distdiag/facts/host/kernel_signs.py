"""Kernel evidence on one node for a job: OOM kills, Xid, links, D states, unacknowledged data."""

from __future__ import annotations

import os
import re
import time

from distdiag.facts import machine
from distdiag.facts.network import sockets
from distdiag.facts.text import printable
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from distdiag.facts.logs.line_patterns import Patterns

_RECORD = 8192
"""The largest record of /dev/kmsg, Documentation/ABI/testing/dev-kmsg."""
_MOST_LINES = 40
_MOST_RECORDS = 100_000
_RETRANSMITS = 3
"""With the pause doubled each time, this many retransmissions take seconds."""


@record
class KernelLine:
    """A line of the kernel's log. `kind` of its row; `age_s`: how long ago; `pid` if it names a process."""

    kind: str
    text: str
    age_s: float
    pid: int | None = None


@record
class Unacknowledged:
    """A TCP connection whose peer does not acknowledge: bytes in flight, and number of retransmissions."""

    pid: int
    local: str
    remote: str
    queued_bytes: int
    retransmits: int


@record
class KernelSigns:
    """The results. `oom_kills` by cgroup of the job; `log_error`: why the log was not read."""

    lines: tuple[KernelLine, ...] = ()
    log_error: str = ""
    oom_kills: tuple[tuple[str, int], ...] = ()
    unacknowledged: tuple[Unacknowledged, ...] = ()


def read(pids: Sequence[int], kernel: Patterns, *, since_s: float) -> KernelSigns:
    """Read all evidence for some processes; kernel lines of the last `since_s` seconds only. Never raises."""
    lines, log_error = kernel_log(kernel, since_s)
    return KernelSigns(
        lines=lines,
        log_error=log_error,
        oom_kills=_oom_kills(pids),
        unacknowledged=tuple(_unacknowledged(pids)),
    )


def kernel_log(kernel: Patterns, since_s: float, *, most: int = _MOST_LINES) -> tuple[tuple[KernelLine, ...], str]:
    """Read the newest matching lines of the kernel's log, none older than `since_s`, or return the error."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return (), f"/dev/kmsg: {error.strerror}"
    try:
        read = (parse(record, kernel) for record in _records(descriptor))
        found = [line for line in read if line is not None and line.age_s <= since_s]
    except OSError as error:
        return (), f"/dev/kmsg: {error.strerror}"
    finally:
        os.close(descriptor)
    return tuple(found[-most:]), ""


def _records(descriptor: int) -> Iterator[str]:
    for _ in range(_MOST_RECORDS):
        try:
            yield os.read(descriptor, _RECORD).decode("utf-8", "replace")
        except BlockingIOError:
            return
        except BrokenPipeError:
            continue  # records were overwritten during the read: the next read starts at the oldest left


def parse(record: str, kernel: Patterns) -> KernelLine | None:
    """Parse a record of /dev/kmsg, "6,1234,5678901,-;text"; None if it matches no row."""
    head, _, text = record.partition(";")
    text = text.partition("\n")[0]
    found = kernel.first(text)
    if found is None:
        return None
    kind, groups = found
    fields = head.split(",")
    stamp = int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else 0.0
    age_s = max(0.0, time.clock_gettime(time.CLOCK_MONOTONIC) - stamp)
    pid = groups.get("pid", "")[:9]
    return KernelLine(kind, printable(text[:300]), age_s, int(pid) if pid else None)


def _oom_kills(pids: Iterable[int]) -> tuple[tuple[str, int], ...]:
    """Read the OOM kills of the processes' cgroups, zeros included."""
    found: dict[str, int] = {}
    for pid in pids:
        for line in machine.read_text(f"/proc/{pid}/cgroup").splitlines():
            controllers, path = [*line.split(":", 2), "", ""][1:3]
            if controllers == "":
                place = f"/sys/fs/cgroup{path}/memory.events"
            elif controllers == "memory":
                place = f"/sys/fs/cgroup/memory{path}/memory.oom_control"
            else:
                continue
            match = re.search(r"^oom_kill (\d+)", machine.read_text(place), re.MULTILINE)
            if match is not None:
                found[printable(path)] = int(match[1])
    return tuple(found.items())


def _unacknowledged(pids: Iterable[int]) -> Iterator[Unacknowledged]:
    tables: dict[str, dict[int, sockets.Socket]] = {}
    for pid in pids:
        namespace = machine.network_namespace(pid)
        if namespace not in tables:
            tables[namespace] = {inode: sock for inode, sock in sockets.tcp_table(pid).items() if _is_unanswered(sock)}
        table = tables[namespace]
        for inode in sockets.inodes(pid) & table.keys() if table else ():
            sock = table[inode]
            yield Unacknowledged(pid, sock.local, sock.remote, sock.send_queue_bytes or 0, sock.retransmits or 0)


def _is_unanswered(sock: sockets.Socket) -> bool:
    is_late = (sock.retransmits or 0) >= _RETRANSMITS
    return sock.state == "ESTABLISHED" and is_late and bool(sock.send_queue_bytes)
