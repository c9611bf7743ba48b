"""SLURM: an overlapping step inside a job, one task per node, starts all agents at once; they connect back.

srun kills all tasks when one host fails, so links are handed on only when the whole step is up; otherwise the step is
restarted without the failed hosts, which are reported. Standard input reaches only one task, so the command line
contains only the code to connect back (agent/connect_back.py); the payload is sent over that connection.
"""

from __future__ import annotations

import base64
import os
import random
import re
import shlex
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distdiag.agent import boot, connect_back, handshake, protocol, wire
from distdiag.cluster import bootstrap, bundle
from distdiag.cluster.acceptor import Acceptor
from distdiag.cluster.host_results import HostError, HostState
from distdiag.cluster.hosts import fold_ranks
from distdiag.cluster.links import Link, ProcessLink, Received
from distdiag.cluster.transports import Arrivals, Transport
from distdiag.errors import DistdiagError
from distdiag.facts import programs
from distdiag.facts.text import printable
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.cluster.hosts import Host

_STAGGER_S = 8.0
"""Maximum delay between the first agent and the last: a node without an agent by then is stuck."""
_FIND_S = 6.0
_TICK_S = 0.02
_ROUNDS = 4
# What a batch script or another step left there would change the shape of ours.
_SHAPE = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_STEP", "SLURM_TASKS_PER_NODE", "SLURM_DISTRIBUTION"),
    *("SLURM_CPUS_PER_TASK", "SLURM_CPU_BIND", "SLURM_MEM_PER", "SLURM_GPUS_PER", "SLURM_GRES", "SLURM_EXACT"),
    *("SLURM_KILL_BAD_EXIT", "SLURM_LABELIO", "SLURM_WAIT", "SLURM_EXPORT_ENV", "SRUN_", "SLURM_HINT"),
)
_CONFIG_S = 5.0
_TRIES = 50
_NODES = "squeue -j {job} -o %N"
_YOURS = "list yours: squeue --me"
_WHOSE = "it is another user's job; see whose: squeue -j {job}"
_COMPLAINTS = (
    ("Invalid job id", HostState.FAILED, "no running SLURM job {job}", _YOURS),
    ("ccess/permission denied", HostState.AUTH, "SLURM denies access to job {job}", _WHOSE),
    ("Requested node configuration is not available", HostState.FAILED, "it is not a node of job {job}", _NODES),
    ("Job/step already completing or completed|has expired", HostState.FAILED, "job {job} has ended", _YOURS),
)
"""Messages of srun, the message and the hint about them."""
_FAILED = re.compile(r"(?:failed on node|Task launch.*on node) ([\w.-]+): (.+)")


@record(kw_only=True)
class Payload:
    """What runs on each node (`message`: see boot.pack_message), and how its Python is found."""

    message: bytes
    python: str | None
    setup: str | None
    needs_torch: bool


@dataclass
class _Round:
    """One start of the step."""

    hosts: list[Host]
    process: ProcessLink
    noise: wire.Reader = field(default_factory=wire.Reader)
    links: dict[str, Link] = field(default_factory=dict)
    first_at: float | None = None


class SlurmTransport(Transport):
    """`srun --overlap` into a job."""

    def __init__(self, job: str, payload: Payload, *, start_s: float) -> None:
        self._job = job
        self._key = handshake.new_key()
        self._payload = payload
        self._start_s = start_s
        self._hub = _take_port(self._key, _ports())
        self._hub.joined = self._joined
        self._hub.start()
        self._round: _Round | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._said: list[str] = []

    def start(self, hosts: Sequence[Host], arrivals: Arrivals) -> None:
        threading.Thread(target=self._go, args=(list(hosts), arrivals), daemon=True).start()

    def last_words(self) -> tuple[str, ...]:
        with self._lock:
            if self._round is None:
                return ()
            self._said += self._complaints(self._round.process.read())
            return tuple(self._said[-4:])

    def close(self) -> None:
        self._over.set()
        self._hub.close()
        with self._lock:
            if self._round is not None:
                self._round.process.kill()

    def _go(self, hosts: list[Host], arrivals: Arrivals) -> None:
        try:
            self._start_all(hosts, arrivals)
        except Exception as error:  # noqa: BLE001 - in a thread nobody else would hear of it
            refusal = HostError(state=HostState.FAILED, stage="start", message=f"cannot start srun: {error!r}")
            self._refuse_all(hosts, refusal, arrivals)

    def _start_all(self, hosts: list[Host], arrivals: Arrivals) -> None:
        for host in hosts:
            arrivals.put(host.name, "start")
        for _ in range(_ROUNDS):
            if not hosts or self._over.is_set():
                return
            try:
                this = self._begin(hosts)
            except programs.CannotRun as error:
                self._refuse_all(hosts, HostError(state=HostState.FAILED, stage="start", message=str(error)), arrivals)
                return
            failed = self._follow(this)
            if not failed:
                for name, link in this.links.items():
                    arrivals.put(name, link)
                return
            self._abandon(this)
            for name, refusal in failed.items():
                arrivals.put(name, refusal)
            hosts = [host for host in hosts if host.name not in failed]
        refusal = HostError(
            state=HostState.FAILED, stage="start", message="the step still failed after the failed hosts were left out"
        )
        self._refuse_all(hosts, refusal, arrivals)

    def _begin(self, hosts: list[Host]) -> _Round:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_SHAPE)}
        environment[connect_back.NONCE] = self._key
        with self._lock:
            process = programs.start(self._command(hosts, self._program()), env=environment)
            self._round = _Round(hosts, ProcessLink(process))
        return self._round

    def _command(self, hosts: Sequence[Host], program: list[str]) -> list[str]:
        count = len(hosts)
        return [
            "srun",
            "--overlap",
            f"--jobid={self._job}",
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(host.name for host in hosts)}",
            "--input=none",
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--mpi=none",
            "--cpu-bind=none",
            "--mem=0",
            "--export=ALL",  # never by value: a comma would cut it
            "--quit-on-interrupt",
            *program,
        ]

    def _program(self) -> list[str]:
        payload = self._payload
        config: connect_back.Config = {"addresses": Acceptor.addresses(), "port": self._hub.port, "find_s": _FIND_S}
        packed = boot.pack(bundle.sources(bundle.CONNECT_BACK), bundle.CONNECT_BACK, config)
        words = [boot.ARGUMENT_START, base64.b64encode(packed).decode()]
        lines = bootstrap.script(words, python=payload.python, setup=payload.setup, needs_torch=payload.needs_torch)
        if payload.setup:
            lines = f"exec {bootstrap.shell(payload.setup)} -c {shlex.quote(lines)}"
        # By its path: the task's PATH is the launcher's business.
        return ["/bin/sh", "-c", lines]

    def _joined(self, who: Mapping[str, object], link: Link) -> None:
        with self._lock:
            this = self._round
            name = None if this is None else self._place(str(who.get("name")), this)
            if this is None or name is None:
                link.kill()
                return
            link.write(self._payload.message)  # before anybody else may write to it
            this.links[name] = link
            this.first_at = this.first_at or time.monotonic()

    def _place(self, name: str, this: _Round) -> str | None:
        """Map an agent's name to its host; a second agent of the same host is rejected."""
        open_names = [host.name for host in this.hosts if host.name not in this.links]
        if name in open_names:
            return name
        short = [open_name for open_name in open_names if open_name.partition(".")[0] == name.partition(".")[0]]
        return short[0] if len(short) == 1 else None

    def _follow(self, this: _Round) -> dict[str, HostError]:
        """Wait for all agents; return the failed hosts, if any."""
        began = time.monotonic()
        said: list[str] = []
        while not self._over.is_set():
            heard = this.process.read()
            said += self._complaints(heard)
            with self._lock:
                missing = [host for host in this.hosts if host.name not in this.links]
                links, first_at = list(this.links.values()), this.first_at
            for link in links:  # more of the payload, where it did not go at once
                link.flush()
            if not missing:
                return {}
            failed = {found[1]: found[2] for line in said if (found := _FAILED.search(line))}
            if about := [(host.name, failed[host.name]) for host in this.hosts if host.name in failed]:
                return {
                    name: HostError(
                        state=HostState.FAILED,
                        stage="start",
                        message=f"slurmd there does not respond: {how}",
                        evidence=tuple(said[-4:]),
                    )
                    for name, how in about
                }
            now = time.monotonic()
            if heard.ended:
                return self._ended(this, missing, said)
            if now - began > self._start_s or (first_at is not None and now - first_at > _STAGGER_S):
                return {host.name: self._late(now - began, said, alone=first_at is not None) for host in missing}
            time.sleep(_TICK_S)
        return {}

    def _complaints(self, heard: Received) -> list[str]:
        """Return the lines other than records: complaints of the launcher or the agents' shells."""
        lines = (line for data in (heard.out, heard.err) for line in data.decode("utf-8", "replace").splitlines())
        return [printable(line.strip())[:300] for line in lines if line.strip()]

    def _ended(self, this: _Round, missing: list[Host], said: list[str]) -> dict[str, HostError]:
        _, how = this.process.how_it_ended()
        state, words, hint = self._why_it_ended(said)
        refusals = {}
        for host in missing:
            about = [line for line in said if re.search(rf"\b{re.escape(host.name)}\b", line)] or said
            last = f": {about[-1].replace(host.name, 'it')}" if about else ""
            refusals[host.name] = HostError(
                state=state,
                stage="start",
                message=words or f"srun ended {how}{last}",
                hint=hint,
                evidence=tuple(about[-4:]),
            )
        return refusals

    def _why_it_ended(self, said: list[str]) -> tuple[HostState, str, str]:
        """Read all complaints: state, message ("" if unknown) and hint."""
        words = " ".join(said)
        for pattern, state, message, hint in _COMPLAINTS:
            if re.search(pattern, words):
                return state, message.format(job=self._job), hint.format(job=self._job)
        if line := next((line for line in said if "cannot reach" in line and "where distdiag" in line), ""):
            hint = "the nodes must be able to connect to this machine, as for srun itself; check its firewall"
            return HostState.FILTERED, line.partition("distdiag: ")[2] or line, hint
        if any(f'"{protocol.NoPython.kind}"' in line for line in said):
            return HostState.NO_PYTHON, "no Python 3.9 or newer", "give a Python that exists there: --python PATH"
        return HostState.FAILED, "", ""

    def _late(self, seconds: float, said: list[str], *, alone: bool) -> HostError:
        hint = "" if alone else "srun needs the nodes to connect back to this machine; check its firewall"
        return HostError(
            state=HostState.TIMEOUT,
            stage="start",
            message=f"srun started no agent within {seconds:.0f} s",
            hint=hint,
            evidence=tuple(said[-4:]),
        )

    def _abandon(self, this: _Round) -> None:
        with self._lock:
            links, this.links = list(this.links.values()), {}
            self._round = None
        for link in links:
            link.kill()
        this.process.kill()

    def _refuse_all(self, hosts: list[Host], refusal: HostError, arrivals: Arrivals) -> None:
        for host in hosts:
            arrivals.put(host.name, refusal)


def _ports() -> Sequence[int]:
    """Return the ports to listen on: SrunPortRange if set, since a firewall may admit only these."""
    said = programs.run(["scontrol", "show", "config"], timeout_s=_CONFIG_S).stdout.decode("utf-8", "replace")
    found = re.search(r"^SrunPortRange\s*=\s*(\d+)-(\d+)", said, re.MULTILINE)
    if found is None or found[2] == "0":
        return (0,)
    span = range(int(found[1]), int(found[2]) + 1)
    return random.sample(span, min(len(span), _TRIES))


def _take_port(key: str, ports: Sequence[int]) -> Acceptor:
    for port in ports:
        try:
            return Acceptor(key, port=port)
        except OSError:
            continue
    raise DistdiagError(
        f"all ports at which the nodes may connect to this machine are in use: {fold_ranks(ports)}",
        hint="find what holds them: ss -tlnp",
    )
