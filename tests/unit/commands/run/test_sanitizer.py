"""Which errors are read from real logs of compute-sanitizer, and what is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from distdiag.cluster.targets import Cluster
from distdiag.commands.run.diagnose import diagnose
from distdiag.commands.run.sanitizer import clean, logs
from distdiag.commands.run.types import NodeRun, Request, SanitizerLog
from distdiag.facts.logs.collect import NodeLogs
from distdiag.saved_facts import Gathered

_RECORDED = Path(__file__).parents[3] / "recorded" / "sanitizer_h200"
_WRITE = "Invalid __global__ write of size 4 bytes"
_READ = "Uninitialized __global__ memory read of size 4 bytes"
_BARRIER = "Barrier error detected. Divergent thread(s) in warp."
_RACE = "Race reported between Write access at races+0xa0 in faulty.cu:5 and Read access at races+0xb0 in faulty.cu:6"
_FIRST = "by thread (0,0,0) in block (0,0,0)"
_LAUNCH = "launched by <module> at job.py:28"
_OUTSIDE = (
    "Access to 0x7f90ae911a00 is out of bounds "
    "and is 274,740,615,169 bytes after the nearest allocation at 0x7f50b6c00000 of size 512 bytes"
)
_FOUND = {
    "far": (f"{_WRITE} at write_past+0xa0 in faulty.cu:2", (_FIRST, _OUTSIDE, _LAUNCH, "20 errors")),
    "unset": (f"{_READ} at reads_unset+0x60 in faulty.cu:8", (_FIRST, "Address 0x7f2728953200", _LAUNCH, "32 errors")),
    "diverge": (
        f"{_BARRIER} at divides+0x70 in faulty.cu:10",
        ("by thread (32,0,0) in block (0,0,0)", _LAUNCH, "8 errors"),
    ),
    "race": (f"{_RACE} [256 hazards]", ("1 error",)),
}


def read(tmp_path: Path, *names: str) -> tuple[SanitizerLog, ...]:
    for rank, name in enumerate(names):
        shutil.copy(_RECORDED / f"{name}.log", tmp_path / f"sanitizer.rank{rank}.{4000 + rank}.log")
    return tuple(logs(str(tmp_path)))


def node(found: tuple[SanitizerLog, ...]) -> NodeRun:
    empty = NodeLogs(host="vm", files=(), streams=(), events=(), comms=(), dropped=0)
    return NodeRun(
        host="vm", argv=("python", "job.py"), began_at=0.0, took_s=9.0, status=0, ranks=(), logs=empty, sanitizer=found
    )


@pytest.mark.parametrize("name", _FOUND)
def test_an_error_is_found_with_its_kernel_and_its_launch(name: str, tmp_path: Path) -> None:
    request = Request(program="distdiag", cluster=Cluster())
    report = diagnose(request, Gathered(facts=[node(read(tmp_path, "clean", name))]))
    (found,) = report.findings
    title, evidence = _FOUND[name]
    assert (found.id, found.where.ranks) == ("run.sanitizer", (1,))
    assert found.title == f"compute-sanitizer, rank 1 (vm): {title}"
    assert found.evidence == evidence


def test_a_log_without_its_summary_is_not_clean(tmp_path: Path) -> None:
    early, none = read(tmp_path, "ended-early", "clean")
    assert (early.errors, early.first) == (None, "")
    assert (none.errors, none.first) == (0, "")
    assert clean((early, none), "synccheck") == "compute-sanitizer synccheck: no error in 1 of 2 processes"
    assert not clean((early,), "synccheck")


def test_neither_the_end_of_a_rank_nor_an_api_error_is_an_error_of_a_kernel(tmp_path: Path) -> None:
    (killed,) = read(tmp_path, "killed")
    assert (killed.first, killed.details) == ("", ())
