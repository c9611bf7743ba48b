"""Gloo's choice, as we predict it and as torch really makes it, on a node with several interfaces."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from cluster import Names, Network, need_network
from support import distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator

# Gloo's device listens at the address that it has chosen as soon as it is made.
REALLY = """
import os, re, socket, struct, sys, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist
try:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
except RuntimeError as error:
    print("error", re.search(r"for: (.*)", str(error)).group(0)); sys.exit()
links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
own = {os.readlink(link) for link in links if os.path.lexists(link)}
for line in open("/proc/self/net/tcp").read().splitlines()[1:]:
    columns = line.split()
    if columns[3] == "0A" and f"socket:[{columns[9]}]" in own:
        print("address", socket.inet_ntoa(struct.pack("=I", int(columns[1].split(":")[0], 16))))
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


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (Names.GOOD, None),
        (Names.DEBIAN, None),
        (Names.UNKNOWN, None),
        (Names.GOOD, "docker0"),
        (Names.GOOD, "eth0"),
        (Names.GOOD, "^lo"),
        (Names.GOOD, "eth"),
        (Names.GOOD, "eth0 "),
    ],
)
def test_gloo_takes_what_we_say(networks: dict[Names, Network], names: Names, wanted: str | None) -> None:
    network = networks[names]
    node = network.nodes[0]
    variables = {"GLOO_SOCKET_IFNAME": wanted} if wanted is not None else {}
    env = {**network.client_env(), **variables}
    result = distdiag("ports", "--json", wrap=tuple(node.command()), env=env)
    predicted = [one["address"] for one in result.report["data"]["choice"]["gloo"]]
    errors = [one["title"] for one in result.report["findings"] if one["id"] == "ports.gloo-ifname"]
    really = node.run(sys.executable, "-c", REALLY, env=variables).stdout.strip()
    if really.startswith("error"):
        assert predicted == []
        assert any(really.removeprefix("error ").strip() in title for title in errors), (really, errors)
    else:
        assert [f"address {address}" for address in predicted] == [really], json.dumps(result.report["data"]["choice"])
