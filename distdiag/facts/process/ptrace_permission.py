"""Permission to read other processes, and reasons for a denial."""

from __future__ import annotations

import os

from distdiag.facts import machine
from distdiag.facts.process import procs


def why_unreadable(pid: int, complaint: str) -> tuple[str, str]:
    """Return status and reason for a failure of py-spy, whose own message misleads if permissions are missing."""
    last = next((line for line in complaint.strip().splitlines() if line.startswith("Error")), complaint.strip())
    denied = "ermission" in complaint or "not permitted" in complaint
    words = procs.command_words(pid)
    if not denied and not procs.is_python(pid, words):
        return "not-python", f"not a Python program: {machine.command_line(pid) or 'unknown'}"
    if denied:
        return "denied", why_denied(pid)
    return "failed", f"py-spy: {last[:200]}" if last else "py-spy found no Python frames"


def why_denied(pid: int) -> str:
    """Return why a process may not be read or traced: the user, yama, a capability."""
    theirs, mine = procs.owner(pid), os.geteuid()
    if mine != 0 and theirs != mine:
        return f"it runs as another user (uid {theirs}, we are {mine})"
    scope = ptrace_scope()
    if scope:
        return f"kernel.yama.ptrace_scope is {scope}"
    if not may_trace():
        whose = f"it runs as uid {theirs}, and " if theirs != mine else ""
        return f"{whose}distdiag lacks CAP_SYS_PTRACE there"
    return "the kernel does not permit it (a setuid or non-dumpable program)"


def ptrace_scope() -> int | None:
    """Read kernel.yama.ptrace_scope: 0 own processes, 1 descendants, 2 CAP_SYS_PTRACE, 3 none; None without yama."""
    text = machine.read_text("/proc/sys/kernel/yama/ptrace_scope").strip()
    return int(text) if text.isdigit() else None


def may_trace() -> bool:
    """Return whether we have CAP_SYS_PTRACE (bit 19, linux/capability.h)."""
    words = machine.status_words("self", "CapEff")
    return bool(words) and bool(int(words[0], 16) >> 19 & 1)
