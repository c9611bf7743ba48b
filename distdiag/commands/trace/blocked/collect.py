"""Facts of one node for trace blocked: its processes, and what the threads of some of them are blocked on."""

from __future__ import annotations

from distdiag.jobs.sample_waits import facts, more

__all__ = ["facts", "more"]
