"""What is wrong with the GPUs of one node: driver, errors of memory and links, clocks, Xids, who is on them. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from distdiag.commands.doctor.types import Symptom
from distdiag.diagnosis.wording import counted, format_age
from distdiag.knowledge import xids
from distdiag.knowledge.cuda import tables
from distdiag.report import Fix, Level

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.doctor.collect import Gpus
    from distdiag.commands.doctor.types import NodeDoctor
    from distdiag.facts.gpu_health import GpuHealth, GpuProcess
    from distdiag.knowledge.xids import XidLine

_DMESG = "sudo dmesg -T | grep -iE 'nvrm|xid' | tail -20"
_ECC = "nvidia-smi -q -d ECC,ROW_REMAPPER"
_MISMATCH = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH, nvml.h
_FABRIC = 802  # CUDA_ERROR_SYSTEM_NOT_READY, cuda.h
_NO_GPU = (100, 101)
_FEW_LINK_ERRORS = 10
_MANY_REPLAYS = 1000
_LONG_S = 20
"""What does not return within it hangs: 8 GPUs without persistence mode take less."""


def gpu_symptoms(node: NodeDoctor, first_rank: int | None) -> Iterator[Symptom]:
    """Yield all of them; `first_rank`: the rank of this node's first GPU if each GPU has one, None: not known."""
    gpus = node.gpus
    if gpus is None or not (gpus.driver.kernel or gpus.driver.hardware or gpus.health.gpus):
        return
    if not gpus.driver.kernel and not gpus.driver.wsl:
        count = counted(gpus.driver.hardware, "NVIDIA GPU")
        yield Symptom(
            id="gpu.no-driver",
            level=Level.WARN,
            title=f"{count} on the PCI bus, and NVIDIA's driver is not loaded",
            fix=Fix(text="load it, or read why it fails", commands=("sudo modprobe nvidia", _DMESG)),
        )
        return
    yield from _driver(node, gpus)
    most_links = max((_active_links(gpu) for gpu in gpus.health.gpus), default=0)
    for gpu in gpus.health.gpus:
        name = _Name(gpu, node, first_rank)
        yield from _errors(gpu, str(name))
        yield from _links(gpu, str(name), most_links)
        yield from _slow(gpu, str(name))
        yield from _users(gpu, str(name))
    yield from _settings(gpus.health.gpus)
    yield from _imex(gpus)
    yield from _xids(node, first_rank)


class _Name:
    """What a GPU is called: its index, its PCI address, and the local rank that a job has on it."""

    def __init__(self, gpu: GpuHealth, node: NodeDoctor, first_rank: int | None) -> None:
        self._gpu = gpu
        self._first = first_rank
        variables = node.system.variables if node.system is not None else {}
        self._visible = variables.get("CUDA_VISIBLE_DEVICES")

    def local_rank(self) -> int | None:
        """Return its place among the GPUs that a job sees; None if it does not see it, or that is not known."""
        if self._visible is None:
            return self._gpu.index
        words = [word.strip() for word in self._visible.split(",")]
        own = (str(self._gpu.index), self._gpu.uuid)
        return next((at for at, word in enumerate(words) if word and (word in own or _is_uuid_of(word, own[1]))), None)

    def __str__(self) -> str:
        local = self.local_rank()
        rank = f", rank {self._first + local}" if self._first and local is not None else ""
        place = f", local rank {local}{rank}" if local is not None else ", hidden by CUDA_VISIBLE_DEVICES"
        return f"GPU {self._gpu.index} ({_short(self._gpu.address)}{place})"


def _is_uuid_of(word: str, uuid: str) -> bool:
    return word.startswith("GPU-") and uuid.startswith(word)


def _short(address: str) -> str:
    """Write a PCI address as lspci and the kernel do: nvidia-smi has a domain of eight digits."""
    return address.lower().removeprefix("0000") if len(address.partition(":")[0]) == 8 else address.lower()


def _driver(node: NodeDoctor, gpus: Gpus) -> Iterator[Symptom]:
    driver, answer, health = gpus.driver, gpus.driver.answer, gpus.health
    if answer.stuck:
        yield Symptom(
            id="gpu.hangs",
            level=Level.FAIL if gpus.asked_s >= _LONG_S else Level.UNKNOWN,
            title=f"the NVIDIA driver hangs: {answer.stuck} does not return within {gpus.asked_s:g} s",
            detail="Every program that uses a GPU will hang as well. Without persistence mode the first call takes "
            "seconds for each GPU.",
            fix=Fix(
                text="look for the GPU that failed; the node needs a reboot",
                commands=(_DMESG,) if gpus.asked_s >= _LONG_S else (f"distdiag doctor --timeout {2 * _LONG_S}", _DMESG),
            ),
        )
        return
    if answer.nvml_status == _MISMATCH or "version mismatch" in health.error:
        yield Symptom(
            id="gpu.driver-mismatch",
            level=Level.FAIL,
            title=f"the NVIDIA kernel module ({driver.kernel}) and its libraries have different versions",
            detail="The driver was upgraded while the old module stayed loaded.",
            fix=Fix(text="reboot the node, or reload the module with no program on the GPUs"),
        )
        return
    yield from _missing(node, gpus)
    status = answer.cuda_status
    if status is not None and status not in (0, *_NO_GPU):
        fabric = status == _FABRIC
        means = tables().status.get(str(status), "see cuda.h, CUresult")
        yield Symptom(
            id="gpu.fabric" if fabric else "gpu.init",
            level=Level.FAIL,
            title="the NVSwitch fabric is not ready (error 802): fabric manager not running or wrong version"
            if fabric
            else f"the driver fails to initialize: cuInit returns error {status}, {means}",
            evidence=(f"nvidia-fabricmanager: {driver.fabric_manager}",) if fabric and driver.fabric_manager else (),
            fix=Fix(text="start it", commands=("sudo systemctl start nvidia-fabricmanager",))
            if fabric
            else Fix(text="find the cause", commands=("distdiag cuda-env --goal run", _DMESG)),
        )


def _imex(gpus: Gpus) -> Iterator[Symptom]:
    """Judge the channels through which GPUs of several nodes share memory; only such GPUs have a clique."""
    if any(gpu.clique for gpu in gpus.health.gpus) and not gpus.imex_channels:
        yield Symptom(
            id="gpu.imex",
            level=Level.WARN,
            title="its GPUs belong to an NVLink domain of several nodes, and there is no IMEX channel",
            detail="Ranks of different nodes cannot share memory over NVLink: NCCL fails, or uses the network.",
            fix=Fix(
                text="start IMEX, and make a channel device",
                commands=("systemctl status nvidia-imex --no-pager", "sudo nvidia-modprobe -c 0"),
            ),
        )


def _missing(node: NodeDoctor, gpus: Gpus) -> Iterator[Symptom]:
    """Report GPUs that do not respond; a job's share of a node, or a container's, is no fault."""
    driver, answer, health = gpus.driver, gpus.driver.answer, gpus.health
    lost = [index for index in answer.lost if index not in answer.blocked]
    here = max(len(health.gpus), len(answer.present))
    if not here and not lost and (not driver.devices or ("No devices" in health.error and _is_shared(node, gpus))):
        if driver.hardware:
            title = f"none of {counted(driver.hardware, 'GPU')} is visible: the job or container was given none"
            yield Symptom(id="gpu.share", level=Level.INFO, title=title)
        return
    fewer = driver.hardware - here if here else 0
    fix = Fix(
        text="read the kernel log; it needs a reset, or the node a reboot",
        commands=(_DMESG, "nvidia-smi -L"),
    )
    if lost or (fewer > 0 and not _is_shared(node, gpus)):
        names = ", ".join(map(str, lost))
        title = (
            f"GPU {names} does not respond" if lost else f"{fewer} of {driver.hardware} GPUs on the bus do not respond"
        )
        # Without a word of NVML that it is broken, this job or container may only not be allowed to open it.
        is_sure = not lost or any(index in answer.broken for index in lost) or not _is_shared(node, gpus)
        level = Level.FAIL if is_sure else Level.UNKNOWN
        title += "" if is_sure else ", or is not for this job"
        yield Symptom(id="gpu.missing", level=level, title=title, fix=fix)
    elif fewer > 0:
        title = f"{here} of {driver.hardware} GPUs are visible: the share of a job or container"
        yield Symptom(id="gpu.share", level=Level.INFO, title=title)
    if not health.error or (not driver.hardware and "No devices" in health.error):
        return
    is_absent = "PATH" in health.error
    yield Symptom(
        id="gpu.smi",
        level=Level.WARN if is_absent else Level.UNKNOWN if answer.present else Level.FAIL,
        title=f"the GPUs' health is not known: {health.error}",
        fix=Fix(text="find out what the driver says", commands=("distdiag cuda-env --goal run", _DMESG)),
    )


def _is_shared(node: NodeDoctor, gpus: Gpus) -> bool:
    """Return whether something may hide GPUs: a container, a job with a share of the node, a cgroup."""
    in_step = node.system is not None and node.system.in_step
    return bool(in_step or gpus.driver.container or gpus.driver.answer.blocked)


def _errors(gpu: GpuHealth, name: str) -> Iterator[Symptom]:
    reset = Fix(
        text="with no program on it, reset it; if that fails, reboot the node",
        commands=(f"sudo nvidia-smi --gpu-reset -i {gpu.index}",),
    )
    if gpu.broken:
        words = f"{name} does not respond: {gpu.broken}"
        yield Symptom(id="gpu.missing", level=Level.FAIL, subject=name, title=words, fix=reset)
    if gpu.recovery not in ("", "None"):
        words = f"{name}: the driver requests its recovery: {gpu.recovery}"
        yield Symptom(id="gpu.reset-required", level=Level.FAIL, subject=name, title=words, fix=reset)
    if gpu.remap_failed or gpu.sram_threshold:
        what = "remapping a bad memory row failed" if gpu.remap_failed else "the threshold of SRAM errors is exceeded"
        yield Symptom(
            id="gpu.remap-failed",
            level=Level.FAIL,
            subject=name,
            title=f"{name}: {what}: it may have to be replaced",
            fix=Fix(
                text="take it out of service, and run NVIDIA's field diagnostic", commands=(_ECC, "dcgmi diag -r 3")
            ),
        )
    elif gpu.remap_pending or gpu.retired_pending:
        what = "a bad memory row waits for a reset to be remapped" if gpu.remap_pending else "pages wait to be retired"
        title = f"{name}: {what}"
        yield Symptom(id="gpu.remap-pending", level=Level.WARN, subject=name, title=title, fix=reset)
    if gpu.uncorrectable:
        yield Symptom(
            id="gpu.ecc",
            level=Level.WARN,
            subject=name,
            title=f"{name}: {counted(gpu.uncorrectable, 'uncorrectable memory error')} since its last reset",
            detail="The program that hit it was killed. More of them soon after a reset mean a bad GPU.",
            fix=Fix(text=reset.text, commands=(_ECC, *reset.commands)),
        )
    state, _, status = gpu.fabric.partition(", ")
    if state not in ("", "Completed", "Not Supported") or status not in ("", "Success"):
        yield Symptom(
            id="gpu.fabric",
            level=Level.FAIL,
            subject=name,
            title=f"{name}: it has not joined the NVLink fabric: {gpu.fabric}",
            fix=Fix(text="check the fabric manager", commands=("systemctl status nvidia-fabricmanager --no-pager",)),
        )


def _active_links(gpu: GpuHealth) -> int:
    return gpu.links - len(gpu.inactive_links)


def _links(gpu: GpuHealth, name: str, most_links: int) -> Iterator[Symptom]:
    """Judge its NVLinks beside those of the other GPUs: without a bridge, or with a small one, links are unused."""
    if gpu.inactive_links and _active_links(gpu) < most_links:
        links = ", ".join(map(str, gpu.inactive_links))
        all_of_them = len(gpu.inactive_links) == gpu.links
        yield Symptom(
            id="gpu.nvlink",
            level=Level.WARN,
            subject=name,
            title=f"{name}: {'all NVLinks are' if all_of_them else f'NVLink {links}:'} inactive",
            fix=Fix(
                text="compare with the other GPUs, and read the kernel log", commands=("nvidia-smi nvlink -s", _DMESG)
            ),
        )
    many = {link: count for link, count in gpu.link_errors.items() if count >= _FEW_LINK_ERRORS}
    if many:
        worst = max(many, key=lambda link: many[link])
        yield Symptom(
            id="gpu.nvlink-errors",
            level=Level.WARN,
            subject=name,
            title=f"{name}: NVLink {worst.removeprefix('link ')} errors: {many[worst]}",
            evidence=tuple(f"{link}: {count}" for link, count in many.items()),
            fix=Fix(text="see whether they still grow", commands=(f"nvidia-smi nvlink -e -i {gpu.index}",)),
        )


def _slow(gpu: GpuHealth, name: str) -> Iterator[Symptom]:
    if gpu.slowdowns:
        hot = f", at {gpu.temperature_c} C" if gpu.temperature_c is not None else ""
        yield Symptom(
            id="gpu.throttled",
            level=Level.WARN,
            subject=name,
            title=f"{name}: its clocks are held down: {', '.join(gpu.slowdowns)}{hot}",
            detail="It computes slowly, and all ranks wait for it.",
            fix=Fix(
                text="check cooling and power supply", commands=("nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",)
            ),
        )
    if _lanes(gpu.pcie_width) < _lanes(gpu.pcie_width_max):
        yield Symptom(
            id="gpu.pcie-width",
            level=Level.WARN,
            subject=name,
            title=f"{name}: its PCIe link has {gpu.pcie_width} of {gpu.pcie_width_max} lanes",
            detail="Copies between the host and this GPU, and to network cards, are as much slower.",
            fix=Fix(
                text="reseat the card or riser, or take the node out",
                commands=("nvidia-smi -q | grep -A 9 'Link Info'",),
            ),
        )
    if (gpu.pcie_replays or 0) >= _MANY_REPLAYS:
        yield Symptom(
            id="gpu.pcie-replays",
            level=Level.WARN,
            subject=name,
            title=f"{name}: {gpu.pcie_replays} PCIe packets were sent again since its reset",
            detail="A link with errors is slow, and the GPU may fall off the bus.",
            fix=Fix(
                text="see whether the count grows; if so, take the node out", commands=("nvidia-smi -q | grep Replay",)
            ),
        )


def _lanes(text: str) -> int:
    """Return the lanes of "16x"; 0 where they are not known."""
    number = text.removesuffix("x")
    return int(number) if number.isdecimal() and int(number) else 0


def _users(gpu: GpuHealth, name: str) -> Iterator[Symptom]:
    """Report who is on a GPU before the job is: what another one left there takes its memory."""
    found = [process for process in gpu.processes if "C" in process.kind and not _is_service(process)]
    if not found:
        return
    yield Symptom(
        id="gpu.busy",
        level=Level.WARN,
        subject=name,
        title=f"{name} is in use by {', '.join(map(_who, found[:3]))}{' and more' * (len(found) > 3)}",
        detail="If no job should be running there, it is left over from one, and takes memory and time from the next.",
        evidence=(f"memory in use: {gpu.memory_used_mib} of {gpu.memory_total_mib} MiB",),
        fix=Fix(text="see whose it is, and end it", commands=(f"ps -o pid,user,lstart,args -p {found[0].pid}",)),
    )


def _is_service(process: GpuProcess) -> bool:
    return any(name in process.name for name in ("nvidia-cuda-mps", "nv-hostengine", "dcgm"))


def _who(process: GpuProcess) -> str:
    user = f" of {process.user}" if process.user else ""
    return f"pid {process.pid}{user} ({process.name.rpartition('/')[2] or '?'})"


def _settings(gpus: Sequence[GpuHealth]) -> Iterator[Symptom]:
    off = [gpu.index for gpu in gpus if gpu.persistence == "Disabled"]
    if off:
        yield Symptom(
            id="gpu.persistence",
            level=Level.INFO,
            title=f"persistence mode is off on {counted(len(off), 'GPU')}: each first program waits for seconds",
            fix=Fix(text="turn it on", commands=("sudo nvidia-smi -pm 1",)),
        )
    capped = [g for g in gpus if g.power_limit_w and g.default_limit_w and g.power_limit_w < 0.95 * g.default_limit_w]
    if capped:
        limits = sorted({f"{gpu.power_limit_w:.0f} of {gpu.default_limit_w:.0f} W" for gpu in capped})
        title = f"the power of {counted(len(capped), 'GPU')} is limited: {', '.join(limits)}"
        yield Symptom(id="gpu.power-limit", level=Level.INFO, title=title)


def _xids(node: NodeDoctor, first_rank: int | None) -> Iterator[Symptom]:
    """Report the newest line of each Xid and GPU; a reset may have mended what the log still has."""
    lines = node.kernel.lines if node.kernel is not None else ()
    if node.kernel is not None and node.kernel.error:
        title = f"the kernel log, with the Xids of GPUs, cannot be read: {node.kernel.error}"
        yield Symptom(id="log.unread", level=Level.INFO, title=title)
    newest: dict[tuple[int, str], tuple[XidLine, float, str]] = {}
    for line in lines:
        parsed = xids.read_line(line.text) if line.kind == "xid" else None
        if parsed is not None:
            key = (parsed.xid.code, parsed.address)
            if key not in newest or line.age_s < newest[key][1]:
                newest[key] = (parsed, line.age_s, line.text)
    for (code, address), (parsed, age_s, text) in newest.items():
        own = next((gpu for gpu in _gpus(node) if _is_at(gpu, address)), None)
        name = str(_Name(own, node, first_rank)) if own is not None else f"GPU at {address}"
        means = parsed.xid.means or "an error that distdiag does not know"
        wanted = f": {parsed.action}" if parsed.action else ""
        yield Symptom(
            id="log.xid",
            level=_xid_level(parsed, own),
            subject=f"{code} {address}",
            title=f"{name}: Xid {code}, {means}{wanted}; {format_age(age_s)} ago",
            detail="If the GPU was reset since, that fixed it." if parsed.blames in ("gpu", "memory") and own else "",
            evidence=(text, xids.SOURCE),
            fix=Fix(text="see what else the driver says", commands=(_DMESG, _ECC)),
        )
    kinds = {"gpu-lost": "a GPU that fell off the bus", "nvlink": "NVLink errors", "sxid": "fatal NVSwitch errors"}
    for kind, words in kinds.items():
        of_kind = [line for line in lines if line.kind == kind]
        if of_kind:
            last = min(of_kind, key=lambda line: line.age_s)
            yield Symptom(
                id=f"log.{kind}",
                level=Level.WARN,
                title=f"the kernel log has {words}, {format_age(last.age_s)} ago",
                evidence=(last.text,),
                fix=Fix(text="see which, and whether it was reset since", commands=(_DMESG, "nvidia-smi")),
            )


def _gpus(node: NodeDoctor) -> tuple[GpuHealth, ...]:
    return node.gpus.health.gpus if node.gpus is not None else ()


def _is_at(gpu: GpuHealth, address: str) -> bool:
    """Compare PCI addresses: the kernel's has four digits of domain, and no function."""
    return _short(gpu.address).rpartition(".")[0] == re.sub(r"^0000(?=[0-9a-f]{4}:)", "", address).partition(".")[0]


def _xid_level(parsed: XidLine, gpu: GpuHealth | None) -> Level:
    """Judge an Xid of the log by what the GPU says now: an error that a reset has mended since is a remark.

    Counts of memory errors and the wanted recovery are cleared by a reset. Of a GPU that is not there any more, and of
    links, the log is the only witness.
    """
    if parsed.blames not in ("gpu", "memory", "remap") or (gpu is None and parsed.blames == "remap"):
        return Level.INFO
    if gpu is None or parsed.blames == "gpu":
        return Level.WARN
    return Level.WARN if gpu.uncorrectable or gpu.remap_pending or gpu.remap_failed else Level.INFO
