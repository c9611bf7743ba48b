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


def add_blamed(case: Case) -> None:
    """Add the culprits, those with the same trouble together."""
    alike: dict[tuple[bool, str, str, frozenset[PairStatus]], list[int]] = {}
    for unit in case.blamed:
        states = frozenset(case.status[edge] for edge in pair_graph.touching(unit, case.bad))
        alike.setdefault((case.is_node(unit), *wording.partners(case, unit), states), []).extend(unit)
    for (is_node, partners, cause, _), ranks in alike.items():
        edges, hosts = pair_graph.touching(ranks, case.bad), case.hosts(ranks)
        are_several = len(hosts if is_node else ranks) > 1
        only = f" ({name_ranks(ranks)})" if len(ranks) == 1 else ""
        name = f"{fold(hosts)}{only}" if is_node else case.who(ranks)
        case.troubles.append(
            Classification(
                kind=Kind.SEVERAL if are_several else Kind.BAD_NODE if is_node else Kind.BAD_RANK,
                ranks=() if is_node else tuple(sorted(ranks)),
                hosts=tuple(hosts) if is_node else (),
                sentence=f"{name} {wording.fare(case, edges, partners, are_several=are_several)}"
                + (cause and f"; {cause}"),
                reason=wording.evidence(case, edges),
                next=wording.NEXT_NODE if is_node else wording.NEXT_RANK,
            )
        )


def add_splits(case: Case) -> None:
    """Add groups of ranks in nodes or rails; all nodes together, as what splits several of them is one cause."""
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


def add_doubtful(case: Case) -> None:
    """Add bad pairs of ranks that have no good pair, nor enough bad pairs to be blamed."""
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
            sentence=f"{wording.links(case, edges)} {fare}; there is no other result for {case.who(ranks)}",
            reason=wording.evidence(case, edges),
            next=f"rerun, so that {name_ranks(ranks)} {_is_tested(ranks)} with other ranks as well",
        )
    )
    case.left -= edges


def add_links(case: Case) -> None:
    """Add the bad pairs that nothing else explains, as one trouble: many may share a cause, such as an uplink."""
    if not case.left:
        return
    unsure: set[int] = set()
    for level in LEVELS:
        working = {end for edge in case.at(level, case.good) for end in edge}
        unsure |= {end for edge in case.at(level, case.left) for end in edge} - working
    doubt = f"{name_ranks(unsure)}: no other pair at that level works, so either an end (a NIC) or the link may be bad"
    links = ("" if case.troubles else "only ") + wording.links(case, case.left)
    fare = wording.fare(case, case.left, are_several=len(case.left) > 1)
    ends = "both are" if len(case.left) == 1 else "their ends are"
    well = "otherwise: the link or one of its ends" if unsure else "with all other ranks"
    case.troubles.append(
        Classification(
            kind=Kind.BAD_LINK,
            links=tuple(sorted(case.left)),
            sentence=f"{links} {fare}; {ends} fine {well}",
            reason=wording.evidence(case, case.left) + ((doubt,) if unsure else ()),
            next=f"add a third node or rank: {wording.NEXT_THIRD}" if unsure else wording.NEXT_LINK,
        )
    )


def add_unsure(case: Case) -> None:
    """Add pairs that look slow but may be noise; beside what is certain, they are in its evidence alone."""
    if not case.unsure or case.troubles:
        return
    most = max(len(case.pairs[edge].samples) for edge in case.unsure)
    fare = wording.fare(case, case.unsure, are_several=len(case.unsure) > 1)
    case.troubles.append(
        Classification(
            kind=Kind.UNDECIDABLE,
            links=tuple(sorted(case.unsure)),
            sentence=f"{wording.links(case, case.unsure)} {fare}; this may be noise, so no rank or link is blamed",
            reason=(
                *wording.evidence(case, case.unsure),
                f"measured up to {most} times: too few, given how often good pairs look slow for a while",
            ),
            next=wording.NEXT_NOISE,
        )
    )


def split(
    case: Case, sentence: str, sides: Sequence[set[int]], across: Collection[Edge], why: str = wording.WHY_SPLIT
) -> Classification:
    """Return sides that do not work across, with the likely cause."""
    may_be_layout = any(case.status[edge] is PairStatus.SLOW for edge in case.at(NODE, across))
    return Classification(
        kind=Kind.SPLIT,
        groups=tuple(tuple(sorted(side)) for side in sides),
        sentence=sentence,
        reason=(*wording.evidence(case, across), wording.WHY_LAYOUT if may_be_layout else why),
        next=wording.NEXT_SPLIT,
    )


def perhaps_a_group(case: Case, ranks: Sequence[int], unmet: set[int]) -> Classification:
    """Return ranks that are bad, or form a group with the ranks that they were not tested with."""
    edges = pair_graph.touching(ranks, case.left)
    others = "each other" if unmet.issubset(ranks) else name_ranks(unmet)
    tested = "were not tested" if len(ranks) > 1 else "was not tested"
    fare = wording.fare(case, edges, "with every other rank tried", are_several=len(ranks) > 1)
    return Classification(
        kind=Kind.UNDECIDABLE,
        ranks=tuple(ranks),
        sentence=f"{case.who(ranks)} {fare}, but {tested} with {others}: bad, or part of a group that works inside",
        reason=(
            *wording.evidence(case, edges),
            f"a group would mean that configurations differ, {wording.WHY_SPLIT}",
        ),
        next=f"rerun with {fold(case.hosts(ranks))} alone: if that works, they form a group",
    )


def dead_rail(case: Case, bad: set[Edge]) -> Classification:
    """Return a rail of which no pair works."""
    fare = wording.fare(case, bad, "with each other", are_several=True)
    hosts = fold(case.hosts({end for edge in bad for end in edge}))
    return Classification(
        kind=Kind.BAD_LINK,
        links=tuple(sorted(bad)),
        sentence=f"{hosts} {wording.rail(bad)} {fare}; "
        "other ranks there do not: something that the rail shares, such as a switch",
        reason=wording.evidence(case, bad),
        next=wording.NEXT_LINK,
    )


def scattered(case: Case, slow: set[Edge], measured: int) -> Classification:
    """Return pairs that are slow without a pattern, many of the `measured` ones."""
    hosts = fold(case.hosts({end for edge in slow for end in edge}))
    fare = wording.fare(case, slow, are_several=True)
    return Classification(
        kind=Kind.UNDECIDABLE,
        sentence=f"{len(slow)} of {measured} pairs of {hosts} {fare}; no rank, group or link explains them",
        reason=(*wording.evidence(case, slow), "slow pairs without a pattern are noise or topology"),
        next="rerun with nothing else running; compare with nvidia-smi topo -m",
    )


def two_nodes(case: Case, hosts: Sequence[str], bad: set[Edge]) -> Classification:
    """Return the only two nodes, between which no pair works."""
    is_well = case.at(NODE, case.good) and not case.at(NODE, case.bad)
    return Classification(
        kind=Kind.UNDECIDABLE,
        hosts=tuple(hosts),
        links=tuple(sorted(bad)),
        sentence=f"{' and '.join(hosts)} {wording.fare(case, bad, 'with each other', are_several=True)}; "
        f"{'inside each node all pairs are good; ' * bool(is_well)}the network between them or one node's own "
        "(two nodes cannot decide)",
        reason=wording.evidence(case, bad),
        next=f"add a third node to --hosts: {wording.NEXT_THIRD}",
    )


def nothing_works(case: Case) -> Classification:
    """Return that no pair is good, or that the only pair is bad."""
    if len(case.bad) > 1:
        return Classification(
            kind=Kind.UNDECIDABLE,
            sentence=f"no pair works ({wording.counts(case, case.bad)}), so no single rank can be blamed",
            reason=wording.evidence(case, case.bad),
            next="check what all ranks have in common: driver, interface, firewall (distdiag ports), shared memory",
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
        "one of them or the link between them (a single pair cannot decide)",
        reason=wording.evidence(case, [edge]),
        next=f"add a third {third}: {wording.NEXT_THIRD}",
    )


def nothing_measured(case: Case) -> Classification:
    """Return that there is no evidence at all."""
    return Classification(
        kind=Kind.UNDECIDABLE,
        sentence="no pair was measured" if case.pairs else "no pair to test: there is a single rank",
        next="increase --timeout" if case.pairs else "use at least two ranks: --nproc 2, or --hosts",
    )


def healthy(case: Case) -> Classification:
    """Return that no pair is bad, and the ranks without a result."""
    fast = {edge for edge in case.good if case.speed(edge) * SLOW > case.typical[case.pairs[edge].level]}
    alike = f"no pair is slow, but {len(fast)} are much faster than the others" if fast else "no pair stands out"
    doubt = "" if case.least is not None else "; pairs alone do not show whether that is good"
    unmet = set(case.host_of).difference(*case.good)
    sentence = f"{alike}: {wording.typical(case, case.typical)}"
    if len(case.pairs) == 1 and case.least is None:
        sentence, doubt = f"{wording.typical(case, case.typical)}, and nothing to compare it with", ""
    if unmet:
        doubt = f"; no result for {case.who(unmet)}"
    return Classification(
        kind=Kind.UNDECIDABLE if unmet else Kind.HEALTHY,
        ranks=tuple(sorted(unmet)),
        sentence=f"{sentence}{doubt}",
        reason=wording.evidence(case, fast),
        next=f"rerun, so that {name_ranks(unmet)} {_is_tested(unmet)} with other ranks" if unmet else "",
    )


def _is_tested(ranks: Collection[int]) -> str:
    return "are tested" if len(ranks) > 1 else "is tested"
