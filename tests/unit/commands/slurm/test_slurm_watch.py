"""Judgement of squeue's output: running and pending jobs are silent, missing and never starting jobs are named."""

from __future__ import annotations

from loops import each
from support_warm import distdiag

from distdiag.commands.slurm.queue import parse_jobs
from distdiag.commands.slurm.watch import diagnose

# Written by squeue of SLURM 22.05, but for the reason with underscores, which newer versions write. The last field is
# the name, which may hold anything.
QUEUE = """\
7|7|RUNNING|None|2026-11-24T02:30:00|train
8|8|PENDING|BeginTime|2026-11-24T03:37:25|clean
9|9|PENDING|PartitionConfig|N/A|wide
10|10|PENDING|JobHeldUser|N/A|held
11|11|PENDING|launch_failed_requeued_held|N/A|lost
12_[3-9]|12|PENDING|JobArrayTaskLimit|N/A|array
12_2|12|RUNNING|None|2026-11-24T02:30:00|array
13|13|SUSPENDED|None|2026-11-24T02:30:00|paused
14|14|TIMEOUT|TimeLimit|2026-11-24T01:30:00|done
15|15|COMPLETING|None|2026-11-24T02:30:00|ending
16|16|FAILED|NonZeroExitCode|2026-11-24T01:30:00|chain
17|17|PENDING|Dependency|N/A|chain
18|18|PENDING|Priority|N/A|a|b "c"
"""


def found(*asked: str, queue: str = QUEUE) -> list[tuple[str, str]]:
    return [(finding.id, finding.title) for finding in diagnose(asked, parse_jobs(queue)).findings]


@each("alive", ["train", "7", "clean", "array", "12", "12_2", "chain", 'a|b "c"'])
def test_a_job_that_runs_or_waits_is_silent(alive: str) -> None:
    assert found(alive) == []


@each(
    "asked, id_, says",
    [
        ("wide", "will-not-start", "wide is pending and will not start: the partition does not have what it asks for"),
        ("held", "will-not-start", "held is pending and will not start: it is held"),
        ("lost", "will-not-start", "lost is pending and will not start: it is held"),
        ("paused", "suspended", "paused is suspended: job 13 keeps its allocation but does not run"),
        ("done", "not-in-queue", "done is neither running nor pending; its last job, 14, is TIMEOUT"),
        ("ending", "not-in-queue", "ending is neither running nor pending; its last job, 15, is COMPLETING"),
        ("other", "not-in-queue", "other is neither running nor pending"),
    ],
)
def test_what_is_wrong_is_named(asked: str, id_: str, says: str) -> None:
    assert found("train", asked) == [(f"slurm.{id_}", says)]


def test_lines_of_something_else_are_no_jobs() -> None:
    assert parse_jobs("") == parse_jobs("CLUSTER: abc\n|||") == []


@each(
    "every, says",
    [("", "not a time"), ("1h30m", "not a time"), ("-1h", "not a time"), ("1s", "too short"), ("400d", "too long")],
)
def test_what_is_no_period_is_wrong_usage(every: str, says: str) -> None:
    done = distdiag("slurm", "cron", "--name", "x", f"--every={every}", "--", "true")
    assert (done.code, says in done.err) == (2, True), done.err
