"""Who is odd, who is not, and when nothing can be said: on facts, without a process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pyspy_facts import SITE, frames, ids, job, judge, loads, look, node, odd_ranks, process, twice, waits

from distdiag.commands.pyspy_all.grouping import parse_groups
from distdiag.jobs.collect import Watched
from distdiag.node.procs import Standstill
from distdiag.report import Verdict


def test_whoever_is_not_in_communication_is_odd_though_it_computes() -> None:
    facts = job(twice(waits()), twice(waits()), twice(loads(), cpu=0.9), twice(waits()))
    report = judge(facts)
    # A second is short: it may only be slow.
    assert (odd_ranks(report), report.verdict) == ([[2]], Verdict.WARN)
    assert "computing (90% of a core, at the same line in each look)" in report.summary
    assert "may only be slower" in report.findings[0].detail
    assert judge(facts, interval_s=30.0).verdict is Verdict.FAIL


def test_pipeline_stages_that_all_wait_for_a_neighbour_are_not_blamed() -> None:
    stages = [twice(waits("recv", f"stage_{rank}", rank)) for rank in range(4)]
    report = judge(job(*stages))
    assert (odd_ranks(report), ids(report), report.verdict) == ([], ["all-waiting"], Verdict.UNKNOWN)


def test_two_against_two_in_different_collectives_is_a_tie() -> None:
    report = judge(job(*[twice(waits("broadcast", "a", 1))] * 2, *[twice(waits())] * 2))
    assert (odd_ranks(report), report.verdict) == ([], Verdict.UNKNOWN)
    assert "`broadcast` called from `a`" in report.summary
    assert "`all_reduce` called from `train_step`" in report.summary


def test_the_same_collective_from_another_line_is_another_collective() -> None:
    report = judge(job(*[twice(waits())] * 5, twice(waits(user="evaluate", line=70))))
    assert odd_ranks(report) == [[5]]
    assert "`evaluate` train.py:70" in report.summary


def test_waiting_ranks_that_moved_are_not_hung() -> None:
    moved = twice(waits(line=25), later=waits(line=31))
    report = judge(job(moved, moved, twice(loads())))
    assert (odd_ranks(report), ids(report), report.verdict) == ([], ["not-hung"], Verdict.OK)


def test_most_ranks_compute_and_one_is_early() -> None:
    computing = twice(frames(("forward", "/home/me/model.py", 5)), cpu=1.0)
    report = judge(job(computing, computing, computing, twice(waits())))
    assert (odd_ranks(report), report.verdict) == ([], Verdict.OK)
    assert "ranks 0-2 compute, rank 3 waits for them" in report.summary


def test_ranks_that_are_all_still_importing_are_not_hung_and_nobody_is_odd() -> None:
    importing = frames(
        ("<module>", SITE + "torch/nn/modules/rnn.py", 3),
        ("_call_with_frames_removed", "<frozen importlib._bootstrap>", 241),
    )
    elsewhere = frames(
        ("<module>", SITE + "torch/__init__.py", 3), ("_find_and_load", "<frozen importlib._bootstrap>", 1027)
    )
    report = judge(job(*[twice(importing, cpu=0.1)] * 3, twice(elsewhere, cpu=0.1)))
    assert (odd_ranks(report), ids(report)) == ([], ["not-hung"])
    assert {group.class_ for group in report.data.groups} == {"import"}


def test_a_rank_that_imports_while_the_others_wait_for_it_is_odd() -> None:
    importing = frames(
        ("get_data", "<frozen importlib._bootstrap_external>", 1073),
        ("_find_and_load", "<frozen importlib._bootstrap>", 1027),
    )
    report = judge(job(*[twice(waits("init_process_group", "main", 3))] * 3, twice(importing)))
    assert (odd_ranks(report), report.data.odd[0].class_) == ([[3]], "import")


def test_who_waits_for_its_gpu_may_wait_for_a_collective_on_it() -> None:
    """NCCL's calls return at once: the others stand at the next line that needs the result."""
    stands = twice(frames(("train_step", "/home/me/train.py", 27)), state="R", cpu=1.0)
    nodes = job(stands, stands, stands, twice(loads()))
    hinted = tuple(
        Watched(one.pid, one.looks, (("/home/me/train.py", 27, "gpu"),) if one.pid < 103 else ())
        for one in nodes.watched
    )
    report = judge(replace(nodes, watched=hinted))
    assert odd_ranks(report) == [[3]]
    assert "ranks 0-2 wait for the GPU, in `train_step` train.py:27" in report.summary


def test_a_work_that_is_waited_for_has_no_frame_of_its_own() -> None:
    nodes = job(*[twice(frames(("train_step", "/home/me/train.py", 27)))] * 2, twice(loads()))
    hinted = tuple(Watched(one.pid, one.looks, (("/home/me/train.py", 27, "comm"),)) for one in nodes.watched)
    report = judge(replace(nodes, watched=hinted))
    assert odd_ranks(report) == [[2]]
    assert "ranks 0-1 wait in `Work.wait` called from `train_step`" in report.summary


def test_counters_decide_by_the_outer_loop_first() -> None:
    stacks = [
        twice(waits(), counters={"epoch": epoch, "step": step}) for epoch, step in ((2, 0), (2, 0), (1, 900), (2, 0))
    ]
    report = judge(job(*stacks))
    assert (odd_ranks(report), ids(report)) == ([[2]], ["least-progress"])
    assert "epoch 1, step 900" in report.summary


def test_a_stopped_rank_is_odd_wherever_it_stands() -> None:
    stopped = twice(waits(), state="T", status="stopped", reason="stopped (SIGSTOP or a suspended job)")
    report = judge(job(twice(waits()), stopped, twice(waits())))
    assert odd_ranks(report) == [[1]]
    fix = report.findings[0].fix
    assert fix is not None
    assert fix.commands == ("kill -CONT 101",)


def test_a_rank_that_could_not_be_read_is_not_blamed_and_the_rest_not_cleared() -> None:
    report = judge(job(twice(waits()), (look((), status="denied", reason="another user"),), twice(waits())))
    assert (odd_ranks(report), ids(report), report.verdict) == ([], ["unreadable"], Verdict.UNKNOWN)


def test_a_missing_local_rank_is_gone() -> None:
    own = [process(100 + rank, rank, 4) for rank in (0, 1, 3)]
    report = judge(node(own, {one.pid: twice(waits()) for one in own}))
    assert (odd_ranks(report), ids(report)) == ([[2]], ["exited"])
    assert report.verdict is Verdict.FAIL


def test_ranks_of_other_hosts_are_not_gone_only_not_seen() -> None:
    own = [process(100 + rank, rank, 4, local=False) for rank in (0, 1)]
    report = judge(node(own, {one.pid: twice(waits()) for one in own}))
    assert (odd_ranks(report), ids(report), report.verdict) == ([], ["exited"], Verdict.UNKNOWN)
    assert "ranks 2-3 of 4 were not seen on n1: gone, or on other hosts" in report.summary


def test_what_the_odd_ones_share_is_said() -> None:
    def host(name: str, first: int, odd: int) -> object:
        own = [process(100 + rank, rank, 8, local=False) for rank in range(first, first + 4)]
        own = [
            replace(one, place=replace(one.place, local_rank=i)) for i, one in enumerate(own) if one.place is not None
        ]
        return node(own, {one.pid: twice(loads() if i == odd else waits()) for i, one in enumerate(own)}, name)

    report = judge(host("n1", 0, 2), host("n2", 4, 2), groups=parse_groups("tp=0-3/4-7;pp=2,6"))  # type: ignore[arg-type]
    assert odd_ranks(report) == [[2, 6]]
    assert report.findings[0].detail == "The odd ranks have in common: all have local rank 2; all in pp group 2,6."


def test_a_worker_in_the_kernel_is_named_with_its_file_and_for_how_long() -> None:
    waiting = frames(
        ("_try_get_data", SITE + "torch/utils/data/dataloader.py", 1251), ("train", "/home/me/train.py", 20)
    )
    worker = process(201, 1, 2, kind="data-worker", above=(101, 1000, 1), parent=101)
    reads = (("__getitem__", "/home/me/data.py", 12), ("fetch", SITE + "torch/utils/data/_utils/fetch.py", 52))
    loop = ("_worker_loop", SITE + "torch/utils/data/_utils/worker.py", 300)
    still = Standstill(201, "D", "folio_wait", "pread64", "/data/x", 214.2)
    looks = {100: twice(waits()), 101: twice(waiting), 201: (look(frames(*reads, loop), state="D", still=still),)}
    report = judge(node([process(100, 0, 2), process(101, 1, 2), worker], looks))
    assert odd_ranks(report) == [[1]]
    assert (
        "waiting for its DataLoader worker 201, which is in `__getitem__` data.py:12, reads /data/x (D state 214 s)"
        in report.summary
    )
    assert set(ids(report)) == {"odd-rank", "helper-stuck"}


def test_the_gil_is_held_by_another_thread() -> None:
    still = Standstill(1, "S", "futex_wait", "futex", "", None)
    held = twice(frames(("collect", "/home/me/stats.py", 4)), still=still, gil_holder=99)
    report = judge(job(twice(waits()), held, twice(waits())))
    assert report.data.odd[0].class_ == "gil"
    assert "waiting for the GIL" in report.summary


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ((("barrier", SITE + "torch/distributed/distributed_c10d.py", 1),), "communication wait"),
        ((("destroy_process_group", SITE + "torch/distributed/distributed_c10d.py", 1),), "teardown"),
        ((("_get", "torch/distributed/rendezvous.py", 1),), "communication wait"),
        (
            (("wait", "/usr/lib/python3.11/threading.py", 1), ("next", SITE + "torch/utils/data/dataloader.py", 1)),
            "data loading",
        ),
        ((("wait", "/usr/lib/python3.11/threading.py", 1),), "lock"),
        ((("read", "/usr/lib/python3.11/ssl.py", 1), ("get", SITE + "wandb/sdk/api.py", 1)), "network"),
        ((("_save", SITE + "torch/serialization.py", 1),), "checkpoint"),
        ((("compile_fx", SITE + "torch/_inductor/compile_fx.py", 1),), "compile"),
        ((("synchronize", SITE + "torch/cuda/__init__.py", 1),), "cuda sync"),
        ((("forward", "/src/pytorch/torch/nn/modules/linear.py", 1),), "compute"),
        ((("cuStreamSynchronize", "/usr/lib/libcuda.so.535", 0), ("train", "/home/me/train.py", 3)), "cuda sync"),
        (
            (
                ("ncclGroupEnd", "libnccl.so.2", 0),
                ("all_reduce", C10D := SITE + "torch/distributed/distributed_c10d.py", 1),
            ),
            "communication wait",
        ),
        ((("save_checkpoint", "/home/me/train.py", 3),), "checkpoint"),
        ((("Corpus.__getitem__", "/home/me/data.py", 3),), "data loading"),
        ((("anything", "/home/me/train.py", 3),), "python"),
    ],
)
def test_frames_tell_what_a_rank_does(inner: tuple[tuple[str, str, int], ...], expected: str) -> None:
    report = judge(job(twice(frames(*inner)), twice(frames(*inner))))
    assert [group.class_ for group in report.data.groups] == [expected]


def test_torchrun_under_srun_is_no_rank_and_its_workers_are() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    agent = process(50, 0, 1, kind="launcher", job=slurm)
    own = [process(100 + rank, rank, 2, parent=50, above=(50, 1)) for rank in range(2)]
    report = judge(node([agent, *own], {50: twice(loads()), 100: twice(waits()), 101: twice(loads())}))
    assert [row.pid for row in report.data.processes] == [100, 101]
    assert odd_ranks(report) == [[1]]


def test_in_a_pod_whose_variables_name_a_rank_a_shell_is_none() -> None:
    own = [process(100 + rank, 8 + rank, 16, local=False) for rank in range(2)]
    shells = [process(700 + rank, rank, 16, local=False, comm="bash", python=False, torch=False) for rank in (1, 8)]
    report = judge(node([*own, *shells], {100: twice(waits()), 101: twice(waits())}))
    assert [(row.rank, row.pid) for row in report.data.processes] == [(8, 100), (9, 101)]


def test_a_notebook_beside_a_job_is_not_shown() -> None:
    notebook = process(900, None, parent=1, above=(1,))
    own = [process(100 + rank, rank, 2) for rank in range(2)]
    looks = {900: twice(loads()), 100: twice(waits()), 101: twice(loads())}
    assert [row.pid for row in judge(node([notebook, *own], looks)).data.processes] == [100, 101]
    alone = judge(node([notebook], {900: twice(loads())}))
    assert [(row.pid, row.rank) for row in alone.data.processes] == [(900, None)]


def test_what_helps_against_missing_rights_depends_on_the_machine() -> None:
    def fix(**of_node: object) -> str:
        denied = (look((), status="denied", reason="no"),)
        found = judge(node([process(100, 0, 1)], {100: denied}, **of_node)).findings[0].fix  # type: ignore[arg-type]
        assert found is not None
        return " | ".join((found.text, *found.commands))

    assert "sudo" in fix(user=8)
    assert "ptrace_scope" in fix(user=7, scope=1)
    assert "booted" in fix(user=0, scope=3)
    assert "SYS_PTRACE" in fix(user=0, scope=None)


def test_of_the_processes_of_a_rank_the_one_with_torch_is_the_rank() -> None:
    monitor = process(90, 0, 2, torch=False)
    own = [process(100 + rank, rank, 2) for rank in range(2)]
    looks = {90: twice(loads()), 100: twice(waits("recv", "a", 1)), 101: twice(waits("recv", "b", 2))}
    report = judge(node([monitor, *own], looks))
    assert (odd_ranks(report), ids(report)) == ([], ["all-waiting"])


def test_waiting_ranks_that_went_to_wait_again_may_only_wait_for_a_slow_one() -> None:
    first, last = twice(waits())
    woke = (replace(first, switches=10), replace(last, switches=14))
    asleep = (replace(first, switches=10), replace(last, switches=10))
    assert judge(job(woke, woke, twice(loads()))).verdict is Verdict.WARN
    assert judge(job(asleep, woke, twice(loads()))).verdict is Verdict.FAIL


def test_whoever_moves_is_not_what_a_standstill_comes_from() -> None:
    moves = twice(loads(), later=frames(("log", "/home/me/train.py", 5)))
    report = judge(job(twice(waits()), twice(loads()), moves, twice(waits())))
    assert odd_ranks(report) == [[1]]


def test_jobs_of_two_containers_that_meet_at_the_same_address_are_two() -> None:
    here = [process(100 + rank, rank, 2, network="net:[1]") for rank in range(2)]
    there = [process(200 + rank, rank, 2, network="net:[2]") for rank in range(2)]
    looks = {100: twice(waits()), 101: twice(loads()), 200: twice(waits(), later=waits(line=9)), 201: twice(waits())}
    report = judge(node([*here, *there], looks))
    assert [job.ranks for job in report.data.jobs] == [2, 2]
    assert [one.pids for one in report.data.odd] == [(101,)]


def test_a_sleeper_is_no_waiter_whatever_its_source_line_says() -> None:
    still = Standstill(1, "S", "hrtimer_nanosleep", "clock_nanosleep", "", None)
    nodes = job(twice(waits()), twice(frames(("f", "/home/me/train.py", 6)), still=still), twice(waits()))
    hinted = tuple(Watched(one.pid, one.looks, (("/home/me/train.py", 6, "comm"),)) for one in nodes.watched)
    assert odd_ranks(judge(replace(nodes, watched=hinted))) == [[1]]


def test_what_outlived_its_job_is_no_job() -> None:
    left = process(
        300, 1, 2, python=False, torch=False, comm="sleep", job={"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1"}
    )
    own = [process(100 + rank, rank, 2) for rank in range(2)]
    looks = {
        300: (look((), status="not-python", reason="sleep"),),
        100: twice(waits(), later=waits(line=9)),
        101: twice(waits()),
    }
    report = judge(node([left, *own], looks))
    assert (ids(report), report.verdict) == (["not-hung"], Verdict.OK)


def test_a_zombie_is_a_rank_that_is_gone_only_if_it_was_started_among_the_ranks() -> None:
    ranks = [process(100 + rank, rank, 4, started_s=50.0 + rank / 10) for rank in (0, 1, 3)]
    dead = process(102, state="Z", python=False, torch=False, comm="python", started_s=50.2)
    other = process(90, state="Z", python=False, torch=False, comm="git", started_s=20.0)
    looks = {one.pid: twice(waits()) for one in ranks}
    for zombies, pid in (([dead], 102), ([other, dead], 102), ([other], None)):
        report = judge(node([*ranks, *zombies], looks))
        gone = next(one for one in report.data.processes if one.rank == 2)
        assert (gone.status, gone.pid) == ("gone", pid)
