"""A lying node beside an honest one: it only loses its own row, and the other node is still judged.

The streams are recorded from real agents on two hosts of other names, damaged, and played back: most of them into the
fleet and the diagnosis of each command (a process for each would take hours), some of them to the whole program.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import socket
import subprocess
import threading
import zlib
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from fuzz import PER_READER, assert_survived, damaged, misleading, run_calls, run_each
from support import need
from support_warm import distdiag

from distdiag import output
from distdiag.agent import protocol, wire
from distdiag.cluster import records
from distdiag.cluster.fleet import Fleet, Limits
from distdiag.cluster.hosts import Host
from distdiag.cluster.links import SocketLink
from distdiag.cluster.rendezvous_test import LookUp, NetworkPath, RendezvousTest
from distdiag.cluster.targets import Cluster
from distdiag.cluster.transports import Transport
from distdiag.commands.trace.ranks import Wanted
from distdiag.jobs.collect import Processes
from distdiag.jobs.pictures import merge
from distdiag.jobs.types import NodePicture, NodeStacks
from distdiag.launch import rank_runs
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from distdiag.cluster.transports import Arrivals
    from distdiag.report import Report

    Judged = tuple[Report[Any], Callable[[Any], Iterable[RenderableType]]]

pytestmark = pytest.mark.timeout(max(300, PER_READER))
GOOD, LIAR = "good", "liar"
_LIMITS, _PATIENT = Limits(start_s=1.0, facts_s=1.0), Limits(start_s=20.0, facts_s=20.0)
_WHOLE = 5
"""Runs of the whole program for each command."""
CLUSTER = Cluster()
WANTED = Wanted()
ALL = Wanted(ranks=(0, 1))
_RECORD = 'unshare -u sh -c "echo $2 >/proc/sys/kernel/hostname; exec sh" | tee "$1/$2"\n'
_REPLAY = 'cat "$1/$2"\n[ $2 = liar ] && exec timeout 0.4 cat >/dev/null\nexec cat >/dev/null\n'
_JOB = "import os, sys, time; print(os.getpid(), flush=True); held = open(__file__); time.sleep(600)"


@dataclass
class Replay(Transport):
    """Plays streams of agents back, each over a connection of its own.

    The liar hangs up at once if its stream lacks this `end`, to save the wait. If it has the end,
    one of four liars keeps the connection, and costs the deadline if its end is not decoded.
    """

    remote = False
    streams: Mapping[str, bytes]
    end: bytes

    def start(self, hosts: Sequence[Host], arrivals: Arrivals) -> None:
        for host in hosts:
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sent = theirs.send(self.streams[host.name])  # mostly complete: no wait for a thread
            theirs.setblocking(True)
            threading.Thread(target=self._play, args=(theirs, host.name, sent), daemon=True).start()
            arrivals.put(host.name, SocketLink(ours))

    def _play(self, connection: socket.socket, name: str, sent: int) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(self.streams[name][sent:])
            stream = self.streams[name]
            if name == LIAR and (self.end not in stream or zlib.crc32(stream) % 4):
                return
            while connection.recv(65536):
                pass


@dataclass
class Replies:
    """The replies of the two nodes, in the form used by every command."""

    fleet: Fleet
    missing: dict[str, str] = field(default_factory=dict)
    more: dict[str, list[Any]] = field(default_factory=dict)
    machines: list[Any] = field(default_factory=list)
    """Those that were up when all were asked, as the commands note them: one may be lost after it told more."""

    def gathered(self) -> Gathered[Any]:
        """All parts, as the facts of hosts."""
        parts = [part for parts in self.more.values() for part in parts[-1:]]
        rows, refusals, missing = self.reached
        return Gathered(facts=parts, missing=missing, rows=rows, refusals=refusals)

    @property
    def reached(self) -> tuple[Any, dict[str, Any], dict[str, str]]:
        """Rows, refusals, and why something is missing."""
        return self.fleet.rows, dict(self.fleet.refusals), self.missing


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The arguments of one command, the types of its replies, and its diagnosis and view."""

    arguments: tuple[str, ...]
    facts: type[Any]
    more: type[Any] | None
    judge: Callable[[Replies], Judged]


def play(streams: Mapping[str, bytes], reader: Reader, limits: Limits = _LIMITS) -> Replies:
    """Take what two nodes say through the fleet."""
    transport = Replay(streams, b'"facts", "facts"' if reader.more is None else b'"more-end"')
    reported = Replies(Fleet([Host(name=GOOD), Host(name=LIAR)], transport, b"", reader.facts, limits))
    with reported.fleet as fleet:
        fleet.gather(lambda now: None)
        reported.machines = fleet.machines(local=False)
        if reader.more is not None:
            for node, facts, why in fleet.more_from(reported.machines, reader.more, limits.facts_s, lambda names: None):
                if facts is not None:
                    reported.more.setdefault(node.name, []).append(facts)
                elif why:
                    reported.missing[node.name] = why
    return reported


def show(report: Report[Any], view: Callable[[Any], Iterable[RenderableType]]) -> None:
    """Draw the report for people and write it for programs, as `deliver` does."""
    output.emit(json.dumps(output.document(report)))
    output.emit(output._render(report, view, whole=False))
    raise SystemExit(report.exit_code())


def judge_ports(reported: Replies, targets: tuple[tuple[str, int], ...] = ()) -> Judged:
    from distdiag.commands.ports.diagnose import diagnose
    from distdiag.commands.ports.types import PortsFacts, Request
    from distdiag.commands.ports.view import ports_view

    request = Request(program="distdiag", cluster=CLUSTER, targets=targets, verbose=not targets)
    rows, refusals, _ = reported.reached
    up = reported.machines
    seen = PortsFacts(rows=rows, refusals=refusals, local=False)
    seen.scanned = {name: [one for part in parts for one in part.results] for name, parts in reported.more.items()}
    seen.nodes, seen.hosts = {node.name: node.reply for node in up}, {node.name: node.host for node in up}
    for node, record in reported.fleet._pending:
        if node.name not in seen.nodes:
            continue
        if isinstance(record, records.ReachListening):
            seen.taken[node.name] = record.failed
        elif isinstance(record, protocol.ReachName):
            seen.lookups.append(LookUp.of(node.name, record))
        elif isinstance(record, records.ReachProbe):
            purpose, _, target = record.probe.key.partition(" ")
            if target in seen.nodes:
                path = NetworkPath(source=node.name, target=target, purpose=purpose, probe=record.probe)
                seen.paths.append(path)
    return diagnose(request, seen), lambda report: ports_view(report, request)


def judge_cuda(reported: Replies) -> Judged:
    from distdiag.commands.cuda_env.diagnose import diagnose
    from distdiag.commands.cuda_env.types import Request
    from distdiag.commands.cuda_env.view import cuda_env_view

    request = Request(cluster=CLUSTER, verbose=True)
    return diagnose(request, reported.gathered()), lambda report: cuda_env_view(report, request)


def pictures_of(reported: Replies) -> Gathered[NodePicture]:
    """Join what each node sent of its ranks."""
    rows, refusals, missing = reported.reached
    nodes = [
        merge(node.host, node.reply, reported.more.get(node.name, ()), missing.get(node.name, ""))
        for node in reported.machines
    ]
    return Gathered(facts=nodes, missing=missing, rows=rows, refusals=refusals)


def judge_stacks(reported: Replies) -> Judged:
    from distdiag.commands.pyspy_all.diagnose import diagnose
    from distdiag.commands.pyspy_all.types import Request
    from distdiag.commands.pyspy_all.view import pyspy_all_view

    request = Request(program="distdiag", cluster=CLUSTER, verbose=True)
    return diagnose(request, pictures_of(reported)), lambda report: pyspy_all_view(report, request)


def judge_hang(reported: Replies) -> Judged:
    from distdiag.commands.hang.diagnose import diagnose
    from distdiag.commands.hang.page import content
    from distdiag.commands.hang.types import Request
    from distdiag.commands.hang.view import hang_view
    from distdiag.pages import make_page

    request = Request(program="distdiag", cluster=CLUSTER, verbose=True)
    report = diagnose(request, pictures_of(reported))
    assert make_page(output.document(report), content).isascii()
    return report, lambda report: hang_view(report, request)


def judge_blocked(reported: Replies) -> Judged:
    from distdiag.commands.trace.blocked.diagnose import diagnose
    from distdiag.commands.trace.blocked.types import Request
    from distdiag.commands.trace.blocked.view import trace_blocked_view

    report = diagnose(Request(program="distdiag", cluster=CLUSTER, wanted=ALL), pictures_of(reported))
    return report, lambda report: trace_blocked_view(report.data)


def judge_doctor(reported: Replies) -> Judged:
    from distdiag.commands.doctor.diagnose import diagnose
    from distdiag.commands.doctor.types import NodeDoctor, Request
    from distdiag.commands.doctor.view import doctor_view
    from distdiag.runner import merged

    rows, refusals, missing = reported.reached
    nodes = [
        NodeDoctor(host=node.host, missing=missing.get(node.name, ""), **merged(reported.more.get(node.name, ())))
        for node in reported.machines
    ]
    request = Request(program="distdiag", cluster=CLUSTER)
    report = diagnose(request, Gathered(facts=nodes, missing=missing, rows=rows, refusals=refusals))
    return report, lambda made: doctor_view(made, verbose=True)


def judge_cores(reported: Replies) -> Judged:
    from distdiag.commands.core_bt.diagnose import diagnose
    from distdiag.commands.core_bt.types import Request
    from distdiag.commands.core_bt.view import core_bt_view

    return diagnose(Request(), reported.gathered()), lambda report: core_bt_view(report, all_threads=True)


def judge_lines(reported: Replies) -> Judged:
    from distdiag.commands.trace.show.diagnose import diagnose
    from distdiag.commands.trace.show.types import Request
    from distdiag.commands.trace.show.view import trace_show_view

    request = Request(program="distdiag", cluster=CLUSTER, paths=(), all_runs=True, verbose=True)
    gathered = reported.gathered()
    return diagnose(request, gathered), lambda report: trace_show_view(request, gathered.facts)


def judge_trace(command: str, modules: tuple[str, str, str]) -> Callable[[Replies], Judged]:
    def judge(reported: Replies) -> Judged:
        from importlib import import_module

        from distdiag.commands.trace import ranks
        from distdiag.commands.trace.nodes import Answers

        folder = f"distdiag.commands.trace.{command}"
        answers = Answers[Any](replies=reported.more)
        answers.rows, answers.refusals, answers.missing = reported.reached
        answers.nodes = [NodeStacks(node.host, node.reply, ()) for node in reported.machines]
        types, diagnose, view = (import_module(f"{folder}.{name}") for name in modules)
        request = types.Request(program="distdiag", cluster=CLUSTER, wanted=ALL)
        found = diagnose.diagnose(request, answers, ranks.choose(answers.nodes, ALL))
        draw = getattr(view, f"trace_{command}_view")
        return found, lambda report: draw(report.data)

    return judge


def readers() -> dict[str, Reader]:
    """List all that is read of nodes without ranks; imported late, as the program itself does."""
    from distdiag.commands.core_bt.collect import NodeCores
    from distdiag.commands.cuda_env.collect import Arrived, CudaFacts
    from distdiag.commands.doctor.collect import Arrived as DoctorArrived
    from distdiag.commands.doctor.collect import Part as DoctorPart
    from distdiag.commands.ports.collect import NodePorts, ScanBatch
    from distdiag.commands.trace.fds import collect as fds
    from distdiag.commands.trace.show.collect import NodeLines
    from distdiag.commands.trace.sys import collect as sys_
    from distdiag.jobs.part import Part

    def trace(command: str, more: type[Any], modules: tuple[str, str, str], *options: str) -> Reader:
        arguments = ("trace", command, *(options or ("--job", "{job}", "--rank", "0,1")))
        return Reader(arguments=arguments, facts=Processes, more=more, judge=judge_trace(command, modules))

    # What hang asks for is all that pyspy-all and trace blocked do: one recording serves the three.
    hang = ("hang", "--job", "{job}", "--timeout", "10")
    pictures = partial(Reader, arguments=hang, facts=Processes, more=Part)
    tried = partial(judge_ports, targets=(("127.0.0.1", 1),))
    # By pid: both hosts are this machine, and of ranks that are there twice strace attaches to none.
    attach = ("--pid", "{rank_0}", "--pid", "{rank_1}", "--for", "1")

    return {
        "ports": Reader(arguments=("ports",), facts=NodePorts, more=None, judge=judge_ports),
        "ports-check": Reader(arguments=("ports", "127.0.0.1:1"), facts=NodePorts, more=ScanBatch, judge=tried),
        "cuda-env": Reader(arguments=("cuda-env",), facts=Arrived, more=CudaFacts, judge=judge_cuda),
        "pyspy-all": pictures(judge=judge_stacks),
        "hang": pictures(judge=judge_hang),
        "doctor": Reader(arguments=("doctor",), facts=DoctorArrived, more=DoctorPart, judge=judge_doctor),
        "core-bt": Reader(arguments=("core-bt", "{core}"), facts=NodeCores, more=NodeCores, judge=judge_cores),
        "show": Reader(arguments=("trace", "show", "{lines}"), facts=NodeLines, more=NodeLines, judge=judge_lines),
        "blocked": pictures(judge=judge_blocked),
        "fds": trace("fds", fds.Reply, ("diagnose", "diagnose", "view")),
        "sys": trace("sys", sys_.Reply, ("types", "diagnose", "view"), *attach),
    }


RANKS = {
    "gpu-test": ("gpu-test", "--nproc", "2", "--size", "1MiB", "--memory", "0.001", "--no-compute"),
    "isolate": ("gpu-test", "--isolate", "--nproc", "4", "--size", "1MiB", "--compute", "100ms"),
    "allreduce-bench": ("allreduce-bench", "--nproc", "4", "--sizes", "1KiB:4KiB", "--iters", "20"),
}


@dataclass(frozen=True)
class Recorder:
    """Runs a command on two hosts that are this machine under other names, and keeps what their agents say."""

    folder: Path
    places: Mapping[str, str]
    recorded: dict[tuple[str, ...], dict[str, bytes]]
    """What the agents of each command said."""

    def via(self, script: str) -> tuple[str, ...]:
        """Write the option that reaches hosts by a script."""
        path = self.folder / f"via-{len(script)}"
        path.write_text(script)
        return ("--via", f"sh {shlex.quote(str(path))} {shlex.quote(str(self.folder))} {{host}}")

    def words(self, arguments: Sequence[str], script: str, hosts: Sequence[str] = (LIAR, GOOD)) -> list[str]:
        """Write the command line."""
        options = ["--hosts", ",".join(hosts), *self.via(script)]
        if "--nproc" in arguments:
            options += ["--stall", "20" if script == _RECORD else "1"]
        return [*(one.format(**self.places) for one in arguments), *options]

    def streams(self, arguments: tuple[str, ...]) -> dict[str, bytes]:
        """Run it for real, once."""
        if arguments not in self.recorded:
            self.recorded[arguments] = self._streams(arguments)
        return self.recorded[arguments]

    def _streams(self, arguments: tuple[str, ...]) -> dict[str, bytes]:
        # Nodes that do not speak to each other would both report this machine: only one is asked. Where it has
        # four ranks, each of the two gets the records of two: torch is imported once.
        alone = arguments[0] in ("hang", "trace", "cuda-env", "core-bt") or "4" in arguments
        hosts = (GOOD,) if alone else (LIAR, GOOD)
        done = distdiag(*self.words(arguments, _RECORD, hosts))
        assert done.code in (0, 1, 3), done.err
        found = {name: (self.folder / name).read_bytes() for name in hosts}
        assert all(b'"facts"' in stream for stream in found.values()), done.err
        found = {LIAR: found[GOOD].replace(b'"good"', b'"liar"'), **found}
        halves = {LIAR: (2, 3), GOOD: (0, 1)} if "4" in arguments else {}
        return {name: without_ranks(stream, halves.get(name, ())) for name, stream in found.items()}


def without_ranks(stream: bytes, ranks: Sequence[int]) -> bytes:
    """Leave out the records of these ranks."""
    theirs = tuple(b'"rank": %d,' % rank for rank in ranks)
    return wire.MARK.join(one for one in stream.split(wire.MARK) if not any(rank in one[:40] for rank in theirs))


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    from cores import make_core
    from jobs import PROGRAMS, Job
    from support import PROGRAM

    need("unshare", "strace")
    folder = tmp_path_factory.mktemp("streams")
    lines = folder / "lines"
    core = make_core("dies_by_segv", tmp_path_factory.mktemp("core"))
    traced = (PROGRAM, "trace", "py", "--dir", str(lines), "--", str(PROGRAMS / "lines.py"))
    for rank, how in enumerate((("ends_by_signal", "SIGKILL"), ("fails",))):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
        subprocess.run([*traced, *how], env={**os.environ, **place}, capture_output=True, check=False, timeout=60)
    with Job("hangs_by_line", 2, forked=True) as job:
        job.wait_still()
        pids = {f"rank_{rank}": str(job.pid(rank)) for rank in range(job.size)}
        yield Recorder(folder, {"core": str(core), "lines": str(lines), "job": job.name, **pids}, {})


def streams_of_a_liar(stream: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield streams by turns: one with damaged bytes, and one of which all is well formed and something is not true."""
    dice = random.Random(20)
    for number, (how, bytes_) in enumerate(damaged(stream)):
        if number % 2:
            yield how, bytes_
            continue
        frames = stream.split(wire.MARK)
        at = max(range(len(frames)), key=lambda one: len(frames[one]) * dice.random())
        frames[at] = misleading(frames[at], dice) + b"\n"
        yield f"{number}: misleading frame {at}", wire.MARK.join(frames)


def judge_damaged(reader: Reader, streams: dict[str, bytes]) -> Iterator[tuple[str, Callable[[], None]]]:
    def call(stream: bytes) -> Callable[[], None]:
        def work() -> None:
            reported = play({**streams, LIAR: stream}, reader)
            if GOOD in {**reported.fleet.refusals, **reported.missing}:  # on a busy machine a second may be too short
                reported = play({**streams, LIAR: stream}, reader, _PATIENT)
            assert GOOD not in {**reported.fleet.refusals, **reported.missing}
            assert reader.more is None or reported.more[GOOD], "nothing of the good node came"
            show(*reader.judge(reported))

        return work

    for how, stream in streams_of_a_liar(streams[LIAR]):
        yield how, call(stream)


@pytest.mark.parametrize("name", readers())
def test_a_node_that_lies_costs_its_own_row(name: str, recorder: Recorder) -> None:
    reader = readers()[name]
    streams = recorder.streams(reader.arguments)
    assert_survived(run_calls(judge_damaged(reader, streams)))


def run_ranks(command: str, streams: dict[str, bytes]) -> None:
    """Judge a run of ranks of which half are on a node that lies."""
    from distdiag.commands.allreduce_bench.check import job_of as bench
    from distdiag.commands.allreduce_bench.types import Request as BenchRequest
    from distdiag.commands.allreduce_bench.view import bench_view
    from distdiag.commands.gpu_test.diagnose import job_of as gpu_test
    from distdiag.commands.gpu_test.isolate.diagnose import isolate_view
    from distdiag.commands.gpu_test.isolate.diagnose import job_of as isolate
    from distdiag.commands.gpu_test.isolate.types import Request as IsolateRequest
    from distdiag.commands.gpu_test.types import Request as GpuTestRequest
    from distdiag.commands.gpu_test.view import gpu_test_view
    from distdiag.launch.plan import make_plan
    from distdiag.launch.record import Inventory, NodeSlot, RunRecord
    from distdiag.launch.types import NodeFacts
    from distdiag.report import Finding

    sizes = (1024, 2048, 4096)
    jobs: dict[str, Callable[[], Any]] = {
        "gpu-test": lambda: gpu_test(GpuTestRequest(nproc=2)),
        "isolate": lambda: isolate(IsolateRequest(nproc=2)),
        "allreduce-bench": lambda: bench(BenchRequest(nproc=2, sizes=sizes)),
    }
    job = jobs[command]()
    view: Any = {"gpu-test": gpu_test_view, "isolate": isolate_view, "allreduce-bench": bench_view}[command]
    hosts = [Host(name=LIAR), Host(name=GOOD)]
    with Fleet(hosts, Replay(streams, b"never"), b"", NodeFacts, _LIMITS) as fleet:
        fleet.gather(lambda now: None)
        up = [node for node in fleet.nodes.values() if node.reply is not None]
        assert GOOD in {node.name for node in up}
        if len(up) < 2:
            raise SystemExit(3)  # what the other node recorded is of a run of both
        places = tuple(NodeSlot(node=node.name, host=node.host, slots=None, facts=node.reply) for node in up)
        plan = make_plan(job.request, places)
        if isinstance(plan, Finding):
            raise SystemExit(3)
        specs = {share.node: specs_of(share.first_rank, share.nproc) for share in plan.shares}
        run = rank_runs.Run(fleet, specs, "", job.request.stages, lambda now: tell(job, now))
        meeting = meeting_of(fleet)
        outcome = run.wait(0.05)
        scene = Inventory(places=places, rows=fleet.rows, refusals=dict(fleet.refusals))
        course = RunRecord(outcome, list(run.traces.values()), {}, run.stalled_s, meeting, run.lost)
        assert all(trace.finished for trace in course.traces if trace.host == GOOD)
        found = job.diagnose(job.request, scene, plan, course)
        show(found, view)


def specs_of(first: int, count: int) -> list[rank_runs.RankSpec]:
    return [
        rank_runs.RankSpec(rank=first + local, local_rank=local, config={}, env={}, forked=False)
        for local in range(count)
    ]


def meeting_of(fleet: Fleet) -> RendezvousTest:
    """Assemble the nodes' messages about the paths between them."""
    found = RendezvousTest(head=LIAR, hosts={name: name for name in fleet.nodes}, address="10.0.0.1", port=29500)
    for node, record in fleet._pending:
        if isinstance(record, records.ReachListening):
            found.networks[node.name] = record.network
        elif isinstance(record, protocol.ReachName):
            found.lookups.append(LookUp.of(node.name, record))
        elif isinstance(record, records.ReachProbe):
            purpose = record.probe.key.partition(" ")[0]
            other = GOOD if node.name == LIAR else LIAR
            found.paths.append(NetworkPath(source=node.name, target=other, purpose=purpose, probe=record.probe))
    return found


def tell(job: Any, run: rank_runs.Run) -> None:  # noqa: ANN401 - of any command
    if job.report_progress is not None:
        with output.Progress() as progress:
            job.report_progress(run, progress)


@pytest.mark.parametrize("name", RANKS)
def test_ranks_of_a_node_that_lies_are_its_own_row(name: str, recorder: Recorder) -> None:
    streams = recorder.streams(RANKS[name])
    cases = streams_of_a_liar(streams[LIAR])
    assert_survived(run_calls((how, partial(run_ranks, name, {**streams, LIAR: stream})) for how, stream in cases))


HELLO = b'\n\x1eDD1 {"kind": "ready"}\n\x1eDD1 {"kind": "hello", "host": "liar", "machine": "another"}\n\x1eDD1 '
LIARS = {
    "deep": HELLO + b"[" * 10**6 + b"\n",
    "deep facts": HELLO + b'{"kind": "facts", "facts": {"host": ' + b"[" * 10**6 + b"\n",
    "odd types": b'\n\x1eDD1 {"kind": "hello", "host": ["a"], "machine": {}, "py_spy": 7}\n',
    "no kind": HELLO + b'{"facts": {}}\n',
    "an array": HELLO + b"[1]\n",
    "half a letter": HELLO + b'{"kind": "facts", "facts": {"host": "\\ud800"}}\n',
    "no UTF-8": HELLO + b'{"kind": "facts", "facts": {"host": "\xff\xfe"}}\n',
    "infinite": HELLO + b'{"kind": "facts", "facts": {"host": 1e999, "user": NaN}}\n',
    "endless": HELLO + b"{" + b'"' * 40 * 2**20 + b"\n",
    "escapes": HELLO + b'{"kind": "\x1b]0;owned\x07 \\u001b[2J"}\n',
}


@pytest.mark.parametrize(
    ("command", "hows"),
    [("core-bt --check-setup", [*LIARS]), ("pyspy-all --job {job}", ["deep facts"])],
)
def test_each_lying_host_of_a_real_run_is_a_row_of_its_own(
    command: str, hows: list[str], recorder: Recorder, tmp_path: Path
) -> None:
    liars = {f"{LIAR}{number}": how for number, how in enumerate(hows)}
    for host, how in liars.items():
        (tmp_path / host).write_bytes(LIARS[how])
    script = tmp_path / "via"
    script.write_text(f'[ -e "{tmp_path}/$1" ] && {{ cat "{tmp_path}/$1"; exec cat >/dev/null; }}; exec sh')
    arguments = [*command.format(**recorder.places).split(), "--hosts", ",".join([*liars, GOOD])]
    arguments += ["--via", f"sh {script} {{host}}"]
    result = distdiag(*arguments, "--json")
    assert "Traceback" not in result.err
    assert result.code in (1, 3)
    findings = [one for one in result.report["findings"] if one["id"].startswith("hosts.")]
    assert sorted(host for one in findings for host in one["where"]["hosts"]) == sorted(liars)
    for one in findings:
        assert one["id"] == "hosts.protocol-error"
        assert "invalid answer" in one["title"] or "over 32 MiB" in one["title"]
        assert len(one["title"]) < 500
    shown = distdiag(*arguments)
    assert LIAR in shown.out
    assert not set(shown.out + shown.err) & {"\x1b", "\x07"}


# One of each way to ask nodes: core-bt as cuda-env and trace show do, hang as pyspy-all, trace sys as trace fds.
@pytest.mark.parametrize("name", ["gpu-test", "core-bt", "hang", "sys"])
def test_damaged_streams_are_survived_by_the_whole_program(name: str, recorder: Recorder) -> None:
    arguments = RANKS[name] if name in RANKS else readers()[name].arguments
    streams = recorder.streams(arguments)
    command = recorder.words(arguments, _REPLAY)
    write(recorder.folder / GOOD, streams[GOOD])  # the last one recorded was of another command

    def cases() -> Iterator[tuple[str, list[str], Callable[[], None]]]:
        for how, stream in islice(streams_of_a_liar(streams[LIAR]), _WHOLE):
            yield how, command, partial(write, recorder.folder / LIAR, stream)

    assert_survived(run_each(cases()), _WHOLE)


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
