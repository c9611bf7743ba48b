"""The NVIDIA driver: is there one, do its parts fit together, is it new enough for torch."""

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
from distdiag.commands.cuda_env.types import RUN, Problem, Section
from distdiag.knowledge.cuda import major, tables, version
from distdiag.report import Level

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.collect import CudaFacts

_SAID_ELSEWHERE = (0, 100, 101, 802, 803, 804)
"""What cuInit answers and another check explains."""


def about_driver(facts: CudaFacts) -> Section:
    """Judge the driver."""
    driver, answer = facts.driver, facts.driver.answer
    found = driver_version(facts)
    newest = driver_cuda(facts)
    line = f"{found or 'unknown version'} (CUDA <= {newest})" if newest else "none"
    details = tuple(filter(None, (driver.kernel_file, driver.library_path, answer.nvml_path)))
    if not newest or answer.cuda_error or answer.stuck or answer.unasked or answer.died:
        line = line if newest and not answer.cuda_error else "none usable" if newest else "none"
        problem = _hangs(facts) if answer.stuck or answer.unasked or answer.died else _absent(facts)
        return Section(name="Driver", line=line, problems=(problem,), details=details)
    problems = [
        problem
        for problem in (_stub(facts), _parts(facts), _compat(facts), _init(facts), _age(facts), _wsl(facts))
        if problem
    ]
    if facts.torch is not None and facts.torch.cuda and not problems:
        line += f", new enough for torch's CUDA {facts.torch.cuda}"
    return Section(name="Driver", line=line, problems=tuple(problems), details=details)


def _fail(id_: str, title: str, **rest: object) -> Problem:
    return Problem(id=id_, goals=RUN, level=Level.FAIL, title=title, **{"breaks": "running on GPUs", **rest})  # type: ignore[arg-type]


def _hangs(facts: CudaFacts) -> Problem:
    answer = facts.driver.answer
    if answer.unasked:
        return Problem(
            id="driver.not-queried",
            goals=RUN,
            level=Level.UNKNOWN,
            title="the driver could not be queried: the Python process for it did not start in time",
            fix="find out what keeps this machine or its file system busy; then run again with a longer --timeout",
        )
    if answer.died:
        return _fail(
            "driver.present",
            f"the driver's libraries cannot be used: {answer.died}",
            evidence=_loaded(facts),
            fix="check the kernel log, and which libraries these are (LD_PRELOAD, LD_LIBRARY_PATH)",
            commands=("dmesg | grep -iE 'nvrm|xid|nvidia' | tail -20",),
        )
    return _fail(
        "driver.hangs",
        f"the driver does not respond: {answer.stuck} did not return",
        cause="NCCL and nvidia-smi use NVML and will hang in the same call."
        if "nvml" in answer.stuck.lower()
        else "Every CUDA program started now will hang in the same call.",
        evidence=_loaded(facts),
        fix="check the kernel log; a GPU that fell off the bus or a hung nvidia_uvm needs a reset or a reboot",
        commands=("dmesg | grep -iE 'nvrm|xid|nvidia' | tail -20",),
    )


def _loaded(facts: CudaFacts) -> tuple[str, ...]:
    answer = facts.driver.answer
    return tuple(filter(None, (answer.cuda_path, answer.nvml_path, facts.driver.kernel_file)))


def _absent(facts: CudaFacts) -> Problem:
    """Report why there is no driver: the nearest cause first, in containers the flag that was forgotten."""
    driver = facts.driver
    evidence = tuple(
        filter(
            None,
            (
                driver.answer.cuda_error,
                f"{driver.hardware} NVIDIA GPU(s) on the PCI bus"
                if driver.hardware
                else "no NVIDIA GPU on the PCI bus",
                driver.kernel_file or "/proc/driver/nvidia/version does not exist",
                f"this is a container: {driver.container}" if driver.container else "",
            ),
        )
    )
    title, fix, commands = _why_absent(facts)
    return _fail("driver.present", title, evidence=evidence, fix=fix, commands=commands)


def _why_absent(facts: CudaFacts) -> tuple[str, str, tuple[str, ...]]:
    driver = facts.driver
    if driver.installed:
        folder = os.path.dirname(driver.installed[-1])
        return (
            f"libcuda is in {folder}, which the loader does not search",
            "add it to the search path",
            (f"export LD_LIBRARY_PATH={shlex.quote(folder)}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}",),
        )
    if driver.container and (driver.hardware or driver.kernel):
        title = "this container has no GPU access: the machine has a GPU, but the container has no libcuda"
        return title, _with_gpus(driver.container), ()
    if driver.wsl:
        return (
            "WSL has no /usr/lib/wsl/lib/libcuda.so.1",
            "install the NVIDIA driver for Windows, then run wsl --shutdown",
            (),
        )
    if driver.kernel:
        text = "install the user-space libraries of the same driver version"
        return f"the kernel has driver {driver.kernel}, but its user-space libraries (libcuda) are missing", text, ()
    if driver.hardware:
        return "an NVIDIA GPU is present, but no driver is loaded", "install the driver, then reboot", ()
    expected = "on a login or build node this is expected: check builds only, with --goal build. "
    if driver.container:
        expected += f"If this container's machine has GPUs, {_with_gpus(driver.container)}. Otherwise "
    return "no NVIDIA GPU and no driver found", expected + "CUDA programs need a node with a GPU", ()


def _with_gpus(container: str) -> str:
    """Return how this kind of container is started with GPUs, by the sign that it is one."""
    if "KUBERNETES" in container:
        return "request GPUs in the container's spec: resources: {limits: {nvidia.com/gpu: 1}}"
    if any(word in container for word in ("APPTAINER", "SINGULARITY", "singularity")):
        return "start the container with GPUs: apptainer exec --nv"
    if container in ("/run/.containerenv", "$container=podman"):
        return (
            "start the container with GPUs: podman run --device nvidia.com/gpu=all (first, on the host: "
            "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml)"
        )
    if container == "/.dockerenv":
        return "start the container with GPUs: docker run --gpus all"
    return "start the container with its GPU devices and the driver's libraries (nvidia-container-toolkit)"


def _stub(facts: CudaFacts) -> Problem | None:
    driver = facts.driver
    if "/stubs/" not in driver.library_path and driver.answer.cuda_status != 34:
        return None
    entries = [entry.text for entry in facts.loader_path if entry.stubs]
    return _fail(
        "driver.stub",
        "the loader finds the toolkit's stub libcuda, not the driver's: CUDA calls return error 34",
        cause="Stubs are only for linking on machines without a driver.",
        evidence=(driver.library_path,),
        fix="remove the stubs from LD_LIBRARY_PATH",
        exports=(("LD_LIBRARY_PATH", loader_path_without(facts, entries)),) if entries else (),
    )


def _parts(facts: CudaFacts) -> Problem | None:
    driver = facts.driver
    nvml_mismatch = driver.answer.nvml_status == 18
    differ = bool(driver.kernel and driver.library and driver.kernel != driver.library)
    if not (differ or nvml_mismatch) or _is_compat(facts) or driver.wsl:
        return None
    where, fix, commands = _which_part(facts)
    return _fail(
        "driver.userland-kernel",
        f"kernel driver {driver.kernel or 'of another version'}, user-space libraries "
        f"{driver.library or 'of another version'}: the versions must match",
        cause=where,
        evidence=tuple(filter(None, (driver.kernel_file, driver.library_path))),
        fix=fix,
        commands=commands,
    )


def _which_part(facts: CudaFacts) -> tuple[str, str, tuple[str, ...]]:
    """Report why the parts differ, and where which of them is to be changed: a container's libraries are the host's."""
    driver = facts.driver
    newer = bool(driver.library and driver.kernel) and version(driver.library) > version(driver.kernel)
    load = ("sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia_uvm",)
    if not driver.container:
        where = "The packages were upgraded, but the old kernel module is still loaded."
        return where, "reboot; or stop all GPU programs and load the new module", load
    if newer or not driver.library:
        where = (
            "This container uses the host's libraries. The host's packages were upgraded, but its old kernel module is "
            "still loaded."
        )
        fix = (
            "reboot the host, or stop all GPU programs there and load its new module; restarting the container does "
            "not help"
        )
        return where, fix, ()
    where = (
        "In this container either the host's driver was upgraded after the start, or the image ships its own libraries."
    )
    return where, "restart the container; if they still differ, remove libcuda and libnvidia-* from its image", ()


def _is_compat(facts: CudaFacts) -> bool:
    return "/compat/" in facts.driver.library_path or "cuda-compat" in facts.driver.library_path


def _compat(facts: CudaFacts) -> Problem | None:
    """Judge the forward compatibility package: newer than the kernel's driver, and for some kinds of GPU only."""
    driver, status = facts.driver, facts.driver.answer.cuda_status
    if not _is_compat(facts):
        return None if status not in (803, 804) else _init_failed(facts, status)
    names = [gpu.name for gpu in driver.answer.present or driver.answer.visible]
    excluded = [name for name in names if not tables().forward_compatible.search(name)]
    older = bool(driver.kernel and driver.library) and version(driver.library) < version(driver.kernel)
    folder = os.path.dirname(driver.library_path)
    entries = [entry.text for entry in facts.loader_path if entry.text.rstrip("/") == folder or "/compat" in entry.text]
    mend = {
        "evidence": tuple(filter(None, (driver.library_path, driver.kernel_file, ", ".join(names)))),
        "fix": "remove it from LD_LIBRARY_PATH" if entries else f"remove {folder} from the loader's configuration",
        "exports": (("LD_LIBRARY_PATH", loader_path_without(facts, entries)),) if entries else (),
    }
    if status == 804 or excluded:
        who = excluded[0] if excluded else "this GPU"
        return _fail(
            "driver.compat-lib",
            f"cuda-compat does not support {who} (error 804): it is for data center GPUs only",
            **mend,
        )
    if status == 803 or older:
        title = f"cuda-compat {driver.library} does not match kernel driver {driver.kernel}: error 803"
        return _fail("driver.compat-lib", title, cause="It must be newer than the kernel driver.", **mend)
    return Problem(
        id="driver.compat-lib",
        goals=RUN,
        level=Level.INFO,
        title=f"cuda-compat {driver.library} replaces the libraries of kernel driver {driver.kernel}, as intended",
        evidence=(driver.library_path,),
    )


def _init(facts: CudaFacts) -> Problem | None:
    status = facts.driver.answer.cuda_status
    if status == 802:
        return _fabric(facts)
    return None if status is None or status in (*_SAID_ELSEWHERE, 34) else _init_failed(facts, status)


def _init_failed(facts: CudaFacts, status: int) -> Problem:
    means = tables().status.get(str(status), "see cuda.h, CUresult")
    commands = ("sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm",) if status in (304, 999) else ()
    return _fail(
        "driver.init",
        f"the driver fails to initialize: cuInit returns error {status}, {means}",
        evidence=_loaded(facts),
        fix="stop all GPU programs and reload nvidia_uvm" if commands else "check the kernel log",
        commands=commands or ("dmesg | grep -iE 'nvrm|xid|nvidia' | tail -20",),
    )


def _fabric(facts: CudaFacts) -> Problem:
    state = facts.driver.fabric_manager
    return _fail(
        "gpu.fabric",
        "the NVSwitch fabric is not ready (error 802): fabric manager not running or wrong version",
        evidence=tuple(filter(None, (f"nvidia-fabricmanager: {state}" if state else "", facts.driver.kernel_file))),
        fix=f"install fabric manager {driver_version(facts)} and start it",
        commands=("sudo systemctl start nvidia-fabricmanager", "systemctl status nvidia-fabricmanager --no-pager"),
    )


def _age(facts: CudaFacts) -> Problem | None:
    torch = facts.torch
    if torch is None or not torch.cuda or driver_carries(facts, torch.cuda) is not False or _is_compat(facts):
        return None
    least = tables().least_driver.get(str(major(torch.cuda)), "a newer version")
    commands = install_torch(facts)
    return Problem(
        id="driver.min",
        goals=RUN,
        level=Level.FAIL,
        title=f"driver {driver_version(facts)} supports CUDA up to {driver_cuda(facts)}: torch {torch.version} "
        f"needs driver {least}",
        breaks="running on GPUs",
        evidence=tuple(filter(None, (facts.driver.kernel_file, f"{torch.source}: cuda = {torch.cuda}"))),
        fix="upgrade the driver, or install a torch build for this driver"
        if commands
        else f"upgrade the driver to {least} or newer",
        commands=commands,
    )


def _wsl(facts: CudaFacts) -> Problem | None:
    driver = facts.driver
    linux = [path for path in driver.installed if "/wsl/" not in path]
    if not driver.wsl or not linux:
        return None
    loaded = driver.library_path in linux
    return Problem(
        id="driver.wsl",
        goals=RUN,
        level=Level.FAIL if loaded else Level.WARN,
        title="a Linux driver is installed inside WSL, which must use Windows' driver (/usr/lib/wsl/lib)",
        breaks="running on GPUs" if loaded else "",
        evidence=tuple(linux),
        fix="remove the packages that installed it",
        commands=(f"dpkg -S {shlex.quote(linux[0])}",) if facts.building.package_tool == "apt-get" else (),
    )
