"""One machine of a test cluster: its own address, host name, process ids, /run, /dev/shm and home.

Nothing outlives the test, even a killed one: the holder of a node ends when its stdin does, and takes with it what
runs there. The namespaces have no names, so no two runs can meet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

import support_torch
from cluster_faults import Faults
from support import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster_faults import Cable

# Arguments: folder, host name, address, and whether to mount a /proc of one's own process ids. The shell reads its
# stat file itself, before that: so the pid is the one known to the test.
_HOLDER = r"""
set -e
read -r pid rest </proc/self/stat
echo "$pid"
[ "$4" = shared ] || mount -t proc proc /proc
mount -t tmpfs none /run
mkdir -m 755 /run/sshd
mount -t tmpfs none /dev/shm
for file in hosts passwd shadow nsswitch.conf; do mount --bind "$1/$file" "/etc/$file"; done
echo "$2" >/proc/sys/kernel/hostname
read -r linked
printf '%s\n' 'link set lo up' "addr add $3/16 dev eth0" 'link set eth0 up' | ip -batch -
exec 3<&0
cat <&3 >/dev/null &
echo ready
wait # as the first process of its node it also reaps what is left to it
[ "$4" = shared ] || exit 0
here=$(readlink /proc/self/ns/net | tr -cd 0-9)
for link in $(find /proc/[0-9]*/ns/net -lname "*$here*"); do
  pid=${link#/proc/}; pid=${pid%%/*}
  [ "$pid" = $$ ] || kill -9 "$pid" || true
done 2>/dev/null
"""


class Node(Faults):
    """One machine of the cluster, for as long as its holder lives."""

    def __init__(self, folder: Path, name: str, address: str, cable: Cable, *, own_pids: bool) -> None:
        self.name = name
        self.address = address
        self.folder = folder / name
        self.home = self.folder / "home"
        self.home.mkdir(parents=True)
        self.write_hosts("127.0.0.1 localhost\n")
        self.log_in_with("/bin/sh")
        self._write_name_service()
        self._own_pids = own_pids
        self._children: list[subprocess.Popen[str]] = []
        self._holder = self._hold()
        super().__init__(cable, int(line_of(self._holder)))
        self._holders: set[int] = set()
        self._machinery: set[int] = set()

    def join(self) -> None:
        """Bring up this end of the cable, once both are there."""
        assert self._holder.stdin is not None
        self._holder.stdin.write("linked\n")
        self._holder.stdin.flush()
        assert line_of(self._holder) == "ready"
        self._holders = self._all_pids()

    def command(self, *argv: str) -> list[str]:
        """Give the arguments that run something on this node; without any, the words to put before it."""
        return ["nsenter", *self.enter_options(), *argv]

    def enter_options(self) -> list[str]:
        """Return nsenter's options, and this node's home for its programs."""
        kinds = ["-n", "-m", "-u", *(["-p"] if self._own_pids else [])]
        return ["-t", str(self.pid), *kinds, "--", "env", f"HOME={self.home}"]

    def run(
        self, *argv: str, timeout: float = 30, check: bool = True, env: Mapping[str, str] | None = None, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this node to its end."""
        return subprocess.run(
            self.command(*argv),
            input=stdin,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=check,
        )

    def start(
        self, *argv: str, env: Mapping[str, str] | None = None, output: int | IO[str] = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        """Start a command on this node, in a process group of its own; it ends with the node at the latest.

        The pid is nsenter's: to reach the command itself, signal the group, or use `signal` with the node's pid.
        A script of torch is forked instead (support_torch).
        """
        environment = {**os.environ, **(env or {})}
        forked = support_torch.start(argv, {**environment, "HOME": str(self.home)}, output=output, node=self.pid)
        child = forked or subprocess.Popen(
            self.command(*argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            start_new_session=True,
        )
        self._children.append(child)
        return child

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process by the id that it has on this node."""
        self.run("kill", f"-{number.value}", str(pid))

    def processes(self) -> dict[int, str]:
        """Return the command lines of this node's processes, by the pids visible to the test."""
        found = {}
        for pid in self._all_pids() - self._holders - self._machinery:
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
        return {pid: line for pid, line in found.items() if line}

    def overlook(self, text: str) -> None:
        """Count processes with this text in their command line as part of the machine: no longer in `processes`."""
        self._machinery |= {pid for pid, line in self.processes().items() if text in line}

    def listens_on(self, port: int) -> bool:
        """Look in the kernel's table, so that no server is knocked at for nothing."""
        lines = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]
        ]
        return any(words[1].endswith(f":{port:04X}") and words[3] == "0A" for words in lines)

    def wait_for_port(self, port: int, timeout: float = 20) -> None:
        """Wait until something listens."""
        wait_until(lambda: self.listens_on(port), timeout, lambda: f"nobody listens on {self.name}:{port}")

    def write_hosts(self, text: str) -> None:
        """Replace this node's /etc/hosts, at once and for running programs too."""
        (self.folder / "hosts").write_text(text)

    def log_in_with(self, shell: str) -> None:
        """Make this the login shell of root here, and the node's home its home."""
        root = f"root:x:0:0:root:{self.home}:{shell}\n"
        others = [line for line in Path("/etc/passwd").read_text().splitlines(True) if not line.startswith("root:")]
        (self.folder / "passwd").write_text(root + "".join(others))
        (self.folder / "shadow").write_text("root:*:19000:0:99999:7:::\n")  # no password, and not locked

    def close(self) -> None:
        """End the processes started here, then the node."""
        # What runs here goes before the nsenter that waits for it: an orphan waits for the machine's init instead,
        # which may take seconds, and the node ends no sooner.
        for child in self._children:
            _signal_group(child, signal.SIGCONT)
        self._kill_all()
        end_holder(self._holder)
        for child in self._children:
            _signal_group(child, signal.SIGKILL)
            child.wait(10)
            if child.stdout is not None:
                child.stdout.close()

    def _kill_all(self) -> None:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and (pids := self._all_pids() - self._holders):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)  # then again, for processes forked meanwhile

    def _write_name_service(self) -> None:
        # An unknown name is refused at once, as by a DNS server that answers.
        lines = Path("/etc/nsswitch.conf").read_text().splitlines()
        kept = [line for line in lines if not line.startswith("hosts:")]
        (self.folder / "nsswitch.conf").write_text("\n".join([*kept, "hosts: files", ""]))

    def _hold(self) -> subprocess.Popen[str]:
        kinds = ["-nmup", "--fork", "--kill-child"] if self._own_pids else ["-nmu"]
        pids = "own" if self._own_pids else "shared"
        script = ["sh", "-c", _HOLDER, "holder", str(self.folder), self.name, self.address, pids]
        return start_holder(["unshare", *kinds, "--propagation", "private", *script])

    def _all_pids(self) -> set[int]:
        kind = "pid" if self._own_pids else "net"
        mine = os.readlink(f"/proc/{self.pid}/ns/{kind}")
        found = set()
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/{kind}") == mine:
                    found.add(int(entry))
        return found


def start_holder(command: list[str]) -> subprocess.Popen[str]:
    """Start what lives until its stdin ends."""
    # A session of its own: Ctrl-C must not take the cluster away before the test has seen it.
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, start_new_session=True
    )


def _signal_group(leader: subprocess.Popen[str], number: signal.Signals) -> None:
    if leader.poll() is None:
        os.killpg(leader.pid, number)


def line_of(holder: subprocess.Popen[str]) -> str:
    """Read what a holder says next."""
    assert holder.stdout is not None
    line = holder.stdout.readline().strip()
    assert line, "a holder ended; its last words are on stderr"
    return line


def end_holder(holder: subprocess.Popen[str]) -> None:
    """Let a holder go, and wait until it has."""
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.close()
    holder.stdout.close()
    try:
        holder.wait(10)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait(10)
