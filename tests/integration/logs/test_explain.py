"""What `distdiag explain` answers: as logs does of jobs and kernels, as cuda-env does of builds, and of ids."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support_warm import distdiag

from distdiag.knowledge.logs import content, read_log

if TYPE_CHECKING:
    from pathlib import Path


def explain(*words: str, stdin: str = "") -> tuple[int, dict[str, Any]]:
    if not stdin:
        warm = distdiag("explain", *words, "--json")
        return warm.code, warm.report
    command = [sys.executable, "-m", "distdiag", "explain", *words, "--json"]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(
    ("text", "command", "id_"),
    [
        ("[rank2]: ValueError: label 1000", "logs", "logs.first-failure"),
        ("RuntimeError: CUDA error: invalid device ordinal", "logs", "logs.failure"),
        ("NVRM: Xid (PCI:0000:05:00): 79, pid=1, GPU has fallen off the bus.", "logs", "logs.xid"),
        ("/bin/sh: 1: debuild: not found", "cuda-env", "cuda-env.log.program-missing"),
    ],
)
def test_a_line_a_file_and_stdin_have_the_same_answer(text: str, command: str, id_: str, tmp_path: Path) -> None:
    path = tmp_path / "some.log"
    path.write_text(f"{text}\n")
    ways = [(text, ""), (str(path), ""), ("-", f"{text}\n")]
    tried = {"logs.xid": ways, "cuda-env.log.program-missing": ways[1:2]}.get(id_, ways[:1])
    for words, stdin in tried:
        status, report = explain(words, stdin=stdin)
        assert (status, report["command"], report["findings"][0]["id"]) == (1, command, id_), words


def test_an_id_is_explained_and_a_wrong_one_corrected() -> None:
    status, report = explain("hang.not-in-collective")
    assert (status, report["findings"][0]["id"]) == (0, "hang.not-in-collective")
    status, report = explain("logs.first-falure")
    assert status == 2
    assert "logs.first-failure" in json.dumps(report)


def test_a_line_that_any_program_may_print_is_no_build() -> None:
    status, report = explain("Killed")
    assert (status, report["command"], report["verdict"]) == (3, "logs", "unknown")


def test_a_file_that_is_missing_is_no_line() -> None:
    status, report = explain("slurm-4711.out")
    assert status == 2
    assert "no such file" in json.dumps(report)


def test_a_jobs_log_given_to_cuda_env_is_answered_as_logs_does(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text("[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB.\n")
    command = [sys.executable, "-m", "distdiag", "cuda-env", "--explain", "-", "--json"]
    done = subprocess.run(command, input=path.read_text(), capture_output=True, text=True, timeout=120, check=False)
    report = json.loads(done.stdout)
    assert (done.returncode, report["command"], report["findings"][0]["where"]["ranks"]) == (1, "logs", [2])
    assert explain(str(path))[1]["summary"] == report["summary"]


def test_a_build_of_a_rank_is_a_build(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text("[rank0]: /usr/bin/ld: cannot find -lcurand: No such file or directory\n")
    assert explain(str(path))[1]["command"] == "cuda-env"


def test_a_compiler_that_refuses_an_option_is_of_a_build() -> None:
    text = "c++: error: unrecognized command-line option '-mavx2'"
    assert (content(text), [match.known.id for match in read_log(text)]) == ("build", ["x86-option"])
