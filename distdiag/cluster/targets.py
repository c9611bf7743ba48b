"""Hosts and transport, from the options or the surrounding allocation."""

from __future__ import annotations

import os
import shutil
import socket
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.cluster.hostfile import lsf_hosts, read_hostfile, slurm_tasks
from distdiag.cluster.hostlist import expand
from distdiag.cluster.hosts import Host, HostList, fold, parse_hosts
from distdiag.cluster.pods import Kube, Pod, find_pods
from distdiag.errors import DistdiagError, UsageError
from distdiag.facts import programs
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

THIS_NODE = Host(name="this node")
_SLURM_TIMEOUT_S = 10.0
_OF_KUBE = ("namespace", "context", "container", "kube-debug")


class Launcher(StrEnum):
    """The transport to the hosts."""

    AUTO = "auto"
    SSH = "ssh"
    SLURM = "slurm"
    VIA = "via"
    KUBE = "kubectl"


@record(kw_only=True)
class Cluster:
    """The options about hosts, equal in every command."""

    hosts: str = ""
    hostfile: str = ""
    slurm_job: str = ""
    via: str = ""
    launcher: Launcher = Launcher.AUTO
    python: str = ""
    env: tuple[str, ...] = ()
    setup: str = ""
    fanout: int | None = None
    host_timeout_s: float | None = None
    accept_new: bool = False
    kube: Kube | None = None

    def typed(self) -> list[tuple[str, str]]:
        """Return the non-default options as (name, value), unquoted."""
        named = [
            ("--hosts", self.hosts),
            ("--hostfile", self.hostfile),
            ("--slurm-job", self.slurm_job),
            *self._pods(),
            ("--via", self.via),
            ("--launcher", "" if self.launcher is Launcher.AUTO else str(self.launcher)),
            ("--python", self.python),
            *(("--env", variable) for variable in self.env),
            ("--setup", self.setup),
            ("--fanout", str(self.fanout or "")),
            ("--host-timeout", f"{self.host_timeout_s:g}" if self.host_timeout_s else ""),
        ]
        return [(name, value) for name, value in named if value]

    def _pods(self) -> list[tuple[str, str]]:
        kube = self.kube
        if kube is None:
            return []
        return [
            ("--kube", kube.selector),
            ("--namespace", kube.namespace),
            ("--context", kube.context),
            ("--container", kube.container),
            ("--kube-debug", kube.debug_image),
        ]


@record(kw_only=True)
class Targets:
    """The hosts in order. `launcher` is None for this machine alone; `source` describes the origin of the list."""

    hosts: tuple[Host, ...]
    launcher: Launcher | None
    source: str
    job: str = ""
    duplicates: tuple[str, ...] = ()
    pods: tuple[Pod, ...] = ()


def find_targets(cluster: Cluster, environ: Mapping[str, str]) -> Targets:
    """Decide on hosts and launcher.

    Raises:
        UsageError: contradictory options, or an invalid host list.
        DistdiagError: the SLURM job or the pods cannot be queried.
    """
    _check(cluster)
    if cluster.kube is not None:
        return _pods(cluster.kube)
    if cluster.hosts:
        return _given(cluster, parse_hosts(cluster.hosts), "--hosts", environ)
    if cluster.hostfile:
        return _given(cluster, _read_file(cluster.hostfile), cluster.hostfile, environ)
    if cluster.slurm_job:
        return _job(cluster.slurm_job)
    return _surrounding(cluster, environ)


_FILES_HERE = "name files of this machine; --hosts LIST reads them on nodes"


def check_paths(cluster: Cluster, paths: Iterable[str], *, hint: str = _FILES_HERE) -> None:
    """Refuse a missing path if only this machine would read it. "-" is no path.

    Raises:
        UsageError: it does not exist. As `find_targets`.
    """
    if cluster.typed() or find_targets(cluster, os.environ).launcher is not None:
        return
    for path in paths:
        try:
            if path != "-":
                os.stat(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UsageError(f"{path}: no such file or folder", hint=hint) from error
        except OSError:  # reported when it is read
            continue


def _check(cluster: Cluster) -> None:
    given = {
        **{"--hosts": cluster.hosts, "--hostfile": cluster.hostfile},
        **{"--slurm-job": cluster.slurm_job, "--kube": cluster.kube},
    }
    sources = [name for name, value in given.items() if value]
    if len(sources) > 1:
        raise UsageError(f"{' and '.join(sources)} both select hosts", hint="use only one of them")
    if cluster.launcher is Launcher.KUBE and cluster.kube is None:
        raise UsageError("--launcher kubectl needs --kube", hint="--kube job-name=train, or --kube pytorchjob/train")
    if cluster.kube and not cluster.kube.selector.strip():
        typed = " and ".join(name for name, value in cluster.typed() if name[2:] in _OF_KUBE)
        raise UsageError(f"{typed or '--kube'} without a selector", hint="--kube app=train, or --kube pytorchjob/train")
    if cluster.kube and (cluster.via or cluster.launcher not in (Launcher.AUTO, Launcher.KUBE)):
        raise UsageError("--kube always uses kubectl", hint="leave out --via and --launcher")
    if cluster.via and cluster.launcher not in (Launcher.AUTO, Launcher.VIA):
        raise UsageError(
            f"--via and --launcher {cluster.launcher} are mutually exclusive", hint="leave one of them out"
        )
    if cluster.launcher is Launcher.VIA and not cluster.via:
        raise UsageError("--launcher via needs --via", hint='--via "kubectl exec -i {host} --"')
    if cluster.slurm_job and (cluster.via or cluster.launcher not in (Launcher.AUTO, Launcher.SLURM)):
        raise UsageError("--slurm-job always uses srun", hint="leave out --via and --launcher")
    if cluster.slurm_job and not cluster.slurm_job.replace("_", "").replace("+", "").isdigit():
        raise UsageError(f"--slurm-job {cluster.slurm_job!r} is not a job id", hint="list yours: squeue --me")


def _given(cluster: Cluster, found: HostList, source: str, environ: Mapping[str, str]) -> Targets:
    launcher = Launcher.VIA if cluster.via else cluster.launcher
    job = ""
    if launcher is Launcher.AUTO:
        if len(found.hosts) == 1 and _is_here(found.hosts[0]):
            here = Host(name=THIS_NODE.name, slots=found.hosts[0].slots)
            return Targets(hosts=(here,), launcher=None, source=source, duplicates=found.duplicates)
        allocated = set(_allocated(environ))
        inside = bool(allocated) and {host.name for host in found.hosts} <= allocated
        launcher = Launcher.SLURM if inside else Launcher.SSH
    if launcher is Launcher.SLURM:
        job = environ.get("SLURM_JOB_ID", "")
        if not job:
            raise UsageError("--launcher slurm needs a running job", hint="give --slurm-job ID instead of the hosts")
    return Targets(hosts=found.hosts, launcher=launcher, source=source, job=job, duplicates=found.duplicates)


def _surrounding(cluster: Cluster, environ: Mapping[str, str]) -> Targets:
    """Return the allocation around this process, else this machine."""
    if cluster.via or cluster.launcher is not Launcher.AUTO:
        what = "--via" if cluster.via else f"--launcher {cluster.launcher}"
        if cluster.launcher is not Launcher.SLURM or not environ.get("SLURM_JOB_ID"):
            raise UsageError(f"{what} needs hosts", hint="add --hosts node[1-4], or --hostfile FILE")
    names = _allocated(environ)
    if names:
        job = environ["SLURM_JOB_ID"]
        if len(names) == 1 and environ.get("SLURMD_NODENAME") == names[0]:
            return Targets(hosts=(THIS_NODE,), launcher=None, source=f"SLURM job {job}")
        return Targets(hosts=_with_tasks(names, environ), launcher=Launcher.SLURM, source=f"SLURM job {job}", job=job)
    found, source = _other_scheduler(environ)
    if found is None or (len(found.hosts) == 1 and _is_here(found.hosts[0])):
        return Targets(hosts=(THIS_NODE,), launcher=None, source=source)
    return Targets(hosts=found.hosts, launcher=Launcher.SSH, source=source, duplicates=())


def _allocated(environ: Mapping[str, str]) -> list[str]:
    """List the nodes of the surrounding SLURM allocation, in the scheduler's order."""
    if not environ.get("SLURM_JOB_ID"):
        return []
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    if not nodes:
        raise DistdiagError(
            f"SLURM_JOB_ID={environ['SLURM_JOB_ID']} is set but SLURM_JOB_NODELIST is not: its nodes are unknown",
            hint="give --slurm-job with that id; for this machine alone: unset SLURM_JOB_ID",
        )
    return expand(nodes)


def _with_tasks(names: list[str], environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Use ranks per node only if the user requested tasks: otherwise SLURM counts cores."""
    if "SLURM_NTASKS_PER_NODE" not in environ and "SLURM_NTASKS" not in environ:
        return tuple(Host(name=name) for name in names)
    tasks = slurm_tasks(environ.get("SLURM_TASKS_PER_NODE", ""))
    if len(tasks) != len(names) or all(count == 1 for count in tasks):
        return tuple(Host(name=name) for name in names)
    return tuple(Host(name=name, slots=count) for name, count in zip(names, tasks, strict=True))


def _other_scheduler(environ: Mapping[str, str]) -> tuple[HostList | None, str]:
    if file := environ.get("PBS_NODEFILE"):
        return _read_file(file), f"PBS job {environ.get('PBS_JOBID', '')}".strip()
    if text := environ.get("LSB_MCPU_HOSTS"):
        return HostList(tuple(lsf_hosts(text)), ()), f"LSF job {environ.get('LSB_JOBID', '')}".strip()
    return None, "this machine"


def _read_file(path: str) -> HostList:
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            return read_hostfile(file.read(16 * 2**20), path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="give a hostfile that exists") from error


def _is_here(host: Host) -> bool:
    if host.user or host.port:
        return False
    name = socket.gethostname()
    return host.name in ("localhost", "127.0.0.1", "::1", name, name.partition(".")[0])


def _job(job: str) -> Targets:
    """Query SLURM for the nodes of a running job."""
    if shutil.which("squeue") is None:
        raise DistdiagError("squeue is not installed here: cannot query SLURM", hint="run it on a login node")
    done = programs.run(["squeue", "-h", "-j", job, "-o", "%T|%N|%u"], timeout_s=_SLURM_TIMEOUT_S)
    complaints = done.stderr.decode("utf-8", "replace").strip().splitlines()
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    if done.timed_out:
        raise DistdiagError(f"squeue did not answer within {_SLURM_TIMEOUT_S:g} s", hint="scontrol ping")
    if not lines and complaints and "Invalid job id" not in complaints[-1]:
        raise DistdiagError(f"SLURM does not answer here: {complaints[-1]}", hint="run it where squeue works")
    if not lines:
        raise DistdiagError(f"no running SLURM job {job}", hint="list yours: squeue --me")
    state, nodes, user = [*lines[0].split("|"), "", ""][:3]
    if not nodes:
        raise DistdiagError(f"SLURM job {job} has no nodes: it is {state.lower()}", hint=f"squeue -j {job}")
    names = [name for line in lines for name in expand(line.split("|")[1]) if line.split("|")[1]]
    return Targets(
        hosts=tuple(Host(name=name) for name in dict.fromkeys(names)),
        launcher=Launcher.SLURM,
        source=f"SLURM job {job} of {user}",
        job=job,
    )


def _pods(kube: Kube) -> Targets:
    """Query Kubernetes for the pods, except replaced ones."""
    pods = tuple(pod for pod in find_pods(kube) if not pod.replaced)
    hosts = tuple(Host(name=pod.name) for pod in pods)
    return Targets(hosts=hosts, launcher=Launcher.KUBE, source=f"--kube {kube.selector}", pods=pods)


def describe(targets: Targets) -> str:
    """Describe the hosts: "4 hosts (n[1-4]) by ssh"."""
    if targets.launcher is None:
        return "this machine"
    names = fold(host.name for host in targets.hosts)
    count = len(targets.hosts)
    what = "pod" if targets.launcher is Launcher.KUBE else "host"
    return f"{count} {what}{'s' if count > 1 else ''} ({names}) by {targets.launcher}"


def python_here(name: str) -> str:
    """Return the path of the interpreter given by --python on this machine; empty for none. Raises UsageError."""
    if not name:
        return ""
    found = shutil.which(name)
    if found is None:
        raise UsageError(f"--python {name}: program not found", hint="give the path of a Python interpreter")
    return os.path.abspath(found)


def chosen_env(cluster: Cluster) -> dict[str, str]:
    """Parse --env: NAME=VALUE, or NAME for this machine's value. Raises UsageError."""
    chosen = {}
    for text in cluster.env:
        name, given, value = text.partition("=")
        if not name or not name.replace("_", "a").isalnum() or name[0].isdigit():
            raise UsageError(f"--env {text!r} is not NAME or NAME=VALUE")
        if not given and name not in os.environ:
            raise UsageError(f"--env {name}: not set in this environment", hint=f"--env {name}=VALUE")
        chosen[name] = value if given else os.environ[name]
    return chosen
