"""compute-sanitizer below each rank: its command line, and the errors in its logs."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING

from distdiag.commands.run.types import SanitizerLog
from distdiag.errors import UsageError
from distdiag.facts import machine

if TYPE_CHECKING:
    from collections.abc import Iterator

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
NEEDS_OWN_BLOCKS = ("memcheck", "initcheck")
"""The tools that know allocations by cudaMalloc only: PyTorch's allocator puts many tensors into one of 2 MiB."""
_LOG = "sanitizer.rank"
_MOST_DETAILS = 4
_OPTIONS = {
    # NCCL asks for kernels that its build lacks, 8 times a rank (NCCL 2.28.9): "Program hit cudaErrorNoKernelImage...".
    # cudaMalloc may return neighbours, and a write past one tensor is then a valid write into the next.
    "memcheck": ("--report-api-errors=no", "--padding=512"),
}
_NO_ERROR = r"COMPUTE-SANITIZER|[A-Z]+ SUMMARY|Program hit |Tracking |Target application |(?:Error|Warning): (?!Race)"
_FIRST = re.compile(rf"^=+ (?!{_NO_ERROR})(?:Error: )?(\S.*\n(?:=+  +\S.*\n)*)", re.MULTILINE)
_SUMMARY = re.compile(r"^=+ (?:ERROR SUMMARY: |RACECHECK SUMMARY: .*\()(\d+) error", re.MULTILINE)
_PYTHON = re.compile(r"Host Frame: (\S+) in (\S+\.py:\d+)$")


def words(tool: str, folder: str) -> list[str]:
    """Return the words to insert before a rank's command; empty for an empty `tool`. Raises UsageError."""
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
    log = os.path.join(folder, f"{_LOG}{{rank}}.%p.log")
    return [program, f"--tool={tool}", *_OPTIONS.get(tool, ()), f"--log-file={log}"]


def logs(folder: str) -> Iterator[SanitizerLog]:
    """Read the first error and the number of errors of each log, a log for each process of a rank."""
    for name in sorted(os.listdir(folder)):
        match = re.fullmatch(re.escape(_LOG) + r"(\d+)\.\d+\.log", name)
        if match:
            path = os.path.join(folder, name)
            yield _read(int(match[1]), path, machine.read_text(path))


def _read(rank: int, path: str, text: str) -> SanitizerLog:
    count = _SUMMARY.search(text)
    first = _FIRST.search(text)
    # A continued sentence begins with "and".
    block = re.sub(r"\n=+ +(?=and )", " ", first[1]) if first else ""
    title, *lines = [line.lstrip("= ") for line in block.splitlines()] or [""]
    frames = [frame for line in lines if (frame := _PYTHON.search(line))]
    details = [line for line in lines if not line.startswith(("Host Frame: ", "Saved host backtrace"))]
    return SanitizerLog(
        rank=rank,
        errors=int(count[1]) if count else None,
        first=title[:200],
        details=tuple(line[:200] for line in details[:_MOST_DETAILS]),
        launched=f"{frames[0][1]} at {frames[0][2]}" if frames else "",
        path=path,
    )


def clean(found: tuple[SanitizerLog, ...], tool: str) -> str:
    """Return a sentence on the logs without an error, which no finding mentions; empty if there are none."""
    number = sum(log.errors == 0 for log in found)
    of = "" if number == len(found) else f" of {len(found)}"
    return f"compute-sanitizer {tool}: no error in {number}{of} processes" if number else ""
