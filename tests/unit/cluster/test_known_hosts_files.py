"""Files of known hosts: what a hostile or broken one does, what a large one costs, and how our own is written."""

from __future__ import annotations

import base64
import os
import stat
import time
from typing import TYPE_CHECKING

import pytest
from loops import each
from ssh_tools import Key, keygen, make_keys, variants

from distdiag.cluster.transports import known_hosts
from distdiag.cluster.transports.known_hosts import KeyVerdict, KnownHosts, Verdict

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Key]:
    return make_keys(tmp_path_factory.mktemp("keys"))


def test_hostile_lines_are_skipped_and_the_rest_is_read(keys: dict[str, Key], tmp_path: Path) -> None:
    good = keys["ed25519"].public.encode()
    lines = [
        b"x" * 5_000_000,
        b"a," * 2_500_000 + b"long " + good,
        b"\xff\xfe\x80 " + good,
        b"\0\0\0",
        b"n1 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAA",
        b"n1 ssh-ed25519 \xff\xff\xff",
        b"n1 ssh-ed25519 " + base64.b64encode(b"\xff\xff\xff\xffssh"),
        b"n1 \xe9 " + base64.b64encode(b"\0\0\0\1\xe9"),
        b"|1|" + b"|" * 1000 + b" " + good,
        b"@" * 1000 + b" n1 " + good,
        b"n1 " + good,
    ]
    began = time.process_time()
    path = str(tmp_path / "known_hosts")
    (tmp_path / "known_hosts").write_bytes(b"\n".join(lines))  # and no newline at the end
    known = KnownHosts.read([path])
    verdict = known.check("n1", 22, keys["ed25519"].blob)
    assert time.process_time() - began < 5
    assert verdict == Verdict(KeyVerdict.KNOWN, path, 11)
    assert known.check("LONG", 22, keys["ed25519"].blob).key is KeyVerdict.KNOWN
    assert known.check("\udcff\udcfe\udc80", 22, keys["ed25519"].blob).key is KeyVerdict.KNOWN


def test_what_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    loop, fifo = tmp_path / "loop", tmp_path / "fifo"
    loop.symlink_to(loop)
    os.mkfifo(fifo)
    paths = [str(path) for path in (loop, fifo, tmp_path, tmp_path / "none")]
    known = KnownHosts.read([*paths, os.devnull, "/dev/zero", "nul\0"])
    assert not known.needs_openssh("n1", 22)


def test_hashed_lines_do_not_make_it_quadratic(keys: dict[str, Key], tmp_path: Path) -> None:
    """Of a thousand hashed hosts each with its own key, checking all takes a thousand HMACs and not a million."""
    path = tmp_path / "hashed"
    blobs = variants(keys["ed25519"], 1000)
    path.write_text("".join(known_hosts.line(f"n{i}", 22, blob) + "\n" for i, blob in enumerate(blobs)))
    keygen("-H", "-f", str(path))
    known = KnownHosts.read([str(path)])
    began = time.process_time()
    verdicts = {known.check(f"n{i}", 22, blob).key for i, blob in enumerate(blobs)}
    assert time.process_time() - began < 0.25
    assert verdicts == {KeyVerdict.KNOWN}


def test_our_file_is_for_the_user_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    known_hosts.make_own_file()
    path = tmp_path / "distdiag" / "known_hosts"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.write_text("n1 key\n")
    known_hosts.make_own_file()
    assert path.read_text() == "n1 key\n"


def test_an_accepted_key_is_found_by_ssh_and_by_us(keys: dict[str, Key], tmp_path: Path) -> None:
    path = str(tmp_path / "known_hosts")
    key = keys["ecdsa"]
    for name, port in (("Node7", 22), ("node8", 2201), ("fe80::1%eth0", 22), ("::1", 2201)):
        (tmp_path / "known_hosts").write_text(known_hosts.line(name, port, key.blob) + "\n")
        assert KnownHosts.read([path]).check(name, port, key.blob).key is KeyVerdict.KNOWN
        assert key.public in keygen("-F", (name if port == 22 else f"[{name}]:{port}").lower(), "-f", path)


@each("name", ["n*", "a,b", "!n1", "|1|x|y", "#n1", "@revoked n1", "n1\nn2", "", "n 1", "nöd"])
def test_a_name_that_would_mean_something_else_is_left_to_openssh(name: str) -> None:
    assert KnownHosts.read([]).needs_openssh(name, 22)


def test_where_our_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert known_hosts.own_file() == "/home/somebody/.config/distdiag/known_hosts"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert known_hosts.own_file() == "/home/somebody/.config/distdiag/known_hosts"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert known_hosts.own_file() == f"{tmp_path}/distdiag/known_hosts"


def test_a_file_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(NotADirectoryError, match=f"{tmp_path}/file"):
        known_hosts.make_own_file()
