"""Which process is a rank: titles, processes that may not be read, pids, restarts; on facts, without a process."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from loops import each
from pyspy_facts import node, process

from distdiag.diagnosis.stack_wording import unread_in_words
from distdiag.diagnosis.wording import format_members
from distdiag.facts.process import procs
from distdiag.jobs.roles import find_jobs, is_closed, of_interest, of_pids, restart_loop, without_ranks
from distdiag.knowledge.process_titles import read_title

if TYPE_CHECKING:
    from distdiag.jobs.collect import Process
    from distdiag.jobs.types import NodeStacks


@each(
    "command, role",
    [
        ("sglang::scheduler_DP6_TP6", "rank"),
        ("sglang::scheduler", "rank"),
        ("sglang::detokenizer", "helper"),
        ("sglang::tokenizer_worker:4711", "helper"),
        ("VLLM::Worker_DP0_TP1_EP1", "rank"),
        ("VLLM::Worker", "rank"),
        ("VLLM::EngineCore_DP0", "engine"),
        ("VLLM::APIServer_0", "helper"),
        ("ray::IDLE", "helper"),
        ("ray::RayTrainWorker.train", "actor"),
        ("python train.py --name sglang::scheduler", None),
        ("std::vector", None),
    ],
)
def test_a_title_says_what_a_process_is(command: str, role: str | None) -> None:
    title = read_title(command)
    assert (title.role if title is not None else None) == role


def titled(pid: int, title: str, *above: int) -> Process:
    return process(pid, parent=above[0], above=above, command=title, job={})


def ranks(*processes: Process) -> list[list[str]]:
    return [sorted(member.title for member in job.members) for job in find_jobs([node(processes, {}).stacks])]


def test_an_engine_is_a_rank_only_where_no_worker_runs_below_it() -> None:
    engine = titled(11, "VLLM::EngineCore", 10, 1)
    main = process(10, parent=1, above=(1,), command="python vllm serve", job={})
    workers = [titled(12 + number, f"VLLM::Worker_TP{number}", 11, 10, 1) for number in range(2)]
    assert ranks(main, engine) == [["VLLM::EngineCore"]]
    assert ranks(main, engine, *workers) == [["VLLM::Worker_TP0", "VLLM::Worker_TP1"]]


def test_two_servers_stay_apart_and_helpers_are_no_ranks() -> None:
    servers = []
    for main in (100, 200):
        servers.append(process(main, parent=1, above=(1,), command="python -m sglang.launch_server", job={}))
        servers += [titled(main + 1 + rank, f"sglang::scheduler_TP{rank}", main, 1) for rank in range(2)]
        servers.append(titled(main + 9, "sglang::detokenizer", main, 1))
    jobs = find_jobs([node(servers, {}).stacks])
    assert [job.name for job in jobs] == ["pid 100 sglang.launch_server", "pid 200 sglang.launch_server"]
    assert ranks(*servers) == [["sglang::scheduler_TP0", "sglang::scheduler_TP1"]] * 2
    for pid in (200, 202, 209):  # the entry point, a rank, a helper
        assert [job.name for job in of_pids(jobs, [pid], [one for one in servers if one.pid == pid])] == [jobs[1].name]


def test_titles_are_written_in_place_of_pids() -> None:
    assert format_members([(None, 7, "n1")], ["sglang::scheduler_TP1"]) == "sglang::scheduler_TP1 (n1, pid 7)"
    twice = format_members([(None, 7, "n1"), (None, 8, "n1")], ["ray::train"] * 2)
    assert twice == "ray::train (pids 7, 8) on n1"


def unread(host_user: int = 1000) -> NodeStacks:
    launcher = process(50, parent=1, above=(1,), comm="pt_elastic", kind="launcher", torch=False, hidden=True, job={})
    hidden = [
        process(60 + number, parent=50, above=(50, 1), torch=False, hidden=True, job={}, user=host_user)
        for number in range(4)
    ]
    return node([launcher, *hidden], {}).stacks


def test_ranks_that_may_not_be_read_are_ranks() -> None:
    facts = unread()
    (job,) = find_jobs([facts])
    assert [member.rank for member in job.members] == [None] * 4
    assert without_ranks([facts]) == []
    assert is_closed(job)
    assert unread_in_words(job) == "4 processes of uid 1000 below torchrun (pid 50 on n1) cannot be read"
    (own,) = find_jobs([node([process(100 + rank, rank) for rank in range(4)], {}).stacks])
    assert of_interest([job, own]) == [own]


@pytest.mark.parametrize(
    ("count", "age_s", "found"), [("3", 20.0, (3, 30.0)), ("1", 20.0, None), ("3", 600.0, None), ("", 5.0, None)]
)
def test_a_loop_of_restarts_has_young_ranks(count: str, age_s: float, found: tuple[int, float] | None) -> None:
    launcher = process(50, parent=1, above=(1,), comm="pt_elastic", kind="launcher", torch=False, started_s=10.0)
    names = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": count}
    rank = process(60, 0, 1, parent=50, above=(50, 1), started_s=100.0, job=names)
    facts = node([launcher, rank], {}).stacks
    facts = replace(facts, processes=replace(facts.processes, uptime_s=100.0 + age_s))
    (job,) = find_jobs([facts])
    assert restart_loop(job, [facts]) == found


@pytest.mark.parametrize(
    ("mapped", "uses"),
    [
        ("7f00-7f01 r-xp 00000000 08:01 5 /usr/lib/x86_64-linux-gnu/libcuda.so.1\n", True),
        ("7f00-7f01 r-xp 00000000 08:01 5 /opt/rocm/lib/libamdhip64.so.6\n", True),
        ("7f00-7f01 r-xp 00000000 08:01 5 /venv/torch/lib/libc10_cuda.so\n", False),
    ],
)
def test_a_mapped_driver_library_shows_that_a_process_uses_a_gpu(mapped: str, uses: bool) -> None:
    assert procs.uses_gpu(os.getpid(), mapped) is uses
