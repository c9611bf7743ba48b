"""Gloo's choice, as we predict it and as torch really makes it, on a node with several interfaces."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from cluster import Names, Network, need_network
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator

WANTED = [
    (Names.GOOD, None),
    (Names.DEBIAN, None),
    (Names.UNKNOWN, None),
    (Names.GOOD, "docker0"),
    (Names.GOOD, "eth0"),
    (Names.GOOD, "^lo"),
    (Names.GOOD, "eth"),
    (Names.GOOD, "eth0 "),
]
# Gloo's device listens at the address that it has chosen as soon as it is made. Each choice is made in a process of its
# own, forked from a process with torch imported, and written to a file: torch's warnings are on stdout, too.
REALLY = """
import json, os, re, socket, struct, sys, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist

def choose():
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    except RuntimeError as error:
        return ["error " + re.search(r"for: (.*)", str(error)).group(0)]
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    own = {os.readlink(link) for link in links if os.path.lexists(link)}
    rows = (line.split() for line in open("/proc/self/net/tcp").read().splitlines()[1:])
    here = [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return ["address " + socket.inet_ntoa(struct.pack("=I", int(address, 16))) for address in here]

for wanted in json.loads(sys.argv[1]):
    if os.fork() == 0:
        if wanted is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = wanted
        print(json.dumps([wanted, choose()]), file=open(sys.argv[2], "a"), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
os._exit(0)
"""


@pytest.fixture(scope="module")
def networks() -> Iterator[dict[Names, Network]]:
    need_network()
    with Network(1) as good, Network(1, names=Names.DEBIAN) as debian, Network(1, names=Names.UNKNOWN) as unknown:
        found = {Names.GOOD: good, Names.DEBIAN: debian, Names.UNKNOWN: unknown}
        for network in found.values():
            node = network.nodes[0]
            node.run("ip", "link", "add", "docker0", "type", "bridge")
            node.run("ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
            node.run("ip", "link", "set", "docker0", "up")
        yield found


@pytest.fixture(scope="module")
def chosen(
    networks: dict[Names, Network], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[Names, str | None], list[str]]:
    """What Gloo says and takes on each node, for each of WANTED."""
    script = tmp_path_factory.mktemp("gloo") / "really.py"
    script.write_text(REALLY)
    found: dict[tuple[Names, str | None], list[str]] = {}
    for names, network in networks.items():
        asked = json.dumps([wanted for its, wanted in WANTED if its is names])
        env = {"OMP_NUM_THREADS": "1"}  # NumPy's threads would be there before the fork
        said = script.with_suffix(f".{names.name}")
        assert network.nodes[0].start(sys.executable, str(script), asked, str(said), env=env).wait(60) == 0
        found |= {(names, wanted): choice for wanted, choice in map(json.loads, said.read_text().splitlines())}
    return found


@pytest.mark.parametrize(("names", "wanted"), WANTED)
def test_gloo_takes_what_we_say(
    networks: dict[Names, Network],
    chosen: dict[tuple[Names, str | None], list[str]],
    names: Names,
    wanted: str | None,
) -> None:
    network = networks[names]
    node = network.nodes[0]
    variables = {"GLOO_SOCKET_IFNAME": wanted} if wanted is not None else {}
    env = {**network.client_env(), **variables}
    result = distdiag("ports", "--json", wrap=tuple(node.command()), env=env)
    (choice,) = result.report["data"]["choice"].values()
    predicted = [one["address"] for one in choice["gloo"]]
    errors = [one["title"] for one in result.report["findings"] if one["id"] == "ports.gloo-ifname"]
    (really,) = chosen[names, wanted]
    if really.startswith("error"):
        assert predicted == []
        assert any(really.removeprefix("error ").strip() in title for title in errors), (really, errors)
    else:
        assert [f"address {address}" for address in predicted] == [really], json.dumps(choice)
