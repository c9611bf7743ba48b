"""Damaged files of estimate and sync-check, and damaged squeue output: each run ends in time with a valid status."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from typing import TYPE_CHECKING

from fuzz import assert_survived, damaged, misleading, run_each

from distdiag.commands.slurm.queue import parse_jobs
from distdiag.commands.slurm.watch import diagnose
from distdiag.training.sync_check import FORMAT, Entry, Saved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

COUNT = 80
QUEUE = b"7|7|RUNNING|None|2026-11-24T02:30:00|train\n8|8|PENDING|JobHeldUser|N/A|held\n9|9|FAILED|None|N/A|x\n"
CONFIG = {"model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "vocab_size": 250880, "n_head": 112}
ESTIMATE = [
    "estimate",
    "--batch",
    "256",
    "--seq",
    "4096",
    "--step-time",
    "9",
    "--gpus",
    "16",
    "--config",
]


def cases(original: bytes, path: Path, *words: str) -> Iterator[tuple[str, list[str], Callable[[], None]]]:
    """Yield a command for each damaged file: half of them still JSON, of other values."""
    dice = random.Random(32)
    pieces = [data for _, data in damaged(original, COUNT // 2)] + [
        misleading(original, dice) for _ in range(COUNT // 2)
    ]
    for number, changed in enumerate(pieces):
        data = changed.replace(b'"interrupted": true', b'"interrupted": false')  # such a run is 130 for good reason
        as_json = ["--json"] * (number % 2)
        yield str(number), [*words, str(path), *as_json], lambda data=data: path.write_bytes(data)  # type: ignore[misc]


def test_shapes_of_estimate(tmp_path: Path) -> None:
    original = json.dumps(CONFIG).encode()
    assert_survived(run_each(cases(original, tmp_path / "config.json", *ESTIMATE)), COUNT)


def test_sums_of_sync_check(tmp_path: Path) -> None:
    shards = ("", "0 of 2")
    entries = [Entry("parameter", f"w{at}", "(3,) torch.float32", at, shard) for at, shard in enumerate(shards)]
    original = json.dumps(asdict(Saved(FORMAT, 0, 2, entries))).encode()
    assert_survived(run_each(cases(original, tmp_path / "rank_0.json", "sync-check")), COUNT)


def test_what_squeue_prints() -> None:
    for _, data in damaged(QUEUE, COUNT):
        jobs = parse_jobs(data.decode("utf-8", "replace"))
        for job in jobs:
            assert all(text.isprintable() for text in (job.id, job.state, job.reason, job.start, job.name))
        assert diagnose(["train", "held"], jobs).summary
