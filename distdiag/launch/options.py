"""Options of every command that works on ranks, each declared once."""

from __future__ import annotations

from typing import Annotated

import typer

from distdiag.cluster.launch_commands import Recipe
from distdiag.launch.types import MOST_RANKS, Backend, Device

NprocOpt = Annotated[
    int | None,
    typer.Option(
        min=1, max=MOST_RANKS, metavar="N", help="Ranks on each node. [default: one per GPU; 2 without a GPU]"
    ),
]
BackendOpt = Annotated[Backend, typer.Option(help="auto is nccl on GPUs and gloo on the CPU.")]
DeviceOpt = Annotated[Device, typer.Option(help="auto is cuda where a GPU is visible.")]
MasterPortOpt = Annotated[
    int, typer.Option(min=0, max=65535, metavar="PORT", help="Rendezvous port; 0 takes a free one.")
]
MasterAddrOpt = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Rendezvous address on several nodes. [default: chosen and tried]")
]
IfnameOpt = Annotated[
    str, typer.Option(metavar="NAME", help="Network interface for the ranks. [default: the one that works]")
]
NcclDebugOpt = Annotated[
    bool, typer.Option("--nccl-debug", help="Set NCCL_DEBUG=INFO and keep what each rank prints in a directory.")
]
PrintCommandOpt = Annotated[
    Recipe | None,
    typer.Option(help="Print the lines that start this under a launcher (for slurm a script), and stop."),
]
