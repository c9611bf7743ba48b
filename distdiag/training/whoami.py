"""Which rank this process is, for what a training script imports; torch is asked only if the script has it."""

from __future__ import annotations

import os
import sys

from distdiag.node.identity import identify

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def host() -> str:
    """Give this node's short name."""
    return os.uname().nodename.partition(".")[0]


def torch_distributed() -> Any:  # noqa: ANN401 - a module that is not ours to import
    """Give torch.distributed if the script has initialised its default process group, else None."""
    dist = sys.modules.get("torch.distributed")
    # While it is being imported, or in a build without it, the functions are not there.
    ready = getattr(dist, "is_initialized", None)
    return dist if ready is not None and ready() else None


def rank() -> int | None:
    """Give this process's rank: torch.distributed's, else the launcher's; None if neither is there."""
    dist = torch_distributed()
    if dist is not None:
        return int(dist.get_rank())
    identity = identify(os.environ)
    return None if identity is None else identity.rank


def label() -> str:
    """Name this process in a line of output: `[node07:3]`; with its process id where it is no rank yet."""
    known = rank()
    return f"[{host()}:pid {os.getpid()}]" if known is None else f"[{host()}:{known}]"
