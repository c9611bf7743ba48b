"""`distdiag estimate`: its options, and the busbw that an earlier allreduce-bench measured."""

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
_LAYOUT = {"tp": (1, 10**6), "pp": (1, 10**6), "zero": (0, 3), "accumulate": (1, 10**6)}
"""Words of --layout, each with the least and the greatest number."""
_GPUS_PER_NODE = 8


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
        str, typer.Option(metavar="GB/s", help="Busbw between nodes; or what allreduce-bench saved: DIR or its --json.")
    ] = "",
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
) -> None:
    """Estimate the TFLOPS of a training run and the network that it needs.

    With --config, count operations from the shape of the model (gates, K and V heads, experts), and add the traffic of
    TP and PP and the init std.

    Exit status: 0 computed, 1 the numbers cannot be right, or the network is too slow, 2 wrong usage, 3 the measured
    busbw cannot be judged, 130 interrupted.

    \b
    Examples:
      distdiag estimate --params 7B --batch 256 --seq 4096 --step-time 14 --gpus 8
      distdiag estimate --params 70B --batch 512 --seq 4096 --step-time 31 \\
        --gpus 16x8 --gpu "H100 SXM" --layout zero=3 --recompute --busbw before
      distdiag estimate --config config.json --batch 256 --seq 4096 \\
        --step-time 20 --gpus 8 --gpu "NVIDIA H100 80GB HBM3"
    """
    from distdiag.commands.estimate.diagnose import COMMAND
    from distdiag.commands.estimate.view import estimate_view
    from distdiag.output import Output, deliver

    def run() -> Report[Estimate]:
        from distdiag.commands.estimate.arithmetic import Run
        from distdiag.commands.estimate.diagnose import diagnose
        from distdiag.commands.estimate.model_config import Shape, read_config

        count, per_node = _parse_gpus(gpus)
        sizes = _parse_layout(layout)
        asked = Run(
            params=_parse_params(params) if params else 0.0,
            batch=batch,
            seq=seq,
            step_s=step_time,
            gpus=count,
            gpus_per_node=per_node,
            recompute=recompute,
            tp=sizes["tp"],
            pp=sizes["pp"],
            zero=sizes["zero"],
            accumulate=sizes["accumulate"],
            **asdict(read_config(config) if config else Shape()),
        )
        return diagnose(_checked(asked), _peak(gpu), _network(busbw))

    deliver(COMMAND, run, estimate_view, Output(json=as_json, strict=strict))


def _parse_params(text: str) -> float:
    from distdiag.errors import UsageError

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbt]?)\s*", text, re.IGNORECASE)
    number = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if not 0 < number < 1e18:
        raise UsageError(f"--params {text}: not a number of parameters", hint="write 176B, 350M or 1.3e9")
    return number


def _parse_gpus(text: str) -> tuple[int, int]:
    """Return the GPUs in all and of a node, of "64" or "16x4". Raises UsageError."""
    from distdiag.errors import UsageError

    match = re.fullmatch(r"([1-9]\d{0,6})(?:x([1-9]\d{0,3}))?", text)
    if match is None:
        raise UsageError(f"--gpus {text}: not a number of GPUs", hint="write 64, or 16x4 for 16 nodes of 4")
    return int(match[1]) * int(match[2] or 1), int(match[2] or _GPUS_PER_NODE)


def _parse_layout(text: str) -> dict[str, int]:
    """Return the sizes in "tp=4,zero=3", the least of those not given. Raises UsageError."""
    from distdiag.errors import UsageError

    found = {name: least for name, (least, _) in _LAYOUT.items()}
    for word in filter(None, text.split(",")):
        name, _, number = word.partition("=")
        least, most = _LAYOUT.get(name, (0, -1))
        if not re.fullmatch(r"\d{1,7}", number, re.ASCII) or not least <= int(number) <= most:
            raise UsageError(f"--layout {word}: not a layout", hint="write --layout tp=4,pp=2,zero=1,accumulate=8")
        found[name] = int(number)
    return found


def _checked(run: Run) -> Run:
    """Return the run, with the parameters of its shape if none were given. Raises UsageError."""
    from dataclasses import replace

    from distdiag.errors import UsageError

    if run.gpus % (run.tp * run.pp):
        raise UsageError(
            f"{run.gpus} GPUs are not a multiple of tp={run.tp} x pp={run.pp}", hint="see --gpus, --layout"
        )
    if (run.tp > 1 or run.pp > 1) and not run.hidden:
        raise UsageError("tp and pp need the shape of the model", hint="add --config config.json")
    if not run.params and not run.params_of_shape:
        raise UsageError("the size of the model is not known", hint="add --params 7B, or --config config.json")
    return replace(run, params=run.params or run.params_of_shape)


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


@dataclass(frozen=True)
class _Row:
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
    """The part of allreduce-bench's JSON that is used here."""

    data: _Bench


def _network(text: str) -> Network | None:
    """Return the busbw that was typed, or of the largest all_reduce of a run. Raises UsageError, DistdiagError."""
    from distdiag.commands.estimate.diagnose import Network
    from distdiag.diagnosis.wording import counted, format_size
    from distdiag.errors import UsageError

    if not text:
        return None
    if re.fullmatch(r"\d{1,6}(\.\d+)?", text, re.ASCII) and float(text) > 0:
        return Network(busbw_bytes_per_s=float(text) * 1e9, origin="from --busbw")
    bench = _document(text).data
    rows = [row for row in bench.results if row.op == "all_reduce" and 0 < (row.busbw_bytes_per_s or 0) < _MOST_RATE]
    largest = max(rows, key=lambda row: row.size_bytes, default=None)
    if largest is None or largest.busbw_bytes_per_s is None or not 0 < largest.size_bytes < _MOST_RATE:
        raise UsageError(f"{text} has no all_reduce of allreduce-bench", hint="distdiag allreduce-bench --save DIR")
    return Network(
        busbw_bytes_per_s=largest.busbw_bytes_per_s,
        origin=f"all_reduce of {format_size(largest.size_bytes)}, {bench.world_size} ranks on "
        + counted(bench.nodes, "node"),
        nodes=bench.nodes,
    )


def _document(path: str) -> _Document:
    import msgspec

    from distdiag.errors import DistdiagError, UsageError
    from distdiag.facts import programs

    hint = "give GB/s as a number, or what distdiag allreduce-bench --save DIR wrote"
    if not os.path.exists(path):
        raise UsageError(f"--busbw {path}: neither a number nor a file", hint=hint)
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
        raise UsageError(f"{path} is not from allreduce-bench", hint=hint) from error
