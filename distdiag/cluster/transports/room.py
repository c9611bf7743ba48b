"""How many hosts fit into the number of files that we may open."""

from __future__ import annotations

import resource
import threading
import time

_FDS_PER_HOST = 3
"""The connection, and the pipe by which paramiko tells that there is something to read."""
_SPARE_FDS = 64


class Room:
    """Descriptors for hosts; our limit of them is raised as far as we may."""

    def __init__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limit = soft
        wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            self.limit = wanted
        self.hosts = self._free = max(4, (self.limit - _SPARE_FDS) // _FDS_PER_HOST)
        self.changed = time.monotonic()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take one host's share, if there is one."""
        with self._lock:
            if self._free == 0:
                return False
            self._free -= 1
            self.changed = time.monotonic()
            return True

    def give_back(self) -> None:
        """Have one host's share back."""
        with self._lock:
            self._free += 1
            self.changed = time.monotonic()
