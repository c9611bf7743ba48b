"""gpu-test's judgement on facts: what cannot be had on a machine without GPUs, and who is to blame."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from loops import each

from distdiag.cluster.hosts import fold_ranks, name_ranks
from distdiag.cluster.records import Payload, RankEnded, RankEvent, RankInspected
from distdiag.commands.gpu_test.diagnose import diagnose
from distdiag.commands.gpu_test.types import Request
from distdiag.diagnosis.wording import format_size
from distdiag.errors import DistdiagError, UsageError
from distdiag.knowledge import logs
from distdiag.launch.environment_checks import hangs, nodes_that_differ
from distdiag.launch.findings import covers, not_started
from distdiag.launch.plan import make_plan
from distdiag.launch.rank_runs import Outcome, RankTimeline
from distdiag.launch.record import Inventory, NodeSlot, Plan, RunRecord
from distdiag.launch.types import Backend, Device, Gpus, NodeFacts
from distdiag.options import parse_size
from distdiag.report import Finding


def node(*, visible: int | None = 0, driver: bool = False, error: str = "", hidden: str | None = None) -> NodeFacts:
    return NodeFacts(
        host="node1",
        kernel="6.1",
        python="/usr/bin/python3",
        gpus=Gpus(driver, visible, error),
        cuda_visible_devices=hidden,
        memory_available_bytes=2**33,
        shm_free_bytes=2**33,
        shm_total_bytes=2**33,
    )


def place(facts: NodeFacts, host: str = "node1", slots: int | None = None) -> NodeSlot:
    return NodeSlot(node=host, host=host, slots=slots, facts=facts)


HERE = place(node())


def step(stage: str, at: int, *, waiting: bool = False, **payload: Any) -> RankEvent:  # noqa: ANN401
    return RankEvent(
        rank=0, stage=stage, at=at, note="a step", waiting=waiting, elapsed_s=1.0, payload=cast("Payload", payload)
    )


def seen(state: str, *frames: str) -> RankInspected:
    return RankInspected(
        rank=0, state=state, wait_channel="", frames=frames, stack_error="" if frames else "no", tail=""
    )


def trace(
    rank: int, *events: RankEvent, ended: int | None = None, tail: str = "", look: RankInspected | None = None
) -> RankTimeline:
    ending = None if ended is None else RankEnded(rank=0, status=ended, elapsed_s=2.0, tail=tail, oom_kills=0)
    return RankTimeline(
        rank=rank, local_rank=rank, host="node1", pid=100 + rank, events=list(events), ending=ending, inspection=look
    )


def judged(
    outcome: Outcome, *traces: RankTimeline, request: Request | None = None
) -> tuple[dict[str, Finding], list[str]]:
    request = request or Request(device=Device.CPU)
    plan = make_plan(Request(nproc=len(traces), device=Device.CPU), [HERE])
    assert isinstance(plan, Plan)
    report = diagnose(request, Inventory(places=(HERE,)), plan, RunRecord(outcome, list(traces), {}, 30.0))
    statuses = [rank.status for rank in report.data.ranks]
    return {finding.id.partition(".")[2]: finding for finding in report.findings}, list(statuses)


def test_the_rank_with_the_fewest_steps_is_missing() -> None:
    waits = step("reduce", 3, waiting=True)
    found, statuses = judged(
        Outcome.STALLED,
        trace(0, waits, look=seen("S", "all_reduce (d.py:1)")),
        trace(1, step("reduce", 2), look=seen("R", "load (train.py:26)")),
        trace(2, waits, look=seen("S", "all_reduce (d.py:1)")),
    )
    assert list(found) == ["rank-missing"]
    assert found["rank-missing"].where.ranks == (1,)
    assert "load (train.py:26)" in found["rank-missing"].title
    assert statuses == ["waiting", "missing", "waiting"]


def test_a_foreign_answer_at_the_port_of_a_rank_0_that_failed_is_a_consequence() -> None:
    no_torch = {"kind": "no-torch", "message": "No module named 'torch'"}
    foreign = {"kind": "port-foreign", "message": "HTTP/1.1 400", "address": "node1", "port": 29500}
    second = trace(1, step("connect", 2, trouble=foreign))
    found, _ = judged(Outcome.FAULT, trace(0, step("start", 1, trouble=no_torch)), second)
    assert list(found) == ["no-torch"]
    found, _ = judged(Outcome.FAULT, trace(0, step("connect", 2, waiting=True)), second)
    assert list(found) == ["port-foreign"]


def at_work(state: str = "S", **done: Any) -> RankInspected:  # noqa: ANN401
    return RankInspected(rank=0, state=state, wait_channel="", frames=(), stack_error="no", tail="", **done)


@each(
    "late, look, peer, level",
    [
        (step("start", 0), at_work(busy=0.01), seen("S"), "fail"),
        (step("start", 0), at_work(busy=0.9), seen("S"), "unknown"),
        (step("start", 0), at_work(read_bytes=2**20), seen("S"), "unknown"),
        (step("start", 0), at_work("T", busy=0.9), seen("S"), "fail"),
        (step("start", 0), seen("S"), at_work(busy=0.9), "fail"),
        (step("reduce", 1, waiting=True), seen("S"), seen("S"), "fail"),
        (step("reduce", 1, waiting=True), at_work(read_bytes=2**20), seen("S"), "fail"),
        # It waits for data that a peer could not send yet, for want of a core.
        (step("reduce", 1, waiting=True), seen("S"), at_work(busy=0.9), "unknown"),
    ],
)
def test_a_rank_that_is_at_work_may_only_be_slow(
    late: RankEvent, look: RankInspected, peer: RankInspected, level: str
) -> None:
    ahead = step("reduce", 3, waiting=True)
    found, statuses = judged(Outcome.STALLED, trace(0, ahead, look=peer), trace(1, late, look=look))
    assert list(found) == ["rank-missing"]
    assert found["rank-missing"].level == level
    assert found["rank-missing"].where.ranks == (1,)
    assert statuses == ["waiting", "missing"]


def test_a_gpu_rank_that_spins_while_it_waits_is_not_at_work() -> None:
    on_gpu = step("start", 2, started={"device": "cuda:0"})
    waits = step("reduce", 3, waiting=True)
    spins = at_work("R", busy=1.0)
    found, _ = judged(Outcome.STALLED, trace(0, on_gpu, waits, look=spins), trace(1, on_gpu, waits, look=spins))
    assert found["all-waiting"].level == "fail"


def test_a_stopped_rank_is_missing_even_when_it_came_further_than_the_others() -> None:
    found, _ = judged(
        Outcome.STALLED,
        trace(0, step("init", 1, waiting=True), look=seen("T", "init (rank.py:1)")),
        trace(1, step("connect", 0, waiting=True), look=seen("S", "greet (rendezvous.py:1)")),
    )
    assert found["rank-missing"].where.ranks == (0,)


def test_when_all_are_in_the_same_step_nobody_is_blamed() -> None:
    waits = step("reduce", 3, waiting=True)
    found, statuses = judged(Outcome.STALLED, trace(0, waits, look=seen("S")), trace(1, waits, look=seen("S")))
    assert list(found) == ["all-waiting"]
    assert statuses == ["waiting", "waiting"]


def test_when_all_are_busy_with_themselves_the_network_is_not_suspected() -> None:
    importing = step("start", 0)
    found, _ = judged(Outcome.STALLED, trace(0, importing, look=seen("D")), trace(1, importing, look=seen("D")))
    assert list(found) == ["all-busy"]
    assert found["all-busy"].level == "fail"
    found, _ = judged(Outcome.STALLED, trace(0, importing, look=seen("R")), trace(1, importing, look=seen("D")))
    assert found["all-busy"].level == "unknown"


def test_the_rarest_stack_is_shown_first_when_all_wait() -> None:
    waits = step("reduce", 3, waiting=True)
    traces = [
        trace(rank, waits, look=seen("S", "load (a.py:1)" if rank == 2 else "all_reduce (d.py:1)")) for rank in range(4)
    ]
    found, _ = judged(Outcome.STALLED, *traces)
    assert found["all-waiting"].evidence[0].startswith("rank 2 ")


def test_an_interrupted_hang_names_who_is_behind_without_calling_it_a_fault() -> None:
    found, statuses = judged(
        Outcome.INTERRUPTED,
        trace(0, step("reduce", 3, waiting=True), look=seen("S")),
        trace(1, step("reduce", 2), look=seen("S", "sleep (a.py:1)")),
    )
    assert found["rank-missing"].level == "unknown"
    assert statuses == ["waiting", "missing"]


def test_commands_that_repeat_the_test_keep_what_was_typed() -> None:
    request = Request(program="/opt/distdiag", nproc=16, size_bytes=2**30, device=Device.CPU)
    assert request.again(stall="120") == "/opt/distdiag gpu-test --nproc 16 --device cpu --stall 120 --size 1073741824"


def test_words_of_survivors_are_no_cause() -> None:
    complaint = {"kind": "exception", "message": "[enforce fail at pair.cc:1] Connection closed by peer [::1]:1"}
    found, statuses = judged(
        Outcome.FAULT,
        trace(0, step("reduce", 4, trouble=complaint, fatal=True), ended=1),
        trace(1, step("reduce", 3), ended=-9),
        trace(2, step("reduce", 3), ended=-6, tail="terminate called\n  what(): Connection reset by peer"),
    )
    assert list(found) == ["rank-died"]
    assert found["rank-died"].where.ranks == (1,)
    assert statuses == ["waiting", "died", "waiting"]


def test_a_complaint_that_nothing_else_explains_is_still_told() -> None:
    complaint = {"kind": "exception", "message": "Connection closed by peer"}
    found, statuses = judged(
        Outcome.FAULT,
        trace(0, step("reduce", 4, trouble=complaint, fatal=True), ended=1),
        trace(1, step("reduce", 3, waiting=True)),
    )
    assert list(found) == ["rank-failed"]
    assert statuses == ["failed", "waiting"]


def test_an_exit_after_the_last_barrier_is_still_a_death() -> None:
    finished = step("done", 2, finished=True)
    found, _ = judged(Outcome.FAULT, trace(0, finished, ended=0), trace(1, step("done", 1), ended=-11))
    assert found["rank-died"].where.ranks == (1,)
    assert "SIGSEGV" in found["rank-died"].title


def test_versions_without_a_majority_blame_all_that_differ() -> None:
    differing = {"nccl": {"2.19.3": [0], "2.21.5": [1]}}
    held = step("agree", 2, waiting=True, held=True)
    found, statuses = judged(
        Outcome.FAULT,
        trace(0, step("agree", 1, trouble={"kind": "mismatch", "differing": differing}), held, ended=1),
        trace(1, held, ended=1),
    )
    assert found["mismatch"].where.ranks == (0, 1)
    assert statuses == ["failed", "failed"]


def test_the_out_of_memory_killer_is_named_when_it_acted() -> None:
    dead = trace(1, step("memory", 0), ended=-9)
    dead.ending = RankEnded(rank=0, status=-9, elapsed_s=1, tail="", oom_kills=1)
    found, _ = judged(Outcome.FAULT, trace(0, step("done", 0, waiting=True)), dead)
    assert found["rank-died"].fix is not None
    assert "OOM killer killed 1 process" in found["rank-died"].fix.text


def test_ids_of_corrupt_memory_and_of_a_run_without_ranks() -> None:
    corrupt = {"kind": "memory-corrupt", "chunks": [3, 9], "chunk_bytes": 2**20}
    found, _ = judged(Outcome.FAULT, trace(0, step("memory", 1, trouble=corrupt, fatal=True), ended=1))
    assert "2 chunks" in found["memory-corrupt"].title
    started = not_started(DistdiagError("no space left", hint="free some"), Request())
    assert (started.id, started.level, started.title) == (
        "gpu-test.not-started",
        "unknown",
        "no rank was started: no space left",
    )


def test_a_gpu_that_torch_has_no_code_for_is_named() -> None:
    started = {"capability": "12.0", "arch_list": ["sm_80", "sm_90"], "device_name": "NVIDIA RTX 5090"}
    error = {"kind": "exception", "message": "CUDA error: no kernel image is available for execution on the device"}
    found, _ = judged(
        Outcome.FAULT,
        trace(0, step("start", 2, started=started), step("reduce", 4, trouble=error, fatal=True), ended=1),
    )
    assert next(iter(found)) == "arch-unsupported"
    assert "NVIDIA RTX 5090 (12.0)" in found["arch-unsupported"].title


@each(
    "archs, capability, runs",
    [
        (["sm_80"], "8.0", True),
        (["sm_80"], "8.6", True),
        (["sm_86"], "8.0", False),
        (["sm_80", "sm_86"], "9.0", False),
        (["compute_80"], "12.0", True),
        (["sm_90a"], "9.0", True),
        (["sm_90a"], "9.1", False),
        (["sm_100", "sm_120"], "12.0", True),
        (["sm_100f"], "10.3", True),
        ([], "9.0", False),
    ],
)
def test_which_gpus_an_arch_list_covers(archs: list[str], capability: str, runs: bool) -> None:
    assert covers(archs, capability) is runs


@each(
    "request_, facts, expected",
    [
        (Request(), node(), (2, "gloo", "cpu")),
        (Request(nproc=5), node(), (5, "gloo", "cpu")),
        (Request(), node(visible=8, driver=True), (8, "nccl", "cuda")),
        (Request(nproc=3), node(visible=8, driver=True), (3, "nccl", "cuda")),
        (Request(backend=Backend.GLOO), node(visible=8, driver=True), (2, "gloo", "cpu")),
        (Request(backend=Backend.GLOO, device=Device.CUDA, nproc=4), node(visible=2, driver=True), (4, "gloo", "cuda")),
        (Request(backend=Backend.GLOO), node(visible=None, driver=True, error="wedged"), (2, "gloo", "cpu")),
        (Request(), node(visible=0, driver=True, hidden=""), (2, "gloo", "cpu")),
    ],
)
def test_what_is_run_by_default(request_: Request, facts: NodeFacts, expected: tuple[int, str, str]) -> None:
    plan = make_plan(request_, [place(facts)])
    assert isinstance(plan, Plan)
    assert (plan.nproc, plan.backend, plan.device) == expected


@pytest.mark.parametrize(
    ("request_", "facts", "id_"),
    [
        (Request(nproc=9), node(visible=8, driver=True), "gpu-test.too-few-gpus"),
        (Request(backend=Backend.NCCL), node(), "gpu-test.too-few-gpus"),
        (Request(device=Device.CUDA), node(driver=True, hidden=""), "gpu-test.too-few-gpus"),
        (Request(), node(visible=None, driver=True, error="cuInit failed"), "gpu-test.cuda-unavailable"),
    ],
)
def test_what_cannot_be_run_says_why(request_: Request, facts: NodeFacts, id_: str) -> None:
    finding = make_plan(request_, [place(facts)])
    assert isinstance(finding, Finding)
    assert finding.id == id_
    assert finding.fix is not None
    assert finding.fix.commands


@each(
    "words, role",
    [
        ("RuntimeError: [pair.cc:144] Connection closed by peer [127.0.0.1]:3456", "consequence"),
        ("Read error [127.0.0.1]:2: Connection reset by peer", "consequence"),
        ("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?", "consequence"),
        ("libtorch_cpu.so: failed to map segment from shared object", "cause"),
        ("[Errno 101] Network is unreachable", "cause"),
        ("Timed out waiting 8000ms for recv operation to complete", "consequence"),
        ("NCCL WARN Call to posix_fallocate failed : No space left on device", "cause"),
        ("CUDA error: no kernel image is available for execution on the device", "cause"),
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000", "cause"),
        ("Unable to find address for: nosuch0", "cause"),
    ],
)
def test_known_words_are_recognised(words: str, role: str) -> None:
    known = logs.recognise(words)
    assert known is not None
    assert known.role == role


def test_amounts_are_read_by_people() -> None:
    assert [format_size(size) for size in (4, 2**20, 1000 * 2**20, 3 * 2**29)] == [
        "4 B",
        "1 MiB",
        "1000 MiB",
        "1.5 GiB",
    ]


def test_ranks_fold() -> None:
    assert fold_ranks([8, 0, 1, 2, 4, 4]) == "0-2,4,8"
    assert fold_ranks([]) == ""
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([3, 4]) == "ranks 3-4"
    assert name_ranks(range(1, 1000, 4)) == "250 ranks (1,5,9,13,17,21,25,29,33,37,41,45,49,53,57,...)"


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_size(text) for text in ("4096", "64MiB", "1.5GiB", "500MB", "2k")] == [
        4096,
        64 * 2**20,
        3 * 2**29,
        500 * 10**6,
        2000,
    ]
    with pytest.raises(UsageError):
        parse_size("-1")


def with_variables(host: str, **variables: str) -> NodeSlot:
    return place(replace(node(), variables=variables), host)


def test_a_variable_that_hangs_torch_where_it_is_not_set_everywhere_is_a_fault() -> None:
    detail = with_variables("node2", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    found = hangs(Request(), [with_variables("node1"), detail, with_variables("node3")])
    assert found is not None
    assert (found.id, found.level, found.where.hosts) == ("gpu-test.debug-differs", "fail", ("node2",))
    assert hangs(Request(), [detail, detail]) is None
    assert hangs(Request(), [with_variables("node1"), with_variables("node2", TORCH_DISTRIBUTED_DEBUG="INFO")]) is None


@pytest.mark.parametrize(("name", "level"), [("NCCL_ALGO", "warn"), ("NCCL_SOCKET_IFNAME", "info")])
def test_other_variables_that_differ_are_told(name: str, level: str) -> None:
    places = [with_variables("node1", **{name: "a"}), with_variables("node2")]
    (found,) = nodes_that_differ(Request(), places, [])
    assert (found.level, found.where.hosts) == (level, ("node2",))
    assert name in found.title


def test_limits_that_differ_are_told() -> None:
    places = [
        place(replace(node(), limits={"-l": size}), host) for size, host in (("64", "node1"), ("unlimited", "n2"))
    ]
    (found,) = nodes_that_differ(Request(), places, [])
    assert "ulimit -l" in found.title


@pytest.mark.parametrize(
    ("facts", "level", "reported"),
    [
        ({"nvidia_driver": "535.54.03"}, "warn", "NVIDIA driver: 535.54.03 on n2; none on node1"),
        ({"rdma_ports": {"InfiniBand, 400 Gb/s": 7}}, "warn", "active RDMA ports: 7 x InfiniBand, 400 Gb/s on n2"),
        ({"machine": "p5e.48xlarge"}, "info", "machine: p5e.48xlarge on n2"),
    ],
)
def test_nodes_that_are_not_alike_are_told_apart(facts: dict[str, Any], level: str, reported: str) -> None:
    (found,) = nodes_that_differ(Request(), [place(node()), place(replace(node(), **facts), "n2")], [])
    assert found.level == level
    assert reported in found.title
