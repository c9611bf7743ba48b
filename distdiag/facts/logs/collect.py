"""Reads logs on their node in blocks: files, folders, compressed files and pipes; only events leave the node."""

from __future__ import annotations

import os
import re
import select
import stat
import sys
from dataclasses import replace

from distdiag.facts import machine
from distdiag.facts.logs.demux import LONGEST_LINE, Demux, Stream
from distdiag.facts.logs.scan import Event, NcclRank, Scan
from distdiag.facts.packed_files import CannotUnpack, Packing, packing_of, stream
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from distdiag.facts.logs.line_patterns import Rows

_BLOCK = 1 << 18
_MOST_FILES = 20_000
_DEEP = 8
_WAIT_FOR_WRITER_S = 5.0
_UNPACK_S = 3600.0
_BINARY_SHARE = 0.1
_SENT = 500
_NOT_LOGS = (".py", ".pyc", ".so", ".pt", ".pth", ".bin", ".safetensors", ".npy", ".json", ".yaml", ".pkl", ".md")
_MAGIC = (b"\x7fELF", b"PK\x03\x04", b"\x89PNG", b"\x93NUMPY")
_PATH_ATTEMPT = re.compile(r"(?:^|/)attempt_(\d{1,6})/(\d{1,6})/(?:std(?:out|err)\.log|error\.json)$")
_PATH_RANK = re.compile(r"(?:^|[._-])rank[._-]?(\d{1,6})(?:[._-]|$)|(?:^|/)(\d{1,6})/(?:stdout|stderr)$")


@record
class Ask:
    """`paths`: files and folders; `patterns`: rows of known failures."""

    paths: Sequence[str]
    patterns: Rows


@record
class LogFile:
    """One file. `error`: why it was not read completely; `forms`: the launchers' prefixes on its lines."""

    path: str
    bytes: int = 0
    lines: int = 0
    forms: tuple[str, ...] = ()
    joined: int = 0
    cut: int = 0
    error: str = ""
    progress: int = 0
    """The last line but two that reports progress, 0 with fewer than three."""
    last: str = ""
    """The last line with words."""
    rank: int | None = None
    """Its only writer, by its name or by the process that has it open."""


@record
class NodeLogs:
    """The reports of one node's logs, or a part of them; streams and files are numbered through all parts."""

    host: str
    files: tuple[LogFile, ...] = ()
    streams: tuple[Stream, ...] = ()
    events: tuple[Event, ...] = ()
    comms: tuple[NcclRank, ...] = ()
    dropped: int = 0

    def parts(self) -> Iterator[NodeLogs]:
        """Yield parts small enough for a message: all in the first one but events."""
        yield replace(self, events=self.events[:_SENT])
        for start in range(_SENT, len(self.events), _SENT):
            yield NodeLogs(self.host, events=self.events[start : start + _SENT])


class Unreadable(Exception):
    """The file cannot be read as a log; the text is the reason."""


def facts() -> NodeLogs:
    """Answer at once, as reading logs exceeds the time limit of facts."""
    return NodeLogs(machine.host_name())


def more(ask: Ask, tell: Callable[[NodeLogs], None]) -> None:
    """Read logs."""
    reader = Reader(ask.patterns)
    for path in ask.paths:
        reader.read(path)
    for part in reader.found().parts():
        tell(part)


class Reader:
    """Reads paths one after another; `found` is available at any time. `tail`: see blocks."""

    def __init__(self, patterns: Rows, *, tail: int = 0) -> None:
        self.scan = Scan(patterns)
        self._files: list[LogFile] = []
        self._tail = tail

    def found(self) -> NodeLogs:
        """Return the results so far."""
        scan = self.scan
        return NodeLogs(
            machine.host_name(),
            tuple(self._files),
            tuple(scan.streams),
            tuple(scan.events),
            tuple(scan.comms.values()),
            scan.dropped,
        )

    def read(self, path: str) -> None:
        """Read a file, a pipe, or all logs of a folder; "-" is the standard input."""
        for name, error in files_of(path):
            self._files.append(LogFile(name, error=error))
            if not error:
                self._file(name, len(self._files) - 1, of_path(name))

    def read_output(self, path: str, open_as: str, rank: int | None, generation: int = 0) -> None:
        """Read a file opened under a different name; `rank`: its only writer, if known."""
        own = of_path(path)
        own.generation = own.generation or generation
        own.rank = own.rank if rank is None else rank
        self._files.append(LogFile(path))
        self._file(open_as, len(self._files) - 1, own)
        self._files[-1] = replace(self._files[-1], path=path)

    def unreadable(self, path: str, error: str) -> None:
        """Report a log that could not be read completely."""
        self._files.append(LogFile(path, error=error))

    def _file(self, path: str, number: int, own: Stream) -> None:
        demux = Demux()
        own.file = number
        reading = self.scan.file(number, demux, own)
        size, error = 0, ""
        cuts = [0]
        try:
            for block in blocks(path, cuts, tail=self._tail):
                if not size and is_binary(block):
                    raise Unreadable("binary, not a log")
                size += len(block)
                reading.block(block)
        except (Unreadable, CannotUnpack) as reason:
            error = str(reason)
        except OSError as reason:
            error = reason.strerror or str(reason)
        except ValueError as reason:
            error = str(reason)
        finally:
            reading.finish()
            forms = tuple(form.name for form in demux.forms)
            self._files[number] = LogFile(
                path,
                size,
                reading.lines,
                forms,
                demux.joined,
                cuts[0],
                error,
                reading.progress,
                reading.last,
                own.rank,
            )


def files_of(path: str) -> Iterator[tuple[str, str]]:
    """Yield a path's logs, with the error of each unreadable one. Pipes in a folder are not opened."""
    if path == "-" or not os.path.isdir(path):
        yield path, "" if path == "-" or os.path.exists(path) else "no such file"
        return
    count = 0
    top = path.rstrip("/").count("/")
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if folder.count("/") - top >= _DEEP:
            folders[:] = []
        for name in sorted(names):
            whole = os.path.join(folder, name)
            if name.startswith(".") or name.endswith(_NOT_LOGS):
                continue
            count += 1
            if count > _MOST_FILES:
                yield path, f"more than {_MOST_FILES} files: the rest was not read"
                return
            try:
                mode = os.stat(whole).st_mode
            except OSError as error:
                yield whole, error.strerror or str(error)
                continue
            yield whole, "" if stat.S_ISREG(mode) else "not a regular file"
    if not count:
        yield path, "no file in this folder"


def of_path(path: str) -> Stream:
    """Derive rank and attempt from a path: torchrun's --log-dir, and names with `rank3`."""
    stream = Stream()
    attempt, named = _PATH_ATTEMPT.search(path), _PATH_RANK.search(path)
    if attempt:
        stream.generation, stream.local = int(attempt[1]), int(attempt[2])
        stream.label = f"attempt {attempt[1]}, local rank {attempt[2]}"
    elif named:
        stream.rank = int(named[1] or named[2])
    return stream


def is_binary(start: bytes) -> bool:
    """Return whether these first bytes are binary. Some zeros are allowed: a file system may leave holes in a log."""
    start = start[:8192]
    return start.startswith(_MAGIC) or start.count(b"\0") > _BINARY_SHARE * len(start)


def blocks(path: str, cuts: list[int], *, tail: int = 0) -> Iterator[bytes]:
    """Yield blocks of whole lines; an overlong line is cut, and counted in cuts[0].

    `tail`: read only that many bytes at the end of an uncompressed file; 0: all.

    Raises:
        OSError, CannotUnpack, Unreadable, ValueError: it cannot be read completely.
    """
    rest, skip = b"", False
    for piece in _bytes(path, tail):
        if skip:
            _, newline, piece = piece.partition(b"\n")
            if not newline:
                continue
            skip = False
        data = rest + piece if rest else piece
        end = data.rfind(b"\n") + 1
        if end:
            yield data[:end]
        rest = data[end:]
        if len(rest) > 4 * LONGEST_LINE:
            cuts[0] += 1
            yield rest[:LONGEST_LINE] + b"\n"
            rest, skip = b"", True
    if rest:
        yield rest


def _bytes(path: str, tail: int) -> Generator[bytes, None, None]:
    if path == "-":
        yield from _piped(sys.stdin.fileno())
        return
    mode = os.stat(path).st_mode
    if stat.S_ISFIFO(mode):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not select.select([fd], [], [], _WAIT_FOR_WRITER_S)[0]:
                raise Unreadable(f"a pipe without a writer for {_WAIT_FOR_WRITER_S:g} s")
            os.set_blocking(fd, True)
            yield from _piped(fd)
        finally:
            os.close(fd)
        return
    if not stat.S_ISREG(mode):
        raise Unreadable("not a regular file")
    if packing_of(path) is not Packing.NONE:
        pieces = stream(path, packing_of(path), _UNPACK_S)
        try:
            yield from pieces
        finally:
            pieces.close()
        return
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        read = 0
        if tail and size > tail:
            read = file.seek(size - tail)
        # Stop at the size at opening, as the log may grow; files of /proc and /sys have no size.
        while read < size or not size:
            piece = file.read(_BLOCK)
            if not piece:
                return
            read += len(piece)
            yield piece


def _piped(fd: int) -> Iterator[bytes]:
    while True:
        piece = os.read(fd, _BLOCK)
        if not piece:
            return
        yield piece
