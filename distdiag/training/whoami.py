"""`distdiag.node.identity` and `machine` under the names that the overflow detector imports."""

from __future__ import annotations

from distdiag.node.identity import own_label as label
from distdiag.node.identity import own_rank as rank
from distdiag.node.identity import torch_distributed
from distdiag.node.machine import host_name as host

__all__ = ["host", "label", "rank", "torch_distributed"]
