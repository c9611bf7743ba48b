"""Inference servers: ranks that only their titles name, and the processes around them that are always idle."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jobs import Job, free_port
from support_warm import WarmRunning, distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator

SGLANG = [
    ["sglang::data_parallel_controller", [["sglang::scheduler_DP0_TP0=", []], ["sglang::scheduler_DP0_TP1!", []]]],
    ["sglang::detokenizer", []],
]
VLLM = [
    ["VLLM::APIServer_0", []],
    ["VLLM::DPCoordinator", []],
    ["VLLM::EngineCore_DP0", [["VLLM::Worker_DP0_TP0=", []], ["VLLM::Worker_DP0_TP1!", []]]],
]
UNNAMED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
WITHOUT_RANK = ("env", *(word for name in UNNAMED for word in ("-u", name)))


@contextmanager
def serving(tree: list[Any], *, in_pod: bool = False) -> Iterator[Job]:
    """Serve; `in_pod`: with the variables of a pod that is number 0 of 2, which every process inherits."""
    env = {"TREE": json.dumps(tree), "PORT": str(free_port())}
    wrap = ("env", "WORLD_SIZE=2") if in_pod else WITHOUT_RANK
    with Job("serves_requests", 1, env=env, wrap=wrap) as job:
        job.wait_still([0, 1, "main"])
        yield job


def ranks_below(main: int, data: dict[str, Any]) -> list[dict[str, Any]]:
    (own,) = [job for job in data["jobs"] if job["job"].startswith(f"pid {main} ")]
    return [row for row in data["processes"] if row["job"] == own["job"] and row.get("role", "rank") == "rank"]


def test_a_scheduler_of_sglang_is_named_by_its_title_and_no_idle_process_is_accused() -> None:
    with serving(SGLANG) as job:
        main = job.pid(0)
        name = f"pid {main} serves_requests.py"
        asked = [WarmRunning("hang", "--json", str(main))]
        asked.append(WarmRunning("pyspy-all", "--json", "--job", name, "--interval", "0.3"))
        result, stacks = (each.finish() for each in asked)
    title = result.report["findings"][0]["title"]
    assert title.startswith("sglang::scheduler_DP0_TP1 ("), title
    assert result.code == 1
    assert len(ranks_below(main, result.report["data"])) == 2
    assert len(ranks_below(main, stacks.report["data"])) == 2
    assert "sglang::scheduler_DP0_TP1 (" in stacks.report["summary"]


def test_workers_of_vllm_are_ranks_and_their_engine_is_none_also_in_a_pod_that_has_a_number() -> None:
    with serving(VLLM, in_pod=True) as job:
        result = distdiag("hang", "--json", str(job.pid(0)))
    assert result.report["findings"][0]["title"].startswith("VLLM::Worker_DP0_TP1 (")
    assert len(ranks_below(job.pid(0), result.report["data"])) == 2
