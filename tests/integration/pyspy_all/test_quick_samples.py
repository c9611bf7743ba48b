"""Many samples of a job that steps quickly take little time; of others they are a second apart. Real processes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from distdiag.facts.stacks.stack_types import steps_seen
from distdiag.jobs import sample_stacks

if TYPE_CHECKING:
    from distdiag.facts.stacks.stack_types import Sample
    from distdiag.jobs.collect import Watched

STEPS = "import time\nprint('ready', flush=True)\nfor {name} in range(10**9): time.sleep({pause_s})"
SAMPLES = 14


JOBS = {("step", 0.05): True, ("step", 5.0): False, ("layer", 0.05): False}
"""By name of the counter and pause: whether samples may be taken quickly."""


def sampled(name: str, pause_s: float) -> tuple[Sample, ...]:
    code = STEPS.format(name=name, pause_s=pause_s)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        found: list[Watched] = []
        how = sample_stacks.Sampling(samples=SAMPLES, is_quick=True, longest_s=0.0)
        sample_stacks.sample(sample_stacks.Sampled([job.pid], heads=[job.pid]), how, 60.0, found.append)
        job.kill()
    return found[-1].samples


def test_samples_are_quick_if_each_is_of_another_step() -> None:
    with ThreadPoolExecutor(len(JOBS)) as pool:  # they mostly wait
        each = list(pool.map(sampled, *zip(*JOBS, strict=True)))
    for (job, is_quick), samples in zip(JOBS.items(), each, strict=True):
        assert len(samples) == SAMPLES, job
        assert (steps_seen(samples) >= 10) == is_quick, job
        pauses_s = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(samples)]
        # The mean is a second apart even if a busy machine delays one of them.
        assert min(pauses_s) < 0.5 if is_quick else sum(pauses_s) > 0.8 * len(pauses_s), (job, pauses_s)
