"""What watches models, on those that load more of torch: compiled, of transformers, or trained in float16.

They are in one file, and so in one process of `make test`, as these imports take 1 to 2 s.
"""

# ruff: noqa: ANN401 - modules take and give anything

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from loops import each
from torch import nn

from distdiag import DebugUnderflowOverflow, OverflowDetected, sync_check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

INF = math.inf
HALF = torch.float16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x) * 1.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x: torch.Tensor, by: float = 1.0) -> Any:
        return self.b(self.a(x) * by)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile's own
@pytest.mark.parametrize("how", ["compiled", "method", "blocks"])
def test_a_compiled_model_stays_one_graph_and_is_judged_outside_of_it(how: str) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 4)
    bare = model(x)
    called: Any = model
    if how == "compiled":
        called = torch.compile(model, fullgraph=True, backend="eager")
    elif how == "method":
        model.compile(fullgraph=True, backend="eager")
    else:
        model.a.compile(fullgraph=True, backend="eager")
        model.b.compile(fullgraph=True, backend="eager")
    seen: list[Any] = []
    torch._dynamo.utils.counters.clear()
    with DebugUnderflowOverflow(called, on_detect=seen.append):
        assert torch.equal(called(x), bare)
        called(x, INF)
    assert [(one.module, one.tensor, one.origin) for one in seen] == [("b", "input[0]", "between")]
    assert not torch._dynamo.utils.counters["graph_break"]
    called(x, INF)
    assert len(seen) == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_the_argument_of_torch_compile_is_compiled_with_its_hooks_and_that_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DebugUnderflowOverflow(model) as detector:
        compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
        compiled(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        assert detector.counts.batches == 0
    assert "pass the compiled model to the detector" in capsys.readouterr().err


class Feeds(nn.Module):
    """The feed-forward of an mT5 block, as far as its numbers go."""

    def __init__(self) -> None:
        super().__init__()
        self.wi_0, self.wi_1, self.wo = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.wo(self.dropout(nn.functional.gelu(self.wi_0(x)) * self.wi_1(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.DenseReluDense, self.dropout = Feeds(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.dropout(self.DenseReluDense(x))


def test_a_block_that_overflows_in_dropout_reads_as_in_the_guide_of_transformers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": Layer()})["layer"].half()
    x = torch.linspace(20, 60, 64).reshape(8, 8).half()
    with torch.no_grad():
        wo = model.get_parameter("DenseReluDense.wo.weight")
        state = torch.get_rng_state()
        out = model.DenseReluDense(x)  # type: ignore[operator]
        torch.set_rng_state(state)
        wo.mul_(6.27e4 / out.abs().max())
    with DebugUnderflowOverflow(model), pytest.raises(OverflowDetected) as error:
        model(x)
    told = error.value.detection
    assert (told.module, told.module_class, told.tensor) == ("dropout", "Dropout", "output")
    assert "% of float16 max, `output` of `DenseReluDense" in told.hints[0]
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("Detected inf/nan during batch_number=0")
    heads = [line.strip() for line in lines[at:] if line.startswith(" " * 18)]
    assert heads == [
        *("DenseReluDense.wi_0 Linear", "DenseReluDense.wi_1 Linear", "DenseReluDense.dropout Dropout"),
        *("DenseReluDense.wo Linear", "DenseReluDense Feeds", "dropout Dropout"),
    ]
    last = lines[lines.index(" " * 18 + "dropout Dropout") :][:3]
    assert last[1].endswith(" input[0]")
    assert float(last[1][9:17]) == pytest.approx(6.27e4, rel=0.01)
    assert last[2] == "0.00e+00      inf output"


def llama(dtype: torch.dtype) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.1, **sizes))
    return model.to(dtype).train()


@pytest.mark.parametrize(("dtype", "mode"), [(torch.float16, "step"), (torch.bfloat16, "full")])
def test_deep_in_a_model_of_transformers(dtype: torch.dtype, mode: Any) -> None:
    words = torch.arange(16).reshape(2, 8)
    outs = []
    for watched in (False, True):
        model = llama(dtype)
        detector = DebugUnderflowOverflow(model, mode=mode) if watched else None
        outs.append([model(input_ids=words, labels=words).loss, model(input_ids=words).logits, torch.rand(2)])
        if detector is not None:
            assert detector.found == 0
            detector.detach()
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(1e4)
        model.get_parameter("model.layers.1.mlp.down_proj.weight").fill_(torch.finfo(dtype).max / 4)
    with DebugUnderflowOverflow(model, mode=mode), pytest.raises(OverflowDetected) as error:
        model(input_ids=words)
    told = error.value.detection
    assert (told.module, told.module_class) == ("model.layers.1.mlp.down_proj", "Linear")
    assert (told.tensor, told.origin) == ("output", "here")


def test_frames_of_a_model_of_transformers_are_those_of_its_own_detector(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.debug_utils import DebugUnderflowOverflow as Theirs

    model, words = llama(torch.float32).eval(), torch.arange(16).reshape(2, 8)
    with DebugUnderflowOverflow(model, trace_batch_nums=[0]), torch.no_grad():
        model(words)
    ours = capsys.readouterr().out
    Theirs(model, trace_batch_nums=[0])  # type: ignore[no-untyped-call]
    with torch.no_grad():
        model(words)
    theirs = capsys.readouterr().out
    heading = "*** Starting batch number=0 ***\nabs min  abs max  metadata\n"
    assert heading in theirs
    frames = [[one for one in text.split(heading)[1].splitlines() if one.strip()] for text in (ours, theirs)]
    # What theirs leaves out: buffers, what goes in by keyword, what comes out in a dict.
    missing = [line for line in frames[0] if line not in frames[1]]
    assert all("inv_freq" in line or "input['" in line or "output[" in line for line in missing), missing
    wrong = [line for line in frames[1] if line not in frames[0]]
    assert all(line.endswith((" not a tensor output", " not a tensor output[1]")) for line in wrong), wrong


def test_masks_of_a_model_of_transformers_are_no_fault_until_a_row_has_nothing_else() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["attn_implementation"] = "eager"
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).train()
    words, padding = torch.arange(16).reshape(2, 8), torch.ones(2, 8, dtype=torch.long)
    padding[0, :3] = 0
    mask = torch.full((2, 1, 8, 8), -INF).triu(1)
    with DebugUnderflowOverflow(model) as detector:
        for masked in (None, padding, mask):
            model(input_ids=words, labels=words, attention_mask=masked, use_cache=False).loss.backward()
        assert (detector.found, detector.counts.warnings) == (0, [])
        mask[0, 0, 2] = -INF
        with pytest.raises(OverflowDetected) as error:
            model(input_ids=words, attention_mask=mask, use_cache=False)
    told = error.value.detection
    assert (told.made_by, told.operation) == ("model.layers.0.self_attn", "softmax")
    assert "(`softmax` of a row that is all -inf)" in told.sentence


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_a_compiled_model_has_the_names_of_the_plain_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    names = []
    for made in (model, torch.compile(model)):
        sync_check(made, optimizer, save=str(tmp_path))
        entries = json.loads((tmp_path / "rank_0.json").read_text())["entries"]
        names.append([(entry["kind"], entry["name"]) for entry in entries])
    assert names[0] == names[1]


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.base.requires_grad_(requires_grad=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.b(self.a(x))


class Gamma(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch, self.gamma, self.head = nn.Linear(16, 16), nn.Parameter(torch.zeros(16)), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(x + self.gamma * self.branch(x))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))


def warnings(
    model: nn.Module,
    loss: Callable[[torch.Tensor], torch.Tensor],
    *,
    autocast: torch.dtype | None = None,
    steps: int = 9,
    lr: float = 1e-4,
    given: torch.Tensor | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> list[str]:
    """Train under a detector, and give what it warned of."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=lr)
    dtype = next(model.parameters()).dtype
    with DebugUnderflowOverflow(model) as detector:
        for _ in range(steps):
            optimizer.zero_grad()
            x = torch.randn(8, 16, dtype=dtype) if given is None else given
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                out = loss(model(x))
            (out if scaler is None else scaler.scale(out)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        assert (detector.found, detector.counts.off) == (0, "")
        return detector.counts.warnings


def tiny(out: torch.Tensor) -> torch.Tensor:
    return out.float().mean() * 1e-9


def mean_square(out: torch.Tensor) -> torch.Tensor:
    return out.float().square().mean()


def test_gradients_that_are_all_lost_under_autocast_are_told_with_the_scaler() -> None:
    (said,) = warnings(mlp(), tiny, autocast=HALF)
    assert said.startswith("step 1: all 4 gradients are exactly 0, as in the step before: nothing is learned. ")
    assert "they underflow: float16 has no number below 6e-08" in said
    assert "scaler = torch.amp.GradScaler('cpu'); scaler.scale(loss).backward()" in said


def test_with_weights_in_float16_which_no_scaler_takes_another_mend_is_told() -> None:
    (said,) = warnings(mlp().half(), tiny)
    assert "GradScaler with float32 weights, or bfloat16: model.to(torch.bfloat16)" in said


@pytest.mark.parametrize("case", ["a constant loss", "a clamped loss", "dead units"])
def test_a_float16_job_that_learns_nothing_for_another_reason_is_told_of_both(case: str) -> None:
    loss: Callable[[torch.Tensor], torch.Tensor] = {
        "a constant loss": lambda out: (out.float() * 0).sum() + 1,
        "a clamped loss": lambda out: out.float().clamp(min=100).mean(),
        "dead units": lambda out: (out * 0).sum(),
    }[case]
    (said,) = warnings(mlp().half(), loss)
    assert "Either the loss does not depend on the weights, or they underflow" in said


HEALTHY: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "lora": (lambda: Lora().half(), {}),
    "gamma": (lambda: Gamma().half(), {}),
    "lora, autocast": (Lora, {"autocast": HALF}),
    "gamma, autocast": (Gamma, {"autocast": HALF}),
    "bfloat16": (lambda: mlp().bfloat16(), {"loss": tiny, "lr": 1e9}),
    "bfloat16, autocast": (mlp, {"loss": tiny, "autocast": torch.bfloat16}),
    "float32": (mlp, {"loss": lambda out: out.float().mean() * 1e-30}),
    "a scaler": (mlp, {"loss": tiny, "autocast": HALF, "scaler": torch.amp.GradScaler("cpu")}),
    "an embedding": (
        lambda: nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 16)).half(),
        {"given": torch.arange(8)},
    ),
}


@each("case", HEALTHY)
def test_healthy_jobs_are_not_warned_of(case: str) -> None:
    make, how = HEALTHY[case]
    assert warnings(make(), how.get("loss", mean_square), **{k: v for k, v in how.items() if k != "loss"}) == []
