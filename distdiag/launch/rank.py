"""The common part of every rank: the stages start, connect, init, and the end.

Each step is reported before it starts, so that the place of a hung rank is known. A rank reports only its own
observations; the parent, which sees all ranks, decides which of them is at fault.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import warnings
from datetime import timedelta
from functools import partial

from distdiag.agent import rendezvous
from distdiag.agent.rank_progress import Progress
from distdiag.facts import machine, programs
from distdiag.facts.gpu import gpu_use

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, NoReturn

    import torch
    import torch.distributed as dist

    from distdiag.cluster.records import PausedMessage, Started

    Config = dict[str, Any]
    """One rank's JSON: the fields of `launch/runner.py`, and those of the command's own `_config`."""

_NAP_S, _LATE_S = 0.005, 0.01
_MOST_USERS = 3


class Stop(Exception):
    """This rank cannot continue; the reason has been reported."""


def run_rank(config: Config, kind: type[Rank]) -> None:
    """Run one rank, then exit: status 0 if it finished, else 1."""
    programs.die_with_parent()
    programs.name_process(f"distdiag-rank{config['rank']}")
    programs.allow_tracing_by_anyone()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    status = 1
    try:
        kind(config, Progress(config["events_fd"])).go()
        status = 0
    except Stop:
        pass
    sys.stdout.flush()
    sys.stderr.flush()
    # The group is destroyed; unloading torch takes a fifth of the run and tests no more.
    os._exit(status)


class Pauses(threading.Thread):
    """Measures how long this process did not run: stopped, throttled, or without a core.

    A thread that wakes up late from a short sleep was kept from running, with the whole process. The share spent
    waiting for a core is in the kernel's schedstat of this thread; during the rest it was stopped or throttled.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._paused_s = 0.0
        self._schedstat = ""
        self._began = (time.monotonic(), 0.0, 0.0, 0.0)

    def run(self) -> None:
        """Watch until the process ends."""
        self._schedstat = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        before = time.monotonic()
        while True:
            time.sleep(_NAP_S)
            now = time.monotonic()
            if now - before > _NAP_S + _LATE_S:
                self._paused_s += now - before - _NAP_S
            before = now

    def begin(self) -> None:
        """Reset the counters."""
        self._began = (time.monotonic(), self._paused_s, self._no_core_s(), machine.throttled_s())

    def since_begin(self) -> PausedMessage:
        """Return the pauses since `begin`."""
        time.sleep(2 * _NAP_S)  # a pause is noted only at the end of its nap
        at, paused_s, no_core_s, throttled_s = self._began
        paused_s = self._paused_s - paused_s
        throttled_s = min(paused_s, machine.throttled_s() - throttled_s)
        # The kernel counts a process beyond its quota as waiting for a core.
        no_core_s = max(0.0, min(paused_s, self._no_core_s() - no_core_s) - throttled_s)
        spans_s = (paused_s, no_core_s, throttled_s, time.monotonic() - at)
        paused_ns, no_core_ns, throttled_ns, of_ns = (round(seconds * 1e9) for seconds in spans_s)
        return {"paused_ns": paused_ns, "no_core_ns": no_core_ns, "throttled_ns": throttled_ns, "of_ns": of_ns}

    def _no_core_s(self) -> float:
        columns = machine.read_text(self._schedstat).split() if self._schedstat else []
        return int(columns[1]) / 1e9 if len(columns) > 1 else 0.0


class Rank:
    """One rank and its stages."""

    device: torch.device
    store: dist.TCPStore
    listener: socket.socket

    def __init__(self, config: Config, progress: Progress) -> None:
        self.config = config
        self.progress = progress
        self.rank: int = config["rank"]
        self.world_size: int = config["world_size"]
        self.in_group = False

    def go(self) -> None:
        """Run the stages in order; torch's exceptions are reported before the group is destroyed."""
        try:
            self.start()
            self.connect()
            self.init()
            self.work()
            self.done()
        except (RuntimeError, OSError, ValueError, TypeError, ImportError) as error:
            if is_out_of_memory(error):
                self.fail("out-of-memory", message=memory_message(error, getattr(self, "device", None)))
            self.fail("exception", message=first_lines(error))
        finally:
            if self.in_group:  # ranks that exit without this may abort
                dist.destroy_process_group()
        self.progress.step("finished", finished=True)

    def enter(self, stage: str, note: str) -> None:
        """Enter a stage, and inject the fault configured for it, if any."""
        self.progress.enter(stage, note)
        fault = self.config["fault"]
        if fault is None or fault.get("stage") != stage:
            return
        if fault["kind"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault["kind"] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault["kind"] == "late":
            time.sleep(fault["seconds"])

    def fail(self, kind: str, **details: object) -> NoReturn:
        """Report why this rank cannot continue, then stop."""
        self.progress.step(f"gave up: {kind}", trouble={"kind": kind, **details}, fatal=True)
        raise Stop

    def trouble(self, kind: str, **details: object) -> None:
        """Report an error seen by this rank, and continue."""
        self.progress.step(f"found: {kind}", trouble={"kind": kind, **details})

    def is_faulty(self, kind: str) -> bool:
        """Return whether this fault is to be injected into this rank."""
        return self.config["fault"] is not None and self.config["fault"].get("kind") == kind

    def start(self) -> None:
        """Import torch, choose the device, and report its facts."""
        self.enter("start", "importing torch")
        if self.is_faulty("no-import"):
            sys.meta_path.insert(0, _Hides("torch"))
        try:
            self.import_torch()
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
            self.fail("no-torch", message=first_lines(error), missing=missing, python=sys.executable)
        self.progress.step("choosing the device")
        if not dist.is_available():
            self.fail("no-torch", message="this torch was built without torch.distributed", missing=False)
        facts = self.choose_device()
        self.progress.step("device chosen", started={**_versions(), **facts})

    def import_torch(self) -> None:
        """Import torch, also into the module of the command's own rank."""
        load_torch(sys.modules[type(self).__module__])

    def work(self) -> None:
        """Run the command's own stages."""
        raise NotImplementedError

    def choose_device(self) -> Started:
        """Set `device`, and return its name, capability and memory."""
        if self.config["device"] == "cpu":
            self.device = torch.device("cpu")
            return {
                "device": "cpu",
                "device_name": "cpu",
                "free_bytes": machine.available_memory_bytes(),
                "total_bytes": machine.total_memory_bytes(),
            }
        if not torch.cuda.is_available():
            built_for = torch.version.cuda or torch.version.hip
            self.fail("cuda-unavailable", message=_cuda_complaint(), built_for=built_for, torch=torch.__version__)
        index = self.config["local_rank"] % torch.cuda.device_count()
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        free, total = torch.cuda.mem_get_info()
        properties = torch.cuda.get_device_properties(index)
        return {
            "device": f"cuda:{index}",
            "device_name": properties.name,
            "capability": None if torch.version.hip else f"{properties.major}.{properties.minor}",
            "arch_list": torch.cuda.get_arch_list(),
            "free_bytes": free,
            "total_bytes": total,
        }

    def connect(self) -> None:
        """Verify that the rendezvous address leads to rank 0 of this run."""
        address, port = self.config["address"], self.config["port"]
        self.enter("connect", "preparing to connect")
        if self.rank == 0:
            self.progress.step("listening on the port")
            self.progress.step(f"waiting for {self.world_size - 1} ranks on port {port}", waiting=True)
            self.listener = socket.socket(fileno=self.config["listener_fd"])
            rendezvous.receive(self.listener, self.config["key"], self.world_size)
        else:
            answered = partial(self.progress.step, "rank 0 answered; waiting for the others", waiting=True)
            self.progress.step(f"looking for rank 0 at {address} port {port}", waiting=True)
            try:
                rendezvous.greet(address, port, self.config["key"], self.rank, answered)
            except rendezvous.ForeignServer as stranger:
                self.fail("port-foreign", message=stranger.said, address=address, port=port)
        self.progress.step("all ranks connected")

    def init(self) -> None:
        """Create torch's store and the process group."""
        self.enter("init", "preparing the store")
        # Torch's limits are longer than ours: an error of a rank after ours is a consequence.
        patience = timedelta(seconds=self.config["timeout_s"] * 3 + 60)
        self.progress.step("opening the store", waiting=True)
        self.store = self.make_store(patience)
        self.join_group(patience)

    def join_group(self, patience: timedelta) -> None:
        """Create the process group of all ranks."""
        self.progress.step("init_process_group", waiting=True)
        dist.init_process_group(
            self.config["backend"],
            store=dist.PrefixStore("distdiag", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=patience,
        )
        self.in_group = True
        self.progress.step("process group ready")

    def make_store(self, patience: timedelta) -> dist.TCPStore:
        """Open torch's TCP store; rank 0 serves it on its existing listening socket."""
        address, port = self.config["address"], self.config["port"]
        if self.rank != 0:
            return dist.TCPStore(address, port, self.world_size, False, patience, False)
        spare = os.dup(self.listener.fileno())
        try:
            return dist.TCPStore(
                address, port, self.world_size, True, patience, False, master_listen_fd=self.listener.detach()
            )
        except (TypeError, RuntimeError):
            # Older torch accepts no socket and has to bind the port again, so close ours.
            socket.close(spare)
            return dist.TCPStore(address, port, self.world_size, True, patience, False)

    def agree(self, planned: dict[str, str], mine: dict[str, str]) -> None:
        """Compare the ranks' intended operations through the store, before the first collective.

        `planned`: as requested; `mine`: this rank's deviations.
        """
        self.enter("agree", "gathering op, dtype, size and versions")
        planned = {**planned, "world_size": str(self.world_size)}
        header = {
            **planned,
            "world_size": str(dist.get_world_size()),
            **mine,
            "torch": torch.__version__,
            "nccl": _nccl_version() if self.device.type == "cuda" else None,
        }
        self.progress.step("comparing them through the store", waiting=True)
        self.store.set(f"agree/{self.rank}", json.dumps(header))
        if self.rank == 0:
            headers = [json.loads(self.store.get(f"agree/{rank}")) for rank in range(self.world_size)]
            differing = _differences(headers)
            self.store.set("agreed", json.dumps(differing))
        else:
            differing = json.loads(self.store.get("agreed"))
            self.store.set(f"got/{self.rank}", "")
        if differing:
            if self.rank == 0:
                self.trouble("mismatch", differing=differing, planned=planned)
                # This rank's exit closes the store, which would end the others.
                self.store.wait([f"got/{rank}" for rank in range(1, self.world_size)])
            self.progress.step("not started: the ranks do not agree", waiting=True, held=True)
            raise Stop
        self.progress.step("all ranks agree")

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def done(self) -> None:
        """Synchronize with the others once more."""
        self.enter("done", "preparing the last barrier")
        self.progress.step("barrier", waiting=True)
        if self.device.type == "cuda" and self.config["backend"] == "nccl":
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()
        self.progress.step("destroying the process group", waiting=True)


class _Hides:
    """Makes one package unimportable, with Python's own error."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Refuse this package; leave all others to the next finder."""
        if name == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def load_torch(*modules: ModuleType) -> None:
    """Import torch as `torch` and `dist` into this module and others.

    Deferred, so that a torch that fails to import can be reported.
    """
    global torch, dist
    gc.disable()  # a tenth of the time of the import
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        import torch
        import torch.distributed as dist
    gc.enable()
    for module in modules:
        vars(module).update(torch=torch, dist=dist)


def _differences(headers: list[dict[str, object]]) -> dict[str, dict[str, list[int]]]:
    """Return {field: {value: ranks}} for fields on which the ranks disagree."""
    differing = {}
    for field in headers[0]:
        values: dict[str, list[int]] = {}
        for rank, header in enumerate(headers):
            values.setdefault(str(header.get(field)), []).append(rank)
        if len(values) > 1:
            differing[field] = values
    return differing


def _versions() -> dict[str, object]:
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": _nccl_version() if torch.cuda.is_available() else None,
    }


def _nccl_version() -> str | None:
    try:
        version = torch.cuda.nccl.version()
    except (AttributeError, RuntimeError, ImportError):  # a CUDA build without NCCL
        return None
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _cuda_complaint() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_lines(error)
    return "torch.cuda.is_available() is False"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in words or "can't allocate memory" in words


def memory_message(error: BaseException, device: torch.device | None) -> str:
    """Return an error's first line, and the other processes on this GPU."""
    if device is None or device.type != "cuda":
        return first_lines(error, 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = visible.split(",")[device.index] if visible else str(device.index)
    others = []
    for gpu in gpu_use.read(readings=1).gpus:
        if chosen != str(gpu.index) and not (gpu.uuid and gpu.uuid.startswith(chosen)):
            continue
        users = [f"pid {pid} ({machine.read_text(f'/proc/{pid}/comm').strip()})" for pid in gpu.pids or ()]
        users = [user for user in users if not user.startswith(f"pid {os.getpid()} ")][:_MOST_USERS]
        if users and gpu.memory_used_bytes is not None:
            used = f"{gpu.memory_used_bytes / 2**30:.1f} GiB"
            others.append(f"; GPU {gpu.index} has {used} in use, by {', '.join(users)}")
    return first_lines(error, 1) + "".join(others)


def first_lines(error: BaseException, number: int = 3) -> str:
    """Return the start of an error's message, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:number])[:500] or type(error).__name__


def _end_with_stdin() -> None:
    """Kill this process once the agent's end of its stdin closes."""
    while os.read(0, 65536):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
