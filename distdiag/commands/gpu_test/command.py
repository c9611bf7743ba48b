"""Command line of gpu-test."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.gpu_test.types import STAGES, FaultKind, Request
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
from distdiag.options import (
    FromOpt,
    JsonOpt,
    SaveOpt,
    StallOpt,
    StrictOpt,
    called_as,
    on_hosts,
    parse_duration,
    parse_size,
)

_DEFAULT_STAGE = {
    FaultKind.CORRUPT: "reduce",
    FaultKind.DTYPE: "agree",
    FaultKind.NO_IMPORT: "start",
    FaultKind.SLOW_COMPUTE: "compute",
    FaultKind.WRONG_COMPUTE: "compute",
}
_LONGEST_COMPUTE_S = 86400.0


def parse_fault(text: str) -> Fault:
    """Parse FAULT:RANK or FAULT:RANK@STAGE. Raises UsageError."""
    where, _, stage = text.partition("@")
    kind, _, rank = where.partition(":")
    kinds = ", ".join(FaultKind)
    if kind not in list(FaultKind) or not rank.isdecimal():
        raise UsageError(f"--inject {text!r}: expected FAULT:RANK", hint=f"faults: {kinds}; for example kill:1")
    fault = FaultKind(kind)
    if stage and (fault in _DEFAULT_STAGE or stage not in STAGES):
        raise UsageError(
            f"--inject {text!r}: {kind} cannot be injected in stage {stage!r}",
            hint=f"kill, stop and late take a stage: {', '.join(STAGES)}",
        )
    place = stage or _DEFAULT_STAGE.get(fault, "reduce")
    return Fault(option=text, kind=fault, ranks=(int(rank),), place=place)


def _request(
    isolate: bool,
    memory: float | None,
    expect: float | None,
    inject: str | None,
    **rest: Any,  # noqa: ANN401 - the other fields of a Request
) -> Request:
    """Return the request of one of the two tests. Raises UsageError for options of the other."""
    if not isolate:
        if expect is not None:
            raise UsageError("--expect needs --isolate", hint="add --isolate, or leave --expect out")
        fault = parse_fault(inject) if inject is not None else None
        request = Request(**rest, memory_fraction=memory, fault=fault)
        needs_compute = fault is not None and fault.place == "compute"
    else:
        from distdiag.commands.gpu_test.isolate import types as pairs

        if memory is not None:
            raise UsageError("--memory cannot be combined with --isolate", hint="leave one of them out")
        hit = pairs.parse_fault(inject) if inject is not None else None
        request = pairs.Request(**rest, expected_bytes_per_s=None if expect is None else expect * 1e9, fault=hit)
        needs_compute = hit is not None and hit.in_compute
    if needs_compute and request.compute_s == 0:
        raise UsageError(f"--inject {inject} needs the stage compute", hint="leave --no-compute out")
    return request


@on_hosts
def gpu_test(
    nproc: NprocOpt = None,
    backend: BackendOpt = Backend.AUTO,
    device: DeviceOpt = Device.AUTO,
    stall: StallOpt = 30.0,
    size: Annotated[
        str,
        typer.Option(
            metavar="BYTES",
            help="Size of the large all_reduce: 4096, 1GiB. [default: 64MiB; with --isolate on the CPU 4MiB]",
        ),
    ] = "",
    memory: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=0.98,
            metavar="FRACTION",
            help="Fraction of free memory to write and read back. [default: 0.5 on a GPU; 64 MiB per rank on the CPU]",
        ),
    ] = None,
    master_port: MasterPortOpt = 0,
    master_addr: MasterAddrOpt = "",
    ifname: IfnameOpt = "",
    nccl_debug: NcclDebugOpt = False,
    inject: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT:RANK[@STAGE]",
            help="Inject a real fault, to check that it is detected: kill, stop, late, corrupt, dtype, no-import, "
            "slow-compute or wrong-compute; for example kill:1 or stop:2@memory.",
        ),
    ] = None,
    compute: Annotated[
        str,
        typer.Option(
            metavar="SECONDS",
            help="How long every rank multiplies matrices and copies memory, for example 60s to burn in. "
            "[default: 1.5s on a GPU, 0.5s on the CPU]",
        ),
    ] = "",
    no_compute: Annotated[bool, typer.Option("--no-compute", help="Skip the compute stage.")] = False,
    isolate: Annotated[
        bool,
        typer.Option(
            "--isolate",
            help="Test every pair of ranks instead; find the bad rank, node or link. --inject then takes slow:1, "
            "slow:1-4 (a link), block:1-4, split:0-3, slow-compute:1 or wrong-compute:1.",
        ),
    ] = False,
    expect: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="GB/S", help="With --isolate: minimum bandwidth expected of a pair."),
    ] = None,
    save: SaveOpt = "",
    from_: FromOpt = None,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Test communication, all_reduce, memory and compute on every rank; find the rank that fails.

    Every rank goes through the stages start, connect, init, agree, reduce, memory, compute, done; with --isolate
    through start, connect, init, compute, pairs, done.

    Exit status: 0 passed, 1 failed, 2 wrong usage, 3 could not be tested, 130 interrupted.

    \b
    Examples:
      distdiag gpu-test                      # all GPUs of this machine
      distdiag gpu-test --hosts node[1-4]    # all GPUs of four nodes
      distdiag gpu-test --isolate --hosts node[1-4]    # find the bad link
    """
    from distdiag import runner

    def seconds() -> float | None:
        if no_compute and compute:
            raise UsageError("--compute and --no-compute contradict each other", hint="leave one of them out")
        if no_compute or not compute:
            return 0.0 if no_compute else None
        return parse_duration(compute, "--compute", longest_s=_LONGEST_COMPUTE_S)

    def request() -> Any:  # noqa: ANN401 - of the command chosen below
        return _request(
            isolate,
            memory,
            expect,
            inject,
            program=called_as(),
            nproc=nproc,
            backend=backend,
            device=device,
            timeout_s=stall,
            master_port=master_port,
            master_addr=master_addr,
            ifname=ifname,
            strict=strict,
            cluster=cluster,
            nccl_debug=nccl_debug,
            size_bytes=parse_size(size) if size else None,
            compute_s=seconds(),
        )

    options = runner.Options(as_json, strict, save, from_)
    if isolate:
        from distdiag.commands.gpu_test.isolate import diagnose as pairs

        runner.run(pairs.subcommand(), request, options)
    from distdiag.commands.gpu_test import diagnose

    runner.run(diagnose.subcommand(), request, options)
