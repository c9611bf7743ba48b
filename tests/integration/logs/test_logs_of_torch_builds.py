"""logs on the output of a failed job, as this build of torch writes it: the wording changes with its version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import support_torch
from logs_cases import cases
from support_warm import distdiag
from torch_builds import BUILDS, PYTHONS, environment

PROGRAM = Path(__file__).parents[2] / "programs" / "fails_in_many_ways.py"
KINDS = ("hang", "segv")
"""A timeout and a crash: two ranks write of them what four do."""
MORE_KINDS = ("raise", "abort", "exit3", "exit0", "size", "op", "order", "import", "thread", "monitored", "loader")
"""With other builds than the usual one, whose output is recorded in tests/recorded/logs."""


@pytest.mark.parametrize("kind", KINDS if BUILDS == ["torch"] else (*KINDS, *MORE_KINDS))
@pytest.mark.parametrize("python", PYTHONS, ids=BUILDS)
def test_the_cause_is_that_of_the_recorded_log(python: str, kind: str, tmp_path: Path) -> None:
    (case,) = (case for case in cases() if case.name == f"torchrun-{kind}")
    ranks, guilty = (2, 1) if kind in KINDS else (4, 2)
    torchrun = str(Path(python).with_name("torchrun"))
    command = [torchrun, "--standalone", f"--nproc-per-node={ranks}", "--tee=3", str(PROGRAM), kind]
    env = {**(environment() if python != sys.executable else os.environ), "OMP_NUM_THREADS": "1", "GUILTY": str(guilty)}
    log = tmp_path / "job.log"
    with log.open("wb") as output:
        forked = support_torch.start(command, env, output=output) if python == sys.executable else None
        job = forked or subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        assert job.wait(150)
    result = distdiag("logs", "--json", str(log))
    first = result.report["findings"][0]
    assert (first["id"], first["where"]["ranks"]) == (f"logs.{case.id}", [guilty] * len(case.ranks)), log.read_text()
    assert case.also in f"{first['title']} {first['detail']}"
