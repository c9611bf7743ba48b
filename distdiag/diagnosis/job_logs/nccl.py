"""Setup problems from NCCL_DEBUG=INFO: how far each rank got, and differences between hosts. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold, name_ranks
from distdiag.diagnosis.verdicts import finding
from distdiag.facts.logs.scan import PHASES
from distdiag.report import Where, Witnesses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from distdiag.facts.logs.scan import NcclRank
    from distdiag.report import Finding

_LOCAL_ONLY = ("lo", "docker", "veth", "virbr", "br-")


def findings_of(comms: Sequence[NcclRank], *, ended: bool) -> list[Finding]:
    """Return setup problems that stop or slow down the job."""
    found: list[Finding] = []
    begun = [comm for comm in comms if comm.phase or comm.interface or comm.network or comm.version]
    stuck = [comm for comm in begun if comm.started > comm.completed or (comm.phase < 5 and not comm.completed)]
    done = [comm for comm in comms if comm.completed and comm not in stuck]
    if stuck and (done or ended or len(comms) > 1):
        found.append(_stuck(stuck, done))
    hosts = {comm.host for comm in comms}
    if len(hosts) > 1:
        found += _differing(comms)
        local = [comm for comm in comms if comm.interface.startswith(_LOCAL_ONLY)]
        if local:
            at = sorted({comm.host for comm in local})
            where = Where(hosts=tuple(at))
            found.append(finding("nccl-local-interface", where=where, interface=local[0].interface, hosts=fold(at)))
        if all(comm.network == "Socket" for comm in comms):
            found.append(finding("nccl-sockets", number=len(hosts)))
    return found


def _stuck(stuck: Sequence[NcclRank], done: Sequence[NcclRank]) -> Finding:
    least = min(comm.phase for comm in stuck)
    last = [comm for comm in stuck if comm.phase == least]
    ranks = tuple(sorted(comm.rank for comm in last if comm.rank is not None))
    who = name_ranks(ranks) if ranks else fold(sorted({comm.host for comm in last}))
    expected = max((comm.nranks or 0 for comm in stuck), default=0)
    present = {comm.rank for comm in (*stuck, *done) if comm.rank is not None}
    absent = sorted(set(range(expected)) - present) if expected and len(present) < expected <= 65536 else []
    return finding(
        "nccl-init",
        where=Where(hosts=tuple(sorted({comm.host for comm in last}))),
        witnesses=Witnesses(ranks=tuple(sorted(comm.rank for comm in done if comm.rank is not None))),
        number=len(stuck),
        who=who,
        phase=PHASES[least],
        done=len(done) or "",
        absent=name_ranks(absent) if absent else "",
        expected=expected,
    )


def _differing(comms: Sequence[NcclRank]) -> list[Finding]:
    """Report setup differences between hosts; the minority is named."""
    kinds: tuple[tuple[str, Callable[[NcclRank], Iterable[str]], str], ...] = (
        ("version", lambda comm: (comm.version,), "version"),
        ("network", lambda comm: (comm.network,), "network"),
        ("interface", lambda comm: (comm.interface,), "bootstrap interface"),
        ("plugin", lambda comm: (comm.plugin,), "network plugin"),
        ("transport", lambda comm: (kind for kind in comm.edges if kind.startswith("NET")), "transport between nodes"),
        (
            "local-transport",
            lambda comm: (kind for kind in comm.edges if not kind.startswith("NET")),
            "transport within a node",
        ),
    )
    found = []
    for name, value, words in kinds:
        by_host: dict[str, set[str]] = {}
        for comm in comms:
            by_host.setdefault(comm.host, set()).update(value(comm))
        by_value: dict[str, set[str]] = {}
        for host, values in by_host.items():
            if values := values - {""}:
                by_value.setdefault(" + ".join(sorted(values)), set()).add(host)
        if len(by_value) < 2:
            continue
        ordered = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[0]))
        clear = len(ordered[0][1]) > len(ordered[1][1])
        few = sorted({host for _, hosts in ordered[1:] for host in hosts} - ordered[0][1])
        shown = "; ".join(f"{text}: {fold(sorted(hosts))}" for text, hosts in ordered[:4])
        slow = "one node without GPUDirect RDMA slows the whole job"
        found.append(
            finding(
                "nccl-differs",
                where=Where(hosts=tuple(few) if clear else ()),
                name=name,
                label=words,
                shown=shown,
                slow=slow if name == "transport" and "GDRDMA" in shown else "",
            )
        )
    return found
