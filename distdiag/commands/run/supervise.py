"""Runs the job beside a recorder, and inspects ranks after a death, on a stall, and before termination."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec  # noqa: TID253 - this module is imported when a job is started

from distdiag import child_job
from distdiag.commands.run import sanitizer, time_limit
from distdiag.commands.run.types import TIME_LIMIT, NodeRun, Picture, RankRun, RankStack, Stacks
from distdiag.diagnosis.stack_classes import thread_at_work
from distdiag.facts import machine, private_files, programs
from distdiag.facts.core.setup import read_pattern
from distdiag.facts.logs.collect import Reader
from distdiag.facts.logs.demux import plain
from distdiag.facts.process import procs
from distdiag.facts.stacks.stack_sampler import SampleOptions, take_samples
from distdiag.facts.text import printable
from distdiag.record import record
from distdiag.report import Where  # noqa: TC001 - msgspec reads the annotations
from distdiag.training import recorded_output

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distdiag.agent.job_recorder import Config
    from distdiag.facts.logs.collect import NodeLogs
    from distdiag.facts.stacks.stack_types import Sample

_HANG_S = 60.0
_HANG_ON_TERM_S = 8.0
_STACKS_S = 3.0
"""Per stack; the recorder holds the launcher for at most 10 s, or until a second rank exits."""
_DRAIN_S = 5.0
_STILL = 0.01
"""A main thread that ran for a smaller share of the time makes no progress."""
_MOST_LOGS = 8192
_LAST_BYTES = 65536


class _Event(msgspec.Struct, frozen=True):
    """A line of the recorder: start and end of a rank, held, drained. `at`: Unix time; `master`: address and port."""

    event: str
    at: float
    pid: int = 0
    rank: int = 0
    local: int | None = None
    generation: int = 0
    host: str = ""
    world: int | None = None
    master: str = ""
    streams: tuple[str, ...] = ()
    status: int | None = None
    oom: bool = False


class _Accused(msgspec.Struct, frozen=True):
    where: Where


class _Row(msgspec.Struct, frozen=True):
    pid: int | None


class _HangData(msgspec.Struct, frozen=True):
    class_name: str = ""
    processes: tuple[_Row, ...] = ()


class _Answer(msgspec.Struct, frozen=True):
    """The parts of hang's report that a snapshot keeps."""

    verdict: str = ""
    summary: str = ""
    findings: tuple[_Accused, ...] = ()
    data: _HangData = _HangData()


@record(kw_only=True)
class Plan:
    """How to run the job. `stall_s`: 0 for never; `on_stall`: report or kill."""

    argv: Sequence[str]
    env: Mapping[str, str]
    asked: Mapping[str, object]
    folder: str
    stall_s: float = 300.0
    on_stall: str = "report"
    pictures: bool = True
    cores: bool = False
    prefix: bool = False


def run(plan: Plan, *, say: Callable[[str], None]) -> NodeRun:
    """Run the job to its end and return the record. `say` writes a line for people during the run."""
    output = os.path.join(plan.folder, f"output.{machine.host_name()}")  # nodes may share the folder
    private_files.make_folder(output)
    if plan.cores:
        say(f"distdiag run: {_raise_core_limit()}")
    job = _Job(plan, output, say)
    with child_job.signals_for_the_job() as mask, contextlib.ExitStack() as stack:
        job.start(mask, stack)
        status = child_job.wait(job.child, job.pass_on, job.turn)
        job.took_s = time.monotonic() - job.began
        job.drain()
    return job.result(status)


def _raise_core_limit() -> str:
    """Raise the limit of core dumps to the hard limit; return a text on where cores are written, or why not."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    pattern = read_pattern()
    if most == 0:
        return "no core dumps: the hard limit is 0 (ulimit -Hc); ask for a higher one in limits.conf or slurm.conf"
    to = f"core dumps go to {pattern.text}" if pattern is not None else "core_pattern cannot be read"
    return f"{to}; check it with: distdiag core-bt --check-setup; read them with: distdiag core-bt"


@dataclass
class _Job:
    plan: Plan
    output: str
    say: Callable[[str], None]
    child: int = 0
    recorder: int = 0
    began: float = 0.0
    began_at: float = 0.0
    took_s: float = 0.0
    killed: bool = False
    pictures: list[Picture] = field(default_factory=list)
    signals: list[tuple[str, float]] = field(default_factory=list)
    _events: list[_Event] = field(default_factory=list)
    _read_to: int = 0
    _control: int = -1
    _stall: _Stall | None = None
    _stacks: Stacks | None = None
    _look_at: float | None = None

    def start(self, mask: set[signal.Signals | int], stack: contextlib.ExitStack) -> None:
        """Start the recorder, then the job with its output connected to the recorder."""
        place = private_files.temporary_folder("run", longest=60)
        path = os.path.join(place, f"{os.getpid()}.{time.time_ns():x}")
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(path)
        stack.callback(Path(path).unlink, missing_ok=True)
        listener.listen(1024)
        control, self._control = os.pipe()
        streams, writes = [], {}
        keep = [listener.fileno(), control]
        for name, numbers in recorded_output.streams_of(1, 2):
            read, write = recorded_output.channel(numbers[0])
            status = os.fstat(write)
            out = os.dup(numbers[0])
            streams.append((name, read, out, status.st_dev, status.st_ino))
            keep += [read, out]
            writes.update(dict.fromkeys(numbers, write))
        config: Config = {
            "folder": self.output,
            "listener": listener.fileno(),
            "control": control,
            "streams": streams,
            "hold": self.plan.pictures,
            "prefix": self.plan.prefix,
        }
        self.recorder = child_job.start_recorder(config, keep)
        for fd in keep[1:]:
            os.close(fd)
        env = {**self.plan.env, recorded_output.VARIABLE: json.dumps({**self.plan.asked, "socket": path})}
        self.began, self.began_at = time.monotonic(), time.time()
        argv = self.plan.argv
        self.child = child_job.start(argv, mask, env=env, stdout=writes.get(1), stderr=writes.get(2), dies_by=0)
        for fd in set(writes.values()):
            os.close(fd)
        os.write(self._control, f"{self.child}\n".encode())
        self._stall = _Stall(self.plan.stall_s, self.output)
        self._look_at = time_limit.look_at(time.time()) if self.plan.pictures else None

    def pass_on(self, child: int, number: int) -> None:
        """Forward a signal to the job; before the first SIGTERM take a snapshot with hang."""
        name = programs.signal_name(number)
        self.signals.append((name, round(time.monotonic() - self.began, 2)))
        self._read()
        is_first = not any(picture.reason == name for picture in self.pictures)
        if number == signal.SIGTERM and self.plan.pictures and is_first and self._living():
            self._picture(name, _HANG_ON_TERM_S)
        os.write(self._control, b"ending\n")
        child_job.send(child, number)

    def turn(self) -> None:
        """Check, once per second, for a dead rank or a stall."""
        self._read()
        held = next(iter(self._of("held")), None)
        if held is not None and self._stacks is None:
            self._read_stacks(held.at)
        living = self._living()
        if self._look_at is not None and time.time() >= self._look_at and living:
            self._look_at = None
            self._picture(TIME_LIMIT, _HANG_ON_TERM_S)
        if self.plan.stall_s and living and self._stall is not None and self._stall.came(living):
            self._stalled()

    def _read_stacks(self, held_at: float) -> None:
        """Read the stacks of living ranks, then release the launcher, held since `held_at` (Unix time)."""
        ranks = {event.pid: event.rank for event in self._of("start")}
        samples = take_samples(self._living(), SampleOptions(timeout_s=_STACKS_S))
        os.write(self._control, b"release\n")
        held_s = time.time() - held_at
        found = sorted((_rank_stack(ranks[pid], pid, sample) for pid, sample in samples.items()), key=lambda s: s.rank)
        folder = os.path.join(self.plan.folder, f"stacks.{machine.host_name()}")
        with contextlib.suppress(OSError):
            private_files.make_folder(folder)
            for stack in found:
                if stack.frames:
                    path = os.path.join(folder, f"rank{stack.rank}.txt")
                    private_files.write_whole(path, _as_dump(stack).encode())
        self._stacks = Stacks(
            at_s=round(held_at - self.began_at, 2), held_s=round(held_s, 2), ranks=tuple(found), folder=folder
        )

    def _stalled(self) -> None:
        assert self._stall is not None
        picture = self._picture("stall", _HANG_S)
        if picture.verdict in ("ok", "warn"):
            self._stall.again()
            return
        where = f": {picture.summary}" if picture.summary else ""
        self.say(f"distdiag run: no rank has made progress for {self.plan.stall_s:g} s{where}")
        if self.plan.on_stall == "kill" and (picture.verdict == "fail" or self._stall.is_still):
            self.killed = True
            self.say("distdiag run: ending the job (--on-stall kill)")
            os.write(self._control, b"ending\n")
            child_job.send(self.child, signal.SIGTERM)

    def _picture(self, reason: str, limit_s: float) -> Picture:
        began = time.monotonic()
        folder = os.path.join(self.plan.folder, f"hang-{len(self.pictures)}.{machine.host_name()}")
        masters = {event.master for event in self._events if len(event.master) > 1}
        words = ["hang", "--json", "--save", folder, "--timeout", f"{limit_s:g}", "--user", str(os.geteuid())]
        words += ["--job", masters.pop()] if len(masters) == 1 else []
        words += ["--logs", self.output]
        code = (
            f"import signal, sys; signal.pthread_sigmask(signal.SIG_SETMASK, ()); sys.argv[0] = {sys.argv[0]!r}; "
            "from distdiag.__main__ import main; main()"
        )
        done = programs.run([sys.executable, "-c", code, *words], timeout_s=limit_s + 5, env=_without_rank())
        answer = _Answer()
        with contextlib.suppress(msgspec.MsgspecError):
            answer = msgspec.json.decode(done.stdout, type=_Answer)
        picture = Picture(
            reason=reason,
            at_s=round(began - self.began, 2),
            took_s=round(time.monotonic() - began, 2),
            verdict=answer.verdict,
            summary=answer.summary,
            ranks=next((finding.where.ranks for finding in answer.findings), ()),
            ranks_seen=sum(row.pid is not None for row in answer.data.processes),
            class_name=answer.data.class_name,
            folder=folder,
            error="" if answer.verdict else f"hang did not answer: {done.stderr[-300:].decode('utf-8', 'replace')}",
        )
        self.pictures.append(picture)
        with contextlib.suppress(OSError):
            private_files.write_whole(os.path.join(folder, "report.json"), done.stdout)
        return picture

    def _read(self) -> None:
        with contextlib.suppress(OSError), open(os.path.join(self.output, "events.jsonl"), "rb") as file:
            file.seek(self._read_to)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read_to += len(line)
                self._events.append(msgspec.json.decode(line, type=_Event))

    def _of(self, kind: str) -> list[_Event]:
        return [event for event in self._events if event.event == kind]

    def _living(self) -> list[int]:
        ended = {event.pid for event in self._events if event.event != "start"}
        return [event.pid for event in self._of("start") if event.pid not in ended]

    def drain(self) -> None:
        """Let the recorder finish. Ranks still running keep it alive, and daemons are not awaited."""
        with contextlib.suppress(OSError):
            os.write(self._control, b"ended\n")
        deadline = time.monotonic() + _DRAIN_S
        while time.monotonic() < deadline and not os.waitpid(self.recorder, os.WNOHANG)[0]:
            self._read()
            if self._of("drained"):
                break
            time.sleep(0.01)
        os.close(self._control)

    def result(self, status: int) -> NodeRun:
        """Convert the record to facts."""
        self._read()
        ends = {event.pid: event for event in self._of("end")}
        return NodeRun(
            host=machine.host_name(),
            argv=tuple(self.plan.argv),
            began_at=self.began_at,
            took_s=round(self.took_s, 2),
            status=status,
            ranks=tuple(self._rank(event, ends.get(event.pid)) for event in self._of("start")),
            logs=_logs(self.output),
            pictures=tuple(self.pictures),
            signals=tuple(self.signals),
            killed=self.killed,
            sanitizer=tuple(sanitizer.logs(self.plan.folder)),
            stacks=self._stacks or self._no_stacks(),
            slurm_job=os.environ.get("SLURM_JOB_ID", ""),
        )

    def _no_stacks(self) -> Stacks | None:
        """Return empty stacks if a rank of several failed when no other was left to inspect."""
        bad = [event for event in self._of("end") if event.status != 0]
        ranks = {event.rank for event in self._of("start")}
        if not (self.plan.pictures and bad and len(ranks) > 1) or self.pictures or self.signals:
            return None
        return Stacks(at_s=round(bad[0].at - self.began_at, 2))

    def _rank(self, start: _Event, end: _Event | None) -> RankRun:
        return RankRun(
            rank=start.rank,
            local=start.local,
            generation=start.generation,
            host=start.host,
            pid=start.pid,
            world=start.world or 0,
            started_s=round(start.at - self.began_at, 3),
            ended_s=None if end is None else round(end.at - self.began_at, 3),
            status=None if end is None else end.status,
            oom=end is not None and end.oom,
            last_line="" if end is None or end.status == 0 else self._last_line(start),
        )

    def _last_line(self, start: _Event) -> str:
        name = "output" if "output" in start.streams else "stdout"
        path = os.path.join(self.output, f"rank{start.rank}.g{start.generation}.{name}.log")
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            before, *_ = re.split(rb"^.*Traceback \(most recent", file.read(), maxsplit=1, flags=re.MULTILINE)
            return printable(plain(before.strip().split(b"\n")[-1]).decode("utf-8", "replace").strip())[:200]
        return ""


def _rank_stack(rank: int, pid: int, sample: Sample) -> RankStack:
    """Keep the thread that does the job's work, else the reason for its absence."""
    tid = thread_at_work(sample)
    thread = next((thread for thread in sample.threads if tid in (None, thread.os_thread_id)), None)
    if thread is None:
        return RankStack(rank=rank, pid=pid, error=sample.reason or "no Python frames")
    return RankStack(rank=rank, pid=pid, thread=thread.name, frames=thread.frames)


def _as_dump(stack: RankStack) -> str:
    """Format a stack like `py-spy dump`, for pyspy-all."""
    frames = "".join(f"    {frame.function} ({frame.file}:{frame.line})\n" for frame in stack.frames)
    return f'Process {stack.pid}: rank {stack.rank}\n\nThread {stack.pid} (idle): "{stack.thread}"\n{frames}'


class _Stall:
    """Detects that no rank has written output for `limit_s` seconds."""

    def __init__(self, limit_s: float, folder: str) -> None:
        self._limit_s, self._folder = limit_s, folder
        self._size = -1
        self._since = time.monotonic()
        self._cpu_s: dict[int, float] = {}
        self._is_known = False
        self.is_still = False

    def came(self, pids: list[int]) -> bool:
        """Return whether a new stall began; sets `is_still`: no main thread has run since."""
        now = time.monotonic()
        size = sum(entry.stat().st_size for entry in os.scandir(self._folder) if entry.name.endswith(".log"))
        if size != self._size or not self._cpu_s.keys() >= set(pids):
            self._size, self._since, self._is_known = size, now, False
            self._cpu_s = {pid: _main_thread_s(pid) for pid in pids}
        if self._is_known or now - self._since < self._limit_s:
            return False
        self._is_known = True
        ran_s = max((_main_thread_s(pid) - self._cpu_s[pid] for pid in pids), default=0.0)
        self.is_still = ran_s < _STILL * (now - self._since)
        return True

    def again(self) -> None:
        """Reset after a false alarm: the next stall may begin without new output."""
        self._size = -1


def _main_thread_s(pid: int) -> float:
    """Return the CPU time of a main thread; 0 if it has exited."""
    return next((task.cpu_s for task in procs.tasks(pid) if task.tid == pid), 0.0)


def _logs(folder: str) -> NodeLogs:
    """Read the kept output, each file as its rank's, the launcher's own lines last."""
    from distdiag.knowledge.known_lines import for_nodes

    reader = Reader(for_nodes())
    for name in sorted(os.listdir(folder), key=lambda name: (name.startswith("job."), name))[:_MOST_LOGS]:
        path = os.path.join(folder, name)
        match = re.fullmatch(r"rank(\d+)\.g(\d+)\.(?:stdout|stderr|output)\.log(?:\.\d+)?", name)
        if match:
            reader.read_output(path, path, int(match[1]), int(match[2]))
        elif name.startswith("job."):
            reader.read_output(path, path, None)
    return reader.found()


def _without_rank() -> dict[str, str]:
    """Return our environment without rank variables, for hang on this machine alone."""
    names = ("SLURM_", "OMPI_", "PMI", "PRTE_", "TORCHELASTIC_", "MPI_", "HYDRA_")
    plain = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {name: value for name, value in os.environ.items() if not name.startswith(names) and name not in plain}
