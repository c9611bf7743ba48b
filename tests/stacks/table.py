"""The jobs with their truth, written from the definition of the faults, not from any tool's report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    name: str
    train: str
    fault: str
    rank: int | None
    """The faulty rank; in a healthy job the one that is really slow, if any."""
    world: int
    py: str
    launch: str
    hung: bool
    culprits: frozenset[int]
    variant: str = ""
    workers: int = 0
    waits: int | None = None
    """The innocent rank that waits for the faulty one by other means than a collective."""
    why: str = ""


JOBS: dict[str, Job] = {}


def hung(
    name: str, rank: int, world: int = 3, py: str = "311", launch: str = "env", culprits=None, why: str = "", **more
) -> None:
    stack, fault = name.split("-")[:2]
    JOBS[name] = Job(
        name,
        more.pop("train", stack),
        more.pop("fault", fault),
        rank,
        world,
        py,
        launch,
        True,
        frozenset([rank] if culprits is None else culprits),
        why=why,
        **more,
    )


def healthy(
    name: str, rank: int | None = None, world: int = 3, py: str = "311", launch: str = "env", why: str = "", **more
) -> None:
    stack, fault = name.split("-")[:2]
    JOBS[name] = Job(
        name,
        more.pop("train", stack),
        more.pop("fault", fault),
        rank,
        world,
        py,
        launch,
        False,
        frozenset() if rank is None else frozenset([rank]),
        why=why,
        **more,
    )


# every fault in plain DDP
hung("ddp-sleep", 2, 4)
hung("ddp-event", 1, py="312")
hung("ddp-threadjoin", 0, py="313")
hung("ddp-queue", 2, launch="torchrun")
hung("ddp-lock", 1, py="313")
hung("ddp-loglock", 2)
hung("ddp-fifo", 0, py="312")
hung("ddp-pipe", 2, py="313")
hung("ddp-socket", 1)
hung("ddp-child", 1, py="312", launch="torchrun")
hung("ddp-input", 2)
hung("ddp-spin", 0)
hung("ddp-pollspin", 2, py="313")
hung("ddp-regex", 1, py="312")
hung("ddp-filelock", 2)
hung("ddp-flock", 1)
hung("ddp-filebaton", 0, py="313")
hung("ddp-storeget", 1)
hung("ddp-storewait", 2, py="312")
hung("ddp-sigstop", 0)
hung("ddp-extrabarrier", 1, why="waits in a barrier that nobody else enters; others in the gradients' all_reduce")
hung(
    "ddp-skipbarrier", 2, 4, py="312", why="others are in the barrier that it left out; it waits in the next all_reduce"
)
hung("ddp-uneven", 0, py="313", why="has no batch left, leaves the loop and waits in the last barrier")
hung("buffers-extraforward", 1, why="one forward more: it waits for a broadcast of buffers that rank 0 does not send")
# at module level
hung("module-pdb", 1, py="312")
hung("module-event", 0, launch="torchrun")
hung("module-regex", 2, py="313")
# other stacks
hung("hf-sleep", 1, launch="torchrun")
hung("hf-queue", 0)
hung("accelerate-lock", 2, launch="accelerate")
hung("accelerate-sleep", 0)
hung("lightning-sleep", 1, launch="lightning")
hung("lightning-event", 0, launch="lightning")
hung("lightning-fifo", 2, launch="torchrun")
hung("fsdp1-sleep", 1)
hung("fsdp2-event", 2, py="312")
hung(
    "fsdp2-extraforward",
    2,
    py="313",
    why="alone in all_gather; others in reduce_scatter of the backward, or a later all_gather",
)
hung("hsdp-sleep", 3, 4)
hung("tp-queue", 1)
hung("tpdp-sleep", 2, 4)
hung(
    "tpdp-skiptp",
    1,
    4,
    why="left out the TP all_reduce; its partner (rank 0) waits there for it, 2 waits for 0 in DP, 1 and 3 are in the barrier behind",
)
hung(
    "tpdp-skipgather",
    2,
    4,
    why="left out the TP all_reduce, is in the TP all_gather; its partner (rank 3) waits in the TP all_reduce, 1 in DP for 3, 0 in all_gather for 1",
)
hung(
    "tpdp-skipmiddle",
    3,
    4,
    train="tpdp_dp_only",
    why="left out the TP all_reduce (and the barrier): in DP all_reduce; partner 2 waits in TP all_reduce, 0 and 1 in the barrier",
)
hung("pp1f1b-sleep", 1, train="pp")
hung("ppgpipe-fifo", 2, train="pp", variant="gpipe")
hung("p2p-sleep", 1, 4)
hung("p2p-chain", 0, py="312", fault="sleep", variant="chain", why="2 recv from 1, 1 recv from 0, 0 sleeps")
hung("p2p-cycle", 0, 2, culprits=[0, 1], why="0 recv from 1, 1 recv from 0")
hung(
    "p2p-cycle3",
    0,
    3,
    py="313",
    fault="cycle",
    culprits=[0, 1],
    why="0 recv from 1, 1 recv from 0; 2 recv from 1 and is innocent",
)
hung("dcp-fifo", 2)
hung("dcp-write", 1, fault="socket", variant="write", why="stuck in storage_writer.write_data")
hung(
    "asyncsave-write",
    1,
    fault="fifo",
    variant="write",
    why="the thread of async_save is stuck in write_data; all main threads wait for theirs",
)
hung("loader-sleep", 1, workers=1, why="its DataLoader worker sleeps in __getitem__")
hung("loader-fifo", 0, py="312", workers=2, why="its DataLoader worker reads a FIFO")
hung("loader-zero", 2, fault="queue", workers=0, why="no workers: __getitem__ itself waits")
hung("thread-sleep", 2, train="thread")
hung("asyncio-socket", 1, py="313")
hung("uvloop-lock", 0)
hung("threadexc-swallowed", 1, why="its trainer thread died silently; main thread waits in the barrier behind the loop")
hung("join-sleep", 0)
hung("accum-child", 1)
hung("objects-sleep", 0)
hung("objects-skip", 2, why="left out broadcast_object_list, waits in all_gather_object")
hung("monitored-sleep", 2)
hung("monitored-event", 0, py="312")
hung("newgroup-sleep", 3, 4)
hung("newgroup-skip", 1, why="did not call new_group; waits in the all_reduce behind it")
hung("mpf-fifo", 0, why="rank 0 prepares the data and is stuck; others in the first barrier")
hung("mpf-sleep", 2, why="stuck behind the barrier of main_process_first, before the next all_reduce")
hung("rank0-event", 0, why="rank 0 evaluates and is stuck, others in barrier")
hung("spawn-sleep", 1, train="ddp", launch="spawn")
hung("spawn-queue", 0, train="ddp", launch="spawn", py="312")
hung("ray-sleep", 1, train="ddp", launch="ray")
hung("ray-event", 0, train="ddp", launch="ray")
hung("exit-init", 2, why="exited before init_process_group")
hung("exit-store", 1, why="exited; others wait for its key in the store")
hung("exit-child", 1, py="313", why="exited; a child of it holds its connections, so the others wait in all_reduce")

# a rank in unusual states; ambiguous ones; and innocents that are not in a collective either
hung("ddp-cgil", 1, why="sleeps in C with the GIL held")
hung("ddp-dstate", 2, py="312", why="state D (vfork)")
hung(
    "ddp-extrabarrier2",
    1,
    2,
    fault="extrabarrier",
    why="two ranks, each in another collective: only rank 1 is to blame, and hardly anybody can tell",
)
hung(
    "chain-store",
    1,
    train="chain",
    fault="sleep",
    variant="store",
    waits=0,
    why="0 waits for a store key that 1 is to set, 1 sleeps, 2 in all_reduce",
)
hung(
    "chain-socket",
    0,
    train="chain",
    fault="event",
    variant="socket",
    waits=2,
    why="2 reads from a socket of 0, 0 waits on an event, 1 in all_reduce",
)
hung(
    "chain-fifo",
    2,
    py="313",
    train="chain",
    fault="sleep",
    variant="fifo",
    waits=0,
    why="0 reads a FIFO that 2 has open for writing, 2 sleeps, 1 in all_reduce",
)
hung(
    "chain-file",
    0,
    train="chain",
    fault="queue",
    variant="file",
    waits=1,
    why="1 polls for a file that 0 is to write, 0 is in queue.get, 2 in all_reduce; unknown is fine",
)
hung(
    "crosslock-flock",
    1,
    culprits=[0, 1],
    why="0 holds a file lock and is in the all_reduce, 1 waits for the lock, 2 is innocent",
)
hung(
    "everybody-licence",
    0,
    culprits=[0, 1, 2],
    train="everybody",
    why="all at the same line of user code; unknown is fine",
)

# healthy
healthy("export-after", 0, why="training is over, 1 and 2 have left with status 0; 0 writes the model")
healthy("slowinit-tokenize", 0, py="312", why="0 computes before init_process_group, where the others wait")
healthy("slowstage-compute", 1, 4, why="a pipeline whose stage 1 computes for 2 s")
healthy("ddp-fast")
healthy("ddp-p03", py="312")
healthy("ddp-p2", py="313")
healthy("module-p03", py="311", launch="torchrun")
healthy("module-fast", py="312")
healthy("hf-fast", launch="torchrun")
healthy("accelerate-p03", launch="accelerate")
healthy("lightning-fast", launch="lightning")
healthy("fsdp1-p03")
healthy("fsdp2-fast", py="313")
healthy("hsdp-p2", None, 4)
healthy("tp-fast", py="312")
healthy("tpdp-p03", None, 4)
healthy("pp1f1b-fast", train="pp")
healthy("p2p-p03", py="313")
healthy("dcp-fast")
healthy("asyncsave-fast")
healthy("loader-slow", workers=1, why="all workers take 0.8 s a batch")
healthy("thread-p2")
healthy("asyncio-fast", py="312")
healthy("uvloop-p03")
healthy("join-fast", why="rank 1 has no batches left and shadows the others")
healthy("accum-p03")
healthy("objects-fast")
healthy("mpf-work", 0, why="rank 0 tokenizes; others in the first barrier")
healthy("rank0-save", 0, variant="save", why="rank 0 writes a checkpoint; others in barrier")
healthy("rank0-eval", 0, py="313", variant="eval", why="rank 0 evaluates; others in barrier")
healthy("compile-slow", 1, why="one rank compiles")
healthy("ddp-slowdata", 2, why="each batch of rank 2 takes 30 x 0.1 s")
healthy("ddp-slowdata1", 1, py="312", why="each batch of rank 1 takes one wait of 3 s")
healthy("spawn-p03", train="ddp", launch="spawn")
healthy("ray-p2", train="ddp", launch="ray")
