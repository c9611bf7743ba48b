"""`distdiag estimate`: from what is typed to the report."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.options import JsonOpt, StrictOpt  # noqa: TC001 - Typer reads the annotations

if TYPE_CHECKING:
    from distdiag.commands.estimate.arithmetic import Run
    from distdiag.commands.estimate.diagnose import Estimate, Network
    from distdiag.knowledge.peaks import Peak
    from distdiag.report import Report

_LONGEST_READ_S = 120.0
_MOST_BYTES = 64 * 2**20
_MOST_RATE = 1e18
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def estimate(
    params: Annotated[str, typer.Option(metavar="N", help="Parameters of the model: 7B, 350M.")],
    batch: Annotated[int, typer.Option(min=1, max=10**9, metavar="N", help="Global batch: sequences per step.")],
    seq: Annotated[int, typer.Option(min=1, max=10**9, metavar="N", help="Tokens per sequence.")],
    step_time: Annotated[float, typer.Option(min=1e-6, max=1e7, metavar="SECONDS", help="Time of one optimizer step.")],
    gpus: Annotated[int, typer.Option(min=1, max=10**7, metavar="N", help="GPUs on all nodes.")],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="GPU model, to compare with its peak: 'A100 SXM'.")] = "",
    recompute: Annotated[bool, typer.Option("--recompute", help="Activations are recomputed in backward.")] = False,
    hidden: Annotated[int, typer.Option(min=0, max=10**7, metavar="N", help="Hidden size.")] = 0,
    layers: Annotated[int, typer.Option(min=0, max=10**6, metavar="N", help="Transformer layers.")] = 0,
    vocab: Annotated[int, typer.Option(min=0, max=10**8, metavar="N", help="Vocabulary size.")] = 0,
    config: Annotated[str, typer.Option(metavar="FILE", help="Shape from a Hugging Face config.json.")] = "",
    ffn: Annotated[int, typer.Option(min=0, max=10**8, metavar="N", help="Feed-forward size. [default: 4 hidden]")] = 0,
    heads: Annotated[int, typer.Option(min=0, max=10**6, metavar="N", help="Attention heads.")] = 0,
    kv_heads: Annotated[int, typer.Option(min=0, max=10**6, metavar="N", help="Heads of K and V (GQA).")] = 0,
    head_dim: Annotated[int, typer.Option(min=0, max=10**5, metavar="N", help="Size of a head.")] = 0,
    gated: Annotated[bool, typer.Option("--gated", help="The feed-forward has a gate (SwiGLU): 3 matrices.")] = False,
    active_params: Annotated[
        str, typer.Option(metavar="N", help="Parameters that a token uses, of a mixture of experts: 37B.")
    ] = "",
    tp: Annotated[int, typer.Option(min=1, max=10**6, metavar="N", help="Tensor-parallel size.")] = 1,
    pp: Annotated[int, typer.Option(min=1, max=10**6, metavar="N", help="Pipeline-parallel size.")] = 1,
    zero: Annotated[int, typer.Option(min=0, max=3, metavar="STAGE", help="ZeRO stage (FSDP is 3); 0 is DDP.")] = 0,
    micro_batches: Annotated[int, typer.Option(min=1, max=10**6, metavar="N", help="Gradient accumulation steps.")] = 1,
    bytes_per_value: Annotated[
        int, typer.Option(min=1, max=8, metavar="N", help="Bytes per value sent: 2 for bfloat16.")
    ] = 2,
    gpus_per_node: Annotated[int, typer.Option(min=1, max=1024, metavar="N", help="GPUs per node.")] = 8,
    bench: Annotated[
        str, typer.Option(metavar="PATH", help="Measured busbw: folder of allreduce-bench --save, or its --json.")
    ] = "",
    busbw: Annotated[
        float, typer.Option(min=0, max=1e6, metavar="GB/s", help="Busbw as a number, if you know it.")
    ] = 0.0,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
) -> None:
    """Estimate the TFLOPS of a training run and the network that it needs.

    With --config, or --hidden and --layers, count operations from the shape of the model, and add the traffic of TP
    and PP and the init std.

    Exit status: 0 computed, 1 the numbers cannot be right, or the network is too slow, 2 wrong usage, 3 --bench cannot
    be judged, 130 interrupted.

    \b
    Examples:
      distdiag estimate --params 7B --batch 256 --seq 4096 --step-time 14 --gpus 8
      distdiag estimate --params 70B --batch 512 --seq 4096 --step-time 31 \\
        --gpus 128 --gpu "H100 SXM" --zero 3 --recompute --bench before
      distdiag estimate --params 7.6B --config config.json --batch 256 \\
        --seq 4096 --step-time 20 --gpus 8 --gpu "NVIDIA H100 80GB HBM3"
    """
    from distdiag.commands.estimate.diagnose import COMMAND
    from distdiag.commands.estimate.view import estimate_view
    from distdiag.output import Output, deliver

    def run() -> Report[Estimate]:
        from distdiag.commands.estimate.arithmetic import Run
        from distdiag.commands.estimate.diagnose import diagnose
        from distdiag.commands.estimate.model_config import Shape, read_config
        from distdiag.errors import UsageError

        shape = Shape(
            hidden=hidden,
            layers=layers,
            vocab=vocab,
            ffn=ffn,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            gated=gated,
        )
        if config:
            if shape != Shape():
                raise UsageError("--config gives the shape", hint="leave out --hidden, --layers and the like")
            shape = read_config(config)
        asked = Run(
            params=_parse_params(params),
            active_params=_parse_params(active_params) if active_params else 0,
            batch=batch,
            seq=seq,
            step_s=step_time,
            gpus=gpus,
            gpus_per_node=gpus_per_node,
            **asdict(shape),
            tp=tp,
            pp=pp,
            zero=zero,
            micro_batches=micro_batches,
            recompute=recompute,
            bytes_per_value=bytes_per_value,
        )
        _check(asked)
        return diagnose(asked, _peak(gpu), _network(bench, busbw))

    deliver(COMMAND, run, estimate_view, Output(json=as_json, strict=strict))


def _parse_params(text: str) -> float:
    from distdiag.errors import UsageError

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbt]?)\s*", text, re.IGNORECASE)
    number = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if not 0 < number < 1e18:
        raise UsageError(f"--params {text}: not a number of parameters", hint="write 176B, 350M or 1.3e9")
    return number


def _check(run: Run) -> None:
    from distdiag.errors import UsageError

    if run.gpus % (run.tp * run.pp):
        raise UsageError(
            f"--gpus {run.gpus} is not a multiple of --tp {run.tp} x --pp {run.pp}", hint="count the GPUs of all nodes"
        )
    if (run.tp > 1 or run.pp > 1) and not (run.hidden and run.layers):
        raise UsageError("--tp and --pp need the shape of the model", hint="add --config, or --hidden and --layers")


def _peak(gpu: str) -> Peak | None:
    from distdiag.errors import UsageError
    from distdiag.knowledge.peaks import find_peaks, peaks

    if not gpu:
        return None
    found = find_peaks(gpu)
    if len({peak.tflops for peak in found}) == 1:
        return found[0]
    names = ", ".join(peak.name for peak in found or peaks())
    raise UsageError(f"--gpu {gpu}: {'several cards match' if found else 'no such card'}", hint=f"use one of: {names}")


def _network(bench: str, busbw: float) -> Network | None:
    from distdiag.commands.estimate.diagnose import Network
    from distdiag.errors import UsageError

    if bench and busbw:
        raise UsageError("--bench and --busbw are mutually exclusive", hint="pass one of them")
    if bench:
        return _measured(bench)
    return Network(busbw_bytes_per_s=busbw * 1e9, origin="from --busbw") if busbw else None


@dataclass(frozen=True)
class _Row:
    """One line of allreduce-bench, as far as it is used here."""

    op: str
    size_bytes: int
    busbw_bytes_per_s: float | None = None


@dataclass(frozen=True)
class _Bench:
    world_size: int
    nodes: int
    results: list[_Row]


@dataclass(frozen=True)
class _Document:
    data: _Bench


def _measured(path: str) -> Network:
    """Return the busbw of the largest all_reduce of a run of allreduce-bench. Raises UsageError, DistdiagError."""
    from distdiag.commands.estimate.diagnose import Network
    from distdiag.diagnosis.wording import counted, format_size
    from distdiag.errors import UsageError

    bench = _document(path).data
    rows = [row for row in bench.results if row.op == "all_reduce" and 0 < (row.busbw_bytes_per_s or 0) < _MOST_RATE]
    largest = max(rows, key=lambda row: row.size_bytes, default=None)
    if largest is None or largest.busbw_bytes_per_s is None or not 0 < largest.size_bytes < _MOST_RATE:
        raise UsageError(f"{path} has no all_reduce of allreduce-bench", hint="distdiag allreduce-bench --save DIR")
    origin = f"all_reduce of {format_size(largest.size_bytes)}, {bench.world_size} ranks on "
    return Network(
        busbw_bytes_per_s=largest.busbw_bytes_per_s, origin=origin + counted(bench.nodes, "node"), nodes=bench.nodes
    )


def _document(path: str) -> _Document:
    import msgspec

    from distdiag.errors import DistdiagError, UsageError
    from distdiag.facts import programs

    if not os.path.exists(path):
        raise UsageError(f"{path} does not exist", hint="distdiag allreduce-bench --save DIR")
    try:
        if os.path.isdir(path):  # raw records of a run: allreduce-bench judges them
            argv = [sys.executable, "-m", "distdiag", "allreduce-bench", "--from", path, "--json"]
            text = programs.run(argv, timeout_s=_LONGEST_READ_S).stdout.decode("utf-8", "replace")
        else:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(_MOST_BYTES)
        return msgspec.json.decode(text, type=_Document)
    except (OSError, programs.CannotRun) as error:
        raise DistdiagError(f"cannot read {path}: {error}", hint="choose a readable file") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not from allreduce-bench", hint="distdiag allreduce-bench --save DIR") from error
