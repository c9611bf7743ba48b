"""`distdiag floatcmp --op NAME A B`: settings from text, and the judgement on what compute.py measured. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.errors import UsageError
from distdiag.output import Wrapped
from distdiag.report import Finding, Fix, Level, Report
from distdiag.training.floatcmp.result import Pair, share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

OPERATIONS = (
    *("matmul", "conv2d", "sum", "cumsum", "index_add"),
    *("exp", "log", "sin", "tanh", "pow", "rsqrt", "sigmoid", "gelu", "softmax", "layer_norm"),
)
_SETTING = re.compile(
    r"(?P<device>cpu|cuda(?::\d{1,3})?)|(?P<dtype>float64|float32|float16|bfloat16)|threads=(?P<threads>[1-9]\d{0,3})"
    r"|precision=(?P<precision>high|medium)|(?P<tf32>tf32)|(?P<deterministic>deterministic)"
)
_WORDS = "cpu, cuda, cuda:1, a dtype, threads=4, tf32, precision=medium, deterministic"
EXPECTED, TF32, BFLOAT16, SHORT_SUM, BEYOND = "expected", "tf32", "bfloat16", "short-sum", "beyond"
"""The first of these error bounds that a result keeps: its dtype's, inputs of 11 bits, of 8 bits, a sum in 16 bits."""
_MEANING = {
    EXPECTED: ("expected", ""),
    TF32: (
        "as coarse as TF32",
        "something turned TF32 on: unset NVIDIA_TF32_OVERRIDE and TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    ),
    BFLOAT16: (
        "as coarse as products of bfloat16",
        "something rounds float32 to bfloat16: unset ONEDNN_DEFAULT_FPMATH_MODE",
    ),
    SHORT_SUM: (
        "as coarse as a sum in 16 bits",
        "keep sums in float32: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False "
        "(allow_fp16_...)",
    ),
    BEYOND: (
        "more than rounding explains",
        "run it on another GPU or machine: a GPU that computes wrong needs replacing, "
        "a library that does needs another version",
    ),
}
"""Each in words, and the fix."""
_ALLOWED = {"": (EXPECTED,), "high": (EXPECTED, TF32), "medium": (EXPECTED, TF32, BFLOAT16)}
"""By precision."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to compute it, as typed and parsed. `threads` 0: torch's default; `precision` "high": TF32 is allowed."""

    typed: str
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0
    precision: str = ""
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The error of one result against float64. `reproducible`: three runs gave the same bits.

    `of_limit`: the largest error over the dtype's bound, at `worst_index`. `right`: numbers that are correctly rounded.
    """

    kind: str
    of_limit: float
    worst_index: tuple[int, ...]
    right: int
    not_finite: int
    reproducible: bool


@dataclass(frozen=True, kw_only=True)
class OpComparison:
    """One operation, computed in two ways. `rule`: the reason for the bound."""

    operation: str
    rule: str
    sides: tuple[Side, Side]
    measured: tuple[Measured, Measured]
    pair: Pair


def parse_side(text: str, operation: str) -> Side:
    """Parse "cuda,float32,tf32". Raises UsageError."""
    found: dict[str, str] = {}
    for word in text.split(","):
        match = _SETTING.fullmatch(word)
        if not match:
            raise UsageError(f"{text!r}: {word!r} is not a setting of --op", hint=f"separate by commas: {_WORDS}")
        found |= {name: value for name, value in match.groupdict().items() if value}
    threads, deterministic = int(found.pop("threads", 0)), bool(found.pop("deterministic", ""))
    if tf32 := found.pop("tf32", ""):
        found.setdefault("precision", "high")
    side = Side(typed=text, threads=threads, deterministic=deterministic, **found)
    if tf32 and (side.device == "cpu" or side.dtype != "float32"):
        raise UsageError(f"{text!r}: TF32 is float32 on a GPU", hint="write cuda,tf32")
    if tf32 and operation not in ("matmul", "conv2d"):
        raise UsageError(f"--op {operation} never uses TF32", hint="--op matmul or conv2d")
    return side


def diagnose_operation(found: OpComparison, program: str) -> Report[OpComparison]:
    """Judge each side by the error that its dtype explains; pure."""
    sides = zip(found.sides, found.measured, strict=True)
    findings = tuple(finding for side, measured in sides for finding in _findings(found, side, measured, program))
    worst = next((finding for finding in findings if finding.level in (Level.FAIL, Level.WARN)), None)
    return Report(command="floatcmp", data=found, findings=findings, summary=worst.title if worst else _summary(found))


def _summary(found: OpComparison) -> str:
    names, pair, counts = " and ".join(side.typed for side in found.sides), found.pair, found.pair.counts
    if pair.likeness == "identical" and not counts.zero_signs:
        return f"{found.operation}: {names} give the same bits, as accurate as {found.sides[0].dtype} is"
    count = f"{counts.differing:,} of {counts.size:,} numbers, by up to {counts.max_ulp:,} ulp of {pair.unit}"
    return f"{found.operation}: {names} differ in {count}, and each is as accurate as its settings allow"


def _findings(found: OpComparison, side: Side, measured: Measured, program: str) -> Iterator[Finding]:
    of_what = f"{found.operation} in {side.dtype}"
    if measured.not_finite:
        fix = Fix(text="use a dtype of more range, or smaller inputs")
        title = f"{side.typed}: {measured.not_finite:,} numbers of {found.operation} are inf or NaN"
        yield Finding(id="floatcmp.op-not-finite", level=Level.FAIL, title=title, fix=fix)
    elif measured.kind == BEYOND:
        yield _inaccurate("op-wrong", Level.FAIL, found, side, measured, f"{program} gpu-test")
    elif measured.kind not in _ALLOWED[side.precision]:
        yield _inaccurate("op-coarse", Level.WARN, found, side, measured, "")
    if not measured.reproducible:
        again = "compare with deterministic, which calls torch.use_deterministic_algorithms(True)"
        fault = "report it to PyTorch: deterministic algorithms were asked for"
        yield Finding(
            id="floatcmp.op-not-reproducible",
            level=Level.FAIL if side.deterministic else Level.INFO,
            title=f"{side.typed}: three runs of {of_what} do not give the same bits",
            fix=Fix(text=fault if side.deterministic else again),
        )


def _inaccurate(name: str, level: Level, found: OpComparison, side: Side, measured: Measured, of_gpu: str) -> Finding:
    meaning, text = _MEANING[measured.kind]
    where = ", ".join(map(str, measured.worst_index))
    return Finding(
        id=f"floatcmp.{name}",
        level=level,
        title=f"{side.typed}: {found.operation} in {side.dtype}: error {meaning}",
        evidence=(f"worst at [{where}]: {measured.of_limit:.3g} x what {side.dtype} explains ({found.rule})",),
        fix=Fix(text=text, commands=(of_gpu,) if of_gpu and side.device != "cpu" else ()),
    )


def operation_view(report: Report[OpComparison]) -> Iterator[RenderableType]:
    """Format the accuracy of each side."""
    found, count = report.data, report.data.pair.counts.size
    yield f"{found.operation}, {found.rule}, {count:,} numbers; the same inputs on both sides"
    for side, measured in zip(found.sides, found.measured, strict=True):
        asked = measured.kind != EXPECTED and measured.kind in _ALLOWED[side.precision]
        error = f"error {_MEANING[measured.kind][0]}{', as asked' if asked else ''}"
        right = f"{share(measured.right, count)} correctly rounded; worst {measured.of_limit:.2g} x the limit"
        yield Wrapped(f"{side.typed} ({side.dtype}): {error}; {right}", margin=2, hang=4)
