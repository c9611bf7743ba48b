"""Growth of a job's output files."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from distdiag.facts.logs.job_output import OutputFile, grown, of_ended, sizes

if TYPE_CHECKING:
    from pathlib import Path


def test_only_files_that_grew_count_as_grown(tmp_path: Path) -> None:
    files = [OutputFile(str(tmp_path / name), str(tmp_path / name)) for name in ("grows", "stays", "shrinks", "goes")]
    for file in files:
        (tmp_path / file.path).write_text("step 1\n")
    before = sizes(files)
    (tmp_path / "grows").write_text("step 1\nstep 2\n")
    (tmp_path / "shrinks").write_text("")
    (tmp_path / "goes").unlink()
    assert grown(before, sizes(files)) == (str(tmp_path / "grows"),)
    assert grown({}, before) == ()


def test_the_file_of_a_rank_that_ended_is_found_by_its_neighbours_name(tmp_path: Path) -> None:
    (tmp_path / "run-12").mkdir()
    names = ["run-12/out-01.log", "run-12/out-02.log", "run-12/out-03.log"]
    for name in names:
        (tmp_path / name).write_text("step 1\n")
    own, other, old = (str(tmp_path / name) for name in names)
    os.utime(old, (1.0, 1.0))
    living = [OutputFile(own, own, 1)]
    assert of_ended(living, [2, 3, 4], time.time() - 60.0) == [OutputFile(other, other, 2)]
    assert of_ended([OutputFile(own, own, None), OutputFile(own, own, 12)], [2], 0.0) == []
    unlike = str(tmp_path / "run-12" / "other-05.log")
    assert of_ended([*living, OutputFile(unlike, unlike, 5)], [2], 0.0) == []
