"""The rendezvous of a job's nodes, from the command line of a waiting launcher.

Option names and defaults of torchrun (torch/distributed/run.py, the rendezvous backends of torch 2.13), `accelerate
launch`, which runs torchrun's code in its own process, and deepspeed.launcher.launch, started by deepspeed on each
node. A variable PET_NAME is the default of torchrun's --name.
"""

from __future__ import annotations

import base64
import json
import os
import re

from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_C10D_PORT, _STATIC_PORT = 29400, 29500
_JOIN_S, _CONNECT_S = 600.0, 60.0
"""How long an agent waits for the other nodes, and for the store of the c10d backend."""
_FLAGS = (
    *("standalone", "no_python", "run_path", "virtual_local_rank", "cpu", "multi_gpu", "tpu", "ipex", "use_deepspeed"),
    *("use_fsdp", "use_megatron_lm", "quiet", "debug", "use_cpu", "use_xpu", "same_network", "enable_cpu_affinity"),
)
"""Options without a value; of any other unknown option the next word is its value, unless it looks like the script."""
_MPIRUN = ("mpirun", "mpiexec", "orterun", "prterun")
_SPREAD = {"--map-by", "-map-by", "-bynode", "--bynode", "-npernode", "-N", "-ppn", "-perhost", "-rr", "--rankfile"}
"""Options of mpirun after which nodes are not filled one after another."""
_MOST_BYTES = 1 << 20
_ACCELERATE = {
    "num_machines": "nnodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "master_port",
}


@record
class Launch:
    """A launcher's options. `program`: "torchrun", "accelerate", "deepspeed"; "environment": a rank with MASTER_ADDR.

    `host`, `port`: the rendezvous, empty and 0 if not on the command line. `backend`: "static", "c10d", or another one.
    `nodes`: minimum and maximum. `node_rank`: None if unset. `gives_up_s`: timeout for the other nodes; `connects_s`:
    for the store. `script`: base name of the ranks' program. `hosts`: the job's nodes, if the command line lists them.
    """

    program: str
    host: str
    port: int
    backend: str
    nodes: tuple[int, int]
    node_rank: int | None = None
    run_id: str = ""
    gives_up_s: float | None = None
    connects_s: float | None = None
    is_host: bool | None = None
    script: str = ""
    hosts: tuple[str, ...] = ()


def read(words: Sequence[str], variables: Mapping[str, str]) -> Launch | None:
    """Parse a launcher's command line and its PET_* variables; None for an unknown launcher."""
    at = next((at for at, word in enumerate(words[:6]) if _program(words, at)), None)
    if at is None:
        return None
    program = _program(words, at)
    rest = list(words[at + 1 :])
    rest = rest[1:] if rest[:1] == ["launch"] else rest
    options, script = _options(rest)
    if program == "accelerate":
        options = {_ACCELERATE.get(name, name): value for name, value in options.items()}
    defaults = {name[4:].lower(): value for name, value in variables.items() if name.startswith("PET_")}
    return _launch(program, {**defaults, **options}, script)


def _program(words: Sequence[str], at: int) -> str:
    base = os.path.basename(words[at])
    if base == "torchrun" or words[at] in ("torch.distributed.run", "torch.distributed.launch"):
        return "torchrun"
    if words[at] == "deepspeed.launcher.launch":
        return "deepspeed"
    return "accelerate" if base == "accelerate" or words[at].startswith("accelerate.commands.") else ""


def _options(words: Sequence[str]) -> tuple[dict[str, str], str]:
    found: dict[str, str] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        if word in ("-m", "--module"):
            return found, left[0] if left else ""
        if not word.startswith("-"):
            return found, os.path.basename(word)
        name, has_value, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if has_value:
            found[name] = value
        elif name in _FLAGS or not left or left[0].startswith("-") or left[0].endswith(".py"):
            found[name] = "true"
        else:
            found[name] = left.pop(0)
    return found, ""


def _deepspeed(options: Mapping[str, str], script: str) -> Launch:
    """Its --world_info is base64 of {"node1": [local ranks], ...}; its ranks meet without the launcher."""
    try:
        hosts = tuple(json.loads(base64.urlsafe_b64decode(options.get("world_info", ""))))
    except (ValueError, TypeError):
        hosts = ()
    count = max(1, len(hosts))
    return Launch(
        program="deepspeed",
        host=options.get("master_addr", "127.0.0.1"),
        port=number(options.get("master_port", "")) or _STATIC_PORT,
        backend="env",
        nodes=(count, count),
        node_rank=number(options.get("node_rank", "")),
        script=script,
        hosts=tuple(map(str, hosts)),
    )


def _launch(program: str, options: Mapping[str, str], script: str) -> Launch:
    if program == "deepspeed":
        return _deepspeed(options, script)
    backend = options.get("rdzv_backend") or "static"
    least, _, most = options.get("nnodes", "1").partition(":")
    nodes = (number(least) or 1, number(most) or number(least) or 1)
    conf = dict(pair.partition("=")[::2] for pair in options.get("rdzv_conf", "").split(",") if pair)
    is_c10d = backend == "c10d"
    host, port = _split(options.get("rdzv_endpoint", ""), _C10D_PORT if is_c10d else _STATIC_PORT)
    if not host and not is_c10d:
        host = options.get("master_addr") or ("127.0.0.1" if program == "torchrun" else "")
        port = number(options.get("master_port", "")) or _STATIC_PORT
    if options.get("standalone") == "true":
        host, port, nodes = "", 0, (1, 1)
    return Launch(
        program=program,
        host=host,
        port=port if host else 0,
        backend=backend,
        nodes=nodes,
        node_rank=number(options.get("node_rank", "")),
        run_id=options.get("rdzv_id", "") if options.get("rdzv_id") != "none" else "",
        gives_up_s=float(number(conf.get("join_timeout" if is_c10d else "timeout", "")) or _JOIN_S),
        connects_s=float(number(conf.get("read_timeout", "")) or _CONNECT_S) if is_c10d else _JOIN_S,
        is_host=conf["is_host"].lower() in ("1", "true", "t", "yes", "y") if "is_host" in conf else None,
        script=script,
    )


def _split(endpoint: str, port: int) -> tuple[str, int]:
    """Split "node1:29400", "[fd00::1]:29400", "node1"; `port` is the default."""
    match = re.fullmatch(r"\[(.+)\](?::(\d+))?|([^:]*)(?::(\d+))?", endpoint.rpartition("//")[2])
    if match is None:
        return endpoint, port
    return match[1] or match[3] or "", int(match[2] or match[4] or port)


def is_mpirun(words: Sequence[str]) -> bool:
    """Return whether a command line is that of Open MPI's or MPICH's launcher."""
    return os.path.basename(words[0]).partition(".")[0] in _MPIRUN if words else False


def mpi_hosts(words: Sequence[str], folder: str) -> tuple[str, ...]:
    """Return the nodes that mpirun fills with its ranks, by --host or a hostfile; none if the slots are ambiguous.

    Open MPI and MPICH fill node after node. `folder`: base of a relative hostfile.
    """
    pairs = [(word.lstrip("-"), value) for word, value in zip(words, words[1:]) if word.startswith("-")]
    options = dict(reversed(pairs))  # mpirun's options precede the program's
    count = next((number(options[name]) for name in ("np", "n", "c") if name in options), None)
    named = next((options[name] for name in ("host", "H", "hosts") if name in options), "")
    file = next((options[name] for name in ("hostfile", "machinefile", "f") if name in options), "")
    found: list[str] = []
    filled = 0
    for line in named.split(",") if named else _lines(os.path.join(folder, file)) if file else ():
        match = re.fullmatch(r"([\w.-]+)(?::(\d+)|\s+slots\s*=\s*(\d+))?.*", line.partition("#")[0].strip())
        slots = number(match[2] or match[3] or ("1" if named else "")) if match is not None else None
        if match is None or slots is None or count is None or set(words) & _SPREAD:
            return ()
        found += [match[1]] if filled < count else []
        filled += slots
    return tuple(dict.fromkeys(found))


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return [line for line in file.read(_MOST_BYTES).splitlines() if line.partition("#")[0].strip()]
    except OSError:
        return []


def number(text: str) -> int | None:
    """Return a count or a port; None for any other text."""
    return int(text) if text.isascii() and text.isdigit() else None
