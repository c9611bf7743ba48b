"""Ranks that compute wrongly or slowly, from the measurements of all. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from distdiag.diagnosis.verdicts import exists
from distdiag.diagnosis.wording import counted, three_digits
from distdiag.facts.gpu.computed import BANDWIDTHS, by_model, majority, shared, slow_by_rate
from distdiag.knowledge.peaks import find_peaks
from distdiag.launch.wording import found

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distdiag.facts.gpu.computed import Computed, Product
    from distdiag.facts.gpu.gpu_health import GpuHealth
    from distdiag.launch.rank_runs import RankTimeline
    from distdiag.launch.types import Request
    from distdiag.report import Finding

_FAR_BELOW_PEAK = 0.4
"""Share of the data sheet's 16-bit peak; products of this size reach 60 to 80 percent on an idle GPU."""
_MOST_EVIDENCE = 8


def findings_of(computed: Mapping[int, Computed], traces: Sequence[RankTimeline], request: Request) -> list[Finding]:
    """Return the findings of the stage compute, wrong results first."""
    judge = _Judge(computed, {trace.rank: trace for trace in traces}, request)
    wrong = judge.wrong()
    return [*wrong, *([] if wrong else judge.differing()), *judge.slow(), *judge.below_peak()]


class _Judge:
    def __init__(self, computed: Mapping[int, Computed], traces: Mapping[int, RankTimeline], request: Request) -> None:
        self.computed, self.traces, self.request = computed, traces, request
        self.on_gpu = any(not own.cpus for own in computed.values())

    def wrong(self) -> list[Finding]:
        """Report ranks that failed their own checks."""
        said = {
            rank: lines
            for rank, own in sorted(self.computed.items())
            if (lines := [line for product in own.products for line in _wrong(product)])
        }
        if not said:
            return []
        evidence = [f"rank {rank}: {line}" for rank, lines in said.items() for line in lines]
        return [self._finding("compute-wrong", list(said), evidence, what=said[min(said)][0], **self._again())]

    def differing(self) -> list[Finding]:
        """Report ranks whose large products differ in bits from those of the same model."""
        differing = []
        compared = by_model({rank: (own.model, own.digests()) for rank, own in self.computed.items()})
        for (precision, model), digests in compared.items():
            ranks_of: dict[str, list[int]] = {}
            for rank, digest in digests.items():
                ranks_of.setdefault(digest, []).append(rank)
            if len(ranks_of) < 2:
                continue
            usual = majority(digests)
            odd = sorted(digests.keys() - usual)
            than = f"the {counted(len(usual), 'other rank')} with the same device" if usual else "each other"
            evidence = [f"ranks {ranks}: digest {digest}" for digest, ranks in ranks_of.items()]
            verdict = "compute-differs" if usual else "compute-differs-from-all"
            words = {"precision": precision, "than": than, "model": model}
            differing.append(self._finding(verdict, odd, evidence, **words, **self._again()))
        return differing[:1]

    def slow(self) -> list[Finding]:
        """Report ranks slower than those of the same model, one finding for products, one for copies."""
        devices = {rank: own.device for rank, own in self.computed.items()}
        seen = slow_by_rate({rank: (own.model, own.rates()) for rank, own in self.computed.items()}, devices)
        products: dict[int, list[str]] = {}
        copies: dict[int, list[str]] = {}
        for (name, model), (typical, ranks) in seen.items():
            for rank in ranks:
                own = self.computed[rank]
                is_product = name not in BANDWIDTHS
                rate, unit = own.rates()[name], "FLOP/s" if is_product else "B/s"
                others = sum(other.model == model for other in self.computed.values()) - len(ranks)
                line = (
                    f"{name} {_short(rate)}{unit}, {rate / typical:.0%} of the {_short(typical)}{unit} of "
                    f"{counted(others, 'other rank')} with the same device"
                )
                (products if is_product else copies).setdefault(rank, []).append(line)
        slow = (("slow-compute", "multipl{} matrices", products), ("slow-memory", "cop{} memory", copies))
        return [self._slow(kind, what, lines) for kind, what, lines in slow if lines]

    def _slow(self, kind: str, what: str, lines: Mapping[int, list[str]]) -> Finding:
        ranks = sorted(lines)
        evidence = [f"rank {rank}: {line}" for rank in ranks for line in lines[rank]]
        evidence += [f"rank {rank}: {line}" for rank in ranks for line in _health(self.computed[rank].health)]
        return self._finding(
            kind,
            ranks,
            evidence,
            does=what.format("ies" if len(ranks) == 1 else "y"),
            how=lines[ranks[0]][0],
            rounds=counted(self.computed[ranks[0]].rounds, "round"),
        )

    def below_peak(self) -> list[Finding]:
        """Warn if all GPUs of a model are far below the peak of its data sheet."""
        rates: dict[str, dict[int, float]] = {}
        crowded = shared({rank: own.device for rank, own in self.computed.items()})
        for rank, own in self.computed.items():
            if rank in crowded:
                continue
            best = max((p.flops_per_s for p in own.products if p.precision in ("bfloat16", "float16")), default=0.0)
            if best and not own.cpus:
                rates.setdefault(own.model.partition(",")[0], {})[rank] = best
        below = []
        for name, own_rates in rates.items():
            peaks = find_peaks(name)
            typical = median(own_rates.values())
            if len(peaks) == 1 and typical < _FAR_BELOW_PEAK * peaks[0].tflops * 1e12:
                words = {"rate": f"{typical / 1e12:.0f}", "share": f"{typical / peaks[0].tflops / 1e12:.0%}"}
                words |= {"gpu": peaks[0].name, "peak": f"{peaks[0].tflops:g}"}
                below.append(self._finding("compute-below-peak", sorted(own_rates), (), **words))
        return below

    def _finding(
        self,
        verdict: str,
        ranks: list[int],
        evidence: Sequence[str],
        **words: Any,  # noqa: ANN401 - of the verdict
    ) -> Finding:
        """Return the finding of a verdict; some have another on the CPU."""
        traces = [self.traces[rank] for rank in ranks]
        words["hosts"] = ", ".join(sorted({trace.host for trace in traces}))
        on_cpu = f"{verdict}-on-cpu"
        verdict = on_cpu if not self.on_gpu and exists(on_cpu) else verdict
        return found(verdict, self.request, traces, evidence=evidence[:_MOST_EVIDENCE], **words)

    def _again(self) -> dict[str, str]:
        return {"again": self.request.again(compute="60s")}


def _wrong(product: Product) -> Iterator[str]:
    shape = f"{product.n}x{product.n} {product.precision} product"
    if product.wrong_repetition:
        differ = f"{counted(product.wrong, 'element')} of a {shape}"
        values = f", the first at index {product.first_index}: {product.got} instead of {product.expected}"
        yield (
            f"{differ} changed in repetition {product.wrong_repetition} of {product.repetitions}"
            f"{values if product.wrong else ''}"
        )
    if product.inexact:
        yield f"{counted(product.inexact, 'element')} of a small {product.precision} product of whole numbers are wrong"
    if product.sums_off:
        yield f"{counted(product.sums_off, 'row or column', 'rows and columns')} of a {shape} have a wrong sum"


def _health(gpu: GpuHealth | None) -> Iterator[str]:
    """Format notable values of a GPU's health under load."""
    if gpu is None:
        return
    if gpu.slowdowns:
        yield f"throttled by {', '.join(gpu.slowdowns)}"
    clocks = f"SM clock {gpu.clock_mhz} of {gpu.max_clock_mhz} MHz, " if gpu.clock_mhz and gpu.max_clock_mhz else ""
    power = f"power {gpu.power_w:g} of {gpu.power_limit_w:g} W, " if gpu.power_w and gpu.power_limit_w else ""
    yield (
        f"{clocks}{power}{gpu.temperature_c} C, PCIe generation {gpu.pcie_generation or '?'} of "
        f"{gpu.pcie_generation_max or '?'}, {gpu.pcie_width or '?'} of {gpu.pcie_width_max or '?'}"
    )
    if gpu.uncorrectable:
        yield f"{counted(gpu.uncorrectable, 'uncorrectable memory error')}"
    if gpu.inactive_links:
        yield f"{counted(len(gpu.inactive_links), 'NVLink')} of {gpu.links} inactive"


def _short(rate: float) -> str:
    """Format a rate: 1.98 T, 45.2 G."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if rate >= size:
            return f"{three_digits(rate / size)} {unit}"
    return f"{three_digits(rate)} "
