"""Fixes shared by commands: for stopped, frozen, dead and unseen ranks, and for missing permissions. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.diagnosis.wording import format_hosts
from distdiag.fold import by_key
from distdiag.report import Fix

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distdiag.cluster.targets import Cluster
    from distdiag.jobs.collect import Processes

_KILLED = "dmesg -T | grep -iE 'out of memory|killed process|segfault' | tail -n 3"
_HOSTS = 8
"""Hosts to write a command for; the finding has the pids of all."""


def again(program: str, cluster: Cluster, *words: str) -> str:
    """Format a command to paste, with this program and the same hosts."""
    typed = [part for name, value in cluster.typed() for part in (name, shlex.quote(value))]
    return " ".join([program, *words, *typed])


def resume(processes: Iterable[tuple[str, int | None]]) -> Fix:
    """Return the commands that resume stopped processes (host, pid), one per host."""
    by_host = by_key(processes)
    commands = {host: " ".join(["kill -CONT", *map(str, pids)]) for host, pids in by_host.items()}
    if len(commands) > 1:
        lines = tuple(f"{command}  # on {host}" for host, command in commands.items())
        some = f" (the first {_HOSTS} of {len(lines)} hosts)" if len(lines) > _HOSTS else ""
        text = f"resume them, each on its host, and find out what stopped them{some}"
        return Fix(text=text, commands=lines[:_HOSTS])
    return Fix(
        text=f"on {format_hosts(commands)}, resume it and find out what stopped it", commands=tuple(commands.values())
    )


def thaw(hosts: str, command: str) -> Fix:
    """Return the fix for a frozen cgroup."""
    return Fix(text=f"on {hosts}, thaw its cgroup: docker unpause CONTAINER, or as root", commands=(command,))


def find_cause_of_death(hosts: Iterable[str], ranks: int = 1) -> Fix:
    """Return where to look for the reason ranks exited."""
    log, them = ("that rank's log", "it") if ranks == 1 else ("the logs of these ranks", "them")
    return Fix(
        text=f"read the end of {log}, and check whether the kernel killed {them} on {format_hosts(hosts)}",
        commands=(_KILLED,),
    )


def find_missing_rank(hosts: Iterable[str], ranks: int = 1) -> Fix:
    """Return where to look for the reason ranks have no process."""
    its, it, log = ("its", "it", "log") if ranks == 1 else ("their", "them", "logs")
    return Fix(
        text=f"check that {its} launcher started {it}, with the MASTER_ADDR and MASTER_PORT of the others; if "
        f"{'it' if ranks == 1 else 'they'} ran, read the end of {its} {log}, and check whether the kernel killed {it} "
        f"on {format_hosts(hosts)}",
        commands=(_KILLED,),
    )


def as_other_user(command: str) -> Fix:
    """Return how to run a command with access to another user's processes."""
    return Fix(text="run it as that user, or as root", commands=(f'sudo env "PATH=$PATH" {command}',))


def ptrace_in_container() -> Fix:
    """Return how to permit reading processes in a container where even root is denied."""
    return Fix(
        text="allow the container to read its processes: docker run --cap-add SYS_PTRACE; in Kubernetes "
        "securityContext.capabilities.add: [SYS_PTRACE]; or run distdiag on the host"
    )


def right_to_read(command: str, node: Processes | None, theirs: Iterable[int]) -> Fix:
    """Return how a command gets the right to read processes of these users; in order of effort, only what helps."""
    if node is None:
        return ptrace_in_container()
    other_user = as_other_user(command)
    if node.user != 0 and set(theirs) - {node.user}:
        return other_user
    if node.ptrace_scope == 3:
        return Fix(
            text="kernel.yama.ptrace_scope is 3: no process can be read until this host is rebooted with a lower value"
        )
    if node.ptrace_scope in (1, 2) and node.user != 0:
        text = "run it as root, or allow users to read their own processes until the next reboot"
        return Fix(text=text, commands=(*other_user.commands, "echo 0 | sudo tee /proc/sys/kernel/yama/ptrace_scope"))
    return ptrace_in_container()
