"""`gpu-test --isolate`: the job of the ranks, the Report from their pairs, and its view. `diagnose` is pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import name_ranks
from distdiag.commands.gpu_test import compute_findings
from distdiag.commands.gpu_test.isolate.classify import classify
from distdiag.commands.gpu_test.isolate.types import Isolated, Kind, Pair, PairStatus, Request
from distdiag.commands.gpu_test.types import compute_config
from distdiag.diagnosis.wording import counted, format_size
from distdiag.errors import UsageError
from distdiag.facts.gpu.computed import bad_ranks
from distdiag.ids import Shared
from distdiag.launch import rank_report, runner
from distdiag.launch.rank_runs import Outcome
from distdiag.launch.record import Job
from distdiag.launch.types import Device
from distdiag.launch.view import log_lines, rank_table, run_lines
from distdiag.output import host_table, plain_table
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from distdiag.cluster.records import PairMessage
    from distdiag.commands.gpu_test.isolate.types import Classification, Fault
    from distdiag.launch.record import Allocation, Inventory, Plan, RunRecord, SavedRun
    from distdiag.runner import Subcommand

_ITERATIONS = 4
_SIZE_BYTES = {Device.CPU: 4 * 2**20, Device.CUDA: 64 * 2**20}
_LEAST_BYTES = 4096
_PAIR_TIMEOUT_S = {Device.CPU: 3.0, Device.CUDA: 15.0}
"""Timeout for all of a pair's work, including NCCL's connection setup, which takes seconds."""
_LEAST_TIMEOUT_S = {Device.CPU: 1.5, Device.CUDA: 5.0}
"""Once pairs have worked, others may take five times as long as the slowest of them, but at least this."""
_PAUSE_S = 0.25
"""Rest before each repetition of slow pairs: noise occurs in spells, which must not cover all samples of a pair. Adds a
second or two in all, and only if a pair is slow."""
_WIDEST = 10
"""Ranks in a table of pairs."""
_WORDS = {PairStatus.FAILED: "failed", PairStatus.SKIPPED: ".", PairStatus.WRONG: "wrong"}
_SIGNS = {PairStatus.SLOW: ("!", "bold red"), PairStatus.UNSURE: ("?", "yellow")}


def subcommand() -> Subcommand[Request, SavedRun, Isolated]:
    """Return the command."""
    made = runner.subcommand(
        "gpu-test", Request, job_of, lambda _, report: isolate_view(report), saved_as="gpu-test --isolate"
    )
    return replace(made, shown_as_typed=("expected_bytes_per_s",))


def job_of(request: Request) -> Job[Request, Isolated]:
    """Return the job of the ranks and its diagnosis. Raises UsageError if the request contradicts itself."""
    if request.size_bytes is not None and request.size_bytes < _LEAST_BYTES:
        raise UsageError("--size is too small to measure bandwidth", hint="leave it out, or use 1MiB or more")
    return Job(
        request=request,
        rank="distdiag.commands.gpu_test.isolate.rank",
        config=_config,
        diagnose=diagnose,
        data=Isolated,
    )


def _config(request: Request, plan: Plan, share: Allocation, rank: int) -> dict[str, object]:
    return {
        "size_bytes": request.size_bytes or _SIZE_BYTES[plan.device],
        "nodes": plan.machines,
        "iterations": _ITERATIONS,
        "at_once": max(1, (share.cpus or 2) // 2) if plan.device is Device.CPU else None,
        "patience_s": (_LEAST_TIMEOUT_S[plan.device], min(_PAIR_TIMEOUT_S[plan.device], request.timeout_s)),
        "pause_s": _PAUSE_S,
        "fault": None if request.fault is None else _fault(request.fault, plan.nproc, rank),
        **compute_config(request.compute_s, plan, share),
    }


def _fault(fault: Fault, nproc: int, rank: int) -> dict[str, object]:
    if fault.in_compute:
        return {"kind": fault.kind if rank in fault.ranks else ""}
    hit = [[a, b] for a in range(nproc) for b in range(a + 1, nproc) if fault.meets(a, b)]
    if not hit and nproc > 1:
        raise UsageError(
            f"--inject {fault.option} affects no pair of {nproc} ranks", hint="name some of the ranks, not all"
        )
    lag_s = 0.05 if fault.kind == "slow" else 0.0  # of each call; 0: one end does not answer
    return {"pairs": hit, "ranks": list(fault.ranks) or list(range(nproc)), "lag_s": lag_s}


def diagnose(request: Request, scene: Inventory, plan: Plan, course: RunRecord) -> Report[Isolated]:
    """Return the report of a run."""
    reported: list[PairMessage] = next(reversed(rank_report.payloads(course.traces[:1], "pairs")), [])
    computed = {trace.rank: own for trace in course.traces for own in rank_report.payloads([trace], "computed")}
    left_out = set().union(*bad_ranks({rank: own.summary() for rank, own in computed.items()}))
    host_of = {trace.rank: trace.host for trace in course.traces if trace.rank not in left_out}
    # No pair of these, unless a node contradicts itself.
    pairs = [Pair.of(told) for told in reported if not {told["a"], told["b"]} & left_out]
    classification, statuses = classify(pairs, host_of, least_bytes_per_s=request.expected_bytes_per_s)
    finished = course.outcome is Outcome.FINISHED
    steps = [event.elapsed_s for event in course.traces[0].events if event.stage == "pairs"]
    data = Isolated(
        **vars(rank_report.facts_of(request, scene, plan, course)),
        size_bytes=request.size_bytes or _SIZE_BYTES[plan.device],
        left_out=tuple(sorted(left_out)),
        pairs=tuple(replace(pair, status=statuses[pair.a, pair.b]) for pair in pairs),
        classification=classification if finished else None,
        measuring_s=round(steps[-1] - steps[0], 3) if steps else None,
    )
    found = rank_report.findings_of(request, scene, plan, course)
    found += compute_findings.findings_of(computed, course.traces, request)
    if finished and len(host_of) > 1:
        found += [_finding(request, classification, data)] if classification.kind is not Kind.HEALTHY else []
        found += rank_report.paused(request, course.traces)
    measured = sum(pair.busbw_bytes_per_s is not None or pair.status is PairStatus.FAILED for pair in data.pairs)
    return rank_report.concluded(
        request,
        scene,
        course.outcome,
        data,
        found,
        passed=lambda hosts: _passed(data, classification, hosts),
        so_far="" if finished else f"; {measured} of {counted(len(pairs), 'pair')} measured",
    )


def _finding(request: Request, found: Classification, data: Isolated) -> Finding:
    host_of = {rank.rank: rank.host for rank in data.ranks}
    # A failed pair is a fault even if the culprit is unknown; a slow pair may be as it should be.
    broken = any(pair.status in (PairStatus.FAILED, PairStatus.WRONG) for pair in data.pairs)
    errors = list(dict.fromkeys(pair.error for pair in data.pairs if pair.error))
    # The first line counts pairs slower than the others: zero here.
    reason = found.reason[1:] if found.kind is Kind.UNIFORMLY_SLOW else found.reason
    ranks = sorted({*found.ranks, *(end for link in found.links for end in link)})
    hosts = tuple(dict.fromkeys([*found.hosts, *(host_of[rank] for rank in ranks)]))
    return Finding(
        id=Shared(found.kind).of(request.command),
        level=Level.UNKNOWN if found.kind is Kind.UNDECIDABLE and not broken else Level.FAIL,
        title=found.sentence,
        where=Where(hosts=hosts, ranks=tuple(ranks)),
        evidence=(*reason, *(f"torch: {error}" for error in errors[:2])),
        fix=Fix(text=found.next) if found.next else None,
    )


def _passed(data: Isolated, found: Classification, hosts: str) -> str:
    if data.world_size == 1:
        return f"a single rank on {hosts}: no pair to test"
    on = rank_report.ran_on(data.backend, data.device)
    return f"{data.world_size} ranks on {hosts}, {counted(len(data.pairs), 'pair')} ({on}): {found.sentence}"


def isolate_view(report: Report[Isolated]) -> Iterator[RenderableType]:
    """Yield unusable hosts, the ranks if one failed, and the pairs if the table fits; the evidence has the bad ones."""
    from rich.text import Text

    data = report.data
    yield from host_table(data.hosts)
    if not data.ranks:
        return
    if data.classification is None and any(finding.level is Level.FAIL for finding in report.findings):
        yield rank_table(data)
        yield ""
    if data.pairs and data.world_size <= _WIDEST:
        yield _matrix(data)
    yield Text("\n".join(["", *run_lines(data), *_how(data), *log_lines(data)]))


def _matrix(data: Isolated) -> Table:
    from rich.table import Column

    ranks = [rank.rank for rank in data.ranks]
    of = {(pair.a, pair.b): pair for pair in data.pairs}
    table = plain_table(
        Column("GB/s", justify="right", no_wrap=True),
        *(Column(f"rank {rank}" if rank == 0 else str(rank), justify="right", no_wrap=True) for rank in ranks),
    )
    for a in ranks:
        table.add_row(f"rank {a}", *(_cell(of.get((min(a, b), max(a, b)))) for b in ranks))
    return table


def _cell(pair: Pair | None) -> Text:
    from rich.text import Text

    if pair is None:
        return Text("")
    if pair.busbw_bytes_per_s is None or pair.status in _WORDS:
        return Text(_WORDS.get(pair.status, "."), style="" if pair.status is PairStatus.SKIPPED else "bold red")
    # A sign besides the colour, which the terminal may lack.
    sign, style = _SIGNS.get(pair.status, (" ", ""))
    return Text(f"{pair.busbw_bytes_per_s / 1e9:.2f}{sign}", style=style)


def _how(data: Isolated) -> Iterator[str]:
    if data.pairs:
        yield f"all_reduce of {format_size(data.size_bytes)} between two ranks at a time, every element checked"
    if data.left_out:
        are = "computes" if len(data.left_out) == 1 else "compute"
        yield f"not paired: {name_ranks(data.left_out)}, which {are} wrongly or slowly"
    if any(pair.status is PairStatus.SLOW for pair in data.pairs):
        uniform = data.classification is not None and data.classification.kind == "uniformly-slow"
        yield "! below --expect" if uniform else "! slow: measured again alone, each time next to a good pair"
    if any(pair.status is PairStatus.UNSURE for pair in data.pairs):
        yield "? looks slow, but so did good pairs: not enough to decide"
