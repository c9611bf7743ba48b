# ruff: noqa: E501 - lines of logs are as long as they are
"""Known lines of jobs and kernels, each with our own text in the wording of its source; and harmless lines."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from distdiag.cluster.targets import Cluster
from distdiag.diagnosis.job_logs.diagnose import diagnose
from distdiag.diagnosis.job_logs.types import Logs, Request
from distdiag.facts.host import kernel_signs
from distdiag.facts.logs.collect import Reader
from distdiag.facts.logs.line_patterns import Patterns
from distdiag.knowledge.known_lines import JOBS, _rows, for_kernels, for_nodes, known_lines
from distdiag.knowledge.logs import recognise
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from pathlib import Path

    from distdiag.report import Report

LINES = {
    "engine-wrapper": "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}",
    "vllm-no-cache": "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
    "ray-memory": "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    "ray-actor-died": "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "ray-no-resources": "Error: No available node types can fulfill resource request {'GPU': 16.0}.",
    "srun-cpu-binding": "srun: error: CPU binding outside of job step allocation, allocated CPUs are: 0x0000000F.",
    "srun-start": "srun: error: Task launch for StepId=991.0 failed on node n7: Communication connection failure",
    "slurm-host-oom": "991.batch     OUT_OF_ME+    0:125",
    "k8s-evicted": "The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi, available: 9Gi.",
    "k8s-unschedulable": "Warning  FailedScheduling  0/12 nodes are available: 12 Insufficient nvidia.com/gpu.",
    "spot-reclaimed": "2026-11-20 Received preemption notice, saving a checkpoint",
    "arguments": "train.py: error: unrecognized arguments: --bf-16",
    "script-missing": "python: can't open file '/job/trian.py': [Errno 2] No such file or directory",
    "command-missing": "/var/spool/slurmd/job991/slurm_script: line 14: torchrun: command not found",
    "deepspeed-config": "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 64 != 4 * 1 * 8",
    "nan-loss": "step 1200 | loss: nan | lr 0.0003",
    "compile-failed": "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:",
    "cuda-device-ordinal": "RuntimeError: CUDA error: invalid device ordinal",
    "cuda-peer-hardware": "torch.AcceleratorError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
    "cuda-stream-capture": "RuntimeError: CUDA error: operation not permitted when stream is capturing",
    "nccl-cuda-failure": "n1:41:77 [2] init.cc:414 NCCL WARN Cuda failure 101 'invalid resource handle'",
    "nccl-cuda-calloc": "n1:41:77 [2] alloc.h:198 NCCL WARN Failed to CUDA calloc async 67108864 bytes",
    "nccl-test-failure": "n1: Test NCCL failure common.cu:1005 'unhandled system error (run with NCCL_DEBUG=INFO for details) / '",
    "hip-error": "RuntimeError: HIP error: invalid device function",
    "musa-error": "RuntimeError: MUSA error: an illegal memory access was encountered",
    "xpu-error": "RuntimeError: level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    "hccl-timeout": "EI0006: Getting socket times out. Reason: Remote Rank did not send the data in time.",
    "npu-error": "[ERROR] 2026-11-08-18:07:20 (PID:1292, Device:1, RankID:1) ERR01100 OPS call acl api failed.",
    "oneccl-error": "|CCL_ERROR| exchange_utils.cpp:223 sendmsg_fd: sendmsg: invalid fd",
    "deepep-timeout": "DeepEP timeout check failed: rank = 6, thread = 2, value = 1024",
    "triton-image": "RuntimeError: Triton Error [CUDA]: device kernel image is invalid",
    "cudnn-cublas": "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "ib-async-event": "n3:88:91 [4] transport/net_ib.cc:134 NCCL WARN NET/IB : mlx5_4:1 Got async event : port error",
    "nccl-sizes-differ": "NET/Socket : peer 10.0.0.7<40668> message truncated : receiving 87424 bytes instead of 65536. "
    "If you believe your socket network is in a healthy state, there may be a mismatch in collective sizes",
    "nccl-truncated": "n3:88:91 [4] bootstrap.cc:77 NCCL WARN Message truncated : received 1024 bytes instead of 256",
    "nccl-no-net-plugin": "n3:88:91 [4] plugin/net.cc:317 NCCL WARN Failed to initialize any NET plugin",
    "nccl-address-family": "n3:88:91 [4] misc/socket.cc:432 NCCL WARN Net : address of family 17 is neither AF_INET(2) nor AF_INET6(10)",
    "efa-peer": "n3:88:91 [0] NCCL WARN NET/OFI Request 0x7f4 completed with error. RC: 5. Error: 4126 (Unresponsive receiver)",
    "ofi-no-provider": "n3:88:91 [0] NCCL WARN NET/OFI Couldn't find any optimal provider",
    "desync-report": "  - [1] lagging/dead/mismatched ranks that caused the desync are: [3] finished collective #87, but didn't join collective #88 (count from 1)",
    "nccl2-async-error": "[E1126 02:12:33.912345678 ProcessGroupNCCLUtils.cpp:301] [TC][rank=3][name=0] nccl hit async error on rank 3: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "nvshmem-halves": "WARN: NVSHMEM device library version (3.3.24) does not match with NVSHMEM host library version (3.2.5)",
    "deepep-nvshmem": "RuntimeError: DeepEP error: timeout (dispatch CPU)",
    "nccl2-timeout": "[TC][rank=3][name=main] Operation timed out after 600000 ms",
    "rccl-proxy": "n3:88:91 [0] proxy.cc:1521 NCCL WARN [Service thread] Failed to execute operation Connect from rank 1",
    "name-unresolved": "[W socket.cpp:697] [c10d] The IPv6 network addresses of (head-0.train, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
    "connect-timeout": "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (10.1.2.3, 29500).",
    "connect-failed": "[E socket.cpp:957] [c10d] The client socket has failed to connect to any network address of (n1, 29500).",
    "server-socket": "[E socket.cpp:922] [c10d] The server socket has failed to listen on any local network address. port: 29500, useIpv6: false",
    "clients-missing": "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
    "rendezvous-timed-out": "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
    "agents-missing": "torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /none/torchelastic/role_info/0, /none/torchelastic/role_info/1",
    "gloo-unreachable": "[/pytorch/third_party/gloo/gloo/transport/tcp/debug_logger.cc:9] ERROR failed to connect, willRetry=1, retry=1, retryLimit=3, rank=1, size=2, local=[192.168.5.2]:729, remote=[192.168.5.1]:30642$1, error=SO_ERROR: No route to host, remote=[192.168.5.1]:30642$1",
    "rank-never-came": "torch.distributed.DistStoreError: wait timeout after 1800000ms, keys: /default_pg/0//cpu//0/2",
    "rendezvous-closed": "torch.distributed.elastic.rendezvous.api.RendezvousClosedError",
    "store-get": "[4] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout",
    "env-missing": "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set",
    "gloo-connect": "RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error",
    "no-listener": "ConnectionRefusedError: [Errno 111] Connection refused",
    "no-route": "OSError: [Errno 113] No route to host",
    "mpi-connect": "ORTE has lost communication with a remote daemon.",
    "loader-bus-error": "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
    "loader-crashed": "ERROR: Unexpected segmentation fault encountered in worker.",
    "loader-timeout": "RuntimeError: DataLoader timed out after 120 seconds",
    "pin-memory": "RuntimeError: Pin memory thread exited unexpectedly",
    "stale-handle": "OSError: [Errno 116] Stale file handle: '/nfs/data/shard-7.tar'",
    "io-error": "OSError: [Errno 5] Input/output error",
    "not-connected": "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/bucket'",
    "read-only": "OSError: [Errno 30] Read-only file system: '/ckpt/step1'",
    "file-locked": "filelock._error.Timeout: The file lock '/nfs/hf/x.lock' could not be acquired.",
    "bad-alloc": "terminate called after throwing an instance of 'std::bad_alloc'",
    "host-memory": "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes.",
    "hangup": "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 1",
    "launcher-interrupted": "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 2",
    "launcher-terminated": "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 15",
    "shell-core": "[1]    18472 segmentation fault (core dumped)  python train.py",
    "segfault-line": "Segmentation fault (core dumped)",
    "hub-unreachable": "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.",
    "hub-gated": "huggingface_hub.errors.GatedRepoError: 403 Client Error. Cannot access gated repo",
    "hub-rate": "requests.exceptions.HTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api",
    "state-dict": "RuntimeError: Error(s) in loading state_dict for GPT:",
    "safetensors": "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
    "weights-only": "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded",
    "dataset-missing": "datasets.exceptions.DatasetNotFoundError: Dataset 'my/corpus' doesn't exist on the Hub",
    "nccl-internal": "ncclInternalError: Internal check failed.",
    "nccl-invalid-usage": "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    "nccl-invalid-argument": "ncclInvalidArgument: Invalid value for an argument.",
    "nccl-unhandled-cuda": "ncclUnhandledCudaError: Call to CUDA function failed.",
    "nccl-unhandled-system": "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
    "nccl-what": "  what():  NCCL error in: ProcessGroupNCCL.cpp:20",
    "advice": "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "slurm-time-limit": "slurmstepd: error: *** JOB 991 ON n7 CANCELLED AT 2026-11-20T04:00:12 DUE TO TIME LIMIT ***",
    "slurm-preempted": "slurmstepd: error: *** JOB 991 ON n7 CANCELLED AT 2026-11-20T04:00:12 DUE TO PREEMPTION ***",
    "slurm-node-failure": "srun: error: Node failure on n7",
    "slurm-cancelled": "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
    "signalled-by-launcher": "W1120 04:00:12.101000 771 api.py:900] Sending process 790 closing signal SIGTERM",
    "launcher-summary": "Primary job  terminated normally, but 1 process returned a non-zero exit code.",
    "shell-killed": "./run.sh: line 12: 4711 Killed                  python train.py",
    "interrupted": "KeyboardInterrupt",
    "cuda-illegal-access": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "cuda-assert": "Embedding.cu:88: block: [3,0,0], thread: [7,0,0] Assertion `index < rows` failed.",
    "cuda-out-of-memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB.",
    "cuda-launch-failure": "RuntimeError: CUDA error: misaligned address",
    "torch-duplicate-gpu": "n1:41:77 [2] init.cc:943 NCCL WARN Duplicate GPU detected : rank 2 and rank 3 both on CUDA device 3b000",
    "monitored-barrier": "RuntimeError: [Rank 0]: Ranks 2, 5 failed to pass monitoredBarrier in 20000 ms",
    "monitored-barrier-other": "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0.",
    "collective-mismatch": "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=4, OpType=REDUCE, TensorShape=[9]), but Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=4, OpType=GATHER, TensorShape=[9]).",
    "size-mismatch": "RuntimeError: [/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 4096 vs 2048",
    "ddp-parameters": "RuntimeError: DDP expects same model across all ranks, but Rank 3 has 148 params, while rank 0 has inconsistent 146 params.",
    "ddp-unused": "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
    "exit-without-destroy": "terminate called without an active exception",
    "nccl-connect": "n1:41:77 [2] socket.cc:502 NCCL WARN socketStartConnect: Connect to 10.1.2.3<41234> failed : Connection refused",
    "ib-retry": "n1:41:77 [2] net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.1.2.3<4119> with status=12 opcode=0 len=0 vendor err 129",
    "ib-protection": "n1:41:77 [2] net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.1.2.3<4119> with status=4 opcode=0 len=0 vendor err 81",
    "ib-remote-access": "n1:41:77 [2] net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.1.2.3<4119> with status=10 opcode=0 len=0 vendor err 136",
    "nccl-version": "n1:41:77 [2] init.cc:88 NCCL WARN Mismatched NCCL version detected : rank 1 version 22703 rank 0 version 22803",
    "nccl-torn-down": "[rank1]:[E1120 04:00:12.101 ProcessGroupNCCL.cpp:681] To avoid data inconsistency, we are taking the entire process down.",
    "heartbeat": "[PG ID 0 PG GUID 0 Rank 3] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.",
    "torch-nccl-shm": "n1:41:77 [2] shmutils.cc:87 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-aB3xYz (size 9637888)",
    "torch-memlock": "n1:41:77 [2] ibvwrap.cc:262 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory",
    "torch-ib-flushed": "n1:41:77 [2] net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.1.2.3<4119> with status=5 opcode=0 len=0 vendor err 249",
    "port-in-use": "torch.distributed.DistNetworkError: The server could not be started: EADDRINUSE",
    "store-gone": "[W1120 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=7, addr=[n1]:41234, remote=[n0]:29500)",
    "rendezvous-timeout": "torch.distributed.DistStoreError: the barrier timed out",
    "torch-no-interface": "RuntimeError: Unable to find address for: ibs9",
    "torch-unreachable": "OSError: [Errno 101] Network is unreachable",
    "torch-no-address": "RuntimeError: bind: Cannot assign requested address",
    "torch-peer-lost": "RuntimeError: [/gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.1.2.3]:41234",
    "torch-peer-late": "RuntimeError: [/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete",
    "shm-full": "RuntimeError: unable to open shared memory object </torch_4711_88> in read-write mode",
    "loader-killed": "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.",
    "loader-exited": "RuntimeError: DataLoader worker (pid(s) 4711, 4712) exited unexpectedly",
    "disk-full": "OSError: [Errno 28] No space left on device: '/ckpt/step_900.pt'",
    "checkpoint-write": "RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 5128 vs 5022",
    "oom-kill": "slurmstepd: error: Detected 2 oom_kill events in StepId=991.0. Some of the step tasks have been OOM Killed.",
    "heap-corrupted": "double free or corruption (!prev)",
    "assertion": "python3: pool.cc:88: void release(): Assertion `count > 0' failed.",
    "fatal-python": "Fatal Python error: Segmentation fault",
    "torch-no-memory": "ImportError: libtorch_cuda.so: failed to map segment from shared object",
    "torch-open-files": "OSError: [Errno 24] Too many open files: '/data/shard-7.tar'",
    "torch-no-thread": "RuntimeError: can't start new thread",
    "xid": "NVRM: Xid (PCI:0000:9b:00): 79, pid=99, name=python3, GPU has fallen off the bus.",
    "gpu-ecc": "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
    "gpu-lost": "Unable to determine the device handle for GPU0000:9B:00.0: GPU is lost.  Reboot the system to recover this GPU",
    "exit-of-agent": "E1120 04:00:12.101000 771 api.py:874] failed (exitcode: -9) local_rank: 3 (pid: 790) of binary: /usr/bin/python3",
    "exit-of-mpirun": "mpirun noticed that process rank 3 with PID 790 on node n7 exited on signal 9 (Killed).",
    "exit-of-srun": "srun: error: n7: tasks 4-7: Exited with exit code 1",
    "exit-of-deepspeed": "[2026-11-20 04:00:12,101] [ERROR] [launch.py:325:sigkill_handler] ['python3', 'train.py', '--local_rank=3'] exits with return code = -9",
    "exit-of-mpiexec": "=   EXIT CODE: 139",
}
KERNEL = {
    "kernel-nvlink": "NVRM: knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!",
    "kernel-sxid": "nvidia-nvswitch2: SXid (PCI:0000:04:00.0): 20009, Fatal, Link 12 RX Short Error Rate",
    "kernel-nic-power": "mlx5_core 0000:4b:00.0: mlx5_pcie_event:303:(pid 7): Detected insufficient power on the PCIe slot (25W).",
    "kernel-nic-temperature": "mlx5_port_module_event:1121:(pid 0): Port module event[error]: module 1, Cable error, High Temperature",
    "kernel-link": "mlx5_core 0000:4b:00.0 ens3np0: Link down",
    "kernel-nic": "mlx5_core 0000:4b:00.0: health_care:154:(pid 0): device's health compromised - reached miss count",
    "kernel-lockup": "watchdog: BUG: soft lockup - CPU#12 stuck for 23s! [python3:771]",
    "kernel-panic": "Kernel panic - not syncing: Fatal exception",
    "kernel-storage": "nvme nvme1: I/O tag 9 (1009) opcode 0x2 (Admin Cmd) QID 0 timeout, reset controller",
    "kernel-hung-task": "INFO: task python3:5511 blocked for more than 241 seconds.",
    "kernel-hardware": "EDAC MC1: 1 UE memory read error on CPU_SrcID#1_MC#0_Chan#1_DIMM#0",
    "kernel-file-max": "VFS: file-max limit 400000 reached",
    "kernel-segfault": "pt_main_thread[771]: segfault at 10 ip 00007f0 sp 00007ff error 4 in libnccl.so.2",
    "kernel-peermem": "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further processing",
}
QUIET = (
    "NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
    "NVRM: Xid (PCI:0000:9b:00): 149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00086226 0x00000001)",
    "NVRM: Xid (PCI:0000:9b:00): 63, Row Remapper: New row marked for remapping, reset gpu to activate.",
    "NVRM: Xid (PCI:0000:9b:00): 45, pid=99, name=python3, Ch 00000008",
    "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)",
    "NVRM: NVLink link training completed",
    "nfs: server 10.2.3.4 OK",
    "WARNING: connection to wandb lost (ConnectionError: timed out), retrying in 5 s",
    "UserWarning: flash_attn is not available, falling back to eager attention",
    "INFO: 0 errors, 0 failed, 128 passed",
    "Exception ignored in: <function Pool.__del__ at 0x7f>",
    "n1:5:9 [0] NCCL INFO RAS handling connection failed: address already in use, not fatal",
    "Error rate 3.2%\nstep 1 loss 2.1\nstep 2 loss 2.0\nstep 3 loss 1.9",
)
WENT_ON = (
    "ConnectionError: HTTPSConnectionPool(host='api.wandb.ai')\n",
    'Traceback (most recent call last):\n  File "/app/data.py", line 3, in get\n    raise OSError\nOSError: [Errno 5] Input/output error\n',
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n",
)


def judged(tmp_path: Path, text: str) -> Report[Logs]:
    path = tmp_path / "job.log"
    path.write_text(text)
    reader = Reader(for_nodes())
    reader.read(str(path))
    return diagnose(Request(program="distdiag", cluster=Cluster()), Gathered(facts=[reader.found()]))


def test_each_line_is_known_by_the_row_that_is_meant() -> None:
    matcher = Patterns(for_nodes())
    found = {id_: matcher.first(line) for id_, line in {**LINES, **KERNEL}.items()}
    assert {id_: each and each[0] for id_, each in found.items()} == {id_: id_ for id_ in (*LINES, *KERNEL)}


def test_the_pattern_of_a_row_is_tried_wherever_one_of_its_words_is() -> None:
    for id_, line in {**LINES, **KERNEL}.items():
        row = known_lines()[id_]
        assert row.words != ("",), id_
        assert any(word in line for word in row.words), id_


def test_a_number_decides_between_lines_of_one_shape() -> None:
    matcher = Patterns(for_nodes())
    shape = "n1:41:77 [2] NCCL WARN NET/IB : Got completion with error {}, opcode 0"
    assert [found and found[0] for found in (matcher.first(shape.format(n)) for n in (12, 4, 10, 77, 12))] == [
        "ib-retry", "ib-protection", "ib-remote-access", None, "ib-retry",
    ]  # fmt: skip


def test_every_row_by_subject_has_a_line() -> None:
    rows = {row.id for name in JOBS for row in _rows(name)}
    assert rows == LINES.keys() | KERNEL.keys()


def test_rows_fill_in_what_their_patterns_have() -> None:
    for row in known_lines().values():
        groups = {name.rstrip("0123456789") for name in re.compile(row.pattern).groupindex}
        words = " ".join([row.means, row.fix, *row.commands])
        assert set(re.findall(r"(?<!\$)\{(\w+)\}", words)) <= groups, row.id


def test_kernel_lines_are_read_as_doctor_reads_them(tmp_path: Path) -> None:
    kernel = Patterns(for_kernels())
    for id_, line in KERNEL.items():
        sign = kernel_signs.parse(f"4,1,1,-;{line}", kernel)
        assert sign is not None, line
        assert f"kernel-{sign.kind}" == id_
        assert judged(tmp_path, f"{line}\n").findings[0].id == f"logs.{id_}"


def test_a_line_is_never_denied(tmp_path: Path) -> None:
    for id_, line in LINES.items():
        if known_lines()[id_].role in ("advice", "exit"):
            continue
        report = judged(tmp_path, f"{line}\n")
        assert report.findings[0].id != "logs.no-failure", id_
        assert not report.findings[0].where.ranks or "rank" in line.lower(), (id_, report.summary)


@pytest.mark.parametrize("line", QUIET)
def test_noise_accuses_nothing(line: str, tmp_path: Path) -> None:
    report = judged(tmp_path, f"{line}\n")
    assert report.exit_code() != 1, report.summary


def test_what_the_job_went_on_from_is_no_verdict(tmp_path: Path) -> None:
    steps = "".join(f"step {step} loss 2.{step}\n" for step in range(9))
    for text in WENT_ON:
        assert judged(tmp_path, steps + text + steps).exit_code() == 3, text
        assert judged(tmp_path, steps + text).exit_code() == 1, text


def test_an_unknown_error_is_shown_and_left_open(tmp_path: Path) -> None:
    report = judged(tmp_path, "loading\nfrobnicator: cannot attach to bus 7: denied\n")
    assert (report.exit_code(), report.findings[0].id) == (3, "logs.unknown-failure")
    assert "cannot attach to bus 7" in report.summary


def test_prefixes_do_not_hide_ranks(tmp_path: Path) -> None:
    trace = ("Traceback (most recent call last):", '  File "/app/train.py", line 9, in main', "ValueError: label 1000")
    for prefix in (
        "Dec 03 10:22:16 ",
        "> ",
        "  ",
        "# job/0 [default0]:",
        "Nov 23 10:00:01 n1 torchrun[77]: ",
        "job.log:12:",
    ):
        report = judged(tmp_path, "".join(f"{prefix}[rank2]: {line}\n" for line in trace))
        assert report.findings[0].where.ranks == (2,), (prefix, report.summary)
        assert "ValueError: label 1000" in report.summary


def test_a_bare_exception_of_a_rank_is_proof(tmp_path: Path) -> None:
    found = judged(tmp_path, "[rank1]: ValueError: bad shape\n").findings[0]
    assert (found.level.value, found.where.ranks) == ("fail", (1,))


def test_a_file_named_after_a_rank_does_not_rename_others(tmp_path: Path) -> None:
    path = tmp_path / "rank6.log"
    path.write_text(
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/a.py", line 1, in f\n[rank1]: ValueError: x\n'
    )
    reader = Reader(for_nodes())
    reader.read(str(path))
    report = diagnose(Request(program="distdiag", cluster=Cluster()), Gathered(facts=[reader.found()]))
    assert report.findings[0].where.ranks == (1,)


def test_a_summary_without_its_head_is_read(tmp_path: Path) -> None:
    text = "train.py FAILED\nFailures:\n  <NO_OTHER_FAILURES>\nRoot Cause (first observed failure):\n[0]:\n  time      : 2026-11-12_22:45:44\n  host      : n1\n  rank      : 5 (local_rank: 5)\n  exitcode  : -11 (pid: 79)\n  error_file: <N/A>\n  traceback : Signal 11 (SIGSEGV) received by PID 79\n"
    found = judged(tmp_path, text).findings[0]
    assert found.where.ranks == (5,)
    assert "SIGSEGV" in found.title


def test_what_ranks_of_gpu_test_say_is_known_by_the_same_rows() -> None:
    known = recognise("The client socket has timed out after 60000ms while trying to connect to (n1, 29500).")
    assert known is not None
    assert "n1:29500" in known.means


def test_the_fingerprint_of_torch_2_13_names_both_calls(tmp_path: Path) -> None:
    tensor = "TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu, layout=Strided (default), requires_grad=false (default), pinned_memory=false (default), memory_format=(nullopt))"
    one = f"CollectiveFingerPrint(SequenceNumber=7, OpType=BROADCAST, TensorShape=[512, 64], {tensor})"
    other = f"CollectiveFingerPrint(SequenceNumber=7, OpType=ALLREDUCE, TensorShape=[512, 64], {tensor})"
    text = f"[rank3]: RuntimeError: Detected mismatch between collectives on ranks. Rank 3 is running collective: {one}, but Rank 0 is running collective: {other}.Collectives differ in the following aspects: \t Op type: BROADCASTvs ALLREDUCE\n"
    found = judged(tmp_path, text).findings[0]
    assert (found.id, found.where.ranks) == ("logs.collective-mismatch", ())
    assert "OpType=BROADCAST" in found.title
    assert "OpType=ALLREDUCE" in found.title


def test_neighbours_are_one_failure_of_the_surest_row(tmp_path: Path) -> None:
    text = "RuntimeError: NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 'out of range'\n"
    report = judged(tmp_path, text)
    assert report.exit_code() == 1
    assert "out of range" in json.dumps([report.summary, report.findings[0].detail])


def test_a_shell_that_reports_a_kill_beside_an_oom_kill_says_why(tmp_path: Path) -> None:
    text = "run.sh: line 9: 4711 Killed                  python train.py\nslurmstepd: error: Detected 1 oom-kill event(s) in StepId=99.batch. Some of your processes may have been killed by the cgroup out-of-memory handler.\n"
    assert "killed by the kernel: out of memory" in judged(tmp_path, text).summary


def test_one_rank_in_a_text_is_not_all_ranks(tmp_path: Path) -> None:
    text = "[E ProcessGroupNCCL.cpp:828] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=213, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1809831 milliseconds before timing out.\n"
    found = judged(tmp_path, text).findings[0]
    assert "all ranks" not in found.title
    assert not found.where.ranks
