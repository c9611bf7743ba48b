"""floatcmp --op: the error of an operation is put down to its dtype, or to what makes it coarser."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from support import distdiag

from distdiag.commands.floatcmp import operation
from distdiag.commands.floatcmp.compute import OPERATIONS, compare_operation, measure
from distdiag.commands.floatcmp.operation import (
    BEYOND,
    BFLOAT16,
    EXPECTED,
    SHORT_SUM,
    TF32,
    Side,
    diagnose_operation,
    parse_side,
)
from distdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from distdiag.commands.floatcmp.operation import Measured

TERMS = 512


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
    inputs = [value.to(dtype).double() for value in OPERATIONS["matmul"].make(random_numbers(), TERMS)]
    return measure(OPERATIONS["matmul"], TERMS, inputs, [run(*(value.to(dtype) for value in inputs))])


def random_numbers() -> Callable[..., torch.Tensor]:
    return partial(torch.randn, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    ("run", "dtype", "kind"),
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


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_torch_computes_is_as_good_as_its_dtype(name: str) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        found = compare_operation(name, 300, (Side(typed="a", dtype=dtype), Side(typed="b", threads=1)))
        assert [each.kind for each in found.measured] == [EXPECTED] * 2, (dtype, found.measured)
        assert not diagnose_operation(found, "distdiag").findings


@pytest.mark.parametrize("seed", [0, 2])
def test_the_tail_of_a_long_softmax_is_as_good_as_float32(seed: int) -> None:
    # At x = max - 8 the rounding of the difference alone is 4 ulp of the result.
    found = compare_operation("softmax", 4096, (Side(typed="a"), Side(typed="threads=1", threads=1)), seed)
    assert [each.kind for each in found.measured] == [EXPECTED] * 2, found.measured
    assert max(each.of_limit for each in found.measured) < 0.75


def test_a_softmax_of_another_sum_is_beyond_rounding() -> None:
    x = OPERATIONS["softmax"].make(random_numbers(), TERMS)[0].float()
    without_a_term = x.exp() / (x.exp().sum(-1, keepdim=True) - x[:, :1].exp())
    found = measure(OPERATIONS["softmax"], 0, [x.double()], [without_a_term])
    assert found.kind == BEYOND


def test_the_names_are_those_of_the_operations() -> None:
    assert tuple(OPERATIONS) == operation.OPERATIONS


def test_what_was_asked_for_is_no_finding_and_the_same_unasked_is() -> None:
    found = compare_operation("matmul", 64, (Side(typed="cpu"), Side(typed="cpu")))
    coarse = replace(found.measured[0], kind=TF32, of_limit=9.0)
    asked = replace(
        found, measured=(coarse, found.measured[1]), sides=(Side(typed="cuda,tf32", precision="high"), found.sides[1])
    )
    assert not diagnose_operation(asked, "distdiag").findings
    unasked = diagnose_operation(replace(asked, sides=(Side(typed="cuda"), found.sides[1])), "distdiag")
    assert [finding.id for finding in unasked.findings] == ["floatcmp.op-coarse"]
    assert "as coarse as TF32" in unasked.summary
    wrong = replace(asked, measured=(replace(coarse, kind=BEYOND), found.measured[1]))
    assert diagnose_operation(wrong, "distdiag").verdict == "fail"
    jitter = replace(found, measured=(replace(found.measured[0], reproducible=False), found.measured[1]))
    assert diagnose_operation(jitter, "distdiag").verdict == "ok"
    promised = replace(jitter, sides=(Side(typed="cuda,deterministic", deterministic=True), found.sides[1]))
    assert diagnose_operation(promised, "distdiag").verdict == "fail"


def test_sides_are_parsed() -> None:
    assert parse_side("cuda:1,bfloat16,deterministic", "sum") == Side(
        typed="cuda:1,bfloat16,deterministic", device="cuda:1", dtype="bfloat16", deterministic=True
    )
    assert parse_side("threads=4,precision=medium", "matmul").threads == 4


@pytest.mark.parametrize("text", ["", "gpu", "cpu,tf32", "cuda,bfloat16,tf32", "threads=0", "precision=low", "cpu,,"])
def test_what_is_no_side(text: str) -> None:
    with pytest.raises(UsageError):
        parse_side(text, "matmul")


def test_the_command_compares_two_dtypes_and_says_where_there_is_no_gpu() -> None:
    done = distdiag("floatcmp", "--json", "--op", "matmul", "cpu,float32", "cpu,bfloat16")
    assert done.code == 0, done.err
    assert [each["kind"] for each in done.report["data"]["measured"]] == ["expected", "expected"]
    unknown = distdiag("floatcmp", "--op", "matmal", "cpu", "cpu")
    assert (unknown.code, "no such operation" in unknown.err) == (2, True)
    file_option = distdiag("floatcmp", "--op", "matmul", "cpu", "cpu", "--exact")
    assert (file_option.code, "--exact is for files" in file_option.err) == (2, True)
    if not torch.cuda.is_available():
        none = distdiag("floatcmp", "--op", "matmul", "cpu", "cuda")
        assert (none.code, "this machine has no GPU that torch can use" in none.err) == (3, True)
