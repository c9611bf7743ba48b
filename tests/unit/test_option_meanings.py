"""One word, one meaning: an option that several commands have means the same in each."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING

from distdiag.cli import GROUPS
from distdiag.lazy_typer import Invocation, Sub, load
from distdiag.options import split_pids

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest


def options(sub: Sub) -> Iterator[tuple[str, str]]:
    """List the options of a command and of those below it, with their help."""
    if sub.home:
        for parameter in load(sub, [], Invocation([])).params:
            yield parameter.opts[0], parameter.help
    for below in sub.below:
        yield from options(below)


def test_limits_of_time_processes_and_jobs_are_the_same_in_all_commands() -> None:
    helps = defaultdict(set)
    for group in GROUPS.values():
        for sub in group:
            for name, text in options(sub):
                helps[name].add(text)
    for name in ("--job", "--user", "--strict", "--json", "--html", "--backend"):
        assert len(helps[name]) == 1, (name, helps[name])
    assert helps["--timeout"] == {"Overall time limit."}
    assert helps["--pid"] == {"Same as PID; repeatable."}
    assert all("no" in text for text in helps["--stall"])


def test_a_word_of_digits_is_a_process_unless_a_file_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "4711").touch()
    assert split_pids(["4711", str(os.getpid()), "core.1", "007"]) == (["4711", "core.1", "007"], [os.getpid()])
