"""Judgement of jobs that do not start, from each node's view of the rendezvous."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import hang_facts
import pytest
from loops import each

from distdiag.cluster.targets import Cluster
from distdiag.diagnosis.stuck.judge import start_finding
from distdiag.diagnosis.stuck.start_fixes import corrected
from distdiag.diagnosis.stuck.starts import start_claims
from distdiag.diagnosis.stuck.types import Asked
from distdiag.facts.network.tcp_store import Rendezvous, Store
from distdiag.facts.process.launch_options import Launch
from distdiag.jobs.collect import Processes
from distdiag.jobs.starts import Meeting, Start, Starts
from distdiag.jobs.types import NodePicture
from distdiag.report import Level

if TYPE_CHECKING:
    from distdiag.report import Finding

ASKED = Asked(program="distdiag", cluster=Cluster(), command="hang")
HEAD = "10.0.0.1"


def node(number: int, *starts: Start) -> NodePicture:
    addresses: dict[str, tuple[str, ...]] = {"lo": ("127.0.0.1/8",), "eth0": (f"10.0.0.{number}/24",)}
    return NodePicture(host=f"n{number}", processes=Processes(f"n{number}"), starts=(Starts(tuple(starts), addresses),))


def launcher(met: Meeting | None = None, *, pid: int = 1, waited_s: float = 60.0, **options: Any) -> Start:  # noqa: ANN401
    usual: dict[str, Any] = {"program": "torchrun", "host": "n1", "port": 29500, "backend": "static", "nodes": (2, 2)}
    launch = Launch(**{**usual, **options})
    return Start(pid=pid, launch=launch, waited_s=waited_s, meeting=met or Meeting("n1", 29500, (HEAD,), state="open"))


def own_store(pid: int = 1) -> Meeting:
    return Meeting("n1", 29500, (HEAD,), is_here=True, state="open", server=pid, command="torchrun")


def judge(*nodes: NodePicture, of_ranks: bool = False) -> list[Finding]:
    return list(map(start_finding, start_claims(ASKED, nodes, of_ranks=of_ranks)))


def test_two_nodes_with_one_rank() -> None:
    first = node(1, launcher(own_store(), node_rank=0, nodes=(3, 3)))
    (found,) = judge(first, *(node(number, launcher(node_rank=1, nodes=(3, 3))) for number in (2, 3)))
    assert (found.level, found.where.hosts) == (Level.FAIL, ("n2", "n3"))
    assert found.title == "n[2-3] were both started with --node-rank 1"


def test_different_run_ids() -> None:
    (found,) = judge(node(1, launcher(own_store(), run_id="7")), node(2, launcher(run_id="8")))
    assert found.title == "the nodes were started with different --rdzv-id: 7 on n1, 8 on n2"


def test_a_node_without_a_launcher_is_a_warning_until_the_others_have_waited_for_long() -> None:
    def found(waited_s: float) -> Finding:
        (one,) = judge(node(1, launcher(own_store(), waited_s=waited_s)), node(2))
        return one

    assert (found(20.0).level, found(20.0).where.hosts) == (Level.WARN, ("n2",))
    first = replace(launcher(own_store(), node_rank=0), command="torchrun --nnodes=2 --node-rank=0 a.py")
    (one,) = judge(node(1, first), node(2))
    assert one.fix is not None
    assert one.fix.commands == ("torchrun --node-rank=1 --nnodes=2 a.py  # on n2",)
    assert found(400.0).level is Level.FAIL


def test_a_node_that_could_not_be_read_is_not_called_missing() -> None:
    found = judge(node(1, launcher(own_store())), replace(node(2), missing="no answer"))
    assert [finding.where.hosts for finding in found] == [()]


def test_pids_of_two_nodes_may_be_alike() -> None:
    """In a container, or just by chance: the stranger on n1 has the pid of the launcher on n2."""
    taken = replace(own_store(pid=13), command="python -m http.server")
    (found,) = judge(node(1, launcher(taken, pid=14)), node(2, launcher(pid=13)))
    assert found.title == "port 29500 on n1 is in use by another program: python -m http.server (pid 13)"
    assert found.where.hosts == ("n1",)


def test_all_nodes_together_and_all_well_is_no_finding() -> None:
    assert judge(node(1, launcher(own_store(), node_rank=0)), node(2, launcher(node_rank=1))) == []


def _own_place(number: int, **options: Any) -> NodePicture:  # noqa: ANN401
    met = Meeting(f"n{number}", 29500, (f"10.0.0.{number}",), is_here=True, state="open", server=1, command="torchrun")
    return node(number, launcher(met, host=f"n{number}", backend="c10d", **options))


def test_each_node_at_its_own_name() -> None:
    """As with --rdzv-endpoint=$(hostname):29500 on all nodes."""
    (found,) = judge(_own_place(1), _own_place(2))
    assert found.level is Level.FAIL
    assert found.title == "the job meets in different places: n1 at n1:29500, n2 at n2:29500"


def test_two_jobs_of_one_script_are_not_compared() -> None:
    found = judge(_own_place(1, nodes=(3, 3)), _own_place(2, nodes=(3, 3)))
    assert {finding.level for finding in found} == {Level.WARN}


def test_the_store_of_ranks_below_torchrun_is_no_stranger() -> None:
    met = Meeting("localhost", 29500, ("127.0.0.1",), is_here=True, state="open", server=7, command="torchrun")
    ranks = [
        replace(launcher(met, pid=8 + rank, program="environment", host="localhost"), rank=rank, world_size=2)
        for rank in (0, 1)
    ]
    below = hang_facts.node((), ()).processes.processes[0]
    processes = replace(node(1).processes, processes=tuple(replace(below, pid=pid, above=(7,)) for pid in (8, 9)))
    assert judge(replace(node(1, *ranks), processes=processes), of_ranks=True) == []


def test_ranks_of_one_machine_meet_at_localhost() -> None:
    local = Meeting("localhost", 29500, ("127.0.0.1",), is_here=True, state="open", server=1, command="python")
    ranks = [
        replace(launcher(local, pid=number + 1, program="environment", host="localhost"), rank=number, world_size=2)
        for number in (0, 1)
    ]
    assert judge(node(1, *ranks), of_ranks=True) == []


def test_two_nodes_on_one_machine_with_different_ports() -> None:
    store = Meeting("localhost", 29500, ("127.0.0.1",), is_here=True, state="open", server=1, command="torchrun")
    closed = Meeting("localhost", 29501, ("127.0.0.1",), is_here=True, state="closed")
    first = launcher(store, host="localhost", node_rank=0)
    (found,) = judge(node(1, first, launcher(closed, pid=2, host="localhost", port=29501, node_rank=1)))
    assert found.title == "n1 (pid 2) waits at localhost:29501; the job's store is at localhost:29500"


def rank(number: int, met: Meeting | None = None, *, world: int = 2, **more: Any) -> Start:  # noqa: ANN401
    start = launcher(met, program="environment", backend="env")
    return replace(start, rank=number, world_size=world, **{"joined": True, **more})


def from_n2(*clients: str) -> Meeting:
    return replace(own_store(), clients=clients)


def test_ranks_that_were_told_different_sizes_and_the_same_number() -> None:
    (found,) = judge(node(1, rank(0, own_store())), node(2, rank(1, world=3)), of_ranks=True)
    assert found.title == "the ranks were started with different WORLD_SIZE: 2 for rank 0, 3 for rank 1"
    twice = [node(number, rank(1, world=3)) for number in (2, 3)]
    (found,) = judge(node(1, rank(0, own_store(), world=3)), *twice, of_ranks=True)
    assert found.title == "2 processes were started with RANK=1: on n[2-3]"


def test_a_rank_that_is_not_connected_is_missing_and_not_accused() -> None:
    (found,) = judge(node(1, rank(0, own_store())), of_ranks=True)
    assert found.title == "rank 1 of 2 has not connected to n1:29500"
    assert (found.level, found.where.ranks, found.where.hosts) == (Level.WARN, (), ())
    # A host that was not asked is connected: its ranks are not missing.
    assert judge(node(1, rank(0, from_n2("10.0.0.2"))), of_ranks=True) == []


def test_the_missing_node_of_a_list_is_named_unless_an_address_is_unknown() -> None:
    def found(*clients: str) -> list[Finding]:
        first = node(1, rank(0, from_n2(*clients), world=3))
        known: dict[str, tuple[str, ...]] = {f"n{number}": (f"10.0.0.{number}",) for number in (1, 2, 3)}
        return judge(replace(first, starts=(replace(first.starts[0], expected=known),)), of_ranks=True)

    (one,) = found("10.0.0.2")
    assert one.title == "n3 has not connected to n1:29500, where rank 0 listens"
    assert found("10.0.0.2", "192.168.0.9") == []


def test_a_first_address_without_an_answer() -> None:
    met = Meeting("n1", 29500, ("fd00::1", HEAD), state="open", silent=True)
    (found,) = judge(node(2, launcher(met, node_rank=1)))
    assert found.title == "n2 tries the IPv6 address fd00::1 of n1 first, which gives no answer; 10.0.0.1 does"


def test_a_store_of_another_job_is_named_with_its_process() -> None:
    old = launcher(own_store(pid=5), pid=5, node_rank=0, script="old.py")
    found = judge(node(1, old), node(2, launcher(node_rank=1, script="new.py")))
    assert found[0].title == "n2 meets at n1:29500, the store of another job: old.py (pid 5 on n1)"
    assert [each.where.hosts for each in found] == [("n1",), ()]


def test_a_port_that_accepts_but_does_not_answer_is_no_store() -> None:
    (found,) = judge(node(2, replace(launcher(), joined=True, answered=False)))
    assert (found.level, found.where.hosts) == (Level.WARN, ())
    assert found.title.startswith("port 29500 on n1 accepts the connection of n2, but does not answer")
    (found,) = judge(node(2, replace(launcher(), joined=True, answered=True)))
    assert found.title == "n2 is connected to n1:29500 and waits for more of its 2 nodes"


def test_a_launcher_that_still_imports_is_not_missing() -> None:
    starting = replace(launcher(node_rank=1), joined=False)
    (found,) = judge(node(1, launcher(own_store(), node_rank=0)), node(2, starting))
    assert found.title == "torchrun on n2 runs, but has not connected to n1:29500 yet"
    assert (found.level, found.where.hosts) == (Level.WARN, ())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "/v/bin/python /v/bin/torchrun --nnodes 2 --master-port 29501 --master_addr=n9 train.py --master-port 7",
            "/v/bin/torchrun --master-addr=n1 --master-port=29500 --nnodes 2 train.py --master-port 7",
        ),
        (
            "python3 -m torch.distributed.run --nnodes=2 --no-python a.sh 'a b'",
            "python3 -m torch.distributed.run --master-addr=n1 --master-port=29500 --nnodes=2 --no-python a.sh 'a b'",
        ),
        ("torchrun --nnodes=2 train.py --key '***'", ""),
        ("", ""),
    ],
)
def test_the_corrected_line_pastes(line: str, expected: str) -> None:
    options = ["--master-addr=n1", "--master-port=29500"]
    assert corrected(replace(launcher(), command=line), options) == expected


def step(number: int, host: str, line: str = "", port: int = 29500) -> Start:
    """A rank of srun or mpirun at a name that its node does not resolve, or at another port."""
    unknown = host == "x9"
    met = (
        Meeting(host, port, error="Name or service not known")
        if unknown
        else Meeting(host, port, (HEAD,), state="closed")
    )
    start = launcher(met, program="environment", backend="env", host=host, port=port)
    return replace(start, rank=number, world_size=2, tasks=2, command=line)


def test_the_line_of_srun_or_mpirun_is_printed_with_the_node_of_rank_0() -> None:
    for line in ("MASTER_ADDR=x9 MASTER_PORT=29500 srun a.sh", "mpirun -x MASTER_ADDR=x9 -x MASTER_PORT=29500 a.sh"):
        (found,) = judge(node(1, step(0, "x9", line)), node(2, step(1, "x9")), of_ranks=True)
        assert found.fix is not None
        assert found.fix.commands == (line.replace("x9", HEAD),)


def test_a_variable_that_one_node_sets_is_looked_for_there() -> None:
    first = replace(rank(0, own_store()), tasks=2, command="MASTER_ADDR=n1 MASTER_PORT=29500 srun a.sh")
    (found,) = judge(node(1, first), node(2, step(1, "n1", port=29501)), of_ranks=True)
    assert found.title == "rank 1 on n2 waits at n1:29501, n1 at n1:29500"
    assert found.fix is not None
    assert found.fix.text.startswith("find what sets MASTER_PORT=29501 on n2")


def test_a_rank_0_whose_stack_cannot_be_read_is_not_called_missing() -> None:
    """No py-spy on its node; its port differs."""
    process = replace(hang_facts.node((), ()).processes.processes[0], command="train.py", pid=1)
    first, other = node(1), node(2, step(1, "n1", port=29501))
    place = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    nodes = [
        replace(each, processes=replace(each.processes, processes=(replace(process, job=place),)))
        for each in (first, other)
    ]
    (found,) = judge(*nodes, of_ranks=True)
    assert found.title == "rank 1 on n2 waits for n1:29501, where nothing listens: rank 0 on n1 meets at n1:29500"
    assert (found.level, found.where.hosts) == (Level.WARN, ())


def test_an_interface_that_a_node_lacks_is_named() -> None:
    bad = rank(1, interfaces={"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": "eth0"}, world=3)
    (found,) = judge(node(1, rank(0, own_store(), world=3)), node(2, bad), of_ranks=True)
    assert "NCCL_SOCKET_IFNAME=ib is no interface of n2 (eth0)." in found.detail
    assert "GLOO_SOCKET_IFNAME=eth0 is eth0 10.0.0.2 on n2." in found.detail


def test_a_closed_path_accuses_both_ends_unless_another_node_comes_through() -> None:
    closed = launcher(Meeting("n1", 29500, (HEAD,), state="filtered"), node_rank=1)
    (found,) = judge(node(1, launcher(own_store(), node_rank=0)), node(2, closed))
    assert found.where.hosts == ("n2", "n1")
    through = replace(launcher(node_rank=2), joined=True)
    (found,) = judge(node(1, launcher(own_store(), node_rank=0)), node(2, closed), node(3, through))
    assert found.where.hosts == ("n2",)


def _elsewhere(store: Store) -> Meeting:
    return Meeting("n1", 29500, (HEAD,), state="open", store=store)


def _waits(store: Store, **more: Any) -> Start:  # noqa: ANN401
    rank = replace(launcher(_elsewhere(store), program="environment", nodes=(1, 1)), rank=2, world_size=3, joined=True)
    return replace(rank, **more)


_C10D: dict[str, Any] = {"backend": "c10d", "nodes": (3, 3), "run_id": "7"}
_TORCHRUN = Launch("torchrun", "n1", 29500, "c10d", (3, 3))


@each(
    "start, title",
    [
        (
            launcher(_elsewhere(Store(rendezvous=(Rendezvous("7", ("n1", "n3"), is_complete=False),))), **_C10D),
            "2 of 3 nodes have joined at n1:29500: n[1,3]",
        ),
        (
            launcher(
                _elsewhere(
                    Store(
                        rendezvous=(
                            Rendezvous("7", ("n3",), is_complete=False),
                            Rendezvous("6", ("n1", "n2"), is_complete=False),
                        )
                    )
                ),
                **_C10D,
            ),
            "the nodes were started with different --rdzv-id: 6 on n[1-2], 7 on n3",
        ),
        (
            launcher(_elsewhere(Store(connected=2, node_ranks=(("none", 2),))), nodes=(3, 3), node_rank=2),
            "2 of 3 nodes have connected to n1:29500",
        ),
        (
            launcher(_elsewhere(Store(connected=2, node_ranks=(("none", 1),))), nodes=(2, 2), node_rank=1),
            "2 nodes have connected to n1:29500, which waits for more: its --nnodes is not 2",
        ),
        (
            launcher(_elsewhere(Store(connected=3, node_ranks=(("none", 0), ("none", 1)))), nodes=(3, 3), node_rank=1),
            "3 nodes have connected to n1:29500, but none was started with --node-rank 2",
        ),
        (
            launcher(_elsewhere(Store(connected=2, node_ranks=(("none", 1), ("old", 0)))), node_rank=1),
            "n3 meets at n1:29500, the store of another job: its --rdzv-id is old, not none",
        ),
        (_waits(Store(connected=2)), "2 of 3 ranks have connected to n1:29500"),
        (
            _waits(Store(connected=2, ranks=((0, "n1"), (2, "n3")))),
            "rank 0 has gone on with 2 ranks, but rank 2 on n3 waits for WORLD_SIZE=3",
        ),
        (
            _waits(Store(connected=2, ranks=((0, "n1"), (2, "n3"))), above=_TORCHRUN),  # its store waits for no rank
            "2 of 3 ranks have connected to n1:29500",
        ),
        (
            _waits(Store(connected=3, ranks=((0, "n1"), (2, "n3")))),
            "3 ranks have connected to n1:29500, but none of them is rank 1 of 3",
        ),
    ],
)
def test_one_node_reads_from_the_store_who_is_missing(start: Start, title: str) -> None:
    (found,) = judge(node(3, start), of_ranks=start.rank is not None)
    assert (found.level, found.title, found.where.hosts) == (Level.WARN, title, ())
    assert found.fix is not None


def test_a_node_of_the_list_that_the_store_lacks_is_named_and_accused_only_after_minutes() -> None:
    listed: dict[str, tuple[str, ...]] = {"n1": (HEAD,), "n2": ("10.0.0.2",), "n3": ("10.0.0.3",)}
    for waited_s, hosts in ((60.0, ()), (400.0, ("n2",))):
        picture = node(3, _waits(Store(connected=2), waited_s=waited_s))
        picture = replace(picture, starts=tuple(replace(each, expected=listed) for each in picture.starts))
        (found,) = judge(picture, of_ranks=True)
        assert (found.title, found.where.hosts) == ("2 of 3 ranks have connected to n1:29500: n2 has not", hosts)


def test_a_store_whose_members_are_complete_gives_no_reason() -> None:
    done = Store(rendezvous=(Rendezvous("7", ("n1", "n2", "n3"), is_complete=True),))
    (found,) = judge(node(3, launcher(_elsewhere(done), **_C10D)))
    assert found.title == "n3 is connected to n1:29500 and waits for more of its 3 nodes"


def test_accelerate_gets_its_own_option_for_the_number_of_a_node() -> None:
    line = "accelerate launch --num_machines=3 --machine_rank=1 --main_process_ip=n1 a.py"
    store = Store(connected=3, node_ranks=(("none", 0), ("none", 1)))
    start = launcher(_elsewhere(store), program="accelerate", nodes=(3, 3), node_rank=1)
    (found,) = judge(node(3, replace(start, command=line)))
    assert found.fix is not None
    assert found.fix.commands == ("accelerate launch --machine_rank=2 --num_machines=3 --main_process_ip=n1 a.py",)
