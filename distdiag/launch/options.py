"""Shared options of commands that start ranks."""

from __future__ import annotations

from typing import Annotated

import typer

from distdiag.launch.types import MOST_RANKS, Backend, Device

NprocOpt = Annotated[
    int | None,
    typer.Option(min=1, max=MOST_RANKS, metavar="N", help="Ranks per node. [default: one per GPU; 2 without a GPU]"),
]
BackendOpt = Annotated[Backend, typer.Option(help="Backend to test; auto: nccl on GPUs, gloo on the CPU.")]
DeviceOpt = Annotated[Device, typer.Option(help="Device of the ranks; auto: cuda where a GPU is visible.")]
MasterPortOpt = Annotated[
    int, typer.Option(min=0, max=65535, metavar="PORT", help="Rendezvous port; 0 picks a free port.")
]
MasterAddrOpt = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Rendezvous address on several nodes. [default: chosen and tested]")
]
IfnameOpt = Annotated[
    str, typer.Option(metavar="NAME", help="Network interface for the ranks. [default: chosen and tested]")
]
NcclDebugOpt = Annotated[
    bool, typer.Option("--nccl-debug", help="Set NCCL_DEBUG=INFO and keep each rank's output in a directory.")
]
