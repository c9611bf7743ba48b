"""Ranks that wait for their GPUs: they run at full speed in a library below the user's own line."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hang_facts import judge
from pyspy_facts import C10D, SITE, frames, job, loads, look, twice, waits
from trace_facts import at_futex

from distdiag.diagnosis.stuck.types import Source, Stand, StuckKind
from distdiag.facts.gpu.gpu_use import GpuReadings, GpuUse
from distdiag.facts.process.blocked_threads import Blocked
from distdiag.facts.process.procs import Standstill
from distdiag.facts.stacks.thread_places import Places, ThreadPlace
from distdiag.jobs.part import SourceEnd
from distdiag.report import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.facts.stacks.stack_types import Frame, Sample
    from distdiag.jobs.types import NodePicture

CUDA, NCCL, TORCH = "libcuda.so.550.90.07", "libnccl.so.2", "libtorch_cuda.so"
ITEM = frames(("train_step", "/home/me/train.py", 27))
BACKWARD = frames(
    ("_engine_run_backward", SITE + "torch/autograd/graph.py", 979), ("train_step", "/home/me/train.py", 28)
)
ASLEEP = Standstill(1, "S", "hrtimer_nanosleep", "clock_nanosleep", "", 60.0)


def place(*calls: str, library: str = CUDA, tid: int = 1, comm: str = "python", state: str = "R") -> ThreadPlace:
    return ThreadPlace(tid, comm, state, "perf", 30, ((library, 29), (TORCH, 1)), (library, TORCH), calls)


def spins(stack: Sequence[Frame] = ITEM, **more: object) -> tuple[Sample, ...]:
    """Sample a rank that runs at one line for 12 s: how long it did before the first sample is not known."""
    return twice(stack, **{"state": "R", "cpu": 1.0, "apart_s": 12.0, **more})  # type: ignore[arg-type]


def picture(
    stacks: Sequence[Sequence[Sample]], places: Mapping[int, Sequence[ThreadPlace]], gpus: Sequence[GpuUse] = ()
) -> NodePicture:
    """Make the facts of a node. `places`: of the threads of each rank that was located, the same in two readings."""
    facts = job(*stacks)
    watched = [
        replace(one, places=(Places(one.pid, tuple(places[one.pid - 100])),) * 2) if one.pid - 100 in places else one
        for one in facts.watched
    ]
    processes = tuple(replace(one, gpu=bool(gpus)) for one in facts.processes.processes)
    return replace(
        facts,
        processes=replace(facts.processes, processes=processes),
        watched=tuple(watched),
        blocked=tuple(Blocked(one.pid, "S", None, (at_futex(one.pid),), ()) for one in processes) if gpus else (),
        gpus=(GpuReadings(tuple(gpus)),),
        ended=(SourceEnd("stacks", 1.0), SourceEnd("gpu", 1.0)),
    )


def test_a_rank_that_sleeps_while_the_others_wait_for_their_gpus_holds_them_up() -> None:
    everywhere = {rank: (place("cudaStreamSynchronize"),) for rank in range(3)}
    report = judge(picture([spins(), spins(), spins(), twice(loads(), still=ASLEEP)], everywhere))
    assert (report.verdict, report.data.class_name, report.data.ranks) == (
        *(Verdict.FAIL, StuckKind.NOT_IN_COLLECTIVE),
        (3,),
    )
    assert report.findings[0].detail == (
        "Ranks 0-2 have waited for 12 s for their GPUs, in `cudaStreamSynchronize` at `train_step` train.py:27."
    )
    assert [row.doing for row in report.data.processes] == [*["gpu wait"] * 3, "python"]


def test_a_rank_that_computes_in_python_while_the_others_wait_for_their_gpus_is_busy() -> None:
    everywhere = {rank: (place("cudaStreamSynchronize"),) for rank in range(2)}
    report = judge(picture([spins(), spins(), spins(loads())], everywhere))
    assert (report.verdict, report.data.class_name, report.data.ranks) == (Verdict.WARN, StuckKind.BUSY, (2,))


def test_where_all_ranks_are_in_ncclCommInitRank_their_network_is_tested_next() -> None:
    everywhere = {rank: (place("ncclCommInitRank", library=NCCL, state="S"),) for rank in range(3)}
    report = judge(picture([twice(ITEM, still=ASLEEP)] * 3, everywhere))
    assert (report.verdict, report.data.ranks) == (Verdict.UNKNOWN, ())
    assert "all 3 ranks wait in `ncclCommInitRank`" in report.summary
    assert "over the interface that NCCL chose" in report.summary
    assert report.findings[0].fix is not None
    assert report.findings[0].fix.commands == ("distdiag ports",)


def test_where_all_ranks_wait_for_their_gpus_none_is_to_blame_and_the_job_is_not_fine() -> None:
    report = judge(picture([spins()] * 3, {rank: (place("cudaStreamSynchronize"),) for rank in range(3)}))
    assert (report.verdict, report.data.ranks) == (Verdict.UNKNOWN, ())
    assert report.summary.startswith(
        "cannot decide: all 3 ranks wait for their GPUs, in `cudaStreamSynchronize` at `train_step` train.py:27; "
        "either mismatched calls"
    )


def test_ranks_that_stop_at_different_lines_because_kernels_are_launched_ahead_accuse_none() -> None:
    """One of them is steps behind: its launch queue filled up earlier."""
    ahead = spins(frames(("forward", "/home/me/model.py", 5)), counters={"step": 9}, groups=1)
    behind = spins(frames(("forward", "/home/me/model.py", 70)), counters={"step": 7}, groups=1)
    launches = {rank: (place("cuLaunchKernel", "cudaLaunchKernel"),) for rank in range(4)}
    report = judge(picture([ahead, ahead, ahead, behind], launches))
    assert (report.verdict, report.data.ranks) == (Verdict.UNKNOWN, ())
    assert report.findings[0].evidence == ("rank 3: step 7", "ranks 0-2: step 9")
    assert "rank 3 for its GPU, in `cuLaunchKernel` at `forward` model.py:70" in report.summary
    assert report.findings[0].detail.startswith("Kernels are launched ahead")


def test_ranks_that_wait_for_their_gpus_between_steps_make_progress() -> None:
    steps = look(ITEM, state="R", counters={"step": 3}), look(ITEM, state="R", counters={"step": 4}, at_s=12.0)
    report = judge(picture([steps] * 2, {rank: (place("cudaStreamSynchronize"),) for rank in range(2)}))
    assert report.verdict is Verdict.OK


@pytest.mark.parametrize("library", [CUDA, "libamdhip64.so.6", "libascendcl.so"])
def test_backward_waits_for_the_gpu_where_the_thread_of_autograd_does(library: str) -> None:
    threads = place(library="libc.so.6", state="S"), place(library=library, tid=7, comm="pt_autograd_0")
    stuck = twice(loads(), still=ASLEEP)
    report = judge(picture([twice(BACKWARD, still=ASLEEP)] * 2 + [stuck], dict.fromkeys(range(2), threads)))
    assert (report.verdict, report.data.ranks) == (Verdict.FAIL, (2,))
    assert [row.doing for row in report.data.processes] == ["gpu wait", "gpu wait", "python"]
    assert report.data.processes[0].gpu == library


def test_backward_on_a_processor_is_no_wait() -> None:
    threads = place(library="libc.so.6", state="S"), place(library="libmkl_core.so", tid=7, comm="pt_autograd_0")
    stacks = [twice(waits()), twice(BACKWARD, still=replace(ASLEEP, syscall="futex"))]
    report = judge(picture(stacks, {1: threads}))
    assert [row.doing for row in report.data.processes] == ["communication wait", "compute"]


def test_a_rank_that_joins_no_communicator_is_missed_by_those_that_wait_in_its_init() -> None:
    """NCCL sleeps in a loop here, visible neither in Python frames nor in the thread's state."""
    first = frames(("train_step", "/home/me/train.py", 27))
    inits = place("ncclCommInitRankConfig", library=NCCL, state="S")
    report = judge(
        picture([twice(first, still=ASLEEP)] * 2 + [twice(loads(), still=ASLEEP)], {0: (inits,), 1: (inits,)})
    )
    assert (report.verdict, report.data.ranks) == (Verdict.FAIL, (2,))
    assert "in `ncclCommInitRankConfig` called from `train_step` train.py:27" in report.findings[0].detail


def test_a_rank_that_loads_kernels_is_busy() -> None:
    calls = ("cudaStreamSynchronize", "cudaStreamSynchronize", "cuModuleLoadData")
    report = judge(picture([spins() for _ in calls], {rank: (place(call),) for rank, call in enumerate(calls)}))
    assert (report.verdict, report.data.class_name, report.data.ranks) == (Verdict.WARN, StuckKind.BUSY, (2,))
    assert "(in `cuModuleLoadData`)" in report.summary


def test_a_python_frame_of_a_collective_says_more_than_the_library() -> None:
    """barrier() waits for its stream: its name is worth more than that of the driver's function."""
    barrier = frames(("barrier", C10D, 4800), ("train", "/home/me/train.py", 40))
    everywhere = {rank: (place("cudaStreamSynchronize"),) for rank in range(2)}
    report = judge(picture([spins(barrier)] * 2, everywhere))
    assert {row.doing for row in report.data.processes} == {"communication wait"}
    assert "both ranks wait in `barrier` called from `train` train.py:40" in report.summary


def test_a_thread_that_is_only_now_and_then_in_a_gpu_library_does_not_wait_there() -> None:
    passing = replace(place(), inner=((CUDA, 10), (TORCH, 20)))
    elsewhere = replace(place(), inner=((TORCH, 30),))
    for last in (passing, elsewhere):
        facts = picture([spins()] * 2, {0: (place(),), 1: (place(),)})
        readings = [(Places(one.pid, (place(),)), Places(one.pid, (last,))) for one in facts.watched]
        watched = tuple(replace(one, places=own) for one, own in zip(facts.watched, readings, strict=True))
        report = judge(replace(facts, watched=watched))
        assert {row.doing for row in report.data.processes} == {"compute"}


@pytest.mark.parametrize("ran_first", [True, False])
def test_a_thread_that_got_no_processor_in_one_reading_is_where_the_other_saw_it(ran_first: bool) -> None:
    unseen = replace(place(), method="", samples=0, inner=(), libraries=(), calls=())
    facts = picture([spins()] * 2, {0: (place(),), 1: (place(),)})
    both = (place(), unseen) if ran_first else (unseen, place())
    watched = tuple(replace(one, places=tuple(Places(one.pid, (each,)) for each in both)) for one in facts.watched)
    assert {row.doing for row in judge(replace(facts, watched=watched)).data.processes} == {"gpu wait"}


def load(rank: int, busy: int, power_w: float) -> GpuUse:
    return GpuUse(rank, f"GPU-{rank}", (busy, busy), (power_w, power_w), 700.0, 2**30, (100 + rank,))


def test_of_ranks_that_all_wait_the_one_whose_gpu_is_idle_has_not_launched_the_collective() -> None:
    everywhere = {rank: (place("cudaStreamSynchronize"),) for rank in range(4)}
    gpus = [load(rank, 0 if rank == 2 else 100, 75.0 if rank == 2 else 130.0) for rank in range(4)]
    report = judge(picture([spins()] * 4, everywhere, gpus))
    assert (report.verdict, report.data.class_name, report.data.ranks) == (
        *(Verdict.FAIL, StuckKind.NOT_IN_COLLECTIVE),
        (2,),
    )
    assert "the GPU of rank 2" in report.summary
    # A GPU that could not be read may be idle as well.
    report = judge(picture([spins()] * 4, everywhere, gpus[:3]))
    assert (report.verdict, report.data.ranks) == (Verdict.UNKNOWN, ())


def test_an_idle_gpu_and_stacks_that_accuse_the_same_rank_agree_and_else_none_is_blamed() -> None:
    everywhere = {rank: (place("cudaStreamSynchronize"),) for rank in range(3)}
    stacks = [spins(), spins(), spins(), twice(loads(), still=ASLEEP)]
    for idle, verdict, ranks, stand in (
        (3, Verdict.FAIL, (3,), Stand.AGREES),
        (0, Verdict.UNKNOWN, (), Stand.DISAGREES),
    ):
        gpus = [load(rank, 0 if rank == idle else 100, 75.0 if rank == idle else 130.0) for rank in range(4)]
        report = judge(picture(stacks, everywhere, gpus))
        assert (report.verdict, report.data.ranks) == (verdict, ranks)
        assert {row.source: row.stand for row in report.data.sources}[Source.GPU] is stand
    assert report.summary.startswith("the sources disagree: rank 3 (n1, pid 103): `load_batch` train.py:26, sleeping")


def test_gpus_that_are_all_busy_accuse_none() -> None:
    everywhere = {rank: (place("cudaStreamSynchronize"),) for rank in range(3)}
    report = judge(picture([spins()] * 3, everywhere, [load(rank, 100, 130.0) for rank in range(3)]))
    assert (report.verdict, report.data.ranks) == (Verdict.UNKNOWN, ())
    assert "the connections between the ranks or a GPU" in report.summary


def test_a_rank_that_hardly_gets_to_run_is_not_accused_as_no_sample_can_show_whether_it_waits_for_its_gpu() -> None:
    waiting = {rank: (place("cudaStreamSynchronize"),) for rank in range(2)}
    report = judge(picture([spins(), spins(), spins(cpu=0.01)], waiting, [load(rank, 100, 300.0) for rank in range(3)]))
    assert (report.verdict, report.data.ranks) == (Verdict.UNKNOWN, ())
    assert "rank 2 hardly got to run, and may be waiting for a GPU" in report.summary
    assert "either a rank that works too slowly or a collective or a GPU" in report.summary
    assert report.findings[0].fix is not None
    assert report.findings[0].fix.commands == ("ps -eo pid,user,ni,pcpu,args --sort=-pcpu | head",)
