"""Files that are written and read: whole, and never in place of something that is no file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from pyspy_facts import REQUEST, frames, job, judge, loads, twice, waits
from support_warm import distdiag

from distdiag.pages import write_page
from distdiag.saved_facts import Gathered, save

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
    assert distdiag("pyspy-all", "--from", name).code == 2


def test_a_truncated_file_costs_its_own_host_alone(tmp_path: Path) -> None:
    save(str(tmp_path), "pyspy-all", REQUEST, Gathered(facts=[job(twice(waits()), twice(loads()))]))
    (whole,) = tmp_path.iterdir()
    (tmp_path / "n2.json").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    report = distdiag("pyspy-all", "--json", "--from", str(tmp_path)).report
    assert [one["ranks"] for one in report["data"]["outliers"]] == [[1]]
    assert [one["id"] for one in report["findings"]] == ["hang.not-in-collective", "hang.incomplete"]
    assert "n2.json was not written by --save" in report["findings"][1]["title"]


def test_no_name_moves_the_cursor_of_whoever_reads_the_report(tmp_path: Path) -> None:
    hostile = frames(("load\x1b[2J", "/home/me/\x1b]0;x\x07t.py", 1))
    save(str(tmp_path), "pyspy-all", REQUEST, Gathered(facts=[job(twice(waits()), twice(hostile))]))
    shown = distdiag("pyspy-all", "--from", str(tmp_path)).out
    assert "load?[2J" in shown
    assert not set(shown) & {"\x1b", "\x07"}
