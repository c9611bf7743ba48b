"""Published bandwidths of links and of large all_reduces (bandwidth.toml), and the arithmetic. Pure."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from distdiag.knowledge.tables import load
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")

GB = 1e9
# Share of a link's line rate, or of a node's NICs, that a ring gets: 70 to 82% in the table's figures, mostly 80.
NORMAL = 0.8


class Algorithm(StrEnum):
    """The algorithm behind a figure; AUTO if unknown."""

    RING = "ring"
    NVLS = "nvls"
    AUTO = "auto"


class Kind(StrEnum):
    """A published alarm threshold, or a healthy machine's result."""

    THRESHOLD = "threshold"
    MEASURED = "measured"


class Way(StrEnum):
    """Wiring that gives GPUs less than their links: pairs without a switch, or through host memory."""

    MESH = "mesh"
    HOST = "host"


@record(kw_only=True)
class Poorer:
    """Slower wiring: a pair's line rate (MESH) or a busbw (HOST). `always`: this GPU has no faster one."""

    way: Way
    gb_per_s: float
    always: bool

    @property
    def bytes_per_s(self) -> float:
        """The rate in bytes/s."""
        return self.gb_per_s * GB


@record(kw_only=True)
class Gpu:
    """The links of a GPU; `link_bytes_per_s`: one GPU's line rate in one direction, all its links together."""

    name: str
    pattern: str
    link: str
    link_bytes_per_s: float
    bridge_bytes_per_s: float | None = None
    nvls: bool = False
    poorer: Poorer | None = None
    source: str

    def line_rate(self, ranks: int) -> float:
        """Return the line rate in bytes/s of a GPU's links to `ranks` ranks of its node, in one direction."""
        if self.poorer is not None and self.poorer.always and self.poorer.way is Way.MESH:
            return min(self.link_bytes_per_s, self.poorer.bytes_per_s * (ranks - 1))
        return self.link_bytes_per_s

    def normal(self, ranks: int) -> float:
        """Return the busbw in bytes/s of a ring over `ranks` GPUs of a node with the best wiring."""
        if self.poorer is not None and self.poorer.always:
            return self.poorest(ranks)
        return NORMAL * self.link_bytes_per_s

    def poorest(self, ranks: int) -> float:
        """Return the busbw in bytes/s of a node with the slowest wiring still counted as healthy."""
        best = NORMAL * self.link_bytes_per_s
        if self.poorer is None:
            return best
        if self.poorer.way is Way.HOST:
            return min(best, self.poorer.bytes_per_s)
        return min(best, NORMAL * self.poorer.bytes_per_s * (ranks - 1))

    def ceiling(self, ranks: int) -> float:
        """Return the maximum busbw in bytes/s within a node."""
        line_rate = max(self.link_bytes_per_s, self.bridge_bytes_per_s or 0)
        return line_rate * max(1.0, busbw_factor(ranks) / wire_factor(ranks)) if self.nvls else line_rate


@record(kw_only=True)
class Expected:
    """A published figure; `nic_bytes_per_s`: the line rate of one rank's share of its node's NICs."""

    gpu: str
    ranks_per_node: int
    nodes: int
    algorithm: Algorithm
    kind: Kind
    busbw_bytes_per_s: float
    nic_bytes_per_s: float | None = None
    bridge: bool = False
    source: str


@record(kw_only=True)
class Tables:
    """The file's content, in bytes/s."""

    sources: dict[str, str]
    gpus: tuple[Gpu, ...]
    expected: tuple[Expected, ...]


def find_gpu(device_name: str | None) -> Gpu | None:
    """Find a GPU by its name in torch.cuda.get_device_properties(); None if the table lacks it."""
    return next((gpu for gpu in tables().gpus if re.fullmatch(gpu.pattern, device_name or "")), None)


@cache
def tables() -> Tables:
    """Read the file, once."""
    content = load("bandwidth", "", dict[str, Any])
    sources = content["source"]
    return Tables(
        sources=sources,
        gpus=tuple(_converted(row, sources, Gpu) for row in content["gpu"]),
        expected=tuple(_converted(row, sources, Expected) for row in content["expected"]),
    )


def _converted(row: Mapping[str, object], sources: Mapping[str, str], kind: type[T]) -> T:
    """Return a row with rates in bytes/s, as `busbw_bytes_per_s` without a name, and the address of its source."""
    import msgspec

    words: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, (int, float)) and name.endswith("gb_per_s"):
            words[f"{name.removesuffix('gb_per_s') or 'busbw_'}bytes_per_s"] = value * GB
        else:
            words[name] = sources[value] if name == "source" and isinstance(value, str) else value
    return msgspec.convert(words, kind)


def busbw_factor(n: int) -> float:
    """Return busbw / algbw of an all_reduce over n ranks: 2(n-1)/n, so 0 for 1 (nccl-tests, doc/PERFORMANCE.md)."""
    return 2 * (n - 1) / n


def wire_factor(n: int) -> float:
    """Return link traffic / algbw under NVLS for n ranks of a node: (n+1)/n, as the switch reduces.

    Source: NCCL's author in NVIDIA/nccl-tests issue 153. So busbw may be 2(n-1)/(n+1) of the line rate: 14/9 for 8.
    """
    return (n + 1) / n


def nic_share(busbw: float, nodes: int, world_size: int) -> float:
    """Return the minimum traffic of each rank's NIC, in busbw's unit: busbw (k-1)/(n-1) for n ranks on k nodes.

    An all_reduce of S bytes that sums within the nodes first sends 2(k-1)/k of S/(n/k) through each NIC, while busbw
    counts 2(n-1)/n of S; S cancels out (ml-engineering, network/README.md, "So what should you expect?", where 381.8 *
    3/31 = 36.9). One ring over all ranks sends more, busbw / (n/k), which is why `assess` compares busbw with a ring's
    share of the NICs: this minimum share of a sound network is 49% on two nodes and 90% on many.
    """
    return busbw * (nodes - 1) / (world_size - 1) if nodes > 1 else 0.0


def gb(bytes_per_s: float) -> str:
    """Format bytes, or bytes/s, in GB."""
    value = bytes_per_s / GB
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"
