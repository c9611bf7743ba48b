"""torchrun's table of failures below overflow: hidden only if the detector stopped all of its ranks."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from distdiag.training.overflow.finder import _OTHER_FAILURE, _names_stopped_ranks_only


@pytest.mark.parametrize(("statuses", "is_hidden"), [((1, -15), True), ((1, 7), False), ((-11, 1), False)])
def test_another_failure_is_shown(statuses: tuple[int, ...], is_hidden: bool) -> None:
    failures = {rank: ProcessFailure(rank, 10 + rank, status, "/none") for rank, status in enumerate(statuses)}
    assert _names_stopped_ranks_only(ChildFailedError("train.py", failures)) is is_hidden
    lines = [f"failed (exitcode: {status}) local_rank: 0 (pid: 10)" for status in statuses if status > 0]
    assert any(map(_OTHER_FAILURE.search, lines)) is (7 in statuses)
    assert not _names_stopped_ranks_only(ValueError("of the script"))
