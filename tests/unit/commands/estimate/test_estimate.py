"""The arithmetic of `distdiag estimate` against figures that others published."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from loops import each
from support_warm import distdiag

from distdiag.commands.estimate.arithmetic import Run, tflops, traffic
from distdiag.commands.estimate.diagnose import diagnose
from distdiag.knowledge.peaks import Peak, find_peaks, peaks
from distdiag.report import Level

if TYPE_CHECKING:
    from pathlib import Path

BLOOM = Run(
    params=176.2e9,
    batch=2048,
    seq=2048,
    step_s=105.22,
    gpus=384,
    hidden=14336,
    layers=70,
    vocab=250880,
    tp=4,
    pp=12,
    recompute=True,
)
TYPED = ("estimate", "--json", "--params", "176.2B", "--batch", "2048", "--seq", "2048", "--step-time", "105.22")
GPUS = ("--gpus", "384", "--recompute")
BLOOM_CONFIG = {"model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "vocab_size": 250880, "n_head": 112,
                "tie_word_embeddings": True}  # fmt: skip


def test_bloom_176b_as_its_log_reports_it() -> None:
    # bigscience, train/tr11-176B-ml/chronicles.md: iteration 12695 took 105.22 s, "TFLOPs: 149.02"
    assert tflops(BLOOM, recompute=True) == pytest.approx(149.02, rel=0.01)


def test_bloom_on_24_nodes_as_its_log_reports_it() -> None:
    # the same project, 192 GPUs: 221.87 s, "TFLOPs: 141.34"
    run = replace(BLOOM, step_s=221.87, gpus=192)
    assert tflops(run, recompute=True) == pytest.approx(141.34, rel=0.01)


def test_training_times_that_megatron_published() -> None:
    # arXiv:2104.04473, section 5.1: GPT-3 at 140 TFLOPS on 1024 GPUs takes 34 days for 300e9 tokens, and a model of
    # 1e12 parameters at 163 TFLOPS on 3072 GPUs takes 84 days for 450e9 tokens
    for params, tokens, gpus, speed, days in ((175e9, 300e9, 1024, 140, 34), (1e12, 450e9, 3072, 163, 84)):
        step_s = 86400.0 * days
        run = Run(params=params, batch=int(tokens), seq=1, step_s=step_s, gpus=gpus)
        assert tflops(run, recompute=True) == pytest.approx(speed, rel=0.01)


def test_the_worked_example_of_the_training_handbook() -> None:
    # llm_training_handbook, throughput: 52B, 64 GPUs, a global batch of 1024 x 2048 tokens in 127 s, checkpointing
    run = Run(params=52e9, batch=1024, seq=2048, step_s=127, gpus=64)
    assert tflops(run, recompute=True) == pytest.approx(52 * 4 * 2 * 2048 * 1024 / (127 * 64 * 1e3), rel=1e-6)
    assert tflops(run, recompute=True) == pytest.approx(107.3, rel=0.01)


def test_recomputation_is_a_third_more() -> None:
    assert tflops(IDEFICS, recompute=True) / tflops(IDEFICS, recompute=False) == pytest.approx(4 / 3)


def test_zero3_sends_one_and_a_half_times_ddp() -> None:
    sent = {row.kind: row.bytes_per_step for row in traffic(replace(BLOOM, tp=1, pp=1))}
    assert sent["ZeRO-1"] == sent["ZeRO-2"] == sent["DDP"]
    assert sent["ZeRO-3"] == pytest.approx(1.5 * sent["DDP"])
    assert sent["DDP"] == pytest.approx(2 * 2 * 176.2e9 * 383 / 384)


def test_zero3_at_400_gbps() -> None:
    # 3 x 2 bytes x 176.2e9 at 50 GB/s, and the rule that 400 Gb/s is fine and 100 Gb/s is not
    run = replace(BLOOM, tp=1, pp=1, zero=3)
    row = next(row for row in traffic(run) if row.in_use)
    assert row.bytes_per_step / 50e9 == pytest.approx(3 * 2 * 176.2 / 50, rel=0.01)
    assert not diagnose(run, None, 50e9).findings
    slow = diagnose(run, None, 12.5e9).findings
    assert [finding.id for finding in slow] == ["estimate.network-bound"]
    too_slow = diagnose(run, None, 1e9)
    assert (too_slow.findings[-1].id, too_slow.summary) == ("estimate.network-too-slow", too_slow.findings[-1].title)
    assert too_slow.summary.startswith("the traffic of a step takes 1054 s, longer than the step itself (105.22 s)")


IDEFICS = Run(params=80e9, batch=3584, seq=1024, step_s=49, gpus=512, zero=3, recompute=True)


@pytest.mark.parametrize(("gb_per_s", "seconds"), [(42.5, 11.3), (8.5, 56.5), (212, 2.26)])
def test_zero3_traffic_of_idefics_80b_as_published(gb_per_s: float, seconds: float) -> None:
    # ml-engineering, training/model-parallelism: 3 x 2 x 80 / 42.5 s at 340 Gb/s between nodes, a fifth, and five times
    (row,) = (row for row in traffic(IDEFICS) if row.in_use)
    assert row.node_bytes_per_step / (gb_per_s * 1e9) == pytest.approx(seconds, rel=0.01)


def test_computation_of_idefics_80b_as_published() -> None:
    # the same page: 4 x 2 x 80 x 1024 x 3584 / (512 x 1e3 x 250) = 18 s, and 51 s at the 90 TFLOPS of its log
    for tflops_of_card, seconds in ((250, 18.35), (90, 51)):
        card = Peak(name="", tflops=2 * tflops_of_card, source="")
        assert diagnose(IDEFICS, card, None).data.compute_s == pytest.approx(seconds, rel=0.01)
    assert tflops(IDEFICS, recompute=True) == pytest.approx(90, rel=0.05)


def test_nodes_of_four_gpus_share_less() -> None:
    report = _estimate("--params", "7B", "--gpus", "16x4", "--layout", "zero=3,accumulate=2")
    run = report["data"]["run"]
    assert (run["gpus"], run["gpus_per_node"], run["zero"], run["accumulate"]) == (64, 4, 3, 2)


def test_data_parallel_groups_of_a_node_share_its_network() -> None:
    run = replace(BLOOM, tp=8, pp=1, gpus=64, gpus_per_node=8)
    rows = {row.kind: row for row in traffic(run)}
    assert rows["DDP"].node_bytes_per_step == 8 * rows["DDP"].bytes_per_step
    assert rows["TP=8"].within_node
    alone = {row.kind: row for row in traffic(replace(run, tp=1))}["DDP"]
    # The same gradients leave each node, up to (dp - 1) / dp.
    assert rows["DDP"].node_bytes_per_step == pytest.approx(alone.node_bytes_per_step, rel=0.15)
    on_one_node = {row.kind: row for row in traffic(replace(run, gpus=8))}
    assert on_one_node["DDP"].sharing == 1


def test_accumulate_cost_zero3_but_not_ddp() -> None:
    one, four = (
        {row.kind: row.bytes_per_step for row in traffic(replace(BLOOM, accumulate=number))} for number in (1, 4)
    )
    assert four["ZeRO-3"] == 4 * one["ZeRO-3"]
    assert four["DDP"] == one["DDP"]


def test_tensor_parallel_traffic_per_layer_and_token() -> None:
    # arXiv:2104.04473, section 3.2: 8 b s h (t-1)/t values per layer and micro-batch, without recomputation
    run = replace(BLOOM, tp=8, pp=1, layers=1, gpus=8, recompute=False)
    row = next(row for row in traffic(run) if row.kind == "TP=8")
    assert row.bytes_per_step == pytest.approx(8 * run.batch * run.seq * 14336 * 7 / 8 * 2)


def test_a_tp_group_over_nodes_is_warned_of() -> None:
    ids = [finding.id for finding in diagnose(replace(BLOOM, tp=16), None, None).findings]
    assert ids == ["estimate.tp-spans-nodes"]
    assert not diagnose(replace(BLOOM, tp=8), None, None).findings
    (finding,) = diagnose(replace(BLOOM, tp=6), None, None).findings
    assert (finding.id, finding.fix and finding.fix.text[:10]) == ("estimate.tp-spans-nodes", "use tp=4, ")
    assert not diagnose(replace(BLOOM, tp=6, pp=1, gpus=6), None, None).findings


def test_every_peak_has_a_source_and_its_own_name() -> None:
    assert len({peak.name for peak in peaks()}) == len(peaks())
    assert all(peak.source and peak.tflops > 0 for peak in peaks())
    assert [peak.name for peak in find_peaks("B200")] == ["B200"]
    assert all(1.95 < peak.sparse_tflops / peak.tflops < 2.05 for peak in peaks() if peak.sparse_tflops)


def test_the_command_judges_bloom(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BLOOM_CONFIG))
    shape = ("--config", str(tmp_path / "config.json"))
    result = distdiag(*TYPED, *GPUS, *shape, "--gpu", "A100", "--layout", "tp=4,pp=12")
    data = result.report["data"]
    assert result.code == 0
    assert data["speed"]["hardware"] == pytest.approx(149.02, rel=0.01)
    assert data["speed"]["percent_of_peak"] == pytest.approx(47.8, rel=0.01)
    assert result.report["findings"] == []


def test_a_slow_run_is_told_that_half_of_the_peak_is_usual() -> None:
    (peak,) = find_peaks("A100 SXM")
    findings = diagnose(replace(BLOOM, step_s=200), peak, None).findings
    assert [finding.id for finding in findings] == ["estimate.below-half-of-peak"]


def test_a_tp_group_within_a_node_does_not_load_the_network() -> None:
    rows = {row.kind: row.within_node for row in traffic(BLOOM)}
    assert rows["TP=4"]
    assert not rows["PP=12"]
    assert not {row.kind: row.within_node for row in traffic(replace(BLOOM, tp=16, pp=1))}["TP=16"]


def test_a_step_faster_than_the_card_is_not_believed() -> None:
    result = distdiag(*TYPED[:-1], "10", *GPUS, "--gpu", "A100")
    assert result.code == 1
    assert [finding["id"] for finding in result.report["findings"]] == ["estimate.above-peak"]


@each(
    "more, says",
    [
        (("--gpu", "H100"), "several cards match"),
        (("--gpu", "Z80"), "no such card"),
        (("--layout", "tp=5"), "are not a multiple"),
        (("--layout", "tp=4"), "need the shape"),
        (("--layout", "tp"), "not a layout"),
        (("--layout", "zero=4"), "not a layout"),
        (("--gpus", "4x0"), "not a number of GPUs"),
        (("--busbw", "fast"), "not a valid number"),
    ],
)
def test_wrong_usage_names_the_option(more: tuple[str, ...], says: str) -> None:
    result = distdiag(*TYPED, *GPUS, *more)
    assert result.code == 2
    assert says in result.err


QWEN = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def _estimate(*words: str) -> dict[str, Any]:
    run = ("--batch", "256", "--seq", "4096", "--step-time", "20", "--gpus", "8", "--json")
    done = distdiag("estimate", *run, *words)
    assert done.code in (0, 1), done.err
    return done.report


def test_the_shape_of_a_hugging_face_config_counts_gates_and_shared_heads(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN))
    report = _estimate("--params", "7.62B", "--config", str(config), "--gpu", "NVIDIA H100 80GB HBM3")
    # 7.615e9 weights by the model card, of which 0.545e9 are the embedding, which no product uses.
    per_token = 6 * (7.615e9 - 0.545e9) + 12 * 28 * 3584 * 4096
    assert report["data"]["speed"]["model"] == pytest.approx(per_token * 256 * 4096 / (20 * 8 * 1e12), rel=0.005)
    assert report["data"]["peak"]["name"] == "H100 SXM"
    assert not [each for each in report["findings"] if each["id"] == "estimate.shape-contradicts-params"]
    # Without --params: those of the shape.
    other = _estimate("--config", str(config))
    assert other["data"]["run"]["params"] == pytest.approx(7.615e9, rel=0.005)
    assert other["data"]["speed"]["model"] == report["data"]["speed"]["model"]


def test_palm_has_the_speed_of_its_paper() -> None:
    # arXiv:2204.02311, appendix B: 238.3e3 tokens/s on 6144 TPU v4 (275 TFLOPS) are 46.2%.
    palm = Run(
        params=540.35e9,
        batch=2048,
        seq=2048,
        step_s=2048 * 2048 / 238.3e3,
        gpus=6144,
        hidden=18432,
        layers=118,
        vocab=256000,
        ffn=4 * 18432,
        heads=48,
        kv_heads=1,
        head_dim=256,
        gated=True,
        tied=True,
    )
    assert palm.params_of_shape == pytest.approx(540.35e9, rel=0.001)
    assert tflops(palm, recompute=False) == pytest.approx(0.462 * 275, rel=0.005)


def test_a_shape_that_contradicts_the_parameters_is_a_warning_and_experts_count_where_active(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({name: QWEN[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")}))
    report = _estimate("--params", "20B", "--config", str(config))
    assert [each["id"] for each in report["findings"]] == ["estimate.shape-contradicts-params"]
    config.write_text(json.dumps({name: value for name, value in QWEN.items() if name != "vocab_size"}))
    (found,) = _estimate("--params", "1.5B", "--config", str(config))["findings"]
    assert found["title"] == "the shape has at least 6.525e9 parameters, --params says 1.5e9"
    assert not _estimate("--params", "7.62B", "--config", str(config))["findings"]
    mixtral = {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
               "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
               "num_experts_per_tok": 2}  # fmt: skip
    config.write_text(json.dumps(mixtral))
    by_shape = _estimate("--params", "46.7B", "--config", str(config))
    assert not by_shape["findings"]
    by_params = _estimate("--params", "12.9B")
    # By the shape also the attention, which is 5% here.
    assert by_shape["data"]["speed"]["model"] == pytest.approx(1.06 * by_params["data"]["speed"]["model"], rel=0.03)


@each(
    "printed, name",
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe"),
        ("Tesla V100-SXM2-32GB", "V100 SXM2"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_gpus_as_nvidia_smi_prints_them(printed: str, name: str) -> None:
    assert [peak.name for peak in find_peaks(printed)] == [name]


@pytest.mark.parametrize(("micro", "level", "percent"), [(128, Level.INFO, "8%"), (12, Level.WARN, "48%")])
def test_the_bubble_of_a_pipeline_follows_from_its_micro_batches(micro: int, level: Level, percent: str) -> None:
    found = {str(finding.id): finding for finding in diagnose(replace(BLOOM, accumulate=micro), None, None).findings}
    bubble = found["estimate.pipeline-bubble"]
    assert (bubble.level, percent in bubble.title) == (level, True), bubble.title
    assert "estimate.pipeline-bubble" not in {each.id for each in diagnose(BLOOM, None, None).findings}
