"""What was found, as the data of the report. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from distdiag.commands.overflow.show import result
from distdiag.commands.overflow.show.choose import MOST_ROWS, table_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.commands.overflow.show.choose import Chosen
    from distdiag.commands.overflow.show.compare import Compared
    from distdiag.commands.overflow.show.diverge import Difference
    from distdiag.commands.overflow.show.growth import Chain
    from distdiag.commands.overflow.show.kept import Call, Recording, Row, Side
    from distdiag.commands.overflow.show.model import Request
    from distdiag.commands.overflow.show.records import Detection


def answer_of(request: Request, chosen: Chosen, compared: Compared | None) -> result.OverflowShow:
    """Put it all together."""
    return result.OverflowShow(
        files=tuple(map(_file, chosen.recordings)),
        detections=tuple(_found(one, found) for one in chosen.recordings for found in one.detections),
        growth=tuple(_growth(side, chain) for side, chain in chosen.chains),
        divergence=_divergence(compared),
        rows=tuple(_rows(request, chosen, compared)),
    )


def shown(request: Request, chosen: Chosen, compared: Compared | None) -> tuple[Side, ...]:
    """Choose the forwards whose rows are given."""
    if request.everything:
        return chosen.sides
    pair = compared.sides if compared is not None else None
    return pair or (() if chosen.main is None else (chosen.main,))


def _rows(request: Request, chosen: Chosen, compared: Compared | None) -> Iterator[result.Row]:
    left = MOST_ROWS
    for side in shown(request, chosen, compared):
        lines = table_of(request, side, chosen.chain(side)) if left > 0 else []
        for line in lines[:left]:
            if line.call is not None and line.row is not None:
                yield _row(side, line.call, line.row)
        left -= len(lines)


def _file(one: Recording) -> result.FileRead:
    return result.FileRead(
        path=one.path,
        rank=one.rank,
        host=one.host,
        model=one.model,
        batches=one.batches,
        frames=one.frames,
        truncated=one.truncated,
        torn=one.torn,
        left_out=one.left_out,
    )


def _found(recording: Recording, one: Detection) -> result.Found:
    tally = one.tally
    names = ("nan", "inf", "minus_inf", "zeros", "subnormals", "of")
    return result.Found(
        path=recording.path,
        sentence=one.sentence,
        rank=one.rank,
        host=one.host,
        batch=one.batch,
        step=one.step,
        unit=one.unit,
        module=one.module,
        class_=one.class_,
        tensor=one.tensor,
        origin=one.origin,
        made_by=one.made_by,
        made_by_class=one.made_by_class,
        other_ranks=tuple(one.other_ranks),
        hints=tuple(one.hints),
        counts={} if tally is None else {name: getattr(tally, name) for name in names},
    )


def _of(side: Side) -> result.Of:
    return result.Of(
        path=side.recording.path, rank=side.recording.rank, batch=side.forward.batch, forward=side.forward.turn
    )


def _growth(side: Side, chain: Chain) -> result.Growth:
    return result.Growth(
        of=_of(side),
        factor=chain.factor,
        share_of_limit=chain.end.share,
        dtype=chain.end.dtype,
        through=tuple(
            result.At(
                module=point.call.module,
                class_=point.call.kind,
                tensor=point.tensor,
                number=point.call.number,
                abs_max=point.most,
            )
            for point in chain.points
        ),
    )


def _row(side: Side, call: Call, row: Row) -> result.Row:
    return result.Row(
        of=_of(side),
        number=call.number,
        module=row.place.module,
        class_=row.place.kind,
        tensor=row.place.tensor,
        dtype=row.spec.dtype,
        shape=row.spec.shape,
        text=row.spec.text,
        abs_min=_number(row.least),
        abs_max=_number(row.most),
        share_of_limit=row.share,
        growth=call.growth(row),
    )


def _divergence(compared: Compared | None) -> result.Divergence | None:
    if compared is None or compared.beside is None or compared.sides is None:
        return None
    found = compared.beside
    a, b = compared.sides
    return result.Divergence(
        a=_of(a),
        b=_of(b),
        factor=compared.factor,
        compared=len(found.pairs),
        first=_part(compared.sides, found.first),
        in_numbers=_part(compared.sides, found.in_numbers),
        only_a=tuple(map(_call, found.only_a)),
        only_b=tuple(map(_call, found.only_b)),
    )


def _part(sides: tuple[Side, Side], found: Difference | None) -> result.Part | None:
    if found is None:
        return None
    a, b = found.pair.a, found.pair.b
    return result.Part(
        what=found.what,
        a=_row(sides[0], a, found.a),
        b=_row(sides[1], b, found.b),
        ratio=None if found.ratio is None or math.isinf(found.ratio) else found.ratio,
        given_a=None if a.given is None else a.given.most,
        given_b=None if b.given is None else b.given.most,
    )


def _call(one: Call) -> result.Call:
    return result.Call(module=one.module, class_=one.kind, number=one.number)


def _number(value: float | None) -> result.Magnitude:
    return value if value is None or math.isfinite(value) else str(value)
