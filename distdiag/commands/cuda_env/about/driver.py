"""The NVIDIA driver: present, consistent, and new enough for torch."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env.fixes import (
    driver_carries,
    driver_cuda,
    driver_version,
    install_torch,
    loader_path_without,
)
from distdiag.commands.cuda_env.problems import problem, with_gpus
from distdiag.commands.cuda_env.types import Problem, Remedy, Section
from distdiag.knowledge.cuda import major, tables, version
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.facts.cuda.driver import Driver

_SAID_ELSEWHERE = (0, 34, 100, 101, 802, 803, 804)
"""Results of cuInit explained by other checks."""


def about_driver(facts: CudaFacts) -> Section:
    """Judge the driver."""
    driver, answer = facts.driver, facts.driver.answer
    newest = driver_cuda(facts)
    line = f"{driver_version(facts) or 'unknown version'} (CUDA <= {newest})" if newest else "none"
    details = tuple(filter(None, (driver.kernel_file, driver.library_path, answer.nvml_path)))
    if not newest or answer.cuda_error or answer.stuck or answer.unasked or answer.died:
        line = line if newest and not answer.cuda_error else "none usable" if newest else "none"
        found = _hangs(facts) if answer.stuck or answer.unasked or answer.died else _absent(facts)
        return Section(name="Driver", line=line, problems=(found,), details=details)
    checks = (_stub(facts), _parts(facts), _compat(facts), _init(facts), _age(facts), _wsl(facts))
    problems = tuple(found for found in checks if found)
    if facts.torch is not None and facts.torch.cuda and not problems:
        line += f", new enough for torch's CUDA {facts.torch.cuda}"
    return Section(name="Driver", line=line, problems=problems, details=details)


def _hangs(facts: CudaFacts) -> Problem:
    answer = facts.driver.answer
    if answer.unasked:
        return problem("driver.not-queried")
    if answer.died:
        return problem("driver.died", died=answer.died, evidence=_loaded(facts))
    who = "NCCL and nvidia-smi use NVML and" if "nvml" in answer.stuck.lower() else "Every CUDA program started now"
    return problem("driver.hangs", call=answer.stuck, who=who, evidence=_loaded(facts))


def _loaded(facts: CudaFacts) -> tuple[str, ...]:
    answer = facts.driver.answer
    return (answer.cuda_path, answer.nvml_path, facts.driver.kernel_file)


def _absent(facts: CudaFacts) -> Problem:
    """Report why no driver is usable: the nearest cause first, in containers the forgotten flag."""
    driver = facts.driver
    folder = os.path.dirname(driver.installed[-1]) if driver.installed else ""
    start = with_gpus(driver.container) if driver.container else ""
    on_bus = f"{driver.hardware} NVIDIA GPU(s) on the PCI bus" if driver.hardware else "no NVIDIA GPU on the PCI bus"
    return problem(
        _why_absent(driver),
        folder=folder,
        quoted=shlex.quote(folder),
        kernel=driver.kernel,
        container=start,
        fix=start,
        evidence=(
            driver.answer.cuda_error,
            on_bus,
            driver.kernel_file or "/proc/driver/nvidia/version does not exist",
            f"this is a container: {driver.container}" if driver.container else "",
        ),
    )


def _why_absent(driver: Driver) -> str:
    if driver.installed:
        return "driver.unlisted"
    if driver.container and (driver.hardware or driver.kernel):
        return "driver.container"
    if driver.wsl:
        return "driver.wsl-none"
    if driver.kernel:
        return "driver.no-libraries"
    return "driver.not-loaded" if driver.hardware else "driver.present"


def _without(facts: CudaFacts, entries: Iterable[str], text: str = "") -> Remedy:
    entries = list(entries)
    return Remedy(text=text, exports=(("LD_LIBRARY_PATH", loader_path_without(facts, entries)),) if entries else ())


def _stub(facts: CudaFacts) -> Problem | None:
    driver = facts.driver
    if "/stubs/" not in driver.library_path and driver.answer.cuda_status != 34:
        return None
    remedy = _without(facts, (entry.text for entry in facts.loader_path if entry.stubs))
    return problem("driver.stub", evidence=(driver.library_path,), remedy=remedy)


def _parts(facts: CudaFacts) -> Problem | None:
    """Report mismatched parts, and where to change which: a container's libraries are the host's."""
    driver = facts.driver
    differ = bool(driver.kernel and driver.library and driver.kernel != driver.library)
    if not (differ or driver.answer.nvml_status == 18) or _is_compat(facts) or driver.wsl:
        return None
    newer = bool(driver.library and driver.kernel) and version(driver.library) > version(driver.kernel)
    in_container = "driver.host-upgraded" if newer or not driver.library else "driver.container-older"
    return problem(
        in_container if driver.container else "driver.userland-kernel",
        kernel=driver.kernel or "of another version",
        library=driver.library or "of another version",
        evidence=(driver.kernel_file, driver.library_path),
    )


def _is_compat(facts: CudaFacts) -> bool:
    return "/compat/" in facts.driver.library_path or "cuda-compat" in facts.driver.library_path


def _compat(facts: CudaFacts) -> Problem | None:
    """Judge the forward compatibility package: newer than the kernel's driver, and only for some kinds of GPU."""
    driver, status = facts.driver, facts.driver.answer.cuda_status
    if not _is_compat(facts):
        return None if status not in (803, 804) else _init_failed(facts, status)
    names = [gpu.name for gpu in driver.answer.present or driver.answer.visible]
    excluded = [name for name in names if not tables().forward_compatible.search(name)]
    older = bool(driver.kernel and driver.library) and version(driver.library) < version(driver.kernel)
    unsupported = status == 804 or bool(excluded)
    words = {"library": driver.library, "kernel": driver.kernel}
    if not unsupported and status != 803 and not older:
        return problem("driver.compat-lib", words, evidence=(driver.library_path,))
    folder = os.path.dirname(driver.library_path)
    entries = [entry.text for entry in facts.loader_path if entry.text.rstrip("/") == folder or "/compat" in entry.text]
    text = "remove it from LD_LIBRARY_PATH" if entries else f"remove {folder} from the loader's configuration"
    return problem(
        "driver.compat-unsupported" if unsupported else "driver.compat-old",
        words,
        gpu=excluded[0] if excluded else "this GPU",
        evidence=(driver.library_path, driver.kernel_file, ", ".join(names)),
        remedy=_without(facts, entries, text),
    )


def _init(facts: CudaFacts) -> Problem | None:
    status = facts.driver.answer.cuda_status
    if status == 802:
        state = facts.driver.fabric_manager
        evidence = (f"nvidia-fabricmanager: {state}" if state else "", facts.driver.kernel_file)
        return problem("gpu.fabric", driver=driver_version(facts), evidence=evidence)
    return None if status is None or status in _SAID_ELSEWHERE else _init_failed(facts, status)


def _init_failed(facts: CudaFacts, status: int) -> Problem:
    row = "driver.init-uvm" if status in (304, 999) else "driver.init"
    means = tables().status.get(str(status), "see cuda.h, CUresult")
    return problem(row, status=status, means=means, evidence=_loaded(facts))


def _age(facts: CudaFacts) -> Problem | None:
    torch = facts.torch
    if torch is None or not torch.cuda or driver_carries(facts, torch.cuda) is not False or _is_compat(facts):
        return None
    least = tables().least_driver.get(str(major(torch.cuda)), "a newer version")
    commands = install_torch(facts)
    text = f"upgrade the driver to {least} or newer"
    return problem(
        "driver.min",
        driver=driver_version(facts),
        cuda=driver_cuda(facts),
        torch=torch.version,
        least=least,
        evidence=(facts.driver.kernel_file, f"{torch.source}: cuda = {torch.cuda}"),
        remedy=Remedy(
            text="upgrade the driver, or install a torch build for this driver" if commands else text,
            commands=commands,
        ),
    )


def _wsl(facts: CudaFacts) -> Problem | None:
    driver = facts.driver
    linux = [path for path in driver.installed if "/wsl/" not in path]
    if not driver.wsl or not linux:
        return None
    loaded, apt = driver.library_path in linux, facts.building.package_tool == "apt-get"
    return problem(
        "driver.wsl",
        level=Level.FAIL if loaded else Level.WARN,
        breaks="running on GPUs" if loaded else "",
        evidence=linux,
        remedy=Remedy(commands=(f"dpkg -S {shlex.quote(linux[0])}",) if apt else ()),
    )
