"""The commands whose facts are in a bundle: a row for each, and `distdiag COMMAND --from FILE` works.

A command is named here as it is in cli.py, by its module, and imported when its turn comes. To add one (say, doctor):
give its Subcommand as `home`, and in `request` the fields of its own request that follow from what bundle was asked;
program, cluster and all defaults are set already. Nothing else: its facts are redacted, judged once more and listed as
all others are, and the reader of bundles finds them by the name of the command.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from distdiag.commands.bundle.types import Request


_SAMPLES = 16


@dataclass(frozen=True)
class Part:
    """A command in the bundle. `home`: module below distdiag.commands, and its Subcommand; `about`: of the manifest."""

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
    # As many samples as a straggler takes, in some seconds; none of them pauses a process.
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
    # A bundle is of a job that runs: its nodes read themselves, and open no port.
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
