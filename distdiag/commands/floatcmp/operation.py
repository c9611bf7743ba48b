"""`distdiag floatcmp --op NAME A B`: from the two sides that were typed to the report. torch has its own process."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from typing import TYPE_CHECKING

from distdiag.commands.floatcmp.compare_op import ANSWER, OpAnswer, OpRequest
from distdiag.errors import DistdiagError, UsageError
from distdiag.report import Finding, Fix, Level, Report
from distdiag.training.floatcmp.operation_result import (
    DTYPES,
    OPERATIONS,
    PRECISIONS,
    TF32_OPERATIONS,
    Kind,
    Measured,
    OpComparison,
    Side,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

COMMAND = "floatcmp"
_WORDS = "cpu, cuda, cuda:1, a dtype, threads=4, tf32, precision=medium, deterministic"
_EXPLAINED = {
    Kind.TF32: "as coarse as TF32",
    Kind.BFLOAT16: "as coarse as products of bfloat16",
    Kind.SHORT_SUM: "as coarse as a sum in 16 bits",
    Kind.BEYOND: "more than rounding explains",
}


def parse_side(text: str, operation: str) -> Side:
    """Parse "cuda,float32,tf32". Raises UsageError."""
    found: dict[str, str | int | bool] = {}
    for word in text.split(","):
        match = re.fullmatch(r"(threads)=(\d{1,4})|(precision)=(\w+)|(tf32|deterministic)", word)
        if re.fullmatch(r"cpu|cuda(:\d{1,3})?", word):
            found["device"] = word
        elif word in DTYPES:
            found["dtype"] = word
        elif match and match[1] and int(match[2]) > 0:
            found["threads"] = int(match[2])
        elif match and match[3] and match[4] in PRECISIONS:
            found["precision"] = match[4]
        elif match and match[5]:
            found[match[5]] = True
        else:
            raise UsageError(f"{text!r}: {word!r} is not a setting of --op", hint=f"separate by commas: {_WORDS}")
    side = Side(typed=text, **found)  # type: ignore[arg-type]
    if side.tf32 and (not side.device.startswith("cuda") or side.dtype != "float32"):
        raise UsageError(f"{text!r}: TF32 is float32 on a GPU", hint="write cuda,tf32")
    if side.tf32 and operation not in TF32_OPERATIONS:
        raise UsageError(f"--op {operation} never uses TF32", hint=f"--op {' or '.join(TF32_OPERATIONS)}")
    return side


def check_operation(
    operation: str, size: int, sides: tuple[str, str], timeout_s: float, program: str
) -> Report[OpComparison]:
    """Compute an operation in two ways and judge both. Raises UsageError, DistdiagError."""
    if operation not in OPERATIONS:
        raise UsageError(f"--op {operation}: no such operation", hint=f"one of: {', '.join(OPERATIONS)}")
    a, b = (parse_side(text, operation) for text in sides)
    request = OpRequest(program=program, operation=operation, size=size, sides=(a, b), timeout_s=timeout_s)
    answer = _ask(request)
    if answer.found is None:
        raise DistdiagError(answer.refused, hint=answer.hint)
    return diagnose_operation(answer.found)


def _ask(request: OpRequest) -> OpAnswer:
    import msgspec

    from distdiag.facts import programs
    from distdiag.facts.cuda.driver import how_it_died

    order = msgspec.json.encode(request).decode()
    with tempfile.TemporaryDirectory(prefix="distdiag-") as folder:
        argv = [sys.executable, "-P", "-m", "distdiag.commands.floatcmp.compare_op", order, folder]
        try:
            done = programs.run(argv, timeout_s=request.timeout_s)
        except programs.CannotRun as error:
            raise DistdiagError(str(error), hint="check that this Python still exists") from error
        except KeyboardInterrupt:
            programs.kill_all()
            raise
        try:
            with open(os.path.join(folder, ANSWER), "rb") as file:
                return msgspec.json.decode(file.read(), type=OpAnswer)
        except (OSError, msgspec.DecodeError) as error:
            if done.timed_out:
                raise DistdiagError(f"no result within {request.timeout_s:g} s", hint="increase --timeout") from error
            raise DistdiagError(
                f"the process with torch died: {how_it_died(done)}", hint="try a smaller --size"
            ) from error


def diagnose_operation(found: OpComparison) -> Report[OpComparison]:
    """Judge each side by what its dtype explains; pure."""
    findings = tuple(
        finding for each in zip(found.sides, found.measured, strict=True) for finding in _findings(found, *each)
    )
    worst = next((finding for finding in findings if finding.level in (Level.FAIL, Level.WARN)), None)
    return Report(command=COMMAND, data=found, findings=findings, summary=worst.title if worst else _summary(found))


def _summary(found: OpComparison) -> str:
    names = " and ".join(side.typed for side in found.sides)
    if found.identical:
        return f"{found.operation}: {names} give the same bits, as accurate as {found.sides[0].dtype} is"
    count = f"{found.differing:,} of {found.numbers:,} numbers, by up to {found.max_ulp:,} ulp of {found.unit}"
    return f"{found.operation}: {names} differ in {count}, and each is as accurate as its settings allow"


def _is_asked_for(side: Side, kind: Kind) -> bool:
    """Return whether the settings of a side explain its error."""
    if side.tf32 or side.precision in ("high", "medium"):
        return kind is Kind.TF32 or (kind is Kind.BFLOAT16 and side.precision == "medium")
    return kind is Kind.EXPECTED


def _findings(found: OpComparison, side: Side, measured: Measured) -> Iterator[Finding]:
    where = f"[{', '.join(map(str, measured.worst_index))}]"
    evidence = (
        f"worst at {where}: {measured.worst_value:.9g}, float64 {measured.worst_reference:.9g}, "
        f"{measured.of_limit:.3g} x what {side.dtype} explains ({_rule(found)})",
    )
    if measured.not_finite:
        yield Finding(
            id="floatcmp.op-not-finite",
            level=Level.FAIL,
            title=f"{side.typed}: {measured.not_finite:,} numbers of {found.operation} are inf or NaN",
            fix=Fix(text="use a dtype of more range, or smaller inputs"),
        )
    elif measured.kind is Kind.BEYOND:
        yield Finding(
            id="floatcmp.op-wrong",
            level=Level.FAIL,
            title=f"{side.typed}: the error of {found.operation} is {_EXPLAINED[Kind.BEYOND]} in {side.dtype}",
            evidence=evidence,
            fix=Fix(
                text="run it on another GPU or machine: a GPU that computes wrong needs replacing, "
                "a library that does needs another version",
                commands=("distdiag gpu-test",) if side.device.startswith("cuda") else (),
            ),
        )
    elif measured.kind is not Kind.EXPECTED and not _is_asked_for(side, measured.kind):
        yield Finding(
            id="floatcmp.op-coarse",
            level=Level.WARN,
            title=f"{side.typed}: {found.operation} is {_EXPLAINED[measured.kind]}, not as accurate as {side.dtype}",
            evidence=evidence,
            fix=Fix(text=_CAUSE[measured.kind]),
        )
    if not measured.reproducible:
        yield Finding(
            id="floatcmp.op-not-reproducible",
            level=Level.FAIL if side.deterministic else Level.INFO,
            title=f"{side.typed}: three runs of {found.operation} do not give the same bits",
            fix=Fix(text="compare with deterministic, which calls torch.use_deterministic_algorithms(True)")
            if not side.deterministic
            else Fix(text="report it to PyTorch: deterministic algorithms were asked for"),
        )


_CAUSE = {
    Kind.TF32: "something turned TF32 on: unset NVIDIA_TF32_OVERRIDE and TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    Kind.BFLOAT16: "something rounds float32 to bfloat16: unset ONEDNN_DEFAULT_FPMATH_MODE",
    Kind.SHORT_SUM: "keep sums in float32: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False "
    "(allow_fp16_...)",
}


def _rule(found: OpComparison) -> str:
    return f"a sum of {found.terms:,} terms" if found.terms > 1 else "one function"


def operation_view(report: Report[OpComparison]) -> Iterator[RenderableType]:
    """Render both sides beside each other."""
    from rich.table import Column

    from distdiag.output import plain_table

    found = report.data
    yield f"{found.operation}, {_rule(found)}, {found.numbers:,} numbers; the same inputs on both sides"
    table = plain_table(
        Column("side", overflow="fold"),
        Column("dtype"),
        Column("rounded right", justify="right", no_wrap=True),
        Column("worst ulp", justify="right", no_wrap=True),
        Column("of limit", justify="right", no_wrap=True),
        Column("error", overflow="fold"),
    )
    for side, measured in zip(found.sides, found.measured, strict=True):
        asked = measured.kind is not Kind.EXPECTED and _is_asked_for(side, measured.kind)
        error = "expected" if measured.kind is Kind.EXPECTED else _EXPLAINED[measured.kind]
        if side.dtype == "float64":
            error += ", but the reference is no better"
        share = f"{100 * measured.right:.1f} %"
        ratio = f"{measured.of_limit:.2g} x"
        table.add_row(
            side.typed, side.dtype, share, f"{measured.max_ulp:.3g}", ratio, f"{error}, as asked" if asked else error
        )
    yield table
