"""Judges a table of nccl-tests alone, without a run, by the expected figures of its GPUs and network. Pure."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.rank_runs import Outcome
from distdiag.commands.allreduce_bench.findings import expected_of, hardware_findings, short, speed
from distdiag.commands.allreduce_bench.types import Bench, Expectation
from distdiag.diagnosis.wording import counted
from distdiag.errors import UsageError
from distdiag.facts.rank_identity import identify
from distdiag.ids import Shared
from distdiag.knowledge.busbw import Judgement, Setting
from distdiag.launch.types import Backend, Device, Versions
from distdiag.report import Finding, Fix, Level, Report

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.commands.allreduce_bench.earlier import Baseline, Earlier
    from distdiag.commands.allreduce_bench.types import Request

_LARGE = "all_reduce_perf -b 8 -e 8G -f 2"


def is_alone(request: Request) -> bool:
    """Return whether to judge a table without starting ranks. Raises UsageError for a useless --nics."""
    asks_for_ranks = request.nproc is not None or request.cluster.typed() or identify(os.environ) is not None
    alone = request.baseline is not None and request.baseline.is_table and not asks_for_ranks
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
    row = max(
        (row for row in table.rows if row.op == "all_reduce"),
        key=lambda row: (row.size_bytes, row.busbw_bytes_per_s),
        default=None,
    )
    verdict = None if row is None else _verdict(request, table, row)
    slow = (replace(each, fix=_test(request)) for each in hardware_findings(request, verdict))
    found = (*_wrong(request, table), *slow, *_unknown(request, table, verdict))
    return Report(
        command=request.command,
        data=_facts(request, table, verdict),
        findings=found,
        summary=found[0].title if found or row is None or verdict is None else _summary(request, table, row),
    )


def _setting(request: Request, table: Baseline) -> Setting | None:
    """Return the setting of the measurement; None if the table's head is missing."""
    if not table.world_size:
        return None
    nodes = table.nodes or 1
    ranks = max(1, table.world_size // nodes)
    nics = request.nics_bytes_per_s
    return Setting(
        device_name=table.device,
        world_size=table.world_size,
        nodes=nodes,
        ranks_per_node=ranks,
        nic_bytes_per_s=None if nics is None else nics / ranks,
    )


def _verdict(request: Request, table: Baseline, row: Earlier) -> Expectation | None:
    setting = _setting(request, table)
    return None if setting is None else expected_of(setting, row.size_bytes, row.busbw_bytes_per_s)


def _wrong(request: Request, table: Baseline) -> Iterator[Finding]:
    if table.wrong:
        yield Finding(
            id=Shared.TABLE_WRONG.of(request.command),
            level=Level.FAIL,
            title=f"{counted(table.wrong, 'result')} of the table have wrong data (#wrong)",
            detail="nccl-tests compared the elements that it received: a GPU, link or NIC changes data.",
            fix=Fix(
                text="find the GPU that computes or sends wrong data, on the same nodes",
                commands=(f"{request.program} gpu-test --isolate --hosts LIST",),
            ),
        )


def _test(request: Request) -> Fix:
    return Fix(
        text="check which transport NCCL uses on these nodes, then test pairs of ranks to find the link",
        commands=(f"NCCL_DEBUG=INFO {_LARGE}", f"{request.program} gpu-test --isolate --hosts LIST"),
    )


def _unknown(request: Request, table: Baseline, verdict: Expectation | None) -> Iterator[Finding]:
    """Report why judgement is impossible, and the missing data."""
    if verdict is not None and verdict.judgement != Judgement.UNKNOWN:
        return
    if not table.world_size:
        title, fix = "the table does not name its ranks and GPUs", "paste it with the lines that begin with #"
    elif verdict is None:
        title, fix = "the table has no all_reduce: only that has known figures", f"run {_LARGE}"
    else:
        title, fix = verdict.lines[-1], f"run {_LARGE}, or compare with a run on nodes that are known to be good"
        if table.nodes and table.nodes > 1 and request.nics_bytes_per_s is None:
            fix = "add the NICs of a node, for example --nics 8x400"
    yield Finding(id=Shared.TABLE_UNJUDGED.of(request.command), level=Level.UNKNOWN, title=title, fix=Fix(text=fix))


def _summary(request: Request, table: Baseline, row: Earlier) -> str:
    setting = _setting(request, table)
    assert setting is not None
    network = "" if setting.nodes < 2 or setting.nic_bytes_per_s else " (its NICs are unknown)"
    return (
        f"all_reduce of {short(row.size_bytes)} at busbw {speed(row.busbw_bytes_per_s)} is as it should "
        f"be on {setting.nodes} x {setting.ranks_per_node} {table.device}{network}"
    )


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
        results=(),
        arrivals=(),
        verdict=verdict,
        compared=(),
        no_core_share=0.0,
        training=(),
    )
