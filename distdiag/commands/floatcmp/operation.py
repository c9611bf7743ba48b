"""`distdiag floatcmp --op NAME A B`: settings from text, and the judgement on what compute.py measured. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.errors import UsageError
from distdiag.report import Finding, Fix, Level, Report
from distdiag.training.floatcmp.result import Pair, share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

OPERATIONS = (
    *("matmul", "conv2d", "sum", "cumsum", "index_add"),
    *("exp", "log", "sin", "tanh", "pow", "rsqrt", "sigmoid", "gelu", "softmax", "layer_norm"),
)
_TF32_OPERATIONS = ("matmul", "conv2d")
_SETTING = re.compile(
    r"(?P<device>cpu|cuda(?::\d{1,3})?)|(?P<dtype>float64|float32|float16|bfloat16)|threads=(?P<threads>[1-9]\d{0,3})"
    r"|precision=(?P<precision>highest|high|medium)|(?P<tf32>tf32)|(?P<deterministic>deterministic)"
)
_WORDS = "cpu, cuda, cuda:1, a dtype, threads=4, tf32, precision=medium, deterministic"


class Kind(StrEnum):
    """The cause that explains the error of a result, the best first."""

    EXPECTED = "expected"
    """The rounding of its dtype."""
    TF32 = "tf32"
    """Inputs rounded to 11 bits, as TF32 does."""
    BFLOAT16 = "bfloat16"
    """Inputs rounded to 8 bits, as set_float32_matmul_precision("medium") does."""
    SHORT_SUM = "short-sum"
    """A sum kept in the 16 bits of the dtype."""
    BEYOND = "beyond"
    """None of these."""


_MEANING = {
    Kind.EXPECTED: "expected",
    Kind.TF32: "as coarse as TF32",
    Kind.BFLOAT16: "as coarse as products of bfloat16",
    Kind.SHORT_SUM: "as coarse as a sum in 16 bits",
    Kind.BEYOND: "more than rounding explains",
}
_CAUSE = {
    Kind.TF32: "something turned TF32 on: unset NVIDIA_TF32_OVERRIDE and TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    Kind.BFLOAT16: "something rounds float32 to bfloat16: unset ONEDNN_DEFAULT_FPMATH_MODE",
    Kind.SHORT_SUM: "keep sums in float32: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False "
    "(allow_fp16_...)",
}


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to compute it, as typed and parsed. `threads` 0: torch's default."""

    typed: str
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0
    tf32: bool = False
    precision: str = ""
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The error of one result against float64, computed from the same inputs.

    `of_limit`: the largest error over what the dtype's rounding explains there. `max_ulp`: the largest error in ulp of
    the dtype, at the size of the terms where they cancel. `right`: numbers that are correctly rounded.
    """

    kind: Kind
    of_limit: float
    max_ulp: float
    right: int
    not_finite: int
    reproducible: bool
    """Whether three runs gave the same bits."""
    worst_index: tuple[int, ...]
    worst_value: float
    worst_reference: float


@dataclass(frozen=True, kw_only=True)
class OpComparison:
    """Two ways to compute one operation. `terms`: products or numbers in each sum, 1 for a function."""

    operation: str
    terms: int
    sides: tuple[Side, Side]
    measured: tuple[Measured, Measured]
    pair: Pair
    """How the two results compare."""


def parse_side(text: str, operation: str) -> Side:
    """Parse "cuda,float32,tf32". Raises UsageError."""
    found: dict[str, str] = {}
    for word in text.split(","):
        match = _SETTING.fullmatch(word)
        if not match:
            raise UsageError(f"{text!r}: {word!r} is not a setting of --op", hint=f"separate by commas: {_WORDS}")
        found |= {name: value for name, value in match.groupdict().items() if value}
    side = Side(
        typed=text,
        device=found.get("device", "cpu"),
        dtype=found.get("dtype", "float32"),
        threads=int(found.get("threads", 0)),
        tf32="tf32" in found,
        precision=found.get("precision", ""),
        deterministic="deterministic" in found,
    )
    if side.tf32 and (side.device == "cpu" or side.dtype != "float32"):
        raise UsageError(f"{text!r}: TF32 is float32 on a GPU", hint="write cuda,tf32")
    if side.tf32 and operation not in _TF32_OPERATIONS:
        raise UsageError(f"--op {operation} never uses TF32", hint=f"--op {' or '.join(_TF32_OPERATIONS)}")
    return side


def diagnose_operation(found: OpComparison, program: str) -> Report[OpComparison]:
    """Judge each side by what its dtype explains; pure."""
    sides = zip(found.sides, found.measured, strict=True)
    findings = tuple(finding for side, measured in sides for finding in _findings(found, side, measured, program))
    worst = next((finding for finding in findings if finding.level in (Level.FAIL, Level.WARN)), None)
    return Report(command="floatcmp", data=found, findings=findings, summary=worst.title if worst else _summary(found))


def _summary(found: OpComparison) -> str:
    names, pair = " and ".join(side.typed for side in found.sides), found.pair
    if pair.likeness == "identical" and not pair.counts.zero_signs:
        return f"{found.operation}: {names} give the same bits, as accurate as {found.sides[0].dtype} is"
    counts = pair.counts
    count = f"{counts.differing:,} of {counts.size:,} numbers, by up to {counts.max_ulp:,} ulp of {pair.unit}"
    return f"{found.operation}: {names} differ in {count}, and each is as accurate as its settings allow"


def _is_asked_for(side: Side, kind: Kind) -> bool:
    """Return whether the settings of a side explain its error."""
    allowed = {Kind.EXPECTED}
    if side.tf32 or side.precision in ("high", "medium"):
        allowed.add(Kind.TF32)
    return kind in allowed or (kind is Kind.BFLOAT16 and side.precision == "medium")


def _findings(found: OpComparison, side: Side, measured: Measured, program: str) -> Iterator[Finding]:
    where = f"[{', '.join(map(str, measured.worst_index))}]"
    values = f"{measured.worst_value:.9g}, float64 {measured.worst_reference:.9g}"
    evidence = f"worst at {where}: {values}, {measured.of_limit:.3g} x what {side.dtype} explains ({_rule(found)})"
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
            title=f"{side.typed}: the error of {found.operation} is {_MEANING[Kind.BEYOND]} in {side.dtype}",
            evidence=(evidence,),
            fix=Fix(
                text="run it on another GPU or machine: a GPU that computes wrong needs replacing, "
                "a library that does needs another version",
                commands=(f"{program} gpu-test",) if side.device != "cpu" else (),
            ),
        )
    elif not _is_asked_for(side, measured.kind):
        yield Finding(
            id="floatcmp.op-coarse",
            level=Level.WARN,
            title=f"{side.typed}: {found.operation} is {_MEANING[measured.kind]}, not as accurate as {side.dtype}",
            evidence=(evidence,),
            fix=Fix(text=_CAUSE[measured.kind]),
        )
    if not measured.reproducible:
        yield Finding(
            id="floatcmp.op-not-reproducible",
            level=Level.FAIL if side.deterministic else Level.INFO,
            title=f"{side.typed}: three runs of {found.operation} do not give the same bits",
            fix=Fix(
                text="report it to PyTorch: deterministic algorithms were asked for"
                if side.deterministic
                else "compare with deterministic, which calls torch.use_deterministic_algorithms(True)"
            ),
        )


def _rule(found: OpComparison) -> str:
    return f"a sum of {found.terms:,} terms" if found.terms > 1 else "one function"


def operation_view(report: Report[OpComparison]) -> Iterator[RenderableType]:
    """List how accurate each side is."""
    from distdiag.output import Wrapped

    found = report.data
    yield f"{found.operation}, {_rule(found)}, {found.pair.counts.size:,} numbers; the same inputs on both sides"
    for side, measured in zip(found.sides, found.measured, strict=True):
        asked = measured.kind is not Kind.EXPECTED and _is_asked_for(side, measured.kind)
        error = f"error {_MEANING[measured.kind]}{', as asked' if asked else ''}"
        right = f"{share(measured.right, found.pair.counts.size)} correctly rounded"
        worst = f"worst {measured.max_ulp:.3g} ulp, {measured.of_limit:.2g} x the limit"
        yield Wrapped(f"{side.typed} ({side.dtype}): {error}; {right}; {worst}", margin=2, hang=4)
