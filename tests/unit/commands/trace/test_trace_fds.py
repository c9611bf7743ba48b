"""trace fds: reported descriptors, folding of equal entries, and warnings; from constructed facts."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspy_facts import node, process
from rich.console import Console
from trace_facts import NET, owned

from distdiag.cluster.targets import Cluster
from distdiag.commands.trace import ranks
from distdiag.commands.trace.fds.collect import Opened, Reply
from distdiag.commands.trace.fds.diagnose import Request, diagnose
from distdiag.commands.trace.fds.view import trace_fds_view
from distdiag.commands.trace.nodes import Answers
from distdiag.facts.network.socket_owners import Network, PeerProcess
from distdiag.facts.network.sockets import Socket
from distdiag.facts.process.descriptors import Descriptor, End

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.trace.fds.diagnose import TraceFds
    from distdiag.report import Report

REQUEST = Request(program="distdiag", cluster=Cluster(), wanted=ranks.Wanted(ranks=(0,)))
GIB = 2**30


def judge(*descriptors: Descriptor, limit: int | None = 1024, unread: str = "", user: int = 7) -> Report[TraceFds]:
    """Judge rank 0 (pid 100) beside rank 1 (pid 101), which is connected to it."""
    processes = [replace(process(100 + rank, rank, 2), network=NET) for rank in range(2)]
    sockets = Network(NET, ("10.0.0.1",), owned((100, 101)))
    reported = Reply((Opened(100, limit, descriptors, unread),), (sockets,), (PeerProcess(900, "sh", "sh -c x", "S"),))
    answers = Answers[Reply](nodes=[node(processes, {}, user=user).stacks], replies={"n1": [reported]})
    return diagnose(REQUEST, answers, ranks.choose(answers.nodes, REQUEST.wanted))


def connection(fd: int, state: str = "ESTABLISHED") -> Descriptor:
    socket = Socket(1000, "tcp", state, local="10.0.0.1:100", remote="10.0.0.1:101")
    return Descriptor(fd, "socket", "socket:[1000]", "rw", 2, inode=1000, socket=socket)


def file(fd: int, size: int, **more: object) -> Descriptor:
    return replace(Descriptor(fd, "file", f"/data/{fd}", "w", 1, size_bytes=size), **more)  # type: ignore[arg-type]


def eventfds(first: int, count: int) -> list[Descriptor]:
    return [Descriptor(fd, "anon", "anon_inode:[eventfd]", "rw", 2) for fd in range(first, first + count)]


def lines(report: Report[TraceFds]) -> Sequence[str]:
    page = io.StringIO()
    console = Console(file=page, width=80, markup=False, highlight=False, emoji=False)
    for part in trace_fds_view(report.data):
        console.print(part, crop=False)
    assert all(len(line.rstrip()) <= 80 for line in page.getvalue().splitlines())
    return [" ".join(line.split()) for line in page.getvalue().splitlines()]


def test_the_other_ends_are_named() -> None:
    pipe = Descriptor(5, "pipe", "pipe:[7]", "w", 1, ends=(End(900, 0, "r"),))
    own = Descriptor(6, "pipe", "pipe:[8]", "w", 1, ends=(End(100, 7, "r"),))
    gpu = Descriptor(7, "gpu", "/dev/nvidia3", "rw", 2, gpu=3)
    report = judge(connection(4), pipe, own, gpu)
    (row,) = report.data.processes
    assert (row.rank, row.pid, row.limit, row.role) == (0, 100, 1024, "rank")
    assert row.counts == {"pipe": 2, "socket": 1, "gpu": 1}
    assert [one.who for one in row.descriptors] == ["rank 1", "pid 900 (sh)", "itself", ""]
    assert (row.descriptors[0].peer_rank, row.descriptors[3].gpu) == (1, 3)
    assert row.descriptors[0].target == "tcp 10.0.0.1:100 -> 10.0.0.1:101"
    assert (report.findings, report.exit_code()) == ((), 0)
    assert report.summary == "pid 100 has 4 descriptors open; no problem found in them"


def test_equal_ones_fold_and_are_counted_first() -> None:
    shown = lines(judge(*eventfds(3, 240), connection(300), connection(301), file(310, 5)))
    assert shown[0] == "rank 0, pid 100 on n1 (python train.py): 243 of 1024 descriptors"
    assert "240 anon, 2 sockets, 1 file" in shown
    assert "3-242 rw anon 240 x anon_inode:[eventfd] -" in shown
    assert any(line.startswith("300-301 rw socket 2 x tcp 10.0.0.1:100 -> 10.0.0.1:101, ...") for line in shown), shown
    assert "310 w file /data/310 (5 B) -" in shown


def test_close_to_the_limit() -> None:
    assert judge(*eventfds(0, 80), limit=100).findings == ()
    (found,) = judge(*eventfds(0, 81), limit=100).findings
    assert (found.id, found.level) == ("trace.fd-limit", "warn")
    assert "81 of 100" in found.title
    assert found.fix is not None
    assert found.fix.commands == ("prlimit --pid 100 --nofile=400",)
    assert judge(*eventfds(0, 81), limit=None).findings == ()


def test_deleted_files_that_take_the_disk() -> None:
    small = file(3, GIB // 2, kind="deleted file", deleted=True)
    memory = file(4, 50 * GIB, kind="shm", deleted=True)
    again = replace(small, fd=8)
    assert judge(small, again, again, memory, file(5, 9 * GIB)).findings == ()
    (found,) = judge(small, file(6, GIB, kind="deleted file", deleted=True)).findings
    assert (found.id, found.level) == ("trace.deleted-files", "warn")
    assert "holds 1.5 GiB of disk in 2 deleted files" in found.title
    assert found.evidence[0] == "fd 6: /data/6, 1.0 GiB"


def test_connections_that_are_not_closed() -> None:
    assert judge(*(connection(fd, "CLOSE_WAIT") for fd in range(9))).findings == ()
    (found,) = judge(*(connection(fd, "CLOSE_WAIT") for fd in range(10))).findings
    assert (found.id, found.level) == ("trace.close-wait", "warn")


def test_connections_to_nobody_that_were_closed_share_a_row() -> None:
    sockets = [
        Socket(9000 + fd, "tcp", "CLOSE_WAIT", local="10.0.0.1:7", remote=f"10.9.9.9:{fd}") for fd in range(100, 130)
    ]
    found = [
        Descriptor(one.inode - 9000, "socket", "socket:[1]", "rw", 2, inode=one.inode, socket=one) for one in sockets
    ]
    shown = lines(judge(*found))
    assert any(line.startswith("100-129 rw socket 30 x tcp 10.0.0.1:7 -> 10.9.9.9:100, ...") for line in shown), shown
    assert len(shown) < 8


def test_a_file_system_that_does_not_answer() -> None:
    (found,) = judge(Descriptor(3, "unknown", "/nfs/x", "r", 0, silent=True)).findings
    assert (found.id, found.evidence) == ("trace.storage", ("fd 3: /nfs/x",))


def test_what_may_not_be_read() -> None:
    for unread, user, words in (("denied", 7, "sudo env"), ("denied", 0, "SYS_PTRACE"), ("gone", 7, "")):
        report = judge(unread=unread, user=user)
        (found,) = report.findings
        assert report.exit_code() == 3
        reported = found.fix.text + " ".join(found.fix.commands) if found.fix is not None else ""
        assert words in reported
