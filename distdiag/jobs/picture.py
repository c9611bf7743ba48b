"""Facts of one node about its ranks: all sources are read concurrently, each with its own deadline.

hang reads all sources, pyspy-all and `trace blocked` only those of processes: each is imported when read. Nothing is
judged here.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import field

from distdiag.agent.protocol import Fields
from distdiag.facts import machine
from distdiag.facts.process import procs
from distdiag.jobs.collect import Watched, facts
from distdiag.jobs.sample_stacks import Sampled, Sampling
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distdiag.facts.logs.line_patterns import Rows
    from distdiag.jobs.part import Part, SourceEnd
else:
    Part = SourceEnd = Fields

__all__ = ["facts", "more"]

_AFTERWARDS = ("start", "recorder")
_IN_INIT = ("init_process_group", "torch/distributed/distributed_c10d.py")
_LOG_TAIL = 32 * 2**20
_LOG_BYTES = 512 * 2**20
_SPARE_S = 1.0
_DUMP_FILES = (b"TORCH_FR_DUMP_TEMP_FILE", b"TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_PIPES = (b"TORCH_FR_DEBUG_INFO_PIPE_FILE", b"TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
_DUMP_VARIABLES = (*_DUMP_FILES, *_PIPES)
_JOB_VARIABLES = (b"MASTER_ADDR", b"MASTER_PORT")


@record
class Ask:
    """The sources to read, by name, with options; and the processes of this node.

    `timeout_s`: for all sources together; `ras_s`: for each address of NCCL's RAS. `patterns` and `kernel`: rows of
    known lines. `sampled`: processes with stacks read; `waiting`: with waits read, for `waits_of_all` all processes.
    `ranks`: (pid, rank). `starting`: launchers without ranks. `stores`: ask a waiting job's store for its members.
    """

    sources: Sequence[str]
    timeout_s: float
    sampling: Sampling
    logs: Sequence[str] = ()
    recorder: Sequence[str] = ()
    ras_s: float = 10.0
    patterns: Rows = ()
    kernel: Rows = ()
    sampled: Sampled = field(default_factory=Sampled)
    ranks: Sequence[tuple[int, int | None]] = ()
    waits_of_all: bool = False
    waiting: Sequence[int] = ()
    starting: Sequence[int] = ()
    stores: bool = False
    launchers: Sequence[int] = ()


class Unavailable(Exception):
    """A source has no data on this node: the reason, and a hint how to get some."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.hint = hint


def more(ask: Ask, tell: Callable[[Part], None]) -> None:
    """Read the sources."""
    run = _Run(ask, tell)
    at_once = {name: getattr(run, name) for name in ask.sources if name not in _AFTERWARDS}
    run.read_all(at_once)
    if "start" in ask.sources:
        run.read_all({"start": run.start})  # the stacks show which ranks wait in init_process_group
    if "recorder" in ask.sources:
        # Last and alone: its readers are forked, and a rank that writes its dump moves.
        run.read_all({"recorder": run.recorder})


class _Run:
    def __init__(self, ask: Ask, tell: Callable[[Part], None]) -> None:
        self._ask, self._tell = ask, tell
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._over: set[str] = set()
        self._pids = ask.sampled.pids
        self._in_init: list[int] = []
        self._is_alone: bool | None = None
        self._ranks: dict[int, int | None] = dict(ask.ranks)

    def read_all(self, sources: dict[str, Callable[[], None]]) -> None:
        """Read these concurrently. A late source is abandoned, and its later answers are dropped."""
        began = time.monotonic()
        threads = [
            threading.Thread(target=self._read_one, args=(name, source, began), daemon=True)
            for name, source in sources.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self._began + self._ask.timeout_s - time.monotonic()))
        for name in sources:
            self._end(name, began, "it did not answer in time", "increase --timeout")

    def _read_one(self, name: str, source: Callable[[], None], began: float) -> None:
        try:
            source()
        except Unavailable as error:
            self._end(name, began, str(error), error.hint)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one source is no reason to lose the others
            self._end(name, began, f"{type(error).__name__}: {error}"[:300])
        else:
            self._end(name, began)

    def _end(self, name: str, began: float, why: str = "", hint: str = "") -> None:
        with self._lock:
            if name in self._over:
                return
            self._over.add(name)
            end = SourceEnd(
                source=name,
                seconds=round(time.monotonic() - began, 3),
                why=why,
                hint=hint,
                at_s=round(time.time(), 3),
            )
            self._tell(Part(ended=(end,)))

    def _send(self, name: str, part: Part) -> None:
        with self._lock:
            if name not in self._over:
                self._tell(part)

    def stacks(self) -> None:
        if not self._pids:
            raise Unavailable("no process of a job on this node")
        from distdiag.jobs import sample_stacks

        left_s = self._began + self._ask.timeout_s - time.monotonic() - _SPARE_S
        sample_stacks.sample(self._ask.sampled, self._ask.sampling, max(0.0, left_s), self._send_stacks)

    def _send_stacks(self, watched: Watched) -> None:
        frames = [frame for sample in watched.samples[-1:] for each in sample.threads[:1] for frame in each.frames]
        if any(frame.function == _IN_INIT[0] and frame.file.endswith(_IN_INIT[1]) for frame in frames):
            self._in_init.append(watched.pid)
        self._send("stacks", Part(watched=(watched,)))

    def start(self) -> None:
        """Read the rendezvous of launchers without ranks and of ranks in init_process_group."""
        ranks = [pid for pid in dict.fromkeys(self._in_init) if pid in self._ranks]
        if not self._ask.starting and not ranks:
            raise Unavailable("no launcher or rank here waits for others to start")
        from distdiag.jobs import starts

        self._send("start", Part(starts=(starts.read(self._ask.starting, ranks, stores=self._ask.stores),)))

    def waits(self) -> None:
        if not self._pids:
            raise Unavailable("no process of a job on this node")
        from distdiag.jobs import sample_waits

        sample_waits.sample(
            self._ask.waiting or self._pids,
            lambda reply: self._send(
                "waits", Part(blocked=reply.processes, networks=reply.networks, peer_processes=reply.peer_processes)
            ),
        )

    def gpu(self) -> None:
        """Read the GPUs' utilization twice."""
        from distdiag.facts.gpu import gpu_use

        found = gpu_use.read()
        self._send("gpu", Part(gpus=(found,)))
        if not found.gpus:
            raise Unavailable(found.error)

    def log(self) -> None:
        """Read the ends of the job's output files and of the requested files."""
        from distdiag.facts.logs import job_output
        from distdiag.facts.logs.collect import Reader

        files, elsewhere = job_output.find(self._ranks, self._ask.launchers)
        files += job_output.of_ended(files, self._ended_ranks(), time.time() - self._age_s())
        if not files and not self._ask.logs:
            to = f"its output goes to {', '.join(elsewhere[:3])}" if elsewhere else "no output file was found"
            raise Unavailable(to, "keep the output in files: torchrun --log-dir logs --redirects 3 --tee 3; or --logs")
        bars = [bar for bar in (job_output.last_bar(file, time.time()) for file in files) if bar is not None]
        self._send("log", Part(bars=tuple(bars)))
        reader = Reader(self._ask.patterns, tail=_LOG_TAIL)
        left = _LOG_BYTES
        for file in files:
            if left > 0:
                reader.read_output(file.path, file.open_as, file.rank)
                left -= _LOG_TAIL
        for path in self._ask.logs:
            reader.read(path)
        for part in reader.found().parts():
            self._send("log", Part(logs=(part,)))

    def _ended_ranks(self) -> set[int]:
        """Return the ranks of the job that started on this node and have no process any more."""
        here: set[int] = set()
        for pid, rank in self._ranks.items():
            own = procs.variables_named(pid, (b"LOCAL_RANK=", b"LOCAL_WORLD_SIZE="))
            local, size = own.get("LOCAL_RANK", ""), own.get("LOCAL_WORLD_SIZE", "")
            if rank is not None and local.isdecimal() and size.isdecimal() and len(size) < 6:
                here.update(range(rank - int(local), rank - int(local) + int(size)))
        return {rank for rank in here if rank >= 0} - {rank for rank in self._ranks.values() if rank is not None}

    def kernel(self) -> None:
        """Read the kernel's log, OOM counters and unacknowledged data."""
        from distdiag.facts.host import kernel_signs
        from distdiag.facts.logs.line_patterns import Patterns

        self._send(
            "kernel",
            Part(kernel=(kernel_signs.read(self._pids, Patterns(self._ask.kernel), since_s=self._age_s()),)),
        )

    def _age_s(self) -> float:
        """Return the age of the oldest rank here in seconds."""
        ticks = [proc.started for proc in map(procs.read, self._ranks) if proc is not None]
        up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return up_s - min(ticks) / os.sysconf("SC_CLK_TCK") if ticks else 0.0

    def ras(self) -> None:
        """Query NCCL's RAS port."""
        from distdiag.facts.recorder import nccl_ras

        environs = [variables for variables in (procs.variables_named(pid, (b"NCCL_RAS",)) for pid in self._ranks)]
        if all(variables.get("NCCL_RAS_ENABLE") == "0" for variables in environs) and environs:
            raise Unavailable("NCCL_RAS_ENABLE=0 in the ranks' environment", "leave NCCL_RAS_ENABLE unset")
        answers = [nccl_ras.read(address, timeout_s=self._ask.ras_s) for address in nccl_ras.addresses(environs)[:4]]
        if not any(answer.readings for answer in answers):
            why = answers[0].error if answers else "no address"
            raise Unavailable(
                f"no answer at {answers[0].address if answers else '?'}: {why}",
                "NCCL 2.24 or newer listens there unless NCCL_RAS_ENABLE=0; Gloo and MPI have no RAS",
            )
        self._send("ras", Part(ras=tuple(answer for answer in answers if answer.readings)))

    def versions(self) -> None:
        """Read the library versions mapped by the first rank."""
        if not self._ranks:
            raise Unavailable("no rank on this node")
        from distdiag.facts.process import mapped_versions

        self._send("versions", Part(versions=(mapped_versions.read(next(iter(self._ranks))),)))

    def _is_ours(self, path: str) -> bool:
        """Return whether a dump was written by this run of the job: earlier runs use the same file names."""
        return os.path.isfile(path) and machine.modified_s(path) > time.time() - self._age_s()

    def _default_dumps(self, variables: Mapping[str, str]) -> list[str]:
        """Return where torch writes dumps by default; nothing beside another job, which writes to the same files."""
        from distdiag.facts.recorder import collect as recorder

        if self._is_alone is None:
            jobs = {pid: procs.variables_named(pid, _JOB_VARIABLES) for pid in procs.table()}
            own = [jobs.get(pid) for pid in self._ranks]
            self._is_alone = all(job in own for job in jobs.values() if job)
        home = variables.get("HOME", "~")
        return [file.replace("~", home) for file in recorder.DUMP_DEFAULTS] if self._is_alone else []

    def recorder(self) -> None:
        """Read flight recorder dumps, after triggering ranks that have a pipe."""
        from distdiag.facts.recorder import collect as recorder

        paths, has_pipe = list(self._ask.recorder), False
        variables = {pid: procs.variables_named(pid, (*_DUMP_VARIABLES, b"HOME")) for pid in self._ranks}
        for pid, own in variables.items():
            has_pipe |= any(own.get(name.decode()) for name in _PIPES)
            files = [own[name.decode()] for name in _DUMP_FILES if own.get(name.decode())] or self._default_dumps(own)
            paths += filter(self._is_ours, (f"{file}{self._ranks[pid]}" for file in files))
        if not paths and not has_pipe:
            raise Unavailable(
                "the job was started without a flight recorder, or it has not written a dump",
                "how to start it with one: distdiag flight-recorder --how",
            )
        left_s = self._began + self._ask.timeout_s - time.monotonic()
        ask = recorder.Ask(list(dict.fromkeys(paths)), trigger=True, wait_s=max(1.0, min(6.0, left_s / 2)))
        recorder.more(ask, lambda dumps: self._send("recorder", Part(dumps=(dumps,))))
