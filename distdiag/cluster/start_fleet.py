"""Creation of a fleet from targets: the transport and the payload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag.agent import boot
from distdiag.cluster import bootstrap, bundle
from distdiag.cluster.fleet import Fleet, Limits, more_for
from distdiag.cluster.targets import Launcher, chosen_env
from distdiag.cluster.transports.local import LocalTransport
from distdiag.errors import UsageError
from distdiag.record import record

if TYPE_CHECKING:
    from distdiag.agent.agent import Config
    from distdiag.cluster.targets import Cluster, Targets
    from distdiag.cluster.transports import Transport

SILENCE_S = 2.5
"""An agent without any message from us for longer counts as cut off, and ends with all of its processes."""
_START_S = 20.0


_RANKS = "distdiag.agent.ranks"
"""The agent imports it by this name."""


def silence_s(hosts: int) -> float:
    """Return the agent's limit for our silence; starting very many agents delays our messages."""
    return SILENCE_S + more_for(hosts)


@record(kw_only=True)
class Agent:
    """The program for the nodes: `collect` is a module with facts(ask) or facts(); `rank` the module of ranks, if any.

    `facts`: the type of the collect module's result. `ask`: of the type that its facts declares. `carries`: further
    modules and packages to send.
    `examines_python`: the command inspects the Python of --python, on this machine too.
    """

    collect: str
    facts: type[Any]
    ask: object = None
    rank: str | None = None
    carries: tuple[str, ...] = ()
    examines_python: bool = False
    start_s: float = _START_S
    """Time limit to start it on a host, before the allowance for many hosts."""

    def pack(self, cluster: Cluster, *, here: bool, hosts: int = 1) -> bytes:
        """Pack sources and orders as input of boot.START; `here`: on this machine, which has no connection to lose."""
        config = self.config(chosen_env(cluster), silence_s=None if here else silence_s(hosts))
        if here and (folder := bundle.folder()):
            return boot.pack(bundle.only(boot.__name__), bundle.AGENT, config, folder)
        return boot.pack(self.sources(), bundle.AGENT, config)

    def sources(self) -> dict[str, str]:
        """Read the sources to send."""
        return bundle.sources(bundle.AGENT, self.collect, *((self.rank, _RANKS) if self.rank else ()), *self.carries)

    def config(self, env: dict[str, str], *, silence_s: float | None, untrusted: bool = False) -> Config:
        """Return the agent's orders."""
        return {"collect": self.collect, "ask": self.ask, "env": env, "silence_s": silence_s, "untrusted": untrusted}


def open_fleet(cluster: Cluster, targets: Targets, agent: Agent) -> Fleet:
    """Create the fleet of a command, without starting it.

    Raises:
        UsageError: an invalid option.
        DistdiagError: the transport's tool is missing.
    """
    limits = Limits(start_s=cluster.host_timeout_s or agent.start_s + more_for(len(targets.hosts)))
    if targets.launcher is Launcher.SLURM:
        return Fleet(targets.hosts, _step(cluster, targets, agent, limits), b"", agent.facts, limits)
    payload = agent.pack(cluster, here=targets.launcher is None, hosts=len(targets.hosts))
    if targets.launcher is None:
        _refuse_without_effect(cluster, agent)
        return Fleet(targets.hosts, LocalTransport(payload), b"", agent.facts, limits)
    transport = _transport(cluster, targets, len(payload), needs_torch=agent.rank is not None)
    return Fleet(targets.hosts, transport, payload, agent.facts, limits)


def _refuse_without_effect(cluster: Cluster, agent: Agent) -> None:
    """Refuse options for other hosts on this machine alone. Raises UsageError."""
    options = {
        "--python": "" if agent.examines_python else cluster.python,
        "--setup": cluster.setup,
        "--fanout": cluster.fanout,
        "--accept-new": cluster.accept_new,
    }
    typed = [name for name, value in options.items() if value]
    if typed:
        raise UsageError(
            f"{' and '.join(typed)} would have no effect: distdiag runs directly on this machine, with its own Python",
            hint="give hosts with --hosts (this machine over ssh: --launcher ssh); or start distdiag with another "
            "Python: PYTHON -m distdiag",
        )


def _transport(cluster: Cluster, targets: Targets, payload_bytes: int, *, needs_torch: bool) -> Transport:
    shell = bootstrap.shell(cluster.setup)
    python, setup = cluster.python or None, cluster.setup or None
    lines = bootstrap.lines(payload_bytes, python=python, setup=setup, needs_torch=needs_torch)
    if targets.launcher is Launcher.VIA:
        from distdiag.cluster.transports.command import ViaTransport

        return ViaTransport(cluster.via, shell, lines, width=cluster.fanout)
    if targets.launcher is Launcher.KUBE and cluster.kube is not None:
        from distdiag.cluster.transports.kube import KubeTransport

        return KubeTransport(cluster.kube, targets.pods, shell, lines, width=cluster.fanout)
    if targets.launcher is Launcher.SSH:
        from distdiag.cluster.transports.ssh import SshTransport

        return SshTransport(
            f"exec {shell}",
            lines,
            fanout=cluster.fanout,
            stage_s=cluster.host_timeout_s,
            accept_new=cluster.accept_new,
        )
    raise AssertionError(targets.launcher)


def _step(cluster: Cluster, targets: Targets, agent: Agent, limits: Limits) -> Transport:
    from distdiag.cluster.transports.slurm import Payload, SlurmTransport

    config = agent.config(chosen_env(cluster), silence_s=silence_s(len(targets.hosts)))
    payload = Payload(
        message=boot.pack_message(agent.sources(), bundle.AGENT, config),
        python=cluster.python or None,
        setup=cluster.setup or None,
        needs_torch=agent.rank is not None,
    )
    return SlurmTransport(targets.job, payload, start_s=limits.start_s)
