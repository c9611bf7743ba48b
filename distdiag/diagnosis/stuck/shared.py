"""Properties shared by the accused ranks but not by all: node, local rank. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.diagnosis.outliers import JobVerdict
    from distdiag.diagnosis.stack_classes import RankState


def common_to(outliers: Sequence[RankState], verdict: JobVerdict) -> str:
    """Describe the node or local rank that these ranks share but not all ranks do."""
    count = len(outliers)
    parts = []
    hosts = {state.member.host for state in outliers}
    if count > 1 and len(hosts) == 1 and len({state.member.host for state in verdict.states}) > 1:
        there = sum(state.member.host in hosts for state in verdict.states)
        parts.append(f"all on {next(iter(hosts))}" + (", all of its ranks" if there == count else ""))
    locals_ = {state.member.local_rank for state in outliers}
    if count > 1 and len(locals_) == 1 and None not in locals_ and len(hosts) > 1:
        parts.append(f"all have local rank {next(iter(locals_))}")
    kind = "stragglers" if verdict.only_slow else "stuck ranks"
    return f"What the {kind} have in common: {'; '.join(parts)}." if parts else ""
