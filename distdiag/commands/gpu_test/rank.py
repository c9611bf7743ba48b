"""What every rank of gpu-test runs: the stages start, connect, init, agree, reduce, memory, done.

Each step is reported before it is made, so that a rank that never comes back has said where it is. A rank reports
what it sees itself; who is to blame is decided by whoever sees all ranks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import warnings
from datetime import timedelta

from distdiag.node import machine, rendezvous, run
from distdiag.node.progress import Progress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    import torch
    import torch.distributed as dist

# The reduced values are whole numbers below 2**24, so float32 sums of them are exact in any order.
PERIOD = 2039
"""Element i starts as i mod PERIOD: a prime, so that a chunk moved by a power of two shows."""
MARK = 2048
"""Rank r adds this where i mod world_size == r, so each source rank leaves its own trace."""
MEMORY_CHUNK_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}


class Stop(Exception):
    """This rank cannot go on; what it saw is reported already."""


def main(config: dict[str, Any]) -> None:
    """Run the stages of one rank, then leave: status 0 when it came to the end, 1 when it could not."""
    run.die_with_parent()
    run.name_process(f"distdiag-rank{config['rank']}")
    run.allow_tracing_by_anyone()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    status = 1
    try:
        Rank(config, Progress(config["events_fd"])).go()
        status = 0
    except Stop:
        pass
    sys.stdout.flush()
    sys.stderr.flush()
    # The group is destroyed; what is left, unloading torch, takes a fifth of the run and tests nothing.
    os._exit(status)


class Rank:
    """One rank on its way through the stages."""

    device: torch.device
    dtype: torch.dtype
    store: dist.Store
    listener: socket.socket

    def __init__(self, config: dict[str, Any], progress: Progress) -> None:
        self.config = config
        self.progress = progress
        self.rank: int = config["rank"]
        self.world_size: int = config["world_size"]
        self.in_group = False

    def go(self) -> None:
        """Take the stages in order; an exception of torch's is reported before the group is destroyed."""
        try:
            self.start()
            self.connect()
            self.init()
            self.agree()
            self.reduce()
            self.memory()
            self.done()
        except (RuntimeError, OSError, ValueError, TypeError, ImportError) as error:
            kind = "out-of-memory" if _is_out_of_memory(error) else "exception"
            self.fail(kind, message=_first_lines(error))
        finally:
            self.leave_group()
        self.progress.step("finished", finished=True)

    def enter(self, stage: str, note: str) -> None:
        """Reach a stage; an injected fault for it happens here."""
        self.progress.enter(stage, note)
        fault = self.config["fault"]
        if fault is None or fault["stage"] != stage:
            return
        if fault["kind"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault["kind"] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault["kind"] == "late":
            time.sleep(fault["seconds"])

    def fail(self, kind: str, **details: object) -> NoReturn:
        """Report why this rank cannot go on, then stop."""
        self.progress.step(f"gave up: {kind}", trouble={"kind": kind, **details}, fatal=True)
        raise Stop

    def trouble(self, kind: str, **details: object) -> None:
        """Report something wrong that this rank saw, and go on."""
        self.progress.step(f"found: {kind}", trouble={"kind": kind, **details})

    def is_faulty(self, kind: str) -> bool:
        """Tell whether this fault is to be made in this rank."""
        return self.config["fault"] is not None and self.config["fault"]["kind"] == kind

    def start(self) -> None:
        """Import torch, choose the device, and tell its facts."""
        self.enter("start", "importing torch")
        if self.is_faulty("no-import"):
            sys.meta_path.insert(0, _Hides("torch"))
        try:
            load_torch()
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
            self.fail("no-torch", message=_first_lines(error), missing=missing, python=sys.executable)
        self.progress.step("choosing the device")
        if not dist.is_available():
            self.fail("no-torch", message="this torch was built without torch.distributed", missing=False)
        facts = self.choose_device()
        self.progress.step("device chosen", started={**_versions(), **facts})

    def choose_device(self) -> dict[str, object]:
        """Set `device`, and give its name, capability and memory."""
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
        """Make sure that the rendezvous address leads to our rank 0."""
        address, port = self.config["address"], self.config["port"]
        self.enter("connect", "preparing to connect")
        if self.rank == 0:
            self.progress.step(f"waiting for {self.world_size - 1} ranks on port {port}", waiting=True)
            self.listener = socket.socket(fileno=self.config["listener_fd"])
            rendezvous.receive(self.listener, self.config["nonce"], self.world_size)
        else:
            self.progress.step(f"asking {address} port {port} for rank 0", waiting=True)
            try:
                rendezvous.greet(address, port, self.config["nonce"], self.rank)
            except rendezvous.Stranger as stranger:
                self.fail("port-foreign", message=stranger.said, address=address, port=port)
        self.progress.step("rank 0 answers")

    def init(self) -> None:
        """Make torch's store and the process group."""
        self.enter("init", "preparing the store")
        # Torch's own limits stay behind ours: what a rank would say after them is a consequence.
        patience = timedelta(seconds=self.config["timeout_s"] * 3 + 60)
        self.progress.step("opening the store", waiting=True)
        self.store = self.make_store(patience)
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
        """Open torch's TCP store; rank 0 serves it on the socket it already listens on."""
        address, port = self.config["address"], self.config["port"]
        if self.rank != 0:
            return dist.TCPStore(address, port, self.world_size, False, patience, False)
        spare = os.dup(self.listener.fileno())
        try:
            return dist.TCPStore(
                address, port, self.world_size, True, patience, False, master_listen_fd=self.listener.detach()
            )
        except (TypeError, RuntimeError):
            # A torch whose store takes no socket: it has to bind the port again, which we give up for it.
            socket.close(spare)
            return dist.TCPStore(address, port, self.world_size, True, patience, False)

    def agree(self) -> None:
        """Compare what the ranks are about to do through the store, before the first collective."""
        self.enter("agree", "gathering op, dtype, size and versions")
        self.dtype = torch.float64 if self.is_faulty("dtype") else torch.float32
        planned = {
            "op": "all_reduce",
            "dtype": "float32",
            "size_bytes": str(self.config["size_bytes"]),
            "world_size": str(self.world_size),
        }
        mine = {
            **planned,
            "dtype": str(self.dtype).replace("torch.", ""),
            "world_size": str(dist.get_world_size()),
            "torch": torch.__version__,
            "nccl": _nccl_version() if self.device.type == "cuda" else None,
        }
        self.progress.step("comparing them through the store", waiting=True)
        self.store.set(f"agree/{self.rank}", json.dumps(mine))
        if self.rank == 0:
            headers = [json.loads(self.store.get(f"agree/{rank}")) for rank in range(self.world_size)]
            differing = _differences(headers)
            self.store.set("agreed", json.dumps(differing))
        else:
            differing = json.loads(self.store.get("agreed"))
        if differing:
            if self.rank == 0:
                self.trouble("mismatch", differing=differing, planned=planned)
            self.progress.step("held back: the ranks do not agree", waiting=True, held=True)
            raise Stop
        self.progress.step("all ranks agree")

    def reduce(self) -> None:
        """All-reduce one element, then the whole buffer, and check every element of the result."""
        self.enter("reduce", "preparing one element")
        one = torch.full((1,), self.rank + 1, dtype=self.dtype, device=self.device)
        self.progress.step("all_reduce of 1 element", waiting=True)
        self.all_reduce(one)
        total = self.world_size * (self.world_size + 1) // 2
        if one.item() != total:
            self.wrong_result(torch.tensor([0]), one, float(total), "the sum of 1 element", None)
        self.progress.step("preparing the buffer")
        count = max(1, self.config["size_bytes"] // self.dtype.itemsize)
        sent = pattern(count, self.rank, self.world_size, self.dtype, self.device)
        if self.is_faulty("corrupt"):
            sent[count // 2] += (
                1  # one element, in this rank's own memory: every collective still returns without error
            )
        result = sent.clone()
        self.progress.step(f"all_reduce of {self.config['size_bytes']} bytes", waiting=True)
        self.all_reduce(result)
        self.progress.step("checking every element")
        wrong = wrong_elements(result, expected_tile(self.world_size, self.dtype, self.device))
        if len(wrong):
            expected = float(wrong[0] % PERIOD) * self.world_size + MARK
            own = sent != pattern(count, self.rank, self.world_size, self.dtype, self.device)
            how = explain(result, sent, wrong, self.world_size)
            self.wrong_result(wrong, result, expected, how, own.nonzero().flatten())
        self.progress.step("reduced")

    def wrong_result(
        self, wrong: torch.Tensor, result: torch.Tensor, expected: float, how: str, own: torch.Tensor | None
    ) -> None:
        """Report a wrong sum, and whether it came from wrong data of this rank itself."""
        first = int(wrong[0])
        self.trouble(
            "wrong-result",
            wrong=len(wrong),
            total=result.numel(),
            first_index=first,
            got=float(result[first]),
            expected=expected,
            how=how,
            own_wrong=0 if own is None else len(own),
            own_first_index=None if own is None or not len(own) else int(own[0]),
        )

    def all_reduce(self, buffer: torch.Tensor) -> None:
        """Sum over the ranks in place, and wait for the device."""
        dist.all_reduce(buffer)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def memory(self) -> None:
        """Allocate in chunks, write a pattern of position and chunk everywhere, then read all of it back."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            wanted = int(torch.cuda.mem_get_info()[0] * self.config["memory_fraction"] / self.config["sharing"])
        else:
            wanted = self.config["memory_bytes"]
        self.enter("memory", f"allocating {wanted} bytes")
        chunk_bytes = min(MEMORY_CHUNK_BYTES[self.device.type], wanted)
        chunks: list[torch.Tensor] = []
        try:
            # Position within the chunk plus the chunk's number: two chunks on the same memory cannot both be right.
            tile = torch.arange(chunk_bytes // 4, dtype=torch.int32, device=self.device)
            while (len(chunks) + 2) * chunk_bytes <= wanted:
                chunks.append(tile + len(chunks))
                self.progress.still(f"{len(chunks)} chunks written")
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            got_bytes = len(chunks) * chunk_bytes
            chunks.clear()
            self.trouble("out-of-memory", asked_bytes=wanted, got_bytes=got_bytes, message=_first_lines(error))
        self.progress.step("reading it back")
        bad = []
        for number, chunk in enumerate(chunks):
            if not torch.equal(chunk.sub_(number), tile):
                bad.append(number)
            self.progress.still(f"{number + 1} chunks read back")
        if bad:
            self.trouble("memory-corrupt", chunks=bad, chunk_bytes=chunk_bytes)
        self.progress.step("memory holds", memory_bytes=(len(chunks) + 1) * chunk_bytes)

    def done(self) -> None:
        """Meet the others once more."""
        self.enter("done", "preparing the last barrier")
        self.progress.step("barrier", waiting=True)
        if self.device.type == "cuda" and self.config["backend"] == "nccl":
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()
        self.progress.step("destroying the process group", waiting=True)

    def leave_group(self) -> None:
        """Destroy the process group: ranks that end without do not always end in peace."""
        if self.in_group:
            dist.destroy_process_group()


class _Hides:
    """Makes one package not importable, with Python's own error for it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Refuse the one package; leave all others to the next finder."""
        if name == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def load_torch() -> None:
    """Import torch into this module. Not at its top: a torch that cannot be imported is a thing to report."""
    global torch, dist
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        import torch
        import torch.distributed as dist


def pattern(count: int, rank: int, world_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a rank sends: shape (count,), element i is i mod PERIOD, plus MARK where i mod world_size is the rank."""
    tile = torch.arange(PERIOD, dtype=dtype, device=device)
    buffer = torch.empty(count, dtype=dtype, device=device)
    whole = count // PERIOD * PERIOD
    buffer[:whole].view(-1, PERIOD).copy_(tile)
    buffer[whole:] = tile[: count - whole]
    buffer[rank::world_size] += MARK
    return buffer


def expected_tile(world_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One period of the right sum, shape (PERIOD,): every position is marked by exactly one rank."""
    return torch.arange(PERIOD, dtype=dtype, device=device) * world_size + MARK


def wrong_elements(result: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """Indices, shape (k,), where the result is not the tile repeated. Compares in blocks: no second large buffer."""
    block = tile.repeat(128)
    wrong = []
    for begin in range(0, result.numel(), block.numel()):
        part = result[begin : begin + block.numel()]
        if not torch.equal(part, block[: part.numel()]):
            wrong.append((part != block[: part.numel()]).nonzero().flatten() + begin)
    return torch.cat(wrong) if wrong else torch.empty(0, dtype=torch.int64)


def explain(result: torch.Tensor, sent: torch.Tensor, wrong: torch.Tensor, world_size: int) -> str:
    """Say in words what kind of wrong sum this is, from the first wrong stretch of the buffer."""
    stretch = wrong[: 8 * world_size].cpu()
    got = result[stretch.to(result.device)].double().cpu()
    right = (stretch % PERIOD).double() * world_size + MARK
    error = got - right
    if torch.equal(got, sent[stretch.to(sent.device)].double().cpu()) and world_size > 1 and len(stretch) > 1:
        return "nothing was summed: the buffer still holds this rank's own values"
    for rank in range(world_size) if len(stretch) > 1 else ():
        part = (stretch % PERIOD).double() + (stretch % world_size == rank).double() * MARK
        if torch.equal(error, -part):
            return f"the contribution of rank {rank} is missing"
        if torch.equal(error, part):
            return f"the contribution of rank {rank} was counted twice"
    return "single values changed" if len(wrong) < 8 else "values changed"


def _differences(headers: list[dict[str, object]]) -> dict[str, dict[str, list[int]]]:
    """Field -> value -> ranks, of the fields on which the ranks do not agree."""
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
    """Torch's own reason why there is no CUDA."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return _first_lines(error)
    return "torch.cuda.is_available() is False"


def _is_out_of_memory(error: BaseException) -> bool:
    words = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in words or "can't allocate memory" in words


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500] or type(error).__name__


def _end_with_stdin() -> None:
    """End at once when the agent is gone: its end of our stdin closes."""
    while os.read(0, 65536):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
