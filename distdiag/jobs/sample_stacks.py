"""Facts of one node: stacks of processes over time, and activity beside them. Nothing is judged here."""

from __future__ import annotations

import re
import time
from dataclasses import replace

from distdiag.facts import deadlines
from distdiag.facts.process import polled_path, procs
from distdiag.facts.process.activity import Meter
from distdiag.facts.process.syscall_names import MAY_WAIT_FOR_OWN
from distdiag.facts.stacks import stack_sampler, thread_places
from distdiag.facts.stacks.stack_sampler import SampleOptions
from distdiag.facts.stacks.stack_types import steps_seen
from distdiag.jobs.collect import Watched
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distdiag.facts.process.activity import Activity
    from distdiag.facts.stacks.stack_types import Sample, Thread
    from distdiag.facts.stacks.thread_places import Places

LONGEST_S = 31.0
"""Longest time hang samples ranks that do not move."""
_PATIENCE_S = 1.0
_LONG_S = 3.0
_SURE_S = 5.5
"""Slightly above the verdict's limit: a thread asleep for longer is beyond any ordinary step."""
_SPINS_S = 10.5
"""The same for threads that run at one place: the time before the first sample is unknown."""
_BESIDE_S = 10.5
"""The same for threads that may wait for children or other threads, which may pause between downloads."""
_STEP_S = 2.5
_QUICK_S, _GLANCE_S, _STEPS = 0.25, 5.0, 10
"""Pause between quick samples, how long to try them, and the different steps that make them as good as slow ones."""
_BATON = "/torch/utils/file_baton.py"
"""torch's wait for another process that builds the same C++ extension."""
_COLLECTIVE, _INNER = "/torch/distributed/", 8
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3\.\d|^<")
_WAITS_FOR_GPU = re.compile(r"\.(item|cpu|tolist|numpy|nonzero|synchronize|is_nonzero)\(|\.to\(|torch\.equal\(")
"""Calls that block Python until the GPU is idle."""
_WAITS_FOR_WORK = re.compile(r"\.wait\(")
"""Waits in C without a frame; Python's own waits have frames."""


@record
class Sampling:
    """How stacks are sampled. `sample_s`: time limit of one sample of one process.

    Sampling of an unmoved process continues until it counts as stuck, for at most `longest_s`; the kernel's age of a
    sleep is no substitute, as tracers reset it. With `native` another sample has C frames, for which the process
    is paused. `is_quick`: sample faster if the job steps faster.
    """

    samples: int = 2
    interval_s: float = 1.0
    is_quick: bool = False
    sample_s: float = 5.0
    longest_s: float = LONGEST_S
    native: bool = False
    all_threads: bool = False

    def takes_s(self) -> float:
        """Return the maximum duration of all samples."""
        return max(self.samples * self.interval_s, self.longest_s) + 2 * self.sample_s * (self.samples + 1)


@record
class Sampled:
    """The processes to sample. `once`: those that need a single sample; `heads`: those with activity measured.

    `libraries`: names of GPU libraries, see thread_places.
    """

    pids: Sequence[int] = ()
    once: Sequence[int] = ()
    heads: Sequence[int] = ()
    libraries: Sequence[str] = ()


def sample(chosen: Sampled, how: Sampling, left_s: float, tell: Callable[[Watched], None]) -> None:
    """Sample processes; send the samples of each at the end, and partial samples during a long run.

    `left_s`: time until the deadline.
    """
    look = _Look(chosen, SampleOptions(timeout_s=how.sample_s, all_threads=how.all_threads), tell)
    count = how.samples if how.samples > 1 else 1 - how.native
    if count:
        look.sample(every=True)
    for number in range(look.sample_quickly(count) if how.is_quick else 1, count):
        look.pause(look.began_s + number * how.interval_s - time.monotonic())
        look.sample()
    if how.samples > 1:
        until = look.began_s + min(how.longest_s, left_s)
        while (pause_s := min(look.missing_s(how.longest_s), until - time.monotonic())) > 0:
            look.pause(min(pause_s, _STEP_S))
            look.sample()
    if how.native:
        look.sample(every=True, native=True)
    look.end()
    look.send()


class _Look:
    """The samples of all processes of a node."""

    def __init__(self, chosen: Sampled, options: SampleOptions, tell: Callable[[Watched], None]) -> None:
        self._pids, self._once, self._options = list(chosen.pids), set(chosen.once), options
        self._libraries = chosen.libraries
        self._named = [re.compile(name) for name in chosen.libraries]
        self._ranks = [pid for pid in chosen.heads if pid in set(chosen.pids)]
        self._taken: dict[int, list[Sample]] = {pid: [] for pid in chosen.pids}
        self._places: dict[int, list[Places]] = {}
        self._activity: dict[int, Activity] = {}
        self._tell, self._n_sent = tell, 0
        self.began_s = self._sent_s = time.monotonic()
        self._meter = Meter(self._ranks)

    def sample(self, *, every: bool = False, native: bool = False) -> None:
        """Sample all processes; without `every`, only those that need several samples."""
        todo = [
            pid
            for pid in self._pids
            if not self._taken[pid] or _worth_another_sample(self._taken[pid], pid in self._once and not every)
        ]
        for pid, sample in stack_sampler.take_samples(todo, replace(self._options, native=native)).items():
            self._taken[pid].append(sample)
        if every:
            self._locate()

    def sample_quickly(self, count: int) -> int:
        """Take all samples quickly if each rank steps quickly, as samples of one step are not independent.

        Otherwise keep one sample per second. Returns the number of samples.
        """
        for number in range(1, count):
            time.sleep(max(0.0, self.began_s + number * _QUICK_S - time.monotonic()))
            self.sample()
            is_over = time.monotonic() - self.began_s > _GLANCE_S or number + 1 == count
            if is_over and min((steps_seen(self._taken[pid]) for pid in self._ranks), default=0) < _STEPS:
                self._taken = {pid: _a_second_apart(samples) for pid, samples in self._taken.items()}
                return max(map(len, self._taken.values()))
        return count

    def end(self) -> None:
        """Take the last readings; after long sampling also of helpers, as age is measured at its end."""
        if any(len(samples) > 1 for samples in self._taken.values()):
            if time.monotonic() - self.began_s > _LONG_S:
                for pid, sample in stack_sampler.take_samples(sorted(self._once), self._options).items():
                    self._taken[pid].append(sample)
            self._locate()
            self._activity = {each.pid: each for each in self._meter.read()}

    def _locate(self) -> None:
        for found in thread_places.read(self._ranks, self._libraries):
            self._places.setdefault(found.pid, []).append(found)

    def missing_s(self, longest_s: float) -> float:
        """Return the seconds of sampling left until each process has moved, or has been still for long enough."""
        own = {pid: samples for pid, samples in self._taken.items() if pid in self._ranks and len(samples) > 1}
        ranks = list(own.values())
        unmoved = [
            samples
            for pid, samples in own.items()
            if samples[-1].threads and not _has_moved(samples, waits=_is_in_collective(samples) or self._spins(pid))
        ]
        asleep = [samples for samples in unmoved if samples[-1].state != "R"]
        if not unmoved or any(samples[-1].status in ("stopped", "frozen") for samples in ranks):
            return 0.0
        oldest = max((_still_s(samples) for samples in asleep if not _polls(samples)), default=0.0)
        missing = [_SURE_S - _still_s(samples) for samples in asleep]
        # Activity beside a thread is known only since the first sample, whatever the kernel noted before.
        watched_s = time.monotonic() - self.began_s
        may_wait = filter(_may_wait_for_others, asleep)
        missing += [(_BESIDE_S if self._has_others(samples) else _SURE_S) - watched_s for samples in may_wait]
        spun = [_still_s(samples) for samples in unmoved if samples[-1].state == "R"]
        if len(spun) == len(ranks):
            return longest_s - min(spun)  # only progress decides
        if spun and (oldest < _SURE_S or any(map(self._spins, own))):
            missing.append(_SPINS_S - min(spun))
        return max(missing)

    def _has_others(self, samples: list[Sample]) -> bool:
        """Return whether a process has children, or other threads that run Python."""
        still = samples[-1].standstill[0] if samples[-1].standstill else None
        return len(samples[-1].threads) > 1 or (still is not None and self._meter.has_children(still.tid))

    def _spins(self, pid: int) -> bool:
        """Return whether a rank runs in a GPU library, and may wait for its GPU."""
        last = self._places.get(pid, [])[-1:]
        inner = [thread.inner[0][0] for found in last for thread in found.threads if thread.inner]
        return any(pattern.fullmatch(library) for pattern in self._named for library in inner)

    def pause(self, seconds: float) -> None:
        """Sleep; if that or the last message is long, first send the samples, once their number has doubled."""
        is_long = seconds >= _LONG_S or time.monotonic() - self._sent_s >= _LONG_S
        if is_long and self._n_taken() >= 2 * self._n_sent:
            self.send()
        time.sleep(max(0.0, seconds))

    def _n_taken(self) -> int:
        return max(map(len, self._taken.values()), default=0)

    def send(self) -> None:
        """Send the samples so far."""
        self._n_sent, self._sent_s = self._n_taken(), time.monotonic()
        hints, _ = deadlines.each(self._pids, lambda pid: _hints(pid, self._taken[pid]), patience_s=_PATIENCE_S)
        for pid, samples in self._taken.items():
            self._tell(
                Watched(
                    pid=pid,
                    samples=tuple(samples),
                    hints=hints.get(pid, ()),
                    places=tuple(self._places.get(pid, ())),
                    activity=self._activity.get(pid),
                    build_locks=tuple(polled_path.stale_build_locks(pid)) if _waits_for_build(samples) else (),
                )
            )


def _a_second_apart(samples: list[Sample]) -> list[Sample]:
    kept = samples[:1]
    for sample in samples:
        if sample.at_s - kept[-1].at_s > 1.0 - _QUICK_S / 2:
            kept.append(sample)
    return kept


def _has_moved(samples: list[Sample], *, waits: bool) -> bool:
    """Return whether Python frames changed as in a step; the same test as diagnosis/motion.py."""
    seen = [sample.threads[0] for sample in samples if sample.threads]
    return any(_differ(first, last, waits=waits) for first, last in zip(seen, seen[1:]))


def _differ(first: Thread, last: Thread, *, waits: bool) -> bool:
    own = [[frame for frame in thread.frames if not _LIBRARY.search(frame.file)] for thread in (first, last)]
    if own[0] != own[1] or first.counters != last.counters:
        return True
    if first.reader != last.reader or len(first.digests) != len(last.digests):
        return False
    start = next((at for at, frame in enumerate(last.frames) if not _LIBRARY.search(frame.file)), 0)
    start += 0 if waits else 1  # a polling loop assigns its own variables
    return first.digests[start:] != last.digests[start:]


def _still_s(samples: list[Sample]) -> float:
    """Return how long an unmoved process is known to be still: sampled, or by the kernel."""
    slept = samples[-1].standstill[0].since_s if samples[-1].standstill and samples[-1].state == "S" else None
    return max(samples[-1].at_s - samples[0].at_s, slept or 0.0)


def _polls(samples: list[Sample]) -> bool:
    """Return whether a thread sleeps and wakes up in between."""
    still = samples[-1].standstill[0] if samples[-1].standstill else None
    return still is not None and "sleep" in still.syscall and samples[-1].switches > samples[0].switches >= 0


def _may_wait_for_others(samples: list[Sample]) -> bool:
    """Return whether a thread outside of collectives is in a call that children or other threads may end."""
    still = samples[-1].standstill[0] if samples[-1].standstill else None
    return still is not None and still.syscall in MAY_WAIT_FOR_OWN and not _is_in_collective(samples)


def _is_in_collective(samples: list[Sample]) -> bool:
    inner = samples[-1].threads[0].frames[:_INNER]
    return any(_COLLECTIVE in frame.file for frame in inner)


def _waits_for_build(samples: list[Sample]) -> bool:
    return any(
        frame.file.endswith(_BATON) for sample in samples[-1:] for each in sample.threads[:1] for frame in each.frames
    )


def _worth_another_sample(samples: list[Sample], once: bool) -> bool:
    """Return whether to sample again; a process that timed out would cost its deadline again."""
    return not once and samples[-1].status not in ("timeout", "gone", "denied", "not-python")


def _hints(pid: int, samples: list[Sample]) -> tuple[tuple[str, int, str], ...]:
    """Classify innermost frames by source line, as `.item()` has no frame; the source stays on the node."""
    innermost = {
        (sample.threads[0].frames[0].file, sample.threads[0].frames[0].line)
        for sample in samples
        if _has_frames(sample)
    }
    found = []
    for file, line in innermost:
        text = _source_line(pid, file, line).partition("#")[0]
        if _WAITS_FOR_WORK.search(text):
            found.append((file, line, "comm"))
        elif _WAITS_FOR_GPU.search(text) and procs.uses_gpu(pid):
            found.append((file, line, "gpu"))
    return tuple(found)


def _has_frames(sample: Sample) -> bool:
    return bool(sample.threads and sample.threads[0].frames)


def _source_line(pid: int, file: str, line: int) -> str:
    """Read one line from the process's own file system (it may be in a container); empty if unreadable."""
    for path in (f"/proc/{pid}/root{file}", file):
        try:
            with open(path, encoding="utf-8", errors="replace") as source:
                for number, text in enumerate(source, 1):
                    if number == line:
                        return text[:400]
        except OSError:
            continue
    return ""
