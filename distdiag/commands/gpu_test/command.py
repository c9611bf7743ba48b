"""What you type for gpu-test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.recipes import Recipe  # noqa: TC001 - on_hosts reads the annotations
from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.gpu_test.model import STAGES, Fault, FaultKind, Request
from distdiag.errors import UsageError
from distdiag.options import JsonOpt, StrictOpt, TimeoutOpt, called_as, on_hosts, parse_size
from distdiag.workload.model import Backend, Device

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from distdiag.commands.gpu_test.model import GpuTest
    from distdiag.report import Report

_DEFAULT_STAGE = {FaultKind.CORRUPT: "reduce", FaultKind.DTYPE: "agree", FaultKind.NO_IMPORT: "start"}


def parse_fault(text: str) -> Fault:
    """Read FAULT:RANK or FAULT:RANK@STAGE. Raises UsageError."""
    place, _, stage = text.partition("@")
    kind, _, rank = place.partition(":")
    kinds = ", ".join(FaultKind)
    if kind not in list(FaultKind) or not rank.isdecimal():
        raise UsageError(f"--inject {text!r} is not FAULT:RANK", hint=f"faults are {kinds}; such as kill:1")
    fault = FaultKind(kind)
    if stage and (fault in _DEFAULT_STAGE or stage not in STAGES):
        raise UsageError(
            f"--inject {text!r}: {stage!r} is no stage for it",
            hint=f"kill, stop and late take {', '.join(STAGES)}",
        )
    return Fault(kind=fault, rank=int(rank), stage=stage or _DEFAULT_STAGE.get(fault, "reduce"))


@on_hosts
def gpu_test(
    nproc: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks on each node. [default: one per GPU; 2 without a GPU]")
    ] = None,
    backend: Annotated[Backend, typer.Option(help="auto is nccl on GPUs and gloo on the CPU.")] = Backend.AUTO,
    device: Annotated[Device, typer.Option(help="auto is cuda where a GPU is visible.")] = Device.AUTO,
    timeout: TimeoutOpt = 30.0,
    size: Annotated[
        str, typer.Option(metavar="BYTES", help="Size of the large all_reduce: 4096, 64MiB, 1GiB.")
    ] = "64MiB",
    memory: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=0.98,
            metavar="FRACTION",
            help="Share of the free memory to write and read back. [default: 0.5 of a GPU's; 64 MiB a rank on the CPU]",
        ),
    ] = None,
    master_port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Rendezvous port; 0 takes a free one.")
    ] = 0,
    master_addr: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Rendezvous address on several nodes. [default: chosen and tried]")
    ] = "",
    ifname: Annotated[
        str, typer.Option(metavar="NAME", help="Network interface for the ranks. [default: the one that works]")
    ] = "",
    nccl_debug: Annotated[
        bool,
        typer.Option("--nccl-debug", help="Set NCCL_DEBUG=INFO and keep what each rank prints in a directory."),
    ] = False,
    inject: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT:RANK[@STAGE]",
            help="Make a fault for real, to see it found: kill, stop, late, corrupt, dtype or no-import; "
            "such as kill:1 or stop:2@memory.",
        ),
    ] = None,
    print_command: Annotated[
        Recipe | None,
        typer.Option(help="Print the lines that start this test under a launcher (for slurm a script), and stop."),
    ] = None,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Test whether all ranks can talk, reduce correctly and use their memory; name the one that cannot.

    Every rank goes through the stages start, connect, init, agree, reduce, memory, done.

    Exit status: 0 all is well, 1 a fault was found, 2 wrong usage, 3 could not be tested, 130 interrupted.
    """
    from distdiag.deliver import Output, Progress, deliver, deliver_lines

    def asked() -> Request:
        return Request(
            program=called_as(),
            nproc=nproc,
            backend=backend,
            device=device,
            timeout_s=timeout,
            size_bytes=parse_size(size),
            memory_fraction=memory,
            master_port=master_port,
            master_addr=master_addr,
            ifname=ifname,
            strict=strict,
            cluster=cluster,
            nccl_debug=nccl_debug,
            fault=parse_fault(inject) if inject is not None else None,
        )

    def run() -> Report[GpuTest]:
        from distdiag.commands.gpu_test.check import check

        with Progress() as progress:
            return check(asked(), progress)

    def commands() -> list[str]:
        from distdiag.commands.gpu_test.check import explain

        return explain(asked(), print_command)

    def view(report: Report[GpuTest]) -> Iterable[RenderableType]:
        from distdiag.commands.gpu_test.view import gpu_test_view

        return gpu_test_view(report)

    if cluster.explain or print_command is not None:
        deliver_lines("gpu-test", commands, as_json=as_json)
    deliver("gpu-test", run, view, Output(json=as_json, strict=strict))
