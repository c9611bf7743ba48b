"""Parser of pasted `py-spy dump` output, text or JSON, of one process or many, labelled or not.

Labels are the line prefixes of `srun -l`, pdsh and clush ("rank3: ", "17: ", "node07: "). A rank is read only from an
explicit label or file name; a number of `srun -l` is a task, and counts as rank if each has one process.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NotRequired, TypedDict

from distdiag.cluster.checked_json import InvalidData, read_json
from distdiag.facts.process.rank_identity import Identity
from distdiag.facts.stacks.stack_types import LOCALS, Frame, Sample, Thread, counters_and_peer, read_threads
from distdiag.facts.text import printable
from distdiag.files import as_text
from distdiag.fold import by_key
from distdiag.jobs.collect import Process, Processes, Watched
from distdiag.jobs.roles import DUMPED
from distdiag.jobs.types import NodePicture
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_STARTS = ("Process ", "Python v", "Thread ")
_IDS = re.compile(r"^(Process|Thread) (?:0x)?[0-9A-Fa-f]+", re.MULTILINE)
_PROCESS = re.compile(r"^Process (\d{1,10}): ?(.*)$")
_THREAD = re.compile(r'^Thread (?:0x)?([0-9A-Fa-f]+)(?: \(([^)]*)\))?(?:: "(.*)")?')
_RANK = re.compile(r"rank[_.\- ]?(\d{1,7})(?!\d)", re.IGNORECASE)
_LOCAL = re.compile(r"^\s{8,}(\w+): (-?\d{1,12})$")
_WHERE = re.compile(r"^(.*):(\d{1,9})$")


class _DumpedLocal(TypedDict):
    name: str
    repr: str | None


class _DumpedFrame(TypedDict):
    name: str
    filename: str
    line: int
    locals: NotRequired[list[_DumpedLocal] | None]


class _DumpedThread(TypedDict):
    """One thread of `py-spy dump --json`."""

    pid: int
    frames: list[_DumpedFrame]
    thread_name: NotRequired[str | None]
    os_thread_id: NotRequired[int | None]
    active: NotRequired[bool]
    owns_gil: NotRequired[bool]


@record
class Dump:
    """One process of a dump; `label` is the prefix of its lines, or the file's name."""

    label: str
    labelled: bool
    pid: int
    command: str
    threads: tuple[Thread, ...]
    complaint: str


def of_file(data: bytes, path: Path) -> list[Dump]:
    """Parse a file. Raises InvalidData."""
    found = parse(as_text(data), path.name)
    if not found:
        raise InvalidData("contains no py-spy dump")
    return found


def parse(text: str, name: str) -> list[Dump]:
    """Parse one text; empty if it contains no dump."""
    text = text.lstrip("\ufeff").replace("\r\n", "\n")
    if text.lstrip().startswith("["):
        return _json(text, name)
    first = next((line for line in text.splitlines() if line.strip()), "")
    if first.startswith(_STARTS) or not _is_labelled(text):
        return _blocks(text, name, labelled=False, known={})
    known: dict[str, tuple[tuple[Thread, ...], str]] = {}
    lines = _by_label(text)
    return [dump for label, own in lines.items() for dump in _blocks("\n".join(own), label, labelled=True, known=known)]


def _by_label(text: str) -> dict[str, list[str]]:
    """Group labelled lines by label; lines of one label are mostly adjacent."""
    lines: dict[str, list[str]] = {}
    start, skip = "\0", 0
    own: list[str] = []
    for line in text.split("\n"):
        if line.startswith(start):
            own.append(line[skip:])
            continue
        label, found, rest = line.partition(": ")
        if not found:
            label, rest = line.rstrip().rstrip(":"), ""
        if label not in lines:
            if not rest.startswith(_STARTS):
                continue
            lines[label] = []
        own, start, skip = lines[label], label + ": ", len(label) + 2
        own.append(rest)
    return lines


def as_nodes(dumps: Sequence[Dump]) -> list[NodePicture]:
    """Convert dumps to nodes, with the ranks given by labels; other labels are assumed to be host names."""
    ranks = _ranks(dumps)
    size = max((rank for rank in ranks if rank is not None), default=-1) + 1
    pairs = zip(dumps, ranks, strict=True)
    by_host = by_key((dump.label if dump.labelled and rank is None else "", (dump, rank)) for dump, rank in pairs)
    return [_node(host, own, size) for host, own in by_host.items()]


def _is_labelled(text: str) -> bool:
    head = text[:20_000].split("\n")
    return any(line.partition(": ")[2].startswith(_STARTS) for line in head)


def _ranks(dumps: Sequence[Dump]) -> list[int | None]:
    matches = [_RANK.search(dump.label) for dump in dumps]
    labels = [dump.label for dump in dumps]
    if len(set(labels)) < len(labels):
        return [None] * len(dumps)  # several processes under one label: it names a node
    if all(dump.labelled and dump.label.isdigit() and len(dump.label) < 8 for dump in dumps):
        return [int(label) for label in labels]
    return [int(match[1]) if match is not None else None for match in matches]


def _blocks(text: str, label: str, *, labelled: bool, known: dict[str, tuple[tuple[Thread, ...], str]]) -> list[Dump]:
    """Parse the processes of one text; equal stacks of different processes are parsed once."""
    if text.startswith("Process ") and "\nProcess " not in text:
        starts = [0]
    else:
        starts = [match.start() for match in re.finditer(r"^Process \d+", text, re.MULTILINE)]
    if not starts:
        if not text.lstrip().startswith(_STARTS):
            return []
        starts = [0]
    found = []
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        block = text[start:end]
        head = _PROCESS.match(block.split("\n", 1)[0])
        body = block.partition("\n")[2]
        one_thread = head is not None and body.count("\nThread ") == 1
        key = body.replace(f"\nThread {head[1]} ", "\nThread ") if head and one_thread else _IDS.sub(r"\1", body)
        if key not in known:
            known[key] = _threads(block)
        threads, complaint = known[key]
        pid = int(head[1]) if head is not None else (threads[0].os_thread_id if threads else 0)
        found.append(Dump(label, labelled, pid, head[2] if head is not None else "", threads, complaint))
    return found


def _threads(block: str) -> tuple[tuple[Thread, ...], str]:
    """Parse the threads of one process, main thread first, and py-spy's error message."""
    found: list[Thread] = []
    complaint = ""
    head: re.Match[str] | None = None
    frames: list[Frame] = []
    numbers: list[list[tuple[str, int]]] = []
    for line in [*block.split("\n"), "Thread 0"]:
        started = _THREAD.match(line)
        if started is not None:
            if head is not None:
                found.append(_thread(head, frames, numbers))
            head, frames, numbers = started, [], []
        elif line.startswith("        "):
            local = _LOCAL.match(line)
            if local is not None and frames and LOCALS.fullmatch(local[1]):
                numbers[-1].append((local[1], int(local[2])))
        elif line.startswith("    ") and line.endswith(")"):
            frames.append(_frame(line))
            numbers.append([])
        elif line.startswith("Error"):
            complaint = line.strip()
    found.sort(key=lambda thread: thread.name != "MainThread")
    return tuple(found), complaint


def _thread(head: re.Match[str], frames: list[Frame], numbers: list[list[tuple[str, int]]]) -> Thread:
    flags = head[2] or ""
    text = head[1]
    counters, peer = counters_and_peer(
        [(frame.function, frame.file, tuple(own)) for frame, own in zip(frames, numbers, strict=True)]
    )
    return Thread(
        os_thread_id=int(text) if text.isdigit() and len(text) < 10 else 0,
        name=head[3] or "",
        active="active" in flags,
        owns_gil="gil" in flags,
        state="",
        frames=tuple(frames),
        counters=counters,
        peer=peer,
    )


def _frame(line: str) -> Frame:
    function, _, place = line.strip().rpartition(" (")
    function, place = printable(function), printable(place[:-1])
    found = _WHERE.match(place)
    return Frame(function, found[1], int(found[2])) if found is not None else Frame(function, place, 0)


def _json(text: str, name: str) -> list[Dump]:
    try:
        answer = read_json(text.encode("utf-8", "replace"), list[_DumpedThread])
    except InvalidData:
        return []
    by_pid = by_key((thread["pid"], thread) for thread in answer)
    return [Dump(name, False, pid, "", read_threads(own, {}), "") for pid, own in by_pid.items()]


def _node(host: str, dumps: Sequence[tuple[Dump, int | None]], size: int) -> NodePicture:
    processes, watched = [], []
    samples: dict[int, tuple[Sample, ...]] = {}
    for number, (dump, rank) in enumerate(dumps):
        pid = dump.pid or -number - 1
        place = Identity("saved dumps", rank, size, None, None) if rank is not None else None
        command = printable(dump.command)
        kind = "launcher" if "torchrun" in command or "torch.distributed.run" in command else ""
        parent = DUMPED if place is None else 0
        processes.append(Process(pid, parent, command=command, kind=kind, python=True, torch=True, place=place))
        if id(dump.threads) not in samples:
            samples[id(dump.threads)] = (_sample(dump),)
        watched.append(Watched(pid, samples[id(dump.threads)], ()))
    facts = Processes(host, may_trace=True, processes=tuple(processes))
    return NodePicture(host=host, processes=facts, watched=tuple(watched))


def _sample(dump: Dump) -> Sample:
    return Sample(
        status="ok" if dump.threads else "failed",
        reason="" if dump.threads else dump.complaint or "the dump contains no stack",
        state="",
        tracer=None,
        cpu_s=0.0,
        main_cpu_s=0.0,
        threads=dump.threads,
        standstill=(),
        native=False,
        gil_holder=None,
        at_s=0.0,
    )
