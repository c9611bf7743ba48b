"""The options of trace sys put together: to attach, to judge logs, or to start a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.commands.trace.ranks import Wanted, wanted
from distdiag.commands.trace.sys.choices import parse_duration, parse_only
from distdiag.commands.trace.sys.model import Request
from distdiag.errors import UsageError

if TYPE_CHECKING:
    from distdiag.cluster.targets import Cluster
    from distdiag.commands.trace.sys.model import TraceSys
    from distdiag.report import Report


@dataclass(frozen=True, kw_only=True)
class Typed:
    """The options as they were typed."""

    command: tuple[str, ...]
    pids: tuple[int, ...]
    ranks: tuple[str, ...]
    job: str
    for_: str
    only: tuple[str, ...]
    save: str
    from_: tuple[str, ...]
    report: str
    cluster: Cluster
    as_json: bool

    @property
    def chooses(self) -> bool:
        """Whether processes that run were named."""
        return bool(self.pids or self.ranks or self.job)


def attach(typed: Typed, program: str) -> Report[TraceSys]:
    """Trace processes that run.

    Raises:
        UsageError: the options contradict each other.
        DistdiagError: there is no such process; or the node side failed on this machine.
    """
    from distdiag.commands.trace.sys.check import check
    from distdiag.deliver import Progress

    request = _request(typed, program)
    with Progress() as progress:
        return check(request, progress)


def explain(typed: Typed, program: str) -> list[str]:
    """Write how the hosts would be reached. Raises UsageError."""
    from distdiag.commands.trace.sys.check import explain

    return explain(_request(typed, program))


def judge(typed: Typed, program: str) -> Report[TraceSys]:
    """Judge logs that somebody has.

    Raises:
        UsageError: the options contradict each other, or there is no such file.
        DistdiagError: none of them is a log of strace.
    """
    from distdiag.commands.trace.sys import saved
    from distdiag.commands.trace.sys.diagnose import judge_logs

    if typed.chooses or typed.save or typed.report or typed.only or typed.cluster.typed():
        raise UsageError(
            "--from judges logs that are there", hint="leave out processes, hosts, --only, --save and --report"
        )
    subjects, logs = saved.read([*typed.from_, *typed.command])  # a shell has made several names of --from DIR/*
    return judge_logs(Request(program=program, cluster=typed.cluster, wanted=Wanted()), subjects, logs)


def start(typed: Typed, program: str) -> Request:
    """Check the options of a job that is to be started. Raises UsageError."""
    if typed.chooses or typed.cluster.typed():
        raise UsageError(
            "-- COMMAND starts a job here; --pid, --rank, --job and hosts are for one that runs",
            hint="on several hosts, put it before the script in what starts the ranks: torchrun, srun, mpirun",
        )
    if typed.as_json:
        raise UsageError("stdout is the job's own", hint="--report FILE writes the report there, as JSON")
    return Request(
        program=program, cluster=typed.cluster, wanted=Wanted(), only=parse_only(typed.only), save=typed.save
    )


def _request(typed: Typed, program: str) -> Request:
    if typed.report:
        raise UsageError("--report is for -- COMMAND, whose stdout is the job's own", hint="--json > FILE")
    if not typed.chooses:
        raise UsageError(
            "say what to trace: being traced makes a process slow, so nobody is chosen by itself",
            hint=f"{program} trace sys --rank 0   (or --pid PID, --job ID, -- COMMAND, --from LOGS)",
        )
    return Request(
        program=program,
        cluster=typed.cluster,
        wanted=wanted(typed.pids, typed.ranks, typed.job, ""),
        for_s=parse_duration(typed.for_),
        only=parse_only(typed.only),
        save=typed.save,
    )
