"""Files that are written and read: whole, and never in place of something that is no file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
import pytest
from pyspy_facts import REQUEST, frames, ids, job, judge, loads, odd_ranks, twice, waits
from support import distdiag

from distdiag.commands.pyspy_all.keep import Saved, judge_saved, write_page
from distdiag.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_page_goes_where_a_link_leads_and_into_a_pipe(tmp_path: Path) -> None:
    report = judge(job(twice(waits()), twice(loads())))
    real, link, pipe = tmp_path / "real.html", tmp_path / "link.html", tmp_path / "pipe"
    real.write_text("old")
    link.symlink_to(real)
    write_page(report, str(link), strict=False)
    assert link.is_symlink()
    assert "<html" in real.read_text()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_page(report, str(pipe), strict=False)
        assert os.read(reader, 100)
    finally:
        os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["", "/dev/zero", "/nowhere"])
def test_what_is_no_file_is_not_read(name: str) -> None:
    with pytest.raises(UsageError):
        judge_saved(REQUEST, [name])


def test_a_truncated_file_costs_its_own_host_alone(tmp_path: Path) -> None:
    whole = msgspec.json.encode(Saved("distdiag-stacks/1", 2, 1.0, job(twice(waits()), twice(loads()))))
    (tmp_path / "n1.json").write_bytes(whole)
    (tmp_path / "n2.json").write_bytes(whole[: len(whole) // 2])
    report = judge_saved(REQUEST, [str(tmp_path)])
    assert odd_ranks(report) == [[1]]
    assert ids(report) == ["odd-rank", "unreadable"]
    assert "n2.json is not whole" in report.findings[1].title


def test_no_name_moves_the_cursor_of_whoever_reads_the_report(tmp_path: Path) -> None:
    hostile = frames(("load\x1b[2J", "/home/me/\x1b]0;x\x07t.py", 1))
    path = tmp_path / "n1.json"
    path.write_bytes(msgspec.json.encode(Saved("distdiag-stacks/1", 2, 1.0, job(twice(waits()), twice(hostile)))))
    shown = distdiag("pyspy-all", "--from", str(path)).out
    assert "load?[2J" in shown
    assert not set(shown) & {"\x1b", "\x07"}
