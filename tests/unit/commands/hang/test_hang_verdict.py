"""hang: how the sources are joined, from facts as nodes report them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pyspy_facts as facts
import pytest
from hang_facts import ASLEEP, LONG, REQUEST, fix_of, judge, node, waiting, with_blocked
from loops import each
from pyspy_facts import loads, process, twice, waits
from trace_facts import at_futex, connection, sleeps, thread

from distdiag.commands.hang.diagnose import diagnose
from distdiag.commands.hang.page import content
from distdiag.commands.hang.types import Wanted
from distdiag.diagnosis.stuck.types import Source, Stand, StuckKind
from distdiag.facts.host import kernel_signs
from distdiag.facts.host.kernel_signs import KernelLine, KernelSigns, Unacknowledged
from distdiag.facts.logs import job_output
from distdiag.facts.logs.collect import NodeLogs
from distdiag.facts.logs.job_output import OutputFile
from distdiag.facts.logs.line_patterns import Patterns
from distdiag.facts.network.socket_owners import Network, Owned
from distdiag.facts.process.activity import Activity, Moved
from distdiag.facts.process.blocked_threads import Blocked
from distdiag.facts.process.procs import Proc
from distdiag.facts.process.rank_identity import Identity
from distdiag.facts.recorder.nccl_ras import RasFacts, Reading
from distdiag.facts.stacks.stack_types import Counter, Frame
from distdiag.jobs.part import SourceEnd
from distdiag.jobs.roles import of_job
from distdiag.jobs.types import NodePicture
from distdiag.knowledge.activities import activity_of
from distdiag.knowledge.known_lines import for_kernels
from distdiag.output import document
from distdiag.pages import make_page
from distdiag.report import Verdict
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from pathlib import Path

    from distdiag.facts.stacks.stack_types import Sample


def test_a_rank_outside_of_the_collective_is_named_with_who_waits_and_since_when() -> None:
    report = judge(node(waiting(), waiting(), twice(loads(), still=ASLEEP), waiting()))
    assert report.verdict is Verdict.FAIL
    assert (report.data.class_name, report.data.ranks) == (StuckKind.NOT_IN_COLLECTIVE, (2,))
    assert report.summary == "rank 2 (n1, pid 102) is not in the collective: `load_batch` train.py:26, sleeping"
    # 214 s before the first sample, and 6 s until the last.
    assert "Ranks 0-1,3 have waited for 220 s in `all_reduce`" in report.findings[0].detail
    missing = {row.source for row in report.data.sources if row.stand is Stand.NOT_AVAILABLE}
    assert missing == {Source.WAITS, Source.GPU, Source.RECORDER, Source.LOG, Source.VERSIONS, Source.START}


def test_counters_that_only_one_of_two_readers_tells_are_no_progress() -> None:
    """py-spy tells none of a module's, and either reader may take a sample: this hung job was called fine."""
    first, last = waiting()
    counters = (Counter(0, "<module>", "step", 3), Counter(1, "train", "step", 3))
    first = replace(first, threads=(replace(first.threads[0], counters=counters),))
    last = replace(last, threads=(replace(last.threads[0], counters=counters[1:]),))
    report = judge(node(waiting(), (first, last), twice(loads(), still=ASLEEP)))
    assert (report.verdict, report.data.ranks) == (Verdict.FAIL, (2,))


def test_a_thread_that_did_not_run_made_no_progress_whatever_was_read_of_its_frames() -> None:
    first, last = (replace(sample, switches=7) for sample in twice(waits(), still=LONG, groups=1))
    torn = replace(first, threads=(replace(first.threads[0], frames=waits(line=24)),))
    report = judge(node(waiting(), (torn, last), twice(loads(), still=ASLEEP)))
    assert (report.verdict, report.data.ranks) == (Verdict.FAIL, (2,))
    ran = replace(last, switches=8)
    report = judge(node(waiting(), (torn, ran), twice(loads(), still=ASLEEP)))
    assert report.verdict is Verdict.OK


def test_a_rank_that_wakes_up_is_not_called_stuck_before_the_others_have_waited_for_long() -> None:
    """Each of its steps may take longer than those of others do."""
    sleeps_a_little = facts.frames(("fetch_batch", "/home/me/train.py", 7))
    for waited_s, verdict, kind in (
        (12.0, Verdict.WARN, StuckKind.SLOW),
        (360.0, Verdict.FAIL, StuckKind.NOT_IN_COLLECTIVE),
    ):
        others = [twice(waits(), still=replace(LONG, since_s=waited_s), groups=1) for _ in range(2)]
        wakes = twice(sleeps_a_little, still=replace(ASLEEP, since_s=1.0))
        wakes = tuple(replace(each, switches=7 + 5 * number) for number, each in enumerate(wakes))
        report = judge(node(*others, wakes))
        assert (report.verdict, report.data.class_name, report.data.ranks) == (verdict, kind, (2,))


def test_ranks_that_poll_for_one_that_sleeps_for_long_do_not_make_it_slow_only() -> None:
    """As at a FileStore, where a rank that never joins is waited for."""
    polls = [
        tuple(replace(each, switches=7 + 100 * number) for number, each in enumerate(seen))
        for seen in (twice(waits(), still=replace(ASLEEP, since_s=0.01)),) * 2
    ]
    sleeps_long = facts.frames(("sit", "/home/me/train.py", 7))
    report = judge(node(*polls, twice(sleeps_long, still=replace(ASLEEP, since_s=20.0))))
    assert (report.verdict, report.data.class_name, report.data.ranks) == (
        *(Verdict.FAIL, StuckKind.NOT_IN_COLLECTIVE),
        (2,),
    )
    polls = [(first, replace(last, at_s=1.0)) for first, last in polls]
    report = judge(node(*polls, twice(sleeps_long, still=replace(ASLEEP, since_s=2.0), apart_s=1.0)))
    assert (report.verdict, report.data.class_name) == (Verdict.WARN, StuckKind.SLOW)


def test_a_rank_for_which_the_others_have_waited_for_a_moment_is_slow_and_no_failure() -> None:
    short = replace(LONG, since_s=3.0)
    sleeps = facts.frames(("pause", "/home/me/train.py", 7))
    others = [twice(waits(), still=short, groups=1, apart_s=1.0) for _ in range(2)]
    report = judge(node(*others, twice(sleeps, still=replace(ASLEEP, since_s=3.0), apart_s=1.0)))
    assert (report.verdict, report.data.class_name, report.data.ranks) == (Verdict.WARN, StuckKind.SLOW, (2,))
    assert report.findings[0].title.startswith("rank 2 (n1, pid 102) holds up the others: `pause` train.py:7")


def test_the_time_of_the_samples_counts_where_the_clock_of_a_shared_processor_is_behind() -> None:
    """The scheduler's clock leaves out what a hypervisor takes: half of 10 s on a machine that is shared by two."""

    def asleep(stack: tuple[Frame, ...], *switches: int) -> tuple[Sample, ...]:
        stills = (replace(ASLEEP, since_s=3.6), replace(ASLEEP, since_s=4.7))
        found = [facts.look(stack, at_s=at_s, still=still) for at_s, still in zip((0.0, 2.4), stills, strict=True)]
        return tuple(replace(sample, switches=count) for sample, count in zip(found, switches, strict=True))

    sits = facts.frames(("sit", "/home/me/train.py", 7))
    report = judge(node(asleep(waits(), 7, 7), asleep(waits(), 9, 9), asleep(sits, 5, 5)))
    assert (report.verdict, report.data.class_name) == (Verdict.FAIL, StuckKind.NOT_IN_COLLECTIVE)
    assert "have waited for 6.0 s" in report.findings[0].detail
    # What wakes a thread once may be a tracer.
    report = judge(node(asleep(waits(), 7, 8), asleep(waits(), 9, 10), asleep(sits, 5, 6)))
    assert (report.verdict, report.data.class_name) == (Verdict.FAIL, StuckKind.NOT_IN_COLLECTIVE)


def test_inner_counters_are_not_compared_where_the_outer_ones_are_not_known_of_all() -> None:
    inner, outer = Counter(1, "train", "step", 5), Counter(0, "<module>", "epoch", 0)

    def at(*counters: Counter) -> tuple[Sample, ...]:
        return tuple(replace(each, threads=(replace(each.threads[0], counters=counters),)) for each in waiting())

    late = replace(inner, value=0)
    report = judge(node(at(outer, inner), at(replace(outer, value=1), late), at(inner)))
    assert (report.verdict, report.data.ranks) == (Verdict.UNKNOWN, ())
    report = judge(node(at(outer, inner), at(outer, late), at(outer, inner)))
    assert (report.data.class_name, report.data.ranks) == (StuckKind.BEHIND, (1,))


def test_ranks_that_all_wait_accuse_nobody_and_the_next_experiment_is_named() -> None:
    report = judge(node(waiting(), waiting(), waiting()))
    assert report.verdict is Verdict.UNKNOWN
    assert report.data.ranks == ()
    assert len(report.data.candidates) == 2
    assert report.data.next_experiment == "distdiag flight-recorder --how"


def test_a_rank_that_proc_leaves_over_is_not_blamed_where_its_stack_is_that_of_the_others() -> None:
    """All three ask a licence server; of two /proc knows the process at its other end, of the third it does not."""
    stack = twice(facts.frames(("ask_for_licence", "/home/me/train.py", 8)), still=LONG)
    elsewhere = twice(facts.frames(("read_config", "/home/me/train.py", 9)), still=LONG)
    blocked = tuple(Blocked(each.tid, "S", None, (each,), ()) for each in (at_futex(100), at_futex(101), sleeps(102)))
    ended = (SourceEnd("stacks", 1.0), SourceEnd("waits", 1.0))
    report = judge(node(stack, stack, stack, blocked=blocked, ended=ended))
    assert (report.verdict, report.data.ranks) == (Verdict.UNKNOWN, ())
    report = judge(node(stack, stack, elsewhere, blocked=blocked, ended=ended))
    assert (report.verdict, report.data.ranks) == (Verdict.FAIL, (2,))


@pytest.mark.parametrize("moves", [True, False])
def test_a_rank_whose_child_computes_is_busy(moves: bool) -> None:
    """An evaluation in a process of its own, while the others wait in a barrier."""
    runs = facts.frames(("Popen._try_wait", "/usr/lib/python3.11/subprocess.py", 1), ("score", "/home/me/train.py", 9))
    child = Proc(pid=900, parent=102, state="R", comm="python", cpu_s=9.0, started=1)
    stack = twice(runs, still=replace(LONG, syscall="wait4", wait_channel="do_wait"))
    moved = (Moved("cpu", 900, "python", "child", "score.py", 5.4),) if moves else ()
    report = judge(
        with_blocked(
            node(waiting(), waiting(), stack), thread(102, "wait4", children=(child,)), Activity(102, 6.0, moved)
        )
    )
    assert report.data.ranks == (2,)
    if moves:
        assert (report.verdict, report.data.class_name) == (Verdict.WARN, StuckKind.BUSY)
        assert report.summary.startswith("rank 2 (n1, pid 102) runs another program: `score` train.py:9")
        assert report.findings[0].detail.startswith("Its child score.py (pid 900) computes (90 % of a core).")
        return
    assert (report.verdict, report.data.class_name) == (Verdict.FAIL, StuckKind.NOT_IN_COLLECTIVE)
    assert fix_of(report) == ("next: see what its child python waits for", ("distdiag trace blocked --pid 900",))


def test_data_that_nobody_acknowledges_is_the_network_and_no_rank() -> None:
    lost = Unacknowledged(101, "10.0.0.1:4000", "10.0.0.2:5000", 65_536, 9)
    report = judge(node(waiting(), waiting(), waiting(), kernel=(KernelSigns(unacknowledged=(lost,)),)))
    assert report.data.class_name is StuckKind.NETWORK
    assert report.findings[0].where.ranks == ()
    assert "10.0.0.2:5000" in report.findings[0].title


def test_a_rank_killed_for_lack_of_memory_is_said_to_be() -> None:
    gone = facts.look((), status="gone", reason="it ended while it was sampled")
    line = KernelLine("oom", "Out of memory: Killed process 102 (python)", 30.0, 102)
    report = judge(node(waiting(), waiting(), (gone, gone), kernel=(KernelSigns(lines=(line,)),)))
    assert (report.data.class_name, report.data.ranks) == (StuckKind.EXITED, (2,))
    assert report.findings[0].title == "rank 2 (n1, pid 102) exited, killed by the kernel: out of memory"


def test_ranks_that_leave_one_after_the_other_are_not_blamed_for_it() -> None:
    """The first to leave is gone from its node, and not seen; the next is found gone, and the last is leaving."""
    gone = facts.look((), status="gone", reason="it exited while it was sampled")
    brief = replace(LONG, since_s=0.2)
    leaving = twice(waits(), still=brief, groups=1, apart_s=1.0)
    report = judge(node(leaving, (gone, gone)))
    assert (report.verdict, report.data.ranks) == (Verdict.UNKNOWN, ())
    report = judge(node(waiting(), (gone, gone)))
    assert (report.verdict, report.data.ranks) == (Verdict.FAIL, (1,))
    unseen = [process(100, 0, 3, local=False), process(101, 1, 3, local=False)]
    samples = {100: waiting(), 101: (gone, gone)}
    found = facts.node(unseen, samples)
    ended = (SourceEnd("stacks", 1.0),)
    some = NodePicture(host=found.host, processes=found.processes, watched=found.watched, ended=ended)
    report = judge(some)
    assert (report.verdict, report.data.ranks) == (Verdict.UNKNOWN, ())


def test_a_kernel_line_about_a_process_of_nobody_in_the_job_is_no_evidence() -> None:
    line = KernelLine("segfault", "python[9]: segfault at 0", 30.0, 9)
    report = judge(node(waiting(), waiting(), kernel=(KernelSigns(lines=(line,)),)))
    assert all("segfault" not in row.says for row in report.data.sources)


@pytest.mark.parametrize(("code", "pid", "counts"), [(43, 9, False), (43, 100, True), (79, 9, True)])
def test_an_xid_counts_if_it_is_of_the_job_or_of_the_gpu(code: int, pid: int, counts: bool) -> None:
    line = KernelLine("xid", f"NVRM: Xid (PCI:0000:00:06): {code}, pid={pid}, name=python3", 30.0, pid)
    report = judge(node(waiting(), waiting(), kernel=(KernelSigns(lines=(line,)),)))
    said = next(row.says for row in report.data.sources if row.source == "kernel")
    assert ("Xid" in said) == counts, said


def test_a_job_of_which_all_ranks_have_ended_is_not_called_hung_for_it() -> None:
    gone = facts.look((), status="gone", reason="it ended while it was sampled")
    report = judge(node((gone, gone), (gone, gone)))
    assert report.verdict is Verdict.UNKNOWN
    assert report.data.ranks == ()


def test_no_job_is_unknown_and_says_what_to_give() -> None:
    report = judge(NodePicture(host="n1", processes=facts.node([], {}).processes))
    assert report.verdict is Verdict.UNKNOWN
    assert report.findings[0].id == "hang.no-job"


def ras(host: str, *lagging: int) -> RasFacts:
    """Return two readings of a communicator of 4 ranks, of which some have launched one all_reduce less."""
    ranks = [
        {
            "rank": rank,
            "host": host,
            "pid": 100 + rank,
            "cuda_dev": rank,
            "nvml_dev": rank,
            "status": {"init_state": 0, "async_error": 0, "abort_flag": False},
            "collective_counts": {"AllReduce": 5 if rank in lagging else 6},
        }
        for rank in range(4)
    ]
    comm = {"hash": "0x1", "secondary_hash": "0x2", "size": 4, "ranks_count": 4, "missing_ranks_count": 0}
    text = json.dumps({"nccl_version": "2.28.9", "communicators": [{**comm, "ranks": ranks, "missing_ranks": []}]})
    return RasFacts("localhost:28028", 2, (Reading(text, "json", 0.0), Reading(text, "json", 1.0)))


def test_ras_and_stacks_that_accuse_the_same_rank_agree() -> None:
    report = judge(node(waiting(), waiting(), twice(loads(), still=ASLEEP), waiting(), ras=(ras("n1", 2),)))
    assert (report.data.class_name, report.data.ranks) == (StuckKind.NOT_IN_COLLECTIVE, (2,))
    assert {row.source: row.stand for row in report.data.sources}[Source.RAS] is Stand.AGREES


def test_ras_decides_where_all_stacks_are_alike() -> None:
    report = judge(node(waiting(), waiting(), waiting(), waiting(), ras=(ras("n1", 3),)))
    assert (report.data.class_name, report.data.ranks) == (StuckKind.NOT_IN_COLLECTIVE, (3,))


def test_sure_sources_that_accuse_different_ranks_blame_nobody_and_name_both() -> None:
    """The sleeping rank may be late for a collective of a different group from RAS's."""
    report = judge(node(waiting(), waiting(), twice(loads(), still=ASLEEP), waiting(), ras=(ras("n1", 0),)))
    assert (report.verdict, report.data.ranks) == (Verdict.UNKNOWN, ())
    assert len(report.data.candidates) == 2
    assert report.data.candidates[0].startswith("rank 2 (n1, pid 102): ")
    assert report.data.candidates[0].endswith("(stacks)")
    assert report.data.candidates[1].startswith("rank 0 behind: 1 rank of communicator")
    assert report.data.next_experiment == "distdiag hang"
    assert {row.source: row.stand for row in report.data.sources}[Source.RAS] is Stand.DISAGREES


def test_a_single_node_whose_ras_answer_differs_does_not_change_the_verdict() -> None:
    answers = (ras("n1", 2), ras("n1", 2), ras("n1", 0))
    report = judge(node(waiting(), waiting(), twice(loads(), still=ASLEEP), waiting(), ras=answers))
    assert (report.data.class_name, report.data.ranks) == (StuckKind.NOT_IN_COLLECTIVE, (2,))


def test_a_stopped_rank_is_a_fact_whatever_another_source_says() -> None:
    held = twice(waits(), status="stopped", state="T", reason="stopped (SIGSTOP)")
    report = judge(node(waiting(), waiting(), held, waiting(), ras=(ras("n1", 0),)))
    assert (report.data.class_name, report.data.ranks) == (StuckKind.STOPPED, (2,))


def test_a_busy_rank_only_warns_and_its_activity_is_named() -> None:
    tokenizes = facts.frames(("encode_batch", facts.SITE + "tokenizers/implementations/base.py", 9))
    report = judge(node(waiting(), waiting(), twice(tokenizes, cpu=1.0, state="R")))
    assert report.verdict is Verdict.WARN
    assert report.data.class_name is StuckKind.BUSY
    assert "rank 2 (n1, pid 102) tokenizes" in report.findings[0].title


@each(
    "frame, does",
    [
        (("encode", facts.SITE + "tokenizers/base.py", 1), "tokenizes"),
        (("http_get", facts.SITE + "huggingface_hub/file_download.py", 1), "downloads"),
        (("_save", facts.SITE + "torch/serialization.py", 1), "saves a checkpoint"),
        (("_load", facts.SITE + "torch/serialization.py", 1), "loads a checkpoint"),
        (("validate_epoch", "/home/me/train.py", 1), ""),
    ],
)
def test_activities(frame: tuple[str, str, int], does: str) -> None:
    assert activity_of([Frame(*frame)]) == does


def test_a_record_of_the_kernel_log_is_parsed() -> None:
    kernel = Patterns(for_kernels())
    now_us = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
    line = kernel_signs.parse(
        f"4,1200,{now_us - 5_000_000},-;NVRM: Xid (PCI:0000:65:00): 79, pid=1, GPU has fallen off", kernel
    )
    assert line is not None
    assert (line.kind, line.pid, 4.0 < line.age_s < 60.0) == ("xid", 1, True)
    oom = kernel_signs.parse(
        f"3,7,{now_us},-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB\n DEVICE=+x", kernel
    )
    assert oom is not None
    assert (oom.kind, oom.pid) == ("oom", 4711)
    assert kernel_signs.parse(f"6,8,{now_us},-;usb 1-1: new device", kernel) is None


def test_the_last_progress_bar_of_a_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    bars = [f"\rMap:  {n}%|##   | {n}/100 [00:{n:02}<01:{60 - n:02}, 1.0 examples/s]" for n in (10, 45)]
    path.write_text("loading\n" + "".join(bars))
    bar = job_output.last_bar(OutputFile(str(path), str(path), 3), time.time())
    assert bar is not None
    assert (bar.rank, bar.name, bar.percent, bar.done, bar.total) == (3, "Map", 45, "45", "100")
    assert (bar.spent_s, bar.left_s) == (45.0, 75.0)


def job_of(ranks: int, hosts: int, stuck: int) -> list[NodePicture]:
    """Make a job of which one rank is stuck."""
    each = ranks // hosts
    waits_here, sleeps = waiting(), twice(loads(), still=ASLEEP)
    nodes = []
    for host in range(hosts):
        numbers = range(host * each, (host + 1) * each)
        processes = [process(100 + rank % each, rank, ranks, local=False) for rank in numbers]
        samples = {100 + rank % each: sleeps if rank == stuck else waits_here for rank in numbers}
        found = facts.node(processes, samples, f"n{host:04}")
        nodes.append(
            NodePicture(
                host=found.host,
                processes=found.processes,
                watched=found.watched,
                ended=(SourceEnd("stacks", 1.0), SourceEnd("ras", 1.0)),
                logs=(NodeLogs(found.host),),
            )
        )
    return nodes


def test_one_stuck_rank_of_1024_is_found() -> None:
    report = judge(*job_of(1024, 128, 777))
    assert (report.data.class_name, report.data.ranks) == (StuckKind.NOT_IN_COLLECTIVE, (777,))
    page = make_page(document(report, strict=False), content)
    assert len(page) < 400_000


def test_names_in_the_page_are_text() -> None:
    hostile = "</script><script>alert(1)</script>"
    frames = facts.frames((hostile, "/home/me/train.py", 1))
    report = judge(node(waiting(), waiting(), twice(frames, still=ASLEEP)))
    assert hostile not in make_page(document(report, strict=False), content)


def meeting(rank: int, port: int, *, at: str = "127.0.0.1", listens: bool = False, size: int = 2) -> NodePicture:
    """Make a node with one rank that waits in init_process_group, started with this MASTER_PORT."""
    torch = "/opt/venv/lib/python3.11/site-packages/torch/distributed/"
    stack = (
        Frame("_create_c10d_store", torch + "rendezvous.py", 199),
        Frame("init_process_group", torch + "distributed_c10d.py", 1892),
        Frame("<module>", "/home/me/train.py", 2),
    )
    plain = Identity("environment", rank, size, 0, None)
    names = {"MASTER_ADDR": at, "MASTER_PORT": str(port)}
    own = process(100 + rank, rank, size, place=plain, job=names)
    found = facts.node([own], {own.pid: twice(stack, still=ASLEEP)}, f"n{rank}")
    sockets = (Owned(own.pid, 9, "tcp6", "LISTEN", f"[::]:{port}", ""),) if listens else ()
    return NodePicture(
        host=found.host,
        processes=found.processes,
        watched=found.watched,
        networks=(Network("net", ("10.0.0.1",), sockets),),
        ended=(SourceEnd("stacks", 1.0),),
    )


def test_ranks_that_wait_in_different_places_are_one_job_and_none_of_them_has_exited() -> None:
    report = judge(meeting(0, 29611, listens=True), meeting(1, 29612))
    assert (report.verdict, report.data.class_name) == (Verdict.FAIL, StuckKind.RENDEZVOUS)
    assert [(job.ranks, job.world_size) for job in report.data.jobs] == [(2, 2)]
    assert "127.0.0.1:29611 for rank 0, 127.0.0.1:29612 for rank 1" in report.summary


@pytest.mark.parametrize(("listens", "at"), [(False, "127.0.0.1"), (True, "10.0.0.9")])
def test_where_rank_0_does_not_listen_or_others_look_for_another_host_it_cannot_tell(listens: bool, at: str) -> None:
    """The script may have set another port since; the rank may be of another job."""
    report = judge(meeting(0, 29611, listens=listens), meeting(1, 29612, at=at))
    assert (report.verdict, report.data.class_name) == (Verdict.UNKNOWN, StuckKind.UNKNOWN)
    assert ":29612 for rank 1" in report.summary


@pytest.mark.parametrize("others", [(0, 29612), (2, 29612)])
def test_jobs_that_start_side_by_side_are_not_one(others: tuple[int, int]) -> None:
    """The same rank twice, or a rank that a job of this size does not have."""
    report = judge(meeting(0, 29611, listens=True), meeting(*others))
    assert {job.world_size for job in report.data.jobs} == {2}
    assert len(report.data.jobs) == 2


def test_a_job_that_is_not_there_is_told_from_those_that_are() -> None:
    wanted = replace(REQUEST, wanted=Wanted(job="4711"))
    report = diagnose(wanted, Gathered(facts=[node(waiting(), waiting())]))
    assert report.verdict is Verdict.UNKNOWN
    assert report.findings[0].detail == "Jobs found: --job 10.0.0.1:29500."
    assert report.findings[0].fix is not None
    assert report.findings[0].fix.commands == ("distdiag hang --job 10.0.0.1:29500",)


def test_an_event_loop_is_no_lock() -> None:
    loop = (
        Frame("EpollSelector.select", "/usr/lib/python3.11/selectors.py", 468),
        *facts.frames(("serve", "/me/a.py", 3)),
    )
    waits_in_loop = replace(ASLEEP, syscall="epoll_wait", wait_channel="ep_poll")
    report = judge(node(waiting(), twice(loop, still=waits_in_loop), waiting()))
    assert (report.data.class_name, report.data.ranks) == (StuckKind.NOT_IN_COLLECTIVE, (1,))
    assert "waiting in an event loop" in report.summary


def test_a_rank_that_waits_at_a_socket_is_shown_with_the_command_for_its_other_end() -> None:
    at_socket = replace(ASLEEP, syscall="recvfrom", wait_channel="wait_woken", path="TCP 127.0.0.1:44869")
    uploads = facts.frames(("upload", "/home/me/train.py", 8))
    at_its_end = thread(101, "recvfrom", targets=(connection(101, "127.0.0.1:44869"),))
    report = judge(with_blocked(node(waiting(), twice(uploads, still=at_socket), waiting()), at_its_end))
    assert (report.data.class_name, report.data.ranks) == (StuckKind.NOT_IN_COLLECTIVE, (1,))
    text = "give the call a timeout; next: see which process is at the other end"
    assert fix_of(report) == (text, ("distdiag trace fds --rank 1",))


def test_job_also_looks_at_the_ranks_that_it_lacks_and_that_meet_elsewhere() -> None:
    first, second = meeting(0, 29611), meeting(1, 29612)
    own, other = first.processes.processes[0], second.processes.processes[0]
    same_host = replace(first.processes, processes=(own, other))
    assert of_job(same_host, "127.0.0.1:29611").processes == (own, other)
    assert of_job(same_host, "127.0.0.1:29611", strict=True).processes == (own,)
    again = replace(other, place=own.place)
    assert of_job(replace(same_host, processes=(own, again)), "127.0.0.1:29611").processes == (own,)
    twin = replace(again, pid=900, job=other.job)  # the other address has ranks 0 and 1: that is another job
    assert of_job(replace(same_host, processes=(own, other, twin)), "127.0.0.1:29611").processes == (own,)
