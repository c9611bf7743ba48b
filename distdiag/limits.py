"""What to type where a limit of this machine ends the work: open files, processes, memory."""

from __future__ import annotations

import os
import resource

_ENOUGH = 1024
_MORE = 4
_SYS_RESOURCE = 24  # CAP_SYS_RESOURCE, linux/capability.h


def hint_for(words: str) -> str:
    """Return a hint for raising the local limit named by an error; empty if none."""
    if "Too many open files" in words:
        return _raise("n", "nofile", resource.RLIMIT_NOFILE)
    if "Resource temporarily unavailable" in words or "can't start new thread" in words:
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:  # a thread needs a stack
            return f"{_raise('u', 'nproc', resource.RLIMIT_NPROC)}; or more memory: ulimit -v unlimited"
        return f"{_raise('u', 'nproc', resource.RLIMIT_NPROC)}; in a container, check its pids limit"
    if "Cannot allocate memory" in words or "MemoryError" in words:
        return "ulimit -v unlimited; in a container, check its memory limit"
    return ""


def _raise(letter: str, name: str, which: int) -> str:
    """Return a command to raise a limit of the shell: up to the hard one; above that, only root can."""
    soft, hard = resource.getrlimit(which)
    wanted = max(_ENOUGH, _MORE * soft)
    if hard == resource.RLIM_INFINITY or hard >= wanted or _may_raise():
        return f"ulimit -{letter} {wanted}"
    if hard >= max(_ENOUGH, 2 * soft):
        return f"ulimit -{letter} {hard}"
    return (
        f"the hard limit is {hard}; raise it as root on the host: sudo prlimit --pid $$ --{name}={wanted}:{wanted}; or "
        f"where the container or job is made: docker --ulimit {name}={wanted}, systemd Limit{name.upper()}={wanted}"
    )


def _may_raise() -> bool:
    try:
        with open("/proc/self/status") as status:
            capabilities = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    except StopIteration:
        return os.geteuid() == 0
    except OSError:  # no descriptor left, the very error in question
        return False
    return bool(capabilities >> _SYS_RESOURCE & 1)
