"""From closed paths to culprits."""

from __future__ import annotations

from distdiag.diagnosis.root_cause import fewest_culprits, merged

ALL = [(a, b) for a in "abcd" for b in "abcd" if a != b]


def culprits(closed: list[tuple[str, str]], tried: list[tuple[str, str]] = ALL) -> list[str]:
    found = merged(fewest_culprits(tried, closed))
    return [f"{own.kind} {''.join(own.nodes)} {''.join(own.others)}".strip() for own in found]


def test_a_node_that_lets_nothing_in_is_one_culprit() -> None:
    assert culprits([(a, "c") for a in "abd"]) == ["in c"]


def test_a_node_that_lets_nothing_out() -> None:
    assert culprits([("c", b) for b in "abd"]) == ["out c"]


def test_a_node_that_is_cut_off_is_both() -> None:
    assert culprits([edge for edge in ALL if "c" in edge]) == ["in c", "out c"]


def test_two_nodes_with_the_same_trouble_are_named_together() -> None:
    assert culprits([edge for edge in ALL if edge[1] in "cd"]) == ["in cd"]


def test_single_paths_are_named_as_such() -> None:
    assert culprits([("a", "b")]) == ["pair a b"]
    assert culprits([("a", "c"), ("b", "c"), ("a", "d"), ("b", "d")]) == ["pair ab cd"]


def test_with_two_nodes_neither_is_blamed() -> None:
    assert culprits([("a", "b")], [("a", "b"), ("b", "a")]) == ["pair a b"]


def test_nobody_reaches_anybody() -> None:
    assert culprits(ALL) == ["all abcd"]


def test_where_all_paths_lead_to_one_node_it_is_that_node_and_not_everybody() -> None:
    star = [(a, "d") for a in "abc"]
    assert culprits(star, star) == ["in d"]
    assert culprits([("a", "d")], star) == ["pair a d"]
