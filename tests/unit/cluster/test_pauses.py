"""Ranks that did not run while the others did; from facts."""

from __future__ import annotations

import pytest

from distdiag.cluster.records import PausedMessage, RankEvent
from distdiag.commands.gpu_test.types import Request
from distdiag.launch.rank_report import paused
from distdiag.launch.rank_runs import RankTimeline


def pause(paused: int, no_core: int = 0, throttled: int = 0) -> PausedMessage:
    return PausedMessage(paused_ns=paused, no_core_ns=no_core, throttled_ns=throttled, of_ns=100)


def timelines(ranks: list[PausedMessage]) -> list[RankTimeline]:
    return [
        RankTimeline(
            rank=rank,
            local_rank=rank,
            host="node1",
            pid=rank,
            events=[
                RankEvent(rank=0, stage="pairs", at=1, note="", elapsed_s=1.0, waiting=False, payload={"paused": one})
            ],
        )
        for rank, one in enumerate(ranks)
    ]


@pytest.mark.parametrize(
    ("ranks", "named", "level", "words"),
    [
        ([pause(2), pause(60), pause(1)], (1,), "fail", "60% of the time: it was stopped"),
        ([pause(2), pause(90, 5, 80)], (1,), "fail", "its CPU quota was used up"),
        ([pause(5, 5), pause(60, 60), pause(5, 5)], (1,), "warn", "other programs used its cores"),
        # The machine is busy for all; one of them is stopped beside that.
        ([pause(50, 50), pause(70, 20)], (1,), "fail", "it was stopped"),
    ],
)
def test_a_rank_that_did_not_run_is_named(
    ranks: list[PausedMessage], named: tuple[int], level: str, words: str
) -> None:
    (found,) = paused(Request(), timelines(ranks))
    assert (found.where.ranks, found.level) == (named, level)
    assert words in found.title


@pytest.mark.parametrize(
    "ranks",
    [[pause(60, 60), pause(40, 40)], [pause(60), pause(50)], [pause(15), pause(0)], [pause(90)]],
)
def test_where_all_were_held_up_or_nobody_was_none_is_named(ranks: list[PausedMessage]) -> None:
    assert paused(Request(), timelines(ranks)) == []
