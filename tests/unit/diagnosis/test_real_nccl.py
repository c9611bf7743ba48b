"""Real NCCL jobs on a GPU, recorded while they hung (tests/recorded/nccl_h200); each answer was known beforehand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from loops import each
from support_warm import distdiag

from distdiag.diagnosis import ras
from distdiag.diagnosis.ras import RasState
from distdiag.facts.recorder.nccl_ras import RasFacts, Reading

RECORDED = Path(__file__).parents[2] / "recorded" / "nccl_h200"
HANGS = {
    "sleeps": ("hang.not-in-collective", [2]),
    "ahead": ("hang.not-in-collective", [2]),
    "init": ("hang.not-in-collective", [2]),
    "barrier": ("hang.not-in-collective", [2]),
    "backward": ("hang.not-in-collective", [2]),
    "fsdp": ("hang.not-in-collective", [2]),
    "sync": ("hang.not-in-collective", [2]),
    "pipe-torchrun": ("hang.not-in-collective", [2]),
    "of8": ("hang.not-in-collective", [5]),
    "loader": ("hang.data-loading", [2]),
    "stopped": ("hang.stopped", [2]),
    "killed": ("hang.exited", [2]),
    "branch": ("hang.different-collectives", [2]),
    "p2p": ("hang.deadlock", [0, 1, 2]),
    "python-loop": ("hang.busy-rank", [2]),
    "kernel": ("hang.unknown", []),
    "healthy": ("hang.not-hung", []),
    "long-steps": ("hang.not-hung", []),
    "straggler": ("hang.not-hung", []),
}
LOGS = {
    "other-branch": ("logs.first-failure", [2]),
    "watchdog": ("logs.desync", [2]),
    "watchdog-abort": ("logs.desync", [2]),
    "killed": ("logs.undecided", []),
    "assert": ("logs.failure", []),
    "assert-blocking": ("logs.failure", []),
    "assert-ddp": ("logs.first-failure", [0]),
    "index": ("logs.failure", []),
    "illegal-access": ("logs.failure", []),
    "illegal-access-triton": ("logs.failure", []),
    "out-of-memory": ("logs.failure", []),
}


@pytest.mark.parametrize("name", HANGS)
def test_hang_finds_the_rank(name: str, tmp_path: Path) -> None:
    saved = tmp_path / "hang.json"
    saved.write_bytes(gzip.decompress((RECORDED / "hang" / f"{name}.json.gz").read_bytes()))
    first = distdiag("hang", "--json", "--from", str(saved)).report["findings"][0]
    ranks = first["where"]["ranks"] if first["level"] in ("fail", "warn") else []
    assert (first["id"], ranks) == HANGS[name], first


def test_a_killed_rank_is_not_given_the_error_of_another_job(tmp_path: Path) -> None:
    saved = tmp_path / "hang.json"
    saved.write_bytes(gzip.decompress((RECORDED / "hang" / "killed.json.gz").read_bytes()))
    assert "invalid usage" not in distdiag("hang", "--from", str(saved)).out


def without_pid(value: object, pid: int) -> object:
    """Return facts without the process, as after its parent has reaped it; RAS's text stays."""
    if isinstance(value, list):
        there = [each for each in value if not (isinstance(each, dict) and each.get("pid") == pid)]
        return [without_pid(each, pid) for each in there]
    return {key: without_pid(each, pid) for key, each in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("samples", [None, 2])
def test_a_killed_rank_that_was_reaped_is_known_by_ras(samples: int | None, tmp_path: Path) -> None:
    """With the last two samples alone, the others have not waited for long: the stacks do not prove the exit."""
    recorded = json.loads(gzip.decompress((RECORDED / "hang" / "killed.json.gz").read_bytes()))
    facts = without_pid(recorded, 3098)
    assert isinstance(facts, dict)
    for watched in facts["facts"]["watched"]:
        watched["samples"] = watched["samples"][-(samples or 0) :]
    saved = tmp_path / "hang.json"
    saved.write_text(json.dumps(facts))
    first = distdiag("hang", "--json", "--from", str(saved)).report["findings"][0]
    assert (first["id"], first["level"], first["where"]["ranks"]) == ("hang.exited", "fail", [2])
    assert "exited after NCCL's init" in first["title"]
    assert "never started" not in first["title"]
    assert "dmesg" in first["fix"]["commands"][0]


@each("name", LOGS)
def test_logs_find_the_first_failure(name: str) -> None:
    first = distdiag("logs", "--json", str(RECORDED / "logs" / name)).report["findings"][0]
    assert (first["id"], first["where"]["ranks"]) == LOGS[name], first


def test_the_last_error_of_nccl_explains_an_invalid_usage() -> None:
    out = distdiag("logs", str(RECORDED / "logs" / "other-branch")).out
    assert "received 87424 bytes of a collective where it expected 65536" in " ".join(out.split())


def test_a_rank_that_lost_its_peer_is_not_given_the_reason_of_another_rank(tmp_path: Path) -> None:
    log = (RECORDED / "logs" / "other-branch" / "rank-2.log").read_text()
    lost = "[rank0]:[E1126 08:15:11.18 ProcessGroupNCCL.cpp:612] [Rank 0] Collective WorkNCCL(SeqNum=29) raised the "
    lost += "following async exception: NCCL error: remote process exited or there was a network error"
    lines = log.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("ncclInvalidUsage"))
    (tmp_path / "all.log").write_text("\n".join([*lines[:at], lost, *lines[at:]]))
    first = distdiag("logs", "--json", str(tmp_path)).report["findings"][0]
    assert first["where"]["ranks"] == [2], first


def test_a_recorder_dump_of_nccl_shows_the_call_of_another_size() -> None:
    first = distdiag("flight-recorder", "--json", str(RECORDED / "dumps")).report["findings"][0]
    assert (first["id"], first["where"]["ranks"]) == ("flight-recorder.size-mismatch", [2])
    assert "333 elements" in first["title"]


def answer(*names: str) -> ras.RasVerdict:
    readings = tuple(Reading((RECORDED / "ras" / name).read_text(), at_s=number) for number, name in enumerate(names))
    return ras.judge(RasFacts("localhost:28028", 2, readings))


def test_ras_of_a_rank_that_sleeps() -> None:
    verdicts = [answer("sleeps-0.json", "sleeps-1.json"), answer("sleeps.txt", "sleeps.txt")]
    assert [(each.state, each.lags[0].lagging) for each in verdicts] == [(RasState.LAGGING, (2,))] * 2


def test_ras_of_a_rank_with_calls_of_its_own() -> None:
    verdict = answer("branch-0.json", "branch-1.json")
    assert (verdict.state, verdict.lags[0].lagging) == (RasState.DIFFERENT, (2,))


def test_ras_without_a_comma_after_a_lost_rank() -> None:
    snapshot = ras.parse(Reading((RECORDED / "ras" / "no-comma.json").read_text(), at_s=0))
    assert answer("no-comma.json").state is RasState.MISSING
    assert [member.rank for member in snapshot.missing] == [0, 2]
