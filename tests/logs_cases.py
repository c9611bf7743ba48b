# ruff: noqa: E501 - lines of logs are as long as they are
"""Logs with known truth: recordings of jobs that really failed, and texts as NCCL's watchdog and INFO lines are.

A case is (name, text or recording, id of the finding, ranks at fault). `unknown` stands for any verdict that leaves it
open. The recordings are of tests/programs/fails_in_many_ways.py under torch 2.13 (with --tee 3, plain), SLURM 22.05, accelerate
1.15, DeepSpeed 0.19, Open MPI 4.1 and MPICH 4.0; rank 2 of 4 is at fault. Their paths were shortened, nothing else.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import logs_written_first

RECORDED = Path(__file__).parent / "recorded" / "logs"


@dataclass(frozen=True)
class Case:
    """One log. `also`: what else a right answer says; `forced`: the log itself is enough to know it."""

    name: str
    text: bytes
    id: str
    ranks: tuple[int, ...]
    also: str = ""
    forced: bool = True


_UNFORCED = {
    "srun-late": "all four ranks report a consequence: the late rank lost the peers that had timed out before",
    "deepspeed-kill": "DeepSpeed's launcher prints a return code with the --local_rank of the process it started last",
    "tree-console": "the output of the ranks is elsewhere; a rank that lost a peer may end by SIGABRT too",
    "deepspeed-exit3": "the return code is not that of --local_rank, as above",
    "deepspeed-import": "the cause is known, its rank is not, as above",
}
_FIRST = ("first-failure", (2,))
_RECORDED: dict[str, tuple[str, tuple[int, ...], str]] = {
    "torchrun-raise": (*_FIRST, "ValueError: label 1000"),
    "torchrun-kill": (*_FIRST, "SIGKILL, sender unknown"),
    "torchrun-segv": (*_FIRST, "SIGSEGV"),
    "torchrun-abort": (*_FIRST, "SIGABRT"),
    "torchrun-exit1": (*_FIRST, "exit status 1"),
    "torchrun-exit3": (*_FIRST, "exit status 3"),
    "torchrun-exit0": ("left-early", (2,), ""),
    "torchrun-hang": ("missing-rank", (2,), ""),
    "torchrun-late": ("missing-rank", (2,), ""),
    "torchrun-size": ("size-mismatch", (), "received 2048 bytes, expected 1024"),
    "torchrun-op": ("collective-mismatch", (2,), "rank 2 in barrier"),
    "torchrun-order": ("collective-mismatch", (2,), "rank 2 in broadcast"),
    "torchrun-file": (*_FIRST, "FileNotFoundError"),
    "torchrun-full": (*_FIRST, "No space left on device"),
    "torchrun-oom": (*_FIRST, "CUDA out of memory"),
    "torchrun-assert": (*_FIRST, "loss is not finite"),
    "torchrun-chained": (*_FIRST, "the config of the run is not complete"),
    "torchrun-ckpt": (*_FIRST, "UnpicklingError"),
    "torchrun-thread": (*_FIRST, "ZeroDivisionError"),
    "torchrun-all": ("same-failure", (0, 1, 2, 3), "empty parameter list"),
    "torchrun-two": ("unknown", (), "KeyError"),
    "torchrun-import": (*_FIRST, "No module named 'flash_attn_that_is_not_here'"),
    "torchrun-monitored": ("missing-rank", (2,), "monitoredBarrier"),
    "torchrun-length": ("left-early", (2,), ""),
    "torchrun-loader": (*_FIRST, "DataLoader worker"),
    "torchrun-restart": (*_FIRST, "/ckpt/step2.pt"),
    "plain-raise": (*_FIRST, "ValueError: label 1000"),
    "plain-kill": (*_FIRST, "SIGKILL, sender unknown"),
    "plain-exit0": ("left-early", (2,), ""),
    "plain-hang": ("missing-rank", (2,), ""),
    "plain-size": ("size-mismatch", (), ""),
    "ompi-raise": (*_FIRST, "ValueError: label 1000"),
    "ompi-kill": (*_FIRST, "SIGKILL, sender unknown"),
    "ompi-exit0": ("left-early", (2,), ""),
    "ompi-hang": ("missing-rank", (2,), ""),
    "ompi-size": ("size-mismatch", (), ""),
    "hydra-raise": (*_FIRST, "ValueError: label 1000"),
    "hydra-kill": ("unknown", (), ""),
    "hydra-exit0": ("left-early", (2,), ""),
    "hydra-hang": ("missing-rank", (2,), ""),
    "hydra-size": ("size-mismatch", (), ""),
    "tree-console": (*_FIRST, "SIGABRT"),
    # Recorded by record_logs.py; the expectations were written before the recordings were read.
    "torchrun-memory": (*_FIRST, "out of memory"),
    "torchrun-save": (*_FIRST, ""),
    "torchrun-handled": (*_FIRST, "ValueError: label 1000"),
    "torchrun-handled-kill": (*_FIRST, "SIGKILL, sender unknown"),
    "torchrun-handled-hang": ("missing-rank", (2,), ""),
    "torchrun-handled-own": (*_FIRST, "ValueError: label 1000"),
    "torchrun-handled-exit": (*_FIRST, "exit status 1"),
    "plain-handled": (*_FIRST, "ValueError: label 1000"),
    "plain-handled-kill": (*_FIRST, "SIGKILL, sender unknown"),
    "plain-handled-hang": ("missing-rank", (2,), ""),
    "plain-import": (*_FIRST, "No module named 'flash_attn_that_is_not_here'"),
    "plain-two": ("unknown", (), "KeyError"),
    "srun-raise": (*_FIRST, "ValueError: label 1000"),
    "srun-kill": (*_FIRST, "SIGKILL, sender unknown"),
    "srun-segv": (*_FIRST, "SIGSEGV"),
    "srun-abort": (*_FIRST, "SIGABRT"),
    "srun-exit3": (*_FIRST, "exit status 3"),
    "srun-exit0": ("left-early", (2,), ""),
    "srun-hang": ("missing-rank", (2,), ""),
    "srun-late": ("missing-rank", (2,), ""),
    "srun-size": ("size-mismatch", (), ""),
    "srun-op": ("collective-mismatch", (2,), "rank 2 in barrier"),
    "srun-order": ("collective-mismatch", (2,), "rank 2 in broadcast"),
    "srun-import": (*_FIRST, "No module named 'flash_attn_that_is_not_here'"),
    "srun-length": ("left-early", (2,), ""),
    "srun-save": (*_FIRST, ""),
    "srun-memory": (*_FIRST, "out of memory"),
    "srun-handled": (*_FIRST, "ValueError: label 1000"),
    "srun-handled-kill": (*_FIRST, "SIGKILL, sender unknown"),
    "srun-two": ("unknown", (), "KeyError"),
    "accelerate-raise": (*_FIRST, "ValueError: label 1000"),
    "accelerate-kill": (*_FIRST, "SIGKILL, sender unknown"),
    "accelerate-exit3": (*_FIRST, "exit status 3"),
    "accelerate-import": (*_FIRST, "No module named 'flash_attn_that_is_not_here'"),
    "accelerate-hang": ("missing-rank", (2,), ""),
    "accelerate-op": ("collective-mismatch", (2,), "rank 2 in barrier"),
    "accelerate-restart": (*_FIRST, "/ckpt/step2.pt"),
    "accelerate-handled": (*_FIRST, "ValueError: label 1000"),
    "accelerate-memory": (*_FIRST, "out of memory"),
    "deepspeed-raise": (*_FIRST, "ValueError: label 1000"),
    "deepspeed-kill": (*_FIRST, "SIGKILL, sender unknown"),
    "deepspeed-exit3": (*_FIRST, "exit status 3"),
    "deepspeed-import": (*_FIRST, "No module named 'flash_attn_that_is_not_here'"),
    "deepspeed-hang": ("missing-rank", (2,), ""),
    "deepspeed-op": ("collective-mismatch", (2,), "rank 2 in barrier"),
    "deepspeed-exit0": ("left-early", (2,), ""),
    "deepspeed-size": ("size-mismatch", (), ""),
    "deepspeed-handled": (*_FIRST, "ValueError: label 1000"),
    # Of fails_in_rarer_ways.py: no rank is at fault in all of them.
    "torchrun-worker": ("first-failure", (1,), "UnicodeDecodeError"),
    "torchrun-healthy": ("unknown", (), "nothing shows that it ended a rank"),
    "torchrun-telemetry-segv": ("first-failure", (1,), "Segmentation fault"),
    "torchrun-telemetry-exit": (*_FIRST, "exit status 7"),
    "torchrun-recursion": (*_FIRST, "RecursionError"),
    "torchrun-service-text": ("first-failure", (3,), "shard-17"),
    "torchrun-group": (*_FIRST, "2 loaders failed"),
    "torchrun-restart-segv": ("first-failure", (3,), "license server"),
    "plain-sysexit": ("first-failure", (1,), "terminate called without"),
    "plain-service": ("first-failure", (3,), "Connection reset by peer"),
    "plain-noted": ("first-failure", (1,), "attention.bias"),
    "plain-restart-segv": ("first-failure", (3,), "license server"),
    "ompi-import": (*_FIRST, "No module named 'flash_attn_that_is_not_here'"),
    "ompi-handled": (*_FIRST, "ValueError: label 1000"),
    "ompi-memory": (*_FIRST, "out of memory"),
    "ompi-op": ("collective-mismatch", (2,), "rank 2 in barrier"),
    "hydra-import": (*_FIRST, "No module named 'flash_attn_that_is_not_here'"),
    "hydra-handled": (*_FIRST, "ValueError: label 1000"),
}


def caught(rank: int, seq: int, op: str = "ALLREDUCE", numel: int = 4096, form: str = "2.6") -> str:
    """Write the line of a watchdog whose collective timed out, as a release of torch does."""
    heads = {
        "2.6": f"[rank{rank}]:[E1123 10:20:30.1{rank:02}000000 ProcessGroupNCCL.cpp:629] [Rank {rank}]",
        "2.1": f"[E ProcessGroupNCCL.cpp:474] [Rank {rank}]",
        "2.3": f"[rank{rank}]:[E ProcessGroupNCCL.cpp:563] [Rank {rank}]",
        "pg": f"[rank{rank}]:[E1123 10:20:30.1{rank:02}000000 ProcessGroupNCCL.cpp:629] "
        f"[PG ID 1 PG GUID 7(tensor_parallel) Rank {rank}]",
    }
    work = f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000)"
    if form == "2.1":
        work = f"WorkNCCL(SeqNum={seq}, OpType={op}, TensorShape=[{numel}], Timeout(ms)=600000)"
    return f"{heads[form]} Watchdog caught collective operation timeout: {work} ran for 60006{rank % 10} milliseconds before timing out.\n"


def status(rank: int, at: int, enqueued: int, completed: int, form: str = "2.6") -> str:
    """Write the status line behind it."""
    head = f"[rank{rank}]:[E1123 10:20:30.2{rank:02}000000 ProcessGroupNCCL.cpp:681] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    if form == "2.4":
        return (
            f"{head} Exception (either an error or timeout) detected by watchdog at work: {at}, last enqueued NCCL work: "
            f"{enqueued}, last completed NCCL work: {completed}.\n"
        )
    if form == "2.3":
        return f"{head} Timeout at NCCL work: {at}, last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.\n"
    return (
        f"{head}  failure detected by watchdog at work sequence id: {at} PG status: last enqueued work: {enqueued}, "
        f"last completed work: {completed}\n"
    )


def dump(rank: int, of: int, enqueued: int, completed: int) -> str:
    """Write the line of a rank that another one asked for its flight recorder."""
    return (
        f"[rank{rank}]:[E1123 10:20:31.000000000 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
        f"Received a dump signal due to a collective timeout from  rank {of} and we will try our best to dump the debug "
        f"info. Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.\n"
    )


def stuck(ranks: range, seq: int, **form: str) -> str:
    """Write what ranks write that wait in the same collective."""
    return "".join(caught(rank, seq) + status(rank, seq, seq + 2, seq - 1, **form) for rank in ranks)


def info(
    rank: int, host: str, *, nranks: int = 4, done: bool = True, via: str = "NET/IB/0/GDRDMA", nic: str = "eth0"
) -> str:
    """Write what NCCL_DEBUG=INFO writes of one rank's init."""
    head = f"{host}:{1000 + rank}:{2000 + rank} [{rank % 2}] NCCL INFO"
    lines = [
        f"{head} Bootstrap : Using {nic}:10.0.0.{rank + 1}<0>",
        f"{head} NCCL version 2.27.3+cuda12.9",
        f"{head} NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB {nic}:10.0.0.{rank + 1}<0>",
        f"{head} ncclCommInitRank comm 0x55d rank {rank} nranks {nranks} cudaDev {rank % 2} nvmlDev 0 busId 1000 commId 0x7f - Init START",
        f"{head} Trees [0] 1/-1/-1->0->-1",
        f"{head} Channel 00/0 : {rank}[{rank % 2}] -> {(rank + 1) % nranks}[0] [send] via {via}",
    ]
    if done:
        lines += [
            f"{head} Connected all rings",
            f"{head} ncclCommInitRank comm 0x55d rank {rank} nranks {nranks} cudaDev {rank % 2} nvmlDev 0 busId 1000 commId 0x7f - Init COMPLETE",
        ]
    return "".join(f"{line}\n" for line in lines)


def edges(host: str, pid: int, *lines: str) -> str:
    """Write INFO lines of one process."""
    ended = f"ncclCommInitRank comm 0x1 rank {pid} nranks 999 cudaDev 0 nvmlDev 0 busId 1000 commId 0x7 - Init COMPLETE"
    ended = "" if any(" - Init " in line or "Bootstrap" in line for line in lines) else ended
    return "".join(f"{host}:{pid}:{pid + 1} [{pid % 8}] NCCL INFO {line}\n" for line in (*lines, ended) if line)


def nodes(count: int, *lines: str, last: tuple[str, ...]) -> str:
    """Write the INFO lines of one process a node, of the last node others."""
    return "".join(edges(f"node{node}", 100 + node, *(last if node == count - 1 else lines)) for node in range(count))


def started(rank: int, host: str, nranks: int, *, done: bool) -> str:
    """Write the lines of NCCL 2.14, which has no commId."""
    comm = f"comm 0x7f21 rank {rank} nranks {nranks} cudaDev {rank % 8} busId 1000 - Init"
    return edges(host, 500 + rank, "Bootstrap : Using eth0:10.0.0.9<0>", *([f"{comm} COMPLETE"] if done else []))


_OLD = "{0}:9:9 [0] transport/net_ib.cc:839 NCCL WARN NET/IB : Got completion with error 12, opcode 1, len 0, vendor err 129\n"
_PEER = "{0}:9:9 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.{1}<4791> with error {2}, opcode 0, len 0, vendor err {3}\n"
_HCA = "{0}:9:9 [0] transport/net_ib/p2p.cc:620 NCCL WARN NET/IB: Got completion from peer 10.0.0.{1}<4791> with status={2} opcode=0 len=0 vendor err {3} (Recv) localGid ::ffff:10.0.0.9 remoteGids::ffff:10.0.0.{1} hca mlx5_0\n"
_NAMED = "[2026-11-23 10:00:00] {0}:9:9 [0] transport/net_ib/p2p.cc:700 (ncclIbTest) NCCL WARN NET/IB: Got completion from peer 10.0.0.{1}<4791> with status={2} opcode=IBV_WC_SEND(0) reqSize=0 vendor_err={3} req_type=Recv hca mlx5_0\n"
_OOB = "".join(edges(f"node{node}", 9, f"Bootstrap: Using eth0:10.0.0.{node}<0>") for node in range(1, 5))

_LOST = "RuntimeError: NCCL communicator was aborted on rank {0}."
_TRACE = 'Traceback (most recent call last):\n  File "/app/train.py", line 9, in main\n    step()\n'


def raised(rank: int, last: str) -> str:
    """Write a traceback as torch does."""
    return "".join(f"[rank{rank}]: {line}\n" for line in (_TRACE + last).splitlines())


_ILLEGAL = (
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously "
    "reported at some other API call, so the stacktrace below might be incorrect.\nFor debugging consider passing "
    "CUDA_LAUNCH_BLOCKING=1\n"
)
_IB = (
    "node{0}:10{0}:20{0} [0] transport/net_ib.cc:2134 NCCL WARN NET/IB : Got completion from peer 10.0.0.{1}<4791> with "
    "status=12 opcode=0 len=0 vendor err 129 (Recv)\n"
)
_TORCHRUN = (
    "E1123 10:00:09.000000 99 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: {rank} "
    '(pid: 70{rank}) of binary: /usr/bin/python\nTraceback (most recent call last):\n  File "run.py", line 1, in main\n'
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\ntrain.py FAILED\n----\nFailures:\n{others}----\n"
    "Root Cause (first observed failure):\n[0]:\n  time      : 2026-11-23_10:00:09\n  host      : n1\n"
    "  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 70{rank})\n  traceback : x\n====\n"
)
_ENDED = (
    "[{0}]:\n  time      : 2026-11-23_10:00:09\n  host      : n1\n  rank      : {0} (local_rank: {0})\n"
    "  exitcode  : -15 (pid: 70{0})  (SIGTERM)\n  traceback : Signal 15 (SIGTERM) received by PID 70{0}\n"
)
_HANDLED = (
    "[default0]:"
    + _TRACE.replace("\n", "\n[default0]:")
    + "ConnectionError: wandb is not reachable\n[default0]:step 7\n"
)


def ended_by_torchrun(rank: int, code: int, *others: int) -> str:
    """Write torchrun's end: this rank failed, the others were ended."""
    return _TORCHRUN.format(rank=rank, code=code, others="".join(_ENDED.format(other) for other in others))


_GENERATED: dict[str, tuple[str, str, tuple[int, ...], str]] = {
    "wd-behind": (
        stuck(range(3), 808) + caught(3, 805, "ALLGATHER") + status(3, 805, 805, 804),
        "desync",
        (3,),
        "never called collective 808",
    ),
    "wd-behind-2.4": (stuck(range(3), 808, form="2.4") + status(3, 805, 805, 804, "2.4"), "desync", (3,), ""),
    "wd-behind-2.3": (stuck(range(3), 808, form="2.3") + status(3, 805, 805, 804, "2.3"), "desync", (3,), ""),
    "wd-behind-dump": (stuck(range(3), 808) + dump(3, 0, 806, 806), "desync", (3,), ""),
    "wd-mismatch-op": (
        stuck(range(3), 5) + caught(3, 5, "BROADCAST") + status(3, 5, 5, 4),
        "watchdog-mismatch",
        (3,),
        "BROADCAST",
    ),
    "wd-mismatch-size": (
        stuck(range(3), 5) + caught(3, 5, numel=2048) + status(3, 5, 5, 4),
        "watchdog-mismatch",
        (3,),
        "2048",
    ),
    "wd-mismatch-half": (caught(0, 5) + caught(1, 5, "BROADCAST"), "watchdog-mismatch", (), "rank 1"),
    "wd-alltoall-sizes": ("".join(caught(rank, 9, "ALLTOALL", 100 + rank) for rank in range(4)), "unknown", (), ""),
    "wd-silent": (
        stuck(range(7), 44) + raised(7, "").splitlines()[0] + "\n[rank7]: step 43 done\n",
        "desync",
        (7,),
        "dead, or busy",
    ),
    "wd-same": (stuck(range(4), 44), "unknown", (), "the network, hardware"),
    "wd-never": (
        "".join(caught(rank, 1) + status(rank, 1, 1, -1) for rank in range(4)),
        "unknown",
        (),
        "never connected",
    ),
    "wd-old": (
        "".join(caught(rank, 12, form="2.1") for rank in range(3)) + caught(3, 12, "BROADCAST", form="2.1"),
        "watchdog-mismatch",
        (3,),
        "",
    ),
    "wd-group": (
        "".join(caught(rank, 30, form="pg") for rank in (4, 5, 6)) + caught(7, 30, "REDUCE_SCATTER", form="pg"),
        "watchdog-mismatch",
        (7,),
        "process group 7",
    ),
    "wd-wrapped": (
        "".join(line[:110] + "\n" + line[110:] for line in stuck(range(3), 5).splitlines(keepends=True))
        + caught(3, 5, "BROADCAST"),
        "watchdog-mismatch",
        (3,),
        "",
    ),
    "wd-outside": ("".join(dump(rank, 0, 90, 90) for rank in range(4)), "unknown", (), "outside NCCL"),
    "wd-after-cause": (stuck(range(3), 44) + raised(3, _ILLEGAL), "first-failure", (3,), "illegal memory access"),
    "cuda-advice": (
        raised(1, _ILLEGAL) + "".join(raised(rank, _LOST.format(rank)) for rank in (0, 2, 3)),
        "first-failure",
        (1,),
        "illegal memory access",
    ),
    "nccl-last-error": (
        raised(
            2,
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled system error\nncclSystemError: System call failed.\nLast error:\nError while creating shared memory segment /dev/shm/nccl-x (size 9637888)",
        ),
        "first-failure",
        (2,),
        "/dev/shm is full",
    ),
    "ib-12": (_IB.format(1, 2) + _IB.format(2, 1), "ib-retry", (), "error 12"),
    "ib-flush-after-12": (
        _IB.format(1, 2) + _IB.format(2, 1).replace("status=12", "status=5").replace("err 129", "err 249"),
        "ib-retry",
        (),
        "",
    ),
    "ib-5-only": (_IB.format(2, 1).replace("status=12", "status=5").replace("err 129", "err 249"), "unknown", (), ""),
    "slurm-time": (
        "slurmstepd: error: *** STEP 77.0 ON node1 CANCELLED AT 2026-11-23T10:00:00 DUE TO TIME LIMIT ***\nsrun: error: node1: tasks 0-3: Terminated\n",
        "slurm-time-limit",
        (),
        "time limit",
    ),
    "srun-oom": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.\nsrun: error: node1: task 2: Out Of Memory\nsrun: error: node1: tasks 0-1,3: Terminated\n",
        "first-failure",
        (2,),
        "out of memory",
    ),
    "srun-killed": (
        "srun: error: node1: task 2: Killed\nsrun: Terminating StepId=7.0\n",
        "first-failure",
        (2,),
        "sender unknown",
    ),
    "killed-alone": ("bash: line 1: 4711 Killed  python train.py\n", "shell-killed", (), "sender"),
    "fine": ("step 1\nstep 2\ndone\n", "unknown", (), "no line reports a failure"),
    "fingerprint": (
        raised(
            0,
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=3, OpType=ALLREDUCE), but Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=3, OpType=BROADCAST).",
        ),
        "collective-mismatch",
        (),
        "ranks 0 and 1",
    ),
    "handled-then-exit": (_HANDLED + ended_by_torchrun(2, 1, 0, 1), "unknown", (), "wandb"),
    "handled-then-named": (_HANDLED + raised(1, "ValueError: bad"), "first-failure", (1,), "ValueError: bad"),
    "handled-twice-then-named": (
        _HANDLED + _HANDLED.replace("default0", "default3") + raised(1, "ValueError: bad"),
        "first-failure",
        (1,),
        "ValueError: bad",
    ),
    "handled-then-behind": (
        _HANDLED.replace("[default0]:", "0: ")
        + "".join(f"{rank}: {line}\n" for rank in range(3) for line in stuck(range(rank, rank + 1), 808).splitlines())
        + "".join(f"3: {line}\n" for line in (caught(3, 805, "ALLGATHER") + status(3, 805, 805, 804)).splitlines()),
        "desync",
        (3,),
        "never called collective 808",
    ),
    "handled-line-then-killed": (
        "[default0]:step 1\n[default0]:WARNING skipped a batch: CUDA out of memory. Tried to allocate 2 GiB\n[default2]:step 1\n"
        + ended_by_torchrun(2, -9, 0, 1),
        *_FIRST,
        "SIGKILL, sender unknown",
    ),
    "retried-then-other": (
        "[default1]:OSError: [Errno 98] Address already in use\n[default1]:step 1\n[default3]:step 1\n"
        + "".join(f"[default3]:{line}\n" for line in raised(3, "ValueError: bad").splitlines())
        + ended_by_torchrun(3, 1, 1, 2),
        "first-failure",
        (3,),
        "ValueError: bad",
    ),
    "old-torch": (
        "".join(
            f"{rank}: {line}\n"
            for rank in range(4)
            for line in (
                _TRACE + ("ValueError: bad" if rank == 3 else "RuntimeError: Connection closed by peer [::1]:9")
            ).splitlines()
        ),
        "first-failure",
        (3,),
        "ValueError: bad",
    ),
    "two-handled-no-exits": (
        "".join(
            f"{rank}: {line}\n"
            for rank in (0, 3)
            for line in (_TRACE + f"ValueError: bad {'ab'[rank % 2]}").splitlines()
        )
        + "".join(f"1: {line}\n" for line in raised(1, "RuntimeError: Connection closed by peer [::1]:9").splitlines()),
        "unknown",
        (),
        "",
    ),
    "loader-worker": (
        raised(
            2,
            "ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
            '  File "/app/data.py", line 3, in __getitem__\n    x\nValueError: sample 7 is empty\n',
        ),
        *_FIRST,
        "sample 7 is empty, at /app/data.py:3",
    ),
    "two-processes-no-prefix": (
        _TRACE + "ValueError: bad\n" + _TRACE + "RuntimeError: Connection closed by peer [::1]:9\n",
        "failure",
        (),
        "ValueError: bad",
    ),
    "step-aborted-by-srun": (
        "srun: error: n2: task 2: Exited with exit code 9\nsrun: Job step aborted: Waiting up to 32 seconds for job step to "
        "finish.\nsrun: error: n1: tasks 0-1,3: Killed\n",
        *_FIRST,
        "exit status 9",
    ),
    "memory-events": (
        "srun: error: node1: task 2: Killed\nsrun: error: node1: tasks 0-1,3: Terminated\n"
        "low 0\nhigh 0\nmax 811\noom 1\noom_kill 1\n",
        *_FIRST,
        "out of memory",
    ),
    "memory-events-none": (
        "srun: error: node1: task 2: Killed\nlow 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n",
        *_FIRST,
        "sender unknown",
    ),
    # Lines that users posted, with where.
    "public-bus-error": (  # pytorch#5040
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
        + raised(1, "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Bus error."),
        "first-failure",
        (1,),
        "/dev/shm",
    ),
    "public-watchdog-illegal": (  # pytorch#180280
        "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0 PG GUID 0(default_pg) "
        "Rank 2] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was "
        "encountered\n",
        *_FIRST,
        "illegal memory access",
    ),
    "public-watchdog-alone": (  # pytorch#118369: the rank that reports waited
        caught(0, 1580) + status(0, 1580, 1583, 1579),
        "unknown",
        (),
        "",
    ),
    "public-dump-signal": (dump(1, 34, 811, 807), "unknown", (), ""),  # vllm#9308
    "public-shm-segment": (  # nccl#290
        "node1:7:8 [0] include/shm.h:48 NCCL WARN Error while creating shared memory segment nccl-shm-recv-1 (size 9637888)\n",
        "failure",
        (),
        "/dev/shm",
    ),
    "public-duplicate-gpu": (  # pytorch#68666
        "node1:7:8 [0] init.cc:521 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000\n",
        "failure",
        (),
        "Duplicate GPU detected : rank 1 and rank 0",
    ),
    "public-no-interface": (  # pytorch#29482
        "node1:7:8 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found\n",
        "failure",
        (),
        "no socket interface found",
    ),
    "public-memlock": (  # nccl-tests#206
        "node1:7:8 [0] misc/ibvwrap.cc:284 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory\n",
        "failure",
        (),
        "ibv_create_cq",
    ),
    "public-closed-by-peer": (  # nccl#1232
        "node1:7:8 [0] misc/socket.cc:53 NCCL WARN socketProgress: Connection closed by remote peer node2<4711>\n",
        "unknown",
        (),
        "",
    ),
    "public-version-mismatch": (
        "node1:7:8 [0] init.cc:690 NCCL WARN Mismatched NCCL version detected : rank 1 version 21805 rank 0 version 22005\n",
        "nccl-version",
        (),
        "rank 1: 21805",
    ),
    "public-bare-killed": ("Killed\n", "unknown", (), ""),
    "handled-then-lost": (
        _HANDLED
        + "".join(raised(rank, "RuntimeError: Connection closed by peer [::1]:9") for rank in (1, 3))
        + ended_by_torchrun(1, 1, 0, 3),
        "unknown",
        (),
        "wandb",
    ),
    "two-nodes-one-file": (
        "[default0]:[rank0]: step 1\n[default0]:[rank8]: step 1\n[default1]:step\n"
        + "".join(f"[default0]:{line}\n" for line in raised(8, "ValueError: bad").splitlines()),
        "first-failure",
        (8,),
        "ValueError: bad",
    ),
    "second-node-alone": (
        "[default0]:[rank8]: step 1\n[default1]:step 1\n[default1]:"
        + _TRACE.replace("\n", "\n[default1]:")
        + "ValueError: bad\n",
        "unknown",
        (),
        "rank 9: ValueError: bad",
    ),
    "ib-12-old": (_OLD.format("node1"), "ib-retry", (), "error 12"),
    "ib-12-peer": (_PEER.format("node1", 2, 12, 129), "ib-retry", (), "node1 to 10.0.0.2"),
    "ib-12-hca": (_OOB + _HCA.format("node1", 2, 12, 129), "ib-retry", (), "node1 to node2 (10.0.0.2)"),
    "ib-12-named": (
        _OOB + _NAMED.format("node3", 4, "IBV_WC_RETRY_EXC_ERR(12)", 129),
        "ib-retry",
        (),
        "node3 to node4 (10.0.0.4)",
    ),
    "ib-5-then-12": (
        _HCA.format("node1", 2, 5, 249) + _HCA.format("node2", 1, 12, 129),
        "ib-retry",
        (),
        "node2 to 10.0.0.1",
    ),
    "ib-4": (_HCA.format("node1", 2, 4, 81), "ib-protection", (), "local protection"),
    "ib-4-named": (_NAMED.format("node1", 2, "IBV_WC_LOC_PROT_ERR(4)", 81), "ib-protection", (), "local protection"),
    "ib-10": (_HCA.format("node1", 2, 10, 136), "ib-remote-access", (), "node1 to 10.0.0.2"),
    "info-2.14": (
        "".join(started(rank, f"node{rank // 2}", 4, done=rank != 3) for rank in range(4)),
        "nccl-init",
        (),
        "node1 got only to bootstrap",
    ),
    "info-absent": (
        "".join(info(rank, f"node{rank // 2}", nranks=8, done=False) for rank in range(6)),
        "nccl-init",
        (),
        "ranks 6-7 of 8 wrote no line",
    ),
    "info-shm": (
        nodes(
            3,
            "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
            "Channel 01/0 : 1[1] -> 8[0] [send] via NET/IB/0/GDRDMA",
            last=(
                "Channel 00 : 0[1000] -> 1[2000] via SHM/direct/direct",
                "Channel 01/0 : 1[1] -> 8[0] [send] via NET/IB/0/GDRDMA",
            ),
        ),
        "nccl-local-transport",
        (),
        "SHM: node2",
    ),
    "info-two-ways-within-a-node": (
        "".join(
            edges(f"node{node}", pid, f"Channel 00/0 : 0[0] -> 1[1] via {via}")
            for node in range(2)
            for pid, via in ((7, "P2P/IPC"), (8, "SHM/direct/direct"))
        ),
        "unknown",
        (),
        "no line reports a failure",
    ),
    "info-socket": (
        nodes(
            3,
            "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>",
            "Using network IB",
            last=("NET/IB : No device found.", "NET/Socket : Using [0]eth0:10.0.0.3<0>", "Using network Socket"),
        ),
        "nccl-network",
        (),
        "Socket: node2",
    ),
    "info-no-hca": (
        nodes(
            3,
            "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>",
            last=("NET/IB : Using [RO]; OOB eth0:10.0.0.3<0>", "NET/Socket : Using [0]eth0:10.0.0.3<0>"),
        ),
        "nccl-network",
        (),
        "Socket: node2",
    ),
    "info-plugin": (
        nodes(
            3,
            "NET/Plugin: Loaded net plugin AWS Libfabric (v6)",
            "Using network AWS Libfabric",
            last=("NET/Plugin: No plugin found (libnccl-net.so)", "Using network Socket"),
        ),
        "nccl-network",
        (),
        "AWS Libfabric: node[0-1]; Socket: node2",
    ),
    "info-version": (
        nodes(3, "NCCL version 2.27.3+cuda12.9", last=("NCCL version 2.21.5+cuda12.4",)),
        "nccl-version",
        (),
        "2.21.5+cuda12.4: node2",
    ),
    "info-gdr": (
        "".join(
            info(rank, f"node{rank // 2}", via="NET/IB/0" if rank > 3 else "NET/IB/0/GDRDMA", nranks=6)
            for rank in range(6)
        ),
        "nccl-transport",
        (),
        "node2",
    ),
    "info-stuck": (
        "".join(info(rank, f"node{rank // 2}", done=rank < 2) for rank in range(4)),
        "nccl-init",
        (),
        "ranks 2-3",
    ),
    "info-lo": (
        "".join(info(rank, f"node{rank // 2}", nic="docker0" if rank > 1 else "eth0") for rank in range(4)),
        "nccl-interface",
        (),
        "docker0",
    ),
}


def cases() -> list[Case]:
    """Return all cases."""
    found = [
        Case(
            name,
            gzip.decompress((RECORDED / f"{name}.log.gz").read_bytes()),
            f"{id_}",
            ranks,
            also,
            name not in _UNFORCED,
        )
        for name, (id_, ranks, also) in _RECORDED.items()
    ]
    return found + [
        Case(name, text.encode(), id_, ranks, also)
        for name, (text, id_, ranks, also) in {**_GENERATED, **logs_written_first.CASES}.items()
    ]
