"""The expected busbw of a large all_reduce, and the judgement of a measured one. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.knowledge.bandwidth import GB, NORMAL, Algorithm, Kind, Way, busbw_factor, nic_share, tables, wire_factor

if TYPE_CHECKING:
    from distdiag.knowledge.bandwidth import Expected, Gpu

# Low is below this share of the expectation. The table's figures are of 8 GB and more; at 128 MiB a healthy 8 x A100
# reaches 75% of its peak and 8 x H200 83%, so a narrower band would call healthy nodes low.
LOW_BELOW = 0.75
# Bad is below this share of the slowest healthy wiring. Chance does not halve a bandwidth: a link is down, half of the
# NICs are unused, or another transport is in use.
BAD_BELOW = 0.5
# Rings reach at most 82% of NVLink; with NVLS 8 x H100, H200, B200 and B300 reach 93% and more, 6 x B200 86%.
NVLS_ABOVE = 0.85
SAYS = {Kind.THRESHOLD: "published alarm limit", Kind.MEASURED: "measured by others"}


class Judgement(StrEnum):
    """The judgement of a bandwidth; UNKNOWN without a reference figure."""

    GOOD = "good"
    LOW = "low"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where the ranks ran; `nic_bytes_per_s`: the line rate of one rank's share of its node's NICs, None if unknown."""

    device_name: str | None
    world_size: int
    nodes: int
    ranks_per_node: int
    nic_bytes_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The figures to compare a busbw with, in bytes/s."""

    expected: float
    bad_below: float
    why: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """A measured busbw and its setting; all rates are bytes/s."""

    busbw: float
    setting: Setting
    gpu: Gpu | None

    @property
    def algbw(self) -> float:
        """Message bytes per second; 0 for a single rank, whose busbw does not determine it."""
        factor = busbw_factor(self.setting.world_size)
        return self.busbw / factor if factor else 0.0

    @property
    def nic_share(self) -> float:
        """The minimum traffic of each rank's NIC."""
        return nic_share(self.busbw, self.setting.nodes, self.setting.world_size)

    @property
    def nvls_likely(self) -> bool:
        """Whether busbw exceeds a ring's maximum on these links."""
        if self.gpu is None or not self.gpu.nvls or self.setting.ranks_per_node < 2:
            return False
        return self.busbw > NVLS_ABOVE * self.gpu.link_bytes_per_s

    def link_traffic(self) -> tuple[float, float] | None:
        """Return the traffic of a GPU's links within the node, and their line rate; None if no link is known."""
        ranks = self.setting.ranks_per_node
        if self.gpu is None or ranks < 2:
            return None
        if self.nvls_likely:
            return self.algbw * wire_factor(ranks), self.gpu.link_bytes_per_s
        bridge = self.gpu.bridge_bytes_per_s
        if bridge is not None and self.busbw > self.gpu.link_bytes_per_s:
            return self.busbw, bridge
        return self.busbw, self.gpu.line_rate(ranks)

    def percent_of_link(self) -> float | None:
        """Return the traffic of a GPU's links in percent of their line rate; None if no link is known."""
        traffic = self.link_traffic()
        return 100 * traffic[0] / traffic[1] if traffic else None

    def percent_of_nic(self) -> float | None:
        """Return the minimum traffic of each rank's NIC in percent of its rate; None if unknown or unused."""
        nic = self.setting.nic_bytes_per_s
        return 100 * self.nic_share / nic if nic and self.setting.nodes > 1 else None

    def bar(self) -> Bar | None:
        """Return the figures to compare busbw with; None if unknown."""
        if self.gpu is None or self.setting.world_size < 2:
            return None
        if self.setting.nodes == 1:
            return self._bar_of_node(self.gpu)
        if not self.setting.nic_bytes_per_s:
            return self._bar_of_others(self.gpu)
        return self._bar_of_network(self.gpu, self.setting.nic_bytes_per_s)

    def _bar_of_node(self, gpu: Gpu) -> Bar:
        """Expect a ring's busbw: NVLS and a bridge give more, and are suggested by the lines."""
        ranks = self.setting.ranks_per_node
        rows = [row for row in self.rows(gpu) if row.algorithm is not Algorithm.NVLS and not row.bridge]
        if rows:
            least = min(rows, key=lambda row: row.busbw_bytes_per_s)
            expected, why, source = (
                least.busbw_bytes_per_s,
                f"{SAYS[least.kind]} on {ranks} x {gpu.name}",
                least.source,
            )
        else:
            expected, source = gpu.normal(ranks), gpu.source
            host = gpu.poorer is not None and gpu.poorer.always and gpu.poorer.way is Way.HOST
            why = "through host memory, its only path" if host else _part_of(gpu.line_rate(ranks), gpu.link)
        return Bar(expected=expected, bad_below=BAD_BELOW * min(expected, gpu.poorest(ranks)), why=why, source=source)

    def _bar_of_network(self, gpu: Gpu, nic: float) -> Bar:
        """Expect a ring over all ranks, limited by the links or by a node's NICs."""
        ranks = self.setting.ranks_per_node
        of_nics = NORMAL * ranks * nic
        normal, poorest = (gpu.normal(ranks), gpu.poorest(ranks)) if ranks > 1 else (of_nics, of_nics)
        why = f"a ring over {gpu.link}" if normal < of_nics else _part_of(ranks * nic, "a node's NICs")
        expected, bad_below = min(normal, of_nics), BAD_BELOW * min(poorest, of_nics)
        return Bar(expected=expected, bad_below=bad_below, why=why, source=tables().sources["nics"])

    def _bar_of_others(self, gpu: Gpu) -> Bar | None:
        """Expect published results for as many nodes; never bad, as the NICs here may be slower by design."""
        rows = self.rows(gpu)
        if not rows:
            return None
        least = min(rows, key=lambda row: row.busbw_bytes_per_s)
        nics = f", NICs of {least.nic_bytes_per_s / GB:g} GB/s per rank" if least.nic_bytes_per_s else ""
        why = f"{SAYS[least.kind]} on {least.nodes} x {least.ranks_per_node} {gpu.name}{nics}"
        return Bar(expected=least.busbw_bytes_per_s, bad_below=0.0, why=why, source=least.source)

    def rows(self, gpu: Gpu) -> list[Expected]:
        """List published results for as many nodes and GPUs."""
        here = (gpu.name, self.setting.ranks_per_node, self.setting.nodes)
        return [row for row in tables().expected if (row.gpu, row.ranks_per_node, row.nodes) == here]

    def judge(self, bar: Bar | None) -> Judgement:
        """Return the judgement; unknown for a busbw above any link's maximum, which is a wrong measurement."""
        if bar is None or self.gpu is None or self._impossible(self.gpu):
            return Judgement.UNKNOWN
        if self.busbw < bar.bad_below:
            return Judgement.BAD
        return Judgement.LOW if self.busbw < LOW_BELOW * bar.expected else Judgement.GOOD

    def _impossible(self, gpu: Gpu) -> bool:
        # Unlimited between nodes: some racks connect them by NVLink.
        return self.setting.nodes == 1 and self.busbw > gpu.ceiling(self.setting.world_size)


def _part_of(line_rate: float, link: str) -> str:
    return f"{NORMAL:.0%} of the {line_rate / GB:g} GB/s of {link}"
