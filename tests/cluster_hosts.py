"""A thousand hosts for one client: every address of a range is the same machine, with one ssh server."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

from cluster import Names, Network
from cluster_faults import nft_set
from cluster_ssh import Sshd, give_user_keys

if TYPE_CHECKING:
    from collections.abc import Iterable

_RANGE = "10.78.0.0/16"
_BASTION = "bastion"
_FARM = "farm"
# Each login is a machine of its own by name: h0001 for 10.78.0.1. SSH_CONNECTION ends with our address and port.
_LOGIN = r"""#!/bin/sh
set -- $SSH_CONNECTION
tail=${3#10.78.}
printf 'h%04d\n' $((${tail%.*} * 250 + ${tail#*.})) >/proc/sys/kernel/hostname
exec sh -c "$SSH_ORIGINAL_COMMAND"
"""


class ManyHosts:
    """Hosts h0001, h0002, ... that only seem to be many; the client reaches them directly or through a bastion.

    A bastion has an sshd with its default limits (10:30:100 start-ups, 10 sessions), which the hosts do not, and alone
    knows their names and the way to them. `own_names` costs each login about 3 ms.
    """

    def __init__(self, count: int = 1000, *, bastion: bool = False, own_names: bool = True) -> None:
        assert count <= 9999
        self.names = [f"h{number:04}" for number in range(1, count + 1)]
        self._behind_bastion = bastion
        self._own_names = own_names
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            self.network = undo.enter_context(Network([_FARM, _BASTION] if self._behind_bastion else [_FARM]))
            self.client = self.network.client
            self.farm = self.network[_FARM]
            self.bastion = self.network[_BASTION] if self._behind_bastion else None
            self._lay_roads()
            servers = [Sshd(self.farm, options=self._login_options())]
            if self.bastion:
                servers.append(Sshd(self.bastion, default_limits=True))
            self.know()
            for server in servers:
                server.wait()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def address(self, name: str) -> str:
        """Give a host's address."""
        number = int(name[1:])
        return f"10.78.{(number - 1) // 250}.{(number - 1) % 250 + 1}"

    def black_hole(self, names: Iterable[str]) -> None:
        """Never answer connections to these hosts."""
        self.farm.at_switch(f"ip daddr {self._set(names)} drop", "in")

    def refuse(self, names: Iterable[str]) -> None:
        """Let nothing listen on these hosts."""
        rule = f"ip daddr {self._set(names)} reject with tcp reset"
        self.farm.in_firewall("input", "type filter hook input priority 0;", f"meta l4proto tcp {rule}")

    def divert(self, names: Iterable[str], port: int) -> None:
        """Let another server of `farm` answer port 22 of these hosts: a hostile sshd, or another program."""
        rule = f"ip daddr {self._set(names)} tcp dport 22 redirect to :{port}"
        self.farm.in_firewall("nat", "type nat hook prerouting priority -100;", rule)

    def know(self, *, unknown: Iterable[str] = (), changed: Iterable[str] = ()) -> None:
        """Write known_hosts anew: without the hosts of `unknown`, and with a wrong key for those of `changed`."""
        owners = dict.fromkeys(self.names, _FARM) | dict.fromkeys(changed, "somebody else")
        for name in unknown:
            del owners[name]
        known = {name if self.bastion else f"{name},{self.address(name)}": owner for name, owner in owners.items()}
        if self.bastion:
            known[f"{_BASTION},{self.bastion.address}"] = _BASTION
        give_user_keys(self.client, known, config=f"Host h*\n  ProxyJump {_BASTION}\n" if self.bastion else "")

    def _set(self, names: Iterable[str]) -> str:
        return nft_set(self.address(name) for name in names)

    def _lay_roads(self) -> None:
        self.farm.run("ip", "route", "add", "local", _RANGE, "dev", "lo")
        nearest = self.bastion or self.client
        nearest.run("ip", "route", "add", _RANGE, "via", self.farm.address)
        names = "".join(f"{self.address(name)} {name}\n" for name in self.names)
        nearest.write_hosts(self.network.hosts_file(nearest, Names.GOOD) + names)

    def _login_options(self) -> list[str]:
        if not self._own_names:
            return []
        script = self.farm.folder / "login"
        script.write_text(_LOGIN)
        script.chmod(0o755)
        return [f"ForceCommand exec unshare -u {script}"]
