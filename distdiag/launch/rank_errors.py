"""Findings about errors reported by ranks; one finding per error. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distdiag.cluster.hosts import name_ranks
from distdiag.diagnosis.wording import counted, format_size
from distdiag.knowledge import logs
from distdiag.launch.wording import found, place

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distdiag.launch.attribution import Attribution, Trouble
    from distdiag.launch.rank_runs import RankTimeline
    from distdiag.launch.types import Request
    from distdiag.report import Finding


def findings_of(parts: Attribution, traces: list[RankTimeline], request: Request) -> list[Finding]:
    """Return a finding for each error, with all its ranks."""
    by_kind: dict[tuple[str, str], list[Trouble]] = {}
    for trouble in parts.troubles:
        # Out-of-memory messages differ in numbers only.
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
    """List the ranks at fault: rank 0 reports mismatches of others; other errors are the reporting rank's own."""
    return sorted(deviating_ranks(group[0])) if kind == "mismatch" else [trouble.rank for trouble in group]


def failed_ranks(parts: Attribution) -> set[int]:
    """Return ranks that reported their own error, or deviate from the plan."""
    failed: set[int] = set()
    sources = _sources(parts.troubles)
    for trouble in parts.troubles:
        if trouble.kind == "mismatch":
            failed |= deviating_ranks(trouble)
        elif trouble.kind != "wrong-result" or not sources or trouble in sources:
            failed.add(trouble.rank)
    return failed


def _sources(troubles: Iterable[Trouble]) -> list[Trouble]:
    """List wrong results of ranks that had sent wrong data; those of other ranks are consequences."""
    return [trouble for trouble in troubles if trouble.details.get("own_wrong")]


def _no_torch(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    first = group[0]
    python, known = str(first.details.get("python", "python3")), logs.recognise(first.message)
    verdict = "no-torch" if first.details.get("missing") else "torch-does-not-load"
    known = replace(known, fix=f"{known.means}: {known.fix}") if known is not None else None
    evidence = (f"python: {python}",)
    return found(verdict, request, traces, known=known, evidence=evidence, message=first.message, python=python)


def _cuda_unavailable(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    built_for, message = group[0].details.get("built_for"), group[0].message
    built = f"torch {group[0].details.get('torch')}, built for {f'CUDA {built_for}' if built_for else 'the CPU only'}"
    todo = "check the driver" if built_for else "this torch is a CPU-only build; install a CUDA build"
    known = logs.recognise(message)
    return found("cuda-unavailable", request, traces, known=known, evidence=(built,), message=message, todo=todo)


def _port_foreign(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    return found(
        "port-foreign",
        request,
        traces,
        address=group[0].details.get("address"),
        port=group[0].details.get("port"),
        answer=f'answers "{group[0].message}"' if group[0].message else "closes the connection without a reply",
        again=request.again(master_port="0"),
    )


def deviating_ranks(trouble: Trouble) -> set[int]:
    """Return ranks that deviate from the plan, or from the majority; without a majority, all listed ranks."""
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
    same_call = "call the same collective with the same dtype and size"
    return found(
        "rank-mismatch",
        request,
        traces,
        does="does" if len(traces) == 1 else "do",
        differences="; ".join(words),
        todo="use the same environment" if set(fields) & {"torch", "nccl"} else same_call,
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
    op = details.get("op", "all_reduce")
    at_first = f"the first at index {details['first_index']}: {details['got']} instead of {details['expected']}"
    guilty = [trace for trace in traces if not sources or trace.rank in {trouble.rank for trouble in sources}]
    return found(
        "sent-wrong" if sources else "received-wrong",
        request,
        guilty,
        elements=counted(details.get("own_wrong", 0), "wrong element"),
        index=details.get("own_first_index"),
        receivers=name_ranks(trace.rank for trace in traces).capitalize(),
        what=f"a wrong {op} of {format_size(details['size_bytes'])}" if "size_bytes" in details else "a wrong sum",
        how=details["how"],
        wrong=f"{details['wrong']} of {details['total']} elements, {at_first}",
        op=op,
        pairs=request.pairs(),
    )


def _out_of_memory(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    details: Mapping[str, Any] = group[0].details
    stage, doing = place(traces[0], before_end=True)
    sizes = "requested_bytes" in details and "got_bytes" in details
    return found(
        "out-of-memory",
        request,
        traces,
        stage=stage,
        doing=doing,
        got=format_size(details["got_bytes"]) if sizes else "",
        requested=format_size(details["requested_bytes"]) if sizes else "",
        message=group[0].message,
        look="free -h" if _on_cpu(traces) else "nvidia-smi",
        again=request.again(**({} if stage == "start" else request.less())),
    )


def _on_cpu(traces: list[RankTimeline]) -> bool:
    return any(event.payload.get("started", {}).get("device") == "cpu" for event in traces[0].events)


def _memory_corrupt(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    details: Mapping[str, Any] = group[0].details
    return found(
        "memory-corrupt",
        request,
        traces,
        chunks=counted(len(details["chunks"]), "chunk"),
        size=format_size(details["chunk_bytes"]),
        look="dmesg -T | grep -iE 'mce|edac'" if _on_cpu(traces) else "nvidia-smi -q -d ECC,PAGE_RETIREMENT",
    )


def _failed(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    message, known = group[0].message, logs.recognise(group[0].message)
    stage, doing = place(traces[0], before_end=True)
    return found(
        "rank-failed",
        request,
        traces,
        known=known,
        stage=stage,
        doing=doing,
        means=known.means if known else message,
        message=message if known else "",
        again=request.again(nccl_debug=""),
    )
