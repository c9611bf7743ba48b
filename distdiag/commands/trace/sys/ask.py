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
    logs: str
    payload_bytes: int
    from_: tuple[str, ...]
    report: str
    cluster: Cluster
    as_json: bool

    @property
    def chooses(self) -> bool:
        """Whether processes that run were named."""
        return bool(self.pids or self.ranks or self.job)


def judge(typed: Typed, program: str) -> Report[TraceSys]:
    """Judge logs that somebody has.

    Raises:
        UsageError: the options contradict each other, or there is no such file.
        DistdiagError: none of them is a log of strace.
    """
    from distdiag.commands.trace.sys import saved
    from distdiag.commands.trace.sys.diagnose import judge_logs

    if typed.chooses or typed.logs or typed.payload_bytes or typed.report or typed.only or typed.cluster.typed():
        raise UsageError(
            "--from judges logs that are there",
            hint="leave out processes, hosts, --only, --logs, --payload and --report",
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
    _check_payload(typed)
    return Request(
        program=program,
        cluster=typed.cluster,
        wanted=Wanted(),
        only=parse_only(typed.only),
        logs=typed.logs,
        payload_bytes=typed.payload_bytes,
    )


def _check_payload(typed: Typed) -> None:
    if typed.payload_bytes and not typed.logs:
        raise UsageError("--payload is for the logs of --logs: no report quotes it", hint="add --logs DIR")


def request_of(typed: Typed, program: str) -> Request:
    """Check the options that attach to processes. Raises UsageError."""
    _check_payload(typed)
    if typed.report:
        raise UsageError("--report is for -- COMMAND, whose stdout is the job's own", hint="--json > FILE")
    if not typed.chooses and not typed.from_:
        raise UsageError(
            "say what to trace: being traced makes a process slow, so nobody is chosen by itself",
            hint=f"{program} trace sys --rank 0   (or --pid PID, --job ID, -- COMMAND, --from LOGS)",
        )
    return Request(
        program=program,
        cluster=typed.cluster,
        wanted=wanted(typed.pids, typed.ranks, typed.job, ""),
        for_s=parse_duration(typed.for_),
        payload_bytes=typed.payload_bytes,
        only=parse_only(typed.only),
        logs=typed.logs,
    )
