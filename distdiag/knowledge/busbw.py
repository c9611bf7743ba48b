"""The quality of a large all_reduce's bandwidth, with the arithmetic line by line. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.knowledge.bandwidth import GB, Algorithm, Kind, Way, find_gpu, gb, tables
from distdiag.knowledge.expectation import BAD_BELOW, LOW_BELOW, SAYS, Case, Judgement, Setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.knowledge.bandwidth import Gpu
    from distdiag.knowledge.expectation import Bar

# A node that sends no faster than a single 200 Gb/s card over TCP may not be using its InfiniBand or RoCE.
SOCKET_AT_MOST_BYTES_PER_S = 25e9


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """The judgement of a busbw, with the arithmetic line by line.

    `percent_of_link`: traffic of a GPU's links in percent of their line rate (under NVLS less than busbw).
    `percent_of_nic`: the minimum traffic of each rank's NIC (nic_share). Both None without such traffic or with an
    unknown rate.
    """

    judgement: Judgement
    busbw_bytes_per_s: float
    expected_bytes_per_s: float | None
    percent_of_link: float | None
    percent_of_nic: float | None
    nvls_likely: bool
    lines: tuple[str, ...]
    source: str


def assess(busbw_bytes_per_s: float, setting: Setting) -> Assessment:
    """Judge the busbw of a LARGE all_reduce in bytes/s, best of the largest message measured.

    The message needs 128 MiB on one node and 512 MiB between nodes, where bandwidth keeps growing (a sound network of
    32 x B200 has 52% of its peak at 128 MiB, 86% at 512 MiB), or the result may look low.
    """
    case = Case(busbw=busbw_bytes_per_s, setting=setting, gpu=find_gpu(setting.device_name))
    bar = case.bar()
    judgement = case.judge(bar)
    return Assessment(
        judgement=judgement,
        busbw_bytes_per_s=busbw_bytes_per_s,
        expected_bytes_per_s=bar.expected if bar else None,
        percent_of_link=case.percent_of_link(),
        percent_of_nic=case.percent_of_nic(),
        nvls_likely=case.nvls_likely,
        lines=tuple(_lines(case, bar, judgement)),
        source=bar.source if bar else tables().sources["busbw"],
    )


def _lines(case: Case, bar: Bar | None, judgement: Judgement) -> Iterator[str]:
    """Yield the arithmetic, the expectation with its reason, and checks to make; lines of less than 100 characters."""
    if case.setting.world_size > 1:
        n = case.setting.world_size
        yield f"busbw {gb(case.busbw)} GB/s = algbw {gb(case.algbw)} GB/s x 2({n}-1)/{n}"
    yield from _link_lines(case)
    yield from _nic_lines(case)
    if bar is None or case.gpu is None:
        yield _why_unknown(case)
    elif judgement is Judgement.UNKNOWN:
        most = gb(case.gpu.ceiling(case.setting.world_size))
        yield f"more than {most} GB/s, the maximum of a link: was the GPU synchronized before the time was read?"
    else:
        yield f"expected: {gb(bar.expected)} GB/s, {bar.why}"
        bad = f"bad: below {gb(bar.bad_below)} GB/s" if bar.bad_below else "bad: no limit, as the NIC rate is unknown"
        yield f"low: below {gb(LOW_BELOW * bar.expected)} GB/s; {bad}"
        yield from _questions(case, case.gpu, bar, judgement)


def _link_lines(case: Case) -> Iterator[str]:
    traffic = case.link_traffic()
    if traffic is None or case.gpu is None or (case.setting.nodes > 1 and not case.nvls_likely):
        return
    carried, line_rate = traffic
    part = f"{carried / line_rate:.0%} of {line_rate / GB:g} GB/s"
    m = case.setting.ranks_per_node
    if case.nvls_likely:
        yield f"NVLS: the switch reduces, a link carries algbw x ({m}+1)/{m} = {gb(carried)} GB/s, {part}"
    elif carried <= line_rate:
        link = "an NVLink bridge" if line_rate > case.gpu.link_bytes_per_s else case.gpu.link
        yield f"that is {part}, the line rate of {link} in one direction"


def _nic_lines(case: Case) -> Iterator[str]:
    k, n, m = case.setting.nodes, case.setting.world_size, case.setting.ranks_per_node
    nic = case.setting.nic_bytes_per_s
    if k < 2:
        return
    of_nic = f", {case.nic_share / nic:.0%} of its {nic / GB:g} GB/s" if nic else ""
    yield f"busbw {gb(case.busbw)} GB/s x ({k}-1)/({n}-1) = {gb(case.nic_share)} GB/s for each GPU's NIC{of_nic}"
    if nic and case.nic_share > nic:
        yield "more than the NIC can carry: NVLink between the nodes, SHARP, or a wrong NIC rate?"
    elif nic and m > 1 and case.busbw <= m * nic:
        ring = case.busbw / m
        yield f"that is the minimum; with a single ring: {gb(case.busbw)} / {m} = {gb(ring)} GB/s, {ring / nic:.0%}"
    elif nic and m > 1:
        yield f"that is the minimum; not a ring, which would need {gb(case.busbw)} / {m} = {gb(case.busbw / m)} GB/s"


def _why_unknown(case: Case) -> str:
    if case.setting.world_size < 2:
        return "a single rank: busbw is 0 by definition, as 2(1-1)/1 = 0"
    if case.gpu is None:
        return f"no reference figure for {case.setting.device_name or 'ranks without a GPU'}"
    where = f"{case.setting.nodes} x {case.setting.ranks_per_node} {case.gpu.name}"
    return f"the NIC rate is unknown, and there is no published figure for {where}"


def _questions(case: Case, gpu: Gpu, bar: Bar, judgement: Judgement) -> Iterator[str]:
    yield from _between_nodes(case, judgement) if case.setting.nodes > 1 else _better(case, gpu)
    if judgement is Judgement.LOW and case.busbw >= BAD_BELOW * bar.expected:
        yield "a message below 1 GiB may not reach the peak: is it the same with 4 GiB?"
    if judgement is Judgement.GOOD or case.setting.nodes > 1 or gpu.poorer is None or gpu.poorer.always:
        return
    if gpu.poorer.way is Way.HOST:
        yield "traffic through host memory (IOMMU, ACS, two sockets)? check: nvidia-smi topo -p2p r"
    elif gpu.poorest(case.setting.ranks_per_node) < gpu.normal(case.setting.ranks_per_node):
        yield "a board without NVSwitch, where two GPUs share few links? check: nvidia-smi topo -m"


def _between_nodes(case: Case, judgement: Judgement) -> Iterator[str]:
    if judgement is not Judgement.GOOD and case.busbw <= SOCKET_AT_MOST_BYTES_PER_S:
        yield "as slow as TCP sockets: is InfiniBand/RoCE not used? NCCL_DEBUG=INFO shows the transport"
    elif case.setting.nodes == 2:
        # NVIDIA/nccl-tests issues 196 and 290.
        yield "two nodes: NCCL's trees can hide slow NICs; NCCL_ALGO=Ring shows their real rate"


def _better(case: Case, gpu: Gpu) -> Iterator[str]:
    """Suggest NVLS or a bridge, if published figures with it are better."""
    for row in sorted(case.rows(gpu), key=lambda row: row.kind is Kind.MEASURED):
        others = f"{gb(row.busbw_bytes_per_s)} GB/s with it, {SAYS[row.kind]} on {row.ranks_per_node} x {gpu.name}"
        if row.algorithm is Algorithm.NVLS and not case.nvls_likely:
            yield f"NVLS off (NCCL_NVLS_ENABLE)? {others}"
            return
        if row.bridge and case.busbw < LOW_BELOW * row.busbw_bytes_per_s:
            yield f"no NVLink bridge? {others}"
            return
