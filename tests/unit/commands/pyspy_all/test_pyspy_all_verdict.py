"""Who stands out, who does not, and when nothing can be said: on facts, without a process."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from loops import each
from pyspy_facts import SITE, frames, ids, job, judge, loads, look, node, outlier_ranks, process, twice, waits
from trace_facts import at_futex, owned, receives
from trace_facts import sleeps as sleeps_at

from distdiag.facts.network.socket_owners import Network
from distdiag.facts.process.activity import Activity, Moved
from distdiag.facts.process.blocked_threads import Blocked
from distdiag.facts.process.procs import Standstill
from distdiag.facts.stacks.stack_types import Frame, Thread
from distdiag.jobs.collect import Watched
from distdiag.jobs.part import SourceEnd
from distdiag.report import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.facts.stacks.stack_types import Sample

NOT_IN = "not-in-collective"


def test_whoever_is_not_in_communication_stands_out_though_it_computes() -> None:
    """It may be an endless loop or an evaluation: busy, however long the others have waited."""
    for apart_s in (1.0, 60.0):
        stacks = [twice(waits(), apart_s=apart_s) for _ in range(3)]
        report = judge(job(*stacks, twice(loads(), cpu=0.9, apart_s=apart_s)))
        assert (outlier_ranks(report), ids(report), report.verdict) == ([[3]], ["busy-rank"], Verdict.WARN)
        assert [one.outlier for one in report.data.groups] == ["straggler", ""]
        assert report.data.outliers[0].kind == "straggler"
        assert report.summary == (
            "rank 3 (n1, pid 103) is busy outside of the collective: `load_batch` train.py:26, computing (90% of a "
            "core, on the same line in each sample)"
        )


def test_a_rank_at_which_nothing_moves_is_stuck_once_the_others_have_waited_for_long() -> None:
    for apart_s, found in ((4.0, ("slow", "straggler", Verdict.WARN)), (6.0, (NOT_IN, "stuck", Verdict.FAIL))):
        waiting = twice(waits(), apart_s=apart_s)
        report = judge(job(waiting, twice(loads(), apart_s=apart_s), waiting))
        assert (ids(report), report.data.outliers[0].kind, report.verdict) == ([found[0]], *found[1:])


def test_pipeline_stages_that_all_wait_for_a_neighbour_are_not_blamed() -> None:
    stages = [twice(waits("recv", f"stage_{rank}", rank)) for rank in range(4)]
    report = judge(job(*stages))
    assert (outlier_ranks(report), ids(report), report.verdict) == ([], ["unknown"], Verdict.UNKNOWN)


def test_two_against_two_in_different_collectives_is_a_tie() -> None:
    report = judge(job(*[twice(waits("broadcast", "a", 1))] * 2, *[twice(waits())] * 2))
    assert (outlier_ranks(report), report.verdict) == ([], Verdict.UNKNOWN)
    assert "`broadcast` called from `a`" in report.summary
    assert "`all_reduce` called from `train_step`" in report.summary


@pytest.mark.parametrize(
    ("operation", "groups", "outliers"),
    [("barrier", 1, [[5]]), ("barrier", 3, []), ("barrier", 0, []), ("all_reduce", 1, [])],
    ids=["one group", "several groups", "groups not known", "the same operation"],
)
def test_the_one_in_another_collective_is_named_only_where_the_group_must_be_the_same(
    operation: str, groups: int, outliers: list[list[int]]
) -> None:
    other = twice(waits(operation, "evaluate", 70), groups=groups)
    report = judge(job(*[twice(waits(), groups=groups)] * 5, other))
    assert outlier_ranks(report) == outliers
    assert report.verdict is (Verdict.FAIL if outliers else Verdict.UNKNOWN)
    assert "`evaluate` train.py:70" in report.summary
    assert "`train_step` train.py:25" in report.summary


def test_counters_of_ranks_at_different_places_are_shown_and_decide_nothing() -> None:
    stacks = [twice(waits(line=25 + rank % 2), counters={"step": 5 - (rank == 1)}, groups=3) for rank in range(4)]
    report = judge(job(*stacks))
    assert (outlier_ranks(report), report.verdict) == ([], Verdict.UNKNOWN)
    assert report.findings[0].evidence == ("rank 1: step 4", "ranks 0,2-3: step 5")
    assert "3 process groups" in report.findings[0].detail


@each(
    "calls, circle",
    [
        ([("recv", 1), ("recv", 0)], [0, 1]),
        ([("send", 1), ("send", 2), ("send", 0), ("recv", 0)], [0, 1, 2]),
        ([("send", 1), ("recv", 0)], []),
        ([("recv", 1), ("recv", 2), ("recv", None)], []),
        ([("send", 1), ("recv", 2), ("recv", 1)], [1, 2]),
    ],
)
def test_ranks_that_wait_for_each_other_are_named(calls: list[tuple[str, int | None]], circle: list[int]) -> None:
    report = judge(job(*[twice(waits(operation, "exchange", 9), peer=peer) for operation, peer in calls]))
    assert report.verdict is (Verdict.FAIL if circle else Verdict.UNKNOWN)
    assert sorted(rank for ranks in outlier_ranks(report) for rank in ranks) == circle
    if circle:
        assert list(report.findings[0].where.ranks) == circle
        assert f"in `{calls[circle[0]][0]}` " in report.summary


def test_waiting_ranks_that_moved_are_not_hung() -> None:
    moved = twice(waits(line=25), later=waits(line=31))
    report = judge(job(moved, moved, twice(loads())))
    assert (outlier_ranks(report), ids(report), report.verdict) == ([], ["not-hung"], Verdict.OK)


def test_most_ranks_compute_and_one_is_early() -> None:
    computing = twice(frames(("forward", "/home/me/model.py", 5)), cpu=1.0)
    report = judge(job(computing, computing, computing, twice(waits())))
    # That they ever end is not seen.
    assert (outlier_ranks(report), report.verdict) == ([], Verdict.UNKNOWN)
    assert report.summary == (
        "cannot decide: most ranks are outside of the collective: ranks 0-2 have computed at `forward` model.py:5 for "
        "all of 6.0 s; rank 3: `train_step` train.py:25 (in `all_reduce`), for 6.0 s; either a long operation or a "
        "loop that does not end"
    )
    goes_on = twice(frames(("forward", "/home/me/model.py", 5)), later=frames(("forward", "/home/me/model.py", 6)))
    assert judge(job(computing, computing, goes_on, twice(waits()))).verdict is Verdict.OK


def sampled(waiting: str) -> tuple[Sample, ...]:
    """Write the samples of a rank that trains: w waits, c computes, b waits in backward, B computes there."""
    stacks = {
        "w": (waits(), "S"),
        "c": (frames(("augment", "/home/me/data.py", 7)), "R"),
        "b": (frames(("_engine_run_backward", SITE + "torch/autograd/graph.py", 979)), "S"),
        "B": (frames(("_engine_run_backward", SITE + "torch/autograd/graph.py", 979)), "R"),
    }
    return tuple(
        look(stacks[letter][0], state=stacks[letter][1], at_s=number / 2, counters={"step": number})
        for number, letter in enumerate(waiting)
    )


@each(
    "samples, slow",
    [
        (["w" * 18 + "cc", "c" * 16 + "wwww", "b" * 15 + "c" * 5, "wb" * 10], [[1]]),
        (["w" * 18 + "cc", "B" * 18 + "bw", "b" * 15 + "c" * 5, "wb" * 10], [[1]]),
        (["wc" * 10, "wc" * 10, "cw" * 10, "w" * 8 + "c" * 12], []),
        (["w" * 20, "w" * 11 + "c" * 9, "w" * 15 + "b" * 5, "wb" * 10], [[1]]),
        (["w" * 15 + "c" * 5, "w" * 7 + "c" * 13, "w" * 14 + "c" * 6, "w" * 17 + "c" * 3], []),
        (["w" * 20, "c" * 20, "c" * 20, "w" * 20], []),
        (["w" * 14, "c" * 14, "w" * 14, "w" * 14], []),
        (["c" * 20, "c" * 20, "c" * 20, "c" * 19 + "w"], []),
    ],
)
def test_the_rank_of_a_running_job_that_hardly_waits_holds_up_the_others(
    samples: list[str], slow: list[list[int]]
) -> None:
    report = judge(job(*map(sampled, samples)), samples=len(samples[0]), interval_s=0.5)
    assert (outlier_ranks(report), report.verdict) == (slow, Verdict.WARN if slow else Verdict.OK)
    if slow:
        assert report.summary.startswith("rank 1 (n1, pid 101) is slower than the others, in ")
        assert "Ranks 0,2-3 wait for it in " in report.findings[0].detail


def test_samples_of_one_step_count_once() -> None:
    """What twenty samples of twenty steps show, twenty samples of ten steps do not."""
    ranks = [sampled(each) for each in ("w" * 20, "w" * 11 + "c" * 9, "w" * 15 + "b" * 5, "wb" * 10)]
    halved = [
        tuple(
            look(one.threads[0].frames, state=one.state, at_s=one.at_s, counters={"step": number // 2})
            for number, one in enumerate(samples)
        )
        for samples in ranks
    ]
    for samples, slow in ((ranks, [[1]]), (halved, [])):
        assert outlier_ranks(judge(job(*samples), samples=20, interval_s=0.25)) == slow


def test_of_ranks_that_are_all_still_importing_nobody_stands_out() -> None:
    importing = frames(
        ("<module>", SITE + "torch/nn/modules/rnn.py", 3),
        ("_call_with_frames_removed", "<frozen importlib._bootstrap>", 241),
    )
    elsewhere = frames(
        ("<module>", SITE + "torch/__init__.py", 3), ("_find_and_load", "<frozen importlib._bootstrap>", 1027)
    )
    report = judge(job(*[twice(importing, cpu=0.1)] * 3, twice(elsewhere, cpu=0.1)))
    assert (outlier_ranks(report), ids(report)) == ([], ["unknown"])
    assert {group.class_ for group in report.data.groups} == {"import"}


def test_a_rank_that_imports_while_the_others_wait_for_it_stands_out() -> None:
    importing = frames(
        ("get_data", "<frozen importlib._bootstrap_external>", 1073),
        ("_find_and_load", "<frozen importlib._bootstrap>", 1027),
    )
    report = judge(job(*[twice(waits("init_process_group", "main", 3))] * 3, twice(importing)))
    assert (outlier_ranks(report), report.data.outliers[0].class_) == ([[3]], "import")


def test_who_waits_for_its_gpu_may_wait_for_a_collective_on_it() -> None:
    """NCCL's calls return at once: the other ranks are at the next line that needs the result."""
    stands = twice(frames(("train_step", "/home/me/train.py", 27)), state="R", cpu=1.0)
    nodes = job(stands, stands, stands, twice(loads()))
    hinted = tuple(
        Watched(one.pid, one.samples, (("/home/me/train.py", 27, "gpu"),) if one.pid < 103 else ())
        for one in nodes.watched
    )
    report = judge(replace(nodes, watched=hinted))
    assert outlier_ranks(report) == [[3]]
    assert report.findings[0].detail == "Ranks 0-2 have waited for 6.0 s for their GPUs at `train_step` train.py:27."


def test_a_work_that_is_waited_for_has_no_frame_of_its_own() -> None:
    nodes = job(*[twice(frames(("train_step", "/home/me/train.py", 27)))] * 2, twice(loads()))
    hinted = tuple(Watched(one.pid, one.samples, (("/home/me/train.py", 27, "comm"),)) for one in nodes.watched)
    report = judge(replace(nodes, watched=hinted))
    assert outlier_ranks(report) == [[2]]
    assert "Ranks 0-1 have waited for 6.0 s in `Work.wait` called from `train_step`" in report.findings[0].detail


def test_counters_decide_by_the_outer_loop_first() -> None:
    stacks = [
        twice(waits(), counters={"epoch": epoch, "step": step}) for epoch, step in ((2, 0), (2, 0), (1, 900), (2, 0))
    ]
    report = judge(job(*stacks))
    assert (outlier_ranks(report), ids(report)) == ([[2]], ["behind"])
    assert "epoch 1, step 900" in report.summary


def test_who_waits_for_a_rank_outside_is_no_culprit_and_ranks_in_two_places_have_a_finding_each() -> None:
    reads = twice(frames(("fetch", "/home/me/train.py", 30)), still=Standstill(1, "S", "", "recvfrom", "", 60.0))
    sleeps = twice(loads(), still=Standstill(1, "S", "", "clock_nanosleep", "", 60.0))
    facts = replace(
        job(twice(waits()), reads, sleeps, twice(waits())),
        ended=(SourceEnd("stacks", 1.0), SourceEnd("waits", 1.0)),
        networks=(Network("", ("10.0.0.1",), owned((101, 102))),),
    )
    blocked = {100: at_futex(100), 101: receives(101, 102), 102: sleeps_at(102), 103: at_futex(103)}
    known = tuple(Blocked(pid, "S", None, (each,), ()) for pid, each in blocked.items())
    assert outlier_ranks(judge(replace(facts, blocked=known))) == [[2]]
    report = judge(facts)
    assert (outlier_ranks(report), ids(report)) == ([[1], [2]], [NOT_IN, NOT_IN])
    assert [one.where.ranks for one in report.findings] == [(1,), (2,)]


def test_who_has_waited_for_a_moment_only_may_wait_for_a_slow_step() -> None:
    def at(stack: tuple[Frame, ...], since_s: float) -> tuple[Sample, ...]:
        return twice(stack, apart_s=1.0, still=Standstill(1, "S", "", "futex", "", since_s))

    assert judge(job(at(waits(), 60.0), at(loads(), 60.0), at(waits(), 3.0))).verdict is Verdict.FAIL
    for waited_s, stuck_s in ((3.0, 60.0), (60.0, 3.0)):
        report = judge(job(at(waits(), 2.0), at(loads(), stuck_s), at(waits(), waited_s)))
        assert (outlier_ranks(report), ids(report), report.verdict) == ([[1]], ["slow"], Verdict.WARN)
    fix = report.findings[0].fix
    assert fix is not None
    assert (fix.text, fix.commands) == (
        "next: rerun in a minute: if the rank is still there, it is stuck",
        ("distdiag hang",),
    )


CHILD = Moved("cpu", 900, "python", "child", "eval.py", 5.4)
THREAD = Moved("cpu", 101, "python", "self", "uploader", 3.0)


@pytest.mark.parametrize(
    ("moved", "call", "level", "detail"),
    [
        ((CHILD,), "wait4", "warn", "Its child eval.py (pid 900) computes (90 % of a core). Ranks 0,2 have waited"),
        ((THREAD,), "futex", "warn", "Its thread uploader uses 50 % of a core. Ranks 0,2 have waited"),
        ((), "wait4", "fail", "Ranks 0,2 have waited"),
        # A thread in a sleep waits for no other one; that a monitor runs beside it is no work.
        ((THREAD,), "clock_nanosleep", "fail", "Ranks 0,2 have waited"),
    ],
    ids=["a child", "a thread", "nothing", "a thread beside a sleep"],
)
def test_who_waits_for_a_child_or_a_thread_that_moves_is_busy(
    moved: tuple[Moved, ...], call: str, level: str, detail: str
) -> None:
    seen = tuple(
        replace(each, switches=7) for each in twice(loads(), still=Standstill(1, "S", "do_wait", call, "", 60.0))
    )
    facts = job(waiting := twice(waits(), still=Standstill(1, "S", "", "futex", "", 60.0)), seen, waiting)
    watched = [replace(one, activity=Activity(one.pid, 6.0, moved)) if one.pid == 101 else one for one in facts.watched]
    report = judge(replace(facts, watched=tuple(watched)))
    assert (outlier_ranks(report), [one.level for one in report.findings]) == ([[1]], [level])
    assert ids(report) == ["busy-rank" if level == "warn" else NOT_IN]
    assert report.findings[0].detail.startswith(detail)


def test_ranks_that_left_while_the_last_one_still_writes_are_not_blamed() -> None:
    own = [process(100 + rank, rank, 3) for rank in (0,)]
    report = judge(node(own, {100: twice(loads(), cpu=0.2)}))
    assert (outlier_ranks(report), ids(report), report.verdict) == ([], ["unknown"], Verdict.UNKNOWN)
    assert report.summary == (
        "cannot decide: ranks 1-2 (n1) exited, and no rank waits for them; either the job is ending or they failed, "
        "and the others have not noticed yet"
    )


def test_a_pid_is_only_given_to_kill_on_its_own_host() -> None:
    stopped = twice(waits(), state="T", status="stopped", reason="stopped (SIGSTOP or a suspended job)")
    one, two = ([process(pid, rank, 4) for pid, rank in own] for own in (((100, 0), (101, 1)), ((100, 2), (103, 3))))
    report = judge(
        node(one, {100: stopped, 101: twice(waits())}, "n1"), node(two, {100: twice(waits()), 103: stopped}, "n2")
    )
    assert outlier_ranks(report) == [[0, 3]]
    assert report.findings[0].fix is not None
    assert report.findings[0].fix.commands == ("kill -CONT 100  # on n1", "kill -CONT 103  # on n2")


def test_a_stopped_rank_stands_out_wherever_it_stands() -> None:
    stopped = twice(waits(), state="T", status="stopped", reason="stopped (SIGSTOP or a suspended job)")
    report = judge(job(twice(waits()), stopped, twice(waits())))
    assert outlier_ranks(report) == [[1]]
    fix = report.findings[0].fix
    assert fix is not None
    assert fix.commands == ("kill -CONT 101",)


def test_a_rank_that_could_not_be_read_is_not_blamed_and_the_rest_not_cleared() -> None:
    report = judge(job(twice(waits()), (look((), status="denied", reason="another user"),), twice(waits())))
    assert (outlier_ranks(report), ids(report), report.verdict) == ([], ["unreadable"], Verdict.UNKNOWN)


def test_a_missing_local_rank_is_gone() -> None:
    own = [process(100 + rank, rank, 4) for rank in (0, 1, 3)]
    report = judge(node(own, {one.pid: twice(waits()) for one in own}))
    assert (outlier_ranks(report), ids(report)) == ([[2]], ["exited"])
    assert report.verdict is Verdict.FAIL


def test_ranks_of_other_hosts_are_not_gone_only_not_seen() -> None:
    own = [process(100 + rank, rank, 4, local=False) for rank in (0, 1)]
    report = judge(node(own, {one.pid: twice(waits()) for one in own}))
    assert (outlier_ranks(report), ids(report), report.verdict) == ([], ["unseen"], Verdict.UNKNOWN)
    assert "ranks 2-3 of 4 not found on n1: exited, or on other hosts" in report.summary


def test_what_the_odd_ones_share_is_said() -> None:
    def host(name: str, first: int, stuck: int) -> object:
        own = [process(100 + rank, rank, 8, local=False) for rank in range(first, first + 4)]
        own = [
            replace(one, place=replace(one.place, local_rank=i)) for i, one in enumerate(own) if one.place is not None
        ]
        return node(own, {one.pid: twice(loads() if i == stuck else waits()) for i, one in enumerate(own)}, name)

    report = judge(host("n1", 0, 2), host("n2", 4, 2))  # type: ignore[arg-type]
    assert outlier_ranks(report) == [[2, 6]]
    assert report.findings[0].detail.endswith("What the stuck ranks have in common: all have local rank 2.")


def test_a_worker_in_the_kernel_is_named_with_its_file_and_for_how_long() -> None:
    waiting = frames(
        ("select", "/usr/lib/python3.11/selectors.py", 415),
        ("get", "/usr/lib/python3.11/multiprocessing/queues.py", 113),
        ("_try_get_data", SITE + "torch/utils/data/dataloader.py", 1251),
        ("train", "/home/me/train.py", 20),
    )
    worker = process(201, 1, 2, kind="data-worker", above=(101, 1000, 1), parent=101)
    reads = (("__getitem__", "/home/me/data.py", 12), ("fetch", SITE + "torch/utils/data/_utils/fetch.py", 52))
    loop = ("_worker_loop", SITE + "torch/utils/data/_utils/worker.py", 300)
    still = Standstill(201, "D", "folio_wait", "pread64", "/data/x", 214.2)
    looks = {100: twice(waits()), 101: twice(waiting), 201: (look(frames(*reads, loop), state="D", still=still),)}
    report = judge(node([process(100, 0, 2), process(101, 1, 2), worker], looks))
    assert outlier_ranks(report) == [[1]]
    assert (
        "waiting for its DataLoader worker 201, which is in `__getitem__` data.py:12, reads /data/x (D state 214 s)"
        in report.summary
    )
    assert ids(report) == ["data-loading"]
    fix = report.findings[0].fix
    assert fix is not None
    assert fix.commands == ("distdiag trace blocked --pid 201",)


def test_the_gil_is_held_by_another_thread() -> None:
    still = Standstill(1, "S", "futex_wait", "futex", "", None)
    held = twice(frames(("collect", "/home/me/stats.py", 4)), still=still, gil_holder=99)
    report = judge(job(twice(waits()), held, twice(waits())))
    assert report.data.outliers[0].class_ == "gil"
    assert "waiting for the GIL" in report.summary


def test_a_thread_that_waits_and_never_releases_the_gil() -> None:
    still = Standstill(1, "S", "futex_wait", "futex", "", None)
    held = twice(frames(("close", "/home/me/train.py", 4)), still=still, gil_holder=1)
    report = judge(job(twice(waits()), held, twice(waits())))
    assert report.data.outliers[0].class_ == "gil"
    assert "holds the GIL while it waits for another thread" in report.summary
    released = twice(frames(("close", "/home/me/train.py", 4)), still=still)
    assert judge(job(twice(waits()), released, twice(waits()))).data.outliers[0].class_ == "python"


@each(
    "inner, expected",
    [
        ((("barrier", SITE + "torch/distributed/distributed_c10d.py", 1),), "communication wait"),
        ((("destroy_process_group", SITE + "torch/distributed/distributed_c10d.py", 1),), "teardown"),
        ((("_get", "torch/distributed/rendezvous.py", 1),), "communication wait"),
        (
            (("wait", "/usr/lib/python3.11/threading.py", 1), ("next", SITE + "torch/utils/data/dataloader.py", 1)),
            "data loading",
        ),
        ((("wait", "/usr/lib/python3.11/threading.py", 1),), "lock"),
        # Below a collective of FSDP2 and DTensor torch calls itself; so it does while it traces a model to compile.
        (
            (
                ("OpOverloadPacket.__call__", SITE + "torch/_ops.py", 1269),
                ("wait_tensor", SITE + "torch/distributed/_functional_collectives.py", 150),
                ("clip_grad_norm_", SITE + "torch/nn/utils/clip_grad.py", 214),
            ),
            "communication wait",
        ),
        (
            (
                ("create_proxy", SITE + "torch/fx/proxy.py", 1),
                ("trace", SITE + "torch/fx/experimental/proxy_tensor.py", 1),
            ),
            "compile",
        ),
        (
            (
                ("my_backend", "/home/me/backend.py", 3),
                ("_compile", SITE + "torch/_dynamo/convert_frame.py", 1),
            ),
            "compile",
        ),
        ((("readline", "/usr/lib/python3.11/cmd.py", 1), ("interaction", "/usr/lib/python3.11/pdb.py", 1)), "debugger"),
        ((("wait", SITE + "torch/utils/file_baton.py", 1), ("load", "/home/me/train.py", 3)), "lock"),
        ((("read", "/usr/lib/python3.11/ssl.py", 1), ("get", SITE + "wandb/sdk/api.py", 1)), "network"),
        ((("_save", SITE + "torch/serialization.py", 1),), "checkpoint"),
        ((("compile_fx", SITE + "torch/_inductor/compile_fx.py", 1),), "compile"),
        ((("synchronize", SITE + "torch/cuda/__init__.py", 1),), "gpu wait"),
        ((("forward", "/src/pytorch/torch/nn/modules/linear.py", 1),), "compute"),
        ((("cuStreamSynchronize", "/usr/lib/libcuda.so.535", 0), ("train", "/home/me/train.py", 3)), "gpu wait"),
        (
            (
                ("ncclGroupEnd", "libnccl.so.2", 0),
                ("all_reduce", C10D := SITE + "torch/distributed/distributed_c10d.py", 1),
            ),
            "communication wait",
        ),
        ((("c10d::nccl2::WorkNCCL::wait", "libtorch_cuda.so", 0), ("f", "/home/me/train.py", 3)), "communication wait"),
        ((("recv", SITE + "torch/distributed/_transport/_api.py", 1),), "communication wait"),
        # The names of a user's own functions decide nothing.
        ((("save_checkpoint", "/home/me/train.py", 3),), "python"),
        ((("Corpus.__getitem__", "/home/me/data.py", 3),), "python"),
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
    assert outlier_ranks(report) == [[1]]


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
    assert (outlier_ranks(report), ids(report)) == ([], ["unknown"])


def test_ranks_that_go_to_wait_again_in_a_loop_without_variables_may_only_wait_for_a_slow_one() -> None:
    """Such a loop of a script's own lines looks the same in each step."""
    still = Standstill(1, "S", "", "futex", "", 2.0)
    woke, asleep = woken(twice(waits(), still=still, cpu=1e-4), 2), woken(twice(waits(), still=still), 0)
    report = judge(job(woke, woke, twice(loads())))
    assert (ids(report), report.verdict) == (["slow"], Verdict.WARN)
    assert judge(job(asleep, woke, twice(loads()))).verdict is Verdict.FAIL
    # A tracer wakes them as well, for less time than a step takes.
    brief = woken(twice(waits(), still=still, cpu=1e-5), 2)
    assert judge(job(brief, brief, twice(loads()))).verdict is Verdict.FAIL
    # Local variables that stay the same are proof that it is the same step.
    known = tuple(with_digests(one, *[7] * 4) for one in woke)
    assert judge(job(known, known, twice(loads()))).verdict is Verdict.FAIL
    traced = tuple(replace(one, tracer=4711) for one in woke)
    assert judge(job(traced, traced, twice(loads()))).verdict is Verdict.FAIL


def with_digests(sample: Sample, *digests: int) -> Sample:
    """Give each frame, the innermost first, the checksum of its variables."""
    return replace(sample, threads=(replace(sample.threads[0], digests=digests, reader="memory"),))


def test_variables_of_the_function_that_waits_are_progress_and_those_of_a_loop_that_looks_again_are_not() -> None:
    first, last = twice(waits())
    steps = with_digests(first, 1, 2, 3, 0), with_digests(last, 1, 2, 4, 0)
    assert judge(job(steps, twice(waits()), twice(loads()))).verdict is Verdict.OK
    # Only the frames of the library differ: it may count how often it has looked.
    polls = with_digests(first, 1, 2, 3, 0), with_digests(last, 5, 6, 3, 0)
    assert judge(job(polls, polls, twice(loads()))).verdict is Verdict.FAIL
    other_reader = replace(steps[1], threads=(replace(steps[1].threads[0], reader="py-spy"),))
    assert judge(job((steps[0], other_reader), twice(waits()), twice(loads()))).verdict is Verdict.FAIL
    first, last = twice(frames(("wait_for_file", "/home/me/train.py", 8), ("prepare", "/home/me/train.py", 20)))
    for digests, verdict in (((2, 1, 0), Verdict.FAIL), ((1, 2, 0), Verdict.WARN)):
        outside = with_digests(first, 1, 1, 0), with_digests(last, *digests)
        report = judge(job(twice(waits()), outside, twice(waits())))
        assert (report.verdict, outlier_ranks(report)) == (verdict, [[1]])


def woken(seen: Sequence[Sample], times: int = 6) -> tuple[Sample, ...]:
    """Let the main thread have gone to wait so often between the samples."""
    return tuple(replace(one, switches=10 + number * times) for number, one in enumerate(seen))


def test_a_rank_that_sleeps_and_looks_again_may_be_slow_for_five_minutes() -> None:
    sleeps = Standstill(1, "S", "hrtimer_nanosleep", "clock_nanosleep", "", 0.1)
    for apart_s, verdict, found in ((200.0, Verdict.WARN, "slow"), (310.0, Verdict.FAIL, NOT_IN)):
        pauses = woken(twice(frames(("<module>", "/home/me/train.py", 9)), still=sleeps, apart_s=apart_s))
        waiting = twice(waits(), apart_s=apart_s)
        report = judge(job(waiting, pauses, waiting))
        assert (report.verdict, ids(report), outlier_ranks(report)) == (verdict, [found], [[1]])
        assert "train.py:9, polling" in report.summary
    # Where none waits for another, waking up proves neither.
    assert judge(job(pauses, pauses)).verdict is Verdict.UNKNOWN


def test_being_paused_is_no_progress() -> None:
    """Reading C frames stops a process briefly before it resumes its wait: it is still hung."""
    paused = [
        tuple(replace(one, native=True) for one in woken(twice(stack)))
        for stack in (waits(), waits(), loads(), waits())
    ]
    report = judge(job(*paused), native=True)
    assert (report.verdict, outlier_ranks(report)) == (Verdict.FAIL, [[2]])


def test_who_only_asks_again_whether_a_lock_is_free_does_not_go_on() -> None:
    baton = (("wait", SITE + "torch/utils/file_baton.py", 42), ("load", "/home/me/train.py", 3))
    seen = woken(twice(frames(*baton), still=Standstill(1, "S", "", "clock_nanosleep", "", 9.0)))
    assert judge(job(seen, seen)).verdict is Verdict.UNKNOWN


def test_waits_that_sleep_and_ask_again_are_no_progress() -> None:
    """As torch's blocking wait for NCCL: it wakes up each millisecond, and hangs all the same."""
    polls = Standstill(1, "S", "hrtimer_nanosleep", "clock_nanosleep", "", 0.001)
    report = judge(job(woken(twice(waits(), still=polls)), twice(loads()), woken(twice(waits(), still=polls))))
    assert (report.verdict, outlier_ranks(report)) == (Verdict.FAIL, [[1]])


def test_a_rank_that_a_tracer_wakes_does_not_look_again() -> None:
    """It is stuck after 5 s, as without the tracer, and not after 30."""
    sleeps = woken(twice(loads(), still=Standstill(1, "S", "", "clock_nanosleep", "", 0.5)))
    assert judge(job(twice(waits()), sleeps, twice(waits()))).verdict is Verdict.WARN
    traced = tuple(replace(one, tracer=4711) for one in sleeps)
    report = judge(job(twice(waits()), traced, twice(waits())))
    assert (report.verdict, outlier_ranks(report)) == (Verdict.FAIL, [[1]])


def test_who_runs_beside_those_that_sleep_for_long_in_a_wait_that_frames_do_not_name_is_not_ok() -> None:
    asleep = twice(frames(("exchange", "/home/me/mpi.py", 5)), still=Standstill(1, "S", "", "futex", "", 60.0))
    runs = twice(frames(("spin", "/home/me/train.py", 5)), cpu=1.0, state="R")
    assert judge(job(asleep, runs, asleep)).verdict is Verdict.UNKNOWN


def test_a_rank_that_gets_no_processor_may_only_be_slow() -> None:
    starved = twice(frames(("forward", "/home/me/train.py", 5)), cpu=0.3, state="R")
    report = judge(job(twice(waits()), starved, twice(waits())))
    assert (report.verdict, outlier_ranks(report)) == (Verdict.WARN, [[1]])
    assert "on the same line in each sample, gets 30% of a core" in report.summary


JOINS = frames(
    ("Thread._wait_for_tstate_lock", "/usr/lib/python3.11/threading.py", 1132),
    ("Thread.join", "/usr/lib/python3.11/threading.py", 1112),
)


RAY_LOOP = frames(
    ("Worker.main_loop", SITE + "ray/_private/worker.py", 1069),
    ("<module>", SITE + "ray/_private/workers/default_worker.py", 323),
)


def with_thread(stack: Sequence[Frame], name: str = "trainer", main: Sequence[Frame] = JOINS) -> tuple[Sample, ...]:
    """Let a main thread join another thread with this stack."""
    trains = Thread(7, name, False, False, "S", (*stack[:-1], Frame("train", "/home/me/train.py", 70)), ())
    return tuple(replace(one, threads=(*one.threads, trains)) for one in twice(main))


def test_where_the_main_thread_waits_for_the_one_that_trains_that_one_is_judged() -> None:
    report = judge(job(with_thread(waits()), with_thread(loads()), with_thread(waits())))
    assert (report.verdict, outlier_ranks(report)) == (Verdict.FAIL, [[1]])
    assert "`load_batch` train.py:26 (thread trainer)" in report.summary
    assert report.findings[0].detail.startswith("Ranks 0,2 have waited for 6.0 s in `all_reduce`")


def test_the_training_thread_of_a_ray_actor_is_judged_and_not_its_loop() -> None:
    ranks = [with_thread(stack, "Thread-2", RAY_LOOP) for stack in (waits(), loads(), waits())]
    report = judge(job(*ranks))
    assert (report.verdict, outlier_ranks(report)) == (Verdict.FAIL, [[1]])
    assert "`load_batch` train.py:26 (thread Thread-2)" in report.summary


def test_of_several_threads_the_one_that_began_as_those_of_the_other_ranks_is_judged() -> None:
    serves = Thread(8, "metrics", False, False, "S", frames(("serve", "/home/me/metrics.py", 3)), ())
    stuck = tuple(replace(one, threads=(*one.threads, serves)) for one in with_thread(loads()))
    report = judge(job(with_thread(waits()), stuck, with_thread(waits())))
    assert "`load_batch`" in report.summary


def test_a_main_thread_in_a_collective_is_judged_whatever_its_threads_do() -> None:
    helper = Thread(7, "prefetch", False, False, "S", loads(), ())
    waiting = tuple(replace(one, threads=(*one.threads, helper)) for one in twice(waits()))
    assert ids(judge(job(waiting, waiting))) == ["unknown"]


def test_a_look_in_the_middle_may_come_to_nothing() -> None:
    first, last = twice(waits())
    unread = replace(first, threads=(), status="timeout", at_s=0.5)
    assert outlier_ranks(judge(job((first, unread, last), twice(loads()), (first, unread, last)))) == [[1]]


def test_a_rank_that_runs_a_part_of_the_time_may_only_be_slow() -> None:
    importing = frames(("exec_module", "<frozen importlib._bootstrap_external>", 940))
    for state, cpu, level in (("R", 0.31, "warn"), ("D", 0.31, "fail"), ("R", 0.0, "fail"), ("S", 0.31, "fail")):
        seen = (look(importing), look(importing, state=state, main_cpu_s=6 * cpu, at_s=6.0))
        report = judge(job(twice(waits()), seen, twice(waits())))
        assert [one.level for one in report.findings] == [level], (state, cpu)


def test_a_compiler_that_imports_a_part_of_itself_compiles() -> None:
    stack = frames(
        ("exec_module", "<frozen importlib._bootstrap_external>", 940),
        ("_compile", SITE + "torch/_dynamo/convert_frame.py", 1),
    )
    report = judge(job(twice(waits()), twice(stack, cpu=1.0), twice(waits())))
    assert (ids(report), report.verdict, "compiling" in report.summary) == (["compile"], Verdict.WARN, True)


def test_a_rank_that_compiles_may_take_its_time_while_its_compilers_work() -> None:
    compiles = (("wait", "/usr/lib/python3.11/threading.py", 1), ("fx", SITE + "torch/_inductor/compile_fx.py", 1))
    facts = job(twice(waits()), twice(frames(*compiles)), twice(waits()))
    report = judge(facts)
    assert (ids(report), report.verdict) == ([NOT_IN], Verdict.FAIL)
    works = Activity(101, 6.0, (Moved("cpu", 900, "cc1plus", "child", "cc1plus", 5.4),))
    watched = tuple(replace(one, activity=works) if one.pid == 101 else one for one in facts.watched)
    report = judge(replace(facts, watched=watched))
    assert (ids(report), report.verdict, outlier_ranks(report)) == (["compile"], Verdict.WARN, [[1]])
    assert "compiling" in report.summary


def test_processes_without_a_rank_of_one_parent_that_talk_to_each_other_are_one_job() -> None:
    """As Ray's workers; the driver, which another program started, is none of them, nor is another group."""
    place: dict[str, Any] = {"place": None, "job": {}}
    pair, other = ("0100007F:5000>0100007F:6000",), ("0100007F:7000>0100007F:8000",)
    workers = [process(100 + number, connections=pair, **place) for number in range(2)]
    driver = process(50, parent=3, above=(3, 1), connections=pair, **place)
    alone = process(300, connections=other, **place)
    looks = {100: twice(waits()), 101: twice(loads()), 50: twice(JOINS), 300: twice(loads())}
    report = judge(node([*workers, driver, alone], looks))
    assert [one.where.pids for one in report.findings if one.level == "fail"] == [(101,)]


def test_whoever_moves_is_not_what_a_standstill_comes_from() -> None:
    moves = twice(loads(), later=frames(("log", "/home/me/train.py", 5)))
    report = judge(job(twice(waits()), twice(loads()), moves, twice(waits())))
    assert outlier_ranks(report) == [[1]]


def test_jobs_of_two_containers_that_meet_at_the_same_address_are_two() -> None:
    here = [process(100 + rank, rank, 2, network="net:[1]") for rank in range(2)]
    there = [process(200 + rank, rank, 2, network="net:[2]") for rank in range(2)]
    looks = {100: twice(waits()), 101: twice(loads()), 200: twice(waits(), later=waits(line=9)), 201: twice(waits())}
    report = judge(node([*here, *there], looks))
    assert [job.ranks for job in report.data.jobs] == [2, 2]
    assert [one.pids for one in report.data.outliers] == [(101,)]


def test_a_sleeper_is_no_waiter_whatever_its_source_line_says() -> None:
    still = Standstill(1, "S", "hrtimer_nanosleep", "clock_nanosleep", "", None)
    nodes = job(twice(waits()), twice(frames(("f", "/home/me/train.py", 6)), still=still), twice(waits()))
    hinted = tuple(Watched(one.pid, one.samples, (("/home/me/train.py", 6, "comm"),)) for one in nodes.watched)
    assert outlier_ranks(judge(replace(nodes, watched=hinted))) == [[1]]


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


def test_a_rank_that_exits_during_the_look_is_not_at_fault_for_a_wait_in_init() -> None:
    gone = look((), status="gone", reason="exited")
    report = judge(job(twice(waits("init_process_group", "main", 3)), (gone, gone)))
    assert (report.verdict, outlier_ranks(report)) == (Verdict.UNKNOWN, [])
    report = judge(job(twice(waits("all_reduce", "main", 3)), (gone, gone)))
    assert (report.verdict, outlier_ranks(report)) == (Verdict.FAIL, [[1]])


def test_a_zombie_is_a_rank_that_is_gone_only_if_it_was_started_among_the_ranks() -> None:
    ranks = [process(100 + rank, rank, 4, started_s=50.0 + rank / 10) for rank in (0, 1, 3)]
    dead = process(102, state="Z", python=False, torch=False, comm="python", started_s=50.2)
    other = process(90, state="Z", python=False, torch=False, comm="git", started_s=20.0)
    looks = {one.pid: twice(waits()) for one in ranks}
    for zombies, pid in (([dead], 102), ([other, dead], 102), ([other], None)):
        report = judge(node([*ranks, *zombies], looks))
        gone = next(one for one in report.data.processes if one.rank == 2)
        assert (gone.status, gone.pid) == ("gone", pid)
