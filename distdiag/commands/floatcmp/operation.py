"""`distdiag floatcmp --op NAME A B`: parse settings, judge the measurements of compute.py. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from distdiag.diagnosis.verdicts import finding
from distdiag.errors import UsageError
from distdiag.output import Wrapped
from distdiag.record import record
from distdiag.report import Level, Report
from distdiag.training.floatcmp.result import Pair, share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from distdiag.report import Finding

SUMS = ("matmul", "conv2d", "sum", "cumsum", "index_add")
OPERATIONS = (*SUMS, "exp", "log", "sin", "tanh", "pow", "rsqrt", "sigmoid")
_SETTING = re.compile(
    r"(?P<device>cpu|cuda(?::\d{1,3})?)|(?P<dtype>float64|float32|float16|bfloat16)|threads=(?P<threads>[1-9]\d{0,3})"
    r"|(?P<tf32>tf32)|(?P<deterministic>deterministic)"
)
EXPECTED, TF32, BFLOAT16, SHORT_SUM, BEYOND = "expected", "tf32", "bfloat16", "short-sum", "beyond-rounding"
"""The first of these error bounds that a result keeps: its dtype's, inputs of 11 bits, of 8 bits, a sum in 16 bits."""


@record(kw_only=True)
class Side:
    """One way to compute it, as typed and parsed. `threads` 0: torch's default."""

    typed: str
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0
    tf32: bool = False
    deterministic: bool = False


@record(kw_only=True)
class Measured:
    """The error of one side's result against float64. `reproducible`: three runs gave the same bits.

    `of_limit`: the largest error over the dtype's bound, at `worst_index`. `right`: number of correctly rounded values.
    """

    side: Side
    kind: str
    of_limit: float
    worst_index: tuple[int, ...]
    right: int
    not_finite: int
    reproducible: bool

    @property
    def is_as_asked(self) -> bool:
        """Whether the settings explain the error."""
        return self.kind == EXPECTED or (self.kind == TF32 and self.side.tf32)


@record(kw_only=True)
class OpComparison:
    """One operation, computed in two ways. `rule`: the reason for the bound."""

    operation: str
    rule: str
    measured: tuple[Measured, Measured]
    pair: Pair


def parse_side(text: str, operation: str) -> Side:
    """Parse "cuda,float32,tf32". Raises UsageError."""
    found: dict[str, str] = {}
    for word in text.split(","):
        match = _SETTING.fullmatch(word)
        if not match:
            hint = "separate by commas: cpu, cuda, cuda:1, a dtype, threads=4, tf32, deterministic"
            raise UsageError(f"{text!r}: {word!r} is not a setting of --op", hint=hint)
        found |= {name: value for name, value in match.groupdict().items() if value}
    tf32, deterministic = bool(found.pop("tf32", "")), bool(found.pop("deterministic", ""))
    threads = int(found.pop("threads", 0))
    side = Side(typed=text, threads=threads, tf32=tf32, deterministic=deterministic, **found)
    if tf32 and (side.device == "cpu" or side.dtype != "float32" or operation not in ("matmul", "conv2d")):
        raise UsageError(f"{text!r}: TF32 is float32 in matmul and conv2d on a GPU", hint="leave out tf32")
    return side


def diagnose_operation(found: OpComparison, program: str) -> Report[OpComparison]:
    """Judge each side by the error that its dtype explains; pure."""
    findings = tuple(one for side in found.measured for one in _findings(found.operation, side, program))
    worst = next((one for one in findings if one.level in (Level.FAIL, Level.WARN)), None)
    return Report(command="floatcmp", data=found, findings=findings, summary=worst.title if worst else _summary(found))


def _summary(found: OpComparison) -> str:
    names, counts = " and ".join(each.side.typed for each in found.measured), found.pair.counts
    if found.pair.likeness == "identical" and not counts.zero_signs:
        return f"{found.operation}: {names} give the same bits, as accurate as {found.measured[0].side.dtype} is"
    count = f"{counts.differing:,} of {counts.size:,} numbers, by up to {counts.max_ulp:,} ulp of {found.pair.unit}"
    return f"{found.operation}: {names} differ in {count}, and each is as accurate as its settings allow"


def _findings(operation: str, found: Measured, program: str) -> Iterator[Finding]:
    side, where = found.side, ", ".join(map(str, found.worst_index))
    words = {"side": side.typed, "operation": operation, "dtype": side.dtype, "program": program}
    if found.not_finite:
        yield finding("floatcmp.op-not-finite", words, count=f"{found.not_finite:,}")
    elif not found.is_as_asked:
        evidence = f"worst at [{where}]: {found.of_limit:.3g} x what {side.dtype} explains"
        yield finding(found.kind, words, evidence=(evidence,))
    if not found.reproducible:
        yield finding("not-deterministic" if side.deterministic else "floatcmp.op-not-reproducible", words)


def operation_view(report: Report[OpComparison]) -> Iterator[RenderableType]:
    """Format the accuracy of each side."""
    found, count = report.data, report.data.pair.counts.size
    yield f"{found.operation}, {found.rule}, {count:,} numbers; the same inputs on both sides"
    for each in found.measured:
        asked = ", as asked" if each.is_as_asked and each.kind != EXPECTED else ""
        right = f"{share(each.right, count)} correctly rounded; worst {each.of_limit:.2g} x the limit"
        text = f"{each.side.typed} ({each.side.dtype}): error {each.kind}{asked}; {right}"
        yield Wrapped(text, margin=2, hang=4)
