"""Work that never returns only loses its own deadline."""

from __future__ import annotations

import threading
import time

import pytest

from distdiag.facts import deadlines


def test_what_hangs_is_left_behind_and_the_rest_is_done() -> None:
    never = threading.Event()

    def work(key: int) -> int:
        if key in (3, 7):
            never.wait(30)
        return key * 2

    began = time.monotonic()
    results, late = deadlines.each(range(100), work, patience_s=0.2)
    assert late == [3, 7]
    assert results == {key: key * 2 for key in range(100) if key not in (3, 7)}
    assert time.monotonic() - began < 15  # of 30
    never.set()


def test_what_comes_late_changes_nothing_any_more() -> None:
    go = threading.Event()
    seen = []

    def work(key: int) -> int:
        seen.append(key)
        if key == 0:
            go.wait(30)
        return key

    results, late = deadlines.each([0, 1, 2], work, patience_s=0.1)
    go.set()
    time.sleep(0.2)
    assert (results, late, seen) == ({1: 1, 2: 2}, [0], [0, 1, 2])


def test_an_error_is_raised_where_the_work_was_asked_for() -> None:
    with pytest.raises(ZeroDivisionError):
        deadlines.each([1, 0], lambda key: 1 / key, patience_s=5)


def test_nothing_to_do() -> None:
    assert deadlines.each([], str, patience_s=1) == ({}, [])


def test_who_was_not_run_at_all_is_late_with_nothing() -> None:
    worker = deadlines._Worker([1], abs, {})
    worker.began -= 10
    assert worker.abandon(0.2) is None
