"""The process that imports torch, `python -m`: it reads or computes both sides, and writes an Answer to a file.

A second file names the stage it is in, for the report if it dies or hangs.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
import sys
from dataclasses import dataclass, replace

from distdiag.commands.floatcmp.operation import OpComparison  # noqa: TC001 - msgspec reads the annotations
from distdiag.facts import programs
from distdiag.training.floatcmp.result import Comparison  # noqa: TC001 - msgspec reads the annotations

COMMAND = "floatcmp"
ANSWER, STAGE = "answer", "stage"
_NAMES = 8


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options. `a` and `b` are files, or with `op` settings."""

    program: str = "distdiag"
    a: str
    b: str
    reference: str = ""
    key: str = ""
    worst: int = 5
    timeout_s: float = 600.0
    exact: bool = False
    op: str = ""
    size: int = 1024

    def again(self, *words: str) -> str:
        """Format the command on the same files with other options."""
        operation = ["--op", self.op, "--size", str(self.size)] if self.op else []
        reference = ["--reference", self.reference] if self.reference else []
        exact = ["--exact"] if self.exact else []
        return f"{self.program} {COMMAND} {shlex.join([*operation, self.a, self.b, *reference, *exact, *words])}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result, one of `files`, `operation`, `failed` and `no_match`: some of the names if --key fits none."""

    files: Comparison | None = None
    operation: OpComparison | None = None
    failed: str = ""
    hint: str = ""
    no_match: tuple[str, ...] = ()


def main(order: str, folder: str) -> None:
    """Carry out the order, a Request in JSON."""
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
        import torch  # before anything else, to tell a broken torch from a broken file
    except Exception as error:  # noqa: BLE001 - a broken torch may raise anything
        failed = f"torch cannot be imported: {type(error).__name__}: {error}"[:400]
        return Answer(failed=failed, hint=f"find out why: {request.program} cuda-env")
    if request.op:
        return _compute(request, folder, has_gpu=torch.cuda.is_available())
    from distdiag.commands.floatcmp.tensor_files import Unreadable

    try:
        return _compare(request, folder)
    except Unreadable as why:
        return Answer(failed=str(why), hint=why.hint)


def _compute(request: Request, folder: str, *, has_gpu: bool) -> Answer:
    from distdiag.commands.floatcmp.compute import compare_operation
    from distdiag.commands.floatcmp.operation import parse_side

    _note_stage(folder, f"computing {request.op}")
    sides = parse_side(request.a, request.op), parse_side(request.b, request.op)
    if not has_gpu and any(side.device != "cpu" for side in sides):
        hint = f"run it on a machine with a GPU; or find out why: {request.program} cuda-env"
        return Answer(failed="this machine has no GPU that torch can use", hint=hint)
    try:
        return Answer(operation=compare_operation(request.op, request.size, sides))
    except RuntimeError as error:  # no such device, out of memory, not implemented for the dtype, not deterministic
        text = (str(error).strip() or type(error).__name__).splitlines()[0][:400]
        return Answer(failed=f"torch cannot compute {request.op}: {text}", hint="choose another setting")


def _compare(request: Request, folder: str) -> Answer:
    from distdiag.commands.floatcmp import tensor_files
    from distdiag.training.floatcmp.compare import compare_leaves

    def read(path: str) -> dict[str, object]:
        _note_stage(folder, f"reading {path}")
        return tensor_files.read(path)

    a, b = read(request.a), read(request.b)
    truths = read(request.reference) if request.reference else None
    if request.key:
        names = (*a, *b)
        a, b = (
            {name: value for name, value in side.items() if fnmatch.fnmatchcase(name, request.key)} for side in (a, b)
        )
        if not a and not b:
            return Answer(no_match=tuple(dict.fromkeys(names))[:_NAMES])
    _note_stage(folder, "comparing")
    found = compare_leaves(a, b, truths, names=(request.a, request.b), worst=request.worst)
    unlike = tuple(pair for pair in found.worst_first if found.tensors == 1 or not pair.is_plainly_identical)
    return Answer(files=replace(found, reference=request.reference, pairs=unlike))


if __name__ == "__main__":
    programs.die_with_parent()
    main(sys.argv[1], sys.argv[2])
