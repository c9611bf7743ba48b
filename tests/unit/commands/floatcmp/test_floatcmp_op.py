"""floatcmp --op: the error of an operation is attributed to its dtype, or to a coarser setting."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from loops import each
from support_warm import distdiag

from distdiag.commands.floatcmp import child
from distdiag.commands.floatcmp.compute import compare_operation, make, measure
from distdiag.commands.floatcmp.operation import (
    BEYOND,
    BFLOAT16,
    EXPECTED,
    OPERATIONS,
    SHORT_SUM,
    TF32,
    Side,
    diagnose_operation,
    parse_side,
)
from distdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from distdiag.commands.floatcmp.operation import Measured, OpComparison
    from distdiag.report import Report

TERMS = 512

pytestmark = pytest.mark.usefixtures("one_thread_of_torch")


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to the 11 bits of TF32, as cuBLAS does with inputs."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def by_tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return tf32(a) @ tf32(b)


def by_bfloat16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.bfloat16().float() @ b.bfloat16().float()


def with_a_wrong_bit(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a @ b
    out.view(torch.int32)[3, 5] ^= 1 << 18
    return out


def with_a_lost_term(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a[:, 1:] @ b[1:]


def in_16_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for at in range(a.shape[1]):
        out += a[:, at : at + 1] * b[at : at + 1]
    return out


def with_nan(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a @ b
    out[0, 0] = float("nan")
    return out


def measured(run: Callable[..., torch.Tensor], dtype: torch.dtype) -> Measured:
    inputs = [value.to(dtype).double() for value in make("matmul", TERMS, random_numbers())]
    return measure("matmul", Side(typed="cpu"), TERMS, inputs, [run(*(value.to(dtype) for value in inputs))])


def random_numbers() -> Callable[..., torch.Tensor]:
    return partial(torch.randn, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@each(
    "run, dtype, kind",
    [
        (torch.matmul, torch.float32, EXPECTED),
        (torch.matmul, torch.bfloat16, EXPECTED),
        (by_tf32, torch.float32, TF32),
        (by_bfloat16, torch.float32, BFLOAT16),
        (in_16_bits, torch.float32, EXPECTED),
        (in_16_bits, torch.bfloat16, SHORT_SUM),
        (in_16_bits, torch.float16, SHORT_SUM),
        (with_a_lost_term, torch.float32, BEYOND),
        (with_nan, torch.float32, BEYOND),
    ],
)
def test_the_error_is_put_down_to_its_cause(run: Callable[..., torch.Tensor], dtype: torch.dtype, kind: str) -> None:
    assert measured(run, dtype).kind == kind


def test_one_wrong_bit_is_found_at_its_place() -> None:
    found = measured(with_a_wrong_bit, torch.float32)
    assert found.kind != EXPECTED
    assert found.worst_index == (3, 5)


@each("name", OPERATIONS)
def test_what_torch_computes_is_as_good_as_its_dtype(name: str) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        found = compare_operation(name, 300, (Side(typed="a", dtype=dtype), Side(typed="b", threads=2)))
        assert [each.kind for each in found.measured] == [EXPECTED] * 2, (dtype, found.measured)
        assert not diagnose_operation(found, "distdiag").findings


def test_what_was_asked_for_is_no_finding_and_the_same_unasked_is() -> None:
    found = compare_operation("matmul", 64, (Side(typed="cpu"), Side(typed="cpu")))
    fine = found.measured[1]

    def judged(side: Side, **measured: object) -> Report[OpComparison]:
        worse = replace(fine, side=side, **measured)  # type: ignore[arg-type] # fields of it
        return diagnose_operation(replace(found, measured=(worse, fine)), "distdiag")

    cuda = Side(typed="cuda", device="cuda")
    assert not judged(Side(typed="cuda,tf32", device="cuda", tf32=True), kind=TF32, of_limit=9.0).findings
    unasked = judged(cuda, kind=TF32, of_limit=9.0)
    assert [finding.id for finding in unasked.findings] == ["floatcmp.op-coarse"]
    assert "as coarse as TF32" in unasked.summary
    assert [one.id for one in judged(cuda, kind=BEYOND).findings] == ["floatcmp.op-wrong"]
    assert [one.id for one in judged(cuda, not_finite=3).findings] == ["floatcmp.op-not-finite"]
    again = judged(cuda, reproducible=False)
    assert (again.verdict, [one.id for one in again.findings]) == ("ok", ["floatcmp.op-not-reproducible"])
    promised = Side(typed="cuda,deterministic", device="cuda", deterministic=True)
    assert judged(promised, reproducible=False).verdict == "fail"


def test_sides_are_parsed() -> None:
    assert parse_side("cuda:1,bfloat16,deterministic", "sum") == Side(
        typed="cuda:1,bfloat16,deterministic", device="cuda:1", dtype="bfloat16", deterministic=True
    )
    assert parse_side("threads=4,float16", "matmul").threads == 4


@each("text", ["", "gpu", "cpu,tf32", "cuda,bfloat16,tf32", "threads=0", "cpu,,"])
def test_what_is_no_side(text: str) -> None:
    with pytest.raises(UsageError):
        parse_side(text, "matmul")


def test_the_command_compares_two_dtypes_and_says_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTDIAG_TESTS_WHOLE_TORCH", "1")
    done = distdiag("floatcmp", "--json", "--op", "matmul", "--size", "64", "cpu,float32", "cpu,bfloat16,threads=1")
    assert done.code == 0, done.err
    assert [each["kind"] for each in done.report["data"]["measured"]] == ["expected", "expected"]
    unknown = distdiag("floatcmp", "--op", "matmal", "cpu", "cpu")
    assert (unknown.code, "no such operation" in unknown.err) == (2, True)
    file_option = distdiag("floatcmp", "--op", "matmul", "cpu", "cpu", "--exact")
    assert (file_option.code, "--exact is for files" in file_option.err) == (2, True)
    none = child._compute(child.Request(a="cpu", b="cuda", op="matmul"), has_gpu=False)
    assert (none.failed, none.is_usage) == ("this machine has no GPU that torch can use", False)
