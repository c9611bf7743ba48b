"""The NVIDIA driver and its GPUs, separately by kernel, libraries and hardware."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from dataclasses import field

from distdiag.facts import machine, programs
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Record = dict[str, Any]
    """A child's JSON about one call: its `about`, and results that differ from call to call."""

    from distdiag.facts.cuda.places import Places

_VERSION = re.compile(r"\b(\d{3}\.\d+(?:\.\d+)?)\b")
_BLOCKED = (4, 17)  # NVML_ERROR_NO_PERMISSION, NVML_ERROR_OPERATING_SYSTEM, nvml.h
_BROKEN = (8, 10, 15)  # NVML_ERROR_INSUFFICIENT_POWER, NVML_ERROR_IRQ_ISSUE, NVML_ERROR_GPU_IS_LOST
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # PCI vendor, and the class of GPUs
_LIBRARIES = (
    *("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib/wsl/lib"),
    *("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/run/opengl-driver/lib"),
)


@record
class Gpu:
    """One GPU; `capability` as "9.0", empty if unknown."""

    index: int
    name: str
    capability: str
    mig: bool = False


@record
class Answer:
    """Answers of the driver's libraries. A status is None if not queried or not returned.

    `cuda_version` in cuDriverGetVersion's form (12080 for 12.8). `stuck`: the call that did not return. `unasked`: the
    querying program did not even start in time.
    """

    nvml_path: str = ""
    nvml_status: int | None = None
    nvml_driver: str = ""
    cuda_path: str = ""
    cuda_error: str = ""
    cuda_version: int | None = None
    cuda_status: int | None = None
    cuda_count: int | None = None
    stuck: str = ""
    unasked: bool = False
    died: str = ""
    lost: tuple[int, ...] = ()
    """GPUs that NVML counts but cannot open, by index."""
    blocked: tuple[int, ...] = ()
    """Those of `lost` that this process may not open: of another job, by a cgroup or the container."""
    broken: tuple[int, ...] = ()
    """Those of `lost` reported broken by NVML: lost from the bus, power cable, interrupts."""
    present: tuple[Gpu, ...] = ()
    visible: tuple[Gpu, ...] = ()


@record
class Driver:
    """All facts about the driver.

    `kernel`: the loaded module's version. `library`: the version in libcuda's real file name. `hardware`: the number of
    GPUs on the PCI bus. `container`: the sign of a container; `installed`: libcuda files in system folders.
    """

    kernel: str
    kernel_file: str
    library: str
    library_path: str
    hardware: int
    devices: int
    container: str
    wsl: bool
    installed: tuple[str, ...]
    fabric_manager: str
    answer: Answer = field(default_factory=Answer)


def look(places: Places, *, ask: bool, timeout_s: float) -> Driver:
    """Collect the driver's facts; with `ask` also from its libraries."""
    answer = _ask(timeout_s) if ask else Answer()
    text = machine.read_text(places.at("/proc/driver/nvidia/version"))
    kernel = _VERSION.search(text)
    path = os.path.realpath(answer.cuda_path) if answer.cuda_path else ""
    library = _VERSION.search(os.path.basename(path))
    return Driver(
        kernel=kernel[1] if kernel else "",
        kernel_file=text.partition("\n")[0],
        library=library[1] if library else "",
        library_path=path,
        hardware=_gpus_on_the_bus(places),
        devices=len(places.glob("/dev/nvidia[0-9]*")),
        container=_container(places),
        wsl="microsoft" in machine.read_text(places.at("/proc/version")).lower(),
        installed=tuple(path for folder in _LIBRARIES for path in places.glob(f"{folder}/libcuda.so.[0-9][0-9]*")),
        fabric_manager=_fabric_manager() if places.glob("/proc/driver/nvidia-nvswitch/devices/*") else "",
        answer=answer,
    )


def _ask(timeout_s: float) -> Answer:
    source = source_of("distdiag.facts.cuda.ask_driver")
    done = programs.run([sys.executable, "-B", "-S", "-c", source], timeout_s=timeout_s)
    return _read_answer(records_in(done.stdout), done)


def records_in(output: bytes) -> list[Record]:
    """Extract our records {"about": ...} from a child's output."""
    found = []
    for line in output.decode("utf-8", "replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("about"), str):
            found.append(record)
    return found


def source_of(module: str) -> str:
    """Return the source of a module, received or installed, for running it as a separate program."""
    loader: Any = importlib.import_module(module).__loader__
    return str(loader.get_source(module))


def _read_answer(said: list[Record], done: programs.Done) -> Answer:
    last = {reply["about"]: reply for reply in said}
    over = "end" in last
    nvml, cuda = last.get("nvml", {}), last.get("cuda", {})
    return Answer(
        nvml_path=nvml.get("path", ""),
        nvml_status=last.get("nvml-init", {}).get("status"),
        nvml_driver=last.get("nvml-driver", {}).get("version", ""),
        cuda_path=cuda.get("path", ""),
        cuda_error=cuda.get("error", ""),
        cuda_version=last.get("cuda-version", {}).get("version"),
        cuda_status=last.get("cuda-init", {}).get("status"),
        cuda_count=last.get("cuda-init", {}).get("count"),
        stuck=_call_after(said) if done.timed_out and said and not over else "",
        unasked=done.timed_out and not said,
        died="" if over or done.timed_out else how_it_died(done),
        lost=tuple(reply["index"] for reply in said if reply["about"] == "nvml-gpu" and reply["status"] != 0),
        blocked=tuple(reply["index"] for reply in said if reply["about"] == "nvml-gpu" and reply["status"] in _BLOCKED),
        broken=tuple(reply["index"] for reply in said if reply["about"] == "nvml-gpu" and reply["status"] in _BROKEN),
        present=tuple(_gpu(reply) for reply in said if reply["about"] == "nvml-gpu" and reply["status"] == 0),
        visible=tuple(_gpu(reply) for reply in said if reply["about"] == "cuda-gpu"),
    )


def _gpu(record: Record) -> Gpu:
    major, minor = record["capability"]
    return Gpu(record["index"], record["name"], f"{major}.{minor}" if major else "", bool(record.get("mig")))


def _call_after(said: list[Record]) -> str:
    last = said[-1]["about"]
    calls = {
        "begun": "loading libnvidia-ml.so.1",
        "nvml": "nvmlInit",
        "cuda": "cuDriverGetVersion",
        "cuda-init-began": "cuInit",
    }
    return calls.get(last, "cuDeviceGet" if last.startswith("cuda") else "loading libcuda.so.1 or a call of NVML")


def how_it_died(done: programs.Done) -> str:
    """Describe the end of a program that did not answer."""
    if done.status is not None and done.status < 0:
        return f"it died of {programs.signal_name(-done.status)}"
    words = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return words[-1][:200] if words else f"it ended with status {done.status}"


def _gpus_on_the_bus(places: Places) -> int:
    vendors = places.glob("/sys/bus/pci/devices/*/vendor")
    ours = [path for path in vendors if machine.read_text(path).strip() == _NVIDIA]
    return sum(machine.read_text(path[: -len("vendor")] + "class").startswith(_DISPLAY) for path in ours)


def _container(places: Places) -> str:
    """Return the sign that this is a container, the innermost first; empty outside one."""
    for sign in ("$APPTAINER_CONTAINER", "$SINGULARITY_CONTAINER", "/.singularity.d", "$KUBERNETES_SERVICE_HOST"):
        if places.env.get(sign[1:]) or (sign[0] == "/" and os.path.exists(places.at(sign))):
            return sign
    for path in ("/run/.containerenv", "/.dockerenv"):
        if os.path.exists(places.at(path)):
            return path
    kind = places.env.get("container")  # podman, lxc, systemd-nspawn
    return f"$container={kind}" if kind else ""


def _fabric_manager() -> str:
    """Return the state of the service required on NVSwitch machines: active, inactive, failed; empty if unknown."""
    try:
        done = programs.run(["systemctl", "is-active", "nvidia-fabricmanager"], timeout_s=2.0)
    except programs.CannotRun:
        return ""
    return done.stdout.decode("utf-8", "replace").strip()
