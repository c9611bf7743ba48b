"""floatcmp: distances in ulp in every dtype, separate counts, the nearer side, in any shape and nesting."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from loops import each

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

from distdiag import floatcmp
from distdiag.commands.floatcmp.child import Request
from distdiag.commands.floatcmp.diagnose import diagnose
from distdiag.report import Verdict
from distdiag.training.floatcmp import ulp
from distdiag.training.floatcmp.result import FAR, Likeness, limits, share
from distdiag.training.floatcmp.ulp import precision, round_to, ulp_distance

if TYPE_CHECKING:
    from distdiag.training.floatcmp.result import Pair

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
INF, NAN = math.inf, math.nan


def pair_of(a: object, b: object, **options: Any) -> Pair:  # noqa: ANN401 - what floatcmp takes
    (pair,) = floatcmp(a, b, **options).pairs
    return pair


def test_the_power_that_a_cpu_and_a_gpu_disagree_on_is_2_ulp_apart() -> None:
    pair = pair_of(torch.tensor([7.94328212738037109375]), torch.tensor([7.94328308105468750000]))
    assert (pair.counts.max_ulp, pair.likeness, pair.unit) == (2, Likeness.ROUNDING, "float32")
    assert (pair.worst[0].a, pair.worst[0].a_bits, pair.worst[0].b_bits) == (
        "7.943282127380371",
        "0x40fe2f5e",
        "0x40fe2f60",
    )
    assert pair.max_abs == 9.5367431640625e-07


def test_zeros_of_two_signs_are_equal_and_told() -> None:
    pair = pair_of(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (pair.likeness, pair.counts.equal, pair.counts.zero_signs) == (Likeness.IDENTICAL, 2, 1)


def test_the_smallest_numbers_on_both_sides_of_zero_are_2_apart() -> None:
    assert pair_of(torch.tensor([1e-45]), torch.tensor([-1e-45])).counts.max_ulp == 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbours_are_1_apart_everywhere(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    numbers = torch.tensor([0.0, info.tiny, 1.0, -1.0, 1.5, 3.0, -65000.0, -info.tiny / 2], dtype=dtype)
    above = torch.nextafter(numbers, torch.full_like(numbers, INF))
    assert ulp_distance(numbers, above).tolist() == [1] * len(numbers)
    pair = pair_of(numbers, above)
    assert (pair.counts.max_ulp, pair.counts.equal, pair.likeness) == (1, 0, Likeness.ROUNDING)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_all_numbers_of_8_bits_are_in_their_order(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    numbers = numbers[numbers.float().isfinite()]
    order = numbers.float().argsort(stable=True)
    ladder = numbers.view(torch.uint8)[order].view(dtype)
    steps = ulp_distance(ladder[:-1], ladder[1:])
    same = ladder.float()[:-1] == ladder.float()[1:]  # 0.0 and -0.0
    assert steps.tolist() == (~same).long().tolist()


def test_nan_and_infinities_are_counted_apart_and_hide_nothing() -> None:
    a = torch.tensor([NAN, NAN, 1.0, INF, INF, 2.0, INF, 1.0])
    b = torch.tensor([NAN, 1.0, NAN, INF, 3e38, -INF, -INF, 1.5])
    pair = pair_of(a, b)
    counts = pair.counts
    assert (counts.both_nan, counts.equal, counts.one_sided, counts.differing) == (1, 1, 5, 6)
    assert (pair.max_abs, pair.counts.max_ulp) == (0.5, 2**22)
    assert [place.index for place in pair.one_sided] == [(1,), (2,), (4,), (5,), (6,)]
    assert pair.first is not None
    assert pair.first.index == (1,)
    assert pair.likeness == Likeness.DIFFERS
    text = str(floatcmp(a, b, names=("cpu", "cuda")))
    assert "NaN or Inf on one side only, in 5 numbers" in text
    assert "[2]  cpu 1.0 (0x3f800000)  cuda nan (0x7fc00000)" in text


def test_nan_at_the_same_place_is_equal_whatever_its_bits() -> None:
    a = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    pair = pair_of(a, a.flip(0))
    assert (pair.likeness, pair.counts.both_nan) == (Likeness.IDENTICAL, 2)


@each("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int64, torch.bool])
def test_integers_are_exact(dtype: torch.dtype) -> None:
    a, b = torch.tensor([0, 1, 1]).to(dtype), torch.tensor([0, 1, 0]).to(dtype)
    assert pair_of(a, a.clone()).likeness == Likeness.IDENTICAL
    pair = pair_of(a, b)
    assert (pair.likeness, pair.unit, pair.counts.differing, pair.max_abs) == (Likeness.DIFFERS, "", 1, 1.0)


def test_two_kinds_of_integers_are_compared_where_something_holds_both() -> None:
    found = pair_of(torch.tensor([255], dtype=torch.uint8), torch.tensor([-1], dtype=torch.int8))
    assert (found.likeness, found.max_abs) == (Likeness.DIFFERS, 256.0)
    huge = torch.tensor([2**63], dtype=torch.uint64)
    assert floatcmp([huge], [torch.tensor([-(2**63)])]).likeness == Likeness.NOT_COMPARED


@each("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.int64, torch.bool])
def test_floats_and_integers_that_are_not_the_same_numbers(dtype: torch.dtype) -> None:
    integers = torch.tensor([1, 0, 1]).to(dtype)
    for a, b in ((torch.tensor([1.0, -1.0, -3.0]), integers), (integers, torch.tensor([1.0, -1.0, -3.0]))):
        pair = pair_of(a, b)
        assert (pair.likeness, pair.unit, pair.counts.differing, pair.max_abs) == (Likeness.DIFFERS, "float32", 2, 4.0)


def test_distances_beyond_64_bits_are_held_at_their_end() -> None:
    top = torch.tensor([2**63 - 1, -(2**63)])
    assert ulp_distance(top, torch.tensor([-(2**63), 0])).tolist() == [FAR, FAR]
    far = pair_of(torch.tensor([1.7e308], dtype=torch.float64), torch.tensor([-1.7e308], dtype=torch.float64))
    assert far.counts.max_ulp == FAR
    assert math.isfinite(far.max_abs)
    assert far.max_rel <= 2


def test_complex_numbers_are_two_numbers_each() -> None:
    pair = pair_of(torch.tensor([1 + 1j]).conj(), torch.tensor([1 - 1.0000001j]))
    assert (pair.counts.size, pair.counts.max_ulp, pair.worst[0].index) == (2, 1, (0, 1))


def test_two_dtypes_are_compared_in_the_coarser_one() -> None:
    exact = torch.tensor([1.0, math.pi, 7.0])
    pair = pair_of(exact.bfloat16(), exact)
    assert (pair.likeness, pair.unit) == (Likeness.ROUNDING, "bfloat16")
    assert any("compared in bfloat16" in note for note in pair.notes)
    assert "equal once both are bfloat16" in str(floatcmp(exact.bfloat16(), exact))


def test_what_is_equal_only_once_converted_is_never_identical() -> None:
    big = 2**53 + 1
    for a, b in (
        (torch.tensor([big]), torch.tensor([float(big)], dtype=torch.float64)),
        (torch.tensor([2**53]), torch.tensor([2.0**53], dtype=torch.float64)),
        (torch.tensor([2**63 - 1]), torch.tensor([2.0**63], dtype=torch.float64)),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float16)),
        (torch.tensor([1e-9]), torch.tensor([0.0], dtype=torch.float16)),
    ):
        for pair in (pair_of(a, b), pair_of(b, a)):
            assert pair.likeness == Likeness.ROUNDING, (a, b)


def sizes(of: int) -> torch.Tensor:
    """Numbers of all sizes, as the squares that Adam keeps have them."""
    torch.manual_seed(0)
    return torch.exp(torch.randn(of) * 6 - 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_that_lost_its_small_numbers_is_not_rounding(dtype: torch.dtype) -> None:
    squares = torch.cat([sizes(3000), torch.tensor([1e4])]).to(dtype)
    lost = torch.where(squares < squares.quantile(0.33) if dtype == torch.float32 else squares < 1e-10, 0, squares)
    for a, b in ((squares, lost), (lost, squares)):
        pair = pair_of(a, b)
        assert pair.likeness == Likeness.DIFFERS
        assert any("values are 0 in" in note for note in pair.notes)
    weights = torch.randn(4096).to(dtype)
    small = weights.abs() < weights.abs().float().mean() * torch.finfo(dtype).eps
    mixed = torch.cat([weights, torch.full((2000,), 1e-9).to(dtype)])
    assert pair_of(mixed, torch.where(mixed.abs() < 1e-8, 0, mixed)).likeness == Likeness.DIFFERS
    assert int(small.sum()) < 30


def test_one_large_number_excuses_none_of_the_others() -> None:
    torch.manual_seed(0)
    a = torch.cat([torch.randn(1000) * 1e-6, torch.tensor([1e6])])
    b = torch.cat([a[:-1] * 1.5, a[-1:]])
    assert pair_of(a, b).likeness == Likeness.DIFFERS


def test_what_only_rounding_makes_infinite_is_not_taken_for_an_infinity() -> None:
    wide = torch.tensor([1e5, 7.0, INF, 1e5])
    narrow = torch.tensor([INF, 7.0, 65504.0, 65504.0], dtype=torch.float16)
    counts = pair_of(wide, narrow).counts
    assert (counts.equal, counts.one_sided) == (1, 3)


@each("dtype", [torch.float16, torch.bfloat16, *EIGHT_BITS])
def test_float64_is_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    digits = precision(dtype)
    # Next to the middle of two neighbours, where a first rounding to float32 falls onto the middle itself.
    odd = torch.randint(2 ** (digits - 1), 2**digits, (200,), dtype=torch.int64) * 2 + 1
    beside = 1 + torch.where(odd % 3 == 0, -1, 1).double() * 2.0**-45
    numbers = torch.ldexp(odd.double(), torch.tensor(-digits)) * beside
    numbers = torch.cat([numbers, -numbers])
    for number, got in zip(numbers.tolist(), round_to(numbers, dtype).double().tolist(), strict=True):
        grain = Fraction(2) ** (math.frexp(number)[1] - digits)
        assert Fraction(got) == round(Fraction(number) / grain) * grain
    special = torch.tensor([INF, -INF, NAN, 0.0, -0.0], dtype=torch.float64)
    if dtype in (torch.float16, torch.bfloat16):
        assert str(round_to(special, dtype).tolist()) == "[inf, -inf, nan, 0.0, -0.0]"


def test_a_reference_tells_who_is_nearer() -> None:
    right = 10 ** (torch.arange(0, 10).double() / 10)
    a, b = right.float(), right.float()
    b[9] = torch.nextafter(torch.nextafter(b[9], torch.tensor(INF)), torch.tensor(INF))
    by_tensor = pair_of(a, b, reference=right)
    assert by_tensor.nearness is not None
    nearness = by_tensor.nearness
    assert (nearness.nearer, nearness.a.differing, nearness.b.max_ulp) == ("a", 0, 2)
    text = str(floatcmp(a, b, reference=right, names=("cpu", "cuda")))
    assert "cpu is correctly rounded in 100 %" in text
    assert "cuda is correctly rounded in 90.0 % (worst 2 ulp): cpu is closer" in text


def test_a_reference_that_is_no_finer_is_refused() -> None:
    one = torch.ones(3)
    pair = pair_of(one, one, reference=one)
    assert pair.nearness is None
    assert "not more precise" in pair.notes[0]
    assert "no tensor of this name" in pair_of({"x": one}, {"x": one}, reference={"y": one.double()}).notes[0]
    assert "shape" in pair_of(one, one, reference=torch.ones(4, dtype=torch.float64)).notes[0]


def test_a_sum_in_another_order_is_rounding_though_near_zero_it_is_many_ulp() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, 1024), torch.randn(1024, 64)
    pair = pair_of(x @ w, x.flip(1) @ w.flip(0))
    assert pair.counts.max_ulp > limits("float32")[1]
    # Which order a processor's own kernels take is its own affair: 25 on one, 36 on another.
    assert pair.max_scaled_ulp < 2 * math.isqrt(1024)
    assert pair.likeness in (Likeness.ROUNDING, Likeness.LONG_SUM)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_percent_is_no_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    numbers = torch.randn(1000, dtype=torch.float64)
    assert pair_of(numbers.to(dtype), (numbers * 1.08).to(dtype)).likeness == Likeness.DIFFERS


def test_pieces_are_counted_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    a = torch.randn(7, 50, 3)
    b = torch.where(torch.rand_like(a) < 0.2, a * (1 + 3e-7), a)
    b[6, 49, 2] = NAN
    whole = floatcmp(a, b, reference=a.double(), worst=7)
    monkeypatch.setattr(ulp, "PIECE", 16)
    assert floatcmp(a, b, reference=a.double(), worst=7) == whole
    turned = floatcmp(a.permute(2, 1, 0).contiguous().permute(2, 1, 0), b, reference=a.double(), worst=7)
    assert turned == whole
    assert sum(whole.pairs[0].counts.histogram.values()) == a.numel() - 1


def test_an_expanded_tensor_is_not_copied_as_a_whole() -> None:
    row = torch.randn(1, 1000)
    pair = pair_of(row.expand(300, 1000), row.expand(300, 1000))
    assert (pair.likeness, pair.counts.size) == (Likeness.IDENTICAL, 300_000)


def test_the_worst_places_are_the_first_of_the_worst() -> None:
    a = torch.ones(10)
    b = a.clone()
    b[[2, 5, 8]] = torch.nextafter(b[0], torch.tensor(2.0))
    b[7] += 1e-5
    pair = pair_of(a, b, worst=3)
    assert [place.index for place in pair.worst] == [(7,), (2,), (5,)]
    none = pair_of(a, b, worst=0)
    assert (none.worst, none.counts.max_ulp) == ((), pair.counts.max_ulp)


@pytest.mark.parametrize(("a", "b"), [((3, 4), (4, 3)), ((), (1,)), ((0,), (2,))])
def test_other_shapes_are_an_answer(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    found = floatcmp(torch.zeros(a), torch.zeros(b))
    assert found.likeness == Likeness.DIFFERS
    assert "different shapes" in str(found)


def test_empty_tensors_and_single_numbers() -> None:
    assert floatcmp(torch.empty(0, 3), torch.empty(0, 3)).likeness == Likeness.IDENTICAL
    assert floatcmp(torch.tensor(1.0, dtype=torch.float64), 1.0).likeness == Likeness.IDENTICAL
    assert floatcmp(2**70, 2**70).values_differ == ()
    assert floatcmp([1, 2.5], [1, 2.5]).pairs[0].counts.size == 2


def test_nested_tensors_are_paired_by_name() -> None:
    one = torch.ones(2)
    a = {"model": {"w": one, "gone": one}, "step": 3, "opt": [one, {"m": one}], "note": "x", 0: one, "kind": one}
    b = {"model": {"w": one + 1, "new": one}, "step": 4, "opt": [one, {"m": one}], "note": "y", 0: one, "kind": None}
    found = floatcmp(a, b)
    assert [pair.key for pair in found.pairs] == ["model.w", "step", "opt[0]", "opt[1].m", "[0]"]
    assert (found.only_a, found.only_b) == (("model.gone", "kind (Tensor)"), ("model.new", "kind (NoneType)"))
    assert (found.values_differ, found.not_compared) == (("note",), ())
    assert found.worst_first[0].key == "model.w"
    text = str(found)
    assert "only in a: model.gone, kind (Tensor)" in text
    assert "of 5 tensors, 2 differ beyond rounding, 3 are identical" in text


def test_what_holds_no_numbers_is_said_and_not_called_equal() -> None:
    found = floatcmp({"x": torch.empty(2, device="meta"), "y": object()}, {"x": torch.ones(2), "y": object()})
    assert found.likeness == Likeness.NOT_COMPARED
    assert [name.partition(":")[0] for name in found.not_compared] == ["x", "y"]
    with pytest.raises(TypeError, match="state_dict"):
        floatcmp(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))


def test_what_contains_itself_is_refused() -> None:
    ring: list[object] = []
    ring.append(ring)
    with pytest.raises(ValueError, match="nested deeper"):
        floatcmp(ring, ring)


def test_sparse_and_gradient_tensors() -> None:
    assert floatcmp(torch.eye(3).to_sparse(), torch.eye(3)).likeness == Likeness.IDENTICAL
    assert floatcmp(torch.ones(2, requires_grad=True), torch.ones(2)).likeness == Likeness.IDENTICAL


def test_a_share_is_never_rounded_to_all_or_none() -> None:
    assert [share(part, 10_000) for part in (0, 1, 5_000, 9_999, 10_000)] == [
        "0 %",
        "<0.1 %",
        "50.0 %",
        ">99.9 %",
        "100 %",
    ]


def test_ids_of_integers_nan_on_both_sides_and_other_values() -> None:
    sides = [{"i": torch.tensor([1, number]), "n": torch.tensor([NAN]), "o": object()} for number in (1, 2)]
    found = diagnose(Request(a="a.pt", b="b.pt"), floatcmp(*sides)).findings
    assert {str(one.id) for one in found} == {"floatcmp.integers", "floatcmp.both-nan", "floatcmp.not-compared"}
    one = torch.ones(3)
    (coarse,) = diagnose(Request(a="a.pt", b="b.pt"), floatcmp(one, one, reference=one)).findings
    assert (coarse.id, coarse.level) == ("floatcmp.reference", "warn")
    (value,) = diagnose(Request(a="a.pt", b="b.pt"), floatcmp({"x": one, "o": "1"}, {"x": one, "o": "2"})).findings
    assert (value.id, value.level) == ("floatcmp.values", "warn")


@each(
    "b, verdict, ids",
    [
        ({"w": torch.ones(4)}, Verdict.OK, []),
        ({"w": torch.ones(4) * (1 + 3e-7)}, Verdict.OK, []),
        ({"w": torch.ones(4) * (1 + 3e-6)}, Verdict.WARN, ["long-sum"]),
        ({"w": torch.ones(4) * 1.1}, Verdict.FAIL, ["beyond-rounding"]),
        ({"w": torch.tensor([1.0, 1.0, NAN, 1.0])}, Verdict.FAIL, ["one-sided"]),
        ({"w": torch.ones(5)}, Verdict.FAIL, ["shapes"]),
        ({"v": torch.ones(4)}, Verdict.FAIL, ["keys", "nothing-compared"]),
    ],
)
def test_a_verdict_for_each_kind(b: object, verdict: Verdict, ids: list[str]) -> None:
    found = floatcmp({"w": torch.ones(4)}, b)
    facts = replace(found, pairs=found.worst_first)
    report = diagnose(Request(a="a.pt", b="b.pt"), facts)
    assert (report.verdict, [finding.id.partition(".")[2] for finding in report.findings]) == (verdict, ids)
    exact = diagnose(Request(a="a.pt", b="b.pt", exact=True), facts)
    same = all(torch.equal(one, torch.ones(4)) for one in b.values()) if isinstance(b, dict) else False
    assert (exact.verdict == Verdict.OK) == (same and "w" in b)  # type: ignore[operator]
