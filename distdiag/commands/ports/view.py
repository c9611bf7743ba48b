"""The report of ports as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Column

from distdiag.cluster.hosts import fold, fold_ranks
from distdiag.diagnosis.nic_selection import export_line
from distdiag.fold import by_key
from distdiag.output import Whole, Wrapped, host_table, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from distdiag.cluster.rendezvous_test import NetworkPath
    from distdiag.commands.ports.types import PortsData, ProbeRow, Request
    from distdiag.report import Report

_MATRIX = 32
_LISTENERS = 12
_USUAL = (29400, 29500, 6000, 12355, 1234)
_ANSWERS = {"silent": "connects, sends nothing first (as torch's store)", "other": "sends"}


def ports_view(report: Report[PortsData], request: Request) -> Iterator[RenderableType]:
    """Draw the probes; else this node's interfaces, the choices of NCCL and Gloo, and the listeners."""
    data = report.data
    yield from host_table(data.hosts)
    if data.pairs:
        yield from _pairs(data, verbose=request.verbose)
    elif data.probes:
        yield from _probes(data.probes, verbose=request.verbose)
    elif data.nodes:
        yield from _node(data, request)
    yield from _exports(data)


def _node(data: PortsData, request: Request) -> Iterator[RenderableType]:
    yield _interfaces(data, verbose=request.verbose)
    ib_ports = [port for node in data.nodes.values() for port in node.ib_ports]
    if ib_ports:
        yield Whole("")
        table = plain_table(
            Column("rdma port"), Column("state"), Column("link"), Column("Gbit/s", justify="right"), Column("interface")
        )
        for port in ib_ports:
            rate = f"{port.rate_bits_per_s / 1e9:g}" if port.rate_bits_per_s else "-"
            table.add_row(f"{port.device}:{port.port}", port.state, port.link, rate, ", ".join(port.netdevs) or "-")
        yield table
    yield Whole("")
    for name in ("NCCL", "Gloo"):
        taken = [nic for choice in data.choice.values() for nic in (choice.nccl if name == "NCCL" else choice.gloo)]
        nics = ", ".join(f"{nic.name} ({nic.address})" for nic in taken)
        yield Wrapped(f"{name} would use {nics}" if nics else f"{name} would fail: no interface", margin=0, hang=2)
    yield Whole("")
    yield from _listeners(data, request)
    (first, *_) = data.nodes.values()
    if first.network.ephemeral_ports:
        yield Whole("ephemeral ports: {}-{}".format(*first.network.ephemeral_ports))
    if first.lowest_free:
        yield Whole(f"free port for a rendezvous: {first.lowest_free}")


def _interfaces(data: PortsData, *, verbose: bool) -> Table:
    several = len(data.nodes) > 1
    table = plain_table(
        *([Column("host")] if several else []),
        Column("interface", no_wrap=True),
        Column("kind", no_wrap=True),
        Column("state", no_wrap=True),
        Column("mtu", justify="right", no_wrap=True),
        Column("Gbit/s", justify="right", no_wrap=True),
        Column("addresses", overflow="fold"),
    )
    for host, nic in ((host, nic) for host, node in data.nodes.items() for nic in node.network.interfaces):
        if not nic.addresses and not nic.up and not verbose:
            continue
        state = "running" if nic.running else "no carrier" if nic.up else "down"
        speed = f"{nic.speed_bits_per_s / 1e9:g}" if nic.speed_bits_per_s else "-"
        name = nic.name + (" (default route)" if nic.default_route else "")
        row = [name, nic.kind, state, str(nic.mtu or "-"), speed, " ".join(nic.addresses) or "-"]
        table.add_row(*([host] if several else []), *row)
    return table


def _listeners(data: PortsData, request: Request) -> Iterator[RenderableType]:
    wanted, verbose = {*_USUAL, *request.ports}, request.verbose
    listeners = [each for node in data.nodes.values() for each in node.listeners]
    shown = [each for each in listeners if verbose or each.port in wanted or "python" in each.command]
    if not shown:
        usual = ", ".join(map(str, _USUAL[:3]))
        yield Wrapped(f"no listener on the usual ports ({usual}); {len(listeners)} on other ports (-v)", margin=0)
        return
    table = plain_table(Column("listening"), Column("pid", justify="right"), Column("command", overflow="fold"))
    for listener in shown if verbose else shown[:_LISTENERS]:
        address = f"[{listener.address}]" if ":" in listener.address else listener.address
        table.add_row(f"{address}:{listener.port}", str(listener.pid or "?"), listener.command or "permission denied")
    yield table


def _probes(probes: Sequence[ProbeRow], *, verbose: bool) -> Iterator[RenderableType]:
    """Draw one row for the ports of a host with the same answer."""
    groups: dict[tuple[str, ...], list[ProbeRow]] = {}
    for probe in probes:
        quote = f" {probe.said!r}" if probe.said and probe.by != "distdiag" else ""
        by = f"{_ANSWERS.get(probe.by, probe.by)}{quote}" if probe.state == "open" else probe.error
        groups.setdefault((probe.source, probe.host, probe.address, probe.state, by, probe.interface), []).append(probe)
    several = len({probe.source for probe in probes}) > 1
    table = plain_table(
        *([Column("from")] if several else []),
        Column("to", overflow="fold"),
        Column("address", overflow="fold"),
        Column("port", overflow="fold"),
        Column("state", no_wrap=True),
        Column("ms", justify="right", no_wrap=True),
        Column("interface", no_wrap=True),
        Column("answer", overflow="fold"),
    )
    for (source, host, address, state, by, interface), rows in groups.items():
        times = sorted(probe.rtt_s for probe in rows if probe.rtt_s is not None)
        took = f"{times[len(times) // 2] * 1e3:.1f}" if times else "-"
        ports = fold_ranks(probe.port for probe in rows)
        table.add_row(*([source] if several else []), host, address or "-", ports, state, took, interface or "-", by)
    yield table


def _pairs(data: PortsData, *, verbose: bool) -> Iterator[RenderableType]:
    tried = {host for pair in data.pairs for host in (pair.source, pair.target)}
    known = dict.fromkeys([*data.nodes, *sorted(tried)])
    hosts = [host for host in known if host in tried]
    main = [pair for pair in data.pairs if pair.purpose in ("port", "ranks")]
    spare = all(pair.purpose in ("also", "other") for pair in data.pairs)
    states = by_key(((pair.source, pair.target), pair) for pair in (data.pairs if spare else main))
    if len(hosts) <= _MATRIX:
        yield from _matrix(hosts, states)
    else:
        good = sum(all(pair.is_open for pair in rows) for rows in states.values())
        yield Whole(f"{good} of {len(states)} paths between {len(hosts)} nodes are open")
    yield Whole("")
    yield Wrapped(_figures(data), margin=0)
    if verbose:
        for pair in data.pairs:
            probe = pair.probe
            took = f" {probe.latency_s * 1e3:.1f} ms" if probe.latency_s is not None else ""
            where = f"{pair.source} -> {pair.target} {probe.address}:{probe.port} ({pair.purpose})"
            yield Whole(f"  {where} {probe.verdict}{took}")


def _matrix(hosts: list[str], states: dict[tuple[str, str], list[NetworkPath]]) -> Iterator[RenderableType]:
    """Draw the matrix of paths: a row per source, a letter per target."""
    width = max(map(len, hosts))
    yield Whole(f"{'from':<{width}}  to {fold(hosts)}, in this order")
    letters = set()
    for source in hosts:
        cells = [" " if source == target else _cell(states.get((source, target), [])) for target in hosts]
        letters.update(cells)
        yield Whole(f"{source:<{width}}  {' '.join(cells)}")
    meanings = {
        ".": ". open",
        "p": "p only the port is closed",
        "e": "e only ephemeral ports are closed",
        "X": "X closed",
        "m": "m large packets are dropped",
        "~": "~ packet loss",
        "?": "? not tested",
    }
    yield Whole("  ".join(text for letter, text in meanings.items() if letter in letters))


def _cell(rows: list[NetworkPath]) -> str:
    if not rows:
        return "?"
    bad = [pair for pair in rows if not pair.is_open]
    if not bad:
        return "~" if any(pair.probe.verdict == "lossy" for pair in rows) else "."
    if any(pair.probe.verdict.startswith("swallowed") for pair in bad):
        return "m"
    purposes = {pair.purpose for pair in bad}
    open_too = {pair.purpose for pair in rows if pair.is_open}
    if purposes == {"port"} and "ranks" in open_too:
        return "p"
    return "e" if purposes == {"ranks"} and "port" in open_too else "X"


def _figures(data: PortsData) -> str:
    times = sorted(pair.probe.latency_s for pair in data.pairs if pair.probe.latency_s is not None)
    probes = [pair.probe for pair in data.pairs if pair.probe.bulk_bytes]
    rates = sorted(probe.bulk_bytes / probe.bulk_s for probe in probes if probe.bulk_s)
    took = (
        f"latency {times[len(times) // 2] * 1e3:.1f} ms median, {times[-1] * 1e3:.1f} ms max" if times else "no answers"
    )
    speed = (
        f"; throughput with all sending: about {_rate(rates[len(rates) // 2])} per path, min {_rate(rates[0])}"
        if rates
        else ""
    )
    return took + speed


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.1f} MB/s"


def _exports(data: PortsData) -> Iterator[RenderableType]:
    """List the lines to paste, if several nodes were tested."""
    if not data.pairs or not data.exports:
        return
    yield Whole("")
    yield Whole("set on every node:" if "" in data.exports else "set on each node:")
    for host, variables in data.exports.items():
        if variables:
            yield Whole(f"  {host + ': ' if host else ''}{export_line(variables)}")
