"""pyspy-all where a job is more than its ranks: workers under them, ranks without numbers, another job beside it."""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jobs import Job, free_port, outliers
from support import need, wait_until
from support_warm import WarmRunning, distdiag

if TYPE_CHECKING:
    from support import Result

SOON = ("--interval", "0.3")


def test_a_stuck_dataloader_worker_is_named_under_its_rank() -> None:
    with ExitStack() as ends:
        starts = {"fork": 3, "spawn": 2}
        whole = {"DISTDIAG_TESTS_WHOLE_TORCH": "1"}  # spawned workers draw numbers
        jobs = [Job("worker_reads", size, env={"START": start, **whole}, forked=True) for start, size in starts.items()]
        for job in jobs:
            os.mkfifo(job.folder / "sample")
            ends.enter_context(job)
        for job in jobs:
            job.wait_still()
        looks = [WarmRunning("pyspy-all", "--json", "--job", job.name, *SOON) for job in jobs]
        for job, result in zip(jobs, [look.finish() for look in looks], strict=True):
            assert_worker_is_named(job, result)


def assert_worker_is_named(job: Job, result: Result) -> None:
    assert (result.code, outliers(result)) == (1, [([job.size - 1], "train")])
    rows = result.report["data"]["processes"]
    assert [row["rank"] for row in rows if row["role"] == "rank"] == list(range(job.size))
    workers = {row["pid"]: row for row in rows if row["role"] == "helper"}
    found = result.findings["data-loading"]
    named = re.search(r"waiting for its DataLoader worker (\d+), which is in `Samples.__getitem__`", found["title"])
    assert named is not None, found["title"]
    assert workers[int(named[1])]["rank"] == job.size - 1
    assert found["title"].endswith(f"opens {job.folder}/sample")
    assert found["evidence"][0].startswith("worker: Samples.__getitem__ ("), found["evidence"]
    assert found["fix"]["commands"][0].endswith(f"trace blocked --pid {named[1]}")
    assert len(workers) >= (6 if job.size == 3 else 1)


def test_no_rank_is_invented_for_spawned_processes() -> None:
    with Job("spawned_ranks", 1, warm=True) as job:
        job.wait_still(range(2))
        result = distdiag("pyspy-all", "--json", "--pid", str(job.pid(0)), *SOON)
        rows = [row for row in result.report["data"]["processes"] if row["role"] == "rank"]
        assert [row["rank"] for row in rows] == [None] * 2
        assert result.code == 1
        (one,) = result.report["data"]["outliers"]
        assert (one["ranks"], one["frame"]["function"], len(one["pids"])) == ([], "work", 1)
        assert f"pid {one['pids'][0]}" in result.report["summary"]


UNNAMED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize("how", ["", "lightning", "parent"])
def test_rank_0_is_found_though_nothing_names_it_and_a_parent_with_the_store_is_none(how: str) -> None:
    unnamed = ("env", *(word for name in UNNAMED for word in ("-u", name)))
    port = free_port()
    with Job("starts_the_others", 1, wrap=unnamed, env={"HOW": how, "PORT": str(port)}, warm=True) as job:
        job.wait_still(range(3))
        result = distdiag("pyspy-all", "--json", "--job", f"127.0.0.1:{port}", *SOON)
        rows = {row["rank"]: row["pid"] for row in result.report["data"]["processes"] if row["role"] == "rank"}
        assert sorted(rows) == [0, 1, 2]
        assert outliers(result) == [([0], "load_batch")]
        if how == "parent":
            assert job.pid(0) not in rows.values()
        else:
            assert rows[0] == job.pid(0)
            assert [one["id"] for one in result.report["findings"]] == ["hang.not-in-collective", "hang.rank-deduced"]


def test_two_jobs_at_once_are_told_apart_and_a_healthy_one_is_not_hung() -> None:
    with Job("hangs_in_load_batch", 3, forked=True) as hung, Job("trains_well", 2, forked=True) as well:
        hung.wait_still()
        well.wait_ready()
        both = distdiag("pyspy-all", "--json", *SOON)
        mine = {one["job"]: one for one in both.report["data"]["jobs"]}
        assert {hung.name, well.name} <= set(mine)
        assert [mine[job.name]["ranks"] for job in (hung, well)] == [3, 2]
        assert ([2], "load_batch") in outliers(both)
        healthy = well.look()  # not so soon: on a busy machine a rank may not run for 0.3 s
        assert (healthy.code, healthy.report["verdict"], outliers(healthy)) == (0, "ok", [])
        assert healthy.report["findings"][0]["id"] == "hang.not-hung"
        assert json.loads(healthy.out)["data"]["jobs"][0]["world_size"] == 2


def children(pid: int) -> set[int]:
    return {int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()}


def test_under_mpirun_one_process_looks_and_its_siblings_are_no_ranks() -> None:
    need("mpirun.openmpi")
    mpirun = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np")
    with Job("stands_still", 1, wrap=(*mpirun, "2", "-x", "JOB_FOLDER")) as job:
        wait_until(lambda: len(children(job.processes[0].pid)) == 2, 60, lambda: "mpirun does not start them")
        job.wait_still()
        own = children(job.processes[0].pid)
        result = distdiag("pyspy-all", "--json", "--samples", "1", wrap=(*mpirun, "2"))
        job.processes[0].terminate()  # its ranks are in sessions of their own: mpirun has to end them itself
        job.processes[0].wait(20)
        # The machine may have other jobs of Open MPI.
        rows = [row for row in result.report["data"]["processes"] if row["pid"] in own]
        assert all(row["job"].startswith("Open MPI") for row in rows)
    assert [(row["rank"], row["threads"][0]["frames"][0]["function"]) for row in rows] == [
        (0, "load_batch"),
        (1, "load_batch"),
    ]
