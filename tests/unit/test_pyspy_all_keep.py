"""Files that are written and read: whole, and never in place of something that is no file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from pyspy_facts import REQUEST, job, judge, loads, twice, waits

from distdiag.commands.pyspy_all.keep import judge_saved, write_page
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
