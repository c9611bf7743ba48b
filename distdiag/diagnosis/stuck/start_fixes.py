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
    from distdiag.facts.launch_options import Launch
    from distdiag.jobs.starts import Start

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_MODULE = ("torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.launch", "launch")
_SHOWN = 4


def at_place(rows: Sequence[StartRow], place: str, *, but: str = "") -> Fix:
    """Return how to restart these processes so that they meet at a place; `but`: appended to the text."""
    launch = rows[0].start.above or rows[0].start.launch
    hosts = format_hosts(row.host for row in rows)
    if rows[0].is_rank and launch.program == "torchrun":
        # torchrun's agent sets MASTER_ADDR, to the host name of rank 0's node or its --local-addr.
        address = place.rpartition(":")[0]
        return Fix(text=f"start torchrun on the node of rank 0 with --local-addr={address}{but}")
    options = " ".join(options_for(launch, place))
    lines = {line: row.host for row in rows if (line := corrected(row.start, place))}
    if not lines:
        is_plain = rows[0].is_rank and "PORT" not in place.rpartition(":")[2]
        return Fix(text=f"start it on {hosts} with {options}{but}", commands=(f"export {options}",) if is_plain else ())
    commands = tuple(f"{line}  # on {host}" if len(lines) > 1 else line for line, host in lines.items())[:_SHOWN]
    return Fix(text=f"start it on {hosts} with {options}{but}", commands=commands)


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


def corrected(start: Start, place: str) -> str:
    """Return the launcher's command line with another rendezvous address; empty if unknown."""
    try:
        words = shlex.split(start.command)
    except ValueError:  # a secret was cut out of a quoted word
        return ""
    at = next((at for at, word in enumerate(words[:8]) if word in _MODULE), None)
    if at is None:
        at = next((at for at, word in enumerate(words[:6]) if os.path.basename(word) in _LAUNCHERS), None)
    if at is None or "***" in start.command:
        return ""
    if at == 1 and os.path.isabs(words[1]):  # a script's shebang names its interpreter
        words, at = words[1:], 0
    options = options_for(start.above or start.launch, place)
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
