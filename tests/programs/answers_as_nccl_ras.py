"""A stand-in for the RAS service of an NCCL job: PORTFILE SCENARIO [PORT], plays it until it is killed.

Texts have the form that NCCL's user guide shows and its sources print (2.24 to 2.28); JSON that of 2.28.7 and later. Of
scenarios that move, every status has higher counts than the one before it.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_HEAD = """NCCL version {version} compiled with CUDA 12.8
CUDA runtime version 12080, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  {errors}
"""
_ERRORS = "\nErrors\n======\n\n"
_WARNINGS = "Warnings\n========\n\n"


def member(rank: int) -> str:
    return f"  Rank {rank} -- GPU {rank % 8} managed by process {483072 + rank} on node 172.16.64.{210 + rank // 8}\n"


def text(errors: str = "OK", version: str = "2.27.5", error_block: str = "", warning_block: str = "") -> str:
    return _HEAD.format(version=version, errors=errors) + _ERRORS + error_block + _WARNINGS + warning_block


def mismatch(count: int, operation: str, groups: str) -> str:
    kind = f"different {operation} operation counts" if operation else "different collective operation counts"
    return f"#0-0 (27a079b828ff1a75) MISMATCH\n  Communicator ranks have {kind}\n{groups}\n"


def lagging(count: int, operation: str = "AllReduce", version: str = "2.27.5") -> str:
    listed = "".join(member(rank) for rank in range(6))
    groups = f"  26 ranks have launched up to operation {count + 1}\n  6 ranks have launched up to operation {count}\n"
    return text("MISMATCH", version, warning_block=mismatch(count, operation, groups + listed))


def ahead(count: int) -> str:
    """The smaller group, the group listed, is ahead."""
    listed = "".join(member(rank) for rank in range(6))
    groups = f"  26 ranks have launched up to operation {count}\n  6 ranks have launched up to operation {count + 1}\n"
    return text("MISMATCH", warning_block=mismatch(count, "AllReduce", groups + listed))


def one_ahead(count: int) -> str:
    groups = f"  31 ranks have launched up to operation {count}\n" + member(7).replace(
        " -- ", f" has launched up to operation {count + 1} -- "
    )
    return text("MISMATCH", warning_block=mismatch(count, "AllReduce", groups))


def one_behind(count: int) -> str:
    groups = f"  31 ranks have launched up to operation {count + 1}\n" + member(21).replace(
        " -- ", f" has launched up to operation {count} -- "
    )
    return text("MISMATCH", warning_block=mismatch(count, "AllReduce", groups))


def dead(count: int) -> str:
    process = "  Process 3487984 on node 172.16.64.213 managing GPU 5\n"
    block = "DEAD\n  1 job process is considered dead (unreachable via the RAS network)\n" + process + "\n"
    rank = "  Rank 29 -- GPU 5 managed by process 3487984 on node 172.16.64.213\n"
    block += "#0-0 (27a079b828ff1a75) INCOMPLETE\n  Missing communicator data from 1 rank\n" + rank + "\n"
    return text("INCOMPLETE", error_block=block)


def missing(count: int) -> str:
    process = "  Process 483093 on node 172.16.64.212 managing GPU 5\n"
    block = "INCOMPLETE\n  Missing communicator data from 1 job process\n" + process + "\n"
    block += f"#0-0 (27a079b828ff1a75) INCOMPLETE\n  Missing communicator data from 1 rank\n{member(21)}\n"
    timeout = "TIMEOUT\n  Encountered 2 communication timeouts while gathering communicator data\n\n"
    return text("INCOMPLETE", error_block=block, warning_block=timeout)


def left(count: int) -> str:
    states = (
        "  Communicator ranks have different status\n  26 ranks have status RUNNING\n  6 ranks have status NOCOMM\n"
    )
    block = f"#0-0 (27a079b828ff1a75) MISMATCH\n{states}" + "".join(member(rank) for rank in range(6)) + "\n"
    return text("MISMATCH", warning_block=block)


def document(size: int, behind: dict[int, int], count: int, **lost: dict[int, str]) -> str:
    """The JSON of a job, 8 ranks a node. `behind`: by how many AllReduce a rank lags; `lost`: dead or silent ranks."""
    status = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}

    def about(rank: int) -> dict[str, object]:
        host = f"10.0.{rank // 8 // 250}.{rank // 8 % 250 + 1}"
        return {"rank": rank, "host": host, "pid": 4000 + rank, "cuda_dev": rank % 8, "nvml_dev": rank % 8}

    gone = {rank: kind for kind, ranks in lost.items() for rank in ranks}
    ranks = [
        {
            **about(rank),
            "status": status,
            "collective_counts": {
                "Broadcast": 3,
                "Reduce": 0,
                "AllGather": 0,
                "ReduceScatter": 0,
                "AllReduce": count - behind.get(rank, 0),
            },
        }
        for rank in range(size)
        if rank not in gone
    ]
    lost_ranks = [
        {**about(rank), "status": {"unresponsive": True, "considered_dead": kind == "dead"}}
        for rank, kind in sorted(gone.items())
    ]
    communicator = {
        "hash": "0x27a079b828ff1a75",
        "secondary_hash": "0x1:0x2",
        "size": size,
        "ranks_count": len(ranks),
        "missing_ranks_count": len(lost_ranks),
        "ranks": ranks,
        "missing_ranks": lost_ranks,
    }
    return json.dumps(
        {
            "nccl_version": "2.29.3",
            "cuda_runtime_version": 13000,
            "cuda_driver_version": 13000,
            "timestamp": "2026-11-23 12:00:00",
            "communicators_count": 1,
            "communicators": [communicator],
            "ras": {"collection_time_sec": 0.01, "timeouts_count": 0},
        },
        indent=1,
    )


# By scenario: does it know SET FORMAT json, does it move, and its status with operation counts around a number.
SCENARIOS: dict[str, tuple[bool, bool, Callable[[int], str]]] = {
    "healthy": (False, False, lambda count: text()),
    "lagging": (False, False, lagging),
    "lagging_2.24": (False, False, lambda count: lagging(count, "", "2.24.3")),
    "ahead": (False, False, ahead),
    "one_ahead": (False, False, one_ahead),
    "one_behind": (False, False, one_behind),
    "moving": (False, True, lagging),
    "dead": (False, False, dead),
    "missing": (False, False, missing),
    "left": (False, False, left),
    "json_healthy": (True, False, lambda count: document(1024, {}, count)),
    "json_moving": (True, True, lambda count: document(1024, {}, count)),
    "json_lagging": (True, False, lambda count: document(1024, {37: 1, 900: 1}, count)),
    "json_lagging_moves": (True, True, lambda count: document(1024, {37: 1}, count)),
    "json_ahead": (True, False, lambda count: document(1024, {rank: 1 for rank in range(1024) if rank != 5}, count)),
    "json_dead": (True, False, lambda count: document(1024, {}, count, dead={5: "x"})),
    "json_silent": (True, False, lambda count: document(1024, {}, count, silent={5: "x", 6: "x"})),
    "job_healthy": (True, False, lambda count: document(3, {}, count)),
    "job_lagging": (True, False, lambda count: document(3, {2: 1}, count)),
    "job_ahead": (True, False, lambda count: document(3, {0: 1, 2: 1}, count)),
    "job_dead": (True, False, lambda count: document(3, {}, count, dead={2: "x"})),
    "garbage": (True, False, lambda count: "\x00\xff{[not what it was" * 1000),
    "huge": (True, False, lambda count: '{"communicators": [' + "1," * 6_000_000),
    "cut": (False, False, lambda count: lagging(count)[:900]),
}
SILENT = ("no_handshake", "no_status", "endless_line", "other_service", "trickle")


class Client:
    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._data = connection, b""

    def line(self) -> str:
        while b"\n" not in self._data:
            received = self.connection.recv(4096)
            if not received:
                raise ConnectionError
            self._data += received
        line, _, self._data = self._data.partition(b"\n")
        return line.decode()

    def say(self, words: str) -> None:
        self.connection.sendall(words.encode("latin-1"))


def misbehave(client: Client, scenario: str) -> None:
    if scenario == "endless_line":
        for _ in range(1000):
            client.say("x" * 4096)
    elif scenario == "other_service":
        client.say("SSH-2.0-OpenSSH_9.6\r\n")
    elif scenario != "no_handshake":
        client.line()
        client.say("SERVER PROTOCOL 2\n")
        if scenario == "trickle":
            while True:
                client.say("x")
                time.sleep(0.05)
    while client.connection.recv(4096):
        pass


def serve(client: Client, scenario: str, count: int) -> None:
    knows_json, _, status = SCENARIOS[scenario]
    assert client.line().startswith("CLIENT PROTOCOL ")
    client.say("SERVER PROTOCOL 2\n")
    while True:
        command = client.line()
        if command.startswith("TIMEOUT ") or (command == "SET FORMAT json" and knows_json):
            client.say("OK\n")
        elif command.endswith("STATUS"):
            client.say(status(count))
            return
        else:
            client.say(f"ERROR: Unknown command: {command}\n")


def main() -> None:
    place, scenario = sys.argv[1:3]
    listener = socket.create_server(("127.0.0.1", int(sys.argv[3]) if len(sys.argv) > 3 else 0))
    Path(place).write_text(f"{listener.getsockname()[1]}\n")
    count = 6649
    while True:
        connection, _ = listener.accept()
        with connection:
            try:
                if scenario in SILENT:
                    misbehave(Client(connection), scenario)
                else:
                    serve(Client(connection), scenario, count)
            except OSError:
                pass
        count += 3 * (scenario in SCENARIOS and SCENARIOS[scenario][1])


if __name__ == "__main__":
    main()
