"""What --json prints, of every command: valid by the published schema, and with ids that the published list has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import make_docs
import pytest
from jobs import Job
from json_schema import SCHEMA, check
from loops import each
from support import PROGRAM
from support_warm import distdiag

from distdiag.cli import _SUBCOMMANDS

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDED = Path(__file__).parents[2] / "recorded"
SAMPLES = Path(__file__).parents[2] / "samples"
COMMANDS = [
    name
    for sub in _SUBCOMMANDS
    for name in ([sub.name] if sub.home else []) + [f"{sub.name} {below.name}" for below in sub.below]
]


@pytest.fixture(scope="module")
def hung() -> Iterator[Job]:
    """Run a job that hangs."""
    with Job("hangs_by_line", 2, forked=True) as job:
        job.wait_still()
        yield job


@each("command", [name for name in COMMANDS if name != "trace py"])
def test_a_wrong_option_is_an_error_document(command: str) -> None:
    result = distdiag(*command.split(), "--json", "--no-such-option")
    assert result.code == 2
    assert "error" in check(result.out, 2)


@each(
    "words",
    [
        "pyspy-all",
        "trace blocked",
        "trace fds",
        "cuda-env",
        "doctor",
        "core-bt",
        "ports",
        "gpu-test",
        "allreduce-bench",
    ],
)
def test_saved_facts_that_are_not_there_are_an_error_document(words: str) -> None:
    result = distdiag(*words.split(), "--json", "--from", "/nonexistent")
    assert "error" in check(result.out, result.code)


@pytest.mark.parametrize("words", ["pyspy-all", "trace blocked", "trace fds --rank 0"])
def test_reports_on_a_hung_job(hung: Job, words: str) -> None:
    result = distdiag(*words.split(), "--json", "--job", hung.name)
    check(result.out, result.code)  # also of a hang that is too young to be called one, on a busy machine


@pytest.mark.parametrize(
    "words",
    [
        "ports",
        "ports 127.0.0.1:1",
        "cuda-env --goal run",
        "doctor",
        "core-bt --check-setup",
        "trace show /nonexistent",
        f"trace sys {RECORDED / 'strace'}",
        f"logs {RECORDED / 'logs'}",
        "flight-recorder --how",
        "flight-recorder /nonexistent",
        "bundle -o /nonexistent/x.tar.gz",
        "pyspy-all --hosts nowhere.invalid --host-timeout 5",
        "pyspy-all --job no-such-job",
    ],
)
def test_reports(words: str) -> None:
    # Those of gpu-test and allreduce-bench on ranks: test_gpu_test_faults, test_isolate, test_allreduce_bench.
    result = distdiag(*words.split()[:1], *words.split()[1:], "--json")
    check(result.out, result.code)


@pytest.mark.timeout(300)  # three imports of torch
def test_reports_on_numbers(tmp_path: Path) -> None:
    frames, log = str(tmp_path / "frames.jsonl"), tmp_path / "build.log"
    log.write_text("RuntimeError: CUDA out of memory\n/bin/sh: 1: nvcc: not found\n")
    script = str(SAMPLES / "overflows.py")
    subprocess.run([sys.executable, script, "30000", frames], check=True, capture_output=True, timeout=60)
    for words in (
        ["overflow", "show", "--json", frames],
        ["overflow", "show", "--json", str(log)],
        ["cuda-env", "--json", "--explain", str(log)],
        ["floatcmp", "--json", str(log), frames],
    ):
        result = distdiag(*words)
        check(result.out, result.code)
    done = subprocess.run(
        [PROGRAM, "overflow", "--json", "--", script, "1e6"], capture_output=True, text=True, timeout=90, check=False
    )
    document = check(done.stdout, done.returncode)  # the job's own output is on stderr
    assert document["findings"][0]["id"] == "overflow.detected"


def test_the_schema_refuses_what_is_not_a_report() -> None:
    document = json.loads(distdiag("core-bt", "--check-setup", "--json").out)
    damages = (
        {"verdict": "maybe"},
        {"exit_code": "1"},
        {"findings": [{"id": "x"}]},
        {"more": 1},
        {"data": {"cores": 1}},
    )
    for damage in damages:
        assert not SCHEMA.is_valid({**document, **damage})
    assert SCHEMA.is_valid(document)


def test_the_data_of_every_command_is_described() -> None:
    assert not make_docs.undescribed()
