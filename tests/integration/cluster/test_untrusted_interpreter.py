"""A job's own interpreter is used on its node, but never a program that another user could have put there."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import need, need_mounts, need_root
from support_warm import distdiag

from distdiag.cluster import bootstrap

NOBODY = 65534
# Like a rank until it is started with arguments, like an interpreter: then it records its user.
POSES_AS_PYTHON = """
#include <stdio.h>
#include <unistd.h>
int main(int count, char **words) {
    FILE *file = count > 1 ? fopen("%s", "a") : NULL;
    if (file) return fprintf(file, "%%d\\n", getuid()), fclose(file);
    puts("ready"); fflush(stdout);
    for (;;) pause();
}
"""


def test_root_never_runs_another_users_program(tmp_path: Path) -> None:
    need("gcc", "setpriv")
    need_root()
    need_mounts()
    folder, mark = tmp_path / "theirs", tmp_path / "ran-as"
    folder.mkdir()
    (folder / "poses.c").write_text(POSES_AS_PYTHON % mark)
    subprocess.run(["gcc", "-o", str(folder / "python3"), str(folder / "poses.c")], check=True, timeout=60)
    for path in (folder, folder / "python3"):
        os.chown(path, NOBODY, NOBODY)
    for above in [tmp_path, *tmp_path.parents]:
        above.chmod(above.stat().st_mode | 0o011)
    # A node without our own Python, as any other node is.
    node = tmp_path / "node"
    node.write_text(f"#!/bin/sh\nexec unshare -m sh -c 'mount -t tmpfs none {shlex.quote(sys.prefix)} && exec sh'\n")
    node.chmod(0o755)
    theirs = subprocess.Popen(
        ["setpriv", "--reuid", str(NOBODY), "--clear-groups", str(folder / "python3")],
        stdout=subprocess.PIPE,
        env={"WORLD_SIZE": "1", "RANK": "0"},
    )
    try:
        assert theirs.stdout is not None
        assert theirs.stdout.readline() == b"ready\n"
        result = distdiag("ports", "--hosts", "node1", "--via", f"{node} {{host}}", "--json")
    finally:
        theirs.kill()
        theirs.communicate()
    assert not mark.exists(), f"it ran as uid {mark.read_text()}"
    assert result.code in (0, 3), result.out  # there may be no other Python on that node


def trusted(shell: str, path: Path) -> bool:
    done = subprocess.run([shell, "-c", f'{bootstrap.TRUSTED}\ndistdiag_trusted "$1"', shell, str(path)], timeout=20)
    return done.returncode == 0


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_program_is_trusted_if_nobody_else_could_have_put_it_there(shell: str, tmp_path: Path) -> None:
    need_root()
    os.chmod(tmp_path, 0o755)
    program = tmp_path / "bin" / "python3"
    program.parent.mkdir(mode=0o755)
    program.touch(mode=0o755)
    assert trusted(shell, Path(os.path.realpath("/bin/sh")))
    assert trusted(shell, program)
    for path in (program, program.parent, tmp_path):
        for mode in (0o775, 0o757):
            path.chmod(mode)
            assert not trusted(shell, program), (path, oct(mode))
        path.chmod(0o755)
        os.chown(path, NOBODY, -1)
        assert not trusted(shell, program), path
        os.chown(path, 0, -1)
    tmp_path.chmod(0o1777)  # in /tmp no other user can replace our files
    assert trusted(shell, program)
    spaced = tmp_path / "a b" / "python3"
    spaced.parent.mkdir(mode=0o755)
    spaced.touch(mode=0o755)
    assert not trusted(shell, spaced)
    assert not trusted(shell, Path("bin/python3"))
    assert not trusted(shell, tmp_path / "is-not-there")
