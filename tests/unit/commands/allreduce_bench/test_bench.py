"""allreduce-bench's arithmetic and judgement on recorded rank messages, for cases beyond two CPU cores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
from loops import each

from distdiag.cluster.records import Payload, RankEnded, RankEvent
from distdiag.commands.allreduce_bench.command import parse_dtype, parse_fault, parse_ops
from distdiag.commands.allreduce_bench.diagnose import diagnose, repeated, times_of
from distdiag.commands.allreduce_bench.formulas import OPS, bus_factor, is_in_place, needed_bytes, shape_of
from distdiag.commands.allreduce_bench.types import Baseline, Bench, Request, SizeResult, Stat, Times, parse_sizes
from distdiag.errors import UsageError
from distdiag.launch.rank_runs import Outcome, RankTimeline
from distdiag.launch.record import Allocation, Inventory, NodeSlot, Plan, RunRecord
from distdiag.launch.types import Backend, Device, Gpus, NodeFacts

if TYPE_CHECKING:
    from distdiag.report import Report

GIB, MIB = 2**30, 2**20

# By hand from nccl-tests' PERFORMANCE.md: 2(n-1)/n for all_reduce, (n-1)/n where each rank has a part, else 1.
FACTORS: dict[str, dict[int, float]] = {
    "all_reduce": {1: 0, 2: 1, 3: 4 / 3, 4: 1.5, 8: 1.75},
    "all_gather": {1: 0, 2: 0.5, 3: 2 / 3, 4: 0.75, 8: 0.875},
    "reduce_scatter": {1: 0, 2: 0.5, 3: 2 / 3, 4: 0.75, 8: 0.875},
    "all_to_all": {1: 0, 2: 0.5, 3: 2 / 3, 4: 0.75, 8: 0.875},
    "broadcast": {1: 0, 2: 1, 3: 1, 4: 1, 8: 1},
    "reduce": {1: 0, 2: 1, 3: 1, 4: 1, 8: 1},
    "sendrecv": {1: 0, 2: 1, 3: 1, 4: 1, 8: 1},
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_the_bus_factor_is_that_of_nccl_tests(op: str, world_size: int) -> None:
    assert bus_factor(op, world_size) == pytest.approx(FACTORS[op][world_size])


def test_known_numbers() -> None:
    for op, busbw in (("all_reduce", 187.905), ("all_gather", 93.952)):
        row = reported(Request(ops=(op,), sizes=(GIB,)), {1: [0.010] * 20}, plan_of(8)).data.results[0]
        assert row.algbw_bytes_per_s == pytest.approx(107.374e9, abs=5e5)
        assert row.busbw_bytes_per_s == pytest.approx(busbw * 1e9, abs=5e5)


def test_bandwidth_is_of_the_median_time_and_no_mean_of_bandwidths() -> None:
    times = times_of([0.001] * 19 + [0.020])
    assert times.p50 == pytest.approx(0.001)
    assert times.mean == pytest.approx(0.00195)
    # The mean of the bandwidths would be 63.9 GB/s, which no time gives; size / mean time is 34.4.
    for stat, algbw in ((Stat.MEAN, 34.4), (Stat.P50, 67.1)):
        request = Request(sizes=(64 * MIB,), stat=stat)
        row = reported(request, {1: [0.001] * 19 + [0.020]}, plan_of(2)).data.results[0]
        assert row.algbw_bytes_per_s == pytest.approx(algbw * 1e9, abs=5e7)
    assert times.p99 == pytest.approx(0.020)


def test_percentiles_are_picked_as_nccl_tests_picks_them() -> None:
    times = times_of([one / 1000 for one in range(1, 201)])
    assert (times.p50, times.p99, times.min, times.max) == (0.101, 0.198, 0.001, 0.2)
    assert times.iqr == pytest.approx(0.1)


@each(
    "op, world_size, count, send, receive, size",
    [
        ("all_reduce", 3, 256, 256, 256, 1024),
        ("broadcast", 3, 256, 256, 256, 1024),
        ("sendrecv", 3, 256, 256, 256, 1024),
        ("all_gather", 4, 64, 64, 256, 1024),
        ("reduce_scatter", 4, 64, 256, 64, 1024),
        ("all_to_all", 4, 64, 256, 256, 1024),
        ("all_gather", 3, 84, 84, 252, 1008),  # 85 elements are rounded down to 16 bytes
        ("all_gather", 512, 4, 4, 2048, 8192),  # one aligned part for each rank at least
    ],
)
def test_the_size_is_that_of_the_whole_array(
    op: str, world_size: int, count: int, send: int, receive: int, size: int
) -> None:
    shape = shape_of(op, 1024, "float32", world_size)
    assert (shape.count, shape.send, shape.receive, shape.size_bytes) == (count, send, receive, size)


def test_what_is_in_place_and_what_it_takes() -> None:
    shape = shape_of("all_gather", 1024, "float32", 4)
    assert needed_bytes("all_gather", shape, "float32", in_place=False) == 1280
    assert needed_bytes("all_gather", shape, "float32", in_place=True) == 1024
    assert [op for op in OPS if is_in_place(op, None)] == ["all_reduce", "broadcast", "reduce"]
    assert [op for op in OPS if is_in_place(op, True)] == [
        "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce",
    ]  # fmt: skip


@each(
    "text, sizes",
    [
        ("64MiB", [64 * MIB]),
        ("1KiB:8KiB", [1024, 2048, 4096, 8192]),
        ("1KiB:1MiB:x4", [1024, 4096, 16384, 65536, 262144, MIB]),
        ("1KiB:10KiB:x3", [1024, 3072, 9216]),
        ("4096, 1MiB:2MiB, 4096", [4096, MIB, 2 * MIB]),
        ("1K,1KB,1k:2k", [1024, 1000, 2048]),
    ],
)
def test_sizes_are_read(text: str, sizes: list[int]) -> None:
    assert list(parse_sizes(text)) == sizes


@each("text", ["", "0", "1MiB:1KiB", "1KiB:1MiB:x1", "1KiB:1MiB:2:3", "one", "1:1GiB:x1.1", "-4"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_sizes(text)


def test_other_words_are_read() -> None:
    assert parse_ops("all") == OPS
    assert parse_ops("all-reduce,broadcast") == ("all_reduce", "broadcast")
    assert parse_dtype("torch.bfloat16") == parse_dtype("bfloat16") == "bfloat16"
    assert parse_fault("kill:1@3").place == "3"
    for wrong in ("all_reduces", "", "all,broadcast"):
        with pytest.raises(UsageError):
            parse_ops(wrong)
    for wrong in ("kill", "burn:1", "slow:1@2", "kill:1@0", "kill:x"):
        with pytest.raises(UsageError):
            parse_fault(wrong)


# What the ranks told, as a run of two nodes or one.

HERE = NodeFacts(
    host="node1",
    kernel="6.1",
    python="python3",
    gpus=Gpus(driver_present=True, visible=8),
    cuda_visible_devices=None,
    memory_available_bytes=2**40,
    shm_free_bytes=2**33,
    shm_total_bytes=2**33,
)


def plan_of(ranks: int, nodes: int = 1, device: Device = Device.CPU) -> Plan:
    each = ranks // nodes
    return Plan(
        shares=tuple(
            Allocation(
                node=f"node{node}",
                host=f"node{node}",
                first_rank=node * each,
                nproc=each,
                memory_available_bytes=2**40,
                cpus=64,
                sharing=1,
                first_local_rank=0,
                local_world_size=each,
                door=f"node{node}",
            )
            for node in range(nodes)
        ),
        backend=Backend.GLOO if device is Device.CPU else Backend.NCCL,
        device=device,
    )


def reported(
    request: Request, times_s: dict[int, list[float]], plan: Plan, late_s: dict[int, float] | None = None
) -> Report[Bench]:
    """Judge a run in which row k took times_s[k], and rank r came late_s[r] later than the first."""
    sizes = request.sizes or ()
    name = "cpu" if plan.device is Device.CPU else "NVIDIA H100 80GB HBM3"
    traces = []
    hosts = [share.host for share in plan.shares for _ in range(share.nproc)]
    for rank, host in enumerate(hosts):
        events = [_event("start", started={"device": str(plan.device), "device_name": name, "torch": "2.13"})]
        for number, seconds in times_s.items():
            late = (late_s or {}).get(rank, 0.0)
            inside = sorted(seconds)[len(seconds) // 2] - late
            row: dict[str, Any] = {"number": number, "wrong": 0, "late_ns": late * 1e9, "inside_ns": inside * 1e9}
            row["iterations"] = len(seconds)
            if rank == 0:
                row["times_ns"] = [round(one * 1e9) for one in seconds]
            events.append(_event("bench", row=row))
        events.append(_event("done", finished=True))
        ending = RankEnded(rank=0, status=0, elapsed_s=2.0, tail="", oom_kills=0)
        traces.append(RankTimeline(rank=rank, local_rank=rank, host=host, pid=rank, events=events, ending=ending))
    assert len(sizes) >= max(times_s)
    nodes = [NodeSlot(node=share.node, host=share.host, slots=None, facts=HERE) for share in plan.shares]
    return diagnose(request, Inventory(places=tuple(nodes)), plan, RunRecord(Outcome.FINISHED, traces, {}, 0.0))


def _event(stage: str, **payload: Any) -> RankEvent:  # noqa: ANN401 - any JSON
    return RankEvent(
        rank=0, stage=stage, at=1, note="a step", waiting=False, elapsed_s=1.0, payload=cast("Payload", payload)
    )


def ids(report: Report[Bench]) -> set[str]:
    return {finding.id.partition(".")[2] for finding in report.findings} - {"cpu-only", "single-rank"}


THREE = Request(device=Device.CPU, sizes=(MIB, 4 * MIB, 16 * MIB))


def test_a_rank_that_is_late_in_most_rows_is_named() -> None:
    times = {1: [0.010] * 20, 2: [0.020] * 20, 3: [0.030] * 20}
    report = reported(THREE, times, plan_of(4), {2: 0.008})
    late = next(finding for finding in report.findings if finding.id.endswith(".late-rank"))
    assert late.where.ranks == (2,)
    assert report.verdict == "warn"
    assert "rank 2" in report.summary


@pytest.mark.parametrize(
    "late",
    [{}, {0: 0.002, 1: 0.001, 2: 0.002}, {0: 0.008, 1: 0.007}, {3: 0.00004}],
    ids=["nobody", "a little, several", "two alike", "less than can be told"],
)
def test_nobody_is_called_late_without_being_clearly_so(late: dict[int, float]) -> None:
    times = {1: [0.010] * 20, 2: [0.020] * 20, 3: [0.030] * 20}
    assert "late-rank" not in ids(reported(THREE, times, plan_of(4), late))


def test_what_the_times_show_is_named() -> None:
    rising = {1: [0.001] * 100, 2: [0.004] * 100, 3: [0.016] * 100}
    assert ids(reported(THREE, rising, plan_of(2))) == set()
    assert ids(reported(THREE, {**rising, 2: [0.004] * 96 + [0.050] * 4}, plan_of(2))) == {"outliers"}


def test_times_that_vary_are_unsteady() -> None:
    spread = [0.001] * 15 + [0.010] * 10
    assert "unsteady" in ids(reported(THREE, {1: spread, 2: spread, 3: spread}, plan_of(2)))


def test_ranks_of_two_nodes_arrive_each_from_its_own() -> None:
    data = reported(THREE, {1: [0.001] * 20}, plan_of(4, 2)).data
    assert data.nodes == 2
    assert [(one.rank, one.host) for one in data.arrivals] == list(enumerate(["node0", "node0", "node1", "node1"]))


def test_one_rank_has_no_bandwidth() -> None:
    report = reported(THREE, {1: [0.001] * 20}, plan_of(1))
    assert report.data.results[0].busbw_bytes_per_s == 0
    assert "it sends nothing" in report.summary


@pytest.mark.parametrize(
    ("seconds", "nodes", "verdict", "finding"),
    [
        (4 * GIB * 1.75 / 480e9, 1, "ok", set()),
        (4 * GIB * 1.75 / 365e9, 1, "ok", set()),
        (4 * GIB * 1.75 / 250e9, 1, "warn", {"bandwidth-low"}),
        (4 * GIB * 1.75 / 100e9, 1, "fail", {"bandwidth-bad"}),
    ],
)
def test_known_hardware_gets_a_verdict(seconds: float, nodes: int, verdict: str, finding: set[str]) -> None:
    request = Request(sizes=(4 * GIB,))
    report = reported(request, {1: [seconds] * 20}, plan_of(8, nodes, Device.CUDA))
    assert (report.verdict, ids(report)) == (verdict, finding)
    assert report.data.verdict is not None
    assert report.data.verdict.lines


def test_a_small_message_is_not_judged_by() -> None:
    report = reported(Request(sizes=(64 * MIB,)), {1: [1.0] * 20}, plan_of(8, 1, Device.CUDA))
    assert report.verdict == "ok"
    assert report.data.verdict is not None
    assert (report.data.verdict.judgement, "too small" in report.data.verdict.lines[0]) == ("unknown", True)


def earlier(*seconds: float, world_size: int = 2, spread: float = 0.02, device: str = "cpu") -> Baseline:
    rows = tuple(
        SizeResult(
            op="all_reduce",
            size_bytes=size,
            dtype="float32",
            in_place=True,
            time_s=Times(p50=one, p99=one, min=one, max=one, mean=one, iqr=spread * one),
            algbw_bytes_per_s=size / one,
            busbw_bytes_per_s=size / one,
            wrong=0,
        )
        for size, one in zip(THREE.sizes or (), seconds, strict=False)
    )
    return Baseline(rows=rows, made_by="distdiag 0.1.0", world_size=world_size, device=device, notes=())


@each(
    "baseline, finding, verdict",
    [
        (earlier(0.001, 0.004, 0.016), set(), "ok"),
        (earlier(0.00095, 0.0038, 0.0152), set(), "ok"),
        (earlier(0.0005, 0.002, 0.008), {"slower"}, "fail"),
        (earlier(0.0005, 0.002, 0.008, spread=5.0), {"slower"}, "fail"),
        (earlier(0.002, 0.008, 0.032), set(), "ok"),
        (earlier(0.001, 0.004, 0.008), {"slower"}, "fail"),
        (earlier(0.001, 0.004, 0.016, world_size=8), {"compare-differs"}, "unknown"),
        (earlier(0.001, 0.004, 0.016, device="NVIDIA A100-SXM4-80GB"), {"compare-differs"}, "unknown"),
        (earlier(), {"compare-differs"}, "unknown"),
    ],
)
def test_a_run_beside_an_earlier_one(baseline: Baseline, finding: set[str], verdict: str) -> None:
    request = Request(device=Device.CPU, sizes=THREE.sizes, baseline=baseline)
    report = reported(request, {1: [0.001] * 20, 2: [0.004] * 20, 3: [0.016] * 20}, plan_of(2))
    assert (ids(report), report.verdict) == (finding, verdict)
    assert ("none of 3 rows is slower than in the earlier run" in report.summary) == (verdict == "ok")


def test_of_slower_rows_only_those_count_that_stay_slower_when_measured_again() -> None:
    request = Request(device=Device.CPU, sizes=THREE.sizes, baseline=earlier(0.0005, 0.002, 0.016))
    times = [{1: [one] * 20, 2: [two] * 20, 3: [0.016] * 20} for one, two in ((1e-3, 4e-3), (5e-4, 4e-3), (1e-3, 2e-3))]
    first, second, third = (reported(request, one, plan_of(2)) for one in times)
    report = repeated(request, first, second.data)
    assert ([row.slower for row in report.data.compared], ids(report)) == ([False, True, False], {"slower"})
    assert "1 of 3 rows" in report.summary
    report = repeated(request, report, third.data)
    assert (ids(report), report.verdict, "no row stays slower" in report.summary) == (set(), "ok", True)
