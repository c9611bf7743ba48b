"""Pairings of gpu-test --isolate, and the rank, node or link incriminated by the pairs."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from loops import each

from distdiag.commands.gpu_test.isolate.classify import classify
from distdiag.commands.gpu_test.isolate.coordinator import Coordinator, rounds
from distdiag.commands.gpu_test.isolate.slowness import by_chance
from distdiag.commands.gpu_test.isolate.types import Classification, Kind, Pair, PairStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Edge = tuple[int, int]
    Verdict = tuple[Kind, dict[str, object]]

INSIDE, BETWEEN = 1.4e9, 0.9e9
WAYS = ("slow", "failed", "wrong")
SAMPLES = 10  # enough to prove a slow pair beside a single good one


def machine(sizes: Iterable[int]) -> list[list[int]]:
    nodes: list[list[int]] = []
    for size in sizes:
        first = sum(map(len, nodes))
        nodes.append(list(range(first, first + size)))
    return nodes


def meetings(nodes: list[list[int]]) -> list[Edge]:
    return [pair for pairs in rounds(nodes) for pair in pairs]


def told(edge: Edge, bandwidths: list[float], *, is_inside: bool = True, failed: bool = False, wrong: int = 0) -> Pair:
    """Return a pair as rank 0 reports it."""
    level, error = "node" if is_inside else "net", "timed out" if failed else ""
    a, b = edge
    return Pair.of(
        {"a": a, "b": b, "level": level, "bandwidths": bandwidths, "failed": failed, "wrong": wrong, "error": error}  # type: ignore[typeddict-item]
    )


class Cluster:
    """Nodes whose good pairs vary by 30% either way, as on a busy machine; slow ones are 7 to 50 times slower."""

    def __init__(self, *sizes: int, seed: int = 0) -> None:
        self.nodes = machine(sizes)
        self.host_of = {rank: f"node{number}" for number, ranks in enumerate(self.nodes) for rank in ranks}
        self.chance = random.Random(seed)
        self.edges = meetings(self.nodes)
        self.fares: dict[Edge, str] = {}

    def is_inside(self, a: int, b: int) -> bool:
        return self.host_of[a] == self.host_of[b]

    def make(self, fare: str, where: Callable[[int, int], bool]) -> Cluster:
        """Give pairs a fare: slow, failed, wrong, skipped."""
        self.fares |= {edge: fare for edge in self.edges if where(*edge)}
        return self

    def pair(self, a: int, b: int) -> Pair:
        fare = self.fares.get((a, b), "ok")
        speed = (INSIDE if self.is_inside(a, b) else BETWEEN) * self.chance.uniform(0.7, 1.3)
        if fare == "slow":
            speed *= self.chance.uniform(0.02, 0.15)
        return told(
            (a, b),
            [] if fare in ("failed", "skipped") else [speed] * SAMPLES,
            is_inside=self.is_inside(a, b),
            failed=fare == "failed",
            wrong=7 if fare == "wrong" else 0,
        )

    def classified(self, least: float | None = None) -> Classification:
        """Classify; the status of each pair must be its fare."""
        found, status = classify([self.pair(*edge) for edge in self.edges], self.host_of, least_bytes_per_s=least)
        if least is None:
            assert status == {edge: PairStatus(self.fares.get(edge, "ok")) for edge in self.edges}
        return found


def verdict(found: Classification) -> Verdict:
    named = {"ranks": found.ranks, "hosts": found.hosts, "links": found.links, "groups": found.groups}
    return found.kind, {name: value for name, value in named.items() if value}


def by_rank(*ranks: int) -> Callable[[int, int], bool]:
    return lambda a, b: a in ranks or b in ranks


@each(
    "sizes",
    [(), (1,), (2,), (3,), (8,), (1, 1), (1,) * 5, (8, 8), (3, 8, 1, 5), (0, 2), (4,) * 7, (16,) * 6, (5, 2, 2)],
)
def test_every_pair_meets_once_and_nobody_is_twice_in_a_round(sizes: tuple[int, ...]) -> None:
    nodes = machine(sizes)
    inside = {(a, b) for ranks in nodes for a in ranks for b in ranks if a < b}
    rails = [[ranks[i] for ranks in nodes if i < len(ranks)] for i in range(max(sizes, default=0))]
    between = {(a, b) for rail in rails for a in rail for b in rail if a < b}
    found = rounds(nodes)
    assert sorted(meetings(nodes)) == sorted(inside | between)
    for pairs in found:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len(set(ends)) > 0
    first_between = next((number for number, pairs in enumerate(found) if between & set(pairs)), len(found))
    assert all(set(pairs) <= inside for pairs in found[:first_between])
    assert all(set(pairs) <= between for pairs in found[first_between:])
    assert found == rounds(nodes)


@each(
    "sizes, count",
    [((1,), 0), ((2,), 1), ((7,), 7), ((8,), 7), ((1,) * 5, 5), ((1,) * 6, 5), ((8, 8), 8), ((7, 8, 3), 10)],
)
def test_there_are_as_few_rounds_as_can_be(sizes: tuple[int, ...], count: int) -> None:
    assert len(rounds(machine(sizes))) == count


def test_local_ranks_meet_whatever_the_ranks_are_called() -> None:
    assert rounds([[5, 1], [0, 7]]) == [[(0, 7), (1, 5)], [(0, 5), (1, 7)]]


@pytest.mark.parametrize("sizes", [(500,), (1,) * 500, (8,) * 125])
def test_hundreds_of_ranks_take_no_time(sizes: tuple[int, ...]) -> None:
    nodes = machine(sizes)
    begun = time.process_time()
    assert len(rounds(nodes)) == (7 + 125 if len(nodes) == 125 else 499)
    assert time.process_time() - begun < 3


def healthy(cluster: Cluster, fare: str) -> Verdict:
    return Kind.HEALTHY, {}


def bad_rank(cluster: Cluster, fare: str) -> Verdict:
    rank = cluster.chance.choice(cluster.nodes[0])
    cluster.make(fare, by_rank(rank))
    return Kind.BAD_RANK, {"ranks": (rank,)}


def bad_link(cluster: Cluster, fare: str) -> Verdict:
    link = cluster.chance.choice(cluster.edges)
    cluster.make(fare, lambda a, b: (a, b) == link)
    return Kind.BAD_LINK, {"links": (link,)}


def split(cluster: Cluster, fare: str) -> Verdict:
    ranks = cluster.nodes[0]
    group = set(cluster.chance.sample(ranks, cluster.chance.randint(2, len(ranks) - 2)))
    cluster.make(fare, lambda a, b: (a in group) != (b in group))
    return Kind.SPLIT, {"groups": tuple(sorted((tuple(sorted(group)), tuple(sorted(set(ranks) - group)))))}


def two_ranks(cluster: Cluster, fare: str) -> Verdict:
    ranks = tuple(sorted(cluster.chance.sample(cluster.nodes[0], 2)))
    cluster.make(fare, by_rank(*ranks))
    return Kind.SEVERAL, {"ranks": ranks}


def rank_and_link(cluster: Cluster, fare: str) -> Verdict:
    rank, *link = cluster.chance.sample(cluster.nodes[0], 3)
    cluster.make(fare, by_rank(rank)).make("failed", lambda a, b: {a, b} == set(link))
    return Kind.SEVERAL, {"ranks": (rank,), "links": (tuple(sorted(link)),)}


def two_links(cluster: Cluster, fare: str) -> Verdict:
    ends = cluster.chance.sample(cluster.nodes[0], 4)
    links = tuple(sorted(tuple(sorted(ends[i : i + 2])) for i in (0, 2)))
    cluster.make(fare, lambda a, b: (a, b) in links)
    return Kind.BAD_LINK, {"links": links}


ONE_NODE = [(healthy, 3), (bad_rank, 3), (bad_link, 3), (split, 4), (two_ranks, 4), (rank_and_link, 4), (two_links, 4)]


@each("inject, size", [(inject, size) for inject, least in ONE_NODE for size in range(least, 13)])
def test_what_is_made_is_found_on_one_node(inject: Callable[[Cluster, str], Verdict], size: int) -> None:
    for seed in range(2 * len(WAYS)):
        cluster = Cluster(size, seed=seed)
        expected = inject(cluster, WAYS[seed % len(WAYS)])
        assert verdict(cluster.classified()) == expected, seed


def bad_gpu(cluster: Cluster, fare: str) -> Verdict:
    rank = cluster.chance.choice(list(cluster.host_of))
    cluster.make(fare, by_rank(rank))
    if len(cluster.nodes[0]) == 1:
        return Kind.BAD_NODE, {"hosts": (cluster.host_of[rank],)}
    return Kind.BAD_RANK, {"ranks": (rank,)}


def bad_nic(cluster: Cluster, fare: str) -> Verdict:
    rank = cluster.chance.choice(list(cluster.host_of))
    cluster.make(fare, lambda a, b: rank in (a, b) and not cluster.is_inside(a, b))
    return Kind.BAD_RANK, {"ranks": (rank,)}


def bad_network_of_a_node(cluster: Cluster, fare: str) -> Verdict:
    ranks = cluster.chance.choice(cluster.nodes)
    cluster.make(fare, lambda a, b: by_rank(*ranks)(a, b) and not cluster.is_inside(a, b))
    return Kind.BAD_NODE, {"hosts": (cluster.host_of[ranks[0]],)}


def bad_node(cluster: Cluster, fare: str) -> Verdict:
    ranks = cluster.chance.choice(cluster.nodes)
    cluster.make(fare, by_rank(*ranks))
    return Kind.BAD_NODE, {"hosts": (cluster.host_of[ranks[0]],)}


def bad_inside(cluster: Cluster, fare: str) -> Verdict:
    ranks = cluster.chance.choice(cluster.nodes)
    cluster.make(fare, lambda a, b: a in ranks and b in ranks)
    return Kind.BAD_NODE, {"hosts": (cluster.host_of[ranks[0]],)}


def bad_link_between(cluster: Cluster, fare: str) -> Verdict:
    link = cluster.chance.choice([edge for edge in cluster.edges if not cluster.is_inside(*edge)])
    cluster.make(fare, lambda a, b: (a, b) == link)
    return Kind.BAD_LINK, {"links": (link,)}


def bad_way_between_nodes(cluster: Cluster, fare: str) -> Verdict:
    one, other = sorted(cluster.chance.sample(cluster.nodes, 2))
    links = tuple(zip(one, other, strict=True))
    cluster.make(fare, lambda a, b: (a, b) in links)
    return Kind.BAD_LINK, {"links": links}


def bad_rail(cluster: Cluster, fare: str) -> Verdict:
    rail = cluster.chance.choice(list(zip(*cluster.nodes, strict=True)))
    cluster.make(fare, lambda a, b: a in rail and b in rail)
    return Kind.BAD_LINK, {"links": tuple((a, b) for a in rail for b in rail if a < b)}


def split_nodes(cluster: Cluster, fare: str) -> Verdict:
    some = set(cluster.chance.sample(range(len(cluster.nodes)), 2))
    group = {rank for number, ranks in enumerate(cluster.nodes) if number in some for rank in ranks}
    cluster.make(fare, lambda a, b: (a in group) != (b in group))
    return Kind.SPLIT, {"groups": tuple(sorted((tuple(sorted(group)), tuple(sorted(set(cluster.host_of) - group)))))}


# The injected fault, and the smallest number of nodes and ranks that identifies it.
SEVERAL_NODES = [
    (healthy, 2, 1),
    (bad_gpu, 3, 1),
    (bad_gpu, 2, 2),
    (bad_nic, 3, 2),
    (bad_network_of_a_node, 3, 1),
    (bad_node, 3, 1),
    (bad_inside, 2, 3),
    (bad_link_between, 2, 2),
    (bad_link_between, 3, 1),
    (bad_way_between_nodes, 3, 1),
    (bad_rail, 3, 2),
    (split_nodes, 4, 1),
]


@each(
    "inject, count, size",
    [
        (inject, count, size)
        for inject, least_count, least_size in SEVERAL_NODES
        for count in range(least_count, 7)
        for size in sorted({least_size, least_size + 1, 4, 7, 8})
    ],
)
def test_what_is_made_is_found_on_several_nodes(
    inject: Callable[[Cluster, str], Verdict], count: int, size: int
) -> None:
    for seed in range(len(WAYS)):
        cluster = Cluster(*[size] * count, seed=seed)
        expected = inject(cluster, WAYS[seed % len(WAYS)])
        assert verdict(cluster.classified()) == expected, seed


def test_hundreds_of_ranks_are_judged_in_seconds() -> None:
    cluster = Cluster(*[8] * 60).make("slow", by_rank(77))
    begun = time.process_time()
    assert verdict(cluster.classified()) == (Kind.BAD_RANK, {"ranks": (77,)})
    assert time.process_time() - begun < 5


@each("rank", range(12))
def test_nodes_may_have_different_numbers_of_ranks(rank: int) -> None:
    found = Cluster(8, 3, 1).make("slow", by_rank(rank)).classified()
    if rank == 11:  # all of its node
        assert verdict(found) == (Kind.BAD_NODE, {"hosts": ("node2",)})
    else:
        assert verdict(found) == (Kind.BAD_RANK, {"ranks": (rank,)})


@each("size", range(2, 9))
def test_a_node_that_is_dead_inside_as_well_is_told_from_its_only_peer(size: int) -> None:
    found = Cluster(size, size).make("failed", by_rank(*range(size))).classified()
    assert verdict(found) == (Kind.BAD_NODE, {"hosts": ("node0",)})
    assert found.sentence == "node0 fails inside and with every other node"


def exact(pairs: dict[Edge, str | float], host_of: dict[int, str], least: float | None = None) -> Classification:
    """Classify pairs of given GB/s, or that failed, are wrong or skipped."""
    measured = [
        told(
            (a, b),
            [fare * 1e9] * SAMPLES if isinstance(fare, float) else [1e9] * (fare == "wrong"),
            is_inside=host_of[a] == host_of[b],
            failed=fare == "failed",
            wrong=3 * (fare == "wrong"),
        )
        for (a, b), fare in pairs.items()
    ]
    return classify(measured, host_of, least_bytes_per_s=least)[0]


def complete(sizes: tuple[int, ...], bad: dict[Edge, str | float]) -> tuple[dict[Edge, str | float], dict[int, str]]:
    """Give 1.4 GB/s to pairs inside nodes and 0.9 between them; `bad` ones excepted."""
    nodes = machine(sizes)
    host_of = {rank: f"node{number}" for number, ranks in enumerate(nodes) for rank in ranks}
    usual = {(a, b): 1.4 if host_of[a] == host_of[b] else 0.9 for a, b in meetings(nodes)}
    return {**usual, **bad}, host_of


def among(ranks: Iterable[int], others: Iterable[int], fare: str | float) -> dict[Edge, str | float]:
    rest = list(others)
    return {(min(a, b), max(a, b)): fare for a in ranks for b in rest if a != b}


@each(
    "sizes, bad, sentence",
    [
        (
            (4,),
            among([3], range(3), 0.21),
            "rank 3 (node0) is slow with every other rank: 0.21 GB/s (others 1.4 GB/s)",
        ),
        (
            (1, 1, 1, 1),
            among([3], range(3), 0.11),
            "node3 (rank 3) is slow with every other node: 0.11 GB/s (others 0.9 GB/s)",
        ),
        ((3,), among([1], [0, 2], "wrong"), "rank 1 (node0) gets wrong data with every other rank"),
        (
            (4,),
            {(0, 3): "failed", (1, 3): "wrong", (2, 3): 0.2},
            "rank 3 (node0) is bad with every other rank: 1 failed, 1 wrong, 1 slow",
        ),
        (
            (2, 2, 2),
            among([3], [1, 5], 0.1),
            "rank 3 (node1) is slow with every other node: 0.1 GB/s (others 0.9 GB/s); fine inside its own "
            "node: its NIC or rail",
        ),
        (
            (8,),
            among([3], [0, 1, 2, 4, 5, 6], "failed"),
            "rank 3 (node0) fails with nearly every other rank",
        ),
        (
            (3, 3, 3),
            {(0, 3): 0.1, (3, 6): 0.1, (1, 4): 0.1, (4, 7): 0.1, (2, 5): 0.1, (5, 8): 0.1},
            "node1 is slow with every other node: 0.1 GB/s (others 0.9 GB/s); fine inside: its "
            "network, not one of its ranks",
        ),
        (
            (1, 1, 1, 1, 1),
            {(1, 4): 0.21},
            "only the link between rank 1 (node1) and rank 4 (node4) is slow: 0.21 GB/s (others "
            "0.9 GB/s); both are fine with all other ranks",
        ),
        (
            (4, 4, 4),
            {(0, 4): "failed", (1, 5): "failed", (2, 6): "failed", (3, 7): "failed"},
            "only the links between node0 and node1 (4 pairs) fail; their ends are fine with all other ranks",
        ),
        (
            (2, 2, 2),
            {(1, 3): "failed", (1, 5): "failed", (3, 5): "failed"},
            "node[0-2] (rail of rank 1) fail with each other; other ranks there do not: something that the "
            "rail shares, such as a switch",
        ),
        (
            (6,),
            among(range(4), [4, 5], "failed"),
            "ranks 0-3 and 4-5 work inside each group but not across: a configuration difference, not a bad rank",
        ),
        (
            (1,) * 7,
            among(range(5), [5, 6], "failed"),
            "node[0-4] and node[5-6] work inside each group but not across: a configuration difference, not a bad node",
        ),
        (
            (5,),
            {**among([1], [0, 2, 3, 4], 0.2), (0, 2): "failed"},
            "rank 1 (node0) is slow with every other rank: 0.2 GB/s (others 1.4 GB/s); and the link "
            "between rank 0 (node0) and rank 2 (node0) fails; both are fine with all other ranks",
        ),
        (
            (6,),
            {**among([1], [0, 2, 3, 4, 5], "failed"), **among([4], [0, 2, 3, 5], "failed")},
            "ranks 1,4 (node0) fail with every other rank",
        ),
    ],
)
def test_the_sentence_names_the_culprit(sizes: tuple[int, ...], bad: dict[Edge, str | float], sentence: str) -> None:
    pairs, host_of = complete(sizes, bad)
    found = exact(pairs, host_of)
    assert found.sentence == sentence
    assert found.next


def test_the_evidence_folds_ranks() -> None:
    found = exact(*complete((8,), among([3], [0, 1, 2, 4, 5, 6, 7], 0.21)))
    assert found.reason == (
        "inside nodes: 7 of 28 pairs bad; good pairs: 1.4 GB/s",
        "rank 3 with ranks 0-2,4-7: slow, 0.21 GB/s",
    )


def test_pairs_alone_cannot_tell_whether_all_are_slow() -> None:
    pairs, host_of = complete((2, 2), {})
    assert exact(pairs, host_of).sentence == (
        "no pair stands out: 1.4 GB/s inside nodes and 0.9 GB/s between nodes; pairs alone do not show whether "
        "that is good"
    )
    assert (
        exact(pairs, host_of, 0.8e9).sentence == "no pair stands out: 1.4 GB/s inside nodes and 0.9 GB/s between nodes"
    )


def test_a_single_pair_has_nothing_to_be_compared_with() -> None:
    assert exact(*complete((2,), {})).sentence == "1.4 GB/s, without a figure to compare it with"


def test_what_is_expected_tells_that_all_are_slow() -> None:
    found = exact(*complete((4, 4), {}), 5e9)
    assert verdict(found) == (Kind.UNIFORMLY_SLOW, {})
    assert found.sentence == (
        "all pairs are equally slow: 1.4 GB/s inside nodes and 0.9 GB/s between nodes, expected 5 GB/s"
    )


def test_pairs_below_what_is_expected_are_slow() -> None:
    cluster = Cluster(4, 4)
    pairs = [cluster.pair(*edge) for edge in cluster.edges]
    status = classify(pairs, cluster.host_of, least_bytes_per_s=5e9)[1]
    assert set(status.values()) == {PairStatus.SLOW}


def test_a_level_that_is_below_what_is_expected_is_named_besides_a_bad_rank() -> None:
    found = exact(*complete((4,), among([3], range(3), 0.21)), 5e9)
    assert verdict(found) == (Kind.SEVERAL, {"ranks": (3,)})
    assert found.sentence.startswith("even the best pairs are slow: 1.4 GB/s, expected 5 GB/s; and rank 3")


@pytest.mark.parametrize("fare", ["failed", "wrong"])
def test_two_ranks_cannot_tell_which_is_bad(fare: str) -> None:
    found = exact({(0, 1): fare}, {0: "node0", 1: "node0"})
    assert verdict(found) == (Kind.UNDECIDABLE, {"ranks": (0, 1), "links": ((0, 1),)})
    assert "--nproc 3" in found.next


def test_a_single_pair_below_what_is_expected_may_be_one_bad_end() -> None:
    pairs: dict[Edge, str | float] = {(0, 1): 0.3}
    found = exact(pairs, {0: "node0", 1: "node1"}, 5e9)
    assert verdict(found) == (Kind.UNDECIDABLE, {"ranks": (0, 1), "hosts": ("node0", "node1"), "links": ((0, 1),)})
    assert "0.3 GB/s (expected 5 GB/s)" in found.sentence
    assert "--hosts" in found.next


@each("size", range(2, 9))
def test_two_nodes_cannot_tell_whose_network_is_bad(size: int) -> None:
    cluster = Cluster(size, size)
    found = cluster.make("failed", lambda a, b: not cluster.is_inside(a, b)).classified()
    links = tuple((rank, rank + size) for rank in range(size))
    assert verdict(found) == (Kind.UNDECIDABLE, {"hosts": ("node0", "node1"), "links": links})
    assert found.sentence == (
        "node0 and node1 fail with each other; inside each node all pairs are good; the network between them or "
        "one node's own (two nodes cannot decide)"
    )
    assert "add a third node to --hosts" in found.next


def test_one_of_two_nodes_with_a_bad_rank_and_no_network() -> None:
    cluster = Cluster(4, 4)
    cluster.make("failed", lambda a, b: not cluster.is_inside(a, b)).make("failed", by_rank(5))
    found = cluster.classified()
    assert (found.kind, found.ranks, found.hosts) == (Kind.SEVERAL, (5,), ("node0", "node1"))


def test_one_rail_of_two_nodes_may_be_an_end_or_the_link() -> None:
    found = exact(*complete((4, 4), {(1, 5): 0.1}))
    assert verdict(found) == (Kind.BAD_LINK, {"links": ((1, 5),)})
    assert found.sentence.endswith("both are fine otherwise: the link or one of its ends")
    assert "a third node" in found.next


@pytest.mark.parametrize("sizes", [(3,), (4, 4), (1, 1, 1, 1), (2, 3)])
def test_if_nothing_works_no_rank_is_blamed(sizes: tuple[int, ...]) -> None:
    found = Cluster(*sizes).make("failed", lambda a, b: True).classified()
    assert verdict(found) == (Kind.UNDECIDABLE, {})
    assert found.sentence.startswith("no pair works")


@pytest.mark.parametrize("count", range(3, 7))
def test_a_network_that_fails_all_nodes_is_no_bad_node(count: int) -> None:
    cluster = Cluster(*[4] * count)
    found = cluster.make("failed", lambda a, b: not cluster.is_inside(a, b)).classified()
    assert verdict(found) == (Kind.SPLIT, {"groups": tuple(tuple(ranks) for ranks in cluster.nodes)})
    assert found.sentence == (
        f"every pair between node[0-{count - 1}] is bad, but pairs inside nodes are good: the shared network"
    )


@pytest.mark.parametrize("size", range(2, 6))
def test_ranks_that_work_only_with_other_nodes_are_not_bad(size: int) -> None:
    cluster = Cluster(*[size] * 3)
    found = cluster.make("failed", cluster.is_inside).classified()
    assert verdict(found) == (Kind.SPLIT, {"groups": tuple(zip(*cluster.nodes, strict=True))})
    assert found.sentence.startswith("every pair inside a node is bad on node[0-2]")


def test_nothing_measured_is_nothing_known() -> None:
    assert exact({}, {0: "node0"}).sentence == "no pair to test: there is a single rank"
    found = Cluster(3).make("skipped", lambda a, b: True).classified()
    assert (found.kind, found.sentence) == (Kind.UNDECIDABLE, "no pair was measured")


def test_a_rank_that_met_nobody_is_not_healthy() -> None:
    found = Cluster(4).make("skipped", by_rank(2)).classified()
    assert verdict(found) == (Kind.UNDECIDABLE, {"ranks": (2,)})
    assert found.sentence.endswith("; no result for rank 2 (node0)")


def test_skipped_pairs_are_no_evidence() -> None:
    found = Cluster(5).make("failed", by_rank(2)).make("skipped", lambda a, b: (a, b) in {(2, 3), (2, 4)}).classified()
    assert verdict(found) == (Kind.BAD_RANK, {"ranks": (2,)})
    assert found.sentence == "rank 2 (node0) fails with every other rank tested"


@pytest.mark.parametrize(("alone", "suspects"), [((3,), (3,)), ((2, 3), (2, 3))])
def test_one_bad_pair_and_no_other_leaves_rank_or_link(alone: tuple[int, ...], suspects: tuple[int, ...]) -> None:
    found = Cluster(6).make("skipped", by_rank(*alone)).make("failed", lambda a, b: (a, b) == (2, 3)).classified()
    assert verdict(found) == (Kind.UNDECIDABLE, {"ranks": suspects, "links": ((2, 3),)})


def test_ranks_that_were_not_tried_with_each_other_may_be_a_group() -> None:
    found = Cluster(6).make("failed", by_rank(1, 4)).make("skipped", lambda a, b: (a, b) == (1, 4)).classified()
    assert verdict(found) == (Kind.UNDECIDABLE, {"ranks": (1, 4)})
    assert found.sentence == (
        "ranks 1,4 (node0) fail with every other rank tried, but were not tested with each other: bad, or part of a "
        "group that works inside"
    )


def test_a_split_with_a_bad_link_inside_is_both() -> None:
    found = exact(*complete((8,), {**among(range(4), range(4, 8), "failed"), (0, 1): 0.1}))
    assert verdict(found) == (Kind.SEVERAL, {"links": ((0, 1),), "groups": ((0, 1, 2, 3), (4, 5, 6, 7))})


def test_a_split_with_a_bad_rank_is_both() -> None:
    found = exact(*complete((8,), {**among(range(4), range(4, 8), "failed"), **among([2], [0, 1, 3], "failed")}))
    assert verdict(found) == (Kind.SEVERAL, {"ranks": (2,), "groups": ((0, 1, 3), (4, 5, 6, 7))})


def test_three_groups_of_ranks() -> None:
    found = Cluster(9).make("failed", lambda a, b: a // 3 != b // 3).classified()
    assert verdict(found) == (Kind.SPLIT, {"groups": ((0, 1, 2), (3, 4, 5), (6, 7, 8))})


def test_a_rank_that_is_bad_with_half_of_the_others_is_not_blamed_alone() -> None:
    found = Cluster(8).make("slow", lambda a, b: a == 0 and b > 3).classified()
    assert verdict(found) == (Kind.BAD_LINK, {"links": ((0, 4), (0, 5), (0, 6), (0, 7))})
    assert "between rank 0 (node0) and ranks 4-7 (node0)" in found.sentence


def test_a_rail_of_two_halves() -> None:
    found = Cluster(2, 2, 2, 2).make("failed", lambda a, b: a in (1, 3) and b in (5, 7)).classified()
    assert verdict(found) == (Kind.SPLIT, {"groups": ((1, 3), (5, 7))})
    assert found.sentence.startswith("node[0-1] and node[2-3] (rail of rank 1) work inside each group")


def test_sockets_of_several_nodes_are_one_split_and_may_be_the_layout() -> None:
    found = Cluster(4, 4, 4).make("slow", lambda a, b: a // 4 == b // 4 and a // 2 != b // 2).classified()
    assert verdict(found) == (Kind.SPLIT, {"groups": ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))})
    assert any("NVLink bridges, two CPU sockets" in line for line in found.reason)


def test_a_few_pairs_with_a_bridge_do_not_make_all_others_slow() -> None:
    pairs, host_of = complete((8,), {(0, 1): 9.0, (2, 3): 9.0, (4, 5): 9.0, (6, 7): 9.0})
    found = exact(pairs, host_of)
    assert found.kind is Kind.HEALTHY
    assert found.sentence.startswith("no pair is slow, but 4 are much faster than the others: 1.4 GB/s")


def test_a_layout_without_a_pattern_blames_nobody() -> None:
    # The cube of a DGX-1: GPUs of one side, and each with its partner of the other, have NVLink; the rest PCIe.
    pairs, host_of = complete((8,), {(a, b): 0.3 for a in range(4) for b in range(4, 8) if b != a + 4})
    found = exact(pairs, host_of)
    assert verdict(found) == (Kind.UNDECIDABLE, {})
    assert "12 of 28 pairs of node0 are slow" in found.sentence


def test_wild_noise_blames_no_rank_and_no_node() -> None:
    for seed in range(60):
        chance = random.Random(seed)
        pairs, host_of = complete((8,), {})
        found = exact({edge: chance.lognormvariate(0, 0.4) for edge in pairs}, host_of)
        assert (found.ranks, found.hosts, found.groups) == ((), (), ()), seed


def test_whatever_the_pairs_show_is_said() -> None:
    for seed in range(60):
        cluster = Cluster(*random.Random(seed).choices(range(1, 6), k=1 + seed % 5), seed=seed)
        share = cluster.chance.choice([0.05, 0.3, 0.8])
        for fare in ("failed", "wrong", "skipped"):
            cluster.fares |= {edge: fare for edge in cluster.edges if cluster.chance.random() < share}
        found = cluster.classified()
        if {"failed", "wrong"} & set(cluster.fares.values()):
            assert found.kind is not Kind.HEALTHY
        assert found.sentence
        assert found.next or found.kind is Kind.HEALTHY


def test_troubles_of_several_nodes_are_each_said() -> None:
    cluster = Cluster(4, 4, 4, 4)
    cluster.make("failed", lambda a, b: {a // 4, b // 4} == {0, 3})
    found = cluster.make("slow", lambda a, b: 5 in (a, b) and cluster.is_inside(a, b)).classified()
    assert verdict(found) == (Kind.SEVERAL, {"ranks": (5,), "links": ((0, 12), (1, 13), (2, 14), (3, 15))})
    assert "rank 5 (node1) is slow with every other rank of its node" in found.sentence
    assert "; and the links between node0 and node3 (4 pairs) fail" in found.sentence


@pytest.mark.parametrize(
    ("own", "good", "chance"),
    [
        ([1.0], [5.0, 6.0, 7.0, 8.0], 1 / 5),  # one of five is the slowest
        ([1.0, 2.0], [5.0, 6.0, 7.0, 8.0], 1 / 15),  # 1 of the 15 ways to choose two of six
        ([1.0, 6.0], [5.0, 6.0, 7.0, 8.0], 6 / 15),  # four are not faster than 6: 6 ways to choose two of them
        ([9.0], [5.0, 6.0, 7.0, 8.0], 1.0),
    ],
)
def test_the_chance_that_noise_alone_is_so_slow(own: list[float], good: list[float], chance: float) -> None:
    assert by_chance(own, good) == pytest.approx(chance)


def classify_samples(samples: dict[Edge, list[float]]) -> tuple[Classification, dict[Edge, PairStatus]]:
    """Classify samples of GB/s at the pairs of one node."""
    pairs = [told((a, b), [sample * 1e9 for sample in own]) for (a, b), own in samples.items()]
    return classify(pairs, dict.fromkeys((end for edge in samples for end in edge), "node0"))


def test_what_was_slow_once_is_not_called_slow() -> None:
    found, status = classify_samples({edge: [1.4] for edge in meetings(machine([4]))} | {(0, 3): [0.2]})
    assert verdict(found) == (Kind.UNDECIDABLE, {"links": ((0, 3),)})
    assert status[0, 3] is PairStatus.UNSURE
    assert found.sentence == (
        "the link between rank 0 (node0) and rank 3 (node0) looks slow: 0.2 GB/s (others 1.4 GB/s); "
        "this may be noise, so no rank or link is reported as slow"
    )
    assert found.reason[:2] == (
        "inside nodes: 0 of 5 pairs bad, 1 unsure; good pairs: 1.4 GB/s",
        "rank 0 with rank 3: unsure, 0.2 GB/s",
    )
    assert "nothing else running" in found.next


def test_what_is_slow_each_time_is_slow_only_where_good_pairs_are_not() -> None:
    edges = meetings(machine([4]))
    calm = {edge: [1.4] * 8 for edge in edges}
    noisy = {edge: [1.4, 0.2, 0.2, 0.2] * 2 for edge in edges}
    slow: dict[Edge, list[float]] = {(0, 3): [0.2] * 8}
    assert verdict(classify_samples(calm | slow)[0]) == (Kind.BAD_LINK, {"links": ((0, 3),)})
    assert classify_samples(noisy | slow)[0].kind is Kind.UNDECIDABLE


def test_noise_beside_what_is_certain_is_no_trouble_of_its_own() -> None:
    edges = meetings(machine([6]))
    samples: dict[Edge, list[float]] = {edge: [0.1] * 6 if 2 in edge else [1.4] * 6 for edge in edges}
    found, status = classify_samples(samples | {(0, 1): [0.3]})
    assert verdict(found) == (Kind.BAD_RANK, {"ranks": (2,)})
    assert status[0, 1] is PairStatus.UNSURE
    assert "1 unsure" in found.reason[0]


class Machine(Cluster):
    """Measured as ranks do it. `strays`: of the samples at pairs of a node, how many its other programs make slow.

    `starved`: pairs that another program makes slow each time.
    """

    starved: frozenset[Edge] = frozenset()

    def measure(self, strays: dict[str, float]) -> tuple[Classification, int]:
        """Return the findings, and the total number of measurements of pairs."""
        coordinator = Coordinator(self.nodes, 1, (1.5, 3.0), 0.0)
        done = 0
        for _, pairs in coordinator.plan():
            for edge in pairs:
                coordinator.note(edge, *self.sample(edge, strays), delayed=edge in self.starved)
                done += 1
        found, _ = classify(
            [Pair.of(one) for one in coordinator.all_results()],
            self.host_of,
        )
        return found, done

    def sample(self, edge: Edge, strays: dict[str, float]) -> tuple[float, int, str, float]:
        speed = self.pair(*edge).busbw_bytes_per_s
        noise = max(strays.get(self.host_of[end], 0.0) for end in edge)
        if speed is not None and self.chance.random() < noise:
            speed /= self.chance.uniform(2, 20)
        if speed is not None and edge in self.starved:
            speed /= 9
        return speed or 0.0, 0, "" if speed else "timed out", 0.01


@pytest.mark.parametrize(("strays", "most"), [(0.0, 16), (0.1, 40), (0.3, 60), (0.5, 90)])
def test_noise_is_not_called_a_fault(strays: float, most: int) -> None:
    for seed in range(200):
        found, samples = Machine(4, seed=seed).measure({"node0": strays})
        assert verdict(found) == (Kind.HEALTHY, {}), seed
        assert samples <= most


@pytest.mark.parametrize("strays", [0.0, 0.1, 0.3])
@pytest.mark.parametrize(("inject", "size"), [(bad_rank, 3), (bad_rank, 4), (bad_link, 4), (split, 4), (bad_rank, 8)])
def test_faults_are_found_in_noise(inject: Callable[[Cluster, str], Verdict], size: int, strays: float) -> None:
    right = 0
    for seed in range(40):
        a_machine = Machine(size, seed=seed)
        expected = inject(a_machine, "slow")
        found, samples = a_machine.measure({"node0": strays})
        right += verdict(found) == expected
        assert samples <= 3 * 24 * size
    assert right >= (40 if not strays else 36)


def test_a_pair_that_lacks_a_core_each_time_is_not_called_slow() -> None:
    a_machine = Machine(4)
    a_machine.starved = frozenset({(0, 1)})
    assert a_machine.measure({})[0].kind is Kind.UNDECIDABLE
    a_machine.make("slow", lambda a, b: (a, b) == (1, 3))
    found, _ = a_machine.measure({})
    assert verdict(found) == (Kind.BAD_LINK, {"links": ((1, 3),)})


def test_a_node_with_noise_beside_quiet_ones_is_not_called_bad() -> None:
    for seed in range(50):
        found, _ = Machine(4, 4, 4, 4, 4, 4, seed=seed).measure({"node3": 0.4})
        assert verdict(found) == (Kind.HEALTHY, {}), seed


@pytest.mark.parametrize(("sizes", "rank"), [((32,), 5), ((8,) * 8, 21)])
def test_of_many_slow_pairs_a_dozen_are_looked_at_again(sizes: tuple[int, ...], rank: int) -> None:
    machines = Machine(*sizes)
    machines.make("slow", by_rank(rank))
    found, samples = machines.measure({})
    assert verdict(found) == (Kind.BAD_RANK, {"ranks": (rank,)})
    assert samples - len(machines.edges) <= 2 * 12 * 5


def test_what_was_wrong_once_stays_wrong() -> None:
    coordinator = Coordinator([[0, 1]], 1, (1.5, 3.0), 0.0)
    coordinator.note((0, 1), 1e9, 7, "", 0.01, delayed=False)
    coordinator.note((0, 1), 1e9, 0, "", 0.01, delayed=False)
    assert coordinator.all_results()[0]["wrong"] == 7
