"""Judges a table of nccl-tests alone, without a run, by the expected figures of its GPUs and network. Pure."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.allreduce_bench.findings import expected_of, hardware_findings, short, speed
from distdiag.commands.allreduce_bench.types import Bench
from distdiag.diagnosis.verdicts import finding
from distdiag.diagnosis.wording import counted
from distdiag.errors import UsageError
from distdiag.facts.process.rank_identity import identify
from distdiag.knowledge.busbw import Case, Judgement
from distdiag.launch.rank_runs import Outcome
from distdiag.launch.types import Backend, Device, Versions
from distdiag.report import Fix, Report

if TYPE_CHECKING:
    from distdiag.commands.allreduce_bench.types import Baseline, Expectation, Request

_LARGE = "all_reduce_perf -b 8 -e 8G -f 2"


def is_alone(request: Request) -> bool:
    """Return whether to judge a table without starting ranks. Raises UsageError for a useless --nics."""
    asks_for_ranks = request.nproc is not None or request.cluster.typed() or identify(os.environ) is not None
    is_table = request.baseline is not None and not request.baseline.made_by.startswith("distdiag")
    alone = is_table and not asks_for_ranks
    if request.nics_bytes_per_s is not None and not alone:
        raise UsageError(
            "--nics is for a table of nccl-tests that is judged alone",
            hint="use --compare FILE with the text of nccl-tests, without --nproc and hosts",
        )
    return alone


def judge(request: Request) -> Report[Bench]:
    """Judge the largest all_reduce of the table."""
    table = request.baseline
    assert table is not None
    nics = request.nics_bytes_per_s
    rows = [(row.size_bytes, row.busbw_bytes_per_s or 0.0) for row in table.rows if row.op == "all_reduce"]
    size_bytes, busbw = max(rows, default=(0, 0.0))
    case = Case(
        busbw=busbw,
        device_name=table.device,
        world_size=table.world_size or 0,
        nodes=table.nodes or 1,
        nic_bytes_per_s=None,
    )
    if nics is not None:
        case = replace(case, nic_bytes_per_s=nics / case.ranks_per_node)
    verdict = expected_of(case, size_bytes) if rows and table.world_size else None
    pairs = f"{request.program} gpu-test --isolate --hosts LIST"
    test = Fix(
        text="check which transport NCCL uses on these nodes, then test pairs of ranks to find the link",
        commands=(f"NCCL_DEBUG=INFO {_LARGE}", pairs),
    )
    found = [replace(slow, fix=test) for slow in hardware_findings(request, verdict)]
    if table.wrong:
        wrong = {"results": counted(table.wrong, "result"), "pairs": pairs}
        found.insert(0, finding("allreduce-bench.table-wrong", wrong))
    if verdict is None or verdict.judgement == Judgement.UNKNOWN:
        found.append(finding("allreduce-bench.table-unjudged", _missing(request, table, verdict)))
    network = "" if case.nodes < 2 or nics else " (its NICs are unknown)"
    summary = (
        f"all_reduce of {short(size_bytes)} at busbw {speed(busbw)} is as it should "
        f"be on {case.nodes} x {case.ranks_per_node} {table.device}{network}"
    )
    return Report(
        command=request.command,
        data=_facts(request, table, verdict),
        findings=tuple(found),
        summary=found[0].title if found else summary,
    )


def _missing(request: Request, table: Baseline, verdict: Expectation | None) -> dict[str, str]:
    """Return why judgement is impossible, and how to supply the missing data."""
    if not table.world_size:
        why, fix = "the table does not name its ranks and GPUs", "paste it with the lines that begin with #"
    elif verdict is None:
        why, fix = "the table has no all_reduce: only that has known figures", f"run {_LARGE}"
    else:
        why, fix = verdict.lines[-1], f"run {_LARGE}, or compare with a run on nodes that are known to be good"
        if table.nodes and table.nodes > 1 and request.nics_bytes_per_s is None:
            fix = "add the NICs of a node, for example --nics 8x400"
    return {"why": why, "fix": fix}


def _facts(request: Request, table: Baseline, verdict: Expectation | None) -> Bench:
    return Bench(
        world_size=table.world_size or 0,
        backend=Backend.NCCL,
        device=Device.CUDA,
        timeout_s=request.timeout_s,
        versions=Versions(),
        ranks=(),
        outcome=Outcome.FINISHED,
        log_dirs={},
        hosts=(),
        rendezvous=None,
        device_name=table.device,
        nodes=table.nodes or 0,
        stat="mean",
        verdict=verdict,
    )
