"""Additions of pyspy-all to the verdict: slow ranks of a running job, and the reason of each outlier. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.diagnosis.motion import BUSY
from distdiag.diagnosis.outliers import Outcome
from distdiag.diagnosis.stack_classes import StackClass
from distdiag.diagnosis.stack_wording import briefly, counters_in_words, does, spot, waits, who
from distdiag.diagnosis.stuck.judge import where_of
from distdiag.diagnosis.stuck.shared import common_to
from distdiag.diagnosis.verdicts import finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.diagnosis.outliers import JobVerdict
    from distdiag.diagnosis.slow_ranks import SlowRanks
    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.report import Finding


def reason_of(verdict: JobVerdict, group: Sequence[RankState]) -> str:
    """Describe why a group counts as outliers."""
    first = group[0]
    if verdict.outcome is Outcome.LEAST_PROGRESS:
        return f"behind: {counters_in_words(first)}, others {counters_in_words(verdict.waiting[0])}"
    if verdict.outcome is Outcome.OTHER_COLLECTIVE:
        return f"in a different collective: {waits(first)}"
    if verdict.slow is not None:
        return "slower than the others"
    if verdict.outcome is Outcome.CYCLE:
        return f"in a cycle of ranks that wait for each other: {waits(first, alone=len(group) == 1)}"
    if first.thread.kind is StackClass.EXITED:
        return f"gone: {does(first)}" if len(group) == 1 else "gone"
    if first.thread.kind is StackClass.STOPPED:
        return does(first)
    return f"not in the collective: {does(first)}"


def straggler_findings(verdict: JobVerdict) -> Iterator[Finding]:
    """Report the ranks for which the others wait in most samples."""
    if verdict.slow is not None:
        yield _slow(verdict, verdict.slow)


def _slow(verdict: JobVerdict, slow: SlowRanks) -> Finding:
    is_alone = len(slow.slow) == 1
    others = briefly(slow.others)
    busy = min((state.thread.busy or 0.0 for state in slow.slow), default=0.0)
    return finding(
        "pyspy-all-straggler" if is_alone else "pyspy-all-stragglers",
        where=where_of(slow.slow),
        who=who(slow.slow),
        place=f"{spot(slow.frame)} in {slow.at_frame} of {slow.samples} samples" if slow.frame is not None else "",
        others=f"{others[:1].upper()}{others[1:]} {'waits' if len(slow.others) == 1 else 'wait'}",
        often="all" if slow.others_wait == slow.samples else f"at least {slow.others_wait} of",
        samples=slow.samples,
        slow=briefly(slow.slow),
        waits=f"at most {slow.slow_wait}" if slow.slow_wait else "none",
        doing="computing" if busy >= BUSY else "",
        common=common_to(slow.slow, verdict),
        step=spot(slow.frame) if slow.frame is not None else "a step",
    )
