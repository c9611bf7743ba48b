"""Many hosts beside clush, pdsh and asyncssh on the same work, interleaved in one run; part of `make bench`.

The hosts are addresses of one ssh server on this machine, in a network namespace, so most of the time is the
server's, and the same for all. Key exchange is curve25519 for everybody, but for the row that says so: OpenSSH 9.2's
default costs its client several times more, and is what clush gives to people who do not know that.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster_hosts import ManyHosts
from cluster_slurm import Slurm

if TYPE_CHECKING:
    from cluster_netns import Node

ROUNDS = int(os.environ.get("ROUNDS", "3"))
COUNT = int(os.environ.get("HOSTS", "1000"))
ECHO = str(Path(__file__).with_name("echo_everywhere.py"))
REACH = str(Path(__file__).parents[1] / "programs" / "reach_hosts.py")
KEX = "Host *\n  KexAlgorithms curve25519-sha256\n"
STOCK = "clush, key exchange as ssh comes"


def run(node: Node, *argv: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a command on a node to its end; return seconds, and processor time and peak memory including children."""
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        node.command(*argv),
        env={**os.environ, "HOME": str(node.home), **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.monotonic() - began, "cpu_s": cpu_s, "out": done.stdout, "err": done.stderr}


def echo_by(method: str, many: ManyHosts, file: Path, connect_s: int) -> dict[str, Any]:
    names = f"h[0001-{COUNT:04}]"
    if method in ("distdiag", "asyncssh"):
        done = run(many.client, sys.executable, ECHO, method, str(file), str(connect_s))
        assert done["out"], done["err"]
        reported = json.loads(done["out"])
        return {**reported, "seconds": done["seconds"], "cpu_s": done["cpu_s"]}
    argv = {
        "clush": ["clush", "-f", "64", "-t", str(connect_s), "-w", names, "echo ok"],
        STOCK: ["clush", "-f", "64", "-t", str(connect_s), "-w", names, "echo ok"],
        "pdsh": ["pdsh", "-R", "ssh", "-f", "64", "-t", str(connect_s), "-w", names, "echo ok"],
    }[method]
    options = f"-o ConnectTimeout={connect_s} -o BatchMode=yes"
    config = many.client.home / ".ssh" / "config"
    fast = config.read_text()
    if method == STOCK:
        config.write_text(fast.replace(KEX, ""))
    done = run(many.client, *argv, env={"PDSH_SSH_ARGS_APPEND": options})
    config.write_text(fast)
    return {**done, "ok": done["out"].count(": ok"), "rss_mib": None}


def compare(many: ManyHosts, title: str, file: Path, expected: int, *more: str) -> None:
    rows: dict[str, list[dict[str, Any]]] = {}
    for _ in range(ROUNDS):
        for method in ("distdiag", "asyncssh", "pdsh", "clush", *more):
            rows.setdefault(method, []).append(echo_by(method, many, file, 5))
    print(f"\n{title}, {ROUNDS} rounds, medians\n")
    print("| | seconds | ratio | answered | client CPU per host | peak memory |\n|---|---|---|---|---|---|")
    ours = statistics.median(one["seconds"] for one in rows["distdiag"])
    for method, found in rows.items():
        seconds = statistics.median(one["seconds"] for one in found)
        cpu = statistics.median(one["cpu_s"] for one in found) / COUNT * 1e3
        good = min(one["ok"] for one in found)
        memory = f"{max(one['rss_mib'] for one in found)} MiB" if found[0]["rss_mib"] else ""
        ratio = f"{ours / seconds:.2f}" if method != "distdiag" else ""
        print(f"| {method} | {seconds:.1f} | {ratio} | {good} of {expected} | {cpu:.1f} ms | {memory} |", flush=True)


def prepare(many: ManyHosts) -> Path:
    config = many.client.home / ".ssh" / "config"
    config.write_text(config.read_text() + KEX)
    file = many.client.folder / "hosts.txt"
    file.write_text("\n".join(many.names))
    return file


def a_thousand() -> None:
    with ManyHosts(COUNT, own_names=False) as many:
        file = prepare(many)
        compare(many, f"`echo` on {COUNT} hosts", file, COUNT)
        dead = many.names[-(COUNT // 10) :]
        many.black_hole(dead)
        compare(many, f"`echo` on {COUNT} hosts, {len(dead)} of them black holes", file, COUNT - len(dead), STOCK)


def a_bastion() -> None:
    with ManyHosts(200, bastion=True, own_names=False) as many:
        file = prepare(many)
        found = [echo_by("distdiag", many, file, 5) for _ in range(ROUNDS)]
    seconds = statistics.median(one["seconds"] for one in found)
    print(
        f"\n200 hosts through one bastion with sshd's default limits: {min(one['ok'] for one in found)} answered, "
        f"{seconds:.1f} s",
        flush=True,
    )


def a_large_job() -> None:
    with Slurm(64) as slurm:
        job = slurm.allocate(64)
        plain = [
            "srun",
            "--overlap",
            f"--jobid={job}",
            "-N64",
            "-n64",
            "--ntasks-per-node=1",
            "--input=none",
            "--mpi=none",
        ]
        python = [*plain, sys.executable, "-c", "import json, socket; print(json.dumps(socket.gethostname()))"]
        ours = [sys.executable, REACH, json.dumps({"slurm_job": str(job)})]
        seconds: dict[str, list[float]] = {"hostname": [], "python": [], "distdiag": [], "facts": []}
        for _ in range(ROUNDS):
            for name, argv in (("hostname", [*plain, "hostname"]), ("python", python), ("distdiag", ours)):
                done = run(slurm.client, *argv, env=slurm.env())
                assert done["out"].count("mn") >= 64, done
                seconds[name].append(done["seconds"])
            reported = json.loads(done["out"])
            seconds["facts"].append(done["seconds"] - reported["seconds_to_close"])
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    print(
        f"\n64-node SLURM job: srun hostname {middle['hostname']:.2f} s, srun of a Python that prints its host name "
        f"{middle['python']:.2f} s; distdiag has the facts of all nodes after {middle['facts']:.2f} s "
        f"({middle['facts'] / middle['python']:.2f} of the second) and has left them all after "
        f"{middle['distdiag']:.2f} s ({middle['distdiag'] / middle['python']:.2f})",
        flush=True,
    )


def orphans() -> None:
    """The processes left on 32 hosts 3 s after the program in front was ended."""
    print("\n| left on 32 hosts after | Ctrl-C | SIGKILL |\n|---|---|---|")
    for name in ("distdiag", "pdsh", "clush"):
        left = [_left_after(name, number) for number in (signal.SIGINT, signal.SIGKILL)]
        print(f"| {name} | {left[0]} | {left[1]} |", flush=True)


def _left_after(name: str, number: signal.Signals) -> int:
    with ManyHosts(32, own_names=False) as many:
        argv = {
            "distdiag": [sys.executable, REACH, json.dumps({"hosts": "h[0001-0032]"}), "stay"],
            "pdsh": ["pdsh", "-R", "ssh", "-f", "64", "-w", "h[0001-0032]", "sleep 999"],
            "clush": ["clush", "-f", "64", "-w", "h[0001-0032]", "sleep 999"],
        }[name]
        what = "distdiag-agent" if name == "distdiag" else "sleep 999"
        front = many.client.start(*argv, env={"HOME": str(many.client.home)})
        deadline = time.monotonic() + 60
        while _count(many, what) < 32 and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(front.pid, number)
        time.sleep(3)
        return _count(many, what)


def _count(many: ManyHosts, what: str) -> int:
    # The shell that ssh starts for a command has it in its arguments as well.
    commands = many.farm.processes().values()
    return sum(command == what or (what == "distdiag-agent" and what in command) for command in commands)


if __name__ == "__main__":
    a_thousand()
    a_bastion()
    a_large_job()
    orphans()
