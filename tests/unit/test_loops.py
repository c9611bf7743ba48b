"""A table of cases in one test: each case is run, and a failure names its case."""

from __future__ import annotations

import pytest
from loops import each


def test_every_case_is_run_until_one_fails_and_that_one_is_named() -> None:
    seen = []

    @each("number, word", [(1, "one"), (2, "two"), (3, "three")])
    def tried(number: int, word: str) -> None:
        seen.append(word)
        assert number != 2

    with pytest.raises(AssertionError) as failure:
        tried()
    assert seen == ["one", "two"]
    assert failure.value.__notes__ == ["in the case {'number': 2, 'word': 'two'}"]


def test_a_table_without_cases_is_no_test() -> None:
    with pytest.raises(AssertionError):
        each("number", [])


@each("letter", "ab")
def test_fixtures_are_given_to_every_case(letter: str, request: pytest.FixtureRequest) -> None:
    assert request.node.name == "test_fixtures_are_given_to_every_case"
    assert letter in "ab"
