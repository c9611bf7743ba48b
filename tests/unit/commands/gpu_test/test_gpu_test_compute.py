"""What gpu-test makes of the products and copies of its ranks, and how the checks see a single changed bit."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from distdiag.agent.rank_progress import Progress
from distdiag.commands.gpu_test.compute import Compute
from distdiag.commands.gpu_test.compute_findings import findings_of
from distdiag.commands.gpu_test.rank import Rank
from distdiag.commands.gpu_test.types import Request
from distdiag.facts.gpu.computed import SLOW, Computed, Product, bad_ranks, slow
from distdiag.facts.gpu.gpu_health import GpuHealth
from distdiag.launch.rank_runs import RankTimeline
from distdiag.report import Finding, Level

H100 = "NVIDIA H100 80GB HBM3, 132 multiprocessors, torch 2.13.0, 13.0, n 8192"
BANDWIDTHS = {"copy": 2.6e12, "triad": 2.8e12, "to device": 54e9, "from device": 54e9}


def gpu(tflops: float = 640.0, digest: str = "aa", model: str = H100, **bandwidths: float) -> Computed:
    product = Product("bfloat16", 8192, 100, 2 * 8192**3 / tflops / 1e12, digest)
    return Computed(model, (product,), {**BANDWIDTHS, **{k.replace("_", " "): v for k, v in bandwidths.items()}})


def judged(*ranks: Computed) -> list[Finding]:
    traces = [RankTimeline(rank=rank, local_rank=rank % 8, host=f"n{rank // 8}") for rank in range(len(ranks))]
    return findings_of(dict(enumerate(ranks)), traces, Request())


def named(*ranks: Computed) -> list[tuple[str, Level, tuple[int, ...]]]:
    return [(found.id.partition(".")[2], found.level, found.where.ranks) for found in judged(*ranks)]


def test_equal_devices_that_differ_as_devices_do_are_no_finding() -> None:
    assert named(*[gpu(640 + 8 * rank, copy=2.5e12 + 2e10 * rank) for rank in range(8)]) == []


@pytest.mark.parametrize("others", [1, 2, 7])
def test_a_device_at_70_percent_of_the_others_is_named_alone(others: int) -> None:
    assert named(gpu(0.7 * 640), *[gpu()] * others) == [("slow-compute", Level.FAIL, (0,))]


def test_most_devices_decide_what_is_usual_and_of_two_halves_the_faster() -> None:
    assert slow({0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0}, SLOW) == (2.0, [0, 1])
    assert slow({0: 2.0, 1: 1.0, 2: 1.0}, SLOW) == (1.0, [])
    assert slow({}, SLOW) == (0.0, [])


def test_a_slow_gpu_comes_with_what_it_says_under_load() -> None:
    health = GpuHealth(
        0, "0000:1b:00.0", clock_mhz=1200, max_clock_mhz=1980, slowdowns=("HW Thermal Slowdown",), temperature_c=88,
        power_w=310, power_limit_w=700, pcie_width="16x", pcie_width_max="16x",
    )  # fmt: skip
    (found,) = judged(gpu(), gpu(), replace(gpu(400), health=health))
    assert "rank 2: throttled by HW Thermal Slowdown" in found.evidence
    assert any("SM clock 1200 of 1980 MHz, power 310 of 700 W, 88 C" in line for line in found.evidence)


def test_a_narrow_link_to_the_host_is_no_slow_compute() -> None:
    assert named(gpu(), gpu(to_device=27e9, from_device=26e9), gpu()) == [("slow-memory", Level.FAIL, (1,))]


def test_a_slow_core_is_a_warning() -> None:
    core = Computed("EPYC", (Product("float32", 384, 90, 0.001, "aa"),), {"copy": 2e10}, cpus=64)
    slow_core = replace(core, products=(replace(core.products[0], best_s=0.0014),))
    assert named(core, core, slow_core) == [("slow-compute", Level.WARN, (2,))]


def test_ranks_that_share_a_gpu_are_not_compared() -> None:
    first, second = replace(gpu(), device="a"), replace(gpu(300), device="a")
    assert named(first, second) == []
    assert named(first, second, replace(gpu(), device="b"), replace(gpu(300), device="c")) == [
        ("slow-compute", Level.FAIL, (3,))
    ]


def test_devices_of_other_models_are_not_compared() -> None:
    a100 = "NVIDIA A100-SXM4-80GB, 108 multiprocessors, torch 2.13.0, 13.0"
    assert named(gpu(), gpu(), gpu(240, digest="bb", model=a100), gpu(240, digest="bb", model=a100)) == []


def test_the_device_whose_bits_differ_from_most_is_named() -> None:
    assert named(gpu(), gpu(digest="bb"), gpu()) == [("compute-differs", Level.FAIL, (1,))]


def test_of_two_that_differ_none_is_accused() -> None:
    assert named(gpu(), gpu(digest="bb")) == [("compute-differs", Level.UNKNOWN, (0, 1))]


def test_what_one_pass_leaves_out_of_the_pairs_is_what_is_reported() -> None:
    ranks = [gpu(), gpu(400), gpu(digest="bb"), gpu(), gpu(), gpu()]
    summaries = {rank: own.summary() for rank, own in enumerate(ranks)}
    assert bad_ranks(summaries) == ({1}, {2})
    assert {rank for found in judged(*ranks) for rank in found.where.ranks} == {1, 2}
    assert bad_ranks({0: gpu().summary(), 1: gpu(digest="bb").summary()}) == (set(), set())


def test_a_gpu_with_less_free_memory_is_not_compared() -> None:
    assert named(gpu(), gpu(), gpu(300, digest="bb", model=H100.replace("n 8192", "n 1024"))) == []


def test_own_wrong_results_come_first_and_are_not_said_twice() -> None:
    odd = replace(gpu().products[0], digest="bb", wrong=1, wrong_repetition=7, first_index=12, got="2", expected="1")
    (found,) = judged(gpu(), replace(gpu(), products=(odd,)), gpu())
    assert (found.id, found.where.ranks) == ("gpu-test.wrong-compute", (1,))
    assert "1 element of a 8192x8192 bfloat16 product changed in repetition 7 of 100" in found.title


def test_all_gpus_far_below_the_data_sheet_are_a_warning() -> None:
    assert named(gpu(300), gpu(310)) == [("compute-below-peak", Level.WARN, (0, 1))]


@pytest.fixture(name="compute", scope="module")
def compute_on_this_cpu() -> Compute:
    rank = Rank(
        {"rank": 0, "world_size": 1, "device": "cpu", "fault": None}, Progress(os.open(os.devnull, os.O_WRONLY))
    )
    rank.import_torch()
    rank.choose_device()
    return Compute(rank, 0.02)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_right_product_passes_all_checks(compute: Compute, precision: str) -> None:
    left, right = compute._fractions(128, 37, 101), compute._fractions(128, 59, 17)
    product, result = compute._repeat(Product(precision, 128), compute._multiply(precision, left, right), 0.02)
    assert product.repetitions >= 3
    assert (product.wrong_repetition, product.wrong) == (0, 0)
    assert compute._inexact(precision) == 0
    assert compute._sums_off(precision, left, right, result) == 0
    result[3] += result.abs().max()
    assert compute._sums_off(precision, left, right, result) > 0
    result[3, 5] = float("nan")
    assert compute._sums_off(precision, left, right, result) == 256


@pytest.mark.parametrize("bit", [0, 7, 15])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_any_changed_bit_changes_the_digest(compute: Compute, precision: str, bit: int) -> None:
    left, right = compute._fractions(64, 37, 101), compute._fractions(64, 59, 17)
    result = compute._multiply(precision, left, right)()
    before = compute._digest(result)
    import torch

    bits = result.view(torch.int32 if precision == "float32" else torch.int16)
    flip = 1 << bit if bit < 15 or precision == "float32" else -(1 << 15)
    for at in ((0, 0), (63, 63), (31, 5)):
        bits[at] ^= flip
        assert compute._digest(result) != before
        bits[at] ^= flip
    assert compute._digest(result) == before
