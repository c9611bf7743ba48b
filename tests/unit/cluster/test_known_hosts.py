"""known_hosts against the real thing: ssh-keygen hashes and finds, and ssh itself judges the key of a real sshd."""

from __future__ import annotations

import base64
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from ssh_tools import Key, keygen, make_keys, variants
from support import need, need_mounts

from distdiag.cluster.transports import known_hosts
from distdiag.cluster.transports.known_hosts import KeyVerdict, KnownHosts, Verdict

SSHD = "/usr/sbin/sshd"
JUDGEMENTS = {
    "Permission denied": KeyVerdict.KNOWN,  # the host key was taken, and then we are not let in
    "HAS CHANGED": KeyVerdict.CHANGED,
    "host key is known for": KeyVerdict.UNKNOWN,
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Key]:
    return make_keys(tmp_path_factory.mktemp("keys"))


def judge(text: str, key: Key, name: str, port: int, folder: Path) -> Verdict | None:
    """Return our verdict; None where it is left to OpenSSH."""
    path = folder / "known_hosts"
    path.write_text(text)
    known = KnownHosts.read([str(path), str(folder / "not-there")])
    return None if known.needs_openssh(name, port) else known.check(name, port, key.blob)


def test_fingerprints_are_those_of_ssh_keygen(keys: dict[str, Key]) -> None:
    for key in keys.values():
        assert known_hosts.fingerprint(key.blob) == keygen("-l", "-f", str(key.path)).split()[1]


NAMES = [
    "n1",
    "N1",
    "n2",
    "n10",
    "n1.lab.example",
    "a.b.lab.example",
    "lab.example",
    "10.0.0.7",
    "10.0.0.71",
    "fe80::1",
    "[n1]:2222",
    "[n2]:2222",
    "[10.0.0.7]:2222",
    "x" * 300,
    "odd*name",
]
PATTERNS = [
    "n1",
    "N1",
    "n1,n2",
    "n?",
    "n*",
    "*",
    "?",
    "*.lab.example",
    "*.*.example",
    "*.lab.example,!a.b.lab.example",
    "!n1,*",
    "!n1",
    "n1,!n1",
    "10.0.0.*",
    "10.0.0.?",
    "fe80::1",
    "fe80:*",
    "[n1]:2222",
    "[*]:2222",
    "[n?]:*",
    "*:2222",
    "*n*1*",
    "n1*",
    "*****",
    ",n1,",
    ",",
    "!",
    "[n1",
    "x" * 300,
    "x*" * 600,
    "*" * 1024,
]


def test_plain_names_match_where_ssh_keygen_finds_them(keys: dict[str, Key], tmp_path: Path) -> None:
    path = tmp_path / "plain"
    plain = [pattern for pattern in PATTERNS if not set("*?!") & set(pattern)]
    blobs = variants(keys["ed25519"], len(plain))
    lines = [
        f"{pattern} ssh-ed25519 {base64.b64encode(blob).decode()}\n" for pattern, blob in zip(plain, blobs, strict=True)
    ]
    path.write_text("".join(lines))
    known = KnownHosts.read([str(path)])
    for name in NAMES:
        bare, port = (name[1:-6], 2222) if name.startswith("[") else (name, 22)
        found = found_by_ssh_keygen(name, path) or found_by_ssh_keygen(bare, path)
        verdicts = [known.check(bare, port, blob).key for blob in blobs]
        ours = [number for number, verdict in enumerate(verdicts, 1) if verdict is KeyVerdict.KNOWN]
        assert ours == found, name
        assert known.needs_openssh(bare, port) == ("*" in bare)


def test_a_pattern_leaves_the_hosts_that_ssh_keygen_finds_to_openssh(keys: dict[str, Key], tmp_path: Path) -> None:
    lines = [f"{one} {keys['ed25519'].public}\n" for one in PATTERNS if set("*?!") & set(one)]
    path, one_line = tmp_path / "patterns", tmp_path / "pattern"
    path.write_text("".join(lines))
    for name in NAMES:
        bare, port = (name[1:-6], 2222) if name.startswith("[") else (name, 22)
        for number in {*found_by_ssh_keygen(name, path), *found_by_ssh_keygen(bare, path)}:
            one_line.write_text(lines[number - 1])
            assert KnownHosts.read([str(one_line)]).needs_openssh(bare, port), (lines[number - 1], name)


def found_by_ssh_keygen(name: str, path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"found: line ([0-9]+)", keygen("-F", name, "-f", str(path)))]


def test_hashed_names_are_found_and_only_those(keys: dict[str, Key], tmp_path: Path) -> None:
    path = tmp_path / "hashed"
    path.write_text("".join(f"{name} {key.public}\n" for name in ("n1,n2", "[n3]:2222", "N4") for key in keys.values()))
    keygen("-H", "-f", str(path))
    assert path.read_text().count("|1|") == 16
    known = KnownHosts.read([str(path)])
    key = keys["rsa"]
    found = {
        (name, port)
        for name in ("n1", "n2", "n3", "n4", "N1", "n5", "")
        for port in (22, 2222)
        if known.check(name, port, key.blob).key is KeyVerdict.KNOWN
    }
    plain = {("n1", 22), ("n2", 22), ("n4", 22), ("N1", 22), ("n3", 2222)}
    assert found == plain | {(name, 2222) for name, port in plain if port == 22}


CASES: list[tuple[str, KeyVerdict | None]] = [
    ("{name} {key}", KeyVerdict.KNOWN),
    ("", KeyVerdict.UNKNOWN),
    ("other {key}", KeyVerdict.UNKNOWN),
    ("{name} {different}", KeyVerdict.CHANGED),
    ("{name} {different}\n{name} {key}", KeyVerdict.KNOWN),
    ("{name} {ecdsa}", KeyVerdict.OTHER_TYPE),
    ("{name} {ecdsa}\n{name} {different}", KeyVerdict.CHANGED),
    ("{name} {key}\n@revoked * {key}", None),
    ("@revoked {name} {key}", None),
    ("@revoked {name} {different}\n{name} {key}", KeyVerdict.KNOWN),
    ("@revoked other {key}\n{name} {key}", KeyVerdict.KNOWN),
    ("@revoked {name} {different}", KeyVerdict.UNKNOWN),
    ("@cert-authority * {ecdsa}\n{name} {key}", KeyVerdict.KNOWN),
    ("@cert-authority * {key}", KeyVerdict.UNKNOWN),
    ("@cert-authority * {key}\n{name} {different}", KeyVerdict.CHANGED),
    ("@unheard-of {name} {key}", KeyVerdict.UNKNOWN),
    ("@revoked @cert-authority {name} {key}", KeyVerdict.UNKNOWN),
    ("node {key}", KeyVerdict.KNOWN),
    ("# {name} {key}", KeyVerdict.UNKNOWN),
    ("   {name}\t \t{key} a comment # here", KeyVerdict.KNOWN),
    ("{name} {key}\r", KeyVerdict.KNOWN),
    ("{name} {key}\0junk", KeyVerdict.KNOWN),
    ("{name} ssh-ed25519 AAAA!AAAA\n{name} {key}", KeyVerdict.KNOWN),
    ("{name} ssh-rsa {blob}", KeyVerdict.UNKNOWN),
    ("{name} 1024 35 1234567", KeyVerdict.UNKNOWN),
    ("{name} ssh-ed25519", KeyVerdict.UNKNOWN),
    ("|1|AAAA|AAAA {key}", KeyVerdict.UNKNOWN),
    ("|1|{salt}|{salt},{name} {key}", KeyVerdict.UNKNOWN),
    ("|2|{salt}|{salt} {key}", KeyVerdict.UNKNOWN),
    ("NODE,*:2201 {key}", KeyVerdict.KNOWN),
    ("*,!*node* {key}", KeyVerdict.UNKNOWN),
]
PORT_CASES = [
    ("*,!{name} {key}", KeyVerdict.KNOWN),
    ("node {different}", KeyVerdict.UNKNOWN),
    ("node {key}\n{name} {different}", KeyVerdict.CHANGED),
    ("node {key}\n{name} {ecdsa}", KeyVerdict.OTHER_TYPE),
]


def filled(text: str, keys: dict[str, Key], port: int) -> str:
    name = "node" if port == 22 else f"[node]:{port}"
    key, different, ecdsa = (keys[which].public for which in ("ed25519", "ed25519-other", "ecdsa"))
    salt = base64.b64encode(bytes(20)).decode()
    return text.format(name=name, key=key, different=different, ecdsa=ecdsa, salt=salt, blob=key.split()[1]) + "\n"


def judged_by_ssh(file: Path, sshd: str, port: int) -> KeyVerdict:
    """Let ssh connect to an sshd that is started for it; no port is opened, and no name is looked up."""
    settings = [
        f"UserKnownHostsFile={file}",
        "GlobalKnownHostsFile=/dev/null",
        "StrictHostKeyChecking=yes",
        "BatchMode=yes",
        "PreferredAuthentications=none",
        "KexAlgorithms=curve25519-sha256",
        "HostKeyAlgorithms=ssh-ed25519",
        f"ProxyCommand={sshd}",
    ]
    argv = ["ssh", "-F", "none", "-p", str(port), *(word for one in settings for word in ("-o", one)), "node", "true"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    found = [verdict for words, verdict in JUDGEMENTS.items() if words in done.stderr]
    assert found, done.stderr
    return found[0]


@pytest.fixture(scope="module")
def sshd(keys: dict[str, Key]) -> str:
    """The command that serves one connection on its standard streams."""
    need("ssh", SSHD)
    config = keys["ed25519"].path.with_name("sshd_config")
    config.write_text(f"HostKey {keys['ed25519'].path}\nAuthenticationMethods publickey\nUsePAM no\n")
    command = f"{SSHD} -i -f {shlex.quote(str(config))}"
    if os.geteuid() == 0 and not Path("/run/sshd").is_dir():
        need_mounts()
        script = f"mount -t tmpfs t /run && mkdir -m 755 /run/sshd && exec {command}"
        return f"unshare -m sh -c {shlex.quote(script)}"
    return command


@pytest.mark.parametrize(("port", "cases"), [(22, CASES), (2201, CASES + PORT_CASES)])
def test_verdicts_are_those_of_ssh(
    port: int, cases: list[tuple[str, KeyVerdict | None]], keys: dict[str, Key], sshd: str, tmp_path: Path
) -> None:
    for text, expected in cases:
        content = filled(text, keys, port)
        ours = judge(content, keys["ed25519"], "node", port, tmp_path)
        if ours is None:
            assert set("@*!") & set(text), content
            continue
        assert ours.key is expected, content
        by_ssh = judged_by_ssh(tmp_path / "known_hosts", sshd, port)
        # What ssh calls changed, we call another type where it is only that.
        assert by_ssh is (KeyVerdict.CHANGED if expected is KeyVerdict.OTHER_TYPE else expected), content


def test_the_verdict_names_file_and_line(keys: dict[str, Key], tmp_path: Path) -> None:
    text = f"# ours\n\nn1 {keys['rsa'].public}\nn1 {keys['ed25519-other'].public}\n"
    at = str(tmp_path / "known_hosts")
    assert judge(text, keys["ed25519"], "n1", 22, tmp_path) == Verdict(KeyVerdict.CHANGED, at, 4)
    assert judge(text, keys["rsa"], "n1", 22, tmp_path) == Verdict(KeyVerdict.KNOWN, at, 3)
    assert judge(text, keys["ecdsa"], "n1", 22, tmp_path) == Verdict(KeyVerdict.OTHER_TYPE, at, 3)
    assert judge(text, keys["ecdsa"], "n2", 22, tmp_path) == Verdict(KeyVerdict.UNKNOWN)


def test_hosts_that_markers_may_be_about_are_left_to_openssh(keys: dict[str, Key], tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    public = keys["rsa"].public
    path.write_text(f"@cert-authority *.lab {public}\nn1 {public}\n@revoked n2 {public}\n")
    known = KnownHosts.read([str(path)])
    left = {name for name in ("n1.lab", "n1", "n2", "n3") if known.needs_openssh(name, 22)}
    assert left == {"n1.lab", "n2"}
    assert known.needs_openssh("n1.lab", 2201)
    keygen("-H", "-f", str(path))
    assert KnownHosts.read([str(path)]).needs_openssh("n2", 22)
