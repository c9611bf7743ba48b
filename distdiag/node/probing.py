"""How much data both ends of a probe exchange."""

from __future__ import annotations

BULK_BYTES = 64 * 2**10
MOST_BULK_BYTES = 16 * 2**20


def returned(size: int) -> int:
    """Give how much comes back: full packets, to see whether they do; the peer tries the other way itself."""
    return min(size, BULK_BYTES)
