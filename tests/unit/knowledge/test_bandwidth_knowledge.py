"""Published bandwidths, arithmetic on them, and the judgement of a measured bandwidth."""

from __future__ import annotations

import re

import pytest
from loops import each

from distdiag.knowledge.bandwidth import (
    Algorithm,
    Expected,
    Kind,
    busbw_factor,
    find_gpu,
    nic_share,
    tables,
    wire_factor,
)
from distdiag.knowledge.busbw import Case, Judgement

GB = 1e9
H100 = "NVIDIA H100 80GB HBM3"
A100 = "NVIDIA A100-SXM4-80GB"

# What torch says; older drivers leave out "NVIDIA".
NAMES = {
    "Tesla P100-SXM2-16GB": "P100 SXM",
    "Tesla V100-SXM2-16GB": "V100 SXM2",
    "Tesla V100-SXM2-32GB": "V100 SXM2",
    "Tesla V100-SXM3-32GB": "V100 SXM3",
    "Tesla V100-PCIE-16GB": "V100 PCIe",
    "Tesla V100S-PCIE-32GB": "V100 PCIe",
    "Tesla T4": "T4",
    "A100-SXM4-40GB": "A100 SXM",
    "NVIDIA A100-SXM4-80GB": "A100 SXM",
    "NVIDIA A100-SXM-64GB": "A100 SXM",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe",
    "NVIDIA A100 80GB PCIe": "A100 PCIe",
    "NVIDIA A800-SXM4-80GB": "A800 SXM",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 64GB HBM2": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H800": "H800 SXM",
    "NVIDIA H20": "H20",
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA GH200 144G HBM3e": "GH200",
    "NVIDIA B200": "B200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB200": "GB200",
    "NVIDIA GB300": "GB300",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI300X VF": "MI300X",
    "AMD Instinct MI325X": "MI325X",
    "AMD Instinct MI355X": "MI350X and MI355X",
    "NVIDIA RTX A6000": "RTX A6000 and A40",
    "NVIDIA RTX 6000 Ada Generation": "PCIe 4 card",
    "NVIDIA A10G": "PCIe 4 card",
    "NVIDIA L4": "PCIe 4 card",
    "NVIDIA L40S": "PCIe 4 card",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000",
    "NVIDIA GeForce RTX 3090": "GeForce RTX 3090",
    "NVIDIA GeForce RTX 4090": "GeForce RTX 4090",
    "NVIDIA GeForce RTX 5090": "GeForce RTX 5090",
}
UNKNOWN_NAMES = (
    None,
    "",
    "NVIDIA",
    "NVIDIA H100",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    "NVIDIA H800 PCIe",
    "NVIDIA GB10",
    "AMD Instinct MI250X / MI250",
    "NVIDIA GeForce RTX 3060",
)


def judge(busbw_gb: float, name: str | None, ranks: int, *, nodes: int = 1, nic_gb: float | None = None) -> Case:
    """Assess a busbw in GB/s on `nodes` nodes with `ranks` ranks each."""
    nic = None if nic_gb is None else nic_gb * GB
    return Case(busbw=busbw_gb * GB, device_name=name, world_size=ranks * nodes, nodes=nodes, nic_bytes_per_s=nic)


def expected(assessment: Case) -> float | None:
    return assessment.bar.expected if assessment.bar else None


def said(assessment: Case) -> str:
    return "\n".join(assessment.lines)


# The table.


@each("device, name", NAMES.items())
def test_each_gpu_is_one_of_the_table(device: str, name: str) -> None:
    assert [gpu.name for gpu in tables().gpus if re.fullmatch(gpu.pattern, device)] == [name]


@each("device", UNKNOWN_NAMES)
def test_what_the_table_does_not_mean_is_not_found(device: str | None) -> None:
    assert find_gpu(device) is None


def test_every_gpu_of_the_table_is_tried_above() -> None:
    assert {gpu.name for gpu in tables().gpus} == set(NAMES.values())


def test_every_row_has_a_source_and_no_source_is_left_over() -> None:
    sources = {gpu.source for gpu in tables().gpus} | {row.source for row in tables().expected}
    of_the_arithmetic = {tables().sources[key] for key in ("busbw", "nics")}
    assert all(source.startswith("https://") for source in sources)
    assert set(tables().sources.values()) == sources | of_the_arithmetic


def row_id(row: Expected) -> str:
    return f"{row.nodes}x{row.ranks_per_node} {row.gpu} {row.algorithm} {row.kind}"


@each("row", tables().expected)
def test_no_figure_is_above_the_line_rate(row: Expected) -> None:
    """A limit above it fails every sound node.

    Within a node busbw may be 2(n-1)/(n+1) of the links' rate under NVLS, else 1. Between nodes each NIC carries
    (k-1)/(n-1) of busbw at least.
    """
    (gpu,) = [gpu for gpu in tables().gpus if gpu.name == row.gpu]
    links = gpu.bridge_bytes_per_s if row.bridge else gpu.line_rate(row.ranks_per_node)
    assert links is not None
    m = row.ranks_per_node
    nvls = gpu.nvls and row.algorithm is not Algorithm.RING
    assert row.busbw_bytes_per_s <= links * (2 * (m - 1) / (m + 1) if nvls else 1)
    assert (row.nic_bytes_per_s is None) == (row.nodes == 1)
    if row.nic_bytes_per_s is not None:
        n = m * row.nodes
        assert row.busbw_bytes_per_s <= row.nic_bytes_per_s * (n - 1) / (row.nodes - 1)


@pytest.mark.parametrize("row", [row for row in tables().expected if row.kind is Kind.MEASURED], ids=row_id)
@pytest.mark.parametrize("nic_known", [True, False])
def test_what_others_measured_is_good(row: Expected, nic_known: bool) -> None:
    device = next(device for device, name in NAMES.items() if name == row.gpu)
    nic = row.nic_bytes_per_s / GB if nic_known and row.nic_bytes_per_s else None
    assessment = judge(row.busbw_bytes_per_s / GB, device, row.ranks_per_node, nodes=row.nodes, nic_gb=nic)
    assert assessment.judgement is Judgement.GOOD
    assert (assessment.percent_of_link or 0) <= 100


# Formulas, by hand.


def test_the_factors() -> None:
    assert [busbw_factor(n) for n in (1, 2, 4, 8, 32)] == [0, 1, 1.5, 1.75, 1.9375]
    assert [wire_factor(n) for n in (1, 2, 4, 8)] == [2, 1.5, 1.25, 1.125]


def test_the_most_that_nvls_can_show() -> None:
    h100, a100 = find_gpu(H100), find_gpu(A100)
    assert h100 is not None
    assert a100 is not None
    assert h100.ceiling(8) == pytest.approx(450e9 * 14 / 9)
    assert h100.ceiling(2) == 450e9
    assert a100.ceiling(8) == 300e9


@each(
    "busbw, nodes, world, share",
    [
        (381.8, 4, 32, 36.948),
        (377.34, 4, 32, 36.517),
        (470, 2, 16, 31.333),
        (100, 4, 4, 100),
        (480, 1, 8, 0),
        (0, 1, 1, 0),
    ],
)
def test_the_share_of_a_nic(busbw: float, nodes: int, world: int, share: float) -> None:
    assert nic_share(busbw, nodes, world) == pytest.approx(share, abs=1e-3)


def test_the_share_of_a_nic_is_what_a_sum_within_the_nodes_leaves() -> None:
    """4 GiB over 4 x 8 ranks: 0.75 GiB for each NIC, in the time that busbw 377.34 GB/s means (22.05 ms)."""
    size, busbw = 4 * 2**30, 377.34e9
    seconds = size / (busbw / busbw_factor(32))
    assert seconds == pytest.approx(0.02205, rel=1e-3)
    assert nic_share(busbw, 4, 32) == pytest.approx(0.75 * 2**30 / seconds)


# One node.


def test_nvls_is_no_error() -> None:
    assessment = judge(480, H100, 8)
    assert (assessment.judgement, assessment.nvls_likely) == (Judgement.GOOD, True)
    assert assessment.percent_of_link == pytest.approx(100 * 480 / 1.75 * 9 / 8 / 450)  # 68.6
    assert "a link carries algbw x (8+1)/8 = 308.6 GB/s, 69% of 450 GB/s" in said(assessment)
    assert not any(part in said(assessment) for part in ("107%", "NVLS off"))


def test_a_ring_is_good_and_asks_for_nvls() -> None:
    assessment = judge(365, H100, 8)
    assert (assessment.judgement, assessment.nvls_likely) == (Judgement.GOOD, False)
    assert expected(assessment) == 365e9
    assert assessment.percent_of_link == pytest.approx(81.1, abs=0.1)
    assert "NVLS off (NCCL_NVLS_ENABLE)? 460.0 GB/s with it" in said(assessment)


@pytest.mark.parametrize(("busbw", "judgement"), [(300, "good"), (250, "low"), (100, "bad")])
def test_eight_h100(busbw: float, judgement: str) -> None:
    assert judge(busbw, H100, 8).judgement == judgement


def test_more_than_a_link_can_is_measured_wrongly() -> None:
    assert judge(690, H100, 8).judgement is Judgement.GOOD
    assessment = judge(710, H100, 8)
    assert assessment.judgement is Judgement.UNKNOWN
    assert "more than 700.0 GB/s" in said(assessment)
    assert judge(310, A100, 8).judgement is Judgement.UNKNOWN


@pytest.mark.parametrize(
    ("name", "ranks", "busbw"),
    # Sound nodes at 128 MiB, the least that a caller may give: ml-engineering, network/README.md.
    [(A100, 8, 176.92), ("NVIDIA H200", 8, 401.93), ("NVIDIA B200", 8, 568.38)],
)
def test_a_sound_node_is_good_at_128_mib(name: str, ranks: int, busbw: float) -> None:
    assert judge(busbw, name, ranks).judgement is Judgement.GOOD


def test_some_gpus_of_a_node_are_held_against_the_link() -> None:
    assert judge(363, "NVIDIA H200", 4).judgement is Judgement.GOOD
    assert expected(judge(363, "NVIDIA H200", 4)) == 363.3e9
    two = judge(365, H100, 2)
    assert (two.judgement, expected(two)) == (Judgement.GOOD, 0.8 * 450e9)
    assert "NVLS" not in said(two)


def test_a_board_without_a_switch_is_not_called_bad() -> None:
    """Two H100 of a board with four have a third of their links between them."""
    assessment = judge(125, H100, 2)
    assert assessment.judgement is Judgement.LOW
    assert "without NVSwitch" in said(assessment)
    assert judge(50, H100, 2).judgement is Judgement.BAD


def test_two_mi300x_have_one_link_of_seven() -> None:
    two = judge(47.7, "AMD Instinct MI300X", 2)
    assert two.judgement is Judgement.GOOD
    assert two.percent_of_link == pytest.approx(74.5, abs=0.1)
    assert judge(47.7, "AMD Instinct MI300X", 8).judgement is Judgement.BAD
    assert expected(judge(140, "AMD Instinct MI300X", 4)) == pytest.approx(0.8 * 3 * 64e9)


@each(
    "name, ranks, busbw, judgement",
    [
        ("NVIDIA A100-PCIE-40GB", 4, 25, "good"),
        ("NVIDIA A100 80GB PCIe", 8, 21, "good"),
        ("NVIDIA A100 80GB PCIe", 8, 13, "low"),  # through the host's memory
        ("NVIDIA RTX A6000", 2, 1.6, "bad"),  # an IOMMU in the way
        ("NVIDIA GeForce RTX 5090", 8, 28, "good"),  # knows no other way
        ("NVIDIA GeForce RTX 4090", 2, 5, "bad"),
    ],
)
def test_cards(name: str, ranks: int, busbw: float, judgement: str) -> None:
    assessment = judge(busbw, name, ranks)
    assert assessment.judgement == judgement
    assert ("traffic through host memory (IOMMU" in said(assessment)) == (judgement != "good" and "GeForce" not in name)


def test_two_cards_ask_for_a_bridge() -> None:
    without, with_one = judge(22, "NVIDIA H100 NVL", 2), judge(215, "NVIDIA H100 NVL", 2)
    assert "208.0 GB/s with it" in said(judge(50, "NVIDIA H100 NVL", 2))
    assert without.judgement is Judgement.LOW
    assert with_one.judgement is Judgement.GOOD
    assert with_one.percent_of_link == pytest.approx(100 * 215 / 300)
    assert "no NVLink bridge?" not in said(with_one)


# Nothing to hold it against.


@pytest.mark.parametrize("name", [None, "NVIDIA GeForce RTX 3060", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"])
def test_no_verdict_is_invented(name: str | None) -> None:
    assessment = judge(1.2, name, 2)
    assert assessment.judgement is Judgement.UNKNOWN
    assert (expected(assessment), assessment.percent_of_link) == (None, None)
    assert "no reference figure" in said(assessment)


def test_an_unknown_gpu_on_several_nodes_still_shows_the_share() -> None:
    assessment = judge(10, None, 4, nodes=2, nic_gb=12.5)
    assert assessment.judgement is Judgement.UNKNOWN
    assert "10.0 GB/s x (2-1)/(8-1) = 1.4 GB/s for each GPU's NIC, 11% of its 12.5 GB/s" in said(assessment)


def test_one_rank_has_no_busbw() -> None:
    assessment = judge(0, H100, 1)
    assert (assessment.judgement, expected(assessment)) == (Judgement.UNKNOWN, None)
    assert assessment.lines == ("a single rank: busbw is 0 by definition, as 2(1-1)/1 = 0",)


# Several nodes.


def test_four_nodes_of_b200() -> None:
    assessment = judge(381.8, "NVIDIA B200", 8, nodes=4, nic_gb=50)
    assert assessment.judgement is Judgement.GOOD
    assert assessment.percent_of_nic == pytest.approx(73.9, abs=0.1)
    assert "busbw 381.8 GB/s x (4-1)/(32-1) = 36.9 GB/s for each GPU's NIC, 74% of its 50 GB/s" in assessment.lines


def test_slow_as_sockets() -> None:
    assessment = judge(14, H100, 8, nodes=2, nic_gb=50)
    assert assessment.judgement is Judgement.BAD
    assert "as slow as TCP sockets: is InfiniBand/RoCE not used?" in said(assessment)


@pytest.mark.parametrize(
    ("busbw", "judgement", "where"),
    [
        (470, "good", "NVIDIA/nccl-tests issue 309"),
        (370, "good", "a ring: 46 of 50 GB/s by each NIC, though its share is 49%"),
        (231, "low", "NVIDIA/nccl issue 2409"),
        (70, "bad", "NVIDIA/nccl-tests issue 371"),
    ],
)
def test_two_nodes_of_h100_that_others_had(busbw: float, judgement: str, where: str) -> None:
    assert judge(busbw, H100, 8, nodes=2, nic_gb=50).judgement == judgement, where


def test_two_nodes_say_that_trees_hide_the_nics() -> None:
    assessment = judge(470, H100, 8, nodes=2, nic_gb=50)
    assert "NCCL_ALGO=Ring" in said(assessment)
    assert "not a ring" in said(assessment)
    assert "NCCL_ALGO=Ring" not in said(judge(365, H100, 8, nodes=4, nic_gb=50))


def test_slow_nics_are_expected_to_be_slow() -> None:
    """Three nodes, 8 A100 and 4 x 200 Gb/s each: 96 of 100 GB/s (NVIDIA/nccl-tests issue 119)."""
    assert judge(96, A100, 8, nodes=3, nic_gb=12.5).judgement is Judgement.GOOD
    assert judge(96, A100, 8, nodes=3, nic_gb=50).judgement is Judgement.BAD


def test_slow_links_within_the_nodes_bound_what_is_expected() -> None:
    assessment = judge(24, "NVIDIA A100 80GB PCIe", 8, nodes=2, nic_gb=25)
    assert (assessment.judgement, expected(assessment)) == (Judgement.GOOD, 0.8 * 31e9)


def test_one_rank_a_node_has_nothing_but_its_nic() -> None:
    assert judge(45, H100, 1, nodes=4, nic_gb=50).judgement is Judgement.GOOD
    assert judge(45, H100, 1, nodes=4, nic_gb=50).percent_of_link is None
    assert judge(10, H100, 1, nodes=4, nic_gb=50).judgement is Judgement.BAD


def test_more_than_the_nic_is_explained() -> None:
    assessment = judge(700, "NVIDIA GB200", 4, nodes=2, nic_gb=50)
    assert assessment.judgement is Judgement.GOOD
    assert "NVLink between the nodes" in said(assessment)


def test_without_the_nics_rate_others_are_the_measure_and_nothing_is_bad() -> None:
    good, low = judge(440, H100, 8, nodes=2), judge(14, H100, 8, nodes=2)
    assert (good.judgement, expected(good), good.percent_of_nic) == (Judgement.GOOD, 440e9, None)
    assert low.judgement is Judgement.LOW
    assert "as slow as TCP sockets" in said(low)


def test_without_the_nics_rate_and_others_nothing_is_known() -> None:
    assessment = judge(300, H100, 8, nodes=16)
    assert (assessment.judgement, expected(assessment)) == (Judgement.UNKNOWN, None)
    assert "busbw 300.0 GB/s x (16-1)/(128-1) = 35.4 GB/s for each GPU's NIC" in assessment.lines


# All of it.

PLACES = [
    (ranks, nodes, nic)
    for ranks, nodes in ((2, 1), (4, 1), (8, 1), (1, 2), (8, 2), (8, 4), (4, 16))
    for nic in ((None,) if nodes == 1 else (None, 12.5, 50, 100))
]


@each("name", [*NAMES, None])
def test_more_is_never_worse(name: str | None) -> None:
    """Up to the capacity of the links; above it the expectation is unknown."""
    order = [Judgement.BAD, Judgement.LOW, Judgement.GOOD, Judgement.UNKNOWN]
    for ranks, nodes, nic in PLACES:
        steps = [judge(1.15**step, name, ranks, nodes=nodes, nic_gb=nic) for step in range(54)]
        found = [order.index(step.judgement) for step in steps]
        assert found == sorted(found), (ranks, nodes, nic)


@each("name", NAMES)
def test_only_what_no_link_carries_is_unknown_within_a_node(name: str) -> None:
    gpu = find_gpu(name)
    assert gpu is not None
    for ranks in (2, 4, 8):
        for part, unknown in ((0.01, False), (0.5, False), (0.999, False), (1.001, True), (10, True)):
            assessment = judge(part * gpu.ceiling(ranks) / GB, name, ranks)
            assert (assessment.judgement is Judgement.UNKNOWN) == unknown, (ranks, part)


@each("name", [*NAMES, None, "x" * 50])
def test_lines_are_short(name: str | None) -> None:
    for ranks, nodes, nic in PLACES:
        for busbw in (0, 0.3, 14, 200, 365, 480, 1399.9):
            for line in judge(busbw, name, ranks, nodes=nodes, nic_gb=nic).lines:
                assert len(line) < 100, line
