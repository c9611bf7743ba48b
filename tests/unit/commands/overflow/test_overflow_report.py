"""overflow: records of the processes -> findings by id and level."""

from __future__ import annotations

from dataclasses import replace

from distdiag.commands.overflow.report import Overflow, diagnose
from distdiag.training.overflow.report import Detection, WatchedModel, WatchedProcess

MODEL = WatchedModel("Net", batches=3, steps=3)
FINE = Overflow(
    argv=("train.py",), status=0, processes=(WatchedProcess(0, "n", 7, [MODEL], ended=True),), detections=()
)


def watched(**changes: object) -> tuple[WatchedProcess, ...]:
    return (WatchedProcess(0, "n", 7, [replace(MODEL, **changes)], ended=True),)  # type: ignore[arg-type]


def test_each_outcome_has_its_id_and_level() -> None:
    lost = (WatchedProcess(0, "n", 7, [MODEL]),)
    left_out = (WatchedProcess(0, "n", 7, [MODEL], ended=True, left_out=["more than 64 models"]),)
    cases = {
        ("overflow.detected", "fail"): replace(FINE, detections=(Detection("rank 0: 1 nan", 0, rank=0, host="n"),)),
        ("overflow.nothing-watched", "unknown"): replace(FINE, processes=()),
        ("overflow.not-watched", "unknown"): replace(FINE, processes=left_out),
        ("overflow.gave-up", "unknown"): replace(FINE, processes=watched(off="RuntimeError no")),
        ("overflow.outputs-unreadable", "warn"): replace(FINE, processes=watched(unread=1, kind="Box")),
        ("overflow.warning", "warn"): replace(FINE, processes=watched(warnings=["step 1: all gradients are 0"])),
        ("overflow.ended-early", "unknown"): replace(FINE, processes=lost),
        ("overflow.job-ended", "unknown"): replace(FINE, status=-9),
        ("overflow.job-ended", "info"): replace(FINE, status=1, processes=watched(aborted=True)),
    }
    for (id_, level), outcome in cases.items():
        found = [(one.id, one.level) for one in diagnose(outcome, "distdiag").findings]
        assert (id_, level) in found, (id_, found)
    fine, failed = diagnose(FINE, "distdiag"), diagnose(replace(FINE, status=7), "distdiag")
    assert (fine.findings, fine.exit_code(), failed.exit_code()) == ((), 0, 3)
