"""distdiag: from "my distributed PyTorch job is slow, hung, crashed or won't build" to this rank, this link, this fix.

The names below, for programs that read reports and for training scripts, are imported on first use.
"""

from __future__ import annotations

# Not from typing, which takes as long to load as Python itself: see distdiag.__main__.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from distdiag.errors import DistdiagError
    from distdiag.report import Finding, Fix, Level, Report, Verdict, Where
    from distdiag.training.breakpoint.debugger import breakpoint
    from distdiag.training.flight_recorder import dump_flight_recorder
    from distdiag.training.floatcmp.compare import floatcmp
    from distdiag.training.kill_switch import KillSwitch
    from distdiag.training.line_trace.session import trace_lines
    from distdiag.training.overflow.detector import DebugUnderflowOverflow
    from distdiag.training.overflow.extrema import detect_overflow
    from distdiag.training.overflow.report import OverflowDetected
    from distdiag.training.printflock import printflock
    from distdiag.training.sync_check import sync_check

__version__ = "0.1.0"

__all__ = [
    "DebugUnderflowOverflow",
    "DistdiagError",
    "Finding",
    "Fix",
    "KillSwitch",
    "Level",
    "OverflowDetected",
    "Report",
    "Verdict",
    "Where",
    "breakpoint",
    "detect_overflow",
    "dump_flight_recorder",
    "floatcmp",
    "printflock",
    "sync_check",
    "trace_lines",
]

_HOME = {
    "DistdiagError": "distdiag.errors",
    "DebugUnderflowOverflow": "distdiag.training.overflow.detector",
    "OverflowDetected": "distdiag.training.overflow.report",
    "KillSwitch": "distdiag.training.kill_switch",
    "breakpoint": "distdiag.training.breakpoint.debugger",
    "detect_overflow": "distdiag.training.overflow.extrema",
    "floatcmp": "distdiag.training.floatcmp.compare",
    "printflock": "distdiag.training.printflock",
    "sync_check": "distdiag.training.sync_check",
    "trace_lines": "distdiag.training.line_trace.session",
    "dump_flight_recorder": "distdiag.training.flight_recorder",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'distdiag' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME.get(name, "distdiag.report")), name)
