"""The answer in sentences: what was detected, how the numbers grew, where two forwards part. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.overflow.show import words
from distdiag.commands.overflow.show.diverge import What, ratio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.commands.overflow.show.choose import Chosen
    from distdiag.commands.overflow.show.compare import Compared
    from distdiag.commands.overflow.show.diverge import Difference
    from distdiag.commands.overflow.show.kept import Recording
    from distdiag.commands.overflow.show.records import Detection

_GREW = 10.0
"""What grows by less than this on its way is worth no word: a layer does that."""


def headlines(chosen: Chosen, compared: Compared | None) -> Iterator[str]:
    """Say the answer in a few sentences: what was detected, how the numbers grew, where two forwards part."""
    detections = list(in_order(chosen))
    if detections:
        more = len(detections) - 1
        yield sentence(chosen, *detections[0]) + (f" ({more} more below)" if more else "")
    yield grew(chosen)
    if compared is not None:
        yield parts(compared)


def grew(chosen: Chosen) -> str:
    """Say where the numbers grew most: of all forwards that of the answer, else the nearest to a limit."""
    chain = chosen.chain(chosen.main)
    if chain is None or chosen.main is None:
        return "no frame has numbers to look at" if chosen.sides else "no frames were kept"
    where = words.within(chosen.main, chosen.sides)
    if chain.factor < _GREW:
        said = "no growth from module to module leads there" if any(in_order(chosen)) else "the numbers do not grow"
        return (
            f"{said}: {words.magnitude(chain.end.most)} is the greatest finite one, from {words.point(chain.end)} "
            f"{where} ({words.percent(chain.end.share)} of {chain.end.dtype}'s greatest number)"
        )
    return f"{words.grown(chain)} {where}"


def parts(compared: Compared) -> str:
    """Say where two forwards begin to part."""
    if compared.beside is None:
        return f"{compared.names[0]} and {compared.names[1]} cannot be compared: {compared.why}"
    (a, b), found = compared.names, compared.beside
    first, numbers = found.first, found.in_numbers
    if first is None:
        batches = f" in {compared.batches:,} batches" if compared.batches > 1 else ""
        return f"{a} and {b} do not diverge{batches}: {words.count(len(found.pairs), 'call')} compared" + (
            f", numbers within {compared.factor:g} x"
        )
    said = f"{a} and {b} diverge{_in_batch(compared)} from {_place(first)} on: {_differ(compared, first)}"
    if numbers is not None and numbers is not first:
        said += f". Their numbers do from {_place(numbers)} on: {_differ(compared, numbers)}"
    elif numbers is None:
        said += f". Their numbers stay within {compared.factor:g} x"
    return said


def _in_batch(compared: Compared) -> str:
    if compared.sides is None or compared.sides[0].recording is compared.sides[1].recording:
        return ""
    a, b = (one.forward.batch for one in compared.sides)
    return f" in batch {a}" if a == b else ""


def _place(found: Difference) -> str:
    place = found.a.place
    return f"{words.named(place.module)} ({place.kind}), `{place.tensor}`"


def _differ(compared: Compared, found: Difference) -> str:
    a, b = compared.names
    if found.what in (What.KIND, What.DTYPE, What.SHAPE):
        return f"{words.like(found.a)} and {words.like(found.b)}"
    if found.of_least:
        return f"abs min {words.magnitude(found.a.least)} and {words.magnitude(found.b.least)}"
    said = f"abs max {words.magnitude(found.a.most)} and {words.magnitude(found.b.most)}"
    if found.what == What.NOT_FINITE:
        said = f"{words.magnitude(found.a.most)} in {a}, {words.magnitude(found.b.most)} in {b}"
    return said + _given(compared.factor, found)


def _given(factor: float, found: Difference) -> str:
    a, b = found.pair.a.given, found.pair.b.given
    if a is None or b is None:
        return ""
    how = "alike" if ratio(a.most, b.most) <= factor else "different already"
    return f"; what went in was {how} ({words.magnitude(a.most)} and {words.magnitude(b.most)})"


def sentence(chosen: Chosen, recording: Recording, one: Detection) -> str:
    """Give the detector's sentence; where it names no rank, of several files with the name of the file."""
    if one.rank is not None or len(chosen.recordings) == 1:
        return one.sentence
    return f"{words.source(recording, chosen.recordings)}: {one.sentence}"


def in_order(chosen: Chosen) -> Iterator[tuple[Recording, Detection]]:
    """List what was detected, the earliest first."""
    found = [(recording, one) for recording in chosen.recordings for one in recording.detections]
    yield from sorted(found, key=lambda pair: (pair[1].step, pair[1].batch))
