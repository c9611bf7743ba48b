"""What was kept of frames -> Report. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.overflow.show import words
from distdiag.commands.overflow.show.answer import answer_of
from distdiag.commands.overflow.show.choose import wants
from distdiag.commands.overflow.show.diverge import What
from distdiag.commands.overflow.show.kept import INPUT, NEAR
from distdiag.commands.overflow.show.model import COMMAND
from distdiag.commands.overflow.show.sentences import grew, in_order, parts, sentence
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distdiag.commands.overflow.show.choose import Chosen
    from distdiag.commands.overflow.show.compare import Compared
    from distdiag.commands.overflow.show.kept import Near, Recording, Side
    from distdiag.commands.overflow.show.model import Request
    from distdiag.commands.overflow.show.records import Detection
    from distdiag.commands.overflow.show.result import OverflowShow

_SHOWN = 8
_FIXES = {
    "here": "see what goes in: near the dtype's limit run this module in bfloat16 or float32; else look at its formula",
    "between": "look at the forward of {by}, before it calls {module}: a division, log, exp or scale",
    "given": "look at the batch: the data, or what comes before the model",
    "weights": "look at the step before: clip gradients, lower the learning rate, skip steps whose gradients are bad",
    "backward": "look at the loss and its scale; gradients='each' names the first bad gradient",
}
"""By where it was made, in the detector's words."""


def diagnose(
    request: Request,
    chosen: Chosen,
    compared: Compared | None,
    unread: Mapping[str, str],
    *,
    interrupted: bool = False,
) -> Report[OverflowShow]:
    """Say what was detected, where the numbers grew, and where two forwards part."""
    findings = (
        *_detected(request, chosen),
        *_not_finite(chosen),
        *_near(request, chosen),
        *_diverges(compared),
        *_incomplete(chosen, unread, interrupted=interrupted),
    )
    return Report(
        command=COMMAND,
        data=answer_of(request, chosen, compared),
        findings=findings,
        summary=_summary(chosen, findings),
        interrupted=interrupted,
    )


def _detected(request: Request, chosen: Chosen) -> Iterator[Finding]:
    found = list(in_order(chosen))
    for recording, one in found[:_SHOWN]:
        rank, host = one.rank if one.rank is not None else recording.rank, one.host or recording.host
        ranks = (() if rank is None else (rank,)) + tuple(one.other_ranks)
        yield Finding(
            id="overflow.detected",
            level=Level.FAIL,
            title=sentence(chosen, recording, one),
            where=Where(hosts=(host,) if host else (), ranks=ranks),
            evidence=(*_tally(one), *one.hints),
            fix=_fix(request, one),
        )
    if len(found) > _SHOWN:
        yield Finding(id="overflow.detected", level=Level.FAIL, title=f"{len(found) - _SHOWN} more detections (--json)")


def _fix(request: Request, one: Detection) -> Fix | None:
    if one.origin not in _FIXES:
        return None
    around = one.made_by or one.module
    text = _FIXES[one.origin].replace("{by}", words.named(one.made_by)).replace("{module}", words.named(one.module))
    return Fix(text=text, commands=(request.again("--module", f"{around}*", "--all"),) if around else ())


def _tally(one: Detection) -> Iterator[str]:
    tally = one.tally
    if tally is None:
        return
    first = "" if tally.first is None else f", first at [{', '.join(map(str, tally.first))}]"
    counts = ((tally.nan, "nan"), (tally.inf, "inf"), (tally.minus_inf, "-inf"))
    bad = ", ".join(f"{count:,} {name}" for count, name in counts if count)
    yield f"{tally.dtype} [{', '.join(map(str, tally.shape))}]: {bad or 'none'} of {tally.of:,}{first}"


def _not_finite(chosen: Chosen) -> Iterator[Finding]:
    """Tell of nan and inf that the detector says nothing of: it may be meant so, or the job ended first."""
    found = [
        (side, side.forward.odd[0])
        for side in chosen.sides
        # Only the first is detected where the job goes on.
        if side.forward.odd and not any(one.batch <= side.forward.batch for one in side.recording.detections)
    ]
    if found:
        side, odd = found[0]
        yield Finding(
            id="overflow.not-finite",
            level=Level.WARN,
            title=f"{odd.what} in `{odd.tensor}` of {words.named(odd.module)} ({odd.kind}), "
            f"{words.side(side, chosen.sides)}, and the detector does not call it a fault",
            detail="A mask of -inf is none, nor is what `ignore` names; or the job was killed before it came to it.",
            where=_where([side for side, _ in found]),
        )


def _near(request: Request, chosen: Chosen) -> Iterator[Finding]:
    """Tell of outputs near their limit, each module once, where it was nearest."""
    fits = wants(request)
    best: dict[str, tuple[Near, Side]] = {}
    for side in chosen.sides:
        for near in side.forward.near():
            known = best.get(near.module)
            if fits(near.module) and (known is None or near.share > known[0].share):
                best[near.module] = (near, side)
    ordered = sorted(best.values(), key=lambda one: -one[0].share)
    if not ordered:
        return
    said = [f"{_of_limit(near)} {words.within(side, chosen.sides)}" for near, side in ordered[:_SHOWN]]
    more = (
        f", and {words.count(len(ordered) - 1, 'other module')} above {words.percent(NEAR)}" if len(ordered) > 1 else ""
    )
    yield Finding(
        id="overflow.near-limit",
        level=Level.WARN,
        title=said[0] + more,
        where=_where([side for _, side in ordered]),
        evidence=tuple(said[1:]),
        fix=Fix(text="run these modules in bfloat16 or float32, or scale down what goes in"),
    )


def _of_limit(near: Near) -> str:
    what = "the input of " if near.tensor == INPUT else f"`{near.tensor}` of "
    number = f"{words.magnitude(near.most)} = {words.percent(near.share)} of {near.dtype}'s greatest number"
    return f"{what}{words.named(near.module)} ({near.kind}) comes to {number}"


def _diverges(compared: Compared | None) -> Iterator[Finding]:
    """Tell where two forwards part. Other data explains other numbers; it does not explain another dtype, or nan."""
    if compared is None:
        return
    found = compared.beside
    if found is None:
        yield Finding(id="overflow.not-compared", level=Level.UNKNOWN, title=parts(compared))
        return
    lone = [(compared.names[0], found.only_a), (compared.names[1], found.only_b)]
    evidence = tuple(
        f"only in {name}: {', '.join(words.named(one.module) for one in calls[:_SHOWN])}"
        + (f" and {len(calls) - _SHOWN} more" if len(calls) > _SHOWN else "")
        for name, calls in lone
        if calls
    )
    first = [one for one in (found.first, found.in_numbers) if one is not None]
    if not first and not evidence:
        return
    odd = any(one.what in (What.NOT_FINITE, What.DTYPE, What.KIND) for one in first)
    yield Finding(
        id="overflow.diverges",
        level=Level.WARN if odd else Level.INFO,
        title=parts(compared),
        evidence=evidence,
    )


def _incomplete(chosen: Chosen, unread: Mapping[str, str], *, interrupted: bool) -> Iterator[Finding]:
    if unread:
        yield Finding(
            id="overflow.unread",
            level=Level.UNKNOWN,
            title=f"{words.count(len(unread), 'file')} could not be read: {next(iter(unread.values()))}",
            evidence=tuple(list(unread.values())[1:_SHOWN]),
        )
    for recording in chosen.recordings:
        if why := _lacks(recording):
            yield Finding(
                id="overflow.incomplete",
                # What is missing may be the detection: without one, nothing is shown as fine.
                level=Level.UNKNOWN if _may_lack_detection(recording) else Level.WARN,
                title=f"{recording.path}: {'; '.join(why)}",
                where=_where_of([recording]),
            )
    empty = [one for one in chosen.recordings if not (one.frames or one.passed or one.detections or one.truncated)]
    if empty and not interrupted:
        yield Finding(
            id="overflow.nothing",
            level=Level.UNKNOWN,
            title=f"{empty[0].path} has no frames" + (f", nor have {len(empty) - 1} more" if len(empty) > 1 else ""),
            detail="The detector writes the frames of batches in trace_batch_nums, and those before what it finds.",
            where=_where_of(empty),
        )


def _may_lack_detection(recording: Recording) -> bool:
    return not recording.detections and (recording.truncated or recording.torn > 0)


def _lacks(recording: Recording) -> list[str]:
    why = []
    if recording.truncated:
        why.append("it ends within a line: the job was killed, or writes still; what is before it was read")
    if recording.torn:
        why.append(
            f"{words.count(recording.torn, 'line')} cannot be read, the first is line {recording.first_torn}: do "
            'several ranks write this file? save="frames-{rank}.jsonl" gives each its own'
        )
    if recording.left_out:
        why.append(f"it is too large: its last {recording.left_out:,} frames are left out; --batch chooses others")
    return why


def _where(sides: Sequence[Side]) -> Where:
    return _where_of([side.recording for side in sides])


def _where_of(recordings: Sequence[Recording]) -> Where:
    hosts = dict.fromkeys(one.host for one in recordings if one.host)
    ranks = sorted({one.rank for one in recordings if one.rank is not None})
    return Where(hosts=tuple(hosts), ranks=tuple(ranks))


def _summary(chosen: Chosen, findings: Sequence[Finding]) -> str:
    for level in (Level.FAIL, Level.UNKNOWN):
        for one in findings:
            if one.level == level:
                return one.title
    near = next((one for one in findings if one.id in ("overflow.not-finite", "overflow.near-limit")), None)
    return near.title if near is not None else f"nothing was detected; {grew(chosen)}"
