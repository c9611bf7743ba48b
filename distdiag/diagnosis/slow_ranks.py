"""Ranks that slow down a running job, from how often each was sampled waiting. Pure.

Ranks with equal work wait about equally often. A slow rank arrives last at each collective: it rarely waits, and the
others wait in nearly all samples. A share needs many samples; those of one step of training count once.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from distdiag.diagnosis.stack_classes import StackClass, classify_stack, first_frames, user_frame
from distdiag.facts.stacks.stack_types import steps_seen
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.facts.stacks.stack_types import Frame, Sample
    from distdiag.jobs.collect import Watched

ENOUGH = 15
"""Minimum samples per rank."""
_GAP = 0.3
"""Minimum difference of the shares of waiting samples."""
_SURE = 3.2
"""Minimum difference in standard errors: equal ranks exceed it once in 1,400 comparisons."""
_STEPS = 10
"""Minimum steps to count steps in place of samples; fewer are seen in samples that are far apart."""
_MINORITY = 1 / 3
_WAITS = (StackClass.COMM, StackClass.GPU)
_HINTS = ("comm", "gpu")


@record(kw_only=True)
class SlowRanks:
    """The slow ranks. `slow_wait`: most waiting samples of one of them; `others_wait`: fewest of any other rank."""

    slow: tuple[RankState, ...]
    others: tuple[RankState, ...]
    samples: int
    slow_wait: int
    others_wait: int
    frame: Frame | None
    """The usual place of the slow ranks outside of waits; None if it is not in user code."""
    at_frame: int
    """Number of samples of the first slow rank in that function."""


def find_slow(states: Sequence[RankState]) -> SlowRanks | None:
    """Find the few ranks that wait much less than all others; None without any."""
    waits = [_waits(state.member.watched) for state in states]
    if len(states) < 2 or any(len(seen) < ENOUGH for seen in waits):
        return None
    order = sorted(range(len(states)), key=lambda number: _share(waits[number]))
    most = max(1, int(_MINORITY * len(states)))
    gaps = [_share(waits[order[count]]) - _share(waits[order[count - 1]]) for count in range(1, most + 1)]
    count = gaps.index(max(gaps)) + 1
    slow, others = order[:count], order[count:]
    steps = max(steps_seen(state.member.watched.samples) if state.member.watched else 0 for state in states)
    if not _differ(waits[slow[-1]], waits[others[0]], steps if steps >= _STEPS else max(map(len, waits))):
        return None
    frame, at_frame = _usual_place(states[slow[0]], waits[slow[0]])
    return SlowRanks(
        slow=tuple(states[number] for number in sorted(slow)),
        others=tuple(states[number] for number in sorted(others)),
        samples=max(map(len, waits)),
        slow_wait=max(sum(waits[number]) for number in slow),
        others_wait=min(sum(waits[number]) for number in others),
        frame=frame,
        at_frame=at_frame,
    )


def _differ(fewer: Sequence[bool], more: Sequence[bool], most: int) -> bool:
    """Compare two shares with the two-proportion z-test; `most`: independent samples of each."""
    gap = _share(more) - _share(fewer)
    pooled = (sum(fewer) + sum(more)) / (len(fewer) + len(more))
    error = math.sqrt(pooled * (1 - pooled) * (1 / min(most, len(fewer)) + 1 / min(most, len(more))))
    return gap >= _GAP and gap >= _SURE * error


def _share(waits: Sequence[bool]) -> float:
    return sum(waits) / len(waits)


def _waits(watched: Watched | None) -> list[bool]:
    """Return, for each sample with frames, whether the rank waits for other ranks or its GPU."""
    if watched is None or len(watched.samples) < ENOUGH:
        return []
    hints = {(file, line): hint for file, line, hint in watched.hints}
    return [_is_waiting(sample, hints) for sample in watched.samples if first_frames(sample)]


def _is_waiting(sample: Sample, hints: dict[tuple[str, int], str]) -> bool:
    frames = first_frames(sample)
    kind, operation = classify_stack(frames)
    if operation == "backward":  # DDP reduces gradients in it, in C++
        return sample.state != "R"
    return kind in _WAITS or (kind is None and hints.get((frames[0].file, frames[0].line)) in _HINTS)


def _usual_place(state: RankState, waits: Sequence[bool]) -> tuple[Frame | None, int]:
    """Find the function of user code that a rank is most often in outside of waits."""
    assert state.member.watched is not None
    stacks = [first_frames(sample) for sample in state.member.watched.samples if first_frames(sample)]
    busy = [user_frame(frames) for frames, waiting in zip(stacks, waits, strict=True) if not waiting]
    own = [frame for frame in busy if frame is not None]
    if not own:
        return None, 0
    (function, file), times = Counter((frame.function, frame.file) for frame in own).most_common(1)[0]
    lines = Counter(frame for frame in own if (frame.function, frame.file) == (function, file))
    return lines.most_common(1)[0][0], times
