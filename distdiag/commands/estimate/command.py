"""`distdiag estimate`: its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.options import JsonOpt, StrictOpt  # noqa: TC001 - Typer reads the annotations

if TYPE_CHECKING:
    from distdiag.commands.estimate.diagnose import Estimate
    from distdiag.report import Report


def estimate(
    batch: Annotated[int, typer.Option(min=1, max=10**9, metavar="N", help="Global batch: sequences per step.")],
    seq: Annotated[int, typer.Option(min=1, max=10**9, metavar="N", help="Tokens per sequence.")],
    step_time: Annotated[float, typer.Option(min=1e-6, max=1e7, metavar="SECONDS", help="Time of one optimizer step.")],
    gpus: Annotated[str, typer.Option(metavar="N", help="GPUs on all nodes: 64 (nodes of 8), or 16x4, 16 nodes of 4.")],
    params: Annotated[str, typer.Option(metavar="N", help="Parameters of the model: 7B. [default: by --config]")] = "",
    config: Annotated[str, typer.Option(metavar="FILE", help="Shape from a Hugging Face config.json.")] = "",
    gpu: Annotated[str, typer.Option(metavar="NAME", help="GPU model, to compare with its peak: 'A100 SXM'.")] = "",
    recompute: Annotated[bool, typer.Option("--recompute", help="Activations are recomputed in backward.")] = False,
    layout: Annotated[
        str,
        typer.Option(metavar="LIST", help="Parallelism: tp=4,pp=2,zero=3 (FSDP),accumulate=8. [default: DDP]"),
    ] = "",
    busbw: Annotated[
        float | None, typer.Option(min=1e-3, max=1e6, metavar="GB/s", help="Busbw of allreduce-bench between nodes.")
    ] = None,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
) -> None:
    """Estimate the TFLOPS of a training run and the network that it needs.

    With --config, count operations from the shape of the model (gates, K and V heads, experts), and add the traffic of
    TP and PP.

    Exit status: 0 computed, 1 the numbers cannot be right, or the network is too slow, 2 wrong usage,
    130 interrupted.

    \b
    Examples:
      distdiag estimate --params 7B --batch 256 --seq 4096 --step-time 14 --gpus 8
      distdiag estimate --params 70B --batch 512 --seq 4096 --step-time 31 \\
        --gpus 16x8 --gpu "H100 SXM" --layout zero=3 --recompute --busbw 42
      distdiag estimate --config config.json --batch 256 --seq 4096 \\
        --step-time 20 --gpus 8 --gpu "NVIDIA H100 80GB HBM3"
    """
    from distdiag.commands.estimate.view import estimate_view
    from distdiag.output import Output, deliver

    def run() -> Report[Estimate]:
        from distdiag.commands.estimate import inputs
        from distdiag.commands.estimate.diagnose import diagnose

        given: dict[str, object] = {"batch": batch, "seq": seq, "step_s": step_time, "recompute": recompute}
        asked = inputs.read_run(given, params, config, gpus, layout)
        return diagnose(asked, inputs.find_peak(gpu), busbw * 1e9 if busbw else None)

    deliver("estimate", run, estimate_view, Output(json=as_json, strict=strict))
