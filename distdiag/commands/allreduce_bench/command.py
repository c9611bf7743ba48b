"""Command line of allreduce-bench."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.allreduce_bench.formulas import ITEM_BYTES, OPS
from distdiag.commands.allreduce_bench.types import FaultKind, Request, Stat
from distdiag.errors import UsageError
from distdiag.launch.options import (  # noqa: TC001 - on_hosts reads the annotations
    BackendOpt,
    DeviceOpt,
    IfnameOpt,
    MasterAddrOpt,
    MasterPortOpt,
    NcclDebugOpt,
    NprocOpt,
)
from distdiag.launch.types import Backend, Device, Fault
from distdiag.options import FromOpt, HtmlOpt, JsonOpt, SaveOpt, StallOpt, StrictOpt, called_as, on_hosts

COMMAND = "allreduce-bench"


def parse_ops(text: str) -> tuple[str, ...]:
    """Parse comma-separated collectives, or all. Raises UsageError."""
    words = tuple(dict.fromkeys(word.strip().replace("-", "_") for word in text.split(",")))
    if words == ("all",):
        return OPS
    for word in words:
        if word not in OPS:
            raise UsageError(f"--op {word!r}: unknown collective", hint=f"choose from {', '.join(OPS)}, or all")
    return words


def parse_fault(text: str) -> Fault:
    """Parse FAULT:RANK or FAULT:RANK@ROW. Raises UsageError."""
    place, at, row = text.partition("@")
    kind, _, rank = place.partition(":")
    if kind not in list(FaultKind) or not rank.isdecimal() or (at and not row.isdecimal()) or row == "0":
        kinds = ", ".join(FaultKind)
        raise UsageError(f"--inject {text!r}: expected FAULT:RANK[@ROW]", hint=f"faults: {kinds}; for example kill:1@3")
    if at and kind not in (FaultKind.KILL, FaultKind.STOP):
        raise UsageError(f"--inject {text!r}: {kind} affects all rows", hint="only kill and stop take @ROW")
    return Fault(option=text, kind=kind, ranks=(int(rank),), place=row)


def parse_dtype(text: str) -> str:
    """Parse a dtype by torch's name. Raises UsageError."""
    name = text.removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise UsageError(f"--dtype {text!r}: unknown type", hint=f"choose from {', '.join(ITEM_BYTES)}")
    return name


def parse_nics(text: str) -> float:
    """Parse the NICs of a node, count x Gb/s: 8x400. Returns bytes/s of all. Raises UsageError."""
    match = re.fullmatch(r"([1-9]\d{0,2})x(\d{1,5}(?:\.\d{1,3})?)", text, re.ASCII)
    if match is None or not float(match[2]):
        raise UsageError(f"--nics {text!r}: not a number of NICs and their rate", hint="write 8x400 for 8 of 400 Gb/s")
    return int(match[1]) * float(match[2]) * 1e9 / 8


@on_hosts
def allreduce_bench(
    nproc: NprocOpt = None,
    op: Annotated[
        str, typer.Option(metavar="NAMES", help=f"Collectives, comma-separated: {', '.join(OPS)}; or all.")
    ] = "all_reduce",
    sizes: Annotated[
        str,
        typer.Option(
            metavar="RANGE",
            help="Sizes, comma-separated: 64MiB (or 64M), 1KiB:1GiB (doubling), 1KiB:1GiB:x4. "
            "[default: 1KiB:4GiB:x4; up to 64MiB on the CPU]",
        ),
    ] = "",
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Element type, by torch's name: bfloat16.")] = "float32",
    warmup: Annotated[int, typer.Option(min=1, metavar="N", help="Warm-up iterations per size.")] = 5,
    iters: Annotated[
        int | None,
        typer.Option(
            min=1, max=100000, metavar="N", help="Timed iterations per size. [default: 20 to 1000, see --min-time]"
        ),
    ] = None,
    min_time: Annotated[
        float, typer.Option(min=0.0, max=3600, metavar="SECONDS", help="Time each size for at least this long.")
    ] = 0.5,
    in_place: Annotated[
        bool | None, typer.Option("--in-place/--out-of-place", help="Form of all_gather and reduce_scatter.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Check every received element, outside the timed iterations."),
    ] = True,
    stat: Annotated[Stat, typer.Option(help="Statistic used to compute bandwidth.")] = Stat.P50,
    save: SaveOpt = "",
    from_: FromOpt = None,
    compare: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Compare with an earlier run: files of --save, output of --json, or text of nccl-tests. Without "
            "--nproc and hosts, judge such a text without running anything.",
        ),
    ] = "",
    nics: Annotated[
        str,
        typer.Option(metavar="NxGb/s", help="Each node's NICs, for judging a text of nccl-tests: 8x400, 1x200."),
    ] = "",
    backend: BackendOpt = Backend.AUTO,
    device: DeviceOpt = Device.AUTO,
    stall: StallOpt = 30.0,
    master_port: MasterPortOpt = 0,
    master_addr: MasterAddrOpt = "",
    ifname: IfnameOpt = "",
    nccl_debug: NcclDebugOpt = False,
    inject: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT:RANK[@ROW]",
            help="Inject a real fault, to check that it is detected: slow, corrupt, dtype, kill or stop; for example "
            "kill:0@3.",
        ),
    ] = None,
    html: HtmlOpt = "",
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Measure the bandwidth of collectives, check their data, compare with the expected bandwidth; find late ranks.

    Sizes, algbw and busbw are defined as in nccl-tests. Each row is reported as soon as it is measured.

    Exit status: 0 measured, 1 failed, 2 wrong usage, 3 could not be measured, 130 interrupted.

    \b
    Examples:
      distdiag allreduce-bench                # all GPUs of this machine
      distdiag allreduce-bench --hosts node[1-4] --save before
      distdiag allreduce-bench --hosts node[1-4] --compare before
      distdiag allreduce-bench --compare all_reduce_perf.txt --nics 8x400
    """
    from distdiag import runner
    from distdiag.commands.allreduce_bench import check as bench
    from distdiag.commands.allreduce_bench.types import parse_sizes

    def request() -> Request:
        return Request(
            program=called_as(),
            nproc=nproc,
            ops=parse_ops(op),
            sizes=parse_sizes(sizes) if sizes else None,
            sizes_text=sizes,
            dtype=parse_dtype(dtype),
            warmup=warmup,
            iterations=iters,
            min_time_s=min_time,
            in_place=in_place,
            check=check,
            stat=stat,
            backend=backend,
            device=device,
            timeout_s=stall,
            master_port=master_port,
            master_addr=master_addr,
            ifname=ifname,
            strict=strict,
            cluster=cluster,
            nccl_debug=nccl_debug,
            files=(("save", save), ("compare", compare)),
            baseline=bench.read_baseline(compare),
            nics_bytes_per_s=parse_nics(nics) if nics else None,
            fault=parse_fault(inject) if inject is not None else None,
        )

    runner.run(
        bench.subcommand(),
        request,
        runner.Options(as_json, strict, save, from_, html=html),
    )
