"""What you type for trace sys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.errors import DistdiagError, UsageError
from distdiag.options import JsonOpt, SaveOpt, StrictOpt, called_as, on_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distdiag.commands.trace.sys.types import Request, TraceSys
    from distdiag.report import Report

KINDS = ("network", "file", "process", "desc", "memory", "signal")
"""Classes of calls, as strace names them."""
_UNITS_S = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0}
_LONGEST_S = 600.0


@on_hosts
def trace_sys(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="Start this job under strace: a script, -m MODULE, a program."),
    ] = None,
    pid: Annotated[
        list[int] | None,
        typer.Option("--pid", "-p", min=1, metavar="PID", help="Attach to this process; repeatable."),
    ] = None,
    rank: Annotated[
        list[str] | None,
        typer.Option(metavar="RANKS", help="Attach to these ranks: 3, or 0-3,7; of several jobs, name one by --job."),
    ] = None,
    job: Annotated[
        str,
        typer.Option(metavar="ID", help="Attach to this job: torchrun's run id, MASTER_ADDR:MASTER_PORT, a SLURM id."),
    ] = "",
    for_: Annotated[str, typer.Option("--for", metavar="TIME", help="How long to trace: 5s, 500ms, 2m.")] = "5s",
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KINDS", help="Only these calls: network,file,process,desc,memory,signal."),
    ] = None,
    logs: Annotated[
        str, typer.Option(metavar="DIR", help="Write strace's logs to this directory on each node, named by rank.")
    ] = "",
    payload: Annotated[
        int,
        typer.Option(
            min=0,
            max=65536,
            metavar="BYTES",
            help="With --logs, keep this many bytes of the data of each call; may contain passwords and tokens.",
        ),
    ] = 0,
    save: SaveOpt = "",
    from_: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="PATH", help="Analyze facts that --save wrote, or logs of strace; repeatable."),
    ] = None,
    report: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="With -- COMMAND: write the report to this file, as JSON, instead of stderr."
        ),
    ] = "",
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Use strace to show what each rank is doing: blocking calls and their peers, errors, slow storage, busy-waits.

    Attaches to running ranks for a short time, starts a job under strace (-- COMMAND), or reads strace logs (--from).

    While strace is attached, each system call takes 75-190 times as long; computation is not slowed. `trace blocked`
    shows which rank blocks which without that cost. --only does not reduce the cost for a running process; for a job
    started with it, it does.

    The stdout, stderr and exit status of a started job pass through unchanged; its report goes to stderr at the end.
    With --logs there is no report, but a log for each rank, to be read with --from DIR.

    Exit status: 0 no problem found, 1 problem found, 2 wrong usage, 3 some processes could not be traced,
    130 interrupted.

    \b
    Examples:
      distdiag trace sys --rank 0-3 --for 2s
      distdiag trace sys --only network --logs /tmp/logs -- train.py
      distdiag trace sys --from /tmp/logs
    """
    from distdiag import runner
    from distdiag.commands.trace.sys.attach import SUBCOMMAND
    from distdiag.commands.trace.sys.types import COMMAND
    from distdiag.commands.trace.sys.view import trace_sys_view
    from distdiag.gathered import are_facts
    from distdiag.output import Output, deliver, fail

    typed = Typed(
        command=tuple(command or ()),
        pids=tuple(pid or ()),
        ranks=tuple(rank or ()),
        job=job,
        for_=for_,
        only=tuple(only or ()),
        logs=logs,
        payload_bytes=payload,
        save=save,
        from_=tuple(from_ or ()),
        report=report,
        cluster=cluster,
        as_json=as_json,
    )
    if typed.command and not typed.from_:
        try:
            _launch(typed)
        except DistdiagError as error:
            fail(COMMAND, error, as_json=as_json)
    if typed.from_ and not are_facts(typed.from_):
        output = Output(json=as_json, strict=strict)
        deliver(COMMAND, lambda: _judge_logs(typed), lambda report: trace_sys_view(report.data), output)
    options = runner.Options(as_json, strict, save, from_, cluster.explain)
    runner.run(SUBCOMMAND, lambda: _to_attach(typed), options)


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
    save: str
    from_: tuple[str, ...]
    report: str
    cluster: Cluster
    as_json: bool

    @property
    def chooses(self) -> bool:
        """Whether running processes were selected."""
        return bool(self.pids or self.ranks or self.job)

    def request(self, for_s: float = 5.0) -> Request:
        """Return the request. Raises UsageError."""
        from distdiag.commands.trace.ranks import wanted
        from distdiag.commands.trace.sys.types import Request

        if self.payload_bytes and not self.logs:
            raise UsageError("--payload requires --logs: the report does not quote data", hint="add --logs DIR")
        return Request(
            program=called_as(),
            cluster=self.cluster,
            wanted=wanted(self.pids, self.ranks, self.job, ""),
            for_s=for_s,
            only=parse_only(self.only),
            logs=self.logs,
            payload_bytes=self.payload_bytes,
        )


def _launch(typed: Typed) -> NoReturn:
    """Start a job. Raises DistdiagError."""
    from distdiag.commands.trace.sys.launch import launch

    if typed.save:
        raise UsageError(
            "--save cannot be combined with -- COMMAND", hint="use --logs DIR to keep the logs of the ranks"
        )
    if typed.chooses or typed.cluster.typed():
        raise UsageError(
            "-- COMMAND starts a job on this host; --pid, --rank, --job and --hosts select running processes",
            hint="on several hosts, put it between the launcher (torchrun, srun, mpirun) and the script",
        )
    if typed.as_json:
        raise UsageError(
            "--json cannot be combined with -- COMMAND: stdout belongs to the job",
            hint="--report FILE writes the report as JSON",
        )
    launch(typed.command, typed.request(), typed.report)


def _judge_logs(typed: Typed) -> Report[TraceSys]:
    """Analyze existing logs. Raises DistdiagError if none of them is a log of strace."""
    from distdiag.commands.trace.sys import logs
    from distdiag.commands.trace.sys.diagnose import diagnose_logs

    if typed.chooses or typed.logs or typed.payload_bytes or typed.report or typed.only or typed.cluster.typed():
        raise UsageError(
            "--from analyzes existing logs",
            hint="remove --pid, --rank, --job, --hosts, --only, --logs, --payload and --report",
        )
    threads, found = logs.read([*typed.from_, *typed.command])  # a shell expands --from DIR/* to several names
    return diagnose_logs(typed.request(), threads, found)


def _to_attach(typed: Typed) -> Request:
    """Check the options that attach to processes. Raises UsageError."""
    if typed.report:
        raise UsageError("--report requires -- COMMAND", hint="use --json > FILE")
    if not typed.chooses and not typed.from_:
        raise UsageError(
            "no process selected: strace slows processes down, so name the ranks or pids to trace",
            hint=f"{called_as()} trace sys --rank 0   (or --pid PID, --job ID, -- COMMAND, --from LOGS)",
        )
    return typed.request(parse_duration(typed.for_))


def parse_duration(text: str) -> float:
    """Parse a time in seconds: 5, 5s, 500ms, 2m. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|)\s*", text)
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if match is None:
        raise UsageError(f"--for: {text!r} is not a time", hint="write seconds, or a unit: 5, 5s, 500ms, 2m")
    if not 0.0 < seconds <= _LONGEST_S:
        raise UsageError(
            f"--for: {text} is too {'short' if not seconds else 'long'}",
            hint=f"more than 0, at most {_LONGEST_S / 60:.0f}m: traced processes are slow",
        )
    return seconds


def parse_only(texts: Iterable[str]) -> tuple[str, ...]:
    """Parse what --only takes: network,file. Raises UsageError."""
    found = dict.fromkeys(name.strip().lstrip("%") for text in texts for name in text.split(","))
    for name in found:
        if name not in KINDS:
            raise UsageError(f"--only: {name!r} is not a class of system calls", hint=f"one of {', '.join(KINDS)}")
    return tuple(found)
