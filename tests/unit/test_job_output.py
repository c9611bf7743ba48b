"""Growth of a job's output files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.facts.job_output import OutputFile, grown, sizes

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
