"""Dumps where torch writes them without a setting: read with the job that wrote them, not beside another job."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from support import need_root

DUMP = Path(__file__).parents[2] / "recorded" / "nccl_h200" / "dumps" / "rank_2"
READS = """
import os, subprocess, sys, time
from distdiag.jobs import picture

def start(port):
    program = "print(flush=True); import time; time.sleep(600)"
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HOME": sys.argv[1]}
    job = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE)
    job.stdout.readline()
    return job

def dumps(job):
    parts = []
    ask = picture.Ask(("recorder",), timeout_s=20.0, sampling=picture.Sampling(), ranks=[(job.pid, 2)])
    picture.more(ask, parts.append)
    return sum(len(found.dumps) for part in parts for found in vars(part).get('dumps', ()))

job = start("29500")
before = dumps(job)
os.utime(sys.argv[1] + "/.cache/torch/comm_lib_trace_rank_2", (time.time() + 5,) * 2)
alone = dumps(job)
other = start("29501")
print(before, alone, dumps(job))
"""


def test_default_dumps_are_read_unless_another_job_may_have_written_them(tmp_path: Path) -> None:
    need_root()
    folder = tmp_path / ".cache" / "torch"
    folder.mkdir(parents=True)
    shutil.copyfile(DUMP, folder / "comm_lib_trace_rank_2")
    apart = ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child=SIGKILL"]
    done = subprocess.run(
        [*apart, sys.executable, "-c", READS, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["0", "1", "0"], done.stderr
