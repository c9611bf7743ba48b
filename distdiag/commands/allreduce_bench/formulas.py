"""Sizes and bandwidths of collectives, as in nccl-tests. Standard library only: it is sent to the ranks.

S is the size of the whole array in bytes, so that numbers of different collectives compare: for all_gather,
reduce_scatter and all_to_all the count of one rank times the ranks. algbw = S / t; busbw = algbw x a factor
that makes any world size comparable with the link speed.
Source: nccl-tests, doc/PERFORMANCE.md, and the ...GetCollByteCount functions of src/*.cu.
"""

from __future__ import annotations

from distdiag.record import record

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "sendrecv")
SPREAD = ("all_gather", "reduce_scatter", "all_to_all")
"""Each rank has one part of the array."""
ONLY_IN_PLACE = ("all_reduce", "broadcast", "reduce")
"""torch has only this form."""
BOTH_WAYS = ("all_gather", "reduce_scatter")
NO_PEER = "a single rank has no peer to send to"
"""Why sendrecv is skipped on a single rank."""
ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
_ALIGN_BYTES = 16
"""nccl-tests rounds each rank's part down to a multiple of this."""


@record
class Shape:
    """Elements that one rank sends and receives. `count` is the column of that name in nccl-tests: a rank's part."""

    count: int
    send: int
    receive: int
    size_bytes: int


def shape_of(op: str, size_bytes: int, dtype: str, world_size: int) -> Shape:
    """Return the counts for an array of about `size_bytes`; at least one element, or one aligned part per rank."""
    item = ITEM_BYTES[dtype]
    count = max(1, size_bytes // item)
    if op not in SPREAD:
        return Shape(count, count, count, count * item)
    align = _ALIGN_BYTES // item
    part = max(count // world_size // align * align, align)
    whole = part * world_size
    send, receive = {"all_gather": (part, whole), "reduce_scatter": (whole, part), "all_to_all": (whole, whole)}[op]
    return Shape(part, send, receive, whole * item)


def needed_bytes(op: str, shape: Shape, dtype: str, *, in_place: bool) -> int:
    """Return the bytes of a rank's buffers."""
    elements = max(shape.send, shape.receive) if in_place else shape.send + shape.receive
    return elements * ITEM_BYTES[dtype]


def is_in_place(op: str, requested: bool | None) -> bool:
    """Return whether a collective is measured in place; None means torch's usual form."""
    if op in ONLY_IN_PLACE:
        return True
    return op in BOTH_WAYS and bool(requested)


def bus_factor(op: str, world_size: int) -> float:
    """Return busbw / algbw. A single rank sends nothing: 0."""
    n = world_size
    if n < 2:
        return 0.0
    if op == "all_reduce":
        return 2 * (n - 1) / n
    return (n - 1) / n if op in SPREAD else 1.0
