"""Symptoms of one node: limits, memory, disks, network, versions, the kernel's log. Pure."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from distdiag.commands.doctor.symptoms import symptom
from distdiag.diagnosis.nic_selection import (
    export_line,
    exports,
    gloo_fix,
    gloo_selection,
    nccl_selection,
    objection,
    suggested,
)
from distdiag.diagnosis.wording import counted, format_age, format_size
from distdiag.facts.host.file_systems import NO_ANSWER
from distdiag.knowledge import advisories
from distdiag.report import Fix, Level, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.commands.doctor.collect import Disks, Limit, System
    from distdiag.commands.doctor.types import NodeDoctor, Symptom
    from distdiag.facts.host.file_systems import Space
    from distdiag.facts.host.kernel_signs import KernelLine
    from distdiag.facts.network.nics import IbPort, Nic

_MIB, _GIB = 2**20, 2**30
_LEAST_MEMLOCK = 64 * _MIB
"""NCCL registers buffers of several MiB for each channel and peer; with less, ibv_reg_mr fails (nccl-tests#206)."""
_FEW_FILES, _MANY_FILES = 1024, 4096
_FEW_PROCESSES = 1024
_LEAST_STACK = _MIB
_SHM_FOR_EACH_RANK = 32 * _MIB
"""NCCL needs about 10 MB of /dev/shm for each of the few peers that a rank reaches through it (nccl#290)."""
_CONTAINER_SHM = 64 * _MIB
"""Default size in docker and Kubernetes: two DataLoader workers with batches of 16 MiB fill it."""
_FULL_BYTES, _LOW_BYTES, _LOW_SHARE = 16 * _MIB, _GIB, 0.05
_FEW_INODES = 0.01
_DENIED = "Permission denied"
_LITTLE_MEMORY = 512 * _MIB
_RESENT_SHARE, _RESENT_LEAST = 0.01, 50
_RECENT_S, _DAY_S = 600.0, 86400.0
_CONGESTION = (
    *("port_xmit_discards", "packet_seq_err", "out_of_sequence", "local_ack_timeout_err", "rnr_nak_retry_err"),
    "roce_adp_retrans",
)
"""Counters that also grow on a busy fabric."""
_SHOWN_PIDS = 8
_RAISES = {
    "memlock": "-l unlimited",
    "nofile": "-n 65536",
    "nproc": "-u unlimited",
    "stack": "-s 8192",
    "as": "-v unlimited",
}
"""Options of ulimit."""


def node_symptoms(node: NodeDoctor, *, several: bool) -> Iterator[Symptom]:
    """Yield all symptoms; `several`: for a job on several nodes."""
    if node.system is not None:
        yield from _limits(node, node.system)
        yield from _memory(node.system)
        yield from _shm(node, node.system)
    if node.disks is not None:
        yield from _disks(node.disks)
    yield from _network(node, several=several)
    yield from _software(node)
    yield from _running(node)
    yield from _log(node)


def _limits(node: NodeDoctor, system: System) -> Iterator[Symptom]:
    rdma = [port for port in node.network.ib_ports if port.state == "ACTIVE"] if node.network is not None else []
    has_gpu = node.gpus is not None and bool(node.gpus.health.gpus)
    whose = _of_whom(system)
    for limit in system.limits:
        soft, size = limit.soft, format_size(limit.soft or 0)
        repair = _raise(limit, system) if limit.name in _RAISES else None
        say = partial(symptom, "address-space" if limit.name == "as" else limit.name, repair=repair)
        if soft is None:
            continue
        if limit.name == "memlock" and rdma and not system.may_lock:
            level = Level.FAIL if soft < _LEAST_MEMLOCK and system.in_step else Level.WARN
            yield say(level=level, size=size, whose=whose)
        elif limit.name == "nofile" and soft < _MANY_FILES:
            few = soft < _FEW_FILES
            yield say(level=Level.WARN if few else Level.INFO, count=soft, detail=whose if few else "")
        elif limit.name == "nproc" and soft < _FEW_PROCESSES:
            yield say(count=soft, detail=whose)
        elif limit.name == "core" and soft == 0:
            yield say()
        elif limit.name == "stack" and soft < _LEAST_STACK:
            yield say(size=size, detail=whose)
        elif limit.name == "as":
            yield say(level=Level.WARN if has_gpu else Level.INFO, size=size)


def _of_whom(system: System) -> str:
    """Return the context of a limit: a login's often differs from that of the daemon that starts jobs."""
    if system.in_step:
        return "This is the limit inside the launcher's step."
    return "This is the limit of a login; inside a job of a batch system it may differ: run doctor there."


def _raise(limit: Limit, system: System) -> Fix:
    command = f"ulimit {_RAISES[limit.name]}"
    value = command.rpartition(" ")[2]
    enough = limit.hard is None or (value.isdigit() and limit.hard >= int(value))
    if enough:
        return Fix(text="raise it in the script that starts the job", commands=(command,))
    where = f"LimitMEMLOCK and the like in slurmd's unit, PropagateResourceLimits in slurm.conf ({limit.name.upper()})"
    text = f"raise the hard limit as root: {where}" if system.in_step else "raise the hard limit as root"
    line = f"echo '* - {limit.name} {value}' | sudo tee /etc/security/limits.d/90-{limit.name}.conf"
    return Fix(text=f"{text}; docker: --ulimit {limit.name}=-1", commands=() if system.in_step else (line,))


def _memory(system: System) -> Iterator[Symptom]:
    cgroup, total, left = system.cgroup, system.memory_bytes, system.available_bytes
    if left is not None and total and left < min(_LITTLE_MEMORY, _LOW_SHARE * total):
        limit = "none" if cgroup.memory_bytes is None else format_size(cgroup.memory_bytes)
        evidence = (f"memory {format_size(total)}, cgroup limit {limit}",)
        yield symptom("memory", free=format_size(left), evidence=evidence)
    elif cgroup.memory_bytes is not None and total and cgroup.memory_bytes < total:
        yield symptom("memory-limit", limit=format_size(cgroup.memory_bytes), total=format_size(total))
    if cgroup.cpus is not None and cgroup.cpus < system.cpus:
        yield symptom("cpu-limit", limit=f"{cgroup.cpus:g}", total=system.cpus)
    if cgroup.pids is not None and cgroup.pids - (cgroup.pids_used or 0) < _FEW_PROCESSES // 4:
        yield symptom("pids-limit", limit=cgroup.pids, used=cgroup.pids_used)
    if cgroup.oom_kills:
        yield symptom("oom", kills=counted(cgroup.oom_kills, "OOM kill"))


def _shm(node: NodeDoctor, system: System) -> Iterator[Symptom]:
    shm = system.shm
    gpus = len(node.gpus.health.gpus) if node.gpus is not None else 0
    if shm is None:
        yield symptom("no-shm")
    elif shm.error:
        yield symptom("shm-error", subject="/dev/shm", error=shm.error)
    elif shm.total_bytes <= _CONTAINER_SHM or shm.free_bytes < max(1, gpus) * _SHM_FOR_EACH_RANK:
        used = shm.free_bytes < shm.total_bytes / 2 or shm.total_bytes <= _CONTAINER_SHM
        yield symptom(
            "shm",
            level=Level.WARN if used or gpus > 1 else Level.INFO,
            free=format_size(shm.free_bytes),
            total=format_size(shm.total_bytes),
        )


def _disks(disks: Disks) -> Iterator[Symptom]:
    """Judge each file system once: /tmp and the home are often on the same."""
    seen = set()
    for space in disks.spaces:
        whole = (space.kind, space.source, space.total_bytes, space.error)
        found = None if whole in seen else _disk(space, is_written=space.path in disks.written)
        seen.add(whole)
        if found is not None:
            yield found


def _disk(space: Space, *, is_written: bool) -> Symptom | None:
    """Judge one file system; one without job output may be full or read-only."""
    words = {"path": space.path, "quoted": quoted(space.path), "error": space.error}
    mounted = (f"{space.source} on {space.path} type {space.kind}",)
    if space.error.startswith(NO_ANSWER):
        return symptom("mount-hung", words, subject=space.path, evidence=mounted)
    if space.error:
        if not is_written and space.error == _DENIED:
            return None  # another user's FUSE mount is closed to all other users, including root
        evidence = (f"{space.source} type {space.kind}",) if space.kind else ()
        return symptom("disk-error", words, subject=space.path, evidence=evidence)
    if not is_written:
        return None
    if space.read_only:
        return symptom("disk-read-only", words, subject=space.path, evidence=mounted)
    share = space.free_bytes / space.total_bytes if space.total_bytes else 1.0
    free = f"{format_size(space.free_bytes)} of {format_size(space.total_bytes)} free"
    if space.total_bytes and (share < _LOW_SHARE and space.free_bytes < _LOW_BYTES):
        full = space.free_bytes < min(_FULL_BYTES, 0.01 * space.total_bytes)
        level, how = (Level.FAIL, "full") if full else (Level.WARN, "nearly full")
        return symptom("disk-full", words, subject=space.path, level=level, how=how, free=free)
    if space.inodes and space.free_inodes < _FEW_INODES * space.inodes:
        level = Level.FAIL if space.free_inodes == 0 else Level.WARN
        counts = {"left": space.free_inodes, "total": space.inodes, "free": free}
        return symptom("inodes", {**words, **counts}, subject=space.path, level=level)
    return None


def _network(node: NodeDoctor, *, several: bool) -> Iterator[Symptom]:
    network = node.network
    if network is None:
        return
    yield from _interfaces(network.nics, several=several)
    yield from _selected(node) if several else _gloo_on_loopback(node)
    for counter in network.counters.links:
        if counter.grown and not counter.name.endswith("dropped"):
            yield symptom(
                "link-errors",
                subject=counter.link,
                level=Level.INFO if counter.name in _CONGESTION else Level.WARN,
                link=counter.link,
                counter=counter.name,
                grown=counter.grown,
                seconds=f"{network.counters.over_s:.1f}",
                evidence=(f"{counter.name} since boot: {counter.value}",),
            )
    sent, resent = network.counters.tcp_sent, network.counters.tcp_resent
    if resent >= _RESENT_LEAST and resent > _RESENT_SHARE * max(1, sent):
        yield symptom("retransmits", resent=resent, sent=sent, seconds=f"{network.counters.over_s:.1f}")
    yield from _rdma(network.ib_ports)


def _interfaces(nics: tuple[Nic, ...], *, several: bool) -> Iterator[Symptom]:
    real = [nic for nic in nics if not nic.loopback and not nic.virtual]
    for nic in nics:
        if nic.loopback and not nic.up:
            yield symptom("loopback-down", subject=nic.name, nic=nic.name, quoted=quoted(nic.name))
    for nic in real:
        if nic.up and not nic.running and nic.addresses:
            words = {"nic": nic.name, "addresses": ", ".join(nic.plain_addresses), "quoted": quoted(nic.name)}
            yield symptom("nic-down", words, subject=nic.name)
    if several and not any(nic.running and nic.addresses for nic in nics if not nic.loopback):
        yield symptom("no-network", names=", ".join(nic.name for nic in real) or "none")


def _selected(node: NodeDoctor) -> Iterator[Symptom]:
    """Judge the interfaces selected by NCCL and Gloo for a job on several nodes."""
    network, variables = node.network, node.system.variables if node.system is not None else {}
    if network is None or not any(nic.running and nic.addresses for nic in network.nics if not nic.loopback):
        return
    usable = tuple(nic for nic in network.nics if nic.addresses)
    lines = exports(suggested(usable))
    fix = Fix(text="set the interface explicitly", commands=(export_line(lines),)) if lines else None
    nccl = nccl_selection(usable, variables)
    if doubt := objection(nccl):
        level = Level.FAIL if nccl.error else Level.WARN
        names = nccl.names or "no interface"
        yield symptom("nccl-ifname", level=level, names=names, doubt=doubt, rule=nccl.rule, repair=fix)
    if network.names is None:
        yield symptom("name-slow")
        return
    gloo = gloo_selection(usable, network.names, variables)
    if doubt := objection(gloo):
        fix = gloo_fix(gloo, lines) if lines else None
        yield symptom("gloo-ifname", names=gloo.names or "no interface", doubt=doubt, rule=gloo.rule, repair=fix)


def _gloo_on_loopback(node: NodeDoctor) -> Iterator[Symptom]:
    """Remark on a selection that would be a fault in a job over several nodes."""
    network, variables = node.network, node.system.variables if node.system is not None else {}
    if network is None or network.names is None:
        return
    usable = tuple(nic for nic in network.nics if nic.addresses)
    gloo, lines = gloo_selection(usable, network.names, variables), exports(suggested(usable))
    if {nic.kind for nic in gloo.nics} != {"loopback"} or not lines:
        return
    yield symptom("gloo-loopback", names=gloo.names, rule=gloo.rule, repair=gloo_fix(gloo, lines))


def _running(node: NodeDoctor) -> Iterator[Symptom]:
    if node.jobs is None or not node.jobs.pids or node.system is None:
        return
    pids = node.jobs.pids
    one = len(pids) == 1
    shown = ", ".join(map(str, pids[:_SHOWN_PIDS])) + (" ..." if len(pids) > _SHOWN_PIDS else "")
    yield symptom(
        "job-running",
        ranks=f"{counted(len(pids), 'rank')} {'is' if one else 'are'}",
        pids=f"{'pid' if one else 'pids'} {shown}",
        load=f"{node.jobs.load:.1f} on {counted(node.system.cpus, 'CPU')}",
    )


def _rdma(ports: tuple[IbPort, ...]) -> Iterator[Symptom]:
    """Judge the ports of RDMA cards: unused second ports are common, one of many being down is not."""
    known = [port for port in ports if port.link in ("InfiniBand", "Ethernet")]
    down = [port for port in known if port.state != "ACTIVE"]
    waiting = [port for port in down if port.state == "INIT"]
    if not down:
        return
    likely = bool(waiting) or len(down) * 4 <= len(known)
    yield symptom(
        "rdma-down",
        level=Level.WARN if likely else Level.INFO,
        down=len(down),
        known=len(known),
        names=", ".join(f"{port.device}:{port.port}" for port in down),
        detail="A port in state INIT waits for the subnet manager." if waiting else "",
        without=quoted("^" + ",".join(port.device for port in down)),
        evidence=(f"{port.device}:{port.port} {port.state}, {port.physical}, {port.link}" for port in down),
    )


def versions_of(node: NodeDoctor) -> dict[str, str]:
    """Return the versions relevant to a job, by the names used in advisories."""
    system, software = node.system, node.software
    found = {"kernel": system.kernel, "arch": system.arch} if system is not None else {}
    if software is not None:
        for name in ("python", "torch", "cuda", "hip", "nccl", "glibc", "ofed"):
            found[name] = getattr(software, name)
    if node.gpus is not None:
        found["driver"] = node.gpus.driver.kernel
    return {name: version for name, version in found.items() if version}


def _software(node: NodeDoctor) -> Iterator[Symptom]:
    software = node.software
    if software is None:
        return
    gpus = node.gpus.health.gpus if node.gpus is not None else ()
    if software.error:
        yield symptom("python", python=software.executable, error=software.error)
    elif not software.torch:
        yield symptom("no-torch", python=software.executable)
    elif gpus and not software.cuda and not software.hip:
        words = {"torch": software.torch, "gpus": counted(len(gpus), "GPU")}
        yield symptom("torch", words, evidence=(software.executable,))
    variables = node.system.variables if node.system is not None else None
    for advisory in advisories.matching(versions_of(node), variables):
        # A remark: most jobs never trigger it, and the conditions besides the version are not visible here.
        yield symptom(
            "advisory",
            subject=advisory.id,
            kind=advisory.kind,
            about=advisory.title,
            detail=f"{advisory.symptom[:1].upper()}{advisory.symptom[1:]}.",
            evidence=(f"here: {advisory.applies}", advisory.source),
            repair=Fix(text=advisory.fix, commands=advisory.commands),
        )


_REMARKS = ("storage", "link", "oom")
"""Kinds of lines that warrant a warning only for some minutes."""


def _log(node: NodeDoctor) -> Iterator[Symptom]:
    """Judge the kernel's log except for GPUs: past events are remarks, unless about hardware or very recent."""
    for kind in ("hardware", *_REMARKS):
        lines = [line for line in (node.kernel.lines if node.kernel is not None else ()) if line.kind == kind]
        if lines:
            newest = min(lines, key=lambda line: line.age_s)
            recent = newest.age_s < (_RECENT_S if kind in _REMARKS else _DAY_S) and kind != "oom"
            yield symptom(
                f"log.{kind}",
                _killed(newest) if kind == "oom" else {},
                level=Level.WARN if recent else Level.INFO,
                ago=format_age(newest.age_s),
                evidence=(newest.text,),
            )


def _killed(line: KernelLine) -> dict[str, str]:
    """Parse a line of the OOM killer: the process, and whether a cgroup's limit was hit."""
    match = re.search(r"Killed process (?P<pid>\d+) \((?P<process>[^)]*)\)", line.text)
    return {
        **(match.groupdict() if match else {}),
        "cgroup": "memory cgroup" if line.text.startswith("Memory cgroup") else "",
    }
