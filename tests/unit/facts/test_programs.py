"""The end of a process group, and of no other that has been given its number since."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from support import need, need_root

from distdiag.facts import programs

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
CODE = f"""
import subprocess
from distdiag.facts import programs

ended = programs.start(["true"])
ended.wait(20)
with open({str(LAST_PID)!r}, "w") as last:
    last.write(str(ended.pid - 1))
stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
assert stranger.pid == ended.pid, (stranger.pid, ended.pid)
END
try:
    print("status", stranger.wait(0.3))
except subprocess.TimeoutExpired:
    print("lives")
stranger.kill()
"""


@pytest.mark.parametrize("end", ["assert programs.end_group(ended) == 0", "programs.kill_all()"])
def test_a_group_with_the_number_of_one_that_has_ended_is_left_alone(end: str) -> None:
    need("unshare")
    need_root()
    if not os.access(LAST_PID, os.W_OK):
        pytest.skip("this kernel does not let the next process id be chosen")
    namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    done = subprocess.run(
        [*namespace, sys.executable, "-c", CODE.replace("END", end)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("lives\n", "")


def test_a_group_outlives_its_leader_and_is_ended_with_it() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    leader = programs.start([sys.executable, "-S", "-c", code])
    assert leader.stdout is not None
    child = os.pidfd_open(int(leader.stdout.readline()))
    assert leader.wait(20) == 0
    try:
        assert programs.end_group(leader) == 0
        ended, _, _ = select.select([child], [], [], 20)
        assert ended == [child]
    finally:
        os.close(child)
