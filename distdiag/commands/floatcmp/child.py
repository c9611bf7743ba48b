"""The process that imports torch, `python -u -m`: it reads or computes both sides, and writes an Answer to a file.

Each line of its stdout names the stage that begins, for the report if it dies or hangs.
"""

from __future__ import annotations

import fnmatch
import gc
import shlex
import sys
from dataclasses import replace

from distdiag.commands.floatcmp.operation import OpComparison  # noqa: TC001 - msgspec reads the annotations
from distdiag.facts import programs
from distdiag.record import record
from distdiag.training.floatcmp.result import Comparison  # noqa: TC001 - msgspec reads the annotations

COMMAND = "floatcmp"


@record(kw_only=True)
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


@record(kw_only=True)
class Answer:
    """The result, one of `files`, `operation` and `failed`; `is_usage`: the options are at fault."""

    files: Comparison | None = None
    operation: OpComparison | None = None
    failed: str = ""
    hint: str = ""
    is_usage: bool = False


def main(order: str, path: str) -> None:
    """Carry out the order, a Request in JSON."""
    import msgspec

    answer = _answer(msgspec.json.decode(order, type=Request))
    with open(path, "wb") as file:
        file.write(msgspec.json.encode(answer))


def _answer(request: Request) -> Answer:
    sys.stdout.write("importing torch\n")
    gc.disable()  # an import makes no garbage
    try:
        import torch  # first, to distinguish a broken torch from a broken file
    except Exception as error:  # noqa: BLE001 - a broken torch may raise anything
        failed = f"torch cannot be imported: {type(error).__name__}: {error}"[:400]
        return Answer(failed=failed, hint=f"find out why: {request.program} cuda-env")
    gc.enable()
    if request.op:
        return _compute(request, has_gpu=torch.cuda.is_available())
    from distdiag.commands.floatcmp.tensor_files import Unreadable

    try:
        return _compare(request)
    except Unreadable as why:
        return Answer(failed=str(why), hint=why.hint)


def _compute(request: Request, *, has_gpu: bool) -> Answer:
    from distdiag.commands.floatcmp.compute import compare_operation
    from distdiag.commands.floatcmp.operation import parse_side

    sys.stdout.write(f"computing {request.op}\n")
    sides = parse_side(request.a, request.op), parse_side(request.b, request.op)
    if not has_gpu and any(side.device != "cpu" for side in sides):
        hint = f"run it on a machine with a GPU; or find out why: {request.program} cuda-env"
        return Answer(failed="this machine has no GPU that torch can use", hint=hint)
    try:
        return Answer(operation=compare_operation(request.op, request.size, sides))
    except RuntimeError as error:  # no such device, out of memory, not implemented for the dtype, not deterministic
        text = (str(error).strip() or type(error).__name__).splitlines()[0][:400]
        return Answer(failed=f"torch cannot compute {request.op}: {text}", hint="choose another setting")


def _compare(request: Request) -> Answer:
    from distdiag.commands.floatcmp import tensor_files
    from distdiag.training.floatcmp.compare import compare_leaves
    from distdiag.training.floatcmp.result import shorten

    sides: list[dict[str, object]] = []
    for path in filter(None, (request.a, request.b, request.reference)):
        sys.stdout.write(f"reading {path}\n")
        sides.append(tensor_files.read(path))
    a, b, *truths = sides
    names = list(dict.fromkeys((*a, *b)))
    if request.key:
        a, b = ({name: side[name] for name in fnmatch.filter(side, request.key)} for side in (a, b))
    if request.key and not (a or b):
        hint = f"available: {shorten(names) or 'none'}"
        return Answer(failed=f"no tensor matches --key {request.key}", hint=hint, is_usage=True)
    sys.stdout.write("comparing\n")
    found = compare_leaves(a, b, *truths, names=(request.a, request.b), worst=request.worst)
    unlike = tuple(pair for pair in found.worst_first if found.tensors == 1 or not pair.is_plainly_identical)
    return Answer(files=replace(found, reference=request.reference, pairs=unlike))


if __name__ == "__main__":
    programs.die_with_parent()
    main(sys.argv[1], sys.argv[2])
    gc.freeze()  # spares the collection at exit
