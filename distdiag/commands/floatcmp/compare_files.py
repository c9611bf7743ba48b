"""A program of its own, `python -m`: loads two files with torch, compares them, and writes an Answer to a file.

The parent never imports torch. What this one is at stands in another file, so that it is known if it dies or hangs.
"""

from __future__ import annotations

import fnmatch
import os
import resource
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.facts import programs
from distdiag.training.floatcmp.result import Likeness, Pair

if TYPE_CHECKING:
    from distdiag.training.floatcmp.result import Comparison

COMMAND = "floatcmp"
ANSWER, STAGE = "answer", "stage"
"""Names of the two files, in the folder that the parent gives."""
_NAMES = 8


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was typed; `reference` and `key` are empty if there is none."""

    program: str = "distdiag"
    a: str
    b: str
    reference: str = ""
    key: str = ""
    worst: int = 5
    timeout_s: float = 600.0
    exact: bool = False
    """Whether rounding is a fault, too."""

    def again(self, *words: str) -> str:
        """Format the command on the same files with other options."""
        reference = ["--reference", self.reference] if self.reference else []
        exact = ["--exact"] if self.exact else []
        return f"{self.program} {COMMAND} {shlex.join([self.a, self.b, *reference, *exact, *words])}"


@dataclass(frozen=True, kw_only=True)
class FloatCmp:
    """Two files, and how their tensors compare."""

    a: str
    b: str
    reference: str
    """Empty if there is none."""
    tensors: int
    """How many both have."""
    identical: int
    numbers: int
    both_nan: tuple[str, ...]
    """Names of tensors with nan at the same places on both sides."""
    pairs: tuple[Pair, ...]
    """Those that are not identical, or that a reference was used for, the worst first."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    values_differ: tuple[str, ...]
    not_compared: tuple[str, ...]
    """Each with the reason."""
    peak_bytes: int
    """The most memory that the comparison had at once, torch and mapped files included."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the process that has torch writes: one of them is set."""

    found: FloatCmp | None = None
    unreadable: str = ""
    hint: str = ""
    no_match: tuple[str, ...] = ()
    """Some of the names there are, where the pattern fits none."""


def main(order: str, folder: str) -> None:
    """Do what the order, a Request in JSON, asks for."""
    import msgspec

    answer = _answer(msgspec.json.decode(order, type=Request), folder)
    with open(os.path.join(folder, ANSWER), "wb") as file:
        file.write(msgspec.json.encode(answer))


def _note_stage(folder: str, stage: str) -> None:
    with open(os.path.join(folder, STAGE), "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(stage)


def _answer(request: Request, folder: str) -> Answer:
    _note_stage(folder, "importing torch")
    try:
        import torch  # noqa: F401 - before anything else: a broken torch is no broken file
    except Exception as error:  # noqa: BLE001 - whatever it raises
        return Answer(
            unreadable=f"torch cannot be imported: {type(error).__name__}: {error}"[:400],
            hint=f"find out why: {request.program} cuda-env",
        )
    from distdiag.commands.floatcmp.tensor_files import Unreadable

    try:
        return _compare(request, folder)
    except Unreadable as why:
        return Answer(unreadable=str(why), hint=why.hint)
    except ValueError as error:  # of leaves
        return Answer(unreadable=str(error), hint="give a file of tensors")


def _compare(request: Request, folder: str) -> Answer:
    from distdiag.commands.floatcmp import tensor_files
    from distdiag.training.floatcmp.compare import compare_leaves, leaves, path_name

    def read(path: str) -> dict[tuple[object, ...], object]:
        _note_stage(folder, f"reading {path}")
        return leaves(tensor_files.read(path))

    a, b = read(request.a), read(request.b)
    truths = read(request.reference) if request.reference else None
    if request.key:
        names = {path: path_name(path) for path in (*a, *b)}
        a, b = (
            {path: value for path, value in side.items() if fnmatch.fnmatchcase(names[path], request.key)}
            for side in (a, b)
        )
        if not a and not b:
            return Answer(no_match=tuple(dict.fromkeys(names.values()))[:_NAMES])
    _note_stage(folder, "comparing")
    found = compare_leaves(a, b, truths, names=(request.a, request.b), worst=request.worst)
    return Answer(found=_summarize(request, found))


def _summarize(request: Request, found: Comparison) -> FloatCmp:
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
    programs.die_with_parent()
    main(sys.argv[1], sys.argv[2])
