"""logs on the output of a failed job, as this build of torch writes it: the wording changes with its version."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from logs_cases import cases
from support_warm import distdiag
from torch_builds import BUILDS, PYTHONS, environment

PROGRAM = Path(__file__).parents[2] / "programs" / "fails_in_many_ways.py"
KINDS = ("hang", "segv")
"""A timeout and a crash."""
MORE_KINDS = ("raise", "abort", "exit3", "exit0", "size", "op", "order", "import", "thread", "monitored", "loader")
"""With other builds than the usual one, whose output is recorded in tests/recorded/logs."""


@pytest.mark.parametrize("kind", KINDS if BUILDS == ["torch"] else (*KINDS, *MORE_KINDS))
@pytest.mark.parametrize("python", PYTHONS, ids=BUILDS)
def test_the_cause_is_that_of_the_recorded_log(python: str, kind: str, tmp_path: Path) -> None:
    (case,) = (case for case in cases() if case.name == f"torchrun-{kind}")
    command = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
        "--tee=3",
        str(PROGRAM),
        kind,
    ]
    log = tmp_path / "job.log"
    with log.open("wb") as output:
        subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment(), check=False, timeout=150)
    result = distdiag("logs", "--json", str(log))
    first = result.report["findings"][0]
    assert (first["id"], tuple(first["where"]["ranks"])) == (f"logs.{case.id}", case.ranks), log.read_text()
    assert case.also in f"{first['title']} {first['detail']}"
