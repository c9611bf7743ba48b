"""What is wrong with one node by itself: limits, memory, disks, network, versions, the kernel's log. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from distdiag.commands.doctor.types import Symptom
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
from distdiag.facts.file_systems import NO_ANSWER
from distdiag.knowledge import advisories
from distdiag.report import Fix, Level, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.commands.doctor.collect import Disks, Limit, System
    from distdiag.commands.doctor.types import NodeDoctor
    from distdiag.facts.file_systems import Space
    from distdiag.facts.kernel_signs import KernelLine
    from distdiag.facts.nics import IbPort, Nic

_MIB, _GIB = 2**20, 2**30
_LEAST_MEMLOCK = 64 * _MIB
"""NCCL registers buffers of several MiB for each channel and peer; with less, ibv_reg_mr fails (nccl-tests#206)."""
_FEW_FILES, _MANY_FILES = 1024, 4096
_FEW_PROCESSES = 1024
_LEAST_STACK = _MIB
_SHM_FOR_EACH_RANK = 32 * _MIB
"""NCCL takes about 10 MB of /dev/shm for each peer that a rank reaches through it (nccl#290), and has a few."""
_CONTAINER_SHM = 64 * _MIB
"""What docker and Kubernetes give a container: two DataLoader workers with batches of 16 MiB fill it."""
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
"""Counters that grow on a busy fabric too."""
_SHOWN_PIDS = 8
_LIMIT_NAMES = {"memlock": "-l", "nofile": "-n", "nproc": "-u", "core": "-c", "stack": "-s", "as": "-v"}


def node_symptoms(node: NodeDoctor, *, several: bool) -> Iterator[Symptom]:
    """Yield all of them; `several`: the job is to run on several nodes."""
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
    limits = {limit.name: limit for limit in system.limits}
    rdma = [port for port in node.network.ib_ports if port.state == "ACTIVE"] if node.network is not None else []
    memlock = limits.get("memlock")
    if rdma and memlock is not None and memlock.soft is not None and not system.may_lock:
        yield Symptom(
            id="memlock",
            level=Level.FAIL if memlock.soft < _LEAST_MEMLOCK and system.in_step else Level.WARN,
            title=f"locked memory is limited to {format_size(memlock.soft)}, and RDMA needs to lock its buffers",
            detail=f'NCCL fails with "Call to ibv_reg_mr failed: Cannot allocate memory". {_of_whom(system)}',
            fix=_raise(memlock, "unlimited", system),
        )
    files = limits.get("nofile")
    if files is not None and files.soft is not None and files.soft < _MANY_FILES:
        few = files.soft < _FEW_FILES
        yield Symptom(
            id="nofile",
            level=Level.WARN if few else Level.INFO,
            title=f"a process may open {files.soft} files; a rank with many peers and DataLoader workers needs more",
            detail=_of_whom(system) if few else "",
            fix=_raise(files, "65536", system),
        )
    yield from _other_limits(limits, system, has_gpu=bool(node.gpus is not None and node.gpus.health.gpus))


def _other_limits(limits: dict[str, Limit], system: System, *, has_gpu: bool) -> Iterator[Symptom]:
    processes, core, stack, space = (limits.get(name) for name in ("nproc", "core", "stack", "as"))
    if processes is not None and processes.soft is not None and processes.soft < _FEW_PROCESSES:
        yield Symptom(
            id="nproc",
            level=Level.WARN,
            title=f"the user may have {processes.soft} processes and threads; each rank starts dozens",
            detail=_of_whom(system),
            fix=_raise(processes, "unlimited", system),
        )
    if core is not None and core.soft == 0:
        yield Symptom(
            id="core",
            level=Level.INFO,
            title="a crash leaves no core file: the core limit is 0",
            fix=Fix(text="allow core files before the job starts", commands=("ulimit -c unlimited",)),
        )
    if stack is not None and stack.soft is not None and stack.soft < _LEAST_STACK:
        yield Symptom(
            id="stack",
            level=Level.WARN,
            title=f"the stack is limited to {format_size(stack.soft)}: threads may crash in deep calls",
            detail=_of_whom(system),
            fix=_raise(stack, "8192", system),
        )
    if space is not None and space.soft is not None:
        yield Symptom(
            id="address-space",
            level=Level.WARN if has_gpu else Level.INFO,
            title=f"address space is limited to {format_size(space.soft)}; CUDA and torch reserve far more",
            fix=_raise(space, "unlimited", system),
        )


def _of_whom(system: System) -> str:
    """Say whose limit it is: a login's is often another one than that of the daemon that starts jobs."""
    if system.in_step:
        return "This is the limit inside the launcher's step."
    return "This is the limit of a login; inside a job of a batch system it may differ: run doctor there."


def _raise(limit: Limit, value: str, system: System) -> Fix:
    command = f"ulimit {_LIMIT_NAMES[limit.name]} {value}"
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
        yield Symptom(
            id="memory",
            level=Level.WARN,
            title=f"only {format_size(left)} of memory is free",
            detail="The kernel kills a process that needs more. Something still runs there, or the limit is small.",
            evidence=(f"memory {format_size(total)}, cgroup limit {_size_or_none(cgroup.memory_bytes)}",),
            fix=Fix(text="see what uses it", commands=("ps aux --sort=-rss | head",)),
        )
    elif cgroup.memory_bytes is not None and total and cgroup.memory_bytes < total:
        title = f"a cgroup limits memory to {format_size(cgroup.memory_bytes)} of {format_size(total)}"
        yield Symptom(id="memory-limit", level=Level.INFO, title=title)
    if cgroup.cpus is not None and cgroup.cpus < system.cpus:
        title = f"a cgroup limits processors to {cgroup.cpus:g} of {system.cpus}"
        yield Symptom(id="cpu-limit", level=Level.INFO, title=title)
    if cgroup.pids is not None and cgroup.pids - (cgroup.pids_used or 0) < _FEW_PROCESSES // 4:
        yield Symptom(
            id="pids-limit",
            level=Level.WARN,
            title=f"a cgroup allows {cgroup.pids} processes and threads, and {cgroup.pids_used} exist",
            detail="Each rank starts dozens of threads.",
            fix=Fix(text="raise it where the container or job is made; docker: --pids-limit -1"),
        )
    if cgroup.oom_kills:
        title = f"{counted(cgroup.oom_kills, 'OOM kill')} in this cgroup: the kernel killed what used too much memory"
        yield Symptom(id="oom", level=Level.INFO, title=title)


def _size_or_none(size_bytes: int | None) -> str:
    return "none" if size_bytes is None else format_size(size_bytes)


def _shm(node: NodeDoctor, system: System) -> Iterator[Symptom]:
    shm = system.shm
    gpus = len(node.gpus.health.gpus) if node.gpus is not None else 0
    fix = Fix(
        text="remove stale files there, or enlarge it (docker: --shm-size=8g; Kubernetes: emptyDir, medium Memory)",
        commands=("sudo mount -o remount,size=8G /dev/shm",),
    )
    if shm is None:
        yield Symptom(
            id="shm", level=Level.WARN, title="there is no /dev/shm; torch and NCCL share memory there", fix=fix
        )
    elif shm.error:
        yield Symptom(id="mount-hung", level=Level.FAIL, title=f"/dev/shm: {shm.error}", subject="/dev/shm")
    elif shm.total_bytes <= _CONTAINER_SHM or shm.free_bytes < max(1, gpus) * _SHM_FOR_EACH_RANK:
        used = shm.free_bytes < shm.total_bytes / 2 or shm.total_bytes <= _CONTAINER_SHM
        yield Symptom(
            id="shm",
            level=Level.WARN if used or gpus > 1 else Level.INFO,
            title=f"/dev/shm has {format_size(shm.free_bytes)} of {format_size(shm.total_bytes)} free",
            detail="NCCL inside a node and DataLoader workers need it; when it is full they die with SIGBUS.",
            fix=fix,
        )


def _disks(disks: Disks) -> Iterator[Symptom]:
    """Judge the file systems, each once: /tmp and the home are often on the same."""
    seen = set()
    for space in disks.spaces:
        whole = (space.kind, space.source, space.total_bytes, space.error)
        symptom = None if whole in seen else _disk(space, is_written=space.path in disks.written)
        seen.add(whole)
        if symptom is not None:
            yield symptom


def _disk(space: Space, *, is_written: bool) -> Symptom | None:
    """Judge one file system. One that no job is known to write to may be full or read-only."""
    path = quoted(space.path)
    if space.error.startswith(NO_ANSWER):
        return Symptom(
            id="mount-hung",
            level=Level.FAIL,
            subject=space.path,
            title=f"{space.path} hangs: {space.error}",
            detail="Whatever opens a file there blocks, and mostly cannot be killed: its server or daemon is gone.",
            evidence=(f"{space.source} on {space.path} type {space.kind}",),
            fix=Fix(text="restore its server; or unmount it", commands=(f"sudo umount -l {path}",)),
        )
    if space.error:
        if not is_written and space.error == _DENIED:
            return None  # what another user has mounted with FUSE is closed to all others, root included
        return Symptom(
            id="disk-error",
            level=Level.WARN,
            subject=space.path,
            title=f"{space.path}: {space.error}",
            evidence=(f"{space.source} type {space.kind}",) if space.kind else (),
        )
    if not is_written:
        return None
    if space.read_only:
        return Symptom(
            id="disk-read-only",
            level=Level.FAIL,
            subject=space.path,
            title=f"{space.path} is read-only",
            detail="The kernel remounts a file system read-only after an I/O error.",
            evidence=(f"{space.source} on {space.path} type {space.kind}",),
            fix=Fix(text="find the error, then remount it", commands=("sudo dmesg | grep -iE 'error|remount' | tail",)),
        )
    return _full(space, path)


def _full(space: Space, path: str) -> Symptom | None:
    share = space.free_bytes / space.total_bytes if space.total_bytes else 1.0
    free = f"{format_size(space.free_bytes)} of {format_size(space.total_bytes)} free"
    if space.total_bytes and (share < _LOW_SHARE and space.free_bytes < _LOW_BYTES):
        full = space.free_bytes < min(_FULL_BYTES, 0.01 * space.total_bytes)
        return Symptom(
            id="disk-full",
            level=Level.FAIL if full else Level.WARN,
            subject=space.path,
            title=f"{space.path} is {'full' if full else 'nearly full'}: {free}",
            fix=Fix(text="find what fills it", commands=(f"sudo du -xh {path} | sort -h | tail",)),
        )
    if space.inodes and space.free_inodes < _FEW_INODES * space.inodes:
        return Symptom(
            id="inodes",
            level=Level.FAIL if space.free_inodes == 0 else Level.WARN,
            subject=space.path,
            title=f"{space.path} has {space.free_inodes} of {space.inodes} inodes free: no new files, though {free}",
            fix=Fix(text="find what has most files", commands=(f"sudo du -x --inodes {path} | sort -n | tail",)),
        )
    return None


def _network(node: NodeDoctor, *, several: bool) -> Iterator[Symptom]:
    network = node.network
    if network is None:
        return
    yield from _interfaces(network.nics, several=several)
    yield from _selected(node) if several else _gloo_on_loopback(node)
    for counter in network.counters.links:
        if counter.grown and not counter.name.endswith("dropped"):
            yield Symptom(
                id="link-errors",
                level=Level.INFO if counter.name in _CONGESTION else Level.WARN,
                subject=counter.link,
                title=f"{counter.link}: {counter.name} grew by {counter.grown} in {network.counters.over_s:.1f} s",
                detail="A link with errors is slow, and drops sooner or later.",
                evidence=(f"{counter.name} since boot: {counter.value}",),
                fix=Fix(text="check the cable, the transceiver and the switch port"),
            )
    sent, resent = network.counters.tcp_sent, network.counters.tcp_resent
    if resent >= _RESENT_LEAST and resent > _RESENT_SHARE * max(1, sent):
        yield Symptom(
            id="retransmits",
            level=Level.WARN,
            title=f"packets are lost: {resent} of {sent} TCP segments sent again in {network.counters.over_s:.1f} s",
            fix=Fix(text="find the path that loses them", commands=("distdiag ports --hosts LIST",)),
        )
    yield from _rdma(network.ib_ports)


def _interfaces(nics: tuple[Nic, ...], *, several: bool) -> Iterator[Symptom]:
    real = [nic for nic in nics if not nic.loopback and not nic.virtual]
    for nic in nics:
        if nic.loopback and not nic.up:
            yield Symptom(
                id="loopback-down",
                level=Level.FAIL,
                subject=nic.name,
                title=f"{nic.name} is down: nothing on this node can connect to localhost",
                detail="torchrun --standalone, Gloo, debuggers and DataLoader's servers use 127.0.0.1.",
                fix=Fix(text="bring it up", commands=(f"sudo ip link set {quoted(nic.name)} up",)),
            )
    for nic in real:
        if nic.up and not nic.running and nic.addresses:
            yield Symptom(
                id="nic-down",
                level=Level.WARN,
                subject=nic.name,
                title=f"{nic.name} ({', '.join(nic.plain_addresses)}) has no carrier",
                fix=Fix(text="check the cable and the switch port", commands=(f"ip -s link show {quoted(nic.name)}",)),
            )
    if several and not any(nic.running and nic.addresses for nic in nics if not nic.loopback):
        names = ", ".join(nic.name for nic in real) or "none"
        yield Symptom(
            id="no-network",
            level=Level.FAIL,
            title=f"no network interface is up with an address (interfaces: {names})",
            fix=Fix(text="bring an interface up", commands=("ip -brief address",)),
        )


def _selected(node: NodeDoctor) -> Iterator[Symptom]:
    """Judge which interfaces NCCL and Gloo would take in a job on several nodes."""
    network, variables = node.network, node.system.variables if node.system is not None else {}
    if network is None or not any(nic.running and nic.addresses for nic in network.nics if not nic.loopback):
        return
    usable = tuple(nic for nic in network.nics if nic.addresses)
    lines = exports(suggested(usable))
    fix = Fix(text="set the interface explicitly", commands=(export_line(lines),)) if lines else None
    nccl = nccl_selection(usable, variables)
    if doubt := objection(nccl):
        yield Symptom(
            id="nccl-ifname",
            level=Level.FAIL if nccl.error else Level.WARN,
            title=f"NCCL would use {nccl.names or 'no interface'}: {doubt}",
            detail=f"Selected by: {nccl.rule}." if nccl.rule else "",
            fix=fix,
        )
    if network.names is None:
        title = "the node's own host name is not resolved within 3 s: torchrun and Gloo wait as long"
        yield Symptom(id="name-slow", level=Level.WARN, title=title, fix=Fix(text="add it to /etc/hosts"))
        return
    gloo = gloo_selection(usable, network.names, variables)
    if doubt := objection(gloo):
        yield Symptom(
            id="gloo-ifname",
            level=Level.WARN,
            title=f"Gloo would use {gloo.names or 'no interface'}: {doubt}",
            detail=f"Selected by: {gloo.rule}." if gloo.rule else "",
            fix=gloo_fix(gloo, lines) if lines else None,
        )


def _gloo_on_loopback(node: NodeDoctor) -> Iterator[Symptom]:
    """Remark, of a node alone, what would be a fault in a job over several nodes."""
    network, variables = node.network, node.system.variables if node.system is not None else {}
    if network is None or network.names is None:
        return
    usable = tuple(nic for nic in network.nics if nic.addresses)
    gloo, lines = gloo_selection(usable, network.names, variables), exports(suggested(usable))
    if {nic.kind for nic in gloo.nics} != {"loopback"} or not lines:
        return
    yield Symptom(
        id="gloo-ifname",
        level=Level.INFO,
        title=f"Gloo would use {gloo.names}, which reaches no other node: {gloo.rule}",
        detail="A job on this node alone is fine with that; one over several nodes cannot connect.",
        fix=gloo_fix(gloo, lines),
    )


def _running(node: NodeDoctor) -> Iterator[Symptom]:
    if node.jobs is None or not node.jobs.pids or node.system is None:
        return
    pids = node.jobs.pids
    one = len(pids) == 1
    shown = ", ".join(map(str, pids[:_SHOWN_PIDS])) + (" ..." if len(pids) > _SHOWN_PIDS else "")
    load = f"load {node.jobs.load:.1f} on {counted(node.system.cpus, 'CPU')}"
    yield Symptom(
        id="job-running",
        level=Level.INFO,
        title=f"{counted(len(pids), 'rank')} {'is' if one else 'are'} running here "
        f"({'pid' if one else 'pids'} {shown}), {load}: free memory is what they leave",
    )


def _rdma(ports: tuple[IbPort, ...]) -> Iterator[Symptom]:
    """Judge the ports of RDMA cards: unused second ports are common, one of many that is down is not."""
    known = [port for port in ports if port.link in ("InfiniBand", "Ethernet")]
    down = [port for port in known if port.state != "ACTIVE"]
    waiting = [port for port in down if port.state == "INIT"]
    if not down:
        return
    names = ", ".join(f"{port.device}:{port.port}" for port in down)
    likely = bool(waiting) or len(down) * 4 <= len(known)
    yield Symptom(
        id="rdma-down",
        level=Level.WARN if likely else Level.INFO,
        title=f"{len(down)} of {len(known)} RDMA ports not active: {names}",
        detail="A port in state INIT waits for the subnet manager." if waiting else "",
        evidence=tuple(f"{port.device}:{port.port} {port.state}, {port.physical}, {port.link}" for port in down),
        fix=Fix(
            text="check the cable, switch port and subnet manager; or leave these ports out",
            commands=("ibstat", f"export NCCL_IB_HCA={quoted('^' + ','.join(port.device for port in down))}"),
        ),
    )


def versions_of(node: NodeDoctor) -> dict[str, str]:
    """Return the versions of what a job would use, by the names that advisories have."""
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
        yield Symptom(id="python", level=Level.WARN, title=f"{software.executable} does not run: {software.error}")
    elif not software.torch:
        title = f"{software.executable} has no torch; for a job's own Python: --python PATH"
        yield Symptom(id="torch", level=Level.INFO, title=title)
    elif gpus and not software.cuda and not software.hip:
        yield Symptom(
            id="torch",
            level=Level.WARN,
            title=f"torch {software.torch} was built without CUDA, and there are {counted(len(gpus), 'GPU')}",
            evidence=(software.executable,),
            fix=Fix(text="see which build fits", commands=("distdiag cuda-env --goal run",)),
        )
    variables = node.system.variables if node.system is not None else None
    for advisory in advisories.matching(versions_of(node), variables):
        yield Symptom(
            id="advisory",
            level=Level.INFO,  # most jobs never meet it: what it takes besides the version is not to be seen here
            subject=advisory.id,
            title=f"known bug ({advisory.kind}): {advisory.title}: {advisory.fix}",
            detail=f"{advisory.symptom[:1].upper()}{advisory.symptom[1:]}.",
            evidence=(f"here: {advisory.applies}", advisory.source),
            fix=Fix(text=advisory.fix, commands=advisory.commands),
        )


_LOG_KINDS = {
    "hardware": (Level.WARN, "hardware errors"),
    "storage": (Level.INFO, "storage errors"),
    "link": (Level.INFO, "a link that went down"),
    "oom": (Level.INFO, ""),
}


def _log(node: NodeDoctor) -> Iterator[Symptom]:
    """Judge the kernel's log, but for GPUs: what is past is a remark, unless it is of the hardware or of just now."""
    for kind, (level, words) in _LOG_KINDS.items():
        lines = [line for line in (node.kernel.lines if node.kernel is not None else ()) if line.kind == kind]
        if lines:
            newest = min(lines, key=lambda line: line.age_s)
            ago = f"{format_age(newest.age_s)} ago"
            recent = newest.age_s < (_RECENT_S if level is Level.INFO else _DAY_S) and kind != "oom"
            yield Symptom(
                id=f"log.{kind}",
                level=Level.WARN if recent else Level.INFO,
                title=_killed(newest, ago) if kind == "oom" else f"the kernel log has {words}, the last {ago}",
                evidence=(newest.text,),
                fix=Fix(text="read the kernel log", commands=("sudo dmesg -T | tail -50",)),
            )


def _killed(line: KernelLine, ago: str) -> str:
    """Format a line of the OOM killer: "the kernel killed a process for lack of memory 40 min ago: pid 7 (python)"."""
    match = re.search(r"Killed process (\d+) \(([^)]*)\)", line.text)
    who = f": pid {match[1]} ({match[2]})" if match else ""
    where = ", in a memory cgroup" if line.text.startswith("Memory cgroup") else ""
    return f"the kernel killed a process for lack of memory {ago}{who}{where}"
