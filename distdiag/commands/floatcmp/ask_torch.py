"""A program of its own, `python -m`: loads two files with torch, compares them, and writes the answer to a file.

What it is at is told line by line as JSON, so that it is known where it was if it dies or does not end.
"""

from __future__ import annotations

import fnmatch
import json
import os
import resource
import sys
from typing import TYPE_CHECKING

from distdiag.commands.floatcmp.ask_checkpoints import read
from distdiag.commands.floatcmp.ask_files import Unreadable
from distdiag.commands.floatcmp.model import Request
from distdiag.commands.floatcmp.result import Answer, FloatCmp
from distdiag.node import run
from distdiag.training.floats import nested
from distdiag.training.floats.model import Likeness

if TYPE_CHECKING:
    from distdiag.training.floatcmp import Comparison

_NAMES = 8


def say(stage: str) -> None:
    """Tell what comes next, at once."""
    os.write(1, (json.dumps({"about": "stage", "stage": stage}) + "\n").encode())


def main(order: str, answer_file: str) -> None:
    """Do what the order, a Request in JSON, asks for."""
    import msgspec

    answer = _answer(msgspec.json.decode(order, type=Request))
    with open(answer_file, "wb") as file:
        file.write(msgspec.json.encode(answer))


def _answer(request: Request) -> Answer:
    say("importing torch")
    try:
        import torch  # noqa: F401 - before anything else: a broken torch is no broken file
    except Exception as error:  # noqa: BLE001 - whatever it raises
        return Answer(
            unreadable=f"torch cannot be imported: {type(error).__name__}: {error}"[:400],
            hint=f"see what is wrong with it: {request.program} cuda-env",
        )
    try:
        return _compared(request)
    except Unreadable as why:
        return Answer(unreadable=str(why), hint=why.hint)
    except ValueError as error:  # of nested.leaves
        return Answer(unreadable=str(error), hint="name a file of tensors")


def _compared(request: Request) -> Answer:
    from distdiag.training.floatcmp import compare_leaves

    loaded = []
    for path in (request.a, request.b, request.reference):
        say(f"reading {path}")
        loaded.append(nested.leaves(read(path)) if path else None)
    a, b, truth = loaded
    assert a is not None
    assert b is not None
    if request.key:
        names = [nested.name_of(path) for path in (*a, *b)]
        a, b = _chosen(a, request.key), _chosen(b, request.key)
        if not a and not b:
            return Answer(no_match=tuple(dict.fromkeys(names))[:_NAMES])
    say("comparing")
    found = compare_leaves(a, b, truth, names=(request.a, request.b), worst=request.worst)
    return Answer(found=_summed_up(request, found))


def _chosen(values: dict[tuple[object, ...], object], pattern: str) -> dict[tuple[object, ...], object]:
    return {path: one for path, one in values.items() if fnmatch.fnmatchcase(nested.name_of(path), pattern)}


def _summed_up(request: Request, found: Comparison) -> FloatCmp:
    return FloatCmp(
        a=request.a,
        b=request.b,
        reference=request.reference,
        tensors=len(found.pairs),
        identical=sum(pair.likeness == Likeness.IDENTICAL for pair in found.pairs),
        numbers=sum(pair.counts.size for pair in found.pairs),
        both_nan=tuple(pair.key for pair in found.pairs if pair.counts.both_nan),
        pairs=tuple(
            pair
            for pair in found.worst_first
            if pair.likeness != Likeness.IDENTICAL or pair.nearness or pair.notes or pair.counts.zero_signs
        ),
        only_a=found.only_a,
        only_b=found.only_b,
        values_differ=found.values_differ,
        not_compared=found.not_compared,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


if __name__ == "__main__":
    run.die_with_parent()
    main(sys.argv[1], sys.argv[2])
