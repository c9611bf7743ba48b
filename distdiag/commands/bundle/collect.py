"""Facts of one node for bundle: processes of the job, and the ends of logs.

Not redacted here: secrets are listed, and the parent removes these from the facts of all nodes before writing a file.
"""

from __future__ import annotations

import os
import platform
import pwd
import re
import socket
import stat
from dataclasses import field

from distdiag.facts import deadlines, machine
from distdiag.facts.logs import job_output
from distdiag.facts.process import procs
from distdiag.jobs.collect import facts
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["facts", "more"]

SECRET_NAME = re.compile(
    r"(?i)(?:token(?!s|iz)|secret|passw|passphrase|api[-_]?key|access[-_]?key|private[-_]?key|credential"
    r"|(?<!x)auth(?!or(?!iz))|cookie|webhook|signature|dsn$|(?:^|[-_])(?:key|sig|pass|pw)$|_pwd$|(?-i:PW|[A-Z]PASS)$)"
)
"""Names of variables and options with secret values; excludes TOKENIZERS_PARALLELISM, max_tokens, author."""
_SHOWN = re.compile(
    r"NCCL_|RCCL_|GLOO_|TORCH|PYTORCH_|CUDA_|HIP_|ROCR_|NVIDIA_|OMP_|MKL_|KMP_|MASTER_|RANK$|LOCAL_|WORLD_SIZE$|GROUP_"
    r"|ROLE_|NODE_RANK$|SLURM_|OMPI_|PMI|PMIX_|UCX_|FI_|IBV_|MLX5_|LD_|PYTHON|VIRTUAL_ENV$|CONDA_PREFIX$|PATH$"
    r"|DEEPSPEED|DS_|ACCELERATE_|HF_HOME$|TRITON_|XLA_|TMPDIR$|MALLOC_|TP_SOCKET_|DISTDIAG_"
)
_WORTH_S = 4.0
_LEAST_SECRET = 6
_FIRST_PERSON = 1000
_MOST_ACCOUNTS = 500
_PLAIN = ("false", "true", "none", "default", "disabled", "enabled", "basic", "bearer", "munge", "auth/munge")
_MOST_VALUE = 4096
_MOST_ENVIRON = 2**20
_MOST_OF_LIMITS = 8192


@record
class Ask:
    """The job's ranks, (pid, rank), and launchers. `tail_bytes`: to read of each log; `most_bytes`: of all."""

    ranks: Sequence[tuple[int, int | None]]
    launchers: Sequence[int]
    logs: Sequence[str]
    tail_bytes: int
    most_bytes: int


@record
class RankProcess:
    """One rank or launcher. `environment`: variables relevant to training; `other_variables`: names of the rest."""

    pid: int
    rank: int | None
    argv: tuple[str, ...] = ()
    folder: str = ""
    limits: str = ""
    cgroup: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    other_variables: tuple[str, ...] = ()
    error: str = ""


@record
class LogTail:
    """The end of a log file. `size_bytes`: of the whole file; `rank`: its only writer, if any."""

    path: str
    rank: int | None
    size_bytes: int
    text: str
    error: str = ""


@record
class Names:
    """Names of people and machines, and the job's secrets: used for redaction, never written."""

    hosts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()


@record
class Part:
    """One message."""

    names: Names | None = None
    ranks: tuple[RankProcess, ...] = ()
    logs: tuple[LogTail, ...] = ()


def more(ask: Ask, tell: Callable[[Part], None]) -> None:
    """Read this node."""
    ranks = dict(ask.ranks)
    pids = [*ranks, *ask.launchers]
    read, late = deadlines.each(pids, lambda pid: _process(pid, ranks.get(pid)), patience_s=_WORTH_S)
    processes = [read[pid][0] for pid in pids if pid in read]
    processes += [RankProcess(pid, ranks.get(pid), error="/proc did not answer in time") for pid in late]
    secrets = {secret for _, own in read.values() for secret in own}
    paths = [word for process in processes for word in (*process.argv, process.folder, *process.environment.values())]
    tell(Part(names=_names(pids, secrets, [*paths, *ask.logs]), ranks=tuple(processes)))
    _logs(ask, ranks, tell)


def _process(pid: int, rank: int | None) -> tuple[RankProcess, set[str]]:
    argv = _read(f"/proc/{pid}/cmdline").rstrip("\0").split("\0")
    words = _read(f"/proc/{pid}/environ").split("\0")
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    secrets = {value for name, value in pairs.items() if SECRET_NAME.search(name)}
    secrets |= {found[1] for value in pairs.values() for found in re.finditer(r"://[^/\s:@]*:([^/\s@]+)@", value)}
    for word, after in zip(argv, [*argv[1:], ""]):
        name, equals, value = word.partition("=")
        if SECRET_NAME.search(name) and (equals or name.startswith("-")):
            secrets.add(value if equals else after)
    shown = {name: value[:_MOST_VALUE] for name, value in pairs.items() if _SHOWN.match(name)}
    process = RankProcess(
        pid,
        rank,
        argv=tuple(word[:_MOST_VALUE] for word in argv[:256]),
        folder=machine.link_target(f"/proc/{pid}/cwd"),
        limits=_read(f"/proc/{pid}/limits")[:_MOST_OF_LIMITS],
        cgroup=_read(f"/proc/{pid}/cgroup")[:_MOST_OF_LIMITS],
        environment={name: shown[name] for name in sorted(shown)},
        other_variables=tuple(sorted(name for name in pairs if name not in shown)),
        error="" if pairs else "environment: permission denied",
    )
    return process, {secret for secret in secrets if _is_secret(secret)}


def _is_secret(value: str) -> bool:
    """Return whether a value can be searched for: short or plain words occur everywhere."""
    return len(value) >= _LEAST_SECRET and value.lower() not in _PLAIN


def _names(pids: list[int], secrets: set[str], paths: list[str]) -> Names:
    homes = set()
    users = _accounts(paths)
    for uid in {os.geteuid(), *(owner for pid in pids if (owner := procs.owner(pid)) is not None)}:
        try:
            known = pwd.getpwuid(uid)
        except KeyError:
            continue
        users.add(known.pw_name)
        homes.add(known.pw_dir)
    name = machine.host_name()
    full, _ = deadlines.each([name], socket.getfqdn, patience_s=1.0)
    hosts = dict.fromkeys([name, platform.node(), *full.values()])
    return Names(tuple(hosts), tuple(sorted(users)), tuple(sorted(homes)), (), tuple(sorted(secrets)))


def _accounts(paths: list[str]) -> set[str]:
    """Return path components that are accounts of people: /scratch/ann/run7."""
    folders = {folder for path in paths if path.count("/") > 1 for folder in path.split("/")[1:]}
    asked = sorted(folder for folder in folders if re.fullmatch(r"[a-z_][\w.-]{1,31}", folder))[:_MOST_ACCOUNTS]

    def is_person(name: str) -> bool:
        try:
            return pwd.getpwnam(name).pw_uid >= _FIRST_PERSON
        except KeyError:
            return False

    known, _ = deadlines.each(asked, is_person, patience_s=_WORTH_S)
    return {name for name, is_one in known.items() if is_one}


def _logs(ask: Ask, ranks: dict[int, int | None], tell: Callable[[Part], None]) -> None:
    files, _ = job_output.find(ranks, ask.launchers)
    wanted = {file.path: (file.open_as, file.rank) for file in files}
    wanted.update((path, (path, None)) for path in ask.logs)
    if not wanted:
        return
    tail = max(4096, min(ask.tail_bytes, ask.most_bytes // len(wanted)))

    def read(path: str) -> None:
        open_as, rank = wanted[path]
        tell(Part(logs=(_tail(path, open_as, rank, tail),)))

    _, late = deadlines.each(wanted, read, patience_s=_WORTH_S)
    for path in late:
        tell(Part(logs=(LogTail(path, wanted[path][1], 0, "", "its file system did not answer in time"),)))


def _tail(path: str, open_as: str, rank: int | None, tail: int) -> LogTail:
    """Read the end of a regular file, from the start of a line."""
    try:
        fd = os.open(open_as, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return LogTail(path, rank, 0, "", error.strerror or str(error))
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return LogTail(path, rank, 0, "", "not a regular file")
        if status.st_size > tail:
            file.seek(status.st_size - tail)
            file.readline(tail)
        return LogTail(path, rank, status.st_size, file.read(tail).decode("utf-8", "replace"))


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_ENVIRON).decode("utf-8", "replace")
    except OSError:
        return ""
