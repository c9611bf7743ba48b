"""Classifications of each trouble (rows of knowledge/pair_verdicts.toml), and the wording for pairs. Pure."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

from distdiag.cluster.hosts import fold, fold_ranks, name_ranks
from distdiag.commands.gpu_test.isolate.pair_graph import across, stars, touching
from distdiag.commands.gpu_test.isolate.slowness import SLOW
from distdiag.commands.gpu_test.isolate.types import LEVELS, NET, NODE, Classification, Kind, PairStatus
from distdiag.diagnosis import verdicts
from distdiag.diagnosis.wording import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distdiag.commands.gpu_test.isolate.pair_graph import Case
    from distdiag.commands.gpu_test.isolate.types import Edge

_LINES = 8
"""Lines of evidence for each trouble."""
_NAMED = 4
"""Links or groups in a sentence."""
_VERBS = {
    PairStatus.SLOW: ("is slow", "are slow"),
    PairStatus.FAILED: ("fails", "fail"),
    PairStatus.WRONG: ("gets wrong data", "get wrong data"),
    PairStatus.UNSURE: ("looks slow", "look slow"),
}


@cache
def _rows(kind: str) -> dict[str, verdicts.Verdict]:
    return verdicts.rows("pair_verdicts", kind, verdicts.Verdict)


def add(case: Case, row: str, edges: Collection[Edge], words: Mapping[str, object], **fields: Any) -> None:  # noqa: ANN401 - of Classification
    """Add the trouble of a row, filled with `words`; it explains these pairs, which are the evidence."""
    text = verdicts.filled(_rows("verdict")[row], words)
    reason = (*_evidence(case, edges), *filter(None, [text.detail]))
    told = {"kind": Kind(text.id), "sentence": text.title, "reason": reason, "next": text.fix, **fields}
    case.troubles.append(Classification(**told))
    case.left -= set(edges)


def partners(case: Case, ranks: Collection[int]) -> tuple[str, str]:
    """Return the partners of a culprit's bad pairs, and the conclusion if its pairs at the other level are good."""
    good = Counter(case.pairs[edge].level for edge in touching(ranks, case.good))
    bad = Counter(case.pairs[edge].level for edge in touching(ranks, case.bad))
    levels = [level for level in sorted(bad) if bad[level] > good[level]]
    elsewhere = [level for level in LEVELS if level not in levels and good[level]]
    row = _rows("partners").get(" ".join(["node" if case.is_node(ranks) else "rank", *levels]))
    named, cause = (row.title, row.detail) if row else ("", "")
    if not elsewhere and not case.is_node(ranks):
        named = "with every other rank"
    if any(good[level] for level in levels):
        named = named.replace("every", "nearly every")
    if touching(ranks, case.skipped):
        named += " tested"
    return named, cause if elsewhere and not any(bad[level] for level in elsewhere) else ""


def fare(case: Case, edges: Collection[Edge], partners: str = "", *, are_several: bool) -> str:
    """Format the state of bad pairs: "is slow with ...: 0.21 GB/s (others 1.4 GB/s)"."""
    states = {case.status[edge] for edge in edges}
    verbs = _VERBS[min(states)] if len(states) == 1 else ("is bad", "are bad")
    figures = [_counts(case, edges)] if len(states) > 1 else []
    if states in ({PairStatus.SLOW}, {PairStatus.UNSURE}):
        levels = [level for level in LEVELS if case.at(level, edges)]
        figures = [_slow(case, level, edges) + f" {LEVELS[level]}" * (len(levels) > 1) for level in levels]
    return f"{verbs[are_several]} {partners}".rstrip() + (f": {' and '.join(figures)}" if figures else "")


def _counts(case: Case, edges: Iterable[Edge]) -> str:
    by_status = Counter(case.status[edge] for edge in sorted(edges))
    return ", ".join(f"{count} {status}" for status, count in by_status.items())


def _slow(case: Case, level: str, edges: Iterable[Edge]) -> str:
    usual = f"others {speed(case.typical[level])}"
    if not case.at(level, case.good):  # a single pair, below expectation
        usual = f"expected {speed(case.least or 0.0)}"
    return f"{speed(median(map(case.speed, case.at(level, edges))))} ({usual})"


def _links(case: Case, edges: Collection[Edge]) -> dict[str, str]:
    """Name links and their state: complete sets between two nodes by the nodes, and those of one rank together."""
    between: dict[tuple[str, ...], set[Edge]] = {}
    for edge in case.at(NET, case.good | case.bad):
        between.setdefault(tuple(case.hosts(edge)), set()).add(edge)
    whole = {hosts: own for hosts, own in between.items() if len(own) > 1 and own.issubset(edges)}
    names = [f"{' and '.join(hosts)} ({len(own)} pairs)" for hosts, own in sorted(whole.items())]
    single = set(edges).difference(*whole.values())
    names += [f"{case.who([rank])} and {case.who(others)}" for rank, others in stars(single)]
    are_several = len(edges) > 1
    named = f"the link{'s' * are_several} between {_some(names)}"
    return {"links": named, "how": fare(case, edges, are_several=are_several)}


def _rail(members: Iterable[Collection[int]]) -> str:
    return f"(rail of rank {min(map(min, members))})"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _evidence(case: Case, edges: Collection[Edge]) -> tuple[str, ...]:
    """Return a line for each rank and status of its pairs: "rank 0 with ranks 1-2: slow, 0.18-0.25 GB/s"."""
    lines, left = [], len(edges)
    for rank, others in islice(stars(edges), _LINES):
        by_status: dict[PairStatus, list[Edge]] = {}
        for edge in ((min(rank, other), max(rank, other)) for other in others):
            by_status.setdefault(case.status[edge], []).append(edge)
        for status, own in by_status.items():
            peers = {end for edge in own for end in edge} - {rank}
            figures = f"{status}" if status is PairStatus.FAILED else f"{status}, {_range(map(case.speed, own))}"
            if status is PairStatus.WRONG:
                figures = counted(sum(case.pairs[edge].wrong for edge in own), "wrong element")
            lines.append(f"rank {rank} with {name_ranks(peers)}: {figures}")
        left -= len(others)
    return (*lines, f"and {left} more") if left else tuple(lines)


def measured_at(case: Case, level: str) -> str:
    """Summarize the pairs of a level: the first line of evidence."""
    good, bad, unsure = (case.at(level, edges) for edges in (case.good, case.bad, case.unsure))
    unmeasured = case.at(level, case.skipped - unsure)
    return (
        f"{LEVELS[level]}: {len(bad)} of {len(good) + len(bad)} pairs bad"
        + (f", {len(unsure)} unsure" if unsure else "")
        + (f", {len(unmeasured)} not measured" if unmeasured else "")
        + (f"; good pairs: {_range(map(case.speed, good))}" if good else "")
    )


def _range(speeds: Iterable[float]) -> str:
    known = sorted(speeds)
    least, most = speed(known[0]), speed(known[-1])
    return most if least == most else f"{least.removesuffix(most[-5:])}-{most}"


def typical(case: Case, levels: Iterable[str]) -> str:
    """Return the typical bandwidth of each of these levels."""
    is_single = len(case.typical) == 1
    return " and ".join(speed(case.typical[level]) + f" {LEVELS[level]}" * (not is_single) for level in levels)


def speed(bytes_per_s: float) -> str:
    """Format a bandwidth with at least two digits: 0.21 GB/s, 382 GB/s (1e9 bytes/s)."""
    if bytes_per_s < 1e7:
        return f"{bytes_per_s / 1e6:.2g} MB/s"
    return f"{bytes_per_s / 1e9:.2g} GB/s" if bytes_per_s < 1e11 else f"{bytes_per_s / 1e9:.0f} GB/s"


def add_blamed(case: Case) -> None:
    """Add the culprits, grouped by equal trouble."""
    alike: dict[tuple[bool, str, str, frozenset[PairStatus]], list[int]] = {}
    for unit in case.blamed:
        states = frozenset(case.status[edge] for edge in touching(unit, case.bad))
        alike.setdefault((case.is_node(unit), *partners(case, unit), states), []).extend(unit)
    for (is_node, with_, cause, _), ranks in alike.items():
        edges, hosts = touching(ranks, case.bad), case.hosts(ranks)
        are_several = len(hosts if is_node else ranks) > 1
        only = f" ({name_ranks(ranks)})" if len(ranks) == 1 else ""
        name = f"{fold(hosts)}{only}" if is_node else case.who(ranks)
        words = {"names": name, "how": fare(case, edges, with_, are_several=are_several), "cause": cause}
        kind = Kind.BAD_NODE if is_node else Kind.BAD_RANK
        who = {"hosts": tuple(hosts)} if is_node else {"ranks": tuple(sorted(ranks))}
        add(case, kind, edges, words, **who, kind=Kind.SEVERAL if are_several else kind)


def add_splits(case: Case) -> None:
    """Add groups of ranks in nodes or rails, joined over nodes: equal splits in several nodes have one cause."""
    for level, cells in case.splits.items():
        edges = {edge for cell in cells for edge in across(cell, case.at(level, case.bad))}
        names = ["ranks " + " and ".join(map(fold_ranks, cell)) for cell in cells]
        if level == NET:
            names = [f"{' and '.join(fold(case.hosts(group)) for group in cell)} {_rail(cell)}" for cell in cells]
        add_split(case, "split-ranks", _some(names), [group for cell in cells for group in cell], edges)


def add_doubtful(case: Case) -> None:
    """Add bad pairs of ranks with no good pair and too few bad pairs to be blamed."""
    working = {end for edge in case.good for end in edge}
    edges = {edge for edge in case.left if not working.issuperset(edge)}
    if edges:
        ranks = sorted({end for edge in edges for end in edge} - working)
        words = {**_links(case, edges), "who": case.who(ranks), "ranks": _are(ranks)}
        add(case, "doubtful", edges, words, ranks=tuple(ranks), links=tuple(sorted(edges)))


def add_links(case: Case) -> None:
    """Add the remaining bad pairs as one trouble: many may share a cause, such as an uplink."""
    unsure: set[int] = set()
    for level in LEVELS:
        working = {end for edge in case.at(level, case.good) for end in edge}
        unsure |= {end for edge in case.at(level, case.left) for end in edge} - working
    if case.left:
        words = {**_links(case, case.left), "only": "" if case.troubles else "only", "unsure": name_ranks(unsure)}
        words["ends"] = "both are" if len(case.left) == 1 else "their ends are"
        row = "bad-link-or-end" if unsure else "bad-link"
        add(case, row, case.left, words, links=tuple(sorted(case.left)))


def add_unsure(case: Case) -> None:
    """Add pairs that look slow but may be noise; next to certain trouble, list them as evidence only."""
    if case.unsure and not case.troubles:
        most = max(len(case.pairs[edge].samples) for edge in case.unsure)
        words = {**_links(case, case.unsure), "most": most}
        add(case, "unsure", case.unsure, words, links=tuple(sorted(case.unsure)))


ADDITIONS = (add_blamed, add_splits, add_doubtful, add_links, add_unsure)
"""The last steps of a classification: each adds troubles."""


def add_split(
    case: Case, row: str, names: str, sides: Sequence[set[int]], edges: set[Edge], why: str = "plugin"
) -> None:
    """Add groups that do not work across, with the likely cause."""
    how = "work inside each group but not across: a configuration difference"
    if {case.status[edge] for edge in edges} != {PairStatus.FAILED}:
        state = fare(case, edges, "across", are_several=True)
        how = f"work inside each group but {state}; a configuration or topology difference"
    if any(case.status[edge] is PairStatus.SLOW for edge in case.at(NODE, edges)):
        why = "layout"
    words = {"names": names, "how": how, "detail": _rows("why")[why].title}
    add(case, row, edges, words, groups=tuple(tuple(sorted(side)) for side in sides))


def perhaps_a_group(case: Case, unmet: Mapping[int, set[int]]) -> None:
    """Add ranks that are bad, or form a group with their untested peers."""
    ranks, peers = sorted(unmet), set().union(*unmet.values())
    edges = touching(ranks, case.left)
    words = {
        "who": case.who(ranks),
        "how": fare(case, edges, "with every other rank tried", are_several=len(ranks) > 1),
        "were": "were" if len(ranks) > 1 else "was",
        "others": "each other" if peers.issubset(ranks) else name_ranks(peers),
        "hosts": fold(case.hosts(ranks)),
        "why": _rows("why")["plugin"].title,
    }
    add(case, "perhaps-a-group", edges, words, ranks=tuple(ranks))


def dead_rail(case: Case, bad: set[Edge]) -> None:
    """Add a rail without a working pair."""
    names = f"{fold(case.hosts({end for edge in bad for end in edge}))} {_rail(bad)}"
    words = {"names": names, "how": fare(case, bad, "with each other", are_several=True)}
    add(case, "dead-rail", bad, words, links=tuple(sorted(bad)))


def scattered(case: Case, slow: set[Edge], measured: int) -> None:
    """Add many slow pairs without a pattern, out of `measured` pairs."""
    words = {"count": len(slow), "measured": measured, "how": fare(case, slow, are_several=True)}
    add(case, "scattered", slow, {**words, "hosts": fold(case.hosts({end for edge in slow for end in edge}))})


def two_nodes(case: Case, hosts: Sequence[str], bad: set[Edge]) -> None:
    """Add the undecidable case of two nodes without a working pair between them."""
    is_well = case.at(NODE, case.good) and not case.at(NODE, case.bad)
    words = {"names": " and ".join(hosts), "how": fare(case, bad, "with each other", are_several=True)}
    words["inside"] = "inside each node all pairs are good" if is_well else ""
    add(case, "two-nodes", bad, words, hosts=tuple(hosts), links=tuple(sorted(bad)))


def nothing_works(case: Case) -> None:
    """Add the undecidable case without a good pair."""
    if not case.bad:
        add(case, "nothing-measured" if case.pairs else "single-rank", (), {})
    elif len(case.bad) > 1:
        add(case, "nothing-works", case.bad, {"counts": _counts(case, case.bad)})
    else:
        (edge,) = case.bad
        hosts = case.hosts(edge) if len(case.hosts(edge)) > 1 else []
        third = "node to --hosts" if hosts else f"rank, --nproc {max(3, len(case.host_of))}"
        words = {"who": case.who(edge), "how": fare(case, [edge], "with each other", are_several=True), "third": third}
        add(case, "one-pair", [edge], words, ranks=edge, hosts=tuple(hosts), links=(edge,))


def healthy(case: Case) -> None:
    """Add that no pair is bad, and list ranks without a result."""
    fast = {edge for edge in case.good if case.speed(edge) * SLOW > case.typical[case.pairs[edge].level]}
    alike = f"no pair is slow, but {len(fast)} are much faster than the others" if fast else "no pair stands out"
    doubt = "" if case.least is not None else "; pairs alone do not show whether that is good"
    unmet = sorted(set(case.host_of).difference(*case.good))
    speeds = f"{alike}: {typical(case, case.typical)}"
    if len(case.pairs) == 1 and case.least is None:
        speeds, doubt = f"{typical(case, case.typical)}, without a figure to compare it with", ""
    words = {"speeds": speeds, "doubt": doubt, "who": case.who(unmet) if unmet else "", "ranks": _are(unmet)}
    add(case, "no-result" if unmet else "healthy", fast, words, ranks=tuple(unmet))


def _are(ranks: Collection[int]) -> str:
    return f"{name_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'}" if ranks else ""
