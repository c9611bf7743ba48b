"""Settings that make a job leave dumps: --how."""

from __future__ import annotations

from distdiag.users_python import installed


def lines(program: str) -> list[str]:
    """Return the settings, those for this version of torch first."""
    torch = installed("torch")
    new = torch is None or torch >= (2, 9)
    shown = f"torch {torch[0]}.{torch[1]} is installed here" if torch else "torch is not installed here"
    first, second = (_NEW, _OLD) if new else (_OLD, _NEW)
    return [
        f"# {shown}. Set these before the job starts, on all ranks.",
        "",
        *first,
        "",
        *second,
        "",
        "# Each rank writes /shared/fr/rank_N when a collective times out; use a directory that all nodes share.",
        f"{program} flight-recorder /shared/fr",
        "# With a local directory on each node:",
        f"{program} flight-recorder /tmp/fr --hosts node[1-4]",
        "# From a job that hangs now, if the pipe was set:",
        f"{program} flight-recorder --trigger --hosts node[1-4]",
        "",
        "# Gloo records but writes no dump. In the training script, after init_process_group:",
        "from distdiag import dump_flight_recorder",
        'dump_flight_recorder("/shared/fr", when_stuck_s=60)  # and on --trigger /shared/fr',
    ]


_COMMON = [
    "export TORCH_NCCL_DUMP_ON_TIMEOUT=1",
    "export TORCH_NCCL_DEBUG_INFO_PIPE_FILE=/tmp/fr_rank_  # for --trigger",
]
_NEW = [
    "# torch 2.9 and later",
    "mkdir -p /shared/fr",
    "export TORCH_FR_BUFFER_SIZE=2000",
    "export TORCH_FR_DUMP_TEMP_FILE=/shared/fr/rank_",
    *_COMMON,
]
_OLD = [
    "# torch 2.5 to 2.8",
    "mkdir -p /shared/fr",
    "export TORCH_NCCL_TRACE_BUFFER_SIZE=2000",
    "export TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/shared/fr/rank_",
    *_COMMON,
]
