"""pyspy-all on real jobs that hang, each in one named way: exactly the right ranks are named, in the right words."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jobs import Job, outliers, states
from support import PROGRAM
from support_warm import WarmRunning, distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support import Result

PY_SPY = str(Path(PROGRAM).with_name("py-spy"))
SOON = ("--interval", "0.3")


def groups(result: Result) -> dict[tuple[int, ...], str]:
    """Give what each group of ranks does."""
    return {tuple(one["ranks"]): one["class"] for one in result.report["data"]["groups"]}


def test_the_rank_that_is_not_in_the_collective_is_named_with_its_line(tmp_path: Path) -> None:
    with Job("hangs_in_load_batch", 4, forked=True) as job:
        job.wait_still()
        pids = [job.pid(rank) for rank in range(4)]
        before = states(pids)
        page, kept = tmp_path / "page.html", tmp_path / "kept"
        result = job.look(*SOON, "--save", str(kept), "--html", str(page))
        assert result.code == 1
        assert outliers(result) == [([2], "load_batch")]
        assert groups(result) == {(2,): "python", (0, 1, 3): "communication wait"}
        found = result.findings["not-in-collective"]
        assert found["where"] == {"hosts": [os.uname().nodename.partition(".")[0]], "ranks": [2], "pids": [pids[2]]}
        assert f"pid {pids[2]}) is not in the collective: `load_batch` hangs_in_load_batch.py:" in found["title"]
        assert found["title"].endswith(", sleeping")
        assert "Ranks 0-1,3 have waited for " in found["detail"]
        assert "in `all_reduce` called from `train_step`" in found["detail"]
        rows = result.report["data"]["processes"]
        assert [(row["rank"], row["local_rank"], row["pid"]) for row in rows] == list(
            zip(range(4), range(4), pids, strict=True)
        )
        assert [row["counters"] for row in rows] == [{"step": 3}] * 4
        assert states(pids) == before

        # The same verdict from saved facts and from py-spy's text in tickets; no local but counters in any of them.
        again = distdiag("pyspy-all", "--from", str(kept), "--json")
        assert (again.code, again.report["summary"]) == (1, result.report["summary"])
        assert again.report["data"] == result.report["data"]
        texts = (result.out, again.out, page.read_text(), *(file.read_text() for file in kept.iterdir()))
        assert not any("hunter2" in text or "password" in text for text in texts)
        assert_same_from_py_spy(tmp_path, pids)

        # A person reads the stuck one first, and the sentence last.
        shown = distdiag("pyspy-all", "--from", str(kept)).out.splitlines()
        assert shown[0] == "distdiag pyspy-all: FAIL"
        assert (
            next(line for line in shown if line.startswith("rank")) == "rank 2: python, no progress, step 3  <- stuck"
        )
        native = job.look("--samples", "1", "--native", "--sample-timeout", "60")
        assert outliers(native)[0][0] == [2]
        frames = next(one["frames"] for one in native.report["data"]["groups"] if 0 in one["ranks"])
        assert any("Work::wait" in frame["function"] for frame in frames)
        assert states(pids) == before


def assert_same_from_py_spy(folder: Path, pids: list[int]) -> None:
    """Judge plain `py-spy dump` files, named by rank, as text and as JSON; and all of them in one file with labels."""
    labelled = []
    for form in ("text", "json"):
        (folder / form).mkdir()
        for rank, pid in enumerate(pids):
            how = ["--json"] if form == "json" else []
            command = [PY_SPY, "dump", "--nonblocking", *how, "--pid", str(pid)]
            text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
            (folder / form / f"stack_rank{rank}.{form}").write_text(text)
            labelled += [f"{rank}: {line}" for line in text.splitlines()] if form == "text" else []
    one_file = folder / "all.txt"
    one_file.write_text("\n".join(labelled))
    for place in (folder / "text", folder / "json", one_file):
        result = distdiag("pyspy-all", "--json", "--from", str(place))
        assert (result.code, outliers(result)) == (1, [([2], "load_batch")]), result.out
        assert "Ranks 0-1,3 wait in `all_reduce`" in result.findings["not-in-collective"]["detail"]


JOBS = {"exits_early": 4, "other_collective": 4, "counters_differ": 4, "pipeline_saves": 4, "waits_in_backward": 2}
EQUAL = "counters_differ not"


@pytest.fixture(scope="module")
def looks() -> Iterator[dict[str, tuple[Job, Result]]]:
    """Look at all these jobs at once: who looks mostly waits between samples."""
    with ExitStack() as ends:
        jobs = {program: Job(program, size, forked=True) for program, size in JOBS.items()}
        jobs[EQUAL] = Job("counters_differ", 3, env={"EQUAL": "1"}, forked=True)
        os.mkfifo(jobs["pipeline_saves"].folder / "full")
        for job in jobs.values():
            ends.enter_context(job)
        for job in jobs.values():
            job.wait_still()
        jobs["exits_early"].wait_ended(1)
        asked = {name: WarmRunning("pyspy-all", "--json", "--job", job.name, *SOON) for name, job in jobs.items()}
        yield {name: (jobs[name], running.finish()) for name, running in asked.items()}


def test_a_rank_that_left_is_named_though_a_child_of_it_lives_on(looks: dict[str, tuple[Job, Result]]) -> None:
    _, result = looks["exits_early"]
    assert result.code == 1
    assert [(one["ranks"], one["class"]) for one in result.report["data"]["outliers"]] == [([1], "exited")]
    assert "exited, but its children are still running" in result.findings["exited"]["title"]
    assert "Ranks 0,2-3 have waited for " in result.findings["exited"]["detail"]


def test_ranks_in_another_collective_are_named(looks: dict[str, tuple[Job, Result]]) -> None:
    _, result = looks["other_collective"]
    assert result.code == 1
    assert outliers(result) == [([2], "log_metrics")]
    assert "rank 2 (" in result.report["summary"]
    assert "in `barrier` called from `log_metrics`" in result.report["summary"]
    assert "ranks 0-1,3 in `all_reduce` called from `train_step`" in result.report["summary"]


def test_where_all_wait_at_one_line_the_loop_counters_tell(looks: dict[str, tuple[Job, Result]]) -> None:
    _, result = looks["counters_differ"]
    assert (result.code, outliers(result)) == (1, [([2], "train")])
    assert "is at step 1, ranks 0-1,3 at step 2" in result.findings["behind"]["title"]
    # With equal counters no rank is blamed, and the deciding command is printed.
    _, result = looks[EQUAL]
    assert (result.code, outliers(result), result.report["verdict"]) == (3, [], "unknown")
    found = result.findings["unknown"]
    assert found["title"].startswith("cannot decide: all 3 ranks wait in `all_reduce`")
    assert any("distdiag hang" in command for command in found["fix"]["commands"])


def test_pipeline_stages_stand_at_different_places_rightly(looks: dict[str, tuple[Job, Result]]) -> None:
    job, result = looks["pipeline_saves"]
    assert (result.code, outliers(result)) == (1, [([2], "save_state")])
    assert result.report["data"]["outliers"][0]["class"] == "checkpoint"
    assert f"opens {job.folder}/full" in result.report["summary"]
    assert groups(result) == {
        (2,): "checkpoint",
        (0,): "communication wait",
        (1,): "communication wait",
        (3,): "communication wait",
    }


def test_ranks_in_backward_wait_there_for_the_one_that_is_not(looks: dict[str, tuple[Job, Result]]) -> None:
    _, result = looks["waits_in_backward"]
    assert (result.code, outliers(result)) == (1, [([1], "validate")])
    assert "Rank 0 has waited for " in result.findings["not-in-collective"]["detail"]
    assert "in `backward` called from `train`" in result.findings["not-in-collective"]["detail"]
