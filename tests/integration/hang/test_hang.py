"""hang on real Gloo jobs: the class and the rank of each fault; nothing is disturbed; saved facts say the same."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import sys
import time
from typing import TYPE_CHECKING

import pytest
from cluster import Network, need_network
from cluster_slurm import Slurm, need_slurm
from cluster_ssh import SSHD, serve_ssh
from integration.hang.test_nccl_ras import service as ras_service
from jobs import PROGRAMS, Job, free_port, states, wait_for_state
from support import need, wait_until
from support_warm import WarmRunning, distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support import Result

PROGRAM = "hangs_in_every_way"
LATE_S = 8.0
"""How late a command may end on a busy machine; a node that has no time limit of ours costs minutes."""


def hung(how: str, **env: str) -> Job:
    return Job(PROGRAM, 3, env={"HOW": how, **env}, forked=True)


def wait_hung(folder: Path) -> None:
    """Wait until the fault has happened: for how long the others have to wait before it counts, hang itself waits."""
    wait_until((folder / "bad").exists, 60, lambda: "the fault has not happened")


def ask(job: Job, *arguments: str) -> Result:
    return distdiag("hang", "--json", "--job", job.name, *arguments)


def verdict(result: Result) -> tuple[str, list[int]]:
    data = result.report["data"]
    return data["class_name"], data["ranks"]


def stands(result: Result) -> dict[str, str]:
    return {row["source"]: row["stand"] for row in result.report["data"]["sources"]}


# By fault: the class and the ranks at fault.
TRUTH = {
    "sleeps": ("not-in-collective", [2]),
    "stopped": ("stopped", [2]),
    "debugger": ("debugger", [2]),
    "own-lock": ("lock", [2]),
    "d-state": ("storage", [2]),
    "recv-cycle": ("deadlock", [0, 1]),
}


@pytest.fixture(scope="module")
def stuck() -> Iterator[dict[str, Job]]:
    """A job for each fault, which all hang at the same time."""
    with contextlib.ExitStack() as stack:
        jobs = {how: stack.enter_context(hung(how)) for how in TRUTH}
        for job in jobs.values():
            job.wait_ready()
            wait_hung(job.folder)
        yield jobs


def page(job: Job) -> Path:
    return job.folder / "hang.html"


@pytest.fixture(scope="module")
def answers(stuck: dict[str, Job]) -> dict[str, Result]:
    """What hang reports on each, asked at once: it mostly waits between samples."""
    for job in stuck.values():
        wait_for_state(job.pid(2), "T" if job is stuck["stopped"] else "D" if job is stuck["d-state"] else "S")
    before = {how: states(job.pid(rank) for rank in range(3)) for how, job in stuck.items()}
    asked = {
        how: WarmRunning("hang", "--json", "--job", job.name, "--html", str(page(job))) for how, job in stuck.items()
    }
    results = {how: each.finish() for how, each in asked.items()}
    assert {how: states(job.pid(rank) for rank in range(3)) for how, job in stuck.items()} == before
    return results


@pytest.mark.parametrize("how", TRUTH)
def test_the_rank_at_fault_and_its_class_are_named(how: str, answers: dict[str, Result]) -> None:
    result = answers[how]
    _, ranks = TRUTH[how]
    assert (verdict(result), result.code) == (TRUTH[how], 1), result.out + result.err
    assert stands(result)["stacks"] == "agrees"
    assert stands(result)["recorder"] == "not available"
    first = result.report["findings"][0]
    assert first["where"]["ranks"] == ranks
    assert first["fix"] is not None
    if how == "sleeps":
        assert re.search(r"The process group's timeout ends the wait in \d+ min\.", first["detail"]), first["detail"]


def test_a_busy_rank_is_told_from_a_stuck_one_and_its_bar_says_how_long_still(tmp_path: Path) -> None:
    with hung("tokenizes") as job:
        job.wait_ready()
        wait_until(lambda: "tokenize:" in (job.folder / "stderr-2").read_text(), 60, lambda: "no bar")
        result = ask(job, "--save", str(tmp_path / "kept"))
        again = distdiag("hang", "--json", "--from", str(tmp_path / "kept"))
    assert verdict(result) == ("busy-rank", [2]), result.out + result.err
    first = result.report["findings"][0]
    assert result.report["verdict"] == "warn"
    assert "rank 2" in first["title"]
    assert "busy outside of the collective: `tokenize_corpus" in first["title"]
    assert re.search(r"tokenize: \d+ of 100000 in .* left at this rate", first["detail"]), first["detail"]
    assert (again.code, again.out) == (result.code, result.out)


def test_a_recorder_or_ras_names_the_rank_where_all_stacks_are_alike(tmp_path: Path) -> None:
    dumps, old, port = tmp_path / "dumps", tmp_path / "old", free_port()
    dumps.mkdir()
    old.mkdir()
    ras = {"NCCL_RAS_ADDR": f"127.0.0.1:{port}"}  # hang reads it in /proc
    with hung("two-groups", RECORD=str(dumps), TORCH_FR_BUFFER_SIZE="200", **ras) as job:
        wait_hung(job.folder)
        wait_until(lambda: len(list(dumps.glob("*[0-9]"))) == 3, 60, lambda: f"dumps: {list(dumps.iterdir())}")
        for file in dumps.glob("*[0-9]"):
            # As the job may have left them an hour ago, when it waited for something else.
            content = pickle.loads(file.read_bytes())
            content["distdiag_dumped_ns"] -= 3600 * 10**9
            (old / file.name).write_bytes(pickle.dumps(content))
        given = ((), ("--recorder", str(dumps)), ("--recorder", str(old)))
        asked = [WarmRunning("hang", "--json", "--job", job.name, *each) for each in given]
        blind, result, stale = (each.finish() for each in asked)
        with ras_service("job_lagging", tmp_path, port):
            lagging = ask(job)
    assert (verdict(blind), blind.code) == (("unknown", []), 3), blind.out + blind.err
    assert len(blind.report["data"]["candidates"]) == 2
    assert blind.report["data"]["next_experiment"].endswith("flight-recorder --how")
    assert stands(blind)["ras"] == "not available"
    assert (verdict(result), result.code) == (("deadlock", [2]), 1), result.out + result.err
    assert stands(result)["recorder"] == "agrees"
    assert (verdict(stale), stands(stale)["recorder"]) == (("unknown", []), "cannot tell"), stale.out
    assert re.search(r"the newest dump is 36\d\d s old, from before the ranks began to wait", stale.out)
    assert (verdict(lagging), stands(lagging)["ras"]) == (("not-in-collective", [2]), "agrees"), lagging.out


def test_a_slow_job_is_not_called_hung_and_goes_on() -> None:
    with hung("slow") as job:
        job.wait_ready()
        steps = job.folder / "steps"
        wait_until(steps.exists, 60, lambda: "no step was made")
        before, made = states(job.pid(rank) for rank in range(3)), int(steps.read_text())
        result = ask(job)
        wait_until(lambda: int(steps.read_text() or 0) > made + 1, 30, lambda: "it makes no steps any more")
        assert states(job.pid(rank) for rank in range(3)) == before
    assert result.report["verdict"] in ("ok", "warn"), result.out + result.err
    assert verdict(result)[0] in ("not-hung", "slow", "busy-rank")
    assert set(verdict(result)[1]) <= {2}


def losses_of(job: Job) -> list[str]:
    return (job.folder / "losses-0").read_text().splitlines()


def test_a_job_has_the_same_losses_whether_it_is_asked_or_not() -> None:
    steps = 120
    env = {"STEPS": str(steps)}
    with Job("trains_well", 2, forked=True, env=env) as alone, Job("trains_well", 2, forked=True) as job:
        job.wait_ready()
        result = ask(job)
        assert result.report["verdict"] != "fail", result.out
        assert len(result.report["data"]["processes"]) == 2
        wait_until(lambda: len(losses_of(job)) > steps, 60, lambda: "it makes no steps any more")
        wait_until((alone.folder / "seconds").exists, 60, lambda: "it does not end")
        assert losses_of(job)[:steps] == losses_of(alone)


def test_a_dead_node_costs_its_own_row_and_no_more_than_the_timeout(tmp_path: Path) -> None:
    need_network()
    need("ssh", SSHD)
    with Network(3) as network:
        serve_ssh(network)
        for rank, node in enumerate(network.nodes[:2]):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "BAD": "1"}
            meeting = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
            env = {**place, **meeting, "JOB_FOLDER": str(tmp_path), "HOW": "sleeps", "OMP_NUM_THREADS": "1"}
            node.start(sys.executable, str(PROGRAMS / f"{PROGRAM}.py"), env=env)
        wait_hung(tmp_path)
        network.nodes[2].vanish()
        wrap, env = tuple(network.client.command()), network.client_env()
        began = time.monotonic()
        result = distdiag("hang", "--json", "--hosts", network.hosts, "--timeout", "20", wrap=wrap, env=env)
        assert time.monotonic() - began < 20 + LATE_S
    assert (verdict(result), result.code) == (("not-in-collective", [1]), 1), result.out + result.err
    assert any(finding["where"]["hosts"] == ["node3"] for finding in result.report["findings"][1:])


def test_a_slurm_node_that_does_not_answer_costs_its_own_row(tmp_path: Path) -> None:
    need_slurm()
    with Slurm(3) as slurm:
        job = slurm.allocate(3)
        env = {"JOB_FOLDER": str(tmp_path), "HOW": "sleeps", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        for rank, node in enumerate(slurm.nodes):  # as srun starts them, but forked
            step = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "3"}
            place = {**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}
            node.start(sys.executable, str(PROGRAMS / f"{PROGRAM}.py"), env={**env, **place})
        wait_hung(tmp_path)
        slurm.freeze_slurmd("mn2")
        wrap, began, kept = tuple(slurm.client.command()), time.monotonic(), ("--save", str(tmp_path / "kept"))
        where = ("--slurm-job", str(job), "--timeout", "20")
        result = distdiag("hang", "--json", *where, *kept, wrap=wrap, env=slurm.env())
        assert time.monotonic() - began < 20 + LATE_S
        slurm.thaw_slurmd("mn2")
    assert (verdict(result), result.code) == (("not-in-collective", [2]), 1), result.out + result.err
    assert {finding["id"]: finding["where"]["hosts"] for finding in result.report["findings"][1:]} == {
        "hosts.timeout": ["mn2"],
        "hang.unseen": [],
    }
    again = distdiag("hang", "--json", "--from", str(tmp_path / "kept"))
    assert again.report["findings"] == result.report["findings"]


def test_the_page_holds_the_report(stuck: dict[str, Job], answers: dict[str, Result]) -> None:
    assert answers["sleeps"].code == 1
    text = page(stuck["sleeps"]).read_text()
    data = json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])
    assert data["class_name"] == "not-in-collective"
    assert len(data["rows"]) == 3
    assert data["edges"] == [{"from": "ranks 0-1", "to": "rank 2", "doing": "communication wait"}]
