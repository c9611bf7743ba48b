"""Promises of docs/explanation/safety.md: each sentence there names its test; those without another test are here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jobs import Job
from support import PROGRAM, need
from support_warm import distdiag, enough_of_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "explanation" / "safety.md"
SECRET = "hunter2-hunter2"
SECRETS = {"HF_TOKEN": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET, "WANDB_API_KEY": SECRET}


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job("keeps_secrets", 2, env=SECRETS) as running:
        running.wait_still()
        yield running


def test_each_sentence_of_the_page_names_tests_that_exist() -> None:
    sentences = re.findall(r"^- (.*(?:\n  .*)*)", PAGE.read_text(), re.MULTILINE)
    assert len(sentences) > 20
    for sentence in sentences:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", sentence)
        assert tests, f"no test: {sentence}"
        for file, name in tests:
            assert f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"


LOOKS = [
    ("pyspy-all", "--json", "--job", "{job}"),
    ("trace", "blocked", "--json", "--job", "{job}"),
    ("trace", "fds", "{pid}", "--json"),
]


@pytest.mark.parametrize("command", LOOKS, ids=lambda words: " ".join(words[:2]))
def test_looking_writes_no_file_opens_no_port_and_signals_nobody(
    command: tuple[str, ...], job: Job, tmp_path: Path
) -> None:
    need("strace")
    words = [word.format(pid=job.pid(0), job=job.name) for word in command]
    calls = "network,open,openat,openat2,creat,mkdir,mkdirat,unlink,unlinkat,rename,renameat2,kill,tgkill,ptrace"
    log = tmp_path / "calls"
    subprocess.run(
        ["strace", "-f", "--seccomp-bpf", "-qq", "-e", f"trace={calls}", "-o", str(log), PROGRAM, *words],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},  # bytecode is Python's own
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
        timeout=90,
    )
    lines = log.read_text(errors="replace").splitlines()
    assert any("/proc/" in line for line in lines), "strace saw it at work"
    ranks = {job.pid(rank) for rank in range(job.size)}
    for line in lines:
        assert not re.search(r"sa_family=AF_INET|\blisten\(", line), line
        assert not re.search(r"\b(creat|mkdir|mkdirat|unlink|unlinkat|rename|renameat2)\(", line), line
        if re.search(r"O_WRONLY|O_RDWR|O_CREAT", line):
            assert re.search(r'"/dev/(null|tty)"|ENOENT|ENXIO', line), line
        sent = re.search(r"\b(?:kill|tgkill|ptrace)\((?:\w+, )?-?(\d+)", line)
        assert sent is None or int(sent[1]) not in ranks, line


KEEPING = {
    "pyspy-all": ("--job", "{job}", "--html", "{folder}.html"),
    "trace blocked": ("--job", "{job}"),
    "trace fds": ("{pid}",),
    "cuda-env": (),
    "doctor": (),
    "gpu-test": ("--nproc", "2", "--inject", "kill:1@connect"),
    "core-bt": ("--check-setup",),
    "trace sys": ("--pid", "{pid}", "--for", "0.5", "--keep-logs", "{folder}.logs"),
}


@pytest.mark.parametrize("command", KEEPING)
def test_no_secret_of_the_job_or_of_ours_is_shown_or_kept(
    command: str, job: Job, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if command == "trace sys":
        need("strace")
    folder = tmp_path / "kept"
    words = [word.format(pid=job.pid(0), job=job.name, folder=folder) for word in KEEPING[command]]
    torch = enough_of_torch(tmp_path_factory.mktemp("enough")) if command == "gpu-test" else {}
    live = distdiag(*command.split(), *words, "--save", str(folder), "--json", env={**SECRETS, **torch})
    text = distdiag(*command.split(), "--from", str(folder), env=SECRETS)
    for result in (live, text):
        assert result.code in (0, 1, 3), result.err
        assert SECRET not in result.out + result.err
    assert len(text.out.splitlines()) > 1
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len({path.relative_to(tmp_path).parts[0] for path in kept}) == 1 + str(words).count("kept")
    for path in kept:
        assert SECRET.encode() not in path.read_bytes(), path


def test_an_open_port_of_another_program_is_sent_one_harmless_line(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    server = (
        "import socket, sys\n"
        "with socket.create_server(('127.0.0.1', 0)) as l:\n"
        "    print(l.getsockname()[1], flush=True)\n"
        "    c, _ = l.accept(); c.settimeout(30)\n"
        f"    open({str(heard)!r}, 'wb').write(c.makefile('rb').read())\n"
    )
    with subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, text=True) as listening:
        assert listening.stdout is not None
        port = listening.stdout.readline().strip()
        distdiag("ports", f"127.0.0.1:{port}", "--json")
        try:
            assert listening.wait(30) == 0
        finally:
            listening.send_signal(signal.SIGKILL)
    assert heard.read_bytes() == b"HEAD / HTTP/1.0\r\n\r\n"


def test_ports_tries_the_rendezvous_port_and_no_other(tmp_path: Path) -> None:
    need("strace")
    log = tmp_path / "calls"
    done = subprocess.run(
        ["strace", "-f", "--seccomp-bpf", "-qq", "-e", "trace=bind,listen", "-o", str(log), PROGRAM, "ports"],
        capture_output=True,
        check=False,
        timeout=90,
    )
    assert done.returncode in (0, 1), done.stderr
    bound = [line for line in log.read_text().splitlines() if "sa_family=AF_INET" in line]
    assert bound
    assert all("htons(29500)" in line for line in bound), bound
