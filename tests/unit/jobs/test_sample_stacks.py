"""Samples of a real process, and when they are sent."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from distdiag.jobs.sample_stacks import Sampled, Sampling, sample

if TYPE_CHECKING:
    from distdiag.jobs.collect import Watched


def test_what_an_interrupt_would_lose_is_sent_meanwhile() -> None:
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    sent: list[Watched] = []
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        sample(Sampled(pids=[process.pid]), Sampling(samples=13, interval_s=0.3, longest_s=0.0), 60.0, sent.append)
        process.communicate()
    assert {each.pid for each in sent} == {process.pid}
    early, last = (len(each.samples) for each in sent)
    assert 1 < early < last == 13
