"""Debug switches: variables, cost, and restriction to some ranks."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.errors import UsageError
from distdiag.training.line_trace import recorder as line_trace
from distdiag.training.overflow import session as overflow

if TYPE_CHECKING:
    from collections.abc import Mapping

LINES_FOLDER = "lines"
SANITIZER_LOG = "sanitizer.rank"
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
SUBSYSTEMS = (
    *("INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC", "CALL", "PROXY"),
    *("NVLS", "BOOTSTRAP", "REG", "PROFILE", "RAS", "ALL"),
)
"""NCCL_DEBUG_SUBSYS of NCCL's documentation; NCCL silently ignores any other name."""
_FIRST_RECORDER = (2, 2)
_RENAMED = (2, 9)
"""Since PyTorch 2.9 the flight recorder's variables are TORCH_FR_*; the TORCH_NCCL_* names still work, and warn."""


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One variable: its value, and the reason or cost."""

    name: str
    value: str
    why: str


def variables(switches: Switches, folder: str, torch: tuple[int, int] | None) -> list[Variable]:
    """List the variables for the switches. `torch`: (major, minor) of the job's PyTorch, None if unknown.

    Raises:
        UsageError: this PyTorch has no flight recorder.
    """
    found: list[Variable] = []
    if switches.sync:
        why = "each CUDA call waits for its kernel: tracebacks show the right line. Slow; hides races"
        found.append(Variable(name="CUDA_LAUNCH_BLOCKING", value="1", why=why))
    if switches.gpus:
        value = "" if switches.gpus == "none" else switches.gpus
        found.append(Variable(name="CUDA_VISIBLE_DEVICES", value=value, why="the only GPUs that the ranks see"))
    if switches.nccl_debug:
        found.append(Variable(name="NCCL_DEBUG", value="INFO", why="NCCL logs its setup and its calls"))
        found.append(Variable(name="NCCL_DEBUG_SUBSYS", value=switches.nccl_debug, why="of these subsystems"))
        path = os.path.join(folder, "nccl.%h.%p.log")
        found.append(Variable(name="NCCL_DEBUG_FILE", value=path, why="a file for each process: lines are not torn"))
    if switches.recorder:
        found += _recorder(folder, torch)
    if switches.check_collectives:
        why = "torch compares operation and shape of each collective on all ranks; slow"
        found.append(Variable(name="TORCH_DISTRIBUTED_DEBUG", value="DETAIL", why=why))
    if switches.trace_py:
        value = line_trace.Settings(os.path.join(folder, LINES_FOLDER)).to_text()
        why = "keep the last lines of Python of each thread; slow"
        found.append(Variable(name=line_trace.VARIABLE, value=value, why=why))
    if switches.overflow:
        value = overflow.Settings(folder=os.path.join(folder, "overflow")).to_text()
        why = "stop at the first nan or inf, and name its module"
        found.append(Variable(name=overflow.VARIABLE, value=value, why=why))
    return found


def sanitizer_words(tool: str, folder: str) -> list[str]:
    """Return the words to insert before a rank's command; empty for an empty `tool`.

    Raises:
        UsageError: compute-sanitizer is neither on PATH nor in a CUDA toolkit.
    """
    if not tool:
        return []
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    places = [os.environ.get("PATH", ""), *(os.path.join(home, "bin") for home in homes if home)]
    program = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if program is None:
        raise UsageError(
            "--sanitizer: compute-sanitizer is not installed here",
            hint="it comes with the CUDA toolkit: export PATH=$PATH:/usr/local/cuda/bin",
        )
    log = os.path.join(folder, f"{SANITIZER_LOG}{{rank}}.%p.log")
    return [program, f"--tool={tool}", f"--log-file={log}"]


def _recorder(folder: str, torch: tuple[int, int] | None) -> list[Variable]:
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


def parse_subsystems(text: str) -> str:
    """Check names of NCCL's subsystems, with an optional ^ in front. Raises UsageError."""
    for name in text.upper().removeprefix("^").split(",") if text else []:
        if name not in SUBSYSTEMS:
            raise UsageError(f"--nccl-debug: NCCL has no subsystem {name!r}", hint=f"use {', '.join(SUBSYSTEMS)}")
    return text.upper()


def parse_ranks(text: str) -> tuple[int, ...] | None:
    """Parse ranks with commas and ranges: 0,4-7; None for an empty text. Raises UsageError."""
    if not text:
        return None
    found: set[int] = set()
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise UsageError(f"--rank {text!r}: {word!r} is not a rank", hint="write --rank 3, or --rank 0,4-7")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


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
