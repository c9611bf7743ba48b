"""What the ranks themselves found wrong, as findings; the same error of many ranks is one finding. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag.cluster.hosts import name_ranks
from distdiag.diagnosis.wording import counted, format_size
from distdiag.knowledge import logs
from distdiag.launch.wording import fix_from, place, where, who
from distdiag.report import Finding, Fix, Level

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distdiag.cluster.rank_runs import RankTimeline
    from distdiag.launch.attribution import Attribution, Trouble
    from distdiag.launch.types import Request


def findings_of(parts: Attribution, traces: list[RankTimeline], request: Request) -> list[Finding]:
    """Return a finding for each trouble, with all ranks that have it."""
    by_kind: dict[tuple[str, str], list[Trouble]] = {}
    for trouble in parts.troubles:
        # Out of memory has other numbers on each rank, and is the same trouble all the same.
        words = trouble.message if trouble.kind != "out-of-memory" else ""
        by_kind.setdefault((trouble.kind, words), []).append(trouble)
    make = {
        "no-torch": _no_torch,
        "cuda-unavailable": _cuda_unavailable,
        "port-foreign": _port_foreign,
        "mismatch": _mismatch,
        "wrong-result": _wrong_result,
        "out-of-memory": _out_of_memory,
        "memory-corrupt": _memory_corrupt,
    }
    by_rank = {trace.rank: trace for trace in traces}
    return [
        make.get(kind, _failed)(group, [by_rank[rank] for rank in dict.fromkeys(_ranks_of(kind, group))], request)
        for (kind, _), group in by_kind.items()
    ]


def _ranks_of(kind: str, group: list[Trouble]) -> list[int]:
    """List the ranks at fault: rank 0 reports a mismatch of others; any other trouble is the reporting rank's own."""
    return sorted(deviating_ranks(group[0])) if kind == "mismatch" else [trouble.rank for trouble in group]


def failed_ranks(parts: Attribution) -> set[int]:
    """Return ranks that reported an error of their own, or do not match what was planned."""
    failed: set[int] = set()
    sources = _sources(parts.troubles)
    for trouble in parts.troubles:
        if trouble.kind == "mismatch":
            failed |= deviating_ranks(trouble)
        elif trouble.kind != "wrong-result" or not sources or trouble in sources:
            failed.add(trouble.rank)
    return failed


def _sources(troubles: Iterable[Trouble]) -> list[Trouble]:
    """List wrong results whose rank had sent wrong data itself: those of other ranks are its consequence."""
    return [trouble for trouble in troubles if trouble.details.get("own_wrong")]


def _no_torch(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    first = group[0]
    python = str(first.details.get("python", "python3"))
    absent = bool(first.details.get("missing"))
    return Finding(
        id=f"{request.command}.no-torch",
        level=Level.FAIL,
        title=f"{who(traces)} cannot import torch: {first.message}",
        detail="torch is not installed in this Python." if absent else "torch is installed, but does not load.",
        where=where(traces),
        evidence=(f"python: {python}",),
        fix=_fix_for_import(first, python, absent=absent),
    )


def _fix_for_import(trouble: Trouble, python: str, *, absent: bool) -> Fix:
    known = logs.recognise(trouble.message)
    if known is not None:
        return Fix(text=f"{known.means}: {known.fix}", commands=known.commands)
    if absent:
        return Fix(text="install it into that Python", commands=(f"{python} -m pip install torch",))
    return Fix(
        text="read the full error; then clear what shadows torch (PYTHONPATH, LD_LIBRARY_PATH), or reinstall the same "
        "build from the same source",
        commands=(f"{python} -c 'import torch'",),
    )


def _cuda_unavailable(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    built_for = group[0].details.get("built_for")
    torch = group[0].details.get("torch")
    known = logs.recognise(group[0].message)
    cpu_only = "this torch is a CPU-only build; install a CUDA build"
    return Finding(
        id=f"{request.command}.cuda-unavailable",
        level=Level.FAIL,
        title=f"{who(traces)} cannot use a GPU: {group[0].message}",
        where=where(traces),
        evidence=(f"torch {torch}, built for {'CUDA ' + str(built_for) if built_for else 'the CPU only'}",),
        fix=fix_from(known, Fix(text="check the driver" if built_for else cpu_only, commands=("nvidia-smi",))),
    )


def _port_foreign(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    details = group[0].details
    answer = f'answers "{group[0].message}"' if group[0].message else "closes the connection without a reply"
    return Finding(
        id=f"{request.command}.port-foreign",
        level=Level.FAIL,
        title=f"{who(traces)} did not find rank 0 at {details.get('address')} port {details.get('port')}: another "
        f"program {answer}",
        where=where(traces),
        fix=Fix(text="use another rendezvous port", commands=(request.again(master_port="0"),)),
    )


def deviating_ranks(trouble: Trouble) -> set[int]:
    """Return ranks that differ from the plan, or from most others; all that are named where no value has a majority."""
    deviating: set[int] = set()
    planned = _planned(trouble)
    for field, values in _differing(trouble).items():
        groups = {value: set(ranks) for value, ranks in values.items()}
        usual = planned.get(field)
        if usual not in groups:
            most = sorted(groups, key=lambda value: len(groups[value]))
            usual = most[-1] if len(groups[most[-1]]) > len(groups[most[-2]]) else None
        deviating |= {rank for value, ranks in groups.items() if value != usual for rank in ranks}
    return deviating


def _mismatch(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    fields = _differing(group[0])
    words = [
        f"{field} is {' but '.join(f'{value} on {name_ranks(ranks)}' for value, ranks in values.items())}"
        for field, values in fields.items()
    ]
    versions = set(fields) & {"torch", "nccl"}
    fix = (
        "make every rank use the same environment"
        if versions
        else "make every rank call the same collective with the same dtype and size"
    )
    return Finding(
        id=f"{request.command}.mismatch",
        level=Level.FAIL,
        title=f"{who(traces)} {'does' if len(traces) == 1 else 'do'} not match the plan: {'; '.join(words)}",
        detail="The collective was not run: Gloo would return wrong data without an error, NCCL would hang.",
        where=where(traces),
        fix=Fix(text=fix),
    )


def _planned(trouble: Trouble) -> dict[str, str]:
    planned = trouble.details.get("planned")
    return {str(k): str(v) for k, v in planned.items()} if isinstance(planned, dict) else {}


def _differing(trouble: Trouble) -> dict[str, dict[str, list[int]]]:
    differing = trouble.details.get("differing")
    return differing if isinstance(differing, dict) else {}


def _wrong_result(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    sources = _sources(group)
    details: Mapping[str, Any] = (sources or group)[0].details
    first, total = details["first_index"], details["total"]
    op = details.get("op", "all_reduce")
    what = f"a wrong {op} of {format_size(details['size_bytes'])}" if "size_bytes" in details else "a wrong sum"
    values = f"{details['got']} instead of {details['expected']}"
    wrong = f"{details['wrong']} of {total} elements, the first at index {first}: {values}"
    if sources:
        guilty = [trace for trace in traces if trace.rank in {trouble.rank for trouble in sources}]
        where_wrong = (
            f"{counted(details['own_wrong'], 'wrong element')}, first at index {details.get('own_first_index')}"
        )
        title = f"{who(guilty)} sent wrong data from its own memory: {where_wrong}"
        fix = Fix(text="the data was wrong before it was sent: suspect that rank's memory (ECC errors) or device")
    else:
        guilty = traces
        title = f"{who(guilty)} received {what}: {details['how']}"
        fix = Fix(
            text="every rank sent correct data, so it changed in transit or in the reduction: suspect the link, or "
            "the peer access between the devices; pairs of ranks show which",
            commands=(request.pairs(),),
        )
    return Finding(
        id=f"{request.command}.wrong-result",
        level=Level.FAIL,
        title=title,
        detail=f"{name_ranks(trace.rank for trace in traces).capitalize()} received {what} ({details['how']}): "
        f"{wrong}. {op} returned without an error.",
        where=where(guilty),
        fix=fix,
    )


def _out_of_memory(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    details: Mapping[str, Any] = group[0].details
    stage, doing = place(traces[0], before_end=True)
    got = (
        f": it got {format_size(details['got_bytes'])} of {format_size(details['requested_bytes'])}"
        if "requested_bytes" in details and "got_bytes" in details
        else ""
    )
    return Finding(
        id=f"{request.command}.out-of-memory",
        level=Level.FAIL,
        title=f"{who(traces)} ran out of memory in stage {stage} ({doing}){got}",
        detail=group[0].message,
        where=where(traces),
        fix=Fix(
            text="check what else uses that memory, or request less",
            commands=("free -h" if _on_cpu(traces) else "nvidia-smi", request.again(**request.less())),
        ),
    )


def _on_cpu(traces: list[RankTimeline]) -> bool:
    return any(event.payload.get("started", {}).get("device") == "cpu" for event in traces[0].events)


def _memory_corrupt(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    details: Mapping[str, Any] = group[0].details
    return Finding(
        id=f"{request.command}.memory-corrupt",
        level=Level.FAIL,
        title=f"{who(traces)} read back wrong data from its memory, in {counted(len(details['chunks']), 'chunk')} of "
        f"{format_size(details['chunk_bytes'])}",
        where=where(traces),
        fix=Fix(
            text="the memory of that device is faulty; check its ECC errors",
            commands=("dmesg -T | grep -iE 'mce|edac'" if _on_cpu(traces) else "nvidia-smi -q -d ECC,PAGE_RETIREMENT",),
        ),
    )


def _failed(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    known = logs.recognise(group[0].message)
    stage, doing = place(traces[0], before_end=True)
    return Finding(
        id=f"{request.command}.rank-failed",
        level=Level.FAIL,
        title=f"{who(traces)} failed in stage {stage} ({doing}): {known.means if known else group[0].message}",
        detail=group[0].message if known else "",
        where=where(traces),
        fix=fix_from(known, Fix(text="rerun and keep the ranks' logs", commands=(request.again(nccl_debug=""),))),
    )
