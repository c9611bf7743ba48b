"""Debug switches: the variables of each, what it costs, and which of them only some ranks get."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_RENAMED = (2, 9)
"""Since PyTorch 2.9 the flight recorder's variables are TORCH_FR_*; the TORCH_NCCL_* names still work, and warn."""


@dataclass(frozen=True, kw_only=True)
class Switches:
    """What was asked for; empty or false: nothing."""

    sync: bool = False
    gpus: str = ""
    nccl_debug: str = ""
    cores: bool = False
    recorder: bool = False
    check_collectives: bool = False
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One variable: its value, and why it is set or what it costs."""

    name: str
    value: str
    why: str


def variables(switches: Switches, folder: str, torch: tuple[int, int] | None) -> list[Variable]:
    """List what the switches set. `torch`: (major, minor) of the job's PyTorch, None if that is not known."""
    found: list[Variable] = []
    if switches.sync:
        why = "each CUDA call waits for its kernel: tracebacks name the right line; slow, and it hides races"
        found.append(Variable(name="CUDA_LAUNCH_BLOCKING", value="1", why=why))
    if switches.gpus:
        value = "" if switches.gpus == "none" else switches.gpus
        found.append(Variable(name="CUDA_VISIBLE_DEVICES", value=value, why="the only GPUs that the ranks see"))
    if switches.nccl_debug:
        found.append(Variable(name="NCCL_DEBUG", value="INFO", why="NCCL logs its setup and its calls"))
        found.append(Variable(name="NCCL_DEBUG_SUBSYS", value=switches.nccl_debug.upper(), why="of these subsystems"))
        path = os.path.join(folder, "nccl.%h.%p.log")
        found.append(Variable(name="NCCL_DEBUG_FILE", value=path, why="a file for each process: lines are not torn"))
    if switches.recorder:
        found += _recorder(folder, torch)
    if switches.check_collectives:
        why = "torch compares operation and shape of each collective on all ranks; slow"
        found.append(Variable(name="TORCH_DISTRIBUTED_DEBUG", value="DETAIL", why=why))
    return found


def _recorder(folder: str, torch: tuple[int, int] | None) -> list[Variable]:
    renamed = torch is not None and torch >= _RENAMED
    size = "TORCH_FR_BUFFER_SIZE" if renamed else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    file = "TORCH_FR_DUMP_TEMP_FILE" if renamed else "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    path = os.path.join(folder, "recorder_")
    return [
        Variable(name=size, value="2000", why="entries of the flight recorder; 0 is off"),
        Variable(name=file, value=path, why="each rank's dump: this and its rank"),
        Variable(name="TORCH_NCCL_DUMP_ON_TIMEOUT", value="1", why="write the dump before the watchdog ends the rank"),
        Variable(name="TORCH_NCCL_DEBUG_INFO_PIPE_FILE", value=path, why="a pipe that asks a running rank for a dump"),
    ]


def parse(text: str, pattern: str, option: str, hint: str) -> str:
    """Check the value of a switch. Raises UsageError."""
    if text and not re.fullmatch(pattern, text):
        raise UsageError(f"{option} {text!r} is not valid", hint=hint)
    return text


def parse_ranks(text: str) -> tuple[int, ...] | None:
    """Parse ranks with commas and ranges: 0,4-7; None for an empty text. Raises UsageError."""
    if not text:
        return None
    found: set[int] = set()
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise UsageError(f"--ranks {text!r}: {word!r} is not a rank", hint="write --ranks 3, or --ranks 0,4-7")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def environment(
    chosen: list[Variable], switches: Switches, socket: str, before: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, object]]:
    """Return the variables of the whole job, and what each Python of it is asked: with --ranks those of these ranks."""
    values = {variable.name: variable.value for variable in chosen}
    some = switches.ranks is not None
    asked: dict[str, object] = {
        "socket": socket,
        "ranks": list(switches.ranks) if switches.ranks is not None else None,
        "env": values if some else {},
    }
    return ({**before} if some else {**before, **values}), asked
