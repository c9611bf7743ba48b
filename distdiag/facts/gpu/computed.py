"""Results of one rank's device: matrix products with checksums, and bandwidths.

Standard library only: rank 0 uses it during the test, to decide whether all ranks measure once more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from statistics import median_high, mode

from distdiag.facts.gpu.gpu_health import GpuHealth  # noqa: TC001 - msgspec reads the annotations
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeVar

    Value = TypeVar("Value")

SLOW, SLOW_COPY = 0.8, 0.6
"""Share of the median of one device model, for products and for copies.

Cards of one model differ by 5% in products (silicon, temperature), and the best of several repetitions on a busy
machine by 10%. Copies on a CPU share its memory with other programs and differ by 25%; a PCIe link with half its lanes
has half.
"""
BANDWIDTHS = ("copy", "triad", "to device", "from device")


@record
class Product:
    """The n x n matrix products of one precision.

    `best_s`: the shortest repetition in seconds. `digest`: of the result's bits, as in most repetitions. `wrong`:
    elements that differ in the first deviating repetition, `wrong_repetition` (from 1); `first_index` into the
    flattened result. `inexact`: inexact elements of a small product of whole numbers. `sums_off`: rows and columns
    whose sum does not match the factors. `skipped`: why this precision was not measured.
    """

    precision: str
    n: int = 0
    repetitions: int = 0
    best_s: float = 0.0
    digest: str = ""
    wrong: int = 0
    wrong_repetition: int = 0
    first_index: int = 0
    got: str = ""
    expected: str = ""
    inexact: int = 0
    sums_off: int = 0
    skipped: str = ""

    @property
    def is_wrong(self) -> bool:
        """Return whether a check of this rank alone failed."""
        return bool(self.wrong_repetition or self.inexact or self.sums_off)

    @property
    def flops_per_s(self) -> float:
        """Floating-point operations per second of the best repetition: 2 n^3 in each."""
        return 2 * self.n**3 / self.best_s if self.best_s else 0.0


@record
class Computed:
    """One rank. `model`: names all that decides the bits and the speed of a product, also its size.

    `bandwidths`: bytes per second by name of BANDWIDTHS. `cpus`: CPUs available to a CPU rank, 0 on a GPU. `health`: of
    its GPU during the test, if results were wrong or a rank was slow. `device`: UUID of its GPU, "" if unknown.
    """

    model: str
    products: tuple[Product, ...] = ()
    bandwidths: dict[str, float] = field(default_factory=dict)
    rounds: int = 1
    cpus: int = 0
    health: GpuHealth | None = None
    device: str = ""

    def rates(self) -> dict[str, float]:
        """Return every measured rate by name, per second."""
        products = {product.precision: product.flops_per_s for product in self.products if product.best_s}
        return {**products, **self.bandwidths}

    def digests(self) -> dict[str, str]:
        """Return the digest of every product by precision."""
        return {product.precision: product.digest for product in self.products if product.digest}

    def summary(self) -> Summary:
        """Return the part that `bad_ranks` compares."""
        wrong = any(product.is_wrong for product in self.products)
        return Summary(self.model, self.rates(), self.digests(), wrong, self.device)


@record
class Summary:
    """The results of one rank, as sent to rank 0."""

    model: str
    rates: dict[str, float]
    digests: dict[str, str]
    wrong: bool
    device: str


def slow(rates: Mapping[int, float], limit: float) -> tuple[float, list[int]]:
    """Return the median rate of devices of one model (the higher middle one), and the ranks below `limit` of it."""
    typical = median_high(rates.values()) if rates else 0.0
    return typical, sorted(rank for rank, rate in rates.items() if rate < limit * typical)


def majority(digests: Mapping[int, str]) -> list[int]:
    """Return the ranks that share the digest of the majority (at least two ranks); without a majority, none."""
    usual = [rank for rank, digest in digests.items() if digest == mode(digests.values())]
    return usual if len(usual) > max(1, len(digests) / 2) else []


def by_model(ranks: Mapping[int, tuple[str, Mapping[str, Value]]]) -> dict[tuple[str, str], dict[int, Value]]:
    """Group values for comparison; `ranks`: rank -> its model and its values by name. Returns (name, model) -> rank ->
    value."""
    grouped: dict[tuple[str, str], dict[int, Value]] = {}
    for rank, (model, values) in sorted(ranks.items()):
        for name, value in values.items():
            grouped.setdefault((name, model), {})[rank] = value
    return grouped


def shared(devices: Mapping[int, str]) -> set[int]:
    """Return the ranks that share a GPU and so slow each other down; `devices`: GPU UUID by rank."""
    count = Counter(devices.values())
    return {rank for rank, device in devices.items() if device and count[device] > 1}


def slow_by_rate(
    ranks: Mapping[int, tuple[str, Mapping[str, float]]], devices: Mapping[int, str]
) -> dict[tuple[str, str], tuple[float, list[int]]]:
    """Return `slow` by rate and model, for ranks that do not share a GPU; `ranks`: rank -> (model, rates)."""
    alone = by_model({rank: own for rank, own in ranks.items() if rank not in shared(devices)})
    return {key: slow(own, SLOW_COPY if key[0] in BANDWIDTHS else SLOW) for key, own in alone.items()}


def bad_ranks(summaries: Mapping[int, Summary]) -> tuple[set[int], set[int]]:
    """Return the slow ranks and the ranks with wrong results; `summaries`: `Computed.summary` by rank."""
    devices = {rank: own.device for rank, own in summaries.items()}
    slowly = slow_by_rate({rank: (own.model, own.rates) for rank, own in summaries.items()}, devices)
    wrong = {rank for rank, own in summaries.items() if own.wrong}
    for digests in by_model({rank: (own.model, own.digests) for rank, own in summaries.items()}).values():
        usual = majority(digests)
        wrong |= digests.keys() - usual if usual else set()
    return {rank for _, ranks in slowly.values() for rank in ranks}, wrong
