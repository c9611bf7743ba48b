"""The overflow detector in one process: what it must find, name, leave alone and survive."""

# ruff: noqa: ANN401 - modules take and give anything

from __future__ import annotations

import copy
import gc
import io
import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from loops import each
from torch import nn

from distdiag import DebugUnderflowOverflow, OverflowDetected, detect_overflow
from distdiag.training.overflow import extrema

if TYPE_CHECKING:
    from collections.abc import Callable

    from distdiag.training.overflow.report import Detection

INF = math.inf
MODES: tuple[Any, ...] = ("step", "full")


class Then(nn.Module):
    """Calls modules one after the other."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Any) -> Any:
        for module in self.children():
            x = module(x)
        return x


class Does(nn.Module):
    """Does what it is told."""

    def __init__(self, what: Callable[..., Any]) -> None:
        super().__init__()
        self.what = what

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.what(*args, **kwargs)


class Sub(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 0


@dataclass
class Held:
    hidden: torch.Tensor
    more: object = None


def found(model: nn.Module, *args: Any, mode: Any = "step", **kwargs: Any) -> Detection | None:
    """Call a model once under a detector."""
    options = {name[1:]: kwargs.pop(name) for name in list(kwargs) if name.startswith("_")}
    with DebugUnderflowOverflow(model, mode=mode, **options):
        try:
            model(*args, **kwargs)
        except OverflowDetected as error:
            return error.detection
    return None


def must_find(model: nn.Module, *args: Any, mode: Any = "step", **kwargs: Any) -> Detection:
    told = found(model, *args, mode=mode, **kwargs)
    assert told is not None
    return told


@pytest.mark.parametrize("mode", MODES)
def test_the_module_that_divides_by_zero_is_named_and_no_other(mode: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = Then(a=nn.Linear(4, 4), sub=Sub(), b=nn.Linear(4, 4))
    told = must_find(model, torch.ones(3, 4), mode=mode)
    assert (told.module, told.module_class, told.tensor, told.origin) == ("sub", "Sub", "output", "here")
    assert told.tally is not None
    assert (told.tally.inf + told.tally.minus_inf, told.tally.first, told.batch) == (12, (0, 0), 0)
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("Detected inf/nan during batch_number=0")
    assert lines[at + 1 : at + 4] == ["Last 2 forward frames:", "abs min  abs max  metadata", " " * 18 + "a Linear"]
    assert lines[at + 8 : at + 11] == [
        " " * 18 + "sub Sub",
        lines[at + 7].replace("output", "input[0]"),
        "     inf      inf output",
    ]
    assert " b Linear" not in "\n".join(lines)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("wrap", "label"),
    [
        (lambda bad, x: {"y": x, "x": bad}, "output['x']"),
        (lambda bad, x: [bad], "output[0]"),
        (lambda bad, x: (x, (x, [x, bad])), "output[1][1][1]"),
        (lambda bad, x: Held(x, {"in": (bad,)}), "output.more['in'][0]"),
    ],
)
def test_it_is_found_in_any_container(mode: Any, wrap: Callable[..., object], label: str) -> None:
    told = must_find(Does(lambda x: wrap(x / 0, x)), torch.ones(2), mode=mode)
    assert (told.tensor, told.origin) == (label, "here")


class GivesOn(nn.Module):
    """Makes inf between the calls of its children, and hands it on by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.then = Does(lambda hidden: hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.then(hidden=self.first(x).abs() * INF)
        return out


@pytest.mark.parametrize("mode", MODES)
def test_what_comes_by_keyword_was_made_by_the_module_around(mode: Any) -> None:
    told = must_find(Then(block=GivesOn()), torch.ones(1, 2), mode=mode)
    assert (told.module, told.tensor, told.origin) == ("block.then", "input['hidden']", "between")
    assert (told.made_by, told.made_by_class) == ("block", "GivesOn")


@pytest.mark.parametrize("mode", MODES)
def test_what_the_model_is_given_is_not_its_fault(mode: Any) -> None:
    told = must_find(Then(a=nn.Linear(2, 2)), torch.tensor([[1.0, INF]]), mode=mode)
    assert (told.module, told.tensor, told.origin) == ("", "input[0]", "given")


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_is_no_fault(mode: Any) -> None:
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -INF)
    adds = Does(lambda x, mask: (x + 1, mask))
    softmax = Then(hide=Does(lambda x: x.masked_fill(x == 1, 0)), soft=nn.Softmax(-1))
    scores = torch.randn(4, 4) + mask
    for model, given in (
        (adds, (torch.ones(4, 4), mask)),
        (softmax, (scores.clamp(min=-9),)),
        (nn.Softmax(-1), (scores,)),
    ):
        assert found(model, *given, mode=mode) is None


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_is_masked_from_end_to_end_is_a_hint(mode: Any) -> None:
    mask = torch.zeros(3, 3)
    mask[1] = -INF
    model = Then(add=Does(lambda x: torch.softmax(x[0] + x[1], -1)))
    told = must_find(model, (torch.randn(3, 3), mask), mode=mode)
    assert (told.module, told.origin) == ("add", "here")
    assert "row of the mask `input[0][1]` of `add`" in told.hints[0]


_ODD: dict[str, Callable[[], Any]] = {
    "bool": lambda: torch.tensor([True, False]),
    "least int64": lambda: torch.tensor([-(2**63), 5]),
    "empty": lambda: torch.empty(0, 3),
    "float8_e4m3fn": lambda: torch.tensor([1.0, -448.0]).to(torch.float8_e4m3fn),
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "complex": lambda: torch.tensor([1 + 2j]),
    "scalar": lambda: torch.tensor(3.5),
    "uint64": lambda: torch.tensor([1, 2], dtype=torch.uint64),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "none": lambda: None,
    "text": lambda: "words",
    "inference": lambda: _inference(),
}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", _ODD)
def test_no_kind_of_tensor_ends_the_job(kind: str, mode: Any) -> None:
    model = Then(a=Does(lambda x: x), b=Does(lambda x: (x, x)))
    assert found(model, _ODD[kind](), mode=mode, _trace_batch_nums=[0]) is None


def test_how_odd_tensors_read_in_frames(capsys: pytest.CaptureFixture[str]) -> None:
    given = [_ODD[kind]() for kind in ("bool", "least int64", "empty", "meta", "none", "text", "complex")]
    with DebugUnderflowOverflow(Does(lambda *x: None), trace_batch_nums=[0]) as detector:
        detector._root(*given)
    lines = [line for line in capsys.readouterr().out.splitlines() if "input" in line]
    assert lines == [
        "0.00e+00 1.00e+00 input[0]",
        "5.00e+00 9.22e+18 input[1]",
        "            empty input[2]",
        "             meta input[3]",
        "             None input[4]",
        "     not a tensor input[5]",
        "1.00e+00 2.00e+00 input[6]",
    ]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e5m2, torch.bfloat16, torch.float64])
def test_inf_is_found_in_every_dtype_that_has_it(dtype: torch.dtype) -> None:
    told = must_find(Does(lambda x: torch.tensor([1.0, INF]).to(dtype)), torch.ones(1))
    assert (told.tally.inf if told.tally else 0) == 1


@pytest.mark.parametrize("mode", MODES)
def test_inf_in_the_models_own_output_has_the_number_of_its_batch(mode: Any) -> None:
    model = Does(lambda x: x / 0)
    assert must_find(model, torch.ones(2), mode=mode).batch == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_traced_batch_is_judged_too_and_the_next_one_is_clean(mode: Any, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    model = Then(a=nn.Linear(2, 2), b=Does(lambda x: x / (0 if len(seen) else 1)))
    with DebugUnderflowOverflow(
        model,
        2,
        [1],
        mode=mode,
        on_detect=lambda told: seen.append(-told.batch),
    ):
        model(torch.ones(1, 2))
        seen.append(7)
        model(torch.ones(1, 2))
        seen.remove(7)
        batches = list(seen)
        seen.clear()
        for _ in range(100):
            model(torch.ones(1, 2))
        assert (batches, seen) == ([-1], [])
        seen.append(7)
        model(torch.ones(1, 2))
    assert seen == [7, -102]
    out = capsys.readouterr().out
    assert out.count("*** Starting batch number=1 ***\nabs min  abs max  metadata") == 1
    assert "Last 2 forward frames:" in out


def test_at_most_so_many_frames_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(*[nn.Identity() for _ in range(30)], Sub())
    for keep, shown in ((2, 2), (21, 21), (100, 31)):
        must_find(model, torch.ones(1), _max_frames_to_save=keep)
        out = capsys.readouterr().out
        assert f"Last {shown} forward frames:" in out
        assert out.count(" Identity\n") == shown - 1


@pytest.mark.parametrize("mode", MODES)
def test_what_is_changed_in_place_is_read_before(mode: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found(Then(relu=nn.ReLU(inplace=True)), torch.tensor([-3.0]), mode=mode, _trace_batch_nums=[0])
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(" " * 18 + "relu ReLU")
    assert lines[at + 1 : at + 3] == ["3.00e+00 3.00e+00 input[0]", "0.00e+00 0.00e+00 output"]


def test_inputs_changed_in_place_cannot_be_run_again_and_that_is_said() -> None:
    told = must_find(Does(lambda x: x.div_(0)), torch.ones(2))
    assert told.origin == "unseen"
    assert "changed in place" in told.hints[0]
    assert "mode='full'" in told.hints[0]
    told = must_find(Then(a=Does(lambda x: x.div_(0))), torch.ones(2), mode="full")
    assert (told.module, told.origin) == ("a", "here")


def test_what_nan_to_num_hides_is_found_at_the_input() -> None:
    model = Then(bad=Sub(), hides=Does(lambda x: x.nan_to_num_()))
    assert must_find(model, torch.ones(2), mode="full").module == "bad"


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    optimizer.zero_grad()
    loss(model(torch.ones(1, 2, dtype=next(model.parameters()).dtype))).backward()
    optimizer.step()


def _spoils_gradients(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.register_hook(lambda grad: grad * math.nan)
    return y


def test_a_bad_gradient_is_found_before_the_optimizer_uses_it() -> None:
    model = Then(early=nn.Linear(2, 2), late=nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DebugUnderflowOverflow(model):
        _step(model, optimizer, lambda out: out.sum())
        before = [weight.detach().clone() for weight in model.parameters()]
        with pytest.raises(OverflowDetected) as error:
            _step(model, optimizer, lambda out: _spoils_gradients(out).sum())
    told = error.value.detection
    assert (told.batch, told.step, told.module, told.tensor) == (1, 1, "late", "bias.grad")
    assert (told.origin, told.hints[0].split(".")[0]) == ("backward", "4 of 4 gradients contain nan or inf")
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_each_gradient_is_looked_at_before_clipping_spreads_it() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.late(_spoils_gradients(self.early(x)))

    model = Between()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places: dict[Any, str] = {}
    hows: list[Any] = ["step", "each"]
    for how in hows:
        with DebugUnderflowOverflow(model, gradients=how) as detector:
            model(torch.ones(1, 2)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with pytest.raises(OverflowDetected) as error:
                optimizer.step()
            places[how] = error.value.detection.module
            assert detector.found == 1
        optimizer.zero_grad()
    assert places == {"step": "late", "each": "early"}


def test_a_step_that_the_scaler_skips_is_no_fault() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=10**6)
    with DebugUnderflowOverflow(model) as detector:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale((model(torch.ones(1, 2)) * 8).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert (detector.found, detector.counts.steps) == (0, 1)


def test_a_gradient_in_float16_that_underflows_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 1).half()
    with DebugUnderflowOverflow(model):
        _step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda out: (out.float() * 1e-6).sum())
    said = capsys.readouterr().err
    assert "underflow in step 0: 2 of 2 float16 gradients are mostly zero" in said
    assert "100%" in said


@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_that_is_bad_before_the_forward(mode: Any) -> None:
    norm = nn.BatchNorm1d(2).eval()
    assert norm.running_var is not None
    norm.running_var[0] = math.nan
    told = must_find(Then(norm=norm), torch.ones(3, 2), mode=mode)
    assert (told.module, told.tensor, told.origin) == ("norm", "running_var", "weights")


@pytest.mark.parametrize("mode", MODES)
def test_a_shared_module_has_its_first_name_in_both_frames(mode: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shared = nn.Linear(2, 2)
    model = Then(one=shared, bad=Does(lambda x: x / 0))
    model.add_module("two", shared)
    with DebugUnderflowOverflow(model, trace_batch_nums=[0], mode=mode, on_detect="report"):
        model(torch.ones(1, 2))
    out = capsys.readouterr().out.split("Detected")[0]
    assert (out.count(" one Linear\n"), out.count(" two Linear\n")) == (1, 0)


def test_headroom_is_told_before_it_is_gone() -> None:
    model = Then(wo=Does(lambda x: x * 6.27), drop=Does(lambda x: x * 1.2))
    told = must_find(model, torch.full((2, 2), 1e4).half())
    assert told.module == "drop"
    assert "6.27e+04 = 96% of float16 max, `output` of `wo` (Does)" in told.hints[0]


def test_abort_after_a_batch() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DebugUnderflowOverflow(model, abort_after_batch_num=3) as detector:
        with pytest.raises(ValueError, match=r"aborting after 4 batches due to `abort_after_batch_num=3` arg"):  # noqa: PT012
            while True:
                for _ in range(4):
                    model(torch.ones(1, 2)).sum().backward()
                model.eval()(torch.ones(1, 2))
                model.train()
                optimizer.step()
        assert (detector.counts.batches, detector.counts.steps) == (4, 0)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left_after_detach_and_nothing_is_changed_before(mode: Any) -> None:
    out = torch.ones(3)
    model = Then(a=Does(lambda x: x), b=Does(lambda x: out))
    detector = DebugUnderflowOverflow(model, mode=mode)
    with pytest.raises(ValueError, match="already has a detector"):
        DebugUnderflowOverflow(model)
    assert model(torch.ones(1)) is out
    detector.detach()
    detector.detach()
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    DebugUnderflowOverflow(model).detach()


def test_the_detector_does_not_keep_the_model_alive_after_detach() -> None:
    model = nn.Linear(2, 2)
    with DebugUnderflowOverflow(model) as detector:
        model(torch.ones(1, 2))
    gone = [weakref.ref(one) for one in (model, detector)]
    del model, detector
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_a_large_finite_tensor_is_fine_and_all_that_is_bad_is_counted() -> None:
    assert found(Does(lambda x: torch.full((4096,), 3e38)), torch.ones(1)) is None
    told = must_find(Does(lambda x: torch.tensor([math.nan, INF, 1.0])), torch.ones(1))
    assert told.tally is not None
    assert (told.tally.nan, told.tally.inf, told.what) == (1, 1, "1 nan and 1 inf")


@pytest.mark.parametrize("mode", MODES)
def test_dropout_and_running_means_are_bit_identical_beside_a_bare_run(mode: Any) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    outs = []
    for watched in (False, True):
        model, given = build(), torch.linspace(-1, 1, 32).reshape(8, 4)
        detector = DebugUnderflowOverflow(model, trace_batch_nums=[1], mode=mode) if watched else None
        outs.append([model(given) for _ in range(3)] + [*model.state_dict().values(), torch.rand(3)])
        if detector is not None:
            detector.detach()
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_the_second_run_has_the_random_numbers_and_buffers_of_the_first() -> None:
    """Only the first forward of this model is bad: by its dropout and by a buffer that it changes."""

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.calls: torch.Tensor
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            seen.append(self.drop(x))
            return seen[-1] / (self.calls - 2)

    seen: list[torch.Tensor] = []
    model = Once()
    assert found(model, torch.ones(64)) is None
    told = must_find(model, torch.ones(64))
    assert (told.module_class, told.origin) == ("Once", "here")
    assert len(seen) == 3
    assert torch.equal(seen[-1], seen[-2])
    assert float(model.calls) == 2


def test_autocast_is_as_it_was() -> None:
    """The product overflows in float16 only."""
    model = Then(big=nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model.get_parameter("big.weight").fill_(300.0)
    assert found(model, torch.full((1, 2), 300.0)) is None
    seen: list[Detection] = []
    with DebugUnderflowOverflow(model, on_detect=seen.append) as detector:
        with torch.autocast("cpu", dtype=torch.float16):
            model(torch.full((1, 2), 300.0))
        assert detector.found == 1
    assert (seen[0].module, seen[0].origin) == ("big", "here")


def test_ignored_modules_may_hold_what_they_like() -> None:
    model = Then(a=Does(lambda x: x * math.nan), b=Does(lambda x: x.nan_to_num()))
    assert must_find(model, torch.ones(1), mode="full").module == "a"
    for patterns in ("a", ["a:output", "b:input*"], "*"):
        told = found(model, torch.ones(1), mode="full", _ignore=patterns)
        assert (told is None) == (patterns != "a")


def test_report_says_the_first_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    model = Then(a=Sub())
    with DebugUnderflowOverflow(model, on_detect="report") as detector:
        for _ in range(3):
            model(torch.ones(1))
        assert detector.found == 3
    assert capsys.readouterr().out.count("Detected inf/nan") == 1


def test_a_copy_and_a_pickled_model_are_not_watched() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with DebugUnderflowOverflow(model, mode="full") as detector:
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        for other in (twin, again):
            other(torch.full((1, 2), INF))
        assert (detector.counts.batches, detector.found) == (0, 0)


def test_activation_checkpoints_are_no_frames_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    from torch.utils.checkpoint import checkpoint

    class Saves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Saves()
    for mode in MODES:
        with DebugUnderflowOverflow(model, trace_batch_nums=[0], mode=mode):
            model(torch.ones(1, 2)).sum().backward()
        assert capsys.readouterr().out.count(" inner Linear\n") == 1


def test_a_step_that_a_fused_optimizer_skips_is_no_fault() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=10**6)
    hows: list[Any] = ["step", "each"]
    for how in hows:
        with DebugUnderflowOverflow(model, gradients=how) as detector:
            for _ in range(3):
                optimizer.zero_grad()
                scaler.scale((model(torch.ones(1, 2)) * 8).sum()).backward()
                scaler.step(optimizer)
                scaler.update(2.0**126)
            assert detector.found == 0


def test_a_step_that_the_script_skips_is_forgotten() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DebugUnderflowOverflow(model, gradients="each") as detector:
        for bad in (True, False):
            optimizer.zero_grad()
            out = model(torch.ones(1, 2))
            (_spoils_gradients(out) if bad else out).sum().backward()
            if not bad:
                optimizer.step()
        assert (detector.found, detector.counts.steps) == (0, 1)


def test_transforms_of_torch_func_are_left_alone() -> None:
    model = nn.Linear(4, 1)
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        return torch.func.functional_call(model, weights, (x,)).sum()

    for mode in MODES:
        with DebugUnderflowOverflow(model, mode=mode) as detector:
            grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, torch.ones(3, 4))
            assert (grads["weight"].shape, detector.counts.batches) == ((3, 1, 4), 0)


class Forgets(nn.Module):
    """Has a buffer that becomes something else."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.c: torch.Tensor | None
        self.register_buffer("c", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "none":
            self.c = None
        elif self.how == "gone":
            self._buffers.pop("c", None)
        else:
            self.c = torch.empty(3, device="meta")
        return x


@pytest.mark.parametrize("mode", MODES)
def test_buffers_that_vanish_and_lazy_modules_do_not_end_the_job(mode: Any) -> None:
    for how in ("none", "gone", "meta"):
        with DebugUnderflowOverflow(Forgets(how), mode=mode) as detector:
            detector._root(torch.ones(2))
            detector._root(torch.ones(2))
            assert detector.counts.batches == 2
    assert found(nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d()), torch.ones(4, 3), mode=mode) is None


def test_a_fault_of_the_detector_itself_is_said_and_the_script_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    class Odd(dict[str, torch.Tensor]):
        def items(self) -> Any:
            raise RuntimeError("not now")

    model = nn.Linear(1, 1)
    with DebugUnderflowOverflow(Then(a=Does(lambda x: x), b=model)) as detector:
        given = Odd(x=torch.ones(1))
        assert Does(lambda x: x)(given) is given
        with pytest.raises(TypeError):  # the model's own
            detector._root(given)
    assert "the detector is off from here on: RuntimeError not now" in capsys.readouterr().err


@pytest.mark.parametrize("mode", MODES)
def test_buffers_full_of_inf_that_are_not_used_are_no_fault(mode: Any) -> None:
    class Observes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.least: torch.Tensor
            self.register_buffer("least", torch.tensor(INF))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.least = torch.minimum(self.least, x.min())
            return x

    bad = nn.Linear(2, 2)
    assert found(Then(see=Observes(), linear=bad), torch.ones(1, 2), mode=mode) is None
    with torch.no_grad():
        bad.bias[0] = math.nan
    told = must_find(Then(see=Observes(), linear=bad), torch.ones(1, 2), mode=mode)
    assert (told.module, told.tensor, told.origin) == ("linear", "bias", "weights")


@pytest.mark.parametrize("mode", MODES)
def test_logits_of_which_some_are_left_out_are_no_fault(mode: Any) -> None:
    model = Then(linear=nn.Linear(2, 4), out=Does(lambda x: x.masked_fill(torch.tensor([True, False] * 2), -INF)))
    assert found(model, torch.ones(3, 2), mode=mode) is None
    assert found(Then(log=Does(lambda x: x.log())), torch.zeros(2), mode=mode) is not None


def test_data_parallel_and_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        DebugUnderflowOverflow(nn.DataParallel(nn.Linear(1, 1)))
    wrong: list[dict[str, Any]] = [
        {"mode": "deep"},
        {"gradients": True},
        {"on_detect": "mail"},
        {"max_frames_to_save": 0},
    ]
    for options in wrong:
        with pytest.raises(ValueError, match=next(iter(options))):
            DebugUnderflowOverflow(nn.Linear(1, 1), **options)


@each(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:1].expand(50, 30),
        lambda x: x[:, ::2],
        lambda x: x.reshape(5, 10, 30).permute(2, 0, 1),
        lambda x: x.unfold(1, 4, 2),
    ],
)
def test_views_have_the_numbers_of_their_contiguous_copies(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = view(torch.randn(50, 30))
    read = extrema.start(x)
    assert not isinstance(read, str)
    least, greatest = extrema.fetch(read[1])
    assert (least, greatest) == (float(x.min()), float(x.max()))
    assert extrema.abs_min(read[0]) == float(x.abs().min())


def test_reading_an_expanded_tensor_allocates_nothing_of_its_size() -> None:
    x = torch.randn(1, 1000).expand(1000, 1000)
    read = extrema.readable(x)
    assert isinstance(read, torch.Tensor)
    assert read.numel() == 1000


def test_detect_overflow_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert not detect_overflow(torch.ones(2), "fine")
    assert not detect_overflow(torch.empty(0), "empty")
    assert detect_overflow(torch.tensor([1.0, math.nan, -INF]), "after layer_norm")
    said = "after layer_norm has nans\nafter layer_norm has infs\n"
    assert capsys.readouterr().out == said + "after layer_norm: float32 of shape [3], 2 of 3 bad, the first at [1]\n"


@pytest.mark.parametrize("mode", MODES)
def test_what_comes_to_nothing_is_no_alarm(mode: Any) -> None:
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.least = Does(lambda x: x.amin(-1))

        def forward(self, x: torch.Tensor) -> Any:
            return self.least(x.masked_fill(torch.tensor([True, False, False]), INF))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3)
            self.error = Does(lambda y, labels: (y - labels)[labels.isfinite()].square().mean())

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return self.error(self.head(x), labels)

    labels = torch.tensor([[1.0, math.nan, 3.0]])
    assert found(Pools(), torch.ones(2, 3), mode=mode) is None
    assert found(Loss(), torch.ones(1, 3), labels, mode=mode) is None
    told = must_find(Loss(), torch.full((1, 3), math.nan), labels, mode=mode)
    assert (told.tensor, told.origin) == ("input[0]", "given")


class Outputs:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


def test_attributes_of_a_plain_object_are_read_and_what_cannot_be_is_counted() -> None:
    told = must_find(Does(lambda x: Outputs(x / 0)), torch.ones(2))
    assert (told.tensor, told.origin) == ("output.hidden", "here")
    for what, kind in ((lambda x: iter([x / 0]), "list_iterator"), (lambda x: None, "NoneType")):
        with DebugUnderflowOverflow(Does(what)) as detector:
            detector._root(torch.ones(2))
            assert (detector.found, detector.counts.unread, detector.counts.kind) == (0, 1, kind)


def test_a_loss_that_is_nan_is_found_though_all_gradients_are_finite() -> None:
    model = nn.Linear(2, 1)
    with DebugUnderflowOverflow(model), pytest.raises(OverflowDetected) as error:
        (model(torch.ones(1, 2)).sum() + torch.tensor(-1.0).log()).backward()
    told = error.value.detection
    assert (told.origin, told.what) == ("loss", "1 nan")
    assert "All module inputs and outputs in the forward were finite: the script produced it" in told.sentence
    assert "test_overflow_detector.py" in told.hints[0]
    assert told.hints[1] == "It is the output of: Add <- Sum <- Addmm."
    assert model.weight.grad is None
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_what_is_hidden_from_the_outputs_is_named_by_what_comes_of_it() -> None:
    """The inf of the second module is put aside by where; its gradient is nan all the same."""

    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.big = nn.Linear(2, 2), Does(lambda x: (x * 1e30).exp())

        def forward(self, x: torch.Tensor) -> Any:
            y = self.first(x)
            return torch.where(torch.ones_like(y) > 0, y, self.big(y.abs()))

    model = Hides()
    hows: list[Any] = ["step", "each"]
    for how in hows:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DebugUnderflowOverflow(model, gradients=how), pytest.raises(OverflowDetected) as error:
            _step(model, optimizer, lambda out: out.sum())
        told = error.value.detection
        assert (told.module, told.tensor, told.origin) == ("big", "output", "here")
        assert "No output of the model contains it, but the gradients do." in told.hints
        optimizer.zero_grad()


@pytest.mark.parametrize("how", ["step", "each"])
def test_of_accumulated_forwards_only_the_last_is_called_finite(how: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DebugUnderflowOverflow(model, gradients=how), pytest.raises(OverflowDetected) as error:  # noqa: PT012
        _spoils_gradients(model(torch.ones(1, 2))).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    sentence = error.value.detection.sentence
    assert (
        "All module inputs and outputs in the forward were finite, in the last of 2 forwards since the last step"
    ) in sentence
    assert "it was produced in the loss, in an earlier forward, between modules or in backward" in sentence


@each(
    "made, said",
    [
        (
            lambda y: (y * 1000).softmax(-1).log(),
            "`output` of the model (Does) is not a mask: `log` of a tensor with min 0 produced it from finite",
        ),
        (lambda y: {"x": y.masked_fill(y > 1, -INF), "y": (y - 1).relu().log()}, "`output['y']` of the model (Does)"),
        (lambda y: y.masked_fill(y < y.max(), -INF), ""),
        (lambda y: torch.where(y < 2, y, -INF).reshape(-1) * 2, ""),
        (lambda y: y + torch.tensor([0, 0, -INF]), ""),
        (lambda y: y.index_fill(-1, torch.tensor([1]), -INF).log_softmax(-1), ""),
        (lambda y: y.clone().fill_diagonal_(-INF), ""),
    ],
)
def test_minus_inf_in_inference_is_told_unless_it_was_filled_in(made: Callable[[torch.Tensor], Any], said: str) -> None:
    model = Does(made).eval()
    for mode in MODES:
        with torch.no_grad(), DebugUnderflowOverflow(model, mode=mode) as detector:
            for _ in range(2):
                model(torch.tensor([[1.0, 1.5, 4.0]]).expand(3, 3))
            assert (detector.found, detector.counts.off) == (0, "")
            assert [said in one for one in detector.counts.warnings] == [True] * bool(said)


def test_what_went_in_and_may_be_a_mask_is_not_called_finite() -> None:
    model = Then(a=Does(lambda x: x.masked_fill(x > 1, -INF)), b=Does(lambda x: x.abs()))
    told = must_find(model, torch.tensor([1.0, 2.0]))
    assert (told.module, told.origin) == ("b", "here")
    assert (
        "Inputs were finite except for -inf in `input[0]`, as in masks; this module produced it (`abs`)."
        in told.sentence
    )


class LogScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x * self.gain)


def _logs(**between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    block = Then(fc=nn.Linear(8, 8), act=nn.ReLU(), scale=LogScale())
    return Then(block=block, **between, last=nn.Linear(8, 1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("between", [{}, {"twice": Does(lambda x: x.reshape(4, 8) * 2)}])
def test_minus_inf_of_a_log_is_where_the_nan_of_a_later_module_began(mode: Any, between: dict[str, nn.Module]) -> None:
    told = must_find(_logs(**between), torch.randn(4, 8), mode=mode)
    assert (told.module, told.module_class, told.tensor, told.origin) == (
        "block.scale",
        "LogScale",
        "output",
        "here",
    )
    assert (told.operation, told.made_by) == ("log", "block.scale")
    assert (
        " -inf in `output` of `block.scale` (LogScale). Inputs were finite; this module produced it " in told.sentence
    )
    assert "(`log` of a tensor with min 0), and `last` (Linear) turned it into " in told.sentence
    assert told.fix == "`log` read 0: clamp its input, or add an epsilon"


def test_without_a_second_run_the_frames_lead_back_to_the_module_that_made_minus_inf() -> None:
    model = Then(changes=Does(lambda x: x.mul_(1)), rest=_logs())
    told = must_find(model, torch.randn(4, 8), mode="full")
    assert (told.module, told.origin, told.operation) == ("rest.block.scale", "here", "")
    assert ("`rest.last` (Linear) turned it into" in told.why, "float32" in told.fix) == (True, False)


@pytest.mark.parametrize("mode", MODES)
def test_minus_inf_between_two_modules_is_of_the_module_around_them(mode: Any) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.last = nn.ReLU(), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(torch.log(self.act(x)))

    told = must_find(Then(around=Around()), torch.randn(4, 8), mode=mode)
    assert (told.module, told.tensor, told.origin) == ("around.last", "input[0]", "between")
    assert (told.made_by, told.operation) == ("around", "log")
    assert "passed it on, and `around.last` (Linear) turned it into" in told.sentence


@pytest.mark.parametrize("mode", MODES)
def test_minus_inf_that_becomes_nothing_is_no_fault_whoever_made_it(mode: Any) -> None:
    logs = Then(act=nn.ReLU(), scale=LogScale())
    for after in (nn.Softmax(-1), nn.ReLU(), nn.ReLU(inplace=True), Does(torch.exp)):
        assert found(Then(logs=logs, after=after), torch.randn(4, 8).abs() * torch.arange(8), mode=mode) is None


@pytest.mark.parametrize("mode", MODES)
def test_a_softmax_of_a_row_that_is_all_masked_is_named_and_not_the_mask(mode: Any) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.soft = nn.Linear(8, 8), nn.Softmax(-1)

        def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> Any:
            q = self.q(x)
            return self.soft((q @ q.T).masked_fill(hidden, -INF)) @ q

    hidden = torch.ones(4, 4).triu(1).bool()
    assert found(Attends(), torch.randn(4, 8), hidden, mode=mode) is None
    hidden[2] = True
    told = must_find(Attends(), torch.randn(4, 8), hidden, mode=mode)
    assert (told.module, told.tensor, told.origin, "turned it into" in told.why) == ("soft", "output", "here", False)
    assert "as in masks; this module produced it (`softmax` of a row that is all -inf)." in told.sentence
    assert told.fix.startswith("leave at least one position unmasked in each row")


def test_two_masks_of_the_least_number_that_add_up_to_minus_inf_are_no_calculation() -> None:
    least = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), torch.finfo(torch.float32).min)
    add = Does(lambda x: x + least + least).eval()
    assert found(Then(add=add, soft=nn.Softmax(-1)), torch.randn(4, 4)) is None
    with torch.no_grad(), DebugUnderflowOverflow(add) as detector:
        add(torch.randn(4, 4))
        assert (detector.counts.batches, detector.counts.warnings) == (1, [])


def test_what_is_not_known_of_the_forward_is_not_said() -> None:
    class Writes(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            self.weight.data.mul_(0.5)
            return super().forward(x)

    model = Writes(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DebugUnderflowOverflow(model, gradients="each"), pytest.raises(OverflowDetected) as error:
        _step(model, optimizer, lambda out: _spoils_gradients(out).sum())
    sentence = error.value.detection.sentence
    assert (
        "It was produced in the forward, the loss or backward; which is unknown, as the forward cannot be replayed ("
        in sentence
    )
    assert "finite" not in sentence


def test_log_of_a_softmax_that_underflows_is_named_where_the_loss_shows_it() -> None:
    model = Then(linear=nn.Linear(2, 3), soft=nn.Softmax(-1), log=Does(torch.log)).half()
    with torch.no_grad():
        model.get_parameter("linear.weight").copy_(torch.tensor([[50.0, 0], [0, 0], [0, 0]]))
    with DebugUnderflowOverflow(model), pytest.raises(OverflowDetected) as error:
        nn.functional.nll_loss(model(torch.ones(1, 2).half()).float(), torch.tensor([1])).backward()
    assert (
        "finite, except for -inf in `output` of `log` (Does), which `log` of a tensor with min 0 produced from finite "
        "values: it came from there, or the script produced it between there and the loss."
        in error.value.detection.sentence
    )


def test_a_scaler_that_skips_step_after_step() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with DebugUnderflowOverflow(model) as detector, pytest.raises(OverflowDetected) as error:  # noqa: PT012
        for _ in range(30):
            optimizer.zero_grad()
            scaler.scale(_spoils_gradients(model(torch.ones(1, 2))).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    told = error.value.detection
    assert (told.tensor, told.origin, detector.counts.steps) == ("bias.grad", "backward", 0)
    assert "The GradScaler skipped 20 steps in a row." in told.hints


def test_a_traced_batch_that_overflows_does_not_keep_the_next_from_being_traced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Then(a=Sub())
    with DebugUnderflowOverflow(model, trace_batch_nums=[1, 3]), pytest.raises(OverflowDetected) as error:  # noqa: PT012
        for _ in range(5):
            model(torch.ones(1))
    out = capsys.readouterr().out
    assert (error.value.detection.batch, out.count("Starting batch")) == (3, 2)


def test_detect_overflow_says_once_what_is_run_twice(capsys: pytest.CaptureFixture[str]) -> None:
    def looks(x: torch.Tensor) -> torch.Tensor:
        assert detect_overflow(x / 0, "here")
        return x / 0

    assert must_find(Does(looks), torch.ones(1)).origin == "here"
    assert capsys.readouterr().out.count("here has infs") == 1


def test_the_advice_for_autocast_can_be_pasted() -> None:
    model = Then(first=nn.Linear(2, 2), big=nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model.get_parameter("first.weight").fill_(200.0)
        model.get_parameter("big.weight").fill_(300.0)
    seen: list[Detection] = []
    given = torch.full((1, 2), 1.0)
    with torch.autocast("cpu", dtype=torch.float16):
        with DebugUnderflowOverflow(model, on_detect=seen.append):
            model(given)
        (advice,) = [one for one in seen[0].hints if one.startswith("In float32")]
        exec(advice.partition(": ")[2], {"model": model, "torch": torch})
        assert model(given).isfinite().all()


def test_a_run_that_diverges_has_its_losses_told() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    with DebugUnderflowOverflow(model), pytest.raises(OverflowDetected) as error:  # noqa: PT012
        for _ in range(20):
            _step(model, optimizer, lambda out: out.square().sum())
    assert "lower the learning rate" in error.value.detection.hints[-1]


@pytest.mark.parametrize(
    ("does", "dtype", "fix"),
    [
        (lambda x: (x - 2).sqrt(), torch.float32, "an input of `sqrt` out of its range? clamp it"),
        (lambda x: x / (x - 1), torch.float32, "`div` by 0? clamp the divisor, or add an epsilon"),
        (lambda x: x * 1e30 * 1e30, torch.float32, "check the formula of this module and the size of its inputs"),
        (
            lambda x: x * 60000 * 2,
            torch.float16,
            "if the inputs of this module are near 65504, run it in bfloat16",
        ),
    ],
)
def test_the_fix_fits_the_operation_and_the_dtype(does: Callable[..., Any], dtype: torch.dtype, fix: str) -> None:
    assert must_find(Then(a=Does(does)), torch.ones(2, dtype=dtype)).fix.startswith(fix)


def test_a_batch_of_an_evaluation_is_said_to_be_one() -> None:
    assert "batch 0 (evaluation): " in must_find(Then(a=Sub()).eval(), torch.ones(1)).sentence
