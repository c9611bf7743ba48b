"""The quality of a large all_reduce's bandwidth: expectation, judgement and the arithmetic line by line. Pure."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from distdiag.knowledge.bandwidth import (
    GB,
    NORMAL,
    Algorithm,
    Kind,
    Way,
    busbw_factor,
    find_gpu,
    gb,
    nic_share,
    tables,
    wire_factor,
)
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.knowledge.bandwidth import Expected, Gpu

# Low is below this share of the expectation. The table's figures are of 8 GB and more; at 128 MiB a healthy 8 x A100
# reaches 75% of its peak and 8 x H200 83%, so a narrower band would call healthy nodes low.
LOW_BELOW = 0.75
# Bad is below this share of the slowest healthy wiring. Chance does not halve a bandwidth: a link is down, half of the
# NICs are unused, or another transport is in use.
BAD_BELOW = 0.5
# Rings reach at most 82% of NVLink; with NVLS 8 x H100, H200, B200 and B300 reach 93% and more, 6 x B200 86%.
NVLS_ABOVE = 0.85
# A node that sends no faster than a single 200 Gb/s card over TCP may not be using its InfiniBand or RoCE.
SOCKET_AT_MOST_BYTES_PER_S = 25e9
SAYS = {Kind.THRESHOLD: "published alarm limit", Kind.MEASURED: "measured by others"}


class Judgement(StrEnum):
    """The judgement of a bandwidth; UNKNOWN without a reference figure."""

    GOOD = "good"
    LOW = "low"
    BAD = "bad"
    UNKNOWN = "unknown"


@record(kw_only=True)
class Bar:
    """The figures to compare a busbw with, in bytes/s."""

    expected: float
    bad_below: float
    why: str
    source: str


@record(kw_only=True)
class Case:
    """A measured busbw, where the ranks ran, and the judgement; all rates are bytes/s.

    `nic_bytes_per_s`: the line rate of one rank's share of its node's NICs, None if unknown.
    The all_reduce is LARGE: 128 MiB on one node and 512 MiB between nodes, where bandwidth keeps growing (a sound
    network of 32 x B200 has 52% of its peak at 128 MiB, 86% at 512 MiB), or the result may look low.
    """

    busbw: float
    device_name: str | None
    world_size: int
    nodes: int
    nic_bytes_per_s: float | None

    @property
    def ranks_per_node(self) -> int:
        """The ranks of each node."""
        return max(1, self.world_size // self.nodes)

    @cached_property
    def gpu(self) -> Gpu | None:
        """The known GPU of this name."""
        return find_gpu(self.device_name)

    @property
    def algbw(self) -> float:
        """Message bytes per second; 0 for a single rank, whose busbw does not determine it."""
        factor = busbw_factor(self.world_size)
        return self.busbw / factor if factor else 0.0

    @property
    def nic_share(self) -> float:
        """The minimum traffic of each rank's NIC."""
        return nic_share(self.busbw, self.nodes, self.world_size)

    @property
    def nvls_likely(self) -> bool:
        """Whether busbw exceeds a ring's maximum on these links."""
        if self.gpu is None or not self.gpu.nvls or self.ranks_per_node < 2:
            return False
        return self.busbw > NVLS_ABOVE * self.gpu.link_bytes_per_s

    def link_traffic(self) -> tuple[float, float] | None:
        """Return the traffic of a GPU's links within the node, and their line rate; None if no link is known."""
        ranks = self.ranks_per_node
        if self.gpu is None or ranks < 2:
            return None
        if self.nvls_likely:
            return self.algbw * wire_factor(ranks), self.gpu.link_bytes_per_s
        bridge = self.gpu.bridge_bytes_per_s
        if bridge is not None and self.busbw > self.gpu.link_bytes_per_s:
            return self.busbw, bridge
        return self.busbw, self.gpu.line_rate(ranks)

    @property
    def percent_of_link(self) -> float | None:
        """The traffic of a GPU's links (under NVLS less than busbw) in percent of their line rate; None if unknown."""
        traffic = self.link_traffic()
        return 100 * traffic[0] / traffic[1] if traffic else None

    @property
    def percent_of_nic(self) -> float | None:
        """The minimum traffic of each rank's NIC in percent of its rate; None if unknown or unused."""
        nic = self.nic_bytes_per_s
        return 100 * self.nic_share / nic if nic and self.nodes > 1 else None

    @cached_property
    def bar(self) -> Bar | None:
        """The figures to compare busbw with; None if unknown."""
        if self.gpu is None or self.world_size < 2:
            return None
        if self.nodes == 1:
            return self._bar_of_node(self.gpu)
        if not self.nic_bytes_per_s:
            return self._bar_of_others(self.gpu)
        return self._bar_of_network(self.gpu, self.nic_bytes_per_s)

    def _bar_of_node(self, gpu: Gpu) -> Bar:
        """Expect a ring's busbw: NVLS and a bridge give more, and are suggested by the lines."""
        ranks = self.ranks_per_node
        bad_below = BAD_BELOW * gpu.poorest(ranks)
        if least := self._least(gpu):
            why = f"{SAYS[least.kind]} on {ranks} x {gpu.name}"
            bad_below = min(bad_below, BAD_BELOW * least.busbw_bytes_per_s)
            return Bar(expected=least.busbw_bytes_per_s, bad_below=bad_below, why=why, source=least.source)
        host = gpu.poorer is not None and gpu.poorer.always and gpu.poorer.way is Way.HOST
        why = "through host memory, its only path" if host else _part_of(gpu.line_rate(ranks), gpu.link)
        expected = gpu.normal(ranks)
        return Bar(expected=expected, bad_below=min(bad_below, BAD_BELOW * expected), why=why, source=gpu.source)

    def _bar_of_network(self, gpu: Gpu, nic: float) -> Bar:
        """Expect a ring over all ranks, limited by the links or by a node's NICs."""
        ranks = self.ranks_per_node
        of_nics = NORMAL * ranks * nic
        normal, poorest = (gpu.normal(ranks), gpu.poorest(ranks)) if ranks > 1 else (of_nics, of_nics)
        why = f"a ring over {gpu.link}" if normal < of_nics else _part_of(ranks * nic, "a node's NICs")
        expected, bad_below = min(normal, of_nics), BAD_BELOW * min(poorest, of_nics)
        return Bar(expected=expected, bad_below=bad_below, why=why, source=tables().sources["nics"])

    def _bar_of_others(self, gpu: Gpu) -> Bar | None:
        """Expect published results for as many nodes; never bad, as the NICs here may be slower by design."""
        least = self._least(gpu)
        if least is None:
            return None
        nics = f", NICs of {least.nic_bytes_per_s / GB:g} GB/s per rank" if least.nic_bytes_per_s else ""
        why = f"{SAYS[least.kind]} on {least.nodes} x {least.ranks_per_node} {gpu.name}{nics}"
        return Bar(expected=least.busbw_bytes_per_s, bad_below=0.0, why=why, source=least.source)

    def rows(self, gpu: Gpu) -> list[Expected]:
        """List published results for as many nodes and GPUs."""
        here = (gpu.name, self.ranks_per_node, self.nodes)
        return [row for row in tables().expected if (row.gpu, row.ranks_per_node, row.nodes) == here]

    def _least(self, gpu: Gpu) -> Expected | None:
        """Return the slowest published result; within a node without NVLS and bridges."""
        rows = self.rows(gpu)
        if self.nodes == 1:
            rows = [row for row in rows if row.algorithm is not Algorithm.NVLS and not row.bridge]
        return min(rows, key=lambda row: row.busbw_bytes_per_s, default=None)

    @property
    def judgement(self) -> Judgement:
        """The judgement; unknown for a busbw above any link's maximum, which is a wrong measurement."""
        if self.bar is None or self.gpu is None:
            return Judgement.UNKNOWN
        # Unlimited between nodes: some racks connect them by NVLink.
        if self.nodes == 1 and self.busbw > self.gpu.ceiling(self.world_size):
            return Judgement.UNKNOWN
        if self.busbw < self.bar.bad_below:
            return Judgement.BAD
        return Judgement.LOW if self.busbw < LOW_BELOW * self.bar.expected else Judgement.GOOD

    @property
    def lines(self) -> tuple[str, ...]:
        """The arithmetic, the expectation with its reason, and checks to make; lines of less than 100 characters."""
        return (*_sum_line(self), *_link_lines(self), *_nic_lines(self), *_bar_lines(self))


def _sum_line(case: Case) -> Iterator[str]:
    n = case.world_size
    if n > 1:
        yield f"busbw {gb(case.busbw)} GB/s = algbw {gb(case.algbw)} GB/s x 2({n}-1)/{n}"


def _bar_lines(case: Case) -> Iterator[str]:
    bar = case.bar
    if bar is None or case.gpu is None:
        yield _why_unknown(case)
    elif case.judgement is Judgement.UNKNOWN:
        most = gb(case.gpu.ceiling(case.world_size))
        yield f"more than {most} GB/s, the maximum of a link: was the GPU synchronized before the time was read?"
    else:
        yield f"expected: {gb(bar.expected)} GB/s, {bar.why}"
        bad = f"bad: below {gb(bar.bad_below)} GB/s" if bar.bad_below else "bad: no limit, as the NIC rate is unknown"
        yield f"low: below {gb(LOW_BELOW * bar.expected)} GB/s; {bad}"
        yield from _questions(case, case.gpu, bar)


def _part_of(line_rate: float, link: str) -> str:
    return f"{NORMAL:.0%} of the {line_rate / GB:g} GB/s of {link}"


def _link_lines(case: Case) -> Iterator[str]:
    traffic = case.link_traffic()
    if traffic is None or case.gpu is None or (case.nodes > 1 and not case.nvls_likely):
        return
    carried, line_rate = traffic
    part = f"{carried / line_rate:.0%} of {line_rate / GB:g} GB/s"
    m = case.ranks_per_node
    if case.nvls_likely:
        yield f"NVLS: the switch reduces, a link carries algbw x ({m}+1)/{m} = {gb(carried)} GB/s, {part}"
    elif carried <= line_rate:
        link = "an NVLink bridge" if line_rate > case.gpu.link_bytes_per_s else case.gpu.link
        yield f"that is {part}, the line rate of {link} in one direction"


def _nic_lines(case: Case) -> Iterator[str]:
    k, n, m = case.nodes, case.world_size, case.ranks_per_node
    nic = case.nic_bytes_per_s
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
    if case.world_size < 2:
        return "a single rank: busbw is 0 by definition, as 2(1-1)/1 = 0"
    if case.gpu is None:
        return f"no reference figure for {case.device_name or 'ranks without a GPU'}"
    where = f"{case.nodes} x {case.ranks_per_node} {case.gpu.name}"
    return f"the NIC rate is unknown, and there is no published figure for {where}"


def _questions(case: Case, gpu: Gpu, bar: Bar) -> Iterator[str]:
    yield from _between_nodes(case) if case.nodes > 1 else _better(case, gpu)
    if case.judgement is Judgement.LOW and case.busbw >= BAD_BELOW * bar.expected:
        yield "a message below 1 GiB may not reach the peak: is it the same with 4 GiB?"
    if case.judgement is Judgement.GOOD or case.nodes > 1 or gpu.poorer is None or gpu.poorer.always:
        return
    if gpu.poorer.way is Way.HOST:
        yield "traffic through host memory (IOMMU, ACS, two sockets)? check: nvidia-smi topo -p2p r"
    elif gpu.poorest(case.ranks_per_node) < gpu.normal(case.ranks_per_node):
        yield "a board without NVSwitch, where two GPUs share few links? check: nvidia-smi topo -m"


def _between_nodes(case: Case) -> Iterator[str]:
    if case.judgement is not Judgement.GOOD and case.busbw <= SOCKET_AT_MOST_BYTES_PER_S:
        yield "as slow as TCP sockets: is InfiniBand/RoCE not used? NCCL_DEBUG=INFO shows the transport"
    elif case.nodes == 2:
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
