"""Outlier nodes: facts compared over all nodes; differences ranked by possible harm, with the deviating nodes. Pure.

Numbers are clustered: three nodes with 503.1, 503.2 and 503.1 GiB are equal. Without a majority value, the difference
is reported without naming a node.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold, fold_within
from distdiag.commands.doctor.gpu_symptoms import SPEED_LIMITS
from distdiag.commands.doctor.symptoms import finding_about, symptom
from distdiag.commands.doctor.types import COMMAND, DifferenceRow
from distdiag.diagnosis.hosts.drift import differences, grouped
from distdiag.diagnosis.wording import format_size
from distdiag.facts.host.file_systems import NO_ANSWER
from distdiag.facts.network.interfaces import is_loopback
from distdiag.fold import by_key
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from distdiag.commands.doctor.collect import Disks, Gpus, NodeNetwork, Software, System
    from distdiag.commands.doctor.types import NodeDoctor
    from distdiag.diagnosis.hosts.drift import Difference
    from distdiag.report import Finding

_ROOM = 60
_FEWEST = 3
_MEMORY, _SPACE = 0.02, 0.1
"""Relative gaps between clusters: firmware reserves memory on each node, and file systems differ by bytes."""


_KINDS = (
    *("debug", "nccl", "torch", "files", "imex", "driver", "python", "gpus", "rdma", "network", "environment"),
    *("limits", "mounts", "memory", "cpus", "shm", "system"),
)
"""The most harmful first; rows differs.KIND of knowledge/doctor_symptoms.toml."""
_HINTS = ("IFNAME", "_HCA", "_DEBUG", "_FILE", "_HOSTID", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_")
"""Variables that may legitimately differ between nodes."""


_SAID_BY = {
    "memlock limit": ("memlock",),
    "nofile limit": ("nofile",),
    "nproc limit": ("nproc",),
    "stack limit": ("stack",),
    "address space limit": ("address-space",),
    "size of /dev/shm": ("shm",),
    "somaxconn": ("somaxconn",),
    "range of ephemeral ports": ("few-ports",),
    "what its own host name resolves to": ("gloo-ifname",),
}
"""Findings about a single node that cover the same difference."""


def difference_findings(
    nodes: Sequence[NodeDoctor], said: Mapping[str, Collection[str]]
) -> tuple[list[Finding], list[DifferenceRow]]:
    """Compare nodes: findings, the most harmful first, except those `said` (hosts by id), and all differing facts."""
    found = [*_all_differences(nodes)]
    found.sort(key=lambda pair: _KINDS.index(pair[0]))
    groups = by_key(
        ((kind, _level(kind, difference), _outliers(difference)), difference)
        for kind, difference in found
        if not _is_reported(difference, said)
    )
    findings = [_finding(kind, level, odd, group) for (kind, level, odd), group in groups.items()]
    return findings, [_row(kind, difference) for kind, difference in found]


def _is_reported(difference: Difference, said: Mapping[str, Collection[str]]) -> bool:
    label = difference.fact.lstrip("~")
    ids = ("nic-down", "no-network") if label.startswith("state of ") else _SAID_BY.get(label, ())
    hosts = {host for id_ in ids for host in said.get(f"{COMMAND}.{id_}", ())}
    return bool(ids) and hosts >= set(difference.odd_hosts)


def _all_differences(nodes: Sequence[NodeDoctor]) -> Iterator[tuple[str, Difference]]:
    """Compare each part over the nodes that sent it: a missing part is not a value."""
    reads: tuple[tuple[str, Callable[..., _Values]], ...] = (
        ("system", _of_system),
        ("disks", _of_disks),
        ("network", _of_network),
        ("software", _of_software),
        ("gpus", _of_gpus),
    )
    for part, read in reads:
        parts = {node.host: getattr(node, part) for node in nodes if getattr(node, part) is not None}
        values = {host: read(own) for host, own in parts.items()}
        if len(values) < 2:
            continue
        texts = {host: dict(own.texts) for host, own in values.items()}
        for label in dict.fromkeys(label for own in values.values() for label in own.numbers):
            numbers = {host: own.numbers[label] for host, own in values.items() if label in own.numbers}
            tolerance, write = next(own.how[label] for own in values.values() if label in own.how)
            for host, name in grouped(numbers, tolerance, write).items():
                texts[host][label] = name
        kinds = {label: kind for own in values.values() for label, kind in own.kinds.items()}
        for table in _comparable(texts):
            for difference in differences(table):
                yield kinds[difference.fact], difference


def _comparable(texts: Mapping[str, Mapping[str, str]]) -> Iterator[dict[str, dict[str, object]]]:
    """Yield tables of facts by node: all facts, then each whose label varies by node, without the nodes that lack it.

    An interface named eth0 here and ens3 there is no difference. Where some lack it, three and most nodes must have it.
    """
    yield {host: {label: own[label] for label in own if not label.startswith("~")} for host, own in texts.items()}
    for label in dict.fromkeys(label for own in texts.values() for label in own if label.startswith("~")):
        table: dict[str, dict[str, object]] = {host: {label: own[label]} for host, own in texts.items() if label in own}
        if len(table) == len(texts) or len(table) >= max(_FEWEST, len(texts) // 2 + 1):
            yield table


class _Values:
    """Comparable values of a node, by label: texts, and numbers with their tolerance and format."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.numbers: dict[str, float] = {}
        self.how: dict[str, tuple[float, Callable[[float], str]]] = {}
        self.kinds: dict[str, str] = {}

    def text(self, kind: str, label: str, value: object) -> None:
        """Add a text; None is omitted, and counts as "none" if other nodes have a value.

        A label that begins with ~ is only compared among the nodes that have it.
        """
        self.kinds[label] = kind
        if value is not None and value != "":
            self.texts[label] = str(value)

    def number(self, kind: str, label: str, value: float | None, how: tuple[float, Callable[[float], str]]) -> None:
        self.kinds[label] = kind
        if value is not None:
            self.numbers[label] = value
            self.how[label] = how


def _bytes(number: float) -> str:
    return format_size(int(number))


def _of_system(system: System) -> _Values:
    values = _Values()
    for limit in system.limits:
        in_bytes = limit.name in ("memlock", "stack", "core", "as")
        soft = "unlimited" if limit.soft is None else format_size(limit.soft) if in_bytes else str(limit.soft)
        if limit.name == "nproc" and limit.soft is not None:
            # The kernel derives its default from the memory size, which differs slightly between machines.
            values.number("limits", "nproc limit", float(limit.soft), (_SPACE, lambda number: f"{number:.0f}"))
        else:
            values.text("limits", f"{'address space' if limit.name == 'as' else limit.name} limit", soft)
    values.number("memory", "memory", system.memory_bytes, (_MEMORY, _bytes))
    values.number("memory", "cgroup memory limit", system.cgroup.memory_bytes, (_MEMORY, _bytes))
    values.text("cpus", "processors for the job", system.cpus)
    values.text("cpus", "cgroup processor limit", system.cgroup.cpus)
    shm = system.shm
    values.number("shm", "size of /dev/shm", shm.total_bytes if shm and not shm.error else None, (_SPACE, _bytes))
    for name, value in system.variables.items():
        values.text("debug" if name == "TORCH_DISTRIBUTED_DEBUG" else "environment", f"${name}", value)
    values.text("system", "transparent huge pages", system.huge_pages)
    values.text("limits", "somaxconn", system.somaxconn)
    values.text("system", "kernel", system.kernel)
    values.text("python", "processor type", system.arch)
    values.text("system", "machine", system.product)
    return values


def _of_disks(disks: Disks) -> _Values:
    values = _Values()
    for place, space in enumerate(disks.spaces):
        if space.error:
            continue  # has its own finding
        if space.path in disks.written:
            label = "the home folder" if place == 1 else space.path
            values.text("mounts", f"~file system of {label}", space.kind)
        else:
            values.text("mounts", f"mount {space.path}", f"{space.kind} {space.source}")
    hung = {space.path for space in disks.spaces if space.error.startswith(NO_ANSWER)}
    for path in hung:
        values.texts.pop(f"mount {path}", None)
    tmp = next((space for space in disks.spaces if space.path == "/tmp" and not space.error), None)
    values.number("mounts", "size of /tmp", tmp.total_bytes if tmp is not None else None, (_SPACE, _bytes))
    return values


def _of_network(network: NodeNetwork) -> _Values:
    values = _Values()
    real = [nic for nic in network.nics if not nic.loopback and not nic.virtual]
    values.text("network", "interfaces with an address", ", ".join(sorted(nic.name for nic in real if nic.addresses)))
    for nic in real:
        state = "up" if nic.running else "no carrier" if nic.up else "down"
        values.text("network", f"~state of {nic.name}", state)
        values.text("network", f"~MTU of {nic.name}", nic.mtu)
        speed = nic.speed_bits_per_s
        values.text("network", f"~speed of {nic.name}", f"{speed / 1e9:g} Gb/s" if speed else None)
    values.text("network", "range of ephemeral ports", network.ephemeral_ports)
    if network.names is not None:
        loops = all(map(is_loopback, network.names.host_addresses))
        own = "does not resolve" if network.names.host_error else "loopback" if loops else "its address"
        values.text("network", "what its own host name resolves to", own)
    active = (port for port in network.ib_ports if port.state == "ACTIVE")
    counts = Counter(f"{port.link} {(port.rate_bits_per_s or 0) / 1e9:g} Gb/s" for port in active)
    values.text("rdma", "active RDMA ports", ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items())))
    firmware = ", ".join(sorted(set(network.counters.firmware.values())))
    values.text("system", "firmware of RDMA cards", firmware)
    return values


def _of_software(software: Software) -> _Values:
    values = _Values()
    values.text("nccl", "NCCL", software.nccl)
    values.text("torch", "torch", software.torch)
    values.text("torch", "torch's CUDA", software.cuda)
    values.text("torch", "torch's ROCm", software.hip)
    if software.libraries:
        files = f"{len(software.libraries)} files of {sum(software.libraries.values())} bytes"
        values.text("files", f"~torch/lib of {software.torch}", files)
    values.text("python", "Python", software.python)
    values.text("system", "glibc", software.glibc)
    values.text("system", "OFED", software.ofed)
    return values


def _of_gpus(gpus: Gpus) -> _Values:
    values = _Values()
    kinds = Counter(gpu.name for gpu in gpus.health.gpus)
    found = ", ".join(f"{count} x {name}" for name, count in sorted(kinds.items()))
    values.text("gpus", "GPUs", found or (f"{gpus.driver.hardware} on the bus" if gpus.driver.hardware else None))
    values.text("driver", "NVIDIA driver", gpus.driver.kernel)
    values.text("imex", "nodes of IMEX", " ".join(gpus.imex_nodes))
    values.text("imex", "NVLink clique", ", ".join(sorted({gpu.clique for gpu in gpus.health.gpus if gpu.clique})))
    values.text("gpus", "MIG mode", ", ".join(sorted({gpu.mig for gpu in gpus.health.gpus if gpu.mig})))
    widths = sorted({gpu.pcie_width for gpu in gpus.health.gpus if gpu.pcie_width})
    values.text("gpus", "PCIe width of GPUs", ", ".join(widths))
    for limit in SPEED_LIMITS:
        least = min((value for gpu in gpus.health.gpus if (value := limit.of(gpu))), default=None)
        values.number("gpus", f"~lowest {limit.label} of GPUs", least, (limit.tolerance, limit.write))
    active = sum(gpu.links - len(gpu.inactive_links) for gpu in gpus.health.gpus)
    values.text("gpus", "active NVLinks", active or None)
    return values


def _level(kind: str, difference: Difference) -> Level | None:
    """Return INFO for a difference that does no harm, else None: the level of the row."""
    if kind == "environment" and any(word in difference.fact for word in _HINTS):
        return Level.INFO
    values = (difference.common, *(value for value, _ in difference.others))
    is_harmless = kind == "debug" and not any(value.upper() == "DETAIL" for value in values)
    return Level.INFO if is_harmless else None


def _outliers(difference: Difference) -> tuple[str, ...]:
    """Return the hosts without the majority value; () without a majority."""
    most = len(difference.common_hosts)
    return () if any(len(hosts) >= most for _, hosts in difference.others) else difference.odd_hosts


def _finding(kind: str, level: Level | None, odd: tuple[str, ...], group: Sequence[Difference]) -> Finding:
    evidence = map(_line, group) if len(group) > 1 or len(group[0].others) > 1 else ()
    return finding_about(symptom(f"differs.{kind}", level=level, evidence=evidence, title=_title(group[0], odd)), odd)


def _title(difference: Difference, odd: tuple[str, ...]) -> str:
    label = difference.fact.lstrip("~")
    if not odd:
        return f"nodes differ: {_line(difference)}"
    value, hosts = difference.others[0]
    others = f"the other {len(difference.common_hosts)} nodes"
    return f"{fold_within(hosts, _ROOM)}: {label} is {value[:_ROOM]}, but {difference.common[:_ROOM]} on {others}"


def _line(difference: Difference) -> str:
    values = [*difference.others, (difference.common, difference.common_hosts)]
    return f"{difference.fact.lstrip('~')}: " + "; ".join(f"{value} on {fold(hosts)}" for value, hosts in values)


def _row(kind: str, difference: Difference) -> DifferenceRow:
    values = {difference.common: difference.common_hosts, **dict(difference.others)}
    return DifferenceRow(
        id=f"{COMMAND}.differs.{kind}",
        fact=difference.fact.lstrip("~"),
        values=values,
        outliers=_outliers(difference),
    )
