"""trace blocked: accused ranks from constructed facts; and conclusions to avoid."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from loops import each
from pyspy_facts import look, node, process
from trace_facts import (
    BOTH,
    NET,
    REQUEST,
    all_threads,
    at_futex,
    at_lock,
    connection,
    judge,
    judge_nodes,
    owned,
    reads_pipe,
    receives,
    sleeps,
    thread,
)

from distdiag.commands.trace.blocked.subcommand import _chosen
from distdiag.commands.trace.ranks import Wanted, choose, none_found
from distdiag.errors import UsageError
from distdiag.facts.network.socket_owners import Network, Owned, PeerProcess
from distdiag.facts.process.blocked_threads import Blocked, Target, Thread
from distdiag.facts.process.descriptors import Descriptor
from distdiag.options import parse_ranks

if TYPE_CHECKING:
    from distdiag.commands.trace.blocked.types import TraceBlocked
    from distdiag.jobs.types import NodePicture
    from distdiag.report import Report

FIFO = Target(5, "r", Descriptor(5, "fifo", "/data/fifo", "r", 0))


@each(
    "rank_1, kind, cause, words",
    [
        (sleeps(101, 214.0), "not-in-collective", "sleep", "sleeps (clock_nanosleep, 214 s)"),
        (sleeps(101, state="T"), "stopped", "stopped", "is stopped (T, clock_nanosleep, 60 s)"),
        (
            thread(101, "openat", state="D", path="/nfs/x"),
            "storage",
            "storage",
            "waits for the file system of /nfs/x (D, openat, ",
        ),
        (
            thread(101, state="D", wait_channel="folio_wait_bit"),
            "storage",
            "storage",
            "waits for a file system, in folio_wait_bit",
        ),
        (
            thread(101, "ioctl", state="D", path="/dev/nvidia0"),
            "device-stuck",
            "kernel",
            "waits for the driver of /dev/nvidia0",
        ),
        (
            thread(101, "read", targets=(FIFO,)),
            "not-in-collective",
            "file",
            "reads /data/fifo, which no other process has open for writing",
        ),
        (thread(101, "wait4"), "not-in-collective", "child", "waits for a child"),
    ],
)
def test_the_rank_that_holds_up_another_is_named_first(rank_1: Thread, kind: str, cause: str, words: str) -> None:
    report = judge({100: receives(100, 101), 101: rank_1}, sockets=owned((100, 101)))
    (found,) = report.findings
    assert (found.id, report.exit_code()) == (f"hang.{kind}", 1)
    assert found.fix is not None
    assert found.title.startswith(f"rank 1 (n1, pid 101) {words}")
    assert found.title.endswith("; rank 0 waits for its data: recvfrom on 10.0.0.1:101")
    assert (found.where.ranks, found.where.pids) == ((1,), (101,))
    assert [(row.rank, row.kind, row.last.peer_rank) for row in report.data.threads] == [
        (0, "peer", 1),
        (1, cause, None),
    ]


def test_who_has_stopped_is_told_how_to_let_it_go_on() -> None:
    report = judge({100: receives(100, 101), 101: sleeps(101, state="T")}, sockets=owned((100, 101)))
    assert report.findings[0].fix is not None
    assert report.findings[0].fix.commands == ("kill -CONT 101",)


def assert_accuses_none(report: Report[TraceBlocked], words: str = "") -> None:
    """No stack was read, so that only /proc is judged: its waits are shown, and decide nothing."""
    (found,) = report.findings
    assert (found.id, report.verdict, report.exit_code()) == ("hang.unreadable", "unknown", 3)
    assert words in found.detail


def test_what_has_not_stood_for_long_accuses_none() -> None:
    report = judge({100: receives(100, 101, since_s=2.0), 101: sleeps(101, 60.0)}, sockets=owned((100, 101)))
    assert_accuses_none(report, "From /proc: rank 1 (n1, pid 101) sleeps (clock_nanosleep, 60 s); rank 0 waits for")
    report = judge({100: receives(100, 101), 101: sleeps(101, 2.0)}, sockets=owned((100, 101)))
    assert_accuses_none(report, "rank 1 (n1, pid 101) sleeps (clock_nanosleep, 2.0 s)")


def test_a_chain_is_followed_to_its_end() -> None:
    ranks = {100: receives(100, 101), 101: receives(101, 102), 102: sleeps(102)}
    sockets = (*owned((100, 101)), *(one for one in owned((101, 102)) if one.pid == 102))
    # Rank 1 has two connections here; it reads the connection to rank 2.
    sockets = (*(one for one in sockets if one.pid != 101), Owned(101, 1010, "tcp", "", "10.0.0.1:101", "10.0.0.1:102"))
    sockets = (*sockets, Owned(101, 1011, "tcp", "ESTABLISHED", "10.0.0.1:101", "10.0.0.1:100"))
    report = judge(ranks, sockets=sockets)
    (found,) = report.findings
    assert found.title.startswith("rank 2 (n1, pid 102) sleeps")
    assert "; rank 1 waits for its data: recvfrom on 10.0.0.1:102" in found.title
    assert found.title.endswith("; rank 0 waits for rank 1: recvfrom on 10.0.0.1:101")


def test_who_wait_for_each_other() -> None:
    report = judge({100: receives(100, 101), 101: receives(101, 100)}, sockets=owned((100, 101)))
    (found,) = report.findings
    assert found.title.startswith("ranks 0-1 wait for each other: ")
    assert [(row.rank, row.last.peer_rank) for row in report.data.threads] == [(0, 1), (1, 0)]


def test_a_rank_that_computes_is_not_blamed_while_the_others_wait_for_a_moment() -> None:
    waits = receives(100, 101, since_s=3.0)
    report = judge({100: waits, 101: thread(101, state="R")}, sockets=owned((100, 101)))
    assert_accuses_none(report, "rank 0 waits for rank 1 (recvfrom, 3.0 s); rank 1 runs")
    # A rank that sleeps and wakes up may be polling for a condition that never becomes true.
    assert_accuses_none(judge({100: waits, 101: sleeps(101)}, sockets=owned((100, 101)), moved=(101,)))


def test_running_and_waking_up_are_no_progress_and_never_ok() -> None:
    running = {pid: thread(pid, state="R") for pid in (100, 101)}
    waking = {pid: at_futex(pid) for pid in (100, 101)}
    assert_accuses_none(judge(running), "ranks 0-1 are running")
    assert_accuses_none(judge(running, gpu=True))
    assert_accuses_none(judge(waking, moved=(100, 101)))
    assert_accuses_none(judge({100: waking[100]}, moved=(100,)))
    assert_accuses_none(judge({pid: at_futex(pid, since_s=2.0) for pid in (100, 101)}))
    assert_accuses_none(judge({100: sleeps(100), 101: at_futex(101)}, moved=(100,)))


def test_who_computes_while_all_others_sleep_for_long_is_named_and_never_ok() -> None:
    ranks = {100: at_futex(100), 101: thread(101, state="R"), 102: at_futex(102)}
    (found,) = judge(ranks).findings
    assert (found.id, found.level, found.where.ranks) == ("hang.busy-rank", "warn", (1,))
    waits_for = "wait for another thread of the process (futex, 60 s)"
    assert found.title.startswith(f"rank 1 (n1, pid 101) runs; ranks 0,2 {waits_for}")
    # On a GPU a rank that waits runs as well.
    assert_accuses_none(judge(ranks, gpu=True))


def test_who_asks_again_and_again_while_all_others_sleep_for_long_is_shown_and_not_accused() -> None:
    polls = sleeps(101, since_s=0.02)
    report = judge({100: at_futex(100), 101: polls, 102: at_futex(102)}, moved=(101,))
    assert_accuses_none(report, "From /proc: rank 1 (n1, pid 101) sleeps (clock_nanosleep, 0.0 s); ranks 0,2 wait")


def test_who_stands_elsewhere_is_not_blamed_where_it_may_wait_for_the_job_as_well() -> None:
    # A call of which nothing is known; a rank that may not be read; a peer on a host that was not looked at.
    unknown = thread(102, "ioctl")
    hidden = thread(102, hidden=True)
    for one in (unknown, hidden):
        report = judge({100: at_futex(100), 101: at_futex(101), 102: one})
        assert_accuses_none(report)
    far = thread(102, "recvfrom", targets=(connection(102, "10.0.0.9:5000"),))
    three = [process(100 + rank, rank, 4, local=False, network=NET) for rank in range(3)]
    looked = [Blocked(one.tid, "S", None, (one,), ()) for one in (at_futex(100), at_futex(101), far)]
    read = replace(node(three, {}), blocked=tuple(looked), networks=(Network(NET, ("10.0.0.1",), ()),), ended=BOTH)
    report = judge_nodes([read])
    assert [(found.id, found.level) for found in report.findings] == [
        ("hang.unreadable", "unknown"),
        ("hang.unseen", "unknown"),
    ]


def test_an_event_loop_may_be_the_wait_for_a_thread_that_trains() -> None:
    """Its own socket wakes it up: the action of another thread of this rank is unknown."""
    own = Descriptor(6, "socket", "socket:[77]", "rw", 2)
    serves = thread(101, "epoll_wait", targets=(Target(6, "r", own),))
    report = judge({100: at_futex(100), 101: serves, 102: at_futex(102)})
    assert_accuses_none(report, "rank 1 waits in its event loop for its own threads")


def test_who_waits_for_any_of_several_waits_for_nobody_in_particular() -> None:
    targets = (connection(100, "10.0.0.1:101"), replace(connection(100, "10.0.0.1:102"), fd=8))
    second = Owned(100, 1001, "tcp", "ESTABLISHED", "10.0.0.1:100", "10.0.0.1:102")
    assert targets[1].descriptor is not None
    assert targets[1].descriptor.socket is not None
    other = replace(targets[1].descriptor, socket=replace(targets[1].descriptor.socket, inode=1001))
    polls = thread(100, "poll", targets=(targets[0], replace(targets[1], descriptor=other)))
    sockets = (*owned((100, 101)), second, Owned(102, 1020, "tcp", "ESTABLISHED", "10.0.0.1:102", "10.0.0.1:100"))
    report = judge({100: polls, 101: sleeps(101), 102: sleeps(102)}, sockets=sockets)
    assert_accuses_none(report)
    assert report.data.threads[0].on == "10.0.0.1:101 and 1 more (any of 2) = ranks 1-2"
    assert report.data.threads[0].last.peer_rank is None


def test_where_all_wait_in_threads_of_their_own_it_cannot_tell() -> None:
    report = judge({100 + rank: at_futex(100 + rank) for rank in range(4)})
    assert_accuses_none(report, "ranks 0-3 wait for another thread of the process (futex, 60 s)")


def test_the_only_one_that_waits_outside_of_the_job_is_stuck_if_the_others_have_waited_for_long() -> None:
    report = judge({100: at_futex(100, since_s=2.0), 101: at_futex(101), 102: sleeps(102)})
    assert_accuses_none(report)
    report = judge({100: at_futex(100), 101: at_futex(101), 102: sleeps(102)})
    (found,) = report.findings
    assert (found.id, found.level, found.where.ranks) == ("hang.not-in-collective", "fail", (2,))
    assert found.fix is not None
    assert found.fix.commands == ("distdiag pyspy-all --pid 102",)
    assert found.title.startswith(
        "rank 2 (n1, pid 102) sleeps (clock_nanosleep, 60 s); ranks 0-1 wait for another thread of the process"
    )


def test_the_thread_that_receives_tells_for_whom_the_main_thread_waits() -> None:
    rank_0 = (at_futex(100), receives(100, 101, tid=7))
    report = judge({100: rank_0, 101: sleeps(101)}, sockets=owned((100, 101)))
    assert report.findings[0].id == "hang.not-in-collective"
    assert report.findings[0].title.endswith("recvfrom on 10.0.0.1:101 in its thread 7")
    # A watcher of connections polls all the time.
    rank_0 = (at_futex(100), receives(100, 101, tid=7, call="epoll_wait"))
    (found,) = judge({100: rank_0, 101: sleeps(101)}, sockets=owned((100, 101))).findings
    assert found.id == "hang.not-in-collective"
    assert found.title.endswith("rank 0 waits for another of its threads (futex, 60 s)")


def test_the_store_is_not_rank_0() -> None:
    """A rank waiting for a key waits for the rank that sets it."""
    asks = thread(101, "poll", targets=(connection(101, "10.0.0.1:29500"),))
    sockets = (
        Owned(101, 1010, "tcp", "ESTABLISHED", "10.0.0.1:101", "10.0.0.1:29500"),
        Owned(100, 1000, "tcp", "ESTABLISHED", "10.0.0.1:29500", "10.0.0.1:101"),
    )
    report = judge({100: sleeps(100), 101: asks}, sockets=sockets)
    assert report.data.threads[1].kind == "store"
    assert report.data.threads[1].on == "10.0.0.1:29500 = the job's store, at rank 0"
    # It is the only process outside the job: rank 0 itself sleeps, not its store.
    assert [(one.id, one.where.ranks) for one in report.findings] == [("hang.not-in-collective", (0,))]


def test_a_rank_that_runs_while_the_others_wait_for_the_store_may_still_be_starting() -> None:
    asks = thread(101, "poll", targets=(connection(101, "10.0.0.1:29500"),))
    sockets = (
        Owned(101, 1010, "tcp", "ESTABLISHED", "10.0.0.1:101", "10.0.0.1:29500"),
        Owned(100, 1000, "tcp", "ESTABLISHED", "10.0.0.1:29500", "10.0.0.1:101"),
    )
    assert_accuses_none(
        judge({100: thread(100, state="R"), 101: asks}, sockets=sockets),
        "rank 0 (n1, pid 100) runs; rank 1 waits for a key in the job's store (poll, 60 s)",
    )


def test_the_holder_of_a_lock_is_named() -> None:
    holder = PeerProcess(900, "python", "python /home/me/keeps.py", "S")
    report = judge({100: at_lock(100, 900)}, peer_processes=(holder,))
    (found,) = report.findings
    assert (found.id, found.level) == ("hang.lock", "fail")
    assert found.title == "pid 900 (keeps.py) holds the lock on /data/lock; rank 0 waits for it (flock, 60 s)"
    report = judge({100: at_lock(100, 101), 101: sleeps(101)})
    assert report.findings[0].title.startswith("rank 1 (n1, pid 101) holds the lock on /data/lock, and sleeps (")


def test_the_worker_that_a_rank_waits_for_is_shown_and_named() -> None:
    workers = [
        process(pid, 0, 1, parent=100, above=(100, 1000, 1), kind="data-worker", comm="pt_data_worker")
        for pid in (200, 201)
    ]
    threads = {
        100: reads_pipe(100, 200, 201),
        200: sleeps(200, state="T"),
        201: reads_pipe(201, 100, target="pipe:[6]"),
    }
    report = judge(threads, others=workers)
    (found,) = report.findings
    assert found.title.startswith("DataLoader worker 200 of rank 0 is stopped (T, ")
    assert report.data.threads[0].on == "a pipe = DataLoader worker 200 or 201 of rank 0"
    assert found.title.endswith("rank 0 waits for its data: read on a pipe")
    assert [(row.role, row.pid) for row in report.data.threads] == [("rank", 100), ("helper", 200), ("helper", 201)]
    # Two processes that both wait for work block no other.
    threads[200] = reads_pipe(200, 100, target="pipe:[7]")
    assert_accuses_none(judge(threads, others=workers))


def test_a_poll_that_ends_by_itself_does_not_make_it_a_rank_that_goes_on() -> None:
    """A rank looks every 5 s whether its workers live."""
    worker = process(200, 0, 1, parent=100, above=(100, 1000, 1), kind="data-worker", comm="pt_data_worker")
    polls = replace(reads_pipe(100, 200, call="poll"), since_s=0.1, arguments=(1, 1, 5000, 0, 0, 0))
    for moved in ((), (100,)):
        report = judge({100: polls, 200: sleeps(200)}, others=[worker], moved=moved)
        assert [(one.id, one.level) for one in report.findings] == [("hang.data-loading", "fail")]
        assert_accuses_none(judge({100: polls, 200: sleeps(200, 1.0)}, others=[worker], moved=moved))
    for_ever = replace(polls, arguments=(1, 1, 0xFFFFFFFF, 0, 0, 0))
    assert_accuses_none(judge({100: for_ever, 200: sleeps(200)}, others=[worker], moved=(100,)))


def test_stopped_and_stuck_ranks_are_faults_though_nobody_is_seen_to_wait() -> None:
    report = judge({100: at_futex(100), 101: sleeps(101, 1.0, state="T")})
    (found,) = report.findings
    assert (found.id, found.level) == ("hang.stopped", "fail")
    assert found.title.endswith("; rank 0 waits for another of its threads (futex, 60 s)")
    report = judge({100: at_futex(100), 101: thread(101, "read", state="D", path="/nfs/a b/x")})
    (found,) = report.findings
    assert found.id == "hang.storage"
    assert found.fix is not None
    assert found.fix.commands[0] == "timeout 5 stat -f '/nfs/a b'"


def test_a_rank_that_has_ended() -> None:
    dead = replace(process(101, 1, 2), state="Z", python=False, torch=False, place=None, comm="python")
    report = judge({100: at_futex(100)}, size=2, others=[dead])
    assert [one.id for one in report.findings] == ["hang.exited"]
    assert report.findings[0].title.startswith("rank 1 (n1) has exited; rank 0 waits for")


def test_the_other_end_was_not_seen() -> None:
    report = judge({100: receives(100, 999), 101: sleeps(101)})
    assert report.data.threads[0].on == "10.0.0.1:999, whose other end was not found"
    assert report.exit_code() == 3


def test_ranks_of_two_hosts() -> None:
    def host(name: str, rank: int, one: Thread, socket: Owned) -> NodePicture:
        own = replace(process(one.tid, rank, 2, local=False), network=NET)
        return replace(
            node([own], {}, host=name),
            blocked=(Blocked(one.tid, "S", None, (one,), ()),),
            networks=(Network(NET, (name,), (socket,)),),
            ended=BOTH,
        )

    first = host("n1", 0, receives(100, 101), Owned(100, 1000, "tcp", "", "10.0.0.1:100", "10.0.0.1:101"))
    second = host("n2", 1, sleeps(101), Owned(101, 1010, "tcp", "", "10.0.0.1:101", "10.0.0.1:100"))
    report = judge_nodes([first, second])
    assert report.findings[0].title.startswith("rank 1 (n2, pid 101) sleeps")
    assert report.data.threads[0].on == "10.0.0.1:101 = rank 1 on n2"
    # What one does who was not asked for still counts.
    only = replace(REQUEST, wanted=Wanted(ranks=(0,)))
    report = judge_nodes([first, second], only)
    assert report.findings[0].title.startswith("rank 1 (n2, pid 101) sleeps")
    assert [row.rank for row in report.data.threads] == [0]


def test_the_others_of_the_job_count_though_only_one_rank_was_asked_for() -> None:
    only = replace(REQUEST, wanted=Wanted(ranks=(0,)))
    report = judge({100: at_futex(100), 101: sleeps(101)}, request=only)
    assert [row.rank for row in report.data.threads] == [0]
    assert report.summary.startswith("rank 1 (n1, pid 101) sleeps (")


def test_what_may_not_be_read_is_told_with_the_fix() -> None:
    denied = look((), status="denied", reason="permission denied")
    hidden = Blocked(100, "S", None, (thread(100, hidden=True),), ())
    theirs = node([process(100, 0, 1)], {100: [denied]}, user=8)
    report = judge_nodes([replace(theirs, blocked=(hidden,), ended=BOTH)])
    (found,) = report.findings
    assert (found.id, found.title) == (
        "hang.unreadable",
        "rank 0 (n1, pid 100) could not be read: permission denied",
    )
    assert found.detail == ""  # of its waits nothing is known either
    assert found.fix is not None
    assert found.fix.commands == ('sudo env "PATH=$PATH" distdiag trace blocked',)
    assert report.exit_code() == 3


def test_all_threads_or_the_main_ones() -> None:
    threads = {100: (at_futex(100), *(at_futex(100, tid=tid) for tid in range(1, 5)))}
    assert len(judge(threads).data.threads) == 1
    assert [row.tid for row in judge(threads, request=all_threads()).data.threads] == [100, 1, 2, 3, 4]


def test_ranks_as_they_are_written() -> None:
    assert parse_ranks(["0-3,7", "5"]) == (0, 1, 2, 3, 5, 7)
    for wrong in ("", "a", "3-1", "-1", "1,,2", "0-99999999"):
        with pytest.raises(UsageError, match="is not a rank"):
            parse_ranks([wrong])


def test_who_is_not_there() -> None:
    nodes = [node([process(100, 0, 2)], {}).stacks]
    for wanted, words in (
        (Wanted(ranks=(7,)), ("rank 7 not found on n1", "found: rank 0 of job")),
        (Wanted(job="nope"), ("no rank of job nope was found on n1", "jobs found: --job 10.0.0.1:29500")),
        (Wanted(pids=(7,)), ("process 7 not found on n1", "--hosts")),
    ):
        there = [replace(one, processes=replace(one.processes, asked_missing=wanted.pids)) for one in nodes]
        assert choose(there, wanted) == []
        error = none_found(there, wanted, "distdiag trace blocked")
        assert words[0] in str(error)
        assert words[1] in error.hint


def test_a_process_of_no_job_is_shown_with_its_wait() -> None:
    alone = process(900, torch=False, job={})
    report = judge({900: sleeps(900)}, others=[alone], request=replace(REQUEST, wanted=Wanted(pids=(900,))))
    assert [(found.id, found.level) for found in report.findings] == [("hang.process", "unknown")]


def test_only_the_processes_of_the_selected_job_are_read_and_all_of_several() -> None:
    jobs = {"A": (100, 101), "B": (200, 201)}
    own = [process(pid, at, 2, job={"TORCHELASTIC_RUN_ID": name}) for name in jobs for at, pid in enumerate(jobs[name])]
    hosts = {"n1": node(own, {}).processes}

    def pids(wanted: Wanted) -> list[int]:
        chosen = _chosen(replace(REQUEST, wanted=wanted), hosts)
        return [one.pid for processes in chosen.values() for one in processes.processes]

    assert pids(Wanted(job="B")) == pids(Wanted(job="B", ranks=(1,))) == [200, 201]
    assert pids(Wanted()) == pids(Wanted(ranks=(1,))) == [100, 101, 200, 201]
    assert pids(Wanted(pids=(100,))) == [100, 101, 200, 201]
    assert pids(Wanted(job="B", ranks=(2,))) == []
