"""Corrected launch lines or variables that send a process to the right rendezvous address. Pure."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from distdiag.diagnosis.wording import format_hosts
from distdiag.report import Fix

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.diagnosis.stuck.start_rows import StartRow
    from distdiag.facts.process.launch_options import Launch
    from distdiag.jobs.starts import Start

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_MODULE = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "deepspeed.launcher.launch",
    "accelerate.commands.launch",
    "launch",
)
_SHOWN = 4


def at_place(rows: Sequence[StartRow], place: str, *, job: Sequence[StartRow], but: str = "") -> Fix:
    """Return the fix that restarts these processes with one rendezvous; `but`: appended to the text."""
    launch = rows[0].start.above or rows[0].start.launch
    hosts = format_hosts(row.host for row in rows)
    if rows[0].is_rank and launch.program == "torchrun":
        # torchrun's agent sets MASTER_ADDR, to the host name of rank 0's node or its --local-addr.
        address = place.rpartition(":")[0]
        return Fix(text=f"start torchrun on the node of rank 0 with --local-addr={address}{but}")
    options = " ".join(options_for(launch, place))
    if rows[0].is_rank and rows[0].start.above is None and rows[0].start.tasks is not None:
        return _of_step(rows, place, job, but)
    lines = {line: row.host for row in rows if (line := corrected(row.start, options_for(launch, place)))}
    if not lines:
        is_plain = rows[0].is_rank and "PORT" not in place.rpartition(":")[2]
        return Fix(text=f"start it on {hosts} with {options}{but}", commands=(f"export {options}",) if is_plain else ())
    commands = tuple(f"{line}  # on {host}" if len(lines) > 1 else line for line, host in lines.items())[:_SHOWN]
    return Fix(text=f"start it on {hosts} with {options}{but}", commands=commands)


def _of_step(rows: Sequence[StartRow], place: str, job: Sequence[StartRow], but: str) -> Fix:
    """Return the fix for ranks of mpirun or srun: its own line, if known to set the rendezvous."""
    wanted = options_for(rows[0].start.launch, place)
    hosts = format_hosts(row.host for row in rows)
    if any(row.place != rows[0].place for row in job):
        had = [text for text in options_for(rows[0].start.launch, rows[0].place) if text not in wanted]
        text = f"find what sets {' '.join(had)} on {hosts}, such as a profile: all ranks need {' '.join(wanted)}{but}"
        return Fix(text=text)
    line = next((line for row in job if (line := _step_line(row, wanted))), f"export {' '.join(wanted)}")
    return Fix(text=f"start the job with {' '.join(wanted)}{but}", commands=(line,))


def _step_line(row: StartRow, wanted: Sequence[str]) -> str:
    """Return the mpirun or srun line with new variables; empty if it does not set these itself."""
    words = _words(row.start.command)
    new = dict(zip(options_for(row.start.launch, row.place), wanted, strict=True))
    return shlex.join(new.get(word, word) for word in words) if all(old in words for old in new) else ""


def _words(command: str) -> list[str]:
    """Split a command line; empty if a secret was redacted."""
    try:
        return [] if "***" in command else shlex.split(command)
    except ValueError:
        return []


def options_for(launch: Launch, place: str) -> list[str]:
    """Return launcher options or, for a rank, variables that set a rendezvous address."""
    host, _, port = place.rpartition(":")
    host = host.strip("[]")
    if launch.program == "environment":
        return [f"MASTER_ADDR={host}", f"MASTER_PORT={port}"]
    if launch.program == "accelerate":
        return [f"--main_process_ip={host}", f"--main_process_port={port}"]
    if launch.backend == "c10d":
        return [f"--rdzv-endpoint={place}"]
    kind = "_" if launch.program == "deepspeed" else "-"
    return [f"--master{kind}addr={host}", f"--master{kind}port={port}"]


def node_rank_option(launch: Launch) -> str:
    """Return the name of the launcher's option for a node's number."""
    return "--machine_rank" if launch.program == "accelerate" else "--node-rank"


def corrected(start: Start, options: Sequence[str]) -> str:
    """Return the launcher's whole command line with other options; empty if unknown."""
    words = _words(start.command)
    at = next((at for at, word in enumerate(words[:8]) if word in _MODULE), None)
    if at is None:
        at = next((at for at, word in enumerate(words[:6]) if os.path.basename(word) in _LAUNCHERS), None)
    if at is None:
        return ""
    if at == 1 and os.path.isabs(words[1]):  # a script's shebang names its interpreter
        words, at = words[1:], 0
    names = {option.partition("=")[0].lstrip("-").replace("-", "_") for option in options}
    return shlex.join([*words[: at + 1], *options, *_without(words[at + 1 :], names)])


def _without(words: Iterable[str], names: set[str]) -> list[str]:
    """Drop these options, up to the script."""
    left, kept = list(words), []
    while left and left[0].startswith("-") and left[0] not in ("-m", "--module"):
        word = left.pop(0)
        has_value = "=" not in word and left and not (left[0].startswith("-") or left[0].endswith(".py"))
        option = [word, left.pop(0)] if has_value else [word]
        kept += option if word.partition("=")[0].lstrip("-").replace("-", "_") not in names else []
    return [*kept, *left]
