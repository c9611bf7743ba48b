"""Many samples of a job that steps quickly take little time; of others they are a second apart. Real processes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from distdiag.facts.stacks.stack_types import steps_seen
from distdiag.jobs import sample_stacks

if TYPE_CHECKING:
    from distdiag.jobs.collect import Watched

STEPS = "import time\nprint('ready', flush=True)\nfor {name} in range(10**9): time.sleep({pause_s})"
SAMPLES = 14


@pytest.mark.parametrize(
    ("name", "pause_s", "is_quick"), [("step", 0.05, True), ("step", 5.0, False), ("layer", 0.05, False)]
)
def test_samples_are_quick_if_each_is_of_another_step(name: str, pause_s: float, is_quick: bool) -> None:
    code = STEPS.format(name=name, pause_s=pause_s)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        found: list[Watched] = []
        how = sample_stacks.Sampling(samples=SAMPLES, is_quick=True, longest_s=0.0)
        sample_stacks.sample(sample_stacks.Sampled([job.pid], heads=[job.pid]), how, 60.0, found.append)
        job.kill()
    samples = found[-1].samples
    assert len(samples) == SAMPLES
    assert (steps_seen(samples) >= 10) == is_quick
    pauses_s = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(samples)]
    assert min(pauses_s) < 0.5 if is_quick else min(pauses_s) > 0.8
