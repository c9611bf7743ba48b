"""What core-bt is asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from distdiag.cluster.targets import Cluster

COMMAND = "core-bt"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was typed; `gdb` None: where pystack does not have the thread that crashed."""

    program: str = "distdiag"
    cluster: Cluster = field(default_factory=Cluster)
    paths: tuple[str, ...] = ()
    exe: str = ""
    all_threads: bool = False
    gdb: bool | None = None
    pid: int | None = None
    setup: bool = False
    timeout_s: float = 60.0

    def again(self, *words: str) -> str:
        """Write the command with other arguments."""
        where = [f"{name} {value}" for name, value in self.cluster.typed()]
        return " ".join([self.program, COMMAND, *where, *words])
