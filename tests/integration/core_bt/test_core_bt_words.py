"""The last message of a process in its core: assertions, exceptions, checks of the C library; and their source."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from cores import PROGRAMS, make_core, need_cores
from support_warm import distdiag

if TYPE_CHECKING:
    from pathlib import Path

    from support import Result

CRASHES = {
    "first_check": ("assertion", "first_check", "Assertion `shard < 3' failed."),
    "second_check": ("assertion", "second_check", "Assertion `shard > 30' failed."),
    "free_twice": ("heap-corruption", "free_twice", "double free"),
    "no_room": ("out-of-memory", "no_room", "instance of 'std::"),
    "throw_text": ("uncaught-exception", "throw_text", "what():  shard 10 is not readable"),
    "gloo_mismatch": ("gloo-size-mismatch", "gloo_mismatch", "instance of 'EnforceNotMet'"),
    "nccl_timeout": ("nccl-timeout", "watch", "Watchdog caught collective operation timeout"),
    "caught_before": (None, "caught_before", ""),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All of these crashes, judged together."""
    folder = tmp_path_factory.mktemp("words")
    for name in CRASHES:
        (folder / name).mkdir()
        make_core("dies_saying_why", folder / name, str(folder), name)
    document = core_bt(folder).report
    assert len(document["data"]["cores"]) == len(CRASHES)
    return document


def core_bt(path: Path) -> Result:
    return distdiag("core-bt", "--json", str(path))


@pytest.mark.parametrize("name", CRASHES)
def test_the_reason_is_read_from_the_core_and_the_title_names_who_asked(report: dict[str, Any], name: str) -> None:
    signature, function, said = CRASHES[name]
    (core,) = [one for one in report["data"]["cores"] if f"/{name}/" in one["path"]]
    assert core["signature"] == signature
    assert said in core["message"]
    assert bool(core["message"]) == bool(said)
    (finding,) = [one for one in report["findings"] if core["path"] in one["evidence"]]
    assert function in finding["title"].partition(", in C: ")[2] or f"in {function}" in finding["title"]
    assert (
        core["message"].splitlines()[:1] == [one[9:] for one in finding["evidence"] if one.startswith("message: ")][:1]
    )


def test_a_file_that_was_made_shorter_is_no_segfault_and_no_file_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "shortened").mkdir()
    shortened = make_core("dies_by_sigbus", tmp_path / "shortened")
    result = core_bt(shortened)
    (core,) = result.report["data"]["cores"]
    assert (core["signature"], core["signal_name"], core["signal_code"]) == ("file-shortened", "SIGBUS", 2)
    assert "SIGBUS" in result.findings["crash"]["title"]
    assert "segmentation" not in result.out.lower()
    (tmp_path / "shortened/samples.bin").unlink()
    found = core_bt(shortened)
    assert found.report["data"]["cores"][0]["signature"] == "mapped-file-lost"


def test_a_write_inside_a_file_of_a_full_tmpfs_found_no_room(tmp_path: Path) -> None:
    need_cores()
    (tmp_path / "full").mkdir()
    dies = f"{sys.executable} {PROGRAMS / 'dies_of_full_tmpfs.py'} full"
    mounted = f"cd {tmp_path} && mount -t tmpfs -o size=64k tmpfs full && ulimit -c unlimited"
    script = f'{mounted} && {{ {dies} >ready; exec "$@"; }}'
    found = distdiag("core-bt", "--json", str(tmp_path), wrap=("unshare", "-m", "sh", "-c", script, "sh"))
    assert found.report["data"]["cores"][0]["signature"] == "no-space", found.out
    assert "no space" in found.findings["crash"]["detail"]
    assert found.findings["crash"]["fix"]["commands"] == [f"df -h {tmp_path}/full/samples.bin"]
