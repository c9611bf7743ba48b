"""Ranks that compute wrongly or slowly, from the measurements of all. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from distdiag.diagnosis.wording import counted, three_digits
from distdiag.facts.computed import BANDWIDTHS, by_model, majority, shared, slow_by_rate
from distdiag.ids import Shared
from distdiag.knowledge.peaks import find_peaks
from distdiag.launch.wording import where, who
from distdiag.report import Finding, Fix, Level

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distdiag.cluster.rank_runs import RankTimeline
    from distdiag.facts.computed import Computed, Product
    from distdiag.facts.gpu_health import GpuHealth
    from distdiag.launch.types import Request

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
        first = min(said)
        return [
            self._finding(
                Shared.WRONG_COMPUTE,
                Level.FAIL,
                list(said),
                f"computed wrongly: {said[first][0]}",
                detail="The same product of the same matrices was repeated on one device, and checked against exact "
                "sums. No other rank takes part in it: the device, its memory or its power supply is faulty.",
                evidence=[f"rank {rank}: {line}" for rank, lines in said.items() for line in lines],
                fix=self._take_out(list(said)),
            )
        ]

    def differing(self) -> list[Finding]:
        """Report ranks whose large products differ in bits from those of the same model."""
        found = []
        compared = by_model({rank: (own.model, own.digests()) for rank, own in self.computed.items()})
        for (precision, model), digests in compared.items():
            ranks_of: dict[str, list[int]] = {}
            for rank, digest in digests.items():
                ranks_of.setdefault(digest, []).append(rank)
            if len(ranks_of) < 2:
                continue
            usual = majority(digests)
            odd = sorted(digests.keys() - usual)
            found.append(
                self._finding(
                    Shared.COMPUTE_DIFFERS,
                    Level.FAIL if usual else Level.UNKNOWN,
                    odd,
                    f"computed another {precision} product than "
                    + (f"the {counted(len(usual), 'other rank')} with the same device" if usual else "each other"),
                    detail=f"Devices of one model with one torch give the same bits ({model}). Each repeated its own "
                    "result, so the fault is constant: a faulty unit, or another BLAS library on that node.",
                    evidence=[f"ranks {ranks}: digest {digest}" for digest, ranks in ranks_of.items()],
                    fix=self._take_out(odd) if usual else self._again("60s"),
                )
            )
        return found[:1]

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
        return [
            self._slow(kind, what, lines)
            for kind, what, lines in (
                (Shared.SLOW_COMPUTE, ("multiplies", "multiply", "matrices slowly"), products),
                (Shared.SLOW_MEMORY, ("copies", "copy", "memory slowly"), copies),
            )
            if lines
        ]

    def _slow(self, kind: Shared, words: tuple[str, str, str], lines: Mapping[int, list[str]]) -> Finding:
        ranks = sorted(lines)
        what = f"{words[0] if len(ranks) == 1 else words[1]} {words[2]}"
        first = self.computed[ranks[0]]
        level = Level.FAIL if self.on_gpu else Level.WARN
        evidence = [f"rank {rank}: {line}" for rank in ranks for line in lines[rank]]
        evidence += [f"rank {rank}: {line}" for rank in ranks for line in _health(self.computed[rank].health)]
        return self._finding(
            kind,
            level,
            ranks,
            f"{what}: {lines[ranks[0]][0]}",
            detail=f"All ranks computed at the same time; the best repetition of {counted(first.rounds, 'round')} "
            "counts"
            + (". " if self.on_gpu else ", in time of its own core, without waits for it. ")
            + "A training step is as slow as its slowest rank.",
            evidence=evidence,
            fix=self._fix_slow(ranks),
        )

    def _fix_slow(self, ranks: list[int]) -> Fix:
        if not self.on_gpu:
            return Fix(
                text="compare the clocks of the cores, and see what shares their caches and memory",
                commands=("grep MHz /proc/cpuinfo | sort | uniq -c", "ps -eo pid,psr,pcpu,cmd --sort=-pcpu | head -20"),
            )
        hosts = sorted({self.traces[rank].host for rank in ranks})
        return Fix(
            text=f"on {', '.join(hosts)}: look for throttling, heat, a power limit or a narrow PCIe link; if "
            "they are as on the others, take the GPU out and have it tested",
            commands=("nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,POWER", "dcgmi diag -r 3"),
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
        found = []
        for name, own_rates in rates.items():
            peaks = find_peaks(name)
            typical = median(own_rates.values())
            if len(peaks) == 1 and typical < _FAR_BELOW_PEAK * peaks[0].tflops * 1e12:
                found.append(
                    self._finding(
                        Shared.COMPUTE_BELOW_PEAK,
                        Level.WARN,
                        sorted(own_rates),
                        f"reach {typical / 1e12:.0f} TFLOP/s in 16 bits, {typical / peaks[0].tflops / 1e12:.0%} of "
                        f"the peak of {peaks[0].name} ({peaks[0].tflops:g})",
                        detail="All GPUs of this model are slow alike: a power limit, clocks that are locked, heat, or "
                        "other programs on them.",
                        fix=Fix(
                            text="compare the limits and clocks with the data sheet",
                            commands=("nvidia-smi -q -d PERFORMANCE,CLOCK,POWER", "nvidia-smi"),
                        ),
                    )
                )
        return found

    def _finding(
        self,
        kind: Shared,
        level: Level,
        ranks: list[int],
        what: str,
        *,
        detail: str,
        fix: Fix,
        evidence: Sequence[str] = (),
    ) -> Finding:
        traces = [self.traces[rank] for rank in ranks]
        return Finding(
            id=kind.of(self.request.command),
            level=level,
            title=f"{who(traces)} {what}",
            detail=detail,
            where=where(traces),
            evidence=tuple(evidence[:_MOST_EVIDENCE]),
            fix=fix,
        )

    def _take_out(self, ranks: list[int]) -> Fix:
        hosts = sorted({self.traces[rank].host for rank in ranks})
        if not self.on_gpu:
            return Fix(
                text=f"take {', '.join(hosts)} out of the job, and test its CPU and memory",
                commands=("dmesg -T | grep -iE 'mce|edac|machine check'", self._again("60s").commands[0]),
            )
        return Fix(
            text=f"take {', '.join(hosts)} out of the job; confirm with the vendor's own test",
            commands=("dcgmi diag -r 3", "nvidia-smi -q -d ECC,ROW_REMAPPER", self._again("60s").commands[0]),
        )

    def _again(self, seconds: str) -> Fix:
        return Fix(text="compute longer to decide", commands=(self.request.again(compute=seconds),))


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
