"""What the ranks themselves found wrong, as findings; the same trouble of many ranks is one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag import knowledge
from distdiag.cluster.hosts import name_ranks
from distdiag.launch.wording import amount, fix_from, place, where, who
from distdiag.report import Finding, Fix, Level

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distdiag.cluster.rank_runs import RankTimeline
    from distdiag.launch.attribution import Attribution, Trouble
    from distdiag.launch.types import Request


def findings_of(parts: Attribution, traces: list[RankTimeline], request: Request) -> list[Finding]:
    """Make one finding of each trouble, for all ranks that have it."""
    by_kind: dict[tuple[str, str], list[Trouble]] = {}
    for trouble in parts.troubles:
        # Out of memory says other numbers on each rank, and is one trouble all the same.
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
    """Rank 0 tells a mismatch, and others are odd; everything else is told by the rank that has it."""
    return sorted(odd_ranks(group[0])) if kind == "mismatch" else [trouble.rank for trouble in group]


def failed_ranks(parts: Attribution) -> set[int]:
    """Ranks that saw something wrong of their own, or do not agree with what was planned."""
    failed: set[int] = set()
    sources = _sources(parts.troubles)
    for trouble in parts.troubles:
        if trouble.kind == "mismatch":
            failed |= odd_ranks(trouble)
        elif trouble.kind != "wrong-result" or not sources or trouble in sources:
            failed.add(trouble.rank)
    return failed


def _sources(troubles: Iterable[Trouble]) -> list[Trouble]:
    """Wrong results whose rank had sent wrong data itself: the others' are its consequence."""
    return [trouble for trouble in troubles if trouble.details.get("own_wrong")]


def _no_torch(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    first = group[0]
    python = str(first.details.get("python", "python3"))
    absent = bool(first.details.get("missing"))
    return Finding(
        id=f"{request.command}.no-torch",
        level=Level.FAIL,
        title=f"{who(traces)} cannot import torch: {first.message}",
        detail="There is no torch in this Python." if absent else "There is a torch, and it does not load.",
        where=where(traces),
        evidence=(f"python: {python}",),
        fix=_fix_for_import(first, python, absent=absent),
    )


def _fix_for_import(trouble: Trouble, python: str, *, absent: bool) -> Fix:
    known = knowledge.recognise(trouble.message)
    if known is not None:
        return Fix(text=f"{known.means}: {known.fix}", commands=known.commands)
    if absent:
        return Fix(text="install it into that Python", commands=(f"{python} -m pip install torch",))
    return Fix(
        text="see its whole complaint; then clear what shadows it (PYTHONPATH, LD_LIBRARY_PATH), or install the same "
        "build again from where it came",
        commands=(f"{python} -c 'import torch'",),
    )


def _cuda_unavailable(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    built_for = group[0].details.get("built_for")
    torch = group[0].details.get("torch")
    known = knowledge.recognise(group[0].message)
    cpu_only = "this torch was built for the CPU only; install a CUDA build of it"
    return Finding(
        id=f"{request.command}.cuda-unavailable",
        level=Level.FAIL,
        title=f"{who(traces)} cannot use a GPU: {group[0].message}",
        where=where(traces),
        evidence=(f"torch {torch}, built for {'CUDA ' + str(built_for) if built_for else 'the CPU only'}",),
        fix=fix_from(known, Fix(text="see what the driver says" if built_for else cpu_only, commands=("nvidia-smi",))),
    )


def _port_foreign(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    details = group[0].details
    said = f'it says "{group[0].message}"' if group[0].message else "it hangs up without a word"
    return Finding(
        id=f"{request.command}.port-foreign",
        level=Level.FAIL,
        title=f"{details.get('address')} port {details.get('port')} does not lead {who(traces)} to rank 0: {said}",
        where=where(traces),
        fix=Fix(text="use another rendezvous port", commands=(request.again(master_port="0"),)),
    )


def odd_ranks(trouble: Trouble) -> set[int]:
    """Ranks that differ: from most others; all that are named where no value has a majority."""
    odd: set[int] = set()
    planned = _planned(trouble)
    for field, values in _differing(trouble).items():
        groups = {value: set(ranks) for value, ranks in values.items()}
        usual = planned.get(field)
        if usual not in groups:
            most = sorted(groups, key=lambda value: len(groups[value]))
            usual = most[-1] if len(groups[most[-1]]) > len(groups[most[-2]]) else None
        odd |= {rank for value, ranks in groups.items() if value != usual for rank in ranks}
    return odd


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
        title=f"{who(traces)} {'does' if len(traces) == 1 else 'do'} not agree with the plan: {'; '.join(words)}",
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
    told: Mapping[str, Any] = (sources or group)[0].details
    first, total = told["first_index"], told["total"]
    op = told.get("op", "all_reduce")
    what = f"a wrong {op} of {amount(told['size_bytes'])}" if "size_bytes" in told else "a wrong sum"
    values = f"{told['got']} instead of {told['expected']}"
    seen = f"{told['wrong']} of {total} elements, the first at index {first}: {values}"
    if sources:
        guilty = [trace for trace in traces if trace.rank in {trouble.rank for trouble in sources}]
        where_wrong = f"{told['own_wrong']} wrong element(s), the first at index {told.get('own_first_index')}"
        title = f"{who(guilty)} sent wrong data from its own memory: {where_wrong}"
        fix = Fix(text="the data was wrong before it was sent: suspect that rank's memory (ECC errors) or device")
    else:
        guilty = traces
        title = f"{who(guilty)} received {what}: {told['how']}"
        fix = Fix(
            text="every rank's own data is right, so it changed on the way or in the reduction: suspect the link, or "
            "the peer access between the devices; pairs of ranks show which",
            commands=(request.pairs(),),
        )
    return Finding(
        id=f"{request.command}.wrong-result",
        level=Level.FAIL,
        title=title,
        detail=f"{name_ranks(one.rank for one in traces).capitalize()} received {what} ({told['how']}): {seen}. "
        f"{op} returned without an error.",
        where=where(guilty),
        fix=fix,
    )


def _out_of_memory(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    details: Mapping[str, Any] = group[0].details
    stage, doing = place(traces[0], before_end=True)
    got = (
        f": it got {amount(details['got_bytes'])} of {amount(details['asked_bytes'])}"
        if "asked_bytes" in details and "got_bytes" in details
        else ""
    )
    return Finding(
        id=f"{request.command}.out-of-memory",
        level=Level.FAIL,
        title=f"{who(traces)} ran out of memory in stage {stage} ({doing}){got}",
        detail=group[0].message,
        where=where(traces),
        fix=Fix(
            text="see who else uses that memory, or ask for less",
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
        title=f"{who(traces)} did not read back what it wrote in {len(details['chunks'])} chunk(s) of "
        f"{amount(details['chunk_bytes'])}",
        where=where(traces),
        fix=Fix(
            text="the memory of that device is faulty; see its ECC errors",
            commands=("dmesg -T | grep -iE 'mce|edac'" if _on_cpu(traces) else "nvidia-smi -q -d ECC,PAGE_RETIREMENT",),
        ),
    )


def _failed(group: list[Trouble], traces: list[RankTimeline], request: Request) -> Finding:
    known = knowledge.recognise(group[0].message)
    stage, doing = place(traces[0], before_end=True)
    return Finding(
        id=f"{request.command}.rank-failed",
        level=Level.FAIL,
        title=f"{who(traces)} failed in stage {stage} ({doing}): {known.means if known else group[0].message}",
        detail=group[0].message if known else "",
        where=where(traces),
        fix=fix_from(known, Fix(text="run again with the ranks' logs kept", commands=(request.again(nccl_debug=""),))),
    )
