"""Waits in a GPU driver or a communication library, from the location of threads. Pure.

CUDA's waits spin in the driver, below the user's line: neither Python frames nor system calls show them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.knowledge.gpu_libraries import kind_of_library, meaning_of
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.facts.stacks.thread_places import Places, ThreadPlace

_NEARLY_ALL = 0.8
"""Share of a thread's samples in one library from which it counts as waiting there."""
_AUTOGRAD = "pt_autograd_"


@record(kw_only=True)
class GpuPlace:
    """A thread's place in the GPU libraries. `meaning` of its call: waits, launches, loads, init or abort.

    `call`: the exported function, empty if unknown; `thread`: its name, empty for the main thread.
    """

    library: str
    meaning: str
    call: str = ""
    thread: str = ""


def gpu_place(places: Sequence[Places]) -> GpuPlace | None:
    """Return the place of the main thread, else of an autograd thread, if all readings agree; else None.

    Readings in which the thread was runnable but got no processor do not count: it is where it was before.
    """
    if not places:
        return None
    last = places[-1].threads
    for thread in [*last[:1], *filter(_is_autograd, last[1:])]:
        seen = [_same(each, thread.tid) for each in places]
        found = [_place(each) for each in seen if each is not None and (each.samples or each.state != "R")]
        known = [each for each in found if each is not None]
        if known and len(known) == len(found):
            return replace(known[-1], thread="" if thread is last[0] else thread.comm)
    return None


def is_located(places: Sequence[Places]) -> bool:
    """Return whether the place of the main thread is known in any reading."""
    return bool(places) and any(each.threads and each.threads[0].method for each in places)


def autograd_runs(places: Sequence[Places]) -> bool:
    """Return whether an autograd thread was running, in any library."""
    return any(_is_autograd(thread) and thread.state == "R" for each in places for thread in each.threads)


def _is_autograd(thread: ThreadPlace) -> bool:
    """Return whether a thread runs a backward; NCCL's threads inherit the name of the thread that starts them."""
    is_of_nccl = any(kind_of_library(library) == "communication" for library in thread.libraries)
    is_of_torch = any(library.startswith("libtorch") for library in thread.libraries)
    return thread.comm.startswith(_AUTOGRAD) and (is_of_torch or not is_of_nccl)


def _same(places: Places, tid: int) -> ThreadPlace | None:
    return next((thread for thread in places.threads if thread.tid == tid), None)


def _place(thread: ThreadPlace) -> GpuPlace | None:
    if not thread.inner or not thread.samples:
        return None
    inside = [(library, count) for library, count in thread.inner if kind_of_library(library)]
    if sum(count for _, count in inside) < _NEARLY_ALL * thread.samples:
        return None
    meanings = [(str(meaning_of(call)), call) for call in thread.calls if meaning_of(call)]
    # A collective's init also waits in the driver: the call is more specific than the library.
    known = dict(reversed(meanings))
    first = meanings[0][0] if meanings else "waits"
    strong = [name for name in ("init", "abort", "loads") if name in known]
    library = inside[0][0]
    meaning = "loads" if kind_of_library(library) == "compiler" else strong[0] if strong else first
    return GpuPlace(library=library, meaning=meaning, call=known.get(meaning, ""))
