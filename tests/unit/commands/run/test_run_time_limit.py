"""run: when SLURM will end the job, and when it is looked at before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loops import each

from distdiag.commands.run import time_limit

if TYPE_CHECKING:
    import pytest


@each(
    "text, expected",
    [
        ("3:04", 184.0),
        ("02:03:04", 7384.0),
        ("1-02:03:04", 93784.0),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_the_times_that_squeue_prints(text: str, expected: float | None) -> None:
    assert time_limit.seconds(text) == expected


def test_a_job_is_looked_at_two_minutes_before_its_end_and_a_short_one_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "10000")
    assert time_limit.look_at(1000.0) == 9880.0
    assert time_limit.look_at(9940.0) == 9985.0
    assert time_limit.look_at(10001.0) is None
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert time_limit.look_at(1000.0) is None
