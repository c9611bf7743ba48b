"""The commands whose facts are in a bundle, readable by `distdiag COMMAND --from FILE`.

Each is imported by module name when needed, as in cli.py. To add one, set `home` to its Subcommand, and `request` to a
function that fills its request from bundle's; program, cluster and defaults are already set. Redaction, judgement,
listing and reading follow from the name of the command.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Callable

    from distdiag.commands.bundle.types import Request


_SAMPLES = 16


@record
class Part:
    """A command in the bundle. `home`: MODULE:NAME of its Subcommand; `about`: text for the manifest."""

    name: str
    home: str
    about: str
    request: Callable[[Any, Request], Any] = lambda own, _: own

    def subcommand(self) -> Any:  # noqa: ANN401 - of any command
        """Import and return its Subcommand."""
        module, _, name = self.home.partition(":")
        return getattr(import_module(f"distdiag.commands.{module}"), name)


def _hang(own: Any, asked: Request) -> Any:  # noqa: ANN401 - hang's request
    wanted = replace(own.wanted, job=asked.job, user=asked.user)
    timeout_s = asked.timeout_s / 2
    return replace(own, wanted=wanted, logs=asked.logs, recorder=asked.recorder, timeout_s=timeout_s, ranks_only=True)


def _pyspy_all(own: Any, asked: Request) -> Any:  # noqa: ANN401 - pyspy-all's request
    # Enough samples for a straggler within seconds; none pauses a process.
    timeout_s, interval_s = max(1.0, asked.timeout_s / 20), min(0.4, asked.timeout_s / 150)
    return replace(
        own,
        job=asked.job,
        user=asked.user,
        samples=_SAMPLES,
        interval_s=interval_s,
        timeout_s=timeout_s,
        ranks_only=True,
    )


def _cuda_env(own: Any, asked: Request) -> Any:  # noqa: ANN401 - cuda-env's request
    return replace(own, python=asked.cluster.python, timeout_s=max(2.0, asked.timeout_s / 8))


def _doctor(own: Any, asked: Request) -> Any:  # noqa: ANN401 - doctor's request
    # A bundle is of a running job: its nodes are read locally, and open no port.
    return replace(own, timeout_s=max(2.0, min(20.0, asked.timeout_s / 4)), connects=False)


PARTS = (
    Part(
        "hang",
        "hang.subcommand:SUBCOMMAND",
        "stacks, what every thread waits for, NCCL RAS, recorder dumps, log events, the kernel, versions",
        _hang,
    ),
    Part(
        "pyspy-all",
        "pyspy_all.subcommand:SUBCOMMAND",
        f"{_SAMPLES} samples of the stacks: which rank the others wait for, in a job that is slow",
        _pyspy_all,
    ),
    Part(
        "cuda-env",
        "cuda_env.check:SUBCOMMAND",
        "driver, GPUs, torch, CUDA toolkits, libraries, compilers, packages and their variables",
        _cuda_env,
    ),
    Part(
        "doctor",
        "doctor.subcommand:SUBCOMMAND",
        "limits, disks, clock, network, GPU health, versions and the kernel's log of each node",
        _doctor,
    ),
)
