"""Debug switches: variables, cost, and restriction to some ranks."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from distdiag.commands.run.sanitizer import NEEDS_OWN_BLOCKS
from distdiag.errors import UsageError
from distdiag.record import record
from distdiag.training.line_trace import recorder as line_trace
from distdiag.training.overflow import session as overflow

if TYPE_CHECKING:
    from collections.abc import Mapping

LINES_FOLDER = "lines"
SUBSYSTEMS = (
    *("INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC", "CALL", "PROXY"),
    *("NVLS", "BOOTSTRAP", "REG", "PROFILE", "RAS", "ALL"),
)
"""NCCL_DEBUG_SUBSYS of NCCL's documentation; NCCL silently ignores any other name."""
_FIRST_RECORDER = (2, 2)
_RENAMED = (2, 9)
"""Since PyTorch 2.9 the flight recorder's variables are TORCH_FR_*; the TORCH_NCCL_* names still work, and warn."""


@record(kw_only=True)
class Switches:
    """The chosen switches; empty or false: off."""

    sync: bool = False
    gpus: str = ""
    nccl_debug: str = ""
    cores: bool = False
    recorder: bool = False
    check_collectives: bool = False
    trace_py: bool = False
    overflow: bool = False
    sanitizer: str = ""
    ranks: tuple[int, ...] | None = None


@record(kw_only=True)
class Variable:
    """One variable: its value, and the reason or cost."""

    name: str
    value: str
    why: str


def variables(switches: Switches, folder: str, torch: tuple[int, int] | None) -> list[Variable]:
    """List the variables for the switches. `torch`: (major, minor) of the job's PyTorch, None if unknown.

    Raises UsageError: this PyTorch has no flight recorder.
    """
    gpus = "" if switches.gpus == "none" else switches.gpus
    lines = line_trace.Settings(os.path.join(folder, LINES_FOLDER)).to_text()
    numbers = overflow.Settings(folder=os.path.join(folder, "overflow")).to_text()
    log, nccl = os.path.join(folder, "nccl.%h.%p.log"), switches.nccl_debug
    late_line = "each CUDA call waits for its kernel: tracebacks show the right line. Slow; hides races"
    owns = switches.sanitizer in NEEDS_OWN_BLOCKS
    compares = "torch compares operation and shape of each collective on all ranks; slow"
    rows = [
        (switches.sync, "CUDA_LAUNCH_BLOCKING", "1", late_line),
        (switches.gpus, "CUDA_VISIBLE_DEVICES", gpus, "the only GPUs that the ranks see"),
        (nccl, "NCCL_DEBUG", "INFO", "NCCL logs its setup and its calls"),
        (nccl, "NCCL_DEBUG_SUBSYS", nccl, "of these subsystems"),
        (nccl, "NCCL_DEBUG_FILE", log, "a file for each process: lines are not torn"),
        *((True, *row) for row in (_recorder(folder, torch) if switches.recorder else ())),
        (switches.check_collectives, "TORCH_DISTRIBUTED_DEBUG", "DETAIL", compares),
        (switches.trace_py, line_trace.VARIABLE, lines, "keep the last lines of Python of each thread; slow"),
        (owns, "PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "a cudaMalloc for each tensor: the sanitizer sees its end"),
        (switches.overflow, overflow.VARIABLE, numbers, "stop at the first nan or inf, and name its module"),
    ]
    return [Variable(name=name, value=value, why=why) for is_on, name, value, why in rows if is_on]


def _recorder(folder: str, torch: tuple[int, int] | None) -> list[tuple[str, str, str]]:
    if torch is not None and torch < _FIRST_RECORDER:
        raise UsageError(
            f"--recorder: PyTorch {torch[0]}.{torch[1]} has no flight recorder",
            hint="use PyTorch 2.2 or newer, or distdiag hang while the job hangs",
        )
    renamed = torch is not None and torch >= _RENAMED
    size = "TORCH_FR_BUFFER_SIZE" if renamed else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    file = "TORCH_FR_DUMP_TEMP_FILE" if renamed else "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    path = os.path.join(folder, "recorder_")
    return [
        (size, "2000", "entries of the flight recorder; 0 is off"),
        (file, path, "each rank's dump: this and its rank"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "write the dump before the watchdog ends the rank"),
        ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", path, "a pipe that asks a running rank for a dump"),
    ]


def parse(text: str, pattern: str, option: str, hint: str) -> str:
    """Check the value of a switch. Raises UsageError."""
    if text and not re.fullmatch(pattern, text):
        raise UsageError(f"{option} {text!r} is not valid", hint=hint)
    return text


def parse_subsystems(text: str) -> str:
    """Check names of NCCL's subsystems, with an optional ^ in front. Raises UsageError."""
    for name in text.upper().removeprefix("^").split(",") if text else []:
        if name not in SUBSYSTEMS:
            raise UsageError(f"--nccl-debug: NCCL has no subsystem {name!r}", hint=f"use {', '.join(SUBSYSTEMS)}")
    return text.upper()


def environment(
    chosen: list[Variable], switches: Switches, sanitizer: list[str], before: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, object]]:
    """Return the job's environment, and the settings for each of its Pythons, which have the variables with --rank."""
    values = {variable.name: variable.value for variable in chosen}
    some = switches.ranks is not None
    asked: dict[str, object] = {
        "sanitizer": sanitizer,
        "ranks": list(switches.ranks) if switches.ranks is not None else None,
        "env": values if some else {},
    }
    return ({**before} if some else {**before, **values}), asked
