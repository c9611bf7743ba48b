"""Failures by rank, from the log events of all nodes: which stream belongs to which rank, and how events count."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distdiag.diagnosis.job_logs.types import Failure, number_in
from distdiag.knowledge import xids
from distdiag.knowledge.known_lines import known_lines
from distdiag.knowledge.logs import known_exception
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from distdiag.facts.logs.collect import LogFile, NodeLogs
    from distdiag.facts.logs.demux import Stream
    from distdiag.facts.logs.scan import Event, NcclRank
    from distdiag.knowledge.known_lines import KnownException, KnownLine

    Agent = tuple[str, int, str]
    LocalRank = tuple[str, int, str, int]

SIGNALS = {1: "SIGHUP", 2: "SIGINT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL"}
SIGNALS |= {11: "SIGSEGV", 15: "SIGTERM"}
_ENDING = ("SIGTERM", "SIGINT", "SIGHUP")
WRITER = re.compile(r"([\w.-]{1,200}):(\d{1,18}):\d{1,18} \[")
"""The start of NCCL's lines: host, pid."""
_CONNECTION = re.compile(r"Connection (?:closed|reset|refused)|[Bb]roken ?pipe|[Tt]imed out")
_OF_RANKS = re.compile(
    r"peer \[|gloo|nccl|NCCL|TCPStore|c10d|ProcessGroup|\bstore\b|Dist\w*Error|[Rr]endezvous|MPI|UCX"
)
_INSIDE = ("/torch/", "/multiprocessing/", "/deepspeed/", "/accelerate/commands/")
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
_AT_EXIT = (" in _run_finalizers", " in _exit_function", " in _remove_temp_dir", " in _finalize_join")
"""multiprocessing's exit functions: an exception in one is a result of the process ending."""
_COLLECTIVES = frozenset(
    (
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
        *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "recv"),
        *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "irecv", "isend"),
        *("send", "batch_isend_irecv"),
    )
)


@record(kw_only=True)
class Exit:
    """A rank's end as reported by a launcher.

    `code`: None if only the signal is known; `first`: reported as the first failure; `by_launcher`: the launcher killed
    the rank; `out_of_memory`: reported as the reason.
    """

    rank: int
    host: str
    generation: int
    code: int | None
    signal: str
    launcher: str
    first: bool
    at: float | None
    pid: int | None
    by_launcher: bool = False
    out_of_memory: bool = False

    @property
    def launcher_name(self) -> str:
        """The name of the reporting program."""
        return "torchrun" if self.launcher == "agent" else self.launcher

    @property
    def is_bad(self) -> bool:
        """Return whether the rank failed or was killed."""
        return bool(self.code or self.signal)


@dataclass(kw_only=True)
class Book:
    """All that the logs show of a job. `watchdog` and `status` lines by rank are judged in desync.py."""

    failures: list[Failure] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    watchdog: list[tuple[int, Event]] = field(default_factory=list)
    comms: list[NcclRank] = field(default_factory=list)
    ranks: dict[int, int] = field(default_factory=dict)
    """Number of lines by rank, for each rank with any trace."""
    hosts: dict[int, str] = field(default_factory=dict)
    nranks: int = 0
    generations: int = 1
    writers: set[int] = field(default_factory=set)
    """Ranks that wrote lines, in addition to launchers' reports."""
    has_nameless: bool = False
    """Some lines belong to ranks, but to which is unknown."""
    several_hosts: bool = False
    unnamed_codes: list[str] = field(default_factory=list)
    """Return codes that a launcher reports without a rank."""
    like: list[Failure] = field(default_factory=list)
    """Lines that resemble a failure but match no known pattern."""
    warnings: list[Failure] = field(default_factory=list)
    """Lines that report no failure but deserve attention."""
    last_words: dict[int, str] = field(default_factory=dict)
    """The last line of each stderr file written by one rank alone, by rank."""
    aborted: set[int] = field(default_factory=set)
    """Files in which srun reports that it kills the remaining tasks."""

    @property
    def world(self) -> int:
        """Return the number of ranks: the highest seen, or NCCL's nranks."""
        return max([self.nranks, *(rank + 1 for rank in self.ranks)])

    def note_host(self, rank: int, host: str, node: NodeLogs) -> None:
        """Record a rank's host. The host of the log file counts only if several hosts were read."""
        if host or self.several_hosts:
            self.hosts.setdefault(rank, host or node.host)


_NO_REASON = re.compile(r"\[W\d|\[rank\d+\]:\[W|warn|%\||^\s*(?:\[?INFO|DEBUG)", re.IGNORECASE)


def _is_of_errors(log: LogFile) -> bool:
    """Return whether a file is a rank's stderr and ends in more than a warning or progress bar."""
    name = log.path.rpartition("/")[2]
    return ("stderr" in name or ".output." in name) and bool(log.last) and not _NO_REASON.search(log.last)


def _last_words(node: NodeLogs, ranks: Sequence[int | None]) -> Iterator[tuple[int, str]]:
    """Yield the last line of each stderr file written by a single rank. `ranks`: those of the node's streams."""
    for file, log in enumerate(node.files):
        own = {rank for stream, rank in zip(node.streams, ranks, strict=True) if stream.file == file}
        own = own or {log.rank}  # without any event or tagged line
        if len(own) == 1 and (rank := own.pop()) is not None and _is_of_errors(log):
            yield rank, log.last


@record(kw_only=True)
class Round:
    """One generation of the job: the failures and exits of its ranks."""

    number: int
    failures: Sequence[Failure]
    exits: Sequence[Exit]
    book: Book

    @property
    def has_failed(self) -> bool:
        """Whether any failure is reported in this round."""
        return bool(self.failures or self.watchdog or any(exit_.is_bad for exit_ in self.exits))

    @property
    def watchdog(self) -> list[tuple[int, Event]]:
        """Return the watchdog lines of this generation, by rank."""
        return [(rank, event) for rank, event in self.book.watchdog if event.generation == self.number]

    def of(self, rank: int) -> list[Failure]:
        """Return the failures of a rank, in log order."""
        return [failure for failure in self.failures if failure.rank == rank]

    def exits_of(self, rank: int | None) -> list[Exit]:
        """Return the exits reported for a rank; summaries precede the agent's lines."""
        return [exit_ for exit_ in self.exits if exit_.rank == rank]


def make(nodes: Sequence[NodeLogs]) -> Book:
    """Combine the logs of all nodes."""
    book = Book(several_hosts=len(nodes) > 1)
    summary = _summary(nodes)
    for node in nodes:
        for comm in node.comms:
            book.comms.append(comm)
            book.nranks = max(book.nranks, comm.nranks or 0)
    locals_ = _locals(nodes)
    pids = {
        (comm.host, comm.pid): comm.rank for comm in book.comms if comm.rank is not None and comm.nranks == book.nranks
    }
    for node in nodes:
        mixed = _mixed(node)
        ranks = [
            None if stream.by_path and stream.file in mixed else _rank(stream, node.host, summary, locals_)
            for stream in node.streams
        ]
        for stream, rank in zip(node.streams, ranks, strict=True):
            book.has_nameless |= rank is None and stream.local is not None
            if rank is not None:
                book.ranks[rank] = book.ranks.get(rank, 0) + stream.lines
                book.writers.add(rank)
                book.note_host(rank, stream.host, node)
        book.last_words.update(_last_words(node, ranks))
        for event in node.events:
            _add(book, node, event, ranks[event.stream] if event.stream < len(ranks) else None, pids)
    for exit_ in book.exits:
        book.ranks.setdefault(exit_.rank, 0)
        if exit_.host and exit_.host not in ("localhost",):
            book.hosts.setdefault(exit_.rank, exit_.host)
    for rank, _ in book.watchdog:
        book.ranks.setdefault(rank, 0)
    _merge_last(book)
    _mark_ended(book, nodes)
    return book


def _mixed(node: NodeLogs) -> set[int]:
    """Return the files named after one rank that contain lines of others."""
    named = {stream.file: stream.rank for stream in node.streams if stream.by_path}
    lines = [(stream.file, stream.rank) for stream in node.streams if not stream.by_path]
    lines += [
        (node.streams[event.stream].file, event.rank)
        for event in node.events
        if event.id == "watchdog" and event.stream < len(node.streams)
    ]
    return {file for file, rank in lines if file in named and rank not in (None, named[file])}


def _mark_ended(book: Book, nodes: Sequence[NodeLogs]) -> None:
    """Mark exits caused by the launcher: by signal, or from its own report."""
    ended = set[int]()
    for node in nodes:
        for event in node.events:
            if event.id == "signalled-by-launcher":
                pid = number_in(event.groups.get("pid"))
                ended.update(() if pid is None else (pid,))
    book.exits = [
        replace(
            exit_, by_launcher=exit_.by_launcher or exit_.signal in _ENDING or (exit_.pid in ended and not exit_.first)
        )
        for exit_ in book.exits
    ]


def _summary(nodes: Iterable[NodeLogs]) -> dict[LocalRank, int]:
    """Map file, host and local rank to the rank, from torchrun's summaries."""
    found = {}
    for node in nodes:
        for event in node.events:
            groups = event.groups
            if event.id == "exit" and groups.get("rank") and groups.get("local"):
                local, rank = number_in(groups["local"]), number_in(groups["rank"])
                if local is not None and rank is not None:
                    file = node.streams[event.stream].file if event.stream < len(node.streams) else -1
                    found[node.host, file, groups.get("host", ""), local] = rank
    return found


def _agent_of(node: str, stream: Stream) -> Agent:
    """Return the torchrun agent of a stream: one per console (or per host on it), one per --log-dir."""
    return node, stream.file if stream.label else -1, stream.host


def _locals(nodes: Sequence[NodeLogs]) -> dict[Agent, dict[int, set[int]]]:
    """Return the ranks seen under each local rank of an agent."""
    found: dict[Agent, dict[int, set[int]]] = {}
    for node in nodes:
        for stream in node.streams:
            if stream.local is not None:
                ranks = found.setdefault(_agent_of(node.host, stream), {}).setdefault(stream.local, set())
                ranks.update(() if stream.rank is None else (stream.rank,))
    return found


def _rank(
    stream: Stream, node: str, summary: dict[LocalRank, int], locals_: dict[Agent, dict[int, set[int]]]
) -> int | None:
    """Return the rank of a stream. A local rank equals the rank only if all lines are of one node."""
    if stream.rank is not None or stream.local is None:
        return stream.rank
    of_agent = locals_[_agent_of(node, stream)]
    ranks = of_agent[stream.local]
    if ranks:
        return next(iter(ranks)) if len(ranks) == 1 else None
    # The ranks of an agent are consecutive.
    first = {rank - local for local, ranks in of_agent.items() for rank in ranks}
    if len(first) == 1:
        return first.pop() + stream.local
    several = len(locals_) > 1
    moved = any(ranks - {local} for others in locals_.values() for local, ranks in others.items())
    same = {key: rank for key, rank in summary.items() if key[3] == stream.local}
    found = {rank for (host, file, _, _), rank in same.items() if stream.label and (host, file) == (node, stream.file)}
    found = found or {rank for (_, _, host, _), rank in same.items() if not several or host == stream.host}
    if found:
        return found.pop() if len(found) == 1 else None
    return None if several or moved or any(rank != key[3] for key, rank in summary.items()) else stream.local


def _add(book: Book, node: NodeLogs, event: Event, rank: int | None, pids: dict[tuple[str, int], int]) -> None:
    generation = max(event.generation, node.streams[event.stream].generation if node.streams else 0)
    if event.id == "exit":
        if event.groups["launcher"] == "deepspeed":
            book.unnamed_codes.append(event.groups["code"])
        aborted = node.streams[event.stream].file in book.aborted and event.groups["launcher"] == "srun"
        exits = _exits(event, rank, generation, _is_alone(node))
        book.exits += [replace(exit_, by_launcher=aborted and exit_.signal == "SIGKILL") for exit_ in exits]
        book.generations = max(book.generations, generation + 1)
        return
    stream = node.streams[event.stream] if event.stream < len(node.streams) else None
    who = event.rank if event.rank is not None and not (stream and stream.by_path and rank is None) else rank
    if event.id in ("watchdog", "status"):
        # The stream's own rank takes precedence: lines of a process group may show ranks within the group.
        who = rank if rank is not None else event.rank
        if who is not None:
            book.watchdog.append((who, replace(event, generation=generation)))
            book.ranks.setdefault(who, 0)
            book.generations = max(book.generations, generation + 1)
            return
        event = replace(event, id="nccl-torn-down")
    if who is None and ":" in event.text:
        who = _by_pid(event.text, pids)
    if event.id == "slurm-cancelled":
        book.aborted.add(node.streams[event.stream].file)
    failure = _failure(node, event, who, generation)
    if failure is not None:
        _keep(book, node, failure, is_like=event.id == "like")


def _keep(book: Book, node: NodeLogs, failure: Failure, *, is_like: bool) -> None:
    """File a failure under failures, warnings or lookalikes."""
    generation, who = failure.generation, failure.rank
    if is_like:
        book.like.append(failure)
    elif failure.role == "warning":
        book.warnings.append(failure)
    else:
        book.failures.append(failure)
        book.generations = max(book.generations, generation + 1)
        if who is not None:
            book.ranks.setdefault(who, 0)
            book.note_host(who, failure.host, node)


def _by_pid(text: str, pids: dict[tuple[str, int], int]) -> int | None:
    """Find the rank by the host and pid in NCCL's own lines; its INFO lines map these to ranks."""
    match = WRITER.search(text)
    return pids.get((match[1], int(match[2]))) if match else None


def _is_alone(node: NodeLogs) -> bool:
    """Return whether all lines are of one node, so that local ranks are ranks."""
    shared = any(
        stream.rank is not None and stream.local is not None and stream.rank != stream.local for stream in node.streams
    )
    moved = any(
        event.groups["rank"] != event.groups["local"]
        for event in node.events
        if event.id == "exit" and event.groups.get("rank") and event.groups.get("local")
    )
    return len({stream.host for stream in node.streams}) <= 1 and not shared and not moved


def _exits(event: Event, rank: int | None, generation: int, alone: bool) -> list[Exit]:
    groups = event.groups
    if groups.get("ranks"):
        ranks = _unfold(groups["ranks"])
    else:
        own = number_in(groups.get("rank") or (groups.get("local") if alone else None))
        ranks = [] if own is None else [own]
    code = number_in(groups.get("code"))
    signal = SIGNALS.get(number_in(groups.get("signal")) or 0, groups.get("signal", ""))
    if groups.get("words"):
        words = groups["words"]
        signal = {"Killed": "SIGKILL", "Terminated": "SIGTERM", "Out Of Memory": "SIGKILL"}.get(words.strip(), "")
        signal = signal or ("SIGSEGV" if "egmentation" in words else "SIGABRT" if "bort" in words else words.strip())
    if code is not None and (code < 0 or 128 < code < 160):
        number = -code if code < 0 else code - 128
        signal = SIGNALS.get(number, f"signal {number}")
    pid = number_in(groups.get("pid"))
    return [
        Exit(
            rank=number,
            host=groups.get("host", ""),
            generation=generation,
            code=code,
            signal=signal,
            launcher=groups.get("launcher", ""),
            first=bool(groups.get("first")) or groups.get("launcher") == "mpirun",
            at=event.at,
            pid=pid,
            out_of_memory=groups.get("words", "").strip() == "Out Of Memory",
        )
        for number in ranks
    ]


def _failure(node: NodeLogs, event: Event, rank: int | None, generation: int) -> Failure | None:
    row = known_lines().get(event.groups.get("known", event.id))
    if row is not None and row.role == "advice" and event.id != "exception":
        return None
    if row is not None and (row.role == "advice" or (row.role == "consequence" and _is_of_other_peer(event))):
        row = None
    at_exit = event.id == "exception" and any(frame.endswith(_AT_EXIT) for frame in event.frames)
    stream = node.streams[event.stream]
    file, lines, progress = "", 0, 0
    if stream.file < len(node.files):
        read = node.files[stream.file]
        file, lines, progress = read.path, read.lines, read.progress
    role, means, fix = "confirmation" if event.id == "traceback-cut" else "cause", "", ""
    commands: tuple[str, ...] = ()
    known: KnownLine | KnownException | None = None
    if row is not None:
        role, known = row.role, row.filled(event.groups)
    elif event.id == "exception" and number_in(event.groups.get("parts", "1")) == 1:
        known = known_exception(event.text)
    if known is not None:
        means, fix, commands = known.means, known.fix, known.commands
    if at_exit:
        role = "consequence"
    if row is not None and row.id == "xid":
        role, means = _of_xid(event.text, means)
    end = number_in(event.groups.get("end")) or event.line
    what, _, reason = event.text.partition("Last error:\n")
    what = what.partition("\n")[0][:300]
    what += f"; last error: {reason.partition(chr(10))[0][:160]}" if reason else ""
    what += f", {event.groups['from']}" if event.groups.get("from") else ""
    return Failure(
        role=role,
        known=row.id if row is not None else event.id,
        rank=rank,
        host=stream.host,
        generation=generation,
        what=what,
        means=means,
        fix=fix,
        commands=tuple(commands),
        place=_own_place(event.frames),
        collective=_collective(event.frames),
        file=file,
        line=event.line,
        at=event.at,
        text=event.text,
        groups={**event.groups, "id": row.id if row is not None and event.groups.get("bare") else event.id},
        lines_after=max(0, lines - end),
        job_went_on=progress > end,
        count=event.count,
    )


def _of_xid(text: str, means: str) -> tuple[str, str]:
    """Return role and meaning of a line with an Xid, by the origin in NVIDIA's catalogue."""
    line = xids.read_line(text)
    if line is None:
        return "confirmation", means
    role, whose = xids.role_of(line.blames)
    about = f": {line.xid.means}" if line.xid.means else ""
    wanted = f"; the driver requests: {line.action}" if line.action else ""
    severity = f" ({line.unit}, {line.severity})" if line.severity else ""
    return role, f"GPU {line.address}: Xid {line.xid.code}{about}{severity}{wanted}{whose}"


def _is_of_other_peer(event: Event) -> bool:
    """Return whether an exception is of a connection to storage, a database or another service."""
    if event.id != "exception" or not event.frames or _OF_RANKS.search(event.text):
        return False
    inside = [frame for frame in event.frames if "/torch/distributed/elastic/" not in frame]
    return bool(_CONNECTION.search(event.text)) and not any(part in frame for frame in inside for part in _INSIDE)


def _unfold(text: str) -> list[int]:
    """Expand srun's rank lists, "0-3,7"."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        lowest, highest = number_in(first), number_in(last)
        if lowest is not None and lowest >= 0:
            ranks += range(lowest, min(lowest if highest is None else highest, lowest + 100_000) + 1)
    return ranks


def _own_place(frames: Sequence[str]) -> str:
    """Return the innermost line outside of libraries."""
    own = [frame for frame in frames if not any(part in frame for part in _LIBRARY)]
    return own[-1] if own else frames[-1] if frames else ""


def _collective(frames: Sequence[str]) -> str:
    for frame in reversed(frames):
        name = frame.rpartition(" in ")[2]
        if name in _COLLECTIVES and "/torch/" in frame:
            return name
    return ""


def _merge_last(book: Book) -> None:
    """Move lines written after the last agent gave up into its last round."""
    ended = [exit_.generation for exit_ in book.exits if exit_.launcher in ("agent", "torchrun")]
    if ended and book.generations > max(ended) + 1:
        last = max(ended)
        book.failures = [replace(failure, generation=min(last, failure.generation)) for failure in book.failures]
        book.watchdog = [
            (rank, replace(event, generation=min(last, event.generation))) for rank, event in book.watchdog
        ]
        book.generations = last + 1
