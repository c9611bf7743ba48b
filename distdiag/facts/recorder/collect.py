"""Collects a node's flight recorder dumps. With a trigger, its ranks are first asked to write dumps.

Each dump is read by a child with bounded memory and time, so malicious content can only harm the child.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import resource
import select
import signal
import stat
import time
from dataclasses import dataclass, field, replace

from distdiag.facts import machine, programs
from distdiag.facts.recorder.read_dump import Dump, NotADump, Unreadable, read
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MOST_FILES = 65_536
_MOST_BYTES = 2**30
_MEMORY_BYTES = 3 * 2**30
_FILE_S = 60.0
_CHILDREN = 8
_FILES_A_CHILD = 4
_PIPE_VARIABLES = ("TORCH_FR_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
_DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
NO_READER = "no process reads it"
DUMP_DEFAULTS = ("/tmp/nccl_trace_rank_", "~/.cache/torch/comm_lib_trace_rank_")


@record
class Ask:
    """`paths`: files and folders. `trigger`: request new dumps first, waiting for at most `wait_s`."""

    paths: Sequence[str]
    trigger: bool = False
    wait_s: float = 0.0


@record
class Unread:
    """A file without a readable dump. `kind`: "truncated", "code", "damaged", "missing" or "other"."""

    path: str
    kind: str
    why: str


@record
class Pipe:
    """A pipe used to request a rank's dump. `answer`: "dumped", NO_READER, "no dump arrived", an error."""

    path: str
    rank: int
    answer: str


@record
class NodeDumps:
    """All dumps of a node. `others`: number of other files in the folders."""

    host: str
    dumps: tuple[Dump, ...] = ()
    unread: tuple[Unread, ...] = ()
    pipes: tuple[Pipe, ...] = ()
    others: int = 0


def facts() -> NodeDumps:
    """Return the host name only; `more` reads the dumps."""
    return NodeDumps(machine.host_name())


def more(ask: Ask, tell: Callable[[NodeDumps], None]) -> None:
    """Read the dumps."""
    host = machine.host_name()
    paths, unread = list(ask.paths), []
    pipes: list[Pipe] = []
    if ask.trigger:
        pipes, written = _trigger(paths, ask.wait_s)
        paths = [*(path for path in paths if not os.path.isdir(path)), *written] if written else paths
    files, missing = _files(paths)
    unread += [Unread(path, "missing", why) for path, why in missing]
    others = 0
    for found in _read_all(files):
        if isinstance(found, Dump):
            tell(NodeDumps(host, dumps=(found,)))
        elif found.kind == "other" and found.path not in ask.paths:
            others += 1
        else:
            unread.append(found)
    tell(NodeDumps(host, unread=tuple(unread), pipes=tuple(pipes), others=others))


def _files(paths: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    found: dict[str, None] = {}
    missing = []
    for path in paths:
        try:
            if os.path.isdir(path):
                for folder, _, names in os.walk(path):
                    found.update((os.path.join(folder, name), None) for name in sorted(names) if name[0] != ".")
            elif stat.S_ISREG(os.stat(path).st_mode):
                found[path] = None
            else:
                missing.append((path, "neither a file nor a directory"))
        except OSError as error:
            missing.append((path, error.strerror or str(error)))
    return list(found)[:_MOST_FILES], missing


def _read_all(files: Sequence[str]) -> Iterator[Dump | Unread]:
    """Read files in children."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    count = max(1, min(processors, _CHILDREN, -(-len(files) // _FILES_A_CHILD)))
    children = [_Child(files[number::count]) for number in range(count) if files[number::count]]
    try:
        while children:
            ready, _, _ = select.select([child.pipe for child in children], [], [], 1.0)
            for child in list(children):
                if child.pipe in ready:
                    yield from child.answers()
                elif child.is_late():
                    child.kill()
                if not child.left:
                    children.remove(child)
    finally:
        for child in children:
            child.kill()
            child.end()


class _Child:
    """Reads some files in a child process, a line of JSON for each; if it dies, its current file is damaged."""

    def __init__(self, files: Sequence[str]) -> None:
        self.left = list(files)
        self._start()

    def _start(self) -> None:
        self.pipe, theirs = os.pipe()
        self._data, self._since, self._late = bytearray(), time.monotonic(), False
        self._pid = os.fork()
        if not self._pid:
            try:
                _work(self.left, theirs)
            finally:
                os._exit(0)
        os.close(theirs)

    def is_late(self) -> bool:
        self._late = time.monotonic() - self._since > _FILE_S
        return self._late

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)

    def end(self) -> None:
        os.close(self.pipe)
        with contextlib.suppress(OSError):
            os.waitpid(self._pid, 0)

    def answers(self) -> Iterator[Dump | Unread]:
        data = os.read(self.pipe, 2**20)
        self._data += data
        if b"\n" in data:
            *lines, self._data = self._data.split(b"\n")
            for line in lines:
                self._since = time.monotonic()
                self.left.pop(0)
                fields = json.loads(line)
                yield (Dump if "form" in fields else Unread)(**fields)
        if data and self.left:
            return
        self.end()
        if self.left:
            why = "reading it timed out" if self._late else "it crashed the reader process"
            yield Unread(self.left.pop(0), "damaged", why)
        if self.left:
            self._start()


def _work(files: Sequence[str], pipe: int) -> None:
    faulthandler.disable()  # a crash of this process is expected
    programs.die_with_parent()
    gc.disable()  # the objects of a dump live until it is read; scanning these repeatedly takes ten times as long
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int((machine.read_text("/proc/self/statm").split() or ["0"])[0]) * resource.getpagesize()
    limit = used + _MEMORY_BYTES
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    for path in files:
        data = json.dumps(vars(_one(path))).encode() + b"\n"
        while data:
            data = data[os.write(pipe, data) :]


def _one(path: str) -> Dump | Unread:
    try:
        # Opening a FIFO in place of a file would block.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise NotADump
            if status.st_size > _MOST_BYTES:
                return Unread(path, "damaged", f"larger than {_MOST_BYTES >> 20} MiB")
            data = file.read(status.st_size)
        return replace(read(data or b""), path=path, modified_s=status.st_mtime)
    except NotADump:
        return Unread(path, "other", "not a flight recorder dump")
    except Unreadable as error:
        kind = "code" if error.is_code else "truncated" if error.truncated else "damaged"
        return Unread(path, kind, str(error))
    except OSError as error:
        return Unread(path, "damaged", f"cannot be read: {error.strerror}")
    except (MemoryError, RecursionError) as error:
        return Unread(path, "damaged", f"it needs too much memory: {type(error).__name__}")


@dataclass
class _Asked:
    """A pipe written to, and the paths where the dump may appear."""

    path: str
    rank: int
    dumps: tuple[str, ...]
    answer: str = ""
    came: str = ""
    before: dict[str, int] = field(default_factory=dict)


def _trigger(paths: Sequence[str], wait_s: float) -> tuple[list[Pipe], list[str]]:
    """Request dumps from all ranks here with a pipe open, and wait until all are written."""
    asked = [*_pipes_of_processes(), *_pipes_in(paths)]
    for pipe in asked:
        pipe.before = {path: _written_ns(path) for path in pipe.dumps}
        pipe.answer = _ring(pipe.path)
    until = time.monotonic() + wait_s
    sizes: dict[str, int] = {}
    while time.monotonic() < until:
        waiting = [pipe for pipe in asked if not pipe.answer]
        for pipe in waiting:
            for path in pipe.dumps:
                if _written_ns(path) > pipe.before[path]:
                    size = os.stat(path).st_size
                    if sizes.get(path) == size > 0:  # it stopped growing
                        pipe.answer, pipe.came = "dumped", path
                    sizes[path] = size
        if not waiting:
            break
        time.sleep(0.2)
    found = [Pipe(pipe.path, pipe.rank, pipe.answer or "no dump arrived") for pipe in asked]
    return found, [pipe.came for pipe in asked if pipe.came]


def _ring(path: str) -> str:
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return "not a pipe"
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        return NO_READER if error.errno == 6 else error.strerror or "cannot be opened"
    try:
        os.write(descriptor, b"1\n")
    except OSError as error:
        return error.strerror or "cannot be written"
    finally:
        os.close(descriptor)
    return ""


def _pipes_of_processes() -> Iterator[_Asked]:
    """Find the ranks here with a pipe in the environment, which helpers of a rank share."""
    seen = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                pairs = (word.partition(b"=") for word in file.read(2**20).split(b"\0"))
                variables = {
                    key.decode(): os.fsdecode(value)
                    for key, _, value in pairs
                    if key.startswith((b"TORCH_", b"RANK", b"HOME", b"SLURM_PROCID", b"OMPI_COMM_WORLD_RANK"))
                }
        except (OSError, UnicodeDecodeError):
            continue
        prefix = next((variables[key] for key in _PIPE_VARIABLES if variables.get(key)), "")
        rank = next(
            (variables[key] for key in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK") if key in variables), ""
        )
        if not prefix or not rank.isdigit() or (prefix, rank) in seen:
            continue
        seen.add((prefix, rank))
        home = variables.get("HOME", "~")
        prefixes = [variables[key] for key in _DUMP_VARIABLES if variables.get(key)] or DUMP_DEFAULTS
        dumps = tuple(each.replace("~", home, 1) + rank for each in prefixes)
        yield _Asked(f"{prefix}{rank}.pipe", int(rank), dumps)


def _pipes_in(paths: Sequence[str]) -> Iterator[_Asked]:
    """Find the pipes made by distdiag.dump_flight_recorder; beside each is its dump, of the same name."""
    for path in paths:
        for name in sorted(os.listdir(path)) if os.path.isdir(path) else ():
            stem, _, end = name.rpartition(".")
            digits = stem[len(stem.rstrip("0123456789")) :]
            if end == "pipe" and digits:
                yield _Asked(os.path.join(path, name), int(digits), (os.path.join(path, stem),))


def _written_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
