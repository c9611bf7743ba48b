"""Records a job on one node: the output of each rank, and the time and status of its end. Outlives distdiag.

It runs in a separate session, so neither Ctrl-C nor the death of distdiag ends it and cuts the job's output. It exits
when no process can write to the job's stdout and stderr any more.

A daemon left behind by the job may keep the streams open: the recorder also exits once the job and its ranks have ended
and the streams were silent for a second.

Its folder: `events.jsonl` (one line per start and end of a rank, and when all were held), `job.*.log` and
`rankR.gG.*.log` (output).
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import json
import os
import re
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time

from distdiag.facts import machine, private_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, TypedDict

    class Config(TypedDict):
        """`control`, `listener`: inherited descriptors. `streams`: (name, read end, original, its device and inode)."""

        folder: str
        listener: int
        control: int
        hold: bool
        prefix: bool
        streams: list[tuple[str, int, int, int, int]]


HEAD_BYTES = 4 * 2**20
TAIL_BYTES = 8 * 2**20
_BLOCK = 1 << 20
_MOST_RANKS = 4096
_MOST_FDS = 8
_HELD_S = 10.0
_TURN_S = 0.5
_AT_REST_S = 0.02
_SILENT_S = 1.0
_PIDFD_GET_INFO = 0xC040FF0B
"""_IOWR(0xFF, 11, struct pidfd_info), 64 bytes in its first version: include/uapi/linux/pidfd.h, Linux 6.15."""
_PIDFD_INFO_EXIT = 1 << 3
_LOST = b"\n[distdiag run: %d bytes are not kept here]\n"


class Kept:
    """A bounded copy of a stream: its first and last megabytes. Overflow and failed writes never stop the stream."""

    def __init__(self, path: str, *, head: int = HEAD_BYTES, tail: int = TAIL_BYTES) -> None:
        self._path, self._head, self._half = path, head, tail // 2
        self._file = _open(path)
        self._size = self._lost = 0
        self._segments: list[str] = []
        self._number = 0

    def write(self, data: bytes) -> None:
        """Add to the copy."""
        try:
            self._write(data)
        except OSError:  # disk full or file removed: the copy ends here, the job continues
            self._close()

    def _write(self, data: bytes) -> None:
        if self._file < 0:
            return
        limit = self._head if not self._segments else self._half
        while self._size + len(data) > limit:
            room = limit - self._size
            cut = data.rfind(b"\n", 0, room) + 1 or room
            _write_all(self._file, data[:cut])
            data = data[cut:]
            self._next()
            limit = self._half
        _write_all(self._file, data)
        self._size += len(data)

    def _next(self) -> None:
        self._close()
        self._number += 1
        self._segments.append(f"{self._path}.{self._number}")
        self._file, self._size = _open(self._segments[-1]), 0
        if len(self._segments) > 2:
            oldest = self._segments.pop(0)
            self._lost += os.stat(oldest).st_size
            os.unlink(oldest)

    def finish(self) -> None:
        """Append the last megabytes to the first ones, in one file."""
        self._close()
        with contextlib.suppress(OSError):
            if self._segments:
                whole = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
                if self._lost:
                    _write_all(whole, _LOST % self._lost)
                for segment in self._segments:
                    with open(segment, "rb") as file:
                        while data := file.read(_BLOCK):
                            _write_all(whole, data)
                    os.unlink(segment)
                os.close(whole)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _open(path: str) -> int:
    with contextlib.suppress(OSError):
        return private_files.open_file(path, os.O_WRONLY)
    return -1


def _write_all(fd: int, data: bytes) -> None:
    """Write all data, even to a non-blocking descriptor. Raises OSError."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])


class Copier(threading.Thread):
    """Copies one stream to its original destination and into a file."""

    locks: dict[tuple[int, int], threading.Lock] = {}  # noqa: RUF012 - shared, so that lines of ranks do not interleave

    def __init__(self, read: int, out: int, path: str, label: bytes = b"") -> None:
        super().__init__(daemon=True)
        self._read, self._out, self._kept = read, out, Kept(path)
        self._lines = Labelled(label) if label else None
        status = os.fstat(out)
        self._lock = self.locks.setdefault((status.st_dev, status.st_ino), threading.Lock())
        self._copied = 0

    def run(self) -> None:
        """Copy to the end of the stream. If its reader closes, close ours, so the job gets its SIGPIPE."""
        try:
            while data := _read_some(self._read):
                self._kept.write(data)
                self._pass(data if self._lines is None else self._lines.whole(data))
                self._copied += len(data)
            if self._lines is not None:
                self._pass(self._lines.rest())
        except OSError:
            pass
        finally:
            os.close(self._read)
            os.close(self._out)
            self._kept.finish()

    def state(self) -> tuple[int, int]:
        """Return the bytes copied, and those still unread in the stream (0 once closed)."""
        waiting = bytearray(4)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._read, termios.FIONREAD, waiting)
        return self._copied, int.from_bytes(waiting, sys.byteorder)

    def finish(self) -> None:
        """Complete the file although the stream is still open."""
        self._kept.finish()

    def _pass(self, data: bytes) -> None:
        if data:
            with self._lock:
                _write_all(self._out, data)


class Labelled:
    """Prefixes each line of a stream with a label. A line is held back until complete, or longer than 1 MiB."""

    def __init__(self, label: bytes) -> None:
        self._label, self._rest = label, b""

    def whole(self, data: bytes) -> bytes:
        """Return the completed lines."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _BLOCK:
            lines.append(self._rest)
            self._rest = b""
        return b"".join(b"%s%s\n" % (self._label, line) for line in lines)

    def rest(self) -> bytes:
        """Return an unterminated last line, terminated."""
        return b"%s%s\n" % (self._label, self._rest) if self._rest else b""


def _read_some(fd: int) -> bytes:
    """Read up to the capacity of a pipe, so that a written line is never split; empty at the end."""
    try:
        return os.read(fd, _BLOCK)
    except OSError as error:
        if error.errno == errno.EIO:  # the other end of a pseudo-terminal has been closed
            return b""
        raise


class Recorder:
    """Receives ranks' streams, copies their output and waits for their exit."""

    def __init__(self, config: Config) -> None:
        self._folder = config["folder"]
        self._listener = socket.socket(fileno=config["listener"])
        self._listener.setblocking(False)
        self._control = config["control"]
        self._parent_is_there = True
        self._launcher = 0
        self._held_until = 0.0
        self._did_hold = not config["hold"]
        self._prefix = config["prefix"]
        self._events = private_files.open_file(os.path.join(self._folder, "events.jsonl"), os.O_WRONLY | os.O_APPEND)
        # By pidfd the message of each rank, JSON of a process of the job: only the fields used here are checked.
        self._ranks: dict[int, dict[str, Any]] = {}
        self._job_ended = self._did_drain = False
        self._state: list[tuple[int, int]] = []
        self._silent_since = 0.0
        self._copiers: list[Copier] = []
        self._outs: dict[tuple[int, int], int] = {}
        for name, read, out, device, inode in config["streams"]:
            self._outs[device, inode] = os.dup(out)
            self._copy(read, out, f"job.{name}.log")

    def _copy(self, read: int, out: int, name: str, label: bytes = b"") -> None:
        copier = Copier(read, out, os.path.join(self._folder, name), label)
        copier.start()
        self._copiers.append(copier)

    def run(self) -> None:
        """Work until no process can write any more, or only a silent daemon."""
        while any(copier.is_alive() for copier in self._copiers) or self._parent_is_there:
            if self._job_ended and not self._ranks and self._is_silent():
                break
            poll = select.poll()
            for fd in (self._listener.fileno(), *self._ranks, *([self._control] if self._parent_is_there else [])):
                poll.register(fd, select.POLLIN)
            turn_s = _AT_REST_S if self._job_ended and not self._did_drain else _TURN_S
            ready = {fd for fd, _ in poll.poll(1000 * turn_s)}
            statuses = {fd: _exit_status(fd, self._ranks[fd]["pid"]) for fd in ready & self._ranks.keys()}
            for fd, status in statuses.items():
                self._ended(fd, status)
            if self._listener.fileno() in ready:
                self._accept()
            if self._control in ready:
                self._receive()
            if self._held_until and time.monotonic() > self._held_until:
                self._release()

    def leave(self) -> None:
        """End at once: a thread may wait for a daemon's next line."""
        for copier in self._copiers:
            if copier.is_alive():
                copier.finish()
        os._exit(0)

    def _is_silent(self) -> bool:
        """Report "drained" when two successive states are equal; return whether they then stayed equal for a second."""
        now, state = time.monotonic(), [copier.state() for copier in self._copiers]
        if state != self._state or any(waiting for _, waiting in state):
            self._state, self._silent_since = state, now
            return False
        if not self._did_drain:
            self._did_drain = True
            self._tell("drained", {"pid": 0})
        return now - self._silent_since >= _SILENT_S

    def _receive(self) -> None:
        """Obey distdiag's commands: the launcher's pid, "release", "ending", "ended"; the pipe ends with distdiag."""
        data = os.read(self._control, 4096)
        if not data:
            self._parent_is_there = False
            self._did_hold = True
            self._release()
        for line in data.decode("ascii", "replace").split():
            if line == "release":
                self._release()
            elif line == "ending":  # distdiag ends the job itself, after inspecting it
                self._did_hold = True
            elif line == "ended":
                self._job_ended = True
            elif line.isdigit():
                self._launcher = int(line)

    def _accept(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            link, _ = self._listener.accept()
            with link:
                link.settimeout(1.0)
                pid, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                size = array.array("i").itemsize
                data, rights, _, _ = link.recvmsg(65536, socket.CMSG_SPACE(_MOST_FDS * size))
                fds = array.array("i")
                for level, kind, payload in rights:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        fds.frombytes(payload[: len(payload) // size * size])
                if uid != os.geteuid() or not self._take(pid, json.loads(data), list(fds)):
                    for fd in fds:
                        os.close(fd)
                    return
                link.send(b"recorded")

    def _take(self, pid: int, about: dict[str, Any], fds: list[int]) -> bool:
        names = about["streams"]
        if len(fds) != 2 * len(names) or len(self._ranks) >= _MOST_RANKS:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)
        rank, generation = int(about["rank"]), int(about["generation"])
        label = f"[{machine.host_name()}:{rank}] ".encode() if self._prefix else b""
        for number, name in enumerate(names):
            kind = name if name in ("stdout", "stderr") else "output"
            self._shorten(fds, 2 * number + 1)
            self._copy(fds[2 * number], fds[2 * number + 1], f"rank{rank}.g{generation}.{kind}.log", label)
        about.update(pid=pid, rank=rank, generation=generation, events_file=_memory_events(pid))
        about["oom_kills"] = _oom_kills(about["events_file"])
        self._tell("start", about)
        with contextlib.suppress(OSError):
            self._ranks[os.pidfd_open(pid)] = about
        return True

    def _shorten(self, fds: list[int], number: int) -> None:
        """Bypass the launcher's copying of a rank's stream, so that job.*.log has only the launcher's output."""
        status = os.fstat(fds[number])
        out = self._outs.get((status.st_dev, status.st_ino))
        if out is not None:
            os.close(fds[number])
            fds[number] = os.dup(out)

    def _ended(self, fd: int, status: int | None) -> None:
        about = self._ranks.pop(fd)
        os.close(fd)
        is_bad = status != 0
        self._release()  # the launcher must see this death before any other
        if is_bad and not self._did_hold and self._launcher and self._ranks:
            # First of all: torchrun polls every 0.1 s, and then ends the other ranks.
            self._did_hold = True
            self._hold(about["pid"])
        kills = _oom_kills(about["events_file"])
        oom = kills is not None and about["oom_kills"] is not None and kills > about["oom_kills"]
        self._tell("end", {**about, "status": status, "oom": oom})

    def _hold(self, ended: int) -> None:
        """Stop the launcher, which would end the other ranks, while distdiag reads their stacks.

        The event is written first, as distdiag wakes up when the launcher stops. The ranks keep running: a SIGTERM sent
        to a rank that is stopped or just resuming may reach a thread where Python overlooks it.
        """
        self._tell("held", {"pid": ended})
        with contextlib.suppress(OSError):
            os.kill(self._launcher, signal.SIGSTOP)
            self._held_until = time.monotonic() + _HELD_S

    def _release(self) -> None:
        if self._held_until:
            self._held_until = 0.0
            with contextlib.suppress(OSError):
                os.kill(self._launcher, signal.SIGCONT)

    def _tell(self, event: str, about: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):
            line = {"event": event, "at": time.time(), **about}
            _write_all(self._events, json.dumps(line).encode() + b"\n")


def _exit_status(pidfd: int, pid: int) -> int | None:
    """Return the exit status of an ended process, negative for a signal; None if its parent reaped it first."""
    raw = _reaped_status(pidfd)
    if raw is None:  # not reaped yet, or an older kernel: a zombie's last field, proc(5)
        fields = machine.read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        raw = int(fields[49]) if len(fields) > 49 and fields[0] == "Z" else _reaped_status(pidfd)
    return None if raw is None else os.waitstatus_to_exitcode(raw)


def _reaped_status(pidfd: int) -> int | None:
    """Return the wait status of a process that its parent has reaped, from Linux 6.15 on; else None."""
    info = bytearray(struct.pack("Q", _PIDFD_INFO_EXIT) + b"\0" * 56)
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        if struct.unpack_from("Q", info)[0] & _PIDFD_INFO_EXIT:
            return int(struct.unpack_from("i", info, 60)[0])
    return None


def _memory_events(pid: int) -> str:
    """Return the file with the OOM kill counter of a process's cgroup, or ""."""
    for line in machine.read_text(f"/proc/{pid}/cgroup").splitlines():
        controllers, path = [*line.split(":", 2), "", ""][1:3]
        path = path.rstrip("/")
        candidates = {
            "": f"/sys/fs/cgroup{path}/memory.events",
            "memory": f"/sys/fs/cgroup/memory{path}/memory.oom_control",
        }
        if controllers in candidates and os.path.exists(candidates[controllers]):
            return candidates[controllers]
    return ""


def _oom_kills(path: str) -> int | None:
    match = re.search(r"^oom_kill (\d+)", machine.read_text(path), re.MULTILINE) if path else None
    return int(match[1]) if match else None


def main() -> None:
    """Record as configured by argv[1]."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    recorder = Recorder(json.loads(sys.argv[1]))
    recorder.run()
    recorder.leave()
