"""bundle on a real hung job: no secret and no name inside, and the same verdict elsewhere as hang's here."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import shlex
import stat
import tarfile
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from fuzz import assert_survived, damaged, run_each
from jobs import Job
from support import wait_until
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Members = list[tuple[tarfile.TarInfo, bytes]]

SECRETS = {
    "environment": "correct-horse+battery/9",
    "argv": "tr0ub4dor-and-3",
    "log": "hunter2hunter2",
    "form": "hf_" + "aBcDeFgHiJkLmNoPqR",
    "url": "s3cr3t-of-the-db",
}
NAMES = ("node17", "dead18", "cluster.example", "alice", "203.0.113.77")
VIA = 'case $1 in dead*) echo no route >&2; exit 7;; esac; shift; exec "$@"'
LOG = """Traceback (most recent call last):
  File "/home/alice/train.py", line 3, in connect
    password = '{log}'
  token={form} host=node17 peer=203.0.113.77:4000 postgres://alice:{url}@db.cluster.example/x
  Authorization: Basic {basic}
RuntimeError: cannot connect as alice@cluster.example with {environment}
"""


def unpacked(path: Path) -> dict[str, bytes]:
    with tarfile.open(path, mode="r:gz") as archive:
        files = ((member.name, archive.extractfile(member)) for member in archive)
        return {name: file.read() for name, file in files if file is not None}


def forms(secret: str) -> Iterator[bytes]:
    data = secret.encode()
    yield from (data, quote(secret, safe="").encode(), data.hex().encode())
    yield from (base64.b64encode(before + data)[4:-4] for before in (b"xxx", b"xxxx", b"xxxxx"))


def test_secrets_and_names_stay_home_and_the_verdict_travels(tmp_path: Path) -> None:
    via = tmp_path / "via"
    via.write_text(VIA)
    log = tmp_path / f"data-{SECRETS['form']}" / "train.log"
    log.parent.mkdir()
    basic = base64.b64encode(f"alice:{SECRETS['environment']}".encode()).decode()
    log.write_text(LOG.format(basic=basic, **SECRETS))
    hosts = ("--hosts", "node17.cluster.example,dead18", "--via", f"sh {shlex.quote(str(via))} {{host}}")
    target = tmp_path / "hung.tar.gz"
    env = {"HOW": "sleeps", "DB_PASSWORD": SECRETS["environment"], "WANDB_API_KEY": "k" * 12}
    run_id = f"bundle-{os.getpid()}"  # another test's job may have the same address and port
    words = ("--api-key", SECRETS["argv"])
    with Job("hangs_in_every_way", 3, env=env, arguments=words, run_id=run_id, forked=True) as job:
        job.wait_ready()
        wait_until(lambda: (job.folder / "bad").exists(), 60, lambda: "the fault has not happened")
        since = time.monotonic()
        wait_until(lambda: time.monotonic() - since > 6, 60, lambda: "the clock did not advance")
        made = distdiag("bundle", "--job", run_id, "--logs", str(log), "-o", str(target), *hosts, "--json")
        assert not [rank for rank in range(3) if not os.path.exists(f"/proc/{job.pid(rank)}")]
    assert made.code == 0, made.out + made.err
    here = {row["command"]: row for row in made.report["data"]["verdicts"]}
    assert here["hang"]["verdict"] == "fail", made.out
    assert all(row["same"] for row in here.values()), made.out
    (missing,) = [each for each in made.report["findings"] if each["id"] == "bundle.incomplete"]
    assert missing["where"]["hosts"] == ["dead18"]

    files = unpacked(target)
    whole = b"\n".join(files.values()) + "\n".join(files).encode()
    found = [(place, form) for place, secret in SECRETS.items() for form in forms(secret) if form in whole]
    assert not found
    assert b"k" * 12 not in whole
    assert not [name for name in NAMES if name.encode() in whole.lower()]
    assert b"not complete: host-2" in files["distdiag-bundle/MANIFEST.txt"]
    kept = json.loads((tmp_path / "hung.tar.gz.map.json").read_text())
    assert kept["host-2"] == "dead18"
    assert not [secret for secret in SECRETS.values() if secret in json.dumps(kept)]
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in (target, f"{target}.map.json")} == {0o600}
    (tail,) = [data for name, data in files.items() if name.endswith("train.log")]
    assert b"/home/user-" in tail
    assert b"peer=10.0." in tail
    assert b"RuntimeError: cannot connect as" in tail

    elsewhere = distdiag("hang", "--from", str(target), "--json")
    assert (elsewhere.code, elsewhere.report["data"]["ranks"]) == (1, [2]), elsewhere.out + elsewhere.err
    assert elsewhere.report["data"]["class_name"] == "not-in-collective"
    stacks = distdiag("pyspy-all", "--from", str(target), "--json").report
    assert (stacks["data"]["samples"], stacks["data"]["outliers"][0]["ranks"]) == (16, [2])
    assert b"--host-timeout" not in whole
    assert distdiag("cuda-env", "--from", str(target), "--json").report["command"] == "cuda-env"
    other = distdiag("core-bt", "--from", str(target))
    assert (other.code, "no facts from core-bt in" in other.err) == (2, True)
    assert f"distdiag hang --from {target}" in other.err


def packed(members: Members) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz", compresslevel=1) as archive:
        for member, data in members:
            archive.addfile(member, io.BytesIO(data))
    return whole.getvalue()


def entry(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(f"distdiag-bundle/{name}")
    member.size = len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    return member, data


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Members:
    """The members of a small bundle."""
    kept = tmp_path_factory.mktemp("kept")
    distdiag("core-bt", "--check-setup", "--save", str(kept))
    (file,) = kept.iterdir()
    return [entry("MANIFEST.txt", b"words"), entry(f"facts/{file.name}", file.read_bytes())]


def test_a_hostile_bundle_writes_nothing_and_costs_little(good: Members, tmp_path: Path) -> None:
    hostile = [
        entry("../../escaped", b"x"),
        entry("facts/../../escaped.json", b"{}"),
        entry("facts/core-bt.l.json", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        entry("facts/core-bt.h.json", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        entry("facts/core-bt.d.json", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
        entry("facts/core-bt.f.json", type=tarfile.FIFOTYPE),
    ]
    outputs = []
    for name, members in (("good", good), ("hostile", [good[0], *hostile, good[1]])):
        path = tmp_path / f"{name}.tar.gz"
        path.write_bytes(packed(members))
        outputs.append(distdiag("core-bt", "--from", str(path), "--json").out)
    assert outputs[0] == outputs[1]
    assert '"verdict"' in outputs[0]
    bomb = tmp_path / "bomb.tar.gz"
    huge, _ = entry("facts/core-bt.b.json")
    huge.size = 300 * 2**20
    bomb.write_bytes(gzip.compress(huge.tobuf()) + 15 * gzip.compress(bytes(20 * 2**20), 1))
    done = distdiag("core-bt", "--from", str(bomb))
    assert (done.code, "unpacks to more than 256 MiB" in done.err) == (2, True), done.err
    assert not list(tmp_path.rglob("escaped*"))


def test_damaged_bundles(good: Members, tmp_path: Path) -> None:
    original, path = packed(good), tmp_path / "b.tar.gz"
    plain = gzip.decompress(original)

    def cases() -> Iterator[tuple[str, list[str], Callable[[], None]]]:
        for name, data in damaged(original, 40):
            yield name, ["core-bt", "--from", str(path)], lambda data=data: path.write_bytes(data)  # type: ignore[misc]
        for name, data in damaged(plain, 60):
            content = gzip.compress(data, 1)
            yield name, ["core-bt", "--from", str(path)], lambda data=content: path.write_bytes(data)  # type: ignore[misc]

    assert_survived(run_each(cases()), 100)


def test_without_any_host_it_says_why(tmp_path: Path) -> None:
    done = distdiag(
        "bundle", "--hosts", "a,b", "--via", "sh -c 'exit 7' {host}", "-o", str(tmp_path / "x.tar.gz"), "--json"
    )
    assert (done.code, done.report["verdict"]) == (3, "unknown"), done.out + done.err
    assert b"not complete" in unpacked(tmp_path / "x.tar.gz")["distdiag-bundle/MANIFEST.txt"]
    assert distdiag("bundle", "-o", str(tmp_path / "x.zip")).code == 2
    assert distdiag("bundle", "-o", str(tmp_path / "none" / "x.tar.gz")).code == 2
