"""Symptoms of the GPUs of one node: driver, memory and link errors, clocks, Xids, other users. Pure."""

from __future__ import annotations

import re
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from distdiag.commands.doctor.symptoms import symptom
from distdiag.diagnosis.wording import counted, format_age
from distdiag.fold import by_key
from distdiag.knowledge import xids
from distdiag.knowledge.cuda import tables
from distdiag.record import record
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distdiag.commands.doctor.collect import Gpus
    from distdiag.commands.doctor.types import NodeDoctor, Symptom
    from distdiag.facts.gpu.gpu_health import GpuHealth, GpuProcess
    from distdiag.knowledge.xids import XidLine

    _Say = Callable[..., Symptom]

_MISMATCH = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH, nvml.h
_FABRIC = 802  # CUDA_ERROR_SYSTEM_NOT_READY, cuda.h
_NO_GPU = (100, 101)
_FEW_LINK_ERRORS = 10
_MANY_REPLAYS = 1000
_BUSY_PERCENT, _AT_POWER_LIMIT = 90, 0.9
_SERVICES = ("nvidia-cuda-mps", "nv-hostengine", "dcgm")
_LONG_S = 20
"""A call that exceeds this hangs: 8 GPUs without persistence mode need less."""


@record
class SpeedLimit:
    """A bound on the speed of a GPU, equal on GPUs of one model.

    `of` reads it, None if unknown. `tolerance`: larger relative gaps count.
    """

    label: str
    unit: str
    tolerance: float
    of: Callable[[GpuHealth], float | None]

    def write(self, value: float) -> str:
        """Format a value with its unit."""
        return f"{value:.0f} {self.unit}"


SPEED_LIMITS = (
    SpeedLimit("power limit", "W", 0.02, lambda gpu: gpu.power_limit_w),
    SpeedLimit("maximum SM clock", "MHz", 0.02, lambda gpu: gpu.max_clock_mhz),
    SpeedLimit("application clock", "MHz", 0.02, lambda gpu: gpu.application_clock_mhz),
    SpeedLimit("SM clock under load", "MHz", 0.2, lambda gpu: _loaded_clock(gpu)),
)
"""Clocks under load differ by up to a tenth within a model, from silicon and heat."""


def _loaded_clock(gpu: GpuHealth) -> float | None:
    """Return the SM clock of a busy GPU; None at its power limit, since the clock then depends on the program."""
    has_power = gpu.power_w and gpu.power_limit_w and gpu.power_w < _AT_POWER_LIMIT * gpu.power_limit_w
    return gpu.clock_mhz if has_power and (gpu.busy_percent or 0) >= _BUSY_PERCENT else None


def gpu_symptoms(node: NodeDoctor, first_rank: int | None) -> Iterator[Symptom]:
    """Yield all GPU symptoms; `first_rank`: rank of this node's first GPU, assuming one rank per GPU; None: unknown."""
    gpus = node.gpus
    if gpus is None or not (gpus.driver.kernel or gpus.driver.hardware or gpus.health.gpus):
        return
    if not gpus.driver.kernel and not gpus.driver.wsl:
        yield symptom("gpu.no-driver", gpus=counted(gpus.driver.hardware, "NVIDIA GPU"))
        return
    yield from _driver(node, gpus)
    most_links = max((_active_links(gpu) for gpu in gpus.health.gpus), default=0)
    for gpu in gpus.health.gpus:
        name = _name(gpu, node, first_rank)
        say = partial(symptom, words={"gpu": name, "index": gpu.index}, subject=name)
        yield from _errors(gpu, say)
        yield from _links(gpu, say, most_links)
        yield from _slow(gpu, say)
        yield from _users(gpu, say)
    yield from _beside_others(node, gpus.health.gpus, first_rank)
    yield from _settings(gpus.health.gpus)
    yield from _imex(gpus)
    yield from _xids(node, first_rank)


def _name(gpu: GpuHealth, node: NodeDoctor, first_rank: int | None) -> str:
    """Name a GPU: its index, its PCI address, and its local rank in a job, the place among the visible GPUs."""
    visible = (node.system.variables if node.system is not None else {}).get("CUDA_VISIBLE_DEVICES")
    local: int | None = gpu.index
    if visible is not None:
        words = [word.strip() for word in visible.split(",")]
        is_own = [word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word)) for word in words]
        local = is_own.index(True) if True in is_own else None
    rank = f", rank {first_rank + local}" if first_rank and local is not None else ""
    place = f", local rank {local}{rank}" if local is not None else ", hidden by CUDA_VISIBLE_DEVICES"
    return f"GPU {gpu.index} ({_short(gpu.address)}{place})"


def _short(address: str) -> str:
    """Format a PCI address like lspci and the kernel; nvidia-smi prints an eight-digit domain."""
    return address.lower().removeprefix("0000") if len(address.partition(":")[0]) == 8 else address.lower()


def _driver(node: NodeDoctor, gpus: Gpus) -> Iterator[Symptom]:
    driver, answer, health = gpus.driver, gpus.driver.answer, gpus.health
    if answer.stuck:
        row = "gpu.hangs" if gpus.asked_s >= _LONG_S else "gpu.hangs-early"
        yield symptom(row, call=answer.stuck, seconds=f"{gpus.asked_s:g}", longer=2 * _LONG_S)
        return
    if answer.nvml_status == _MISMATCH or "version mismatch" in health.error:
        yield symptom("gpu.driver-mismatch", kernel=driver.kernel)
        return
    yield from _missing(node, gpus)
    status = answer.cuda_status
    if status is not None and status not in (0, *_NO_GPU):
        manager = driver.fabric_manager
        if status == _FABRIC:
            yield symptom("gpu.fabric", evidence=(f"nvidia-fabricmanager: {manager}" if manager else "",))
            return
        yield symptom("gpu.init", status=status, means=tables().status.get(str(status), "see cuda.h, CUresult"))


def _imex(gpus: Gpus) -> Iterator[Symptom]:
    """Judge the IMEX channels, needed to share memory between nodes; only capable GPUs have a clique."""
    if any(gpu.clique for gpu in gpus.health.gpus) and not gpus.imex_channels:
        yield symptom("gpu.imex")


def _missing(node: NodeDoctor, gpus: Gpus) -> Iterator[Symptom]:
    """Report GPUs that do not respond; GPUs hidden from a job or container are not a fault."""
    driver, answer, health = gpus.driver, gpus.driver.answer, gpus.health
    lost = [index for index in answer.lost if index not in answer.blocked]
    here = max(len(health.gpus), len(answer.present))
    if not here and not lost and (not driver.devices or ("No devices" in health.error and _is_shared(node, gpus))):
        if driver.hardware:
            yield symptom("gpu.none-visible", gpus=counted(driver.hardware, "GPU"))
        return
    fewer = driver.hardware - here if here else 0
    if lost or (fewer > 0 and not _is_shared(node, gpus)):
        # Unless NVML reports it broken, a lost GPU may be closed to this job or container by permissions.
        is_sure = not lost or any(index in answer.broken for index in lost) or not _is_shared(node, gpus)
        names = ", ".join(map(str, lost))
        yield symptom(
            "gpu.missing",
            level=Level.FAIL if is_sure else Level.UNKNOWN,
            which=f"GPU {names} does" if lost else f"{fewer} of {driver.hardware} GPUs on the bus do",
            maybe="" if is_sure else "is not for this job",
        )
    elif fewer > 0:
        yield symptom("gpu.share", here=here, total=driver.hardware)
    if not health.error or (not driver.hardware and "No devices" in health.error):
        return
    level = Level.WARN if "PATH" in health.error else Level.UNKNOWN if answer.present else Level.FAIL
    yield symptom("gpu.smi", level=level, error=health.error)


def _is_shared(node: NodeDoctor, gpus: Gpus) -> bool:
    """Return whether GPUs may be hidden: by a container, a job with a share of the node, or a cgroup."""
    in_step = node.system is not None and node.system.in_step
    return bool(in_step or gpus.driver.container or gpus.driver.answer.blocked)


def _errors(gpu: GpuHealth, say: _Say) -> Iterator[Symptom]:
    if gpu.broken:
        yield say("gpu.broken", error=gpu.broken)
    if gpu.recovery not in ("", "None"):
        yield say("gpu.reset-required", recovery=gpu.recovery)
    if gpu.remap_failed or gpu.sram_threshold:
        what = "remapping a bad memory row failed" if gpu.remap_failed else "the threshold of SRAM errors is exceeded"
        yield say("gpu.remap-failed", what=what)
    elif gpu.remap_pending or gpu.retired_pending:
        what = "a bad memory row waits for a reset to be remapped" if gpu.remap_pending else "pages wait to be retired"
        yield say("gpu.remap-pending", what=what)
    if gpu.uncorrectable:
        yield say("gpu.ecc", errors=counted(gpu.uncorrectable, "uncorrectable memory error"))
    state, _, status = gpu.fabric.partition(", ")
    if state not in ("", "Completed", "Not Supported") or status not in ("", "Success"):
        yield say("gpu.not-joined", state=gpu.fabric)


def _active_links(gpu: GpuHealth) -> int:
    return gpu.links - len(gpu.inactive_links)


def _links(gpu: GpuHealth, say: _Say, most_links: int) -> Iterator[Symptom]:
    """Compare the NVLinks with those of the other GPUs: without a bridge, or with a small one, links are unused."""
    if gpu.inactive_links and _active_links(gpu) < most_links:
        links = ", ".join(map(str, gpu.inactive_links))
        yield say("gpu.nvlink", links="all NVLinks are" if len(gpu.inactive_links) == gpu.links else f"NVLink {links}:")
    many = {link: count for link, count in gpu.link_errors.items() if count >= _FEW_LINK_ERRORS}
    if many:
        worst = max(many, key=lambda link: many[link])
        evidence = (f"{link}: {count}" for link, count in many.items())
        yield say("gpu.nvlink-errors", evidence=evidence, link=worst.removeprefix("link "), count=many[worst])


def _slow(gpu: GpuHealth, say: _Say) -> Iterator[Symptom]:
    if gpu.slowdowns:
        yield say("gpu.throttled", reasons=", ".join(gpu.slowdowns), temperature=gpu.temperature_c)
    if _lanes(gpu.pcie_width) < _lanes(gpu.pcie_width_max):
        yield say("gpu.pcie-width", width=gpu.pcie_width, most=gpu.pcie_width_max)
    if (gpu.pcie_replays or 0) >= _MANY_REPLAYS:
        yield say("gpu.pcie-replays", count=gpu.pcie_replays)


def _beside_others(node: NodeDoctor, gpus: Sequence[GpuHealth], first_rank: int | None) -> Iterator[Symptom]:
    """Report GPUs with a lower limit or clock than the median of their model on this node."""
    for limit in SPEED_LIMITS:
        for model in dict.fromkeys(gpu.name for gpu in gpus):
            values = {gpu.index: value for gpu in gpus if gpu.name == model and (value := limit.of(gpu))}
            usual = median(values.values()) if len(values) > 2 else 0.0
            low = [gpu for gpu in gpus if values.get(gpu.index, usual) < (1 - limit.tolerance) * usual]
            for gpu in low:
                name = _name(gpu, node, first_rank)
                words = {"gpu": name, "index": str(gpu.index), "limit": limit.label}
                written = {"value": limit.write(values[gpu.index]), "usual": limit.write(usual)}
                yield symptom("gpu.slower", {**words, **written}, subject=f"{name} {limit.label}")


def _lanes(text: str) -> int:
    """Return the lanes of "16x"; 0 if unknown."""
    number = text.removesuffix("x")
    return int(number) if number.isdecimal() and int(number) else 0


def _users(gpu: GpuHealth, say: _Say) -> Iterator[Symptom]:
    """Report processes on a GPU before the job starts, as leftovers occupy memory."""
    found = [each for each in gpu.processes if "C" in each.kind and not any(name in each.name for name in _SERVICES)]
    if found:
        who = ", ".join(map(_who, found[:3])) + " and more" * (len(found) > 3)
        evidence = (f"memory in use: {gpu.memory_used_mib} of {gpu.memory_total_mib} MiB",)
        yield say("gpu.busy", evidence=evidence, who=who, pid=found[0].pid)


def _who(process: GpuProcess) -> str:
    user = f" of {process.user}" if process.user else ""
    return f"pid {process.pid}{user} ({process.name.rpartition('/')[2] or '?'})"


def _settings(gpus: Sequence[GpuHealth]) -> Iterator[Symptom]:
    off = [gpu.index for gpu in gpus if gpu.persistence == "Disabled"]
    if off:
        yield symptom("gpu.persistence", gpus=counted(len(off), "GPU"))
    capped = [g for g in gpus if g.power_limit_w and g.default_limit_w and g.power_limit_w < 0.95 * g.default_limit_w]
    if capped:
        limits = sorted({f"{gpu.power_limit_w:.0f} of {gpu.default_limit_w:.0f} W" for gpu in capped})
        yield symptom("gpu.power-limit", gpus=counted(len(capped), "GPU"), limits=", ".join(limits))


def _xids(node: NodeDoctor, first_rank: int | None) -> Iterator[Symptom]:
    """Report the newest line of each Xid and GPU; a reset may have fixed older errors in the log."""
    lines = node.kernel.lines if node.kernel is not None else ()
    if node.kernel is not None and node.kernel.error:
        yield symptom("log.unread", error=node.kernel.error)
    read = [(found, line) for line in lines if line.kind == "xid" and (found := xids.read_line(line.text)) is not None]
    by_gpu = by_key(((found.xid.code, found.address), (found, line)) for found, line in read)
    for (code, address), same in by_gpu.items():
        parsed, line = min(same, key=lambda pair: pair[1].age_s)
        own = next((gpu for gpu in _gpus(node) if _is_at(gpu, address)), None)
        name = _name(own, node, first_rank) if own is not None else f"GPU at {address}"
        yield symptom(
            "log.xid",
            subject=f"{code} {address}",
            level=_xid_level(parsed, own),
            gpu=name,
            code=code,
            means=parsed.xid.means or "an error that distdiag does not know",
            action=parsed.action,
            ago=format_age(line.age_s),
            detail="If the GPU has been reset since, this is already fixed."
            if parsed.blames in ("gpu", "memory") and own
            else "",
            evidence=(line.text, xids.SOURCE),
        )
    for kind in ("gpu-lost", "nvlink", "sxid"):
        of_kind = [line for line in lines if line.kind == kind]
        if of_kind:
            last = min(of_kind, key=lambda line: line.age_s)
            yield symptom(f"log.{kind}", ago=format_age(last.age_s), evidence=(last.text,))


def _gpus(node: NodeDoctor) -> tuple[GpuHealth, ...]:
    return node.gpus.health.gpus if node.gpus is not None else ()


def _is_at(gpu: GpuHealth, address: str) -> bool:
    """Compare PCI addresses: the kernel's has a four-digit domain, and no function."""
    return _short(gpu.address).rpartition(".")[0] == re.sub(r"^0000(?=[0-9a-f]{4}:)", "", address).partition(".")[0]


def _xid_level(parsed: XidLine, gpu: GpuHealth | None) -> Level:
    """Judge an Xid from the log by the current state of the GPU: an error fixed by a reset is a remark.

    A reset clears the counts of memory errors and the recovery action. For a missing GPU, and for links, the log is the
    only evidence.
    """
    if parsed.blames not in ("gpu", "memory", "remap") or (gpu is None and parsed.blames == "remap"):
        return Level.INFO
    if gpu is None or parsed.blames == "gpu":
        return Level.WARN
    return Level.WARN if gpu.uncorrectable or gpu.remap_pending or gpu.remap_failed else Level.INFO
