"""Rendezvous of distdiag's own processes in a job started by a launcher: rank 0's addresses, ports to try, a key.

An address the launcher does not provide has to be given as MASTER_ADDR.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING

from distdiag.cluster.acceptor import Acceptor
from distdiag.cluster.hostlist import expand
from distdiag.errors import DistdiagError
from distdiag.facts import programs
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distdiag.facts.process.rank_identity import Identity

_PORTS = 8
_FIRST_PORT, _LAST_PORT = 20000, 32000
"""Below the ephemeral ports of Linux (from 32768), so that no other program gets these ports by chance."""
_PMIX_S = 5.0
# Asked in a child: a library that hangs or crashes must not affect us. Struct layouts and keys: pmix_common.h.
_ASK_PMIX = """
import ctypes, ctypes.util, os, sys
class Proc(ctypes.Structure): _fields_ = [("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]
class Value(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint16), ("string", ctypes.c_char_p), ("rest", ctypes.c_char * 64)]
lib = ctypes.CDLL("libpmix.so.2")
me, head, value = Proc(), Proc(), ctypes.POINTER(Value)()
if lib.PMIx_Init(ctypes.byref(me), None, ctypes.c_size_t(0)): sys.exit(1)
head.nspace, head.rank = me.nspace, 0
bad = lib.PMIx_Get(ctypes.byref(head), b"pmix.hname", None, ctypes.c_size_t(0), ctypes.byref(value))
if not bad and value.contents.type == 3: print(value.contents.string.decode())
lib.PMIx_Finalize(None, ctypes.c_size_t(0))
"""


@record(kw_only=True)
class Home:
    """The address of rank 0: it takes the first free one of `ports`, the others try all.

    `key` proves that a process belongs to the job.
    """

    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    key: str


def find_home(me: Identity, environ: Mapping[str, str]) -> tuple[Home, Acceptor | None]:
    """Find rank 0's addresses; as rank 0 also take a port: the hub, not started yet.

    Raises:
        DistdiagError: rank 0's address is unknown, or all ports are taken.
    """
    secret, shared = _key(me, environ)
    home = Home(addresses=_addresses(me, environ), ports=_ports(secret), key=shared)
    return home, _take_port(home) if me.rank == 0 else None


def _take_port(home: Home) -> Acceptor:
    for port in home.ports:
        try:
            return Acceptor(home.key, port=port)
        except OSError:
            continue
    raise DistdiagError(
        f"all ports at which the other ranks look for rank 0 are in use: {', '.join(map(str, home.ports))}",
        hint="find what holds them: ss -tlnp",
    )


def _key(me: Identity, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return two values common to this job's processes and different in other jobs: (for ports, for proof).

    Few launchers provide a secret. Without one, an agent takes no orders that could load code (`untrusted` in
    distdiag.agent.agent).
    """
    names = {
        "torchrun": ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
        "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        "Open MPI": ("OMPI_MCA_orte_precondition_transports", "PMIX_NAMESPACE"),
        "environment": ("MASTER_ADDR", "MASTER_PORT"),
    }.get(me.launcher, ("MASTER_ADDR", "MASTER_PORT", "FLUX_JOB_ID", "LSB_JOBID", "PBS_JOBID"))
    common = " ".join(f"{name}={environ.get(name, '')}" for name in names)
    digest = hashlib.sha256(f"{os.getuid()} {me.world_size} {common}".encode()).hexdigest()
    return digest, digest[32:]


def _ports(digest: str) -> tuple[int, ...]:
    span = _LAST_PORT - _FIRST_PORT
    first = int(digest[:8], 16) % span
    return tuple(_FIRST_PORT + (first + 101 * number) % span for number in range(_PORTS))


def _addresses(me: Identity, environ: Mapping[str, str]) -> tuple[str, ...]:
    if me.local_world_size == me.world_size:
        return ("127.0.0.1",)
    # MASTER_ADDR may be left over from another job: if the launcher knows an address, both are tried.
    given = environ.get("MASTER_ADDR", "")
    found = tuple(address for address in dict.fromkeys((given, *_from_launcher(me, environ))) if address)
    if found:
        return found
    if me.launcher == "Open MPI":
        raise DistdiagError(
            "mpirun does not report where rank 0 runs",
            hint='mpirun -x MASTER_ADDR="$(hostname)" ... if the first rank runs here',
        )
    if me.launcher == "environment":
        raise DistdiagError(
            f"RANK and WORLD_SIZE are set (rank {me.rank} of {me.world_size}), but MASTER_ADDR is not: the other ranks "
            "cannot be found",
            hint="set MASTER_ADDR; or run without ranks: unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE",
        )
    raise DistdiagError(
        f"{me.launcher} started this as rank {me.rank} of {me.world_size}, but does not report where rank 0 runs",
        hint="set MASTER_ADDR to the host of rank 0, for all ranks",
    )


def _from_launcher(me: Identity, environ: Mapping[str, str]) -> tuple[str, ...]:
    if me.launcher == "srun" and (nodes := environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")):
        return (expand(nodes)[0],)
    return _open_mpi_addresses(environ) if me.launcher == "Open MPI" else ()


def _open_mpi_addresses(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Query PMIx for rank 0's host; without its library, assume mpirun's host."""
    import sys

    answer = programs.run([sys.executable, "-c", _ASK_PMIX], timeout_s=_PMIX_S)
    name = answer.stdout.decode("utf-8", "replace").strip()
    mpirun = re.findall(r"tcp://([\d.,]+):", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    found = [name, *(address for group in mpirun for address in group.split(","))]
    return tuple(dict.fromkeys(address for address in found if address))
