"""Peak GPU speeds, from data sheets (peaks.toml). Pure."""

from __future__ import annotations

import re

from distdiag.knowledge.tables import load
from distdiag.record import record


@record(kw_only=True)
class Peak:
    """Dense 16-bit matrix products of one GPU, in 1e12 operations per second.

    `sparse_tflops`: with 2:4 sparsity, as printed on newer data sheets; 0 if not supported.
    """

    name: str
    tflops: float
    source: str
    sparse_tflops: float = 0


_OF_SMI = frozenset(
    ("nvidia", "tesla", "geforce", "amd", "instinct", "16gb", "24gb", "32gb", "40gb", "48gb", "80gb", "94gb", "96gb")
)
"""Words of an nvidia-smi name without influence on the speed."""


def peaks() -> tuple[Peak, ...]:
    """Read the file, once."""
    return load("peaks", "gpu", tuple[Peak, ...])


def find_peaks(name: str) -> tuple[Peak, ...]:
    """List the GPUs matching a name: "A100" is SXM or PCIe; an exact name is that GPU alone.

    Also accepts nvidia-smi's names: "NVIDIA H100 80GB HBM3" and "NVIDIA H200" are SXM.
    """
    words = _words(name)
    exact = tuple(peak for peak in peaks() if _words(peak.name) == words)
    found = exact or tuple(peak for peak in peaks() if words and words <= _words(peak.name))
    sxm = tuple(peak for peak in found if "sxm" in _words(peak.name))
    return sxm if len(found) > 1 and len(sxm) == 1 and name.lower().startswith("nvidia ") else found


def _words(name: str) -> frozenset[str]:
    plain = re.sub(r"\bhbm3\b|sxm\d", "sxm", name.lower())
    return frozenset(re.findall(r"[a-z0-9]+", plain)) - _OF_SMI
