# ruff: noqa: E501 - lines of logs are as long as they are
"""Logs whose answers were written before distdiag read them. Of the 70 in three rounds, 46 were right at first, 13 wrong.

As in logs_cases: name, then text, id of the finding, ranks at fault, what else the answer says.
"""

from __future__ import annotations

_TRACE = (
    'Traceback (most recent call last):\n  File "/app/train.py", line 88, in main\n    train_step(batch)\n'
    '  File "/app/model.py", line 12, in train_step\n    out = model(batch)\n'
)
_GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:43112"
_NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2012, remote process exited or there was a "
    "network error, NCCL version 2.27.3\nncclRemoteError: A call failed possibly due to a network error or a remote process "
    "exiting prematurely.\nLast error:\nsocketPollConnect: connect to 10.0.0.9<41234> returned Connection refused"
)
_WORLD, _TP, _DP = (
    "PG ID 0 PG GUID 0(default_pg)",
    "PG ID 2 PG GUID 6(tensor_parallel)",
    "PG ID 1 PG GUID 3(data_parallel)",
)
_SUMMARY = (
    "[{place}]:\n  time      : 2026-11-23_10:00:08\n  host      : n1\n  rank      : {rank} (local_rank: {rank})\n"
    "  exitcode  : {code} (pid: 70{rank})\n  error_file: <N/A>\n  traceback : {trace}\n"
)
_FIRST = "first-failure"


def _prefixed(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


def _raised(rank: int, text: str) -> str:
    return _prefixed(f"[rank{rank}]: ", text)


def _lost(*ranks: int, by: str = _GLOO) -> str:
    return "".join(_raised(rank, _TRACE + by) for rank in ranks)


def _caught(rank: int, seq: int, op: str = "ALLREDUCE", group: str = _WORLD, member: int | None = None) -> str:
    inside = rank if member is None else member
    return (
        f"[rank{rank}]:[E1123 10:20:30.100000000 ProcessGroupNCCL.cpp:685] [{group} Rank {inside}] Watchdog caught collective "
        f"operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for "
        "600045 milliseconds before timing out.\n"
    )


def _status(rank: int, at: int, enqueued: int, completed: int, group: str = _WORLD, member: int | None = None) -> str:
    inside = rank if member is None else member
    return (
        f"[rank{rank}]:[E1123 10:20:30.200000000 ProcessGroupNCCL.cpp:2252] [{group} Rank {inside}]  failure detected by "
        f"watchdog at work sequence id: {at} PG status: last enqueued work: {enqueued}, last completed work: {completed}\n"
    )


def _waits(rank: int, seq: int) -> str:
    return _caught(rank, seq) + _status(rank, seq, seq + 2, seq - 1)


def _torchrun(code: int, rank: int, *others: int, trace: str = "To enable traceback see: https://pytorch.org") -> str:
    """Write torchrun's end: this rank first, the others with status 1."""
    rest = "".join(
        _SUMMARY.format(place=place, rank=other, code=1, trace="To enable traceback see: https://pytorch.org")
        for place, other in enumerate(others, 1)
    )
    return (
        f"E1123 10:00:09.000000 7000 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: {code}) "
        f"local_rank: {rank} (pid: 70{rank}) of binary: /usr/bin/python3\nTraceback (most recent call last):\n"
        '  File "/usr/local/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n========\ntrain.py FAILED\n--------\n"
        f"Failures:\n{rest}--------\nRoot Cause (first observed failure):\n"
        + _SUMMARY.format(place=0, rank=rank, code=code, trace=trace)
        + "========\n"
    )


_AGENT = (
    "E1123 10:00:09.000000 7000 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) "
    "local_rank: {0} (pid: 7{0}) of binary: /usr/bin/python\n"
)
_RESTARTS = (
    "I1123 10:30:00.000000 7000 torch/distributed/elastic/agent/server/api.py:900] [default] Worker group FAILED. "
    "{0}/2 attempts left; will restart worker group\n"
)
_KEPT = (
    'Traceback (most recent call last):\n    File "/opt/venv/lib/python3.11/site-packages/torch/distributed/elastic/'
    'multiprocessing/errors/__init__.py", line 362, in wrapper\n      return f(*args, **kwargs)\n'
    '    File "/app/train.py", line 31, in main\n      raise ValueError("vocab")\n  ValueError: vocab size 32000\n  '
)
_IMPORT = (
    'Traceback (most recent call last):\n  File "/app/train.py", line 3, in <module>\n    import flash_attn\n'
    "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory\n"
)
_IN_GROUP = (
    '  + Exception Group Traceback (most recent call last):\n  |   File "/app/train.py", line 5, in <module>\n'
    "  |     main()\n  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n"
    "  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n"
    '    |   File "/app/load.py", line 9, in load\n    |     x.cuda()\n'
    "    | torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n    +----------------\n"
)
_TIMED_OUT_GROUP = (
    "[E1123 10:20:30.1 ProcessGroupNCCL.cpp:685] [PG ID 2 PG GUID 6(tp) Rank {0}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=9, OpType={1}, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600000 milliseconds before "
    "timing out."
)
_OLD_GROUP = (
    "[rank{0}]:[E1123 10:20:30.1 ProcessGroupNCCL.cpp:563] [PG 1 Rank {1}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={2}, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600000 milliseconds before "
    "timing out.\n"
)
_STUCK = (
    "[rank2]:[E1123 10:20:30.1 ProcessGroupNCCL.cpp:1397] [PG ID 0 PG GUID 0 Rank 2] ProcessGroupNCCL's watchdog got stuck "
    "for 480 seconds without making progress in monitoring enqueued collectives.\n"
)
_STEPS = "".join(f"[rank{rank}]: step {step}\n" for step in range(3) for rank in range(4))

CASES: dict[str, tuple[str, str, tuple[int, ...], str]] = {
    "head-cut-off": (
        _raised(
            3, '  File "/app/model.py", line 44, in forward\n    q = q.view(b, t)\nRuntimeError: shape [8] is invalid'
        )
        + _lost(0, 1, 2),
        _FIRST,
        (3,),
        "is invalid, at /app/model.py:44",
    ),
    "tail-cut-off": (
        _lost(0, 2) + _raised(1, _TRACE)[:-10],
        "unknown",
        (),
        "breaks off in the traceback of rank 1, at /app/model.py:12",
    ),
    "group-of-other-ranks": (
        "".join(
            _caught(rank, 900, "_ALLGATHER_BASE", _TP, rank - 4) + _status(rank, 900, 902, 899, _TP, rank - 4)
            for rank in (4, 6, 7)
        )
        + _status(5, 899, 899, 899, _TP, 1)
        + "".join(_caught(rank, 77, "_REDUCE_SCATTER_BASE", _DP, 0) for rank in range(4)),
        "desync",
        (5,),
        "rank 5 never called collective 900",
    ),
    "group-by-launcher": (
        "".join(
            f"[default{rank}]:{_TIMED_OUT_GROUP.format(rank - 4, 'BROADCAST' if rank == 6 else 'ALLREDUCE')}\n"
            for rank in range(4, 8)
        ),
        "watchdog-mismatch",
        (6,),
        "BROADCAST of 4 on rank 6",
    ),
    "group-without-ranks": (
        "".join(_TIMED_OUT_GROUP.format(rank, "BROADCAST" if rank == 2 else "ALLREDUCE") + "\n" for rank in range(4)),
        "unknown",
        (),
        "",
    ),
    "groups-of-one-number": (
        "".join(_OLD_GROUP.format(rank, rank % 2, 30 if rank < 2 else 34) for rank in range(4)),
        "unknown",
        (),
        "several process groups have this number",
    ),
    "one-of-a-pair": (_caught(16, 40, "RECV", _DP, 0) + _STEPS, "unknown", (), "rank 16 timed out in collective 40"),
    "uneven-gather": (
        "".join(_caught(rank, 7, "ALLGATHER") for rank in (0, 2, 3))
        + _caught(1, 7, "ALLGATHER").replace("NumelIn=4096", "NumelIn=12"),
        "watchdog-mismatch",
        (1,),
        "ALLGATHER of 12 on rank 1",
    ),
    "watchdog-stuck": (_STUCK, "unknown", (), "rank 2: NCCL's watchdog is stuck"),
    "first-start-out-of-step": (
        "".join(_waits(rank, 12) for rank in (0, 1, 3))
        + _status(2, 11, 11, 11)
        + _RESTARTS.format(2)
        + _raised(1, _TRACE + "OSError: [Errno 28] No space left on device: '/ckpt'")
        + _RESTARTS.format(1)
        + _raised(3, _TRACE + "KeyError: 1"),
        "desync",
        (2,),
        "never called collective 12",
    ),
    "three-starts": (
        _prefixed("[default2]:", _raised(2, _TRACE + "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"))
        + _AGENT.format(2)
        + _prefixed("[default0]:", _raised(0, _TRACE + "FileNotFoundError: [Errno 2] No such file: '/ckpt/last.pt'"))
        + _AGENT.format(0)
        + _prefixed("[default1]:", _raised(1, _TRACE + "KeyError: 'x'"))
        + _torchrun(1, 1),
        _FIRST,
        (2,),
        "CUDNN_STATUS",
    ),
    "kept-by-record": (_torchrun(1, 2, 0, 1, trace=_KEPT), _FIRST, (2,), "vocab size 32000, at /app/train.py:31"),
    "killed-and-nccl-elsewhere": (
        _lost(0, 1, 3, by=_NCCL)
        + _torchrun(-9, 2, 0, 1, 3)
        + "[Mon Nov 23 10:00:07 2026] Memory cgroup out of memory: Killed process 702 (python3) total-vm:912345kB\n",
        _FIRST,
        (2,),
        "out of memory",
    ),
    "other-service": (
        _raised(1, _TRACE + "BrokenPipeError: [Errno 32] Broken pipe") + _lost(0, 2, 3),
        _FIRST,
        (1,),
        "Broken pipe",
    ),
    "thread-that-lost-its-peer": (
        _prefixed(
            "[default1]:",
            "Exception in thread Thread-3 (_pin_memory_loop):\nTraceback (most recent call last):\n"
            '  File "/opt/venv/lib/python3.11/site-packages/torch/utils/data/_utils/pin_memory.py", line 59, in '
            "_pin_memory_loop\n    do_one_step()\nConnectionResetError: [Errno 104] Connection reset by peer",
        )
        + _prefixed("[default2]:", _raised(2, _TRACE + "AttributeError: no attribute 'shape'"))
        + "".join(_prefixed(f"[default{rank}]:", _lost(rank)) for rank in (0, 1, 3)),
        _FIRST,
        (2,),
        "no attribute",
    ),
    "exit-after-logging": (
        _prefixed("[default1]:", _TRACE + "ValueError: bad config key") + _torchrun(2, 1),
        _FIRST,
        (1,),
        "exit status 2",
    ),
    "import-without-ranks": (_IMPORT * 4 + _torchrun(1, 0, 1, 2, 3), "same-failure", (0, 1, 2, 3), "libcudart"),
    "group-of-exceptions": (_raised(1, _IN_GROUP) + _lost(0, 2, 3), _FIRST, (1,), "TaskGroup"),
    "several-lines": (
        _raised(2, _TRACE + "RuntimeError: Error(s) in loading state_dict for Llama:\n\tMissing key(s): lm_head.weight")
        + _lost(0, 1, 3),
        _FIRST,
        (2,),
        "for Llama: Missing key(s)",
    ),
    "stamped-by-a-container": (
        "".join(f"[pod/train-{rank}/main] 2026-11-23T10:00:00.1234Z step\n" for rank in range(4))
        + _prefixed("[pod/train-2/main] 2026-11-23T10:00:06.1Z ", _raised(2, _TRACE + "ValueError: tokenizer"))
        + "".join(_prefixed(f"[pod/train-{rank}/main] 2026-11-23T10:00:07.1Z ", _lost(rank)) for rank in (0, 1, 3)),
        _FIRST,
        (2,),
        "tokenizer",
    ),
    "tasks-are-agents": (
        "".join(f"{node}: [default{local}]:loading\n" for node in range(2) for local in range(4))
        + _prefixed("1: [default1]:", _IMPORT),
        "failure",
        (),
        "libcudart",
    ),
    "numbers-are-epochs": (
        "".join(f"[{epoch}] loss 3.1\n[{epoch}] acc 0.1\n" for epoch in range(4)) + _lost(0, 1, 2),
        "unknown",
        (),
        "ranks 0-2 lost a peer",
    ),
    "out-of-memory-by-srun": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=88.0. Some of the step tasks have been OOM Killed.\n"
        "srun: error: n2: task 6: Out Of Memory\nsrun: Terminating StepId=88.0\nsrun: error: n1: tasks 0-3: Terminated\n"
        "srun: error: n2: tasks 4-5,7: Killed\n",
        _FIRST,
        (6,),
        "out of memory",
    ),
    "cancelled": (
        "0: step 5\n1: step 5\n2: step 5\nslurmstepd: error: *** STEP 81.0 ON n1 CANCELLED AT 2026-11-23T10:00:00 ***\n"
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\nsrun: error: n1: tasks 0-2: Terminated\n",
        "unknown",
        (),
        "SLURM cancelled the job",
    ),
    "preempted": (
        "0: step 9\n1: step 9\nslurmstepd: error: *** JOB 812 ON n1 CANCELLED AT 2026-11-23T10:00:00 DUE TO PREEMPTION ***\n"
        "0: got SIGTERM, saving a checkpoint\nsrun: error: n1: tasks 0-1: Terminated\n",
        "slurm-preempted",
        (),
        "preempted",
    ),
    "mpi-abort": (
        "[1,0]<stdout>:step\n[1,4]<stdout>:step\nMPI_ABORT was invoked on rank 4 in communicator MPI_COMM_WORLD\n",
        _FIRST,
        (4,),
        "MPI_ABORT",
    ),
    "return-code-without-rank": (
        "[2026-11-23 10:00:09,200] [ERROR] [launch.py:325:sigkill_handler] ['/usr/bin/python3', '-u', 'train.py', "
        "'--local_rank=3'] exits with return code = -9\n",
        "unknown",
        (),
        "return code -9 (SIGKILL)",
    ),
    "healthy-numbers": (
        "".join(
            f"[default{rank}]:test_failed: 0\n[default{rank}]:Error rate 3.2%\n[default{rank}]:CUDA out of memory events: 0\n"
            f"[default{rank}]:RuntimeWarning: overflow\n[default{rank}]:exit code 0\n"
            for rank in range(4)
        ),
        "unknown",
        (),
        "nothing shows that it ended a rank",
    ),
    "healthy-retries": (
        _STEPS
        + 'DEBUG:botocore: retrying\nTraceback (most recent call last):\n  File "/opt/urllib3/pool.py", line 70, in f\n'
        "    conn()\nurllib3.exceptions.ReadTimeoutError: Read timed out.\n" + _STEPS,
        "unknown",
        (),
        "nothing shows that it ended a rank",
    ),
    "healthy-data": (
        '{"rank": 0, "msg": "Traceback (most recent call last):\\n  File \\"a.py\\", line 1\\nValueError: text"}\n' * 5,
        "unknown",
        (),
        "no line reports a failure",
    ),
}
