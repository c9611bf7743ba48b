"""Load of each GPU of a node: utilization, power, memory and processes, read from the vendor's tool.

Tries nvidia-smi, amd-smi, then rocm-smi, and uses the first that lists a GPU. Some Radeon GPUs still report 100 % after
their work has ended (ROCm#6530).
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

from distdiag.facts import programs
from distdiag.facts.text import printable
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

_TIMEOUT_S = 5.0
_LONGEST_ERROR = 200
_MIB = 2**20
_NVIDIA = "index,uuid,utilization.gpu,power.draw,enforced.power.limit,memory.used"
_GPU_LINE = re.compile(r"^GPU \d+: .*\(UUID: (GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)")


@record
class GpuUse:
    """One GPU. `busy_percent` and `power_w` have one entry per reading, None for a value missing in the tool.

    `pids` as numbered by the tool, the largest user of GPU memory first; in a container these may be the host's.
    """

    index: int
    uuid: str = ""
    busy_percent: tuple[int | None, ...] = ()
    power_w: tuple[float | None, ...] = ()
    limit_w: float | None = None
    memory_used_bytes: int | None = None
    pids: tuple[int, ...] = ()


@record
class GpuReadings:
    """All GPUs of a node. `error`: why some or all could not be read."""

    gpus: tuple[GpuUse, ...] = ()
    error: str = ""


class _Failed(Exception):
    """A tool gave no usable answer. `wedged`: it did not answer at all."""

    def __init__(self, why: str, *, wedged: bool = False) -> None:
        super().__init__(why)
        self.wedged = wedged


@record
class _Tool:
    """`sample` takes one reading; `add_rest` adds limits and processes, with one query for all readings."""

    sample: Callable[[], GpuReadings]
    add_rest: Callable[[tuple[GpuUse, ...]], tuple[GpuUse, ...]]


def read(*, readings: int = 2, interval_s: float = 1.0) -> GpuReadings:
    """Read all GPUs several times, `interval_s` seconds apart. Never raises.

    nvidia-smi averages utilization and power over at most a second: with that pause the readings are independent.
    """
    error = ""
    for tool in _TOOLS:
        try:
            return _read(tool, readings, interval_s)
        except programs.CannotRun:
            continue
        except _Failed as failure:
            error = error or str(failure)
            if failure.wedged:
                break
    return GpuReadings(error=error or "none of nvidia-smi, amd-smi and rocm-smi is on this node's PATH")


def _read(tool: _Tool, readings: int, interval_s: float) -> GpuReadings:
    found = tool.sample()
    if not found.gpus:
        raise _Failed(found.error or "no GPU is listed")
    gpus, error = found.gpus, found.error
    try:
        for _ in range(readings - 1):
            time.sleep(interval_s)
            again = tool.sample()
            gpus, error = _joined(gpus, again.gpus), error or again.error
        gpus = tool.add_rest(gpus)
    except (_Failed, programs.CannotRun) as failure:
        error = str(failure)
    return GpuReadings(gpus, error)


def _joined(gpus: Iterable[GpuUse], again: Iterable[GpuUse]) -> tuple[GpuUse, ...]:
    """Append a reading; None for a GPU missing in it, which fell off the bus in between."""
    later = {gpu.index: gpu for gpu in again}
    joined = []
    for gpu in gpus:
        own = later.get(gpu.index, GpuUse(gpu.index, busy_percent=(None,), power_w=(None,)))
        joined.append(replace(gpu, busy_percent=gpu.busy_percent + own.busy_percent, power_w=gpu.power_w + own.power_w))
    return tuple(joined)


def _ask(*argv: str) -> programs.Done:
    done = programs.run(argv, timeout_s=_TIMEOUT_S)
    if done.timed_out:
        raise _Failed(f"{argv[0]} did not answer within {_TIMEOUT_S:g} s: the driver may be wedged", wedged=True)
    return done


def _complaint(done: programs.Done, tool: str, lines: Iterable[str]) -> str:
    words = [line.strip() for line in (*lines, *done.stderr.decode("utf-8", "replace").splitlines()) if line.strip()]
    return f"{tool}: {printable(words[-1][:_LONGEST_ERROR])}" if words else f"{tool} ended with status {done.status}"


def _sample_nvidia() -> GpuReadings:
    done = _ask("nvidia-smi", f"--query-gpu={_NVIDIA}", "--format=csv,noheader,nounits")
    gpus, others = [], []
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        row = [word.strip() for word in line.split(",")]
        if len(row) == 6 and row[0].isdigit():
            gpus.append(_nvidia_gpu(row))
        else:
            others.append(line)
    failed = done.status != 0 or any(map(str.strip, others))
    return GpuReadings(tuple(gpus), _complaint(done, "nvidia-smi", others) if failed else "")


def _nvidia_gpu(row: list[str]) -> GpuUse:
    busy, memory = _number(row[2]), _number(row[5])
    return GpuUse(
        index=int(row[0]),
        uuid=printable(row[1]),
        busy_percent=(None if busy is None else int(busy),),
        power_w=(_number(row[3]),),
        limit_w=_number(row[4]),
        memory_used_bytes=None if memory is None else int(memory * _MIB),
    )


def _nvidia_users(gpus: tuple[GpuUse, ...]) -> tuple[GpuUse, ...]:
    done = _ask("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.decode("utf-8", "replace").splitlines()]
    rows = [row for row in rows if len(row) == 3 and row[1].isdigit()]
    parents = _mig_parents() if any(row[0].startswith("MIG-") for row in rows) else {}
    users: dict[str, dict[int, float]] = {}
    for uuid, pid, memory in rows:
        users.setdefault(parents.get(uuid, uuid), {})[int(pid)] = _number(memory) or 0.0
    return tuple(replace(gpu, pids=_by_memory(users.get(gpu.uuid, {}))) for gpu in gpus)


def _mig_parents() -> dict[str, str]:
    """Read the GPU of each MIG device from `nvidia-smi -L`, by UUID."""
    parents: dict[str, str] = {}
    gpu = ""
    for line in _ask("nvidia-smi", "-L").stdout.decode("utf-8", "replace").splitlines():
        if (match := _GPU_LINE.match(line)) is not None:
            gpu = match[1]
        elif (match := _MIG_LINE.match(line)) is not None:
            parents[match[1]] = gpu
    return parents


def _sample_amd() -> GpuReadings:
    """Query amd-smi, whose "MB" are MiB. Up to ROCm 6 the answer is a list, later an object with that list."""
    gpus = []
    for entry in _entries(_json("amd-smi", "metric", "--usage", "--power", "--mem-usage", "--json")):
        busy, memory = _first(entry, "usage.gfx_activity"), _first(entry, "mem_usage.used_vram")
        gpus.append(
            GpuUse(
                index=entry["gpu"],
                busy_percent=(None if busy is None else int(busy),),
                power_w=(_first(entry, "power.socket_power", "power.current_power", "power.average_power"),),
                memory_used_bytes=None if memory is None else int(memory * _MIB),
            )
        )
    return GpuReadings(tuple(gpus))


def _amd_rest(gpus: tuple[GpuUse, ...]) -> tuple[GpuUse, ...]:
    limits = {
        entry["gpu"]: _first(entry, "limit.ppt0.socket_power_limit", "limit.socket_power", "limit.max_power")
        for entry in _entries(_json("amd-smi", "static", "--limit", "--json"))
    }
    users: dict[int, dict[int, float]] = {}
    for entry in _entries(_json("amd-smi", "process", "--json")):
        for each in entry.get("process_list") or ():
            process = each.get("process_info") if isinstance(each, dict) else None
            pid = _first(process, "pid")  # "No running processes detected" means none
            if pid is not None:
                memory = _first(process, "memory_usage.vram_mem", "mem_usage") or 0.0
                users.setdefault(entry["gpu"], {})[int(pid)] = memory
    return tuple(replace(gpu, limit_w=limits.get(gpu.index), pids=_by_memory(users.get(gpu.index, {}))) for gpu in gpus)


def _sample_rocm() -> GpuReadings:
    """Query rocm-smi, which lists processes without their GPU: `pids` stays empty."""
    shown = _json("rocm-smi", "--showuse", "--showpower", "--showmaxpower", "--showmeminfo", "vram", "--json")
    gpus = []
    for name, card in shown.items() if isinstance(shown, dict) else ():
        if not re.fullmatch(r"card\d+", name) or not isinstance(card, dict):
            continue
        busy, memory = _number(card.get("GPU use (%)")), _number(card.get("VRAM Total Used Memory (B)"))
        powers = [_number(card.get(f"{kind} Graphics Package Power (W)")) for kind in ("Average", "Current Socket")]
        gpus.append(
            GpuUse(
                index=int(name[4:]),
                busy_percent=(None if busy is None else int(busy),),
                power_w=(next((power for power in powers if power is not None), None),),
                limit_w=_number(card.get("Max Graphics Package Power (W)")),
                memory_used_bytes=None if memory is None else int(memory),
            )
        )
    return GpuReadings(tuple(gpus))


_TOOLS = (
    _Tool(_sample_nvidia, _nvidia_users),
    _Tool(_sample_amd, _amd_rest),
    _Tool(_sample_rocm, lambda gpus: gpus),
)


def _json(*argv: str) -> Any:  # noqa: ANN401 - JSON
    """Run a tool and parse its JSON, which warnings may precede."""
    done = _ask(*argv)
    text = done.stdout.decode("utf-8", "replace")
    begin = re.search(r"^[\[{]", text, re.MULTILINE)
    try:
        return json.JSONDecoder().raw_decode(text, begin.start() if begin else 0)[0]
    except (ValueError, RecursionError):
        raise _Failed(_complaint(done, argv[0], text.splitlines())) from None


def _entries(shown: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON of amd-smi of any release
    rows = shown.get("gpu_data") if isinstance(shown, dict) else shown
    rows = rows if isinstance(rows, list) else []
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("gpu"), int)]


def _first(entry: Any, *paths: str) -> float | None:  # noqa: ANN401 - JSON
    """Return the first number at these dotted paths."""
    for path in paths:
        value = entry
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        number = _number(value)
        if number is not None:
            return number
    return None


def _number(value: Any) -> float | None:  # noqa: ANN401 - a cell of CSV, or JSON
    """Parse 12, "12.5", "12 W" or {"value": 12, "unit": "W"}; None for "N/A", "[Not Supported]" and the like."""
    if isinstance(value, dict):
        value = value.get("value")
    match = re.match(r"\d{1,18}(?:\.\d{1,9})?(?![\w.])", str(value).strip())
    return float(match[0]) if match is not None else None


def _by_memory(users: dict[int, float]) -> tuple[int, ...]:
    return tuple(sorted(users, key=lambda pid: (-users[pid], pid)))
