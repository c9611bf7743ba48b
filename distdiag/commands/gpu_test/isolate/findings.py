"""Each kind of trouble as a whole: its name, who has it, the evidence, and what to do. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold, fold_ranks, name_ranks
from distdiag.commands.gpu_test.isolate import pair_graph, wording
from distdiag.commands.gpu_test.isolate.slowness import SLOW
from distdiag.commands.gpu_test.isolate.types import LEVELS, NODE, Classification, Kind, PairStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from distdiag.commands.gpu_test.isolate.pair_graph import Case
    from distdiag.commands.gpu_test.isolate.types import Edge


def say_blamed(case: Case) -> None:
    """Name culprits, those with the same trouble together."""
    alike: dict[tuple[bool, str, str, frozenset[PairStatus]], list[int]] = {}
    for unit in case.blamed:
        states = frozenset(case.status[edge] for edge in pair_graph.touching(unit, case.bad))
        alike.setdefault((case.is_node(unit), *wording.with_whom(case, unit), states), []).extend(unit)
    for (is_node, whom, cause, _), ranks in alike.items():
        edges, hosts = pair_graph.touching(ranks, case.bad), case.hosts(ranks)
        are_several = len(hosts if is_node else ranks) > 1
        only = f" ({name_ranks(ranks)})" if len(ranks) == 1 else ""
        name = f"{fold(hosts)}{only}" if is_node else case.who(ranks)
        case.troubles.append(
            Classification(
                kind=Kind.SEVERAL if are_several else Kind.BAD_NODE if is_node else Kind.BAD_RANK,
                ranks=() if is_node else tuple(sorted(ranks)),
                hosts=tuple(hosts) if is_node else (),
                sentence=f"{name} {wording.fare(case, edges, whom, are_several=are_several)}"
                + (cause and f"; {cause}"),
                reason=wording.evidence(case, edges),
                next=wording.NEXT_NODE if is_node else wording.NEXT_RANK,
            )
        )


def say_splits(case: Case) -> None:
    """Name groups of ranks in nodes or rails; all nodes together, as what splits several of them is one cause."""
    for level, cells in case.splits.items():
        across = {edge for cell in cells for edge in pair_graph.across(cell, case.at(level, case.bad))}
        if level == NODE:
            names = ["ranks " + " and ".join(map(fold_ranks, cell)) for cell in cells]
        else:
            names = [
                f"{' and '.join(fold(case.hosts(group)) for group in cell)} {wording.rail(cell)}" for cell in cells
            ]
        sides = [group for cell in cells for group in cell]
        sentence = f"{wording.some(names)} {wording.asunder(case, across)}, not a bad rank"
        case.troubles.append(split(case, sentence, sides, across))


def say_doubtful(case: Case) -> None:
    """Name bad pairs of ranks that have no good pair, nor enough bad ones to tell against them."""
    working = {end for edge in case.good for end in edge}
    edges = {edge for edge in case.left if not working.issuperset(edge)}
    if not edges:
        return
    ranks = sorted({end for edge in edges for end in edge} - working)
    fare = wording.fare(case, edges, are_several=len(edges) > 1)
    case.troubles.append(
        Classification(
            kind=Kind.UNDECIDABLE,
            ranks=tuple(ranks),
            links=tuple(sorted(edges)),
            sentence=f"{wording.links(case, edges)} {fare}, and nothing else is known of {case.who(ranks)}",
            reason=wording.evidence(case, edges),
            next=f"run again, so that {name_ranks(ranks)} can meet others as well",
        )
    )
    case.left -= edges


def say_links(case: Case) -> None:
    """Name the bad pairs that nothing else explains, as one trouble: many may share a cause, such as an uplink."""
    if not case.left:
        return
    unsure: set[int] = set()
    for level in LEVELS:
        working = {end for edge in case.at(level, case.good) for end in edge}
        unsure |= {end for edge in case.at(level, case.left) for end in edge} - working
    doubt = f"{name_ranks(unsure)}: no other pair of that level works, so an end (a NIC) may be bad as well as the link"
    links = ("" if case.troubles else "only ") + wording.links(case, case.left)
    fare = wording.fare(case, case.left, are_several=len(case.left) > 1)
    ends = "both are" if len(case.left) == 1 else "their ends are"
    well = "otherwise: the link, or one end of it" if unsure else "with all others"
    case.troubles.append(
        Classification(
            kind=Kind.BAD_LINK,
            links=tuple(sorted(case.left)),
            sentence=f"{links} {fare}; {ends} fine {well}",
            reason=wording.evidence(case, case.left) + ((doubt,) if unsure else ()),
            next=f"add a third node or rank: {wording.NEXT_THIRD}" if unsure else wording.NEXT_LINK,
        )
    )


def say_unsure(case: Case) -> None:
    """Say of pairs that look slow that it may be noise; beside what is certain, they are in its evidence alone."""
    if not case.unsure or case.troubles:
        return
    most = max(len(case.pairs[edge].looks) for edge in case.unsure)
    fare = wording.fare(case, case.unsure, are_several=len(case.unsure) > 1)
    case.troubles.append(
        Classification(
            kind=Kind.UNDECIDABLE,
            links=tuple(sorted(case.unsure)),
            sentence=f"{wording.links(case, case.unsure)} {fare}; that may be noise, so nobody is blamed",
            reason=(
                *wording.evidence(case, case.unsure),
                f"looked at up to {most} times: too seldom, given how often good pairs look slow for a while",
            ),
            next=wording.NEXT_NOISE,
        )
    )


def split(
    case: Case, sentence: str, sides: Sequence[set[int]], across: Collection[Edge], why: str = wording.WHY_SPLIT
) -> Classification:
    """Say that sides do not work across, and why that may be."""
    may_be_layout = any(case.status[edge] is PairStatus.SLOW for edge in case.at(NODE, across))
    return Classification(
        kind=Kind.SPLIT,
        groups=tuple(tuple(sorted(side)) for side in sides),
        sentence=sentence,
        reason=(*wording.evidence(case, across), wording.WHY_LAYOUT if may_be_layout else why),
        next=wording.NEXT_SPLIT,
    )


def perhaps_a_group(case: Case, ranks: Sequence[int], unmet: set[int]) -> Classification:
    """Say that ranks are bad, or of a group with those that they did not meet."""
    edges = pair_graph.touching(ranks, case.left)
    them = "each other" if unmet.issubset(ranks) else name_ranks(unmet)
    fare = wording.fare(case, edges, "with every other rank tried", are_several=len(ranks) > 1)
    return Classification(
        kind=Kind.UNDECIDABLE,
        ranks=tuple(ranks),
        sentence=f"{case.who(ranks)} {fare}, but never met {them}: bad, or of a group that works inside",
        reason=(
            *wording.evidence(case, edges),
            f"a group would be a configuration that differs, {wording.WHY_SPLIT}",
        ),
        next=f"run again with {fold(case.hosts(ranks))} alone: if that works, it is a group",
    )


def dead_rail(case: Case, bad: set[Edge]) -> Classification:
    """Say that no pair of a rail works."""
    fare = wording.fare(case, bad, "with each other", are_several=True)
    hosts = fold(case.hosts({end for edge in bad for end in edge}))
    return Classification(
        kind=Kind.BAD_LINK,
        links=tuple(sorted(bad)),
        sentence=f"{hosts} {wording.rail(bad)} {fare}; "
        "other ranks there do not: what the rail shares, such as a switch",
        reason=wording.evidence(case, bad),
        next=wording.NEXT_LINK,
    )


def scattered(case: Case, slow: set[Edge], measured: int) -> Classification:
    """Say that many of the `measured` pairs are slow without a pattern."""
    hosts = fold(case.hosts({end for edge in slow for end in edge}))
    fare = wording.fare(case, slow, are_several=True)
    return Classification(
        kind=Kind.UNDECIDABLE,
        sentence=f"{len(slow)} of {measured} pairs of {hosts} {fare}; no rank, group or link explains them",
        reason=(*wording.evidence(case, slow), "without a pattern, it is noise, or the layout"),
        next="run again with nothing else running; compare with nvidia-smi topo -m",
    )


def two_nodes(case: Case, hosts: Sequence[str], bad: set[Edge]) -> Classification:
    """Say that no pair between the only two nodes works."""
    is_well = case.at(NODE, case.good) and not case.at(NODE, case.bad)
    return Classification(
        kind=Kind.UNDECIDABLE,
        hosts=tuple(hosts),
        links=tuple(sorted(bad)),
        sentence=f"{' and '.join(hosts)} {wording.fare(case, bad, 'with each other', are_several=True)}; "
        f"{'inside all is well: ' * bool(is_well)}the network between, or that of one node, which two cannot tell",
        reason=wording.evidence(case, bad),
        next=f"add a third node to --hosts: {wording.NEXT_THIRD}",
    )


def nothing_works(case: Case) -> Classification:
    """Say that no pair is good, or that the only one is not."""
    if len(case.bad) > 1:
        return Classification(
            kind=Kind.UNDECIDABLE,
            sentence=f"no pair works: {wording.counts(case, case.bad)}, so nothing tells one rank from another",
            reason=wording.evidence(case, case.bad),
            next="look at what all have in common: driver, interface, firewall (distdiag ports), shared memory",
        )
    (edge,) = case.bad
    hosts = case.hosts(edge)
    third = "node to --hosts" if len(hosts) > 1 else f"rank, --nproc {max(3, len(case.host_of))}"
    return Classification(
        kind=Kind.UNDECIDABLE,
        ranks=edge,
        hosts=tuple(hosts) if len(hosts) > 1 else (),
        links=(edge,),
        sentence=f"{case.who(edge)} {wording.fare(case, [edge], 'with each other', are_several=True)}; "
        "one of the two or the link between them, which one pair cannot tell",
        reason=wording.evidence(case, [edge]),
        next=f"add a third {third}: {wording.NEXT_THIRD}",
    )


def nothing_measured(case: Case) -> Classification:
    """Say that there is no evidence at all."""
    return Classification(
        kind=Kind.UNDECIDABLE,
        sentence="no pair was measured" if case.pairs else "there is no pair: a single rank has none to meet",
        next="run again with a longer --timeout" if case.pairs else "use two ranks at least: --nproc 2, or --hosts",
    )


def healthy(case: Case) -> Classification:
    """Say that no pair is bad, and of whom nothing is known."""
    fast = {edge for edge in case.good if case.speed(edge) * SLOW > case.typical[case.pairs[edge].level]}
    alike = f"no pair is slow, but {len(fast)} have far more than the others" if fast else "no pair stands out"
    doubt = "" if case.least is not None else "; whether that is good cannot be known from pairs"
    unmet = set(case.host_of).difference(*case.good)
    if unmet:
        doubt = f"; nothing is known of {case.who(unmet)}"
    return Classification(
        kind=Kind.UNDECIDABLE if unmet else Kind.HEALTHY,
        ranks=tuple(sorted(unmet)),
        sentence=f"{alike}: {wording.typical(case, case.typical)}{doubt}",
        reason=wording.evidence(case, fast),
        next=f"run again, so that {name_ranks(unmet)} can meet others" if unmet else "",
    )
