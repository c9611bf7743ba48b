"""Jobs that do not start, on three nodes of a test network: how each is launched, and which nodes are at fault.

The answers were written before the first run.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import Names
from fork_server import Program
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cluster import Network
    from cluster_netns import Node

TESTS = Path(__file__).resolve().parent
TRAIN = str(TESTS / "programs" / "plain_allreduce.py")
OLD = str(TESTS / "programs" / "gloo_job.py")
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
_IMPORT_S = 0.8
"""Less processor time than an import of torch takes."""


def c10d(endpoint: str, nodes: int = 2, run_id: str = "7") -> list[str]:
    where = ("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}")
    return [TORCHRUN, f"--nnodes={nodes}", "--nproc-per-node=1", *where, TRAIN]


def static(address: str, port: int, rank: int, nodes: int = 2) -> list[str]:
    where = ("--node-rank", str(rank), "--master-addr", address, "--master-port", str(port))
    return [TORCHRUN, "--nnodes", str(nodes), "--nproc-per-node", "1", *where, TRAIN]


def module(address: str, port: int, rank: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *static(address, port, rank)[1:]]


def plain(rank: int, address: str, port: int = 29500, world: int = 2, local: int = 0) -> list[str]:
    place = (
        f"RANK={rank}",
        f"WORLD_SIZE={world}",
        f"LOCAL_RANK={local}",
        f"MASTER_ADDR={address}",
        f"MASTER_PORT={port}",
    )
    return ["env", *place, sys.executable, TRAIN]


def mpirun(address: str) -> list[str]:
    place = ("-x", f"MASTER_ADDR={address}", "-x", "MASTER_PORT=29500", "-x", "WORLD_SIZE=2")
    rank = f"RANK=$OMPI_COMM_WORLD_RANK exec {sys.executable} {TRAIN}"
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *place, "sh", "-c", rank]


def through_variables(endpoint: str) -> list[str]:
    names = ("PET_NNODES=2", "PET_RDZV_BACKEND=c10d", f"PET_RDZV_ENDPOINT={endpoint}", "PET_RDZV_ID=7")
    return ["env", *names, TORCHRUN, TRAIN]


def accelerate(address: str, port: int, rank: int) -> list[str]:
    where = ("--num_machines=2", "--num_processes=2", f"--machine_rank={rank}", f"--main_process_ip={address}")
    kind = ("--multi_gpu", "--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={port}")
    return [
        *("env", "ACCELERATE_USE_CPU=true", sys.executable, "-m", "accelerate.commands.launch"),
        *(*where, *kind, TRAIN),
    ]


def deepspeed(address: str, port: int, rank: int, nodes: int = 2) -> list[str]:
    """Return the line that the deepspeed launcher has pdsh start on a node."""
    world = base64.urlsafe_b64encode(json.dumps({f"node{node + 1}": [0] for node in range(nodes)}).encode()).decode()
    where = (f"--world_info={world}", f"--node_rank={rank}", f"--master_addr={address}", f"--master_port={port}")
    return [sys.executable, "-u", "-m", "deepspeed.launcher.launch", *where, TRAIN]


def serves(port: int) -> list[str]:
    return [sys.executable, "-m", "http.server", str(port)]


@dataclass(frozen=True)
class StartFault:
    """What runs on which node (0 to 2); `culprits`: the nodes to accuse, all of them: both ends of a closed path.

    `words`: all of them, separated by " & ", are in the first finding ("|": one of these), of all nodes or the last;
    `alone`: those of the last node where they differ, since only the store knows the others.
    `drops`, `rejects`: what the firewall of node 0 does to this port; `opens`: the only ports that each lets in.
    `server`: another program on node 0. `island`: an interface of each node that reaches no other. `ipv6_port`: node1's
    name has an IPv6 address first, and its firewall drops that port there. `names`: what /etc/hosts knows.
    """

    runs: tuple[tuple[int, tuple[str, ...]], ...]
    culprits: tuple[int, ...]
    words: str
    alone: str = ""
    drops: int = 0
    rejects: int = 0
    server: tuple[str, ...] = ()
    island: str = ""
    ipv6_port: int = 0
    opens: tuple[int, ...] = ()
    names: Names = Names.GOOD


def _runs(*commands: list[str], first: int = 0) -> tuple[tuple[int, tuple[str, ...]], ...]:
    return tuple((first + number, tuple(command)) for number, command in enumerate(commands))


def _waits(place: str) -> str:
    return f"node2 waits at {place}|node2 waits for {place}, where nothing listens"


def _other_port(*commands: list[str]) -> StartFault:
    return StartFault(_runs(*commands), (1,), _waits("node1:29501"))


def _other_name(*commands: list[str]) -> StartFault:
    return StartFault(_runs(*commands), (1,), "cannot resolve nod1")


FAULTS = {
    "port-c10d": StartFault(_runs(c10d("node1:29400"), c10d("node1:29401")), (1,), _waits("node1:29401")),
    "port-static": _other_port(static("node1", 29500, 0), static("node1", 29501, 1)),
    "port-module": _other_port(module("node1", 29500, 0), module("node1", 29501, 1)),
    "port-variables": StartFault(
        _runs(through_variables("node1:29400"), through_variables("node1:29401")), (1,), _waits("node1:29401")
    ),
    "port-plain": _other_port(plain(0, "node1"), plain(1, "node1", 29501)),
    "name-c10d": _other_name(c10d("node1:29400"), c10d("nod1:29400")),
    "name-static": _other_name(static("node1", 29500, 0), static("nod1", 29500, 1)),
    "name-plain": _other_name(plain(0, "node1"), plain(1, "nod1")),
    "name-mpirun": StartFault(_runs(mpirun("nod1")), (0,), "cannot resolve nod1"),
    "localhost-static": StartFault(
        _runs(static("localhost", 29500, 0), static("localhost", 29500, 1)), (1,), "node2 & localhost:29500, itself"
    ),
    "localhost-c10d": StartFault(
        _runs(c10d("localhost:29400"), c10d("localhost:29400")), (0, 1), "node[1-2]|any other node & itself"
    ),
    "localhost-plain": StartFault(
        _runs(plain(0, "localhost"), plain(1, "localhost")), (1,), "node2 & localhost:29500, itself"
    ),
    "node-missing": StartFault(
        _runs(c10d("node1:29400", 3), c10d("node1:29400", 3)),
        (2,),
        "does not run on node3",
        alone="2 of 3 nodes & node[1-2]",
    ),
    "first-missing": StartFault(_runs(static("node1", 29500, 1), first=1), (0,), "node1:29500 & nothing listens"),
    "rank-0-missing": StartFault(_runs(plain(1, "node1"), first=1), (0,), "node1:29500 & nothing listens"),
    "node-rank-twice": StartFault(
        _runs(*(static("node1", 29500, rank, 3) for rank in (0, 1, 1))),
        (1, 2),
        "node[2-3] & both & --node-rank 1",
        alone="--node-rank 2 & have the same --node-rank",
    ),
    "run-id": StartFault(
        _runs(c10d("node1:29400"), c10d("node1:29400", run_id="8")), (0, 1), "--rdzv-id: 7 on node1, 8 on node2"
    ),
    "node-count": StartFault(
        _runs(static("node1", 29500, 0, 3), static("node1", 29500, 1, 2)),
        (0, 1),
        "--nnodes: 3 on node1, 2 on node2",
        alone="node1:29500 & waits for more & --nnodes is not 2",
    ),
    "backend": StartFault(
        _runs(c10d("node1:29500"), static("node1", 29500, 1)), (0, 1), "--rdzv-backend: c10d on node1, static on node2"
    ),
    "firewall-drops": StartFault(
        _runs(c10d("node1:29400"), c10d("node1:29400")), (0, 1), "node2 gets no answer from node1:29400", drops=29400
    ),
    "firewall-rejects": StartFault(
        _runs(static("node1", 29500, 0), static("node1", 29500, 1)),
        (0, 1),
        "node2 & rejected|no route & node1:29500",
        rejects=29500,
    ),
    "port-taken": StartFault(
        _runs(c10d("node1:29400"), c10d("node1:29400")),
        (0,),
        "port 29400 on node1 & another program & http.server|does not answer",
        server=tuple(serves(29400)),
    ),
    "port-accelerate": _other_port(accelerate("node1", 29500, 0), accelerate("node1", 29501, 1)),
    "name-accelerate": _other_name(accelerate("node1", 29500, 0), accelerate("nod1", 29500, 1)),
    "port-deepspeed": _other_port(deepspeed("node1", 29500, 0), deepspeed("node1", 29501, 1)),
    "node-missing-deepspeed": StartFault(
        _runs(deepspeed("node1", 29500, 0, 3), deepspeed("node1", 29500, 1, 3)), (2,), "node3"
    ),
    "rank-1-missing": StartFault(_runs(plain(0, "node1")), (1,), "rank 1 of 2"),
    "rank-twice": StartFault(
        _runs(*(plain(rank, "node1", world=3) for rank in (0, 1, 1))),
        (1, 2),
        "RANK=1: on node[2-3]",
        alone="rank 2 of 3 & have the same RANK",
    ),
    "world-size": StartFault(
        _runs(plain(0, "node1"), plain(1, "node1", world=3)),
        (0, 1),
        "WORLD_SIZE & 2 for rank 0 & 3 for rank 1",
        alone="rank 0 has gone on with 2 & WORLD_SIZE=3",
    ),
    "gloo-interface": StartFault(
        _runs(*(["env", "GLOO_SOCKET_IFNAME=ib0", *plain(rank, "node1")] for rank in (0, 1))),
        (0, 1),
        "rank 1 & 192.168.5.1 & ib0",
        island="ib0",
    ),
    "gloo-no-interface": StartFault(
        _runs(plain(0, "node1"), ["env", "GLOO_SOCKET_IFNAME=ib9", *plain(1, "node1")]), (1,), "rank 1 of 2"
    ),
    "ipv6-first": StartFault(
        _runs(plain(0, "node1"), plain(1, "node1")), (1,), "node2 & IPv6 address fd77::1", ipv6_port=29500
    ),
    "ipv6-first-static": StartFault(
        _runs(static("node1", 29500, 0), static("node1", 29500, 1)),
        (1,),
        "node2 & IPv6 address fd77::1",
        ipv6_port=29500,
    ),
    "host-name-c10d": StartFault(
        _runs(c10d("10.77.0.1:29400"), c10d("10.77.0.1:29400")), (0, 1), "cannot resolve node", names=Names.UNKNOWN
    ),
    "only-one-port-open": StartFault(
        _runs(c10d("node1:29400"), c10d("node1:29400")), (0, 1), "node2 gets no answer from node1:", opens=(29400,)
    ),
    "stale-store": StartFault(
        ((0, (*static("node1", 29500, 0)[:-1], "--rdzv-id=old", OLD)), (1, tuple(static("node1", 29500, 1)))),
        (0,),
        "store of another job & gloo_job.py",
        alone="store of another job & --rdzv-id is old",
    ),
}


_IN_LOG = {
    "node1:29401": "port-c10d port-variables",
    "node1:29501": "port-static port-module port-plain port-accelerate port-deepspeed",
    "nod1": "name-c10d name-static name-plain name-mpirun name-accelerate",
    "localhost:29500": "localhost-static localhost-plain",
    "node1:29500": "first-missing rank-0-missing",
    "--node-rank": "node-rank-twice",
    "2 of 3 & --nnodes": "node-count",
    "node1:29400": "firewall-drops",
    "node1:29500|10.77.0.1:29500": "firewall-rejects",
    "2 of 3": "node-missing-deepspeed",
    "1 of 2": "rank-1-missing",
    "two processes have one RANK": "rank-twice",
    "WORLD_SIZE": "world-size",
    "192.168.5.1": "gloo-interface",
    "ib9": "gloo-no-interface",
    "fd77::1|node1:29500": "ipv6-first ipv6-first-static",
    "node1|node2": "host-name-c10d",
    "node1:": "only-one-port-open",
    "--rdzv-id & old": "stale-store",
    "--rdzv-backend": "backend",
}
"""Words of `logs` once all processes have given up: of which faults. The logs of the others hold only a timeout."""


def _close_ports(fault: StartFault, network: Network) -> None:
    first = network.nodes[0]
    if fault.drops:
        first.drop(fault.drops)
    if fault.opens:
        for node in network.nodes:
            node.drop_ephemeral(*fault.opens)
    if fault.rejects:
        first.reject(fault.rejects, how="admin-prohibited")
    if fault.ipv6_port:
        rule = f"meta nfproto ipv6 tcp dport {fault.ipv6_port} drop"
        first.in_firewall("input", "type filter hook input priority 0;", rule)


def start(fault: StartFault, network: Network) -> Node:
    """Start a job that does not start; give the last node that it runs on. The network ends all of it."""
    _prepare(fault, network)
    wait_idle([network.nodes[number].start(*command, env={"OMP_NUM_THREADS": "1"}) for number, command in fault.runs])
    return network.nodes[fault.runs[-1][0]]


def wait_idle(started: Sequence[subprocess.Popen[str]]) -> None:
    """Wait until each has imported torch and waits, or has ended; for 30 s at most.

    It saves questions that are asked too early, and is no proof: ask until the answer is the expected one.
    """
    until, used = time.monotonic() + 30, [math.nan] * len(started)
    while time.monotonic() < until:
        before, used = used, [_used_s(each.pid) for each in started]
        pairs = zip(started, before, used, strict=True)
        if all(each.poll() is not None or was == now >= _import_s(each) for each, was, now in pairs):
            return
        time.sleep(0.3)


def _import_s(program: subprocess.Popen[str]) -> float:
    return 0.0 if isinstance(program, Program) else _IMPORT_S  # a fork has it already


def _used_s(session: int) -> float:
    """Return the processor time of all processes of a session; NaN, which equals nothing, while one has more to do."""
    ticks = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = path.read_text().rpartition(")")[2].split()
            if int(words[3]) == session:
                ticks += int(words[11]) + int(words[12]) if words[0] != "R" else math.nan
    return ticks / os.sysconf("SC_CLK_TCK")


def logs_of(fault: StartFault, network: Network, *, patience_s: float) -> list[Path]:
    """Run a job with short limits until all of it has given up; return the output of each process."""
    _prepare(fault, network)
    limits = "join_timeout=20,read_timeout=20,timeout=20"
    env = {"OMP_NUM_THREADS": "1", "PET_RDZV_CONF": limits, "TIMEOUT_S": "20"}
    files = [network.folder / f"output-{at}.log" for at in range(len(fault.runs))]
    ranks = []
    for (number, command), file in zip(fault.runs, files, strict=True):
        with file.open("w") as output:
            conf = [f"--rdzv_conf={limits}"] * ("--multi_gpu" in command)  # accelerate does not read PET_*
            ranks.append(network.nodes[number].start(*command[:-1], *conf, command[-1], env=env, output=output))
    until = time.monotonic() + patience_s
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
        time.sleep(0.5)
    return files


def read_logs(files: list[Path]) -> dict[str, Any]:
    """Return the report of `logs` on these files."""
    argv = [sys.executable, "-m", "distdiag", "logs", "--json", *map(str, files)]
    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": str(TESTS.parent)}, capture_output=True, check=False)
    return {**json.loads(done.stdout), "exit": done.returncode}


def score_log(name: str, report: dict[str, Any]) -> str:
    """Score what `logs` says, see `score`."""
    words = next((words for words, names in _IN_LOG.items() if name in names.split()), "")
    return score_words(words, (), report)


def _prepare(fault: StartFault, network: Network) -> None:
    _close_ports(fault, network)
    first = network.nodes[0]
    if fault.server:
        first.start(*fault.server)
        first.wait_for_port(int(fault.server[-1]))
    for number, node in enumerate(network.nodes):
        if fault.island:
            node.run("ip", "link", "add", fault.island, "type", "veth", "peer", "name", "unused")
            node.run("ip", "addr", "add", f"192.168.5.{number + 1}/24", "dev", fault.island)
            node.run("ip", "link", "set", fault.island, "up")
            for end in {1, 2, 3} - {number + 1}:  # without an answer to ARP, a connection fails after 3 s
                silent = ("lladdr", "02:00:00:00:00:01", "dev", fault.island)
                node.run("ip", "neigh", "add", f"192.168.5.{end}", *silent)
        if fault.ipv6_port:
            node.run("ip", "-6", "addr", "add", f"fd77::{number + 1}/64", "dev", "eth0", "nodad")
            node.write_hosts(f"fd77::1 node1\n{network.hosts_file(node, Names.GOOD)}")


def ask(network: Network, node: Node | None) -> dict[str, Any]:
    """Ask hang about all nodes, or on one of them."""
    where, hosts = (
        (node, []) if node is not None else (network.client, ["--hosts", network.hosts, "--via", network.via])
    )
    return hang(where, hosts, network.client_env())


def hang(where: Node, hosts: list[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Run `hang --json` there; return its report, with the exit status as "exit"."""
    done = distdiag("hang", "--json", *hosts, env=dict(env), wrap=tuple(where.command()))
    return {**done.report, "exit": done.code}


def score(fault: StartFault, report: dict[str, Any], *, alone: bool) -> str:
    """Score one answer, see score_words."""
    culprits = [f"node{number + 1}" for number in fault.culprits]
    words = fault.alone if alone and fault.alone else fault.words
    return score_words(words, culprits, report, alone=alone)


def score_words(words: str, culprits: Iterable[str], report: dict[str, Any], *, alone: bool = True) -> str:
    """Return right, next, unknown or wrong.

    Right: these words are in the first finding, and no host is accused but all culprits; a warning may accuse none.
    Next: no cause is named, but the command that decides. Wrong: ok, or another host is accused.
    """
    blamed = [finding for finding in report["findings"] if finding["level"] in ("fail", "warn")]
    accused = {host for finding in blamed for host in finding["where"]["hosts"]}
    if report["verdict"] == "ok" or accused - set(culprits):
        return "wrong"
    first = next(iter(blamed), None)
    if first is None:
        return "unknown"
    text = f"{first['title']} {first['detail']}"
    is_named = alone or accused == set(culprits) or (first["level"] == "warn" and not accused)
    if words and is_named and all(any(word in text for word in each.split("|")) for each in words.split(" & ")):
        return "right"
    return "next" if first["fix"] and first["fix"]["commands"] else "unknown"
