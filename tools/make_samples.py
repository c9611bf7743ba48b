"""Runs distdiag on small real faults and writes its output into README.md and docs/: `make samples`.

    python tools/make_samples.py            all samples
    python tools/make_samples.py NAME ...   these

A sample is a block between `<!-- sample: NAME -->` and `<!-- end of sample -->`. Its first line is the command as typed
by a user; process ids, times and figures are those of the run. A sample whose tool is missing here (namespaces, strace,
cores) is left as it is and named, and the exit status is 1. The picture of the README comes from the same run as its
block.
"""

from __future__ import annotations

import contextlib
import json as _json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Network, need_network
from cores import cores_in, need_cores
from cuda_machines import Machine
from jobs import PROGRAMS, Job, wait_still
from support import wait_until

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tests" / "samples"
BIN = Path(sys.executable).parent
_HOME = "/home/ann/job"
_COLUMNS = "80"
_KEPT = ("HOME", "LANG", "USER", "LD_LIBRARY_PATH", "PYTHONPATH")
_BLOCK = re.compile(r"(<!-- sample: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(<!-- end of sample -->)", re.DOTALL)

Sample = Callable[[Path], str]
SAMPLES: dict[str, Sample] = {}


def sample(make: Sample) -> Sample:
    """Register a sample under its function's name."""
    SAMPLES[make.__name__.replace("_", "-")] = make
    return make


def environment(**more: str) -> dict[str, str]:
    """Return a plain user's environment: 80 columns, this checkout's programs first, one thread for each rank."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT}
    path = f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {**kept, "PATH": path, "COLUMNS": _COLUMNS, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def run(
    folder: Path, shown: str, *, wrap: tuple[str, ...] = (), env: dict[str, str] | None = None, typed: str = ""
) -> str:
    """Run a command line in a folder; returns it and its output, as a block for a page."""
    done = subprocess.run(
        [*wrap, "sh", "-c", typed or shown],
        cwd=folder,
        env={**environment(), **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=180,
        check=False,
    )
    return block(folder, shown, done.stdout)


def run_quietly(folder: Path, command: str) -> None:
    """Run a shell command whose output does not matter, and which may fail: that is the fault."""
    subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )


def block(folder: Path, shown: str, output: str, *, language: str = "console") -> str:
    """Format a command and its output; paths of this machine become those of a user called ann."""
    text = clean(folder, output).strip("\n")
    text = "\n".join(line.rstrip() for line in text.splitlines())
    assert text, f"{shown} printed nothing"
    return f"```{language}\n$ {shown}\n{text}\n```\n"


def clean(folder: Path, text: str) -> str:
    """Replace the folders of this machine."""
    places = {
        folder: _HOME,
        SCRIPTS: _HOME,
        PROGRAMS: _HOME,
        BIN.parent: "/home/ann/venv",
        ROOT: "/home/ann/distdiag",
        sys.base_prefix: "/usr/local",
    }
    for path, instead in places.items():
        text = text.replace(str(path), instead)
    text = re.sub(r"/distdiag-demo-\w+", "", text)
    text = re.sub(r" (?:--via '[^']*enter \{host\} --'|--python /home/ann/venv/bin/python)", "", text)
    return re.sub(r"/tmp/distdiag-(?:net|job)-\w+", _HOME, text)


def between(text: str, first: str, *, lines: int, start: int = 0) -> str:
    """Keep the command line, the verdict and `lines` lines from the one that has `first`; what is left out is `...`."""
    rows = text.splitlines()
    at = next((number for number, row in enumerate(rows) if number > 2 and first in row), None)
    assert at is not None, f"no line has {first!r} in:\n{text}"
    head = rows[: 3 + start]
    shown = rows[at : at + lines]
    dots = ["..."] if at > len(head) else []
    end = ["...", "```"] if at + lines < len(rows) - 1 else ["```"]
    if shown and shown[-1] == "```":
        shown.pop()
    return "\n".join([*head, *dots, *shown, *end]) + "\n"


@contextlib.contextmanager
def torchrun(folder: Path, script: str, ranks: int, *before: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script of tests/samples as train.py under torchrun, until it hangs; ended afterwards, group and all."""
    shutil.copy(SCRIPTS / script, folder / "train.py")
    # torchrun polls its ranks all the time; the folder that wait_still reads is in the environment of the ranks alone.
    ranks_only = ["--no-python", "env", f"JOB_FOLDER={folder}", "python", *before, "train.py"]
    command = [str(BIN / "torchrun"), "--nproc-per-node", str(ranks), *ranks_only]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment(SAMPLE_FOLDER=str(folder)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            wait_until(lambda: len(list(folder.glob("ready-*"))) == ranks, 90, lambda: "the job did not start")
            wait_still(folder)
            yield process
        finally:
            end(folder, process)


def end(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Kill a job: every process that carries its folder in the environment."""
    mark = f"SAMPLE_FOLDER={folder}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)
    process.wait(20)


@sample
def hang(folder: Path) -> str:
    """The job of `distdiag demo hang`, as text, and as the picture of the README without the stacks of the waiting ranks."""
    demo = subprocess.Popen(
        [BIN / "distdiag", "demo", "hang"],
        env=environment(TMPDIR=str(folder)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert demo.stdout is not None
    try:
        next(line for line in demo.stdout if "Ctrl-C" in line)
        time.sleep(6)  # as a job that has waited for some time
        picture(folder, "distdiag hang", without=r"^(?:    .*(?:\(.*:\d+\)|library frames?)|no verdict from.*)\n")
        return run(folder, "distdiag hang")
    finally:
        demo.terminate()
        demo.communicate(timeout=20)


@sample
def pyspy_all(folder: Path) -> str:
    """A hung job, as text and as a picture."""
    (folder / "shard-0000.bin").write_bytes(b"12345678")
    os.mkfifo(folder / "shard-0007.bin")
    with torchrun(folder, "hangs.py", 4):
        picture(folder, "distdiag pyspy-all")
        return run(folder, "distdiag pyspy-all")


def picture(folder: Path, command: str, *, without: str = "(?!)") -> None:
    """Run a command on a terminal and write docs/images/COMMAND.svg, as rich exports it; `without`: lines left out."""
    from rich.console import Console
    from rich.text import Text

    parent, child = pty.openpty()
    with subprocess.Popen(
        ["sh", "-c", f"stty cols 92 rows 60; exec {command} 2>/dev/null"],
        cwd=folder,
        env={**environment(TERM="xterm-256color"), "COLUMNS": "92"},
        stdin=child,
        stdout=child,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(child)
        output = b""
        with contextlib.suppress(OSError):  # EIO is the end of a terminal
            while part := os.read(parent, 65536):
                output += part
        process.wait(60)
    os.close(parent)
    console = Console(record=True, width=92, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text(f"$ {command}", style="bold"))
    text = clean(folder, output.decode()).replace("\r\n", "\n").rstrip()
    console.print(Text.from_ansi(re.sub(r"\n{3,}", "\n\n", re.sub(without, "", text, flags=re.MULTILINE))))
    target = ROOT / "docs" / "images" / f"{command.split()[1]}.svg"
    target.parent.mkdir(exist_ok=True)
    svg = console.export_svg(title=command, unique_id="distdiag")
    target.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


@sample
def gpu_test(folder: Path) -> str:
    """One of four ranks is stopped."""
    return run(folder, "distdiag gpu-test --nproc 4 --stall 5 --inject stop:2")


@sample
def gpu_test_ok(folder: Path) -> str:
    """Two ranks on the CPU, with nothing wrong."""
    return run(folder, "distdiag gpu-test")


@sample
def gpu_test_port(folder: Path) -> str:
    """Two nodes, of which one drops the rendezvous port."""
    need_network()
    with Network(2) as network:
        network["node1"].drop(29500)
        shown = "distdiag gpu-test --hosts node[1-2] --nproc 1 --master-port 29500"
        text = run(
            folder,
            shown,
            wrap=tuple(network.client.command()),
            env=network.client_env(),
            typed=f"{shown} --via {shlex.quote(network.via)} --python {sys.executable}",
        )
        return between(text, "FAIL  gpu-test.", lines=30)


@sample
def isolate(folder: Path) -> str:
    """Six ranks, and one link that drops its packets."""
    return run(folder, "distdiag gpu-test --isolate --nproc 6 --inject block:1-4")


@sample
def allreduce_bench(folder: Path) -> str:
    """Two ranks on the CPU."""
    return run(folder, "distdiag allreduce-bench --nproc 2 --sizes 1KiB:64MiB:x8")


@sample
def logs(folder: Path) -> str:
    """One of four ranks raises."""
    shutil.copy(SCRIPTS / "fails.py", folder / "train.py")
    run_quietly(folder, "torchrun --nproc-per-node 4 --log-dir torchrun --tee 3 train.py >job.log 2>&1")
    return run(folder, "distdiag logs job.log")


@sample
def json(folder: Path) -> str:  # the sample's name is the page's
    """The document of the sample `logs`, without its data."""
    logs(folder)
    shown = "distdiag logs --json job.log"
    text = run(folder, shown)
    document = _json.loads(text.partition("\n")[2].partition("\n")[2].rpartition("```")[0])
    document["data"] = {"...": "..."}
    return block(folder, shown, _json.dumps(document, indent=2))


@sample
def flight_recorder(folder: Path) -> str:
    """Rank 2 skips a collective."""
    shutil.copy(PROGRAMS / "records_collectives.py", folder / "train.py")
    run_quietly(folder, f"python train.py {folder} skip_2")
    (folder / "skip_2").rename(folder / "fr")
    return run(folder, "distdiag flight-recorder fr")


@sample
def core_bt(folder: Path) -> str:
    """A segmentation fault below ctypes."""
    need_cores()
    shutil.copy(PROGRAMS / "dies_by_segv.py", folder / "crash.py")
    run_quietly(folder, "ulimit -c unlimited; python crash.py")
    cores_in(folder)[0].rename(folder / "core.4711")
    return run(folder, "distdiag core-bt core.4711")


@sample
def trace_show(folder: Path) -> str:
    """A job that was killed while one rank slept."""
    lines = folder / "lines"
    with torchrun(folder, "sleeps.py", 4, "-m", "distdiag", "trace", "py", "--dir", str(lines), "--"):
        pass
    return run(folder, "distdiag trace show lines")


@sample
def trace_blocked(folder: Path) -> str:
    """Rank 0 receives from rank 1, which sleeps."""
    with Job("waits_on_another_rank", 2, env={"HOW": "sleep"}) as job:
        job.wait_still()
        time.sleep(6)  # who has waited for less than 5 s may only be slow
        return run(folder, "distdiag trace blocked")


@sample
def trace_sys(folder: Path) -> str:
    """The same job, under strace."""
    assert shutil.which("strace"), "strace is not installed"
    with Job("waits_on_another_rank", 2, env={"HOW": "sleep"}) as job:
        job.wait_still()
        shown = "distdiag trace sys --rank 0-1 --for 4s"
        return run(folder, shown)


@sample
def overflow(folder: Path) -> str:
    """A feed-forward that overflows float16."""
    shutil.copy(SCRIPTS / "overflows.py", folder / "train.py")
    shown = "distdiag overflow --frames 3 -- train.py 1e6"
    return run(folder, shown, typed=f"exec 2>&1; {shown}")


@sample
def overflow_show(folder: Path) -> str:
    """The same model close to the limit."""
    frames(folder, "30000", "frames-1.jsonl")
    return run(folder, "distdiag overflow show frames-1.jsonl")


def frames(folder: Path, scale: str, name: str) -> None:
    """Keep the frames of a run."""
    script = str(SCRIPTS / "overflows.py")
    run_quietly(folder, shlex.join([sys.executable, script, scale, name]))


@sample
def floatcmp(folder: Path) -> str:
    """RoPE frequencies, calculated in two ways."""
    script = (
        "import torch; x = torch.arange(0, 20, 2) / 20; "
        "torch.save({'inv_freq': 10.0**x}, 'cpu.pt'); "
        "torch.save({'inv_freq': torch.exp(x * torch.log(torch.tensor(10.0)))}, 'gpu.pt'); "
        "torch.save({'inv_freq': 10.0 ** x.double()}, 'float64.pt')"
    )
    run_quietly(folder, shlex.join([sys.executable, "-c", script]))
    return run(folder, "distdiag floatcmp cpu.pt gpu.pt --reference float64.pt --worst 1")


@sample
def sync_check(folder: Path) -> str:
    """A weight that differs on rank 2."""
    script = PROGRAMS / "checks_sync.py"
    (folder / "parameter").mkdir()
    run_quietly(folder, f"torchrun --standalone --nproc-per-node 3 {script} {folder} parameter")
    (folder / "parameter" / "saved").rename(folder / "sync")
    return run(folder, "distdiag sync-check sync")


@sample
def estimate(folder: Path) -> str:
    """A step of BLOOM-176B."""
    shape = {"model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "vocab_size": 250880}
    (folder / "config.json").write_text(_json.dumps(shape))
    sizes = "--params 176.2B --config config.json --batch 2048 --seq 2048 --step-time 105.22 --gpus 384 --gpu A100"
    return run(folder, f"distdiag estimate {sizes} --recompute --layout tp=4,pp=12 --busbw 50")


@sample
def ports(folder: Path) -> str:
    """Four nodes, of which one lets nothing in."""
    need_network()
    with Network(4) as network:
        network["node3"].drop_ephemeral()
        shown = "distdiag ports --hosts node[1-4]"
        return run(
            folder,
            shown,
            wrap=tuple(network.client.command()),
            env=network.client_env(),
            typed=f"{shown} --via {shlex.quote(network.via)} --python {sys.executable}",
        )


@sample
def cuda_env(folder: Path) -> str:
    """A modelled machine (no GPU is needed): 8 x H100, an old toolkit first on PATH, a compiler that is too new."""
    machine = Machine(folder / "machine")
    machine.torch("2.9.1+cu128", "12.8", archs="70 75 80 86 90 100 120", seen=8)
    machine.driver("570.124.06", ";".join(["NVIDIA H100 80GB HBM3:9.0"] * 8))
    machine.toolkit("12.8")
    old = machine.toolkit("11.0")
    machine.compiler("gcc", "15.1.0")
    machine.compiler("gcc-13", "13.3.0")
    machine.compiler("c++", "13.3.0")
    machine.path = [str(old / "bin")]
    machine.write("/etc/os-release", 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n')
    (folder / "kept").mkdir()
    save_facts(machine, folder / "kept")
    text = run(folder, "distdiag cuda-env", typed="distdiag cuda-env --from kept")
    text = text.replace(f"{_HOME}/machine/root", "").replace(f"{_HOME}/machine/venv", "/venv")
    text = text.replace(os.uname().release, "6.1.0-39-amd64")
    return text.replace(f"{_HOME}/machine", "/home/ann")


def save_facts(machine: Machine, folder: Path) -> None:
    """Keep the facts of a modelled machine as `cuda-env --save` does."""
    from distdiag.cluster.targets import Cluster
    from distdiag.commands.cuda_env.types import Goal, Request
    from distdiag.saved_facts import Gathered, save

    with pytest.MonkeyPatch.context() as patch:
        facts = machine.examine(patch)
    save(str(folder), "cuda-env", Request(cluster=Cluster(), goal=Goal("all")), Gathered(facts=[facts]))


def pages() -> list[Path]:
    """List the pages that may have samples."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def write(made: dict[str, str]) -> None:
    """Write the samples into the pages."""
    for page in pages():
        text = page.read_text()
        new = _BLOCK.sub(lambda match: f"{match[1]}{made.get(match['name'], match['text'])}{match[4]}", text)
        if new != text:
            page.write_text(new)


def make(name: str) -> str | None:
    """Make one sample; None, with the reason on stderr, where it cannot be made here."""
    with tempfile.TemporaryDirectory(prefix="distdiag-sample-") as folder:
        try:
            return SAMPLES[name](Path(folder))
        except (Exception, pytest.skip.Exception):  # noqa: BLE001 - the others are still made
            print(f"{name}: not made\n{traceback.format_exc(limit=-4)}", file=sys.stderr)
            return None


def alone() -> None:
    """Start this again in a process namespace of its own, so that no other job of this machine is in a sample."""
    inside = "DISTDIAG_SAMPLES_INSIDE"
    if os.geteuid() == 0 and inside not in os.environ:
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, *sys.argv]
        os.execvpe("unshare", command, {**os.environ, inside: "1"})


def main() -> None:
    """Make the samples that are named, or all."""
    names = sys.argv[1:] or list(SAMPLES)
    if unknown := [name for name in names if name not in SAMPLES]:
        sys.exit(f"unknown: {', '.join(unknown)}; there are {', '.join(SAMPLES)}")
    alone()
    made = {}
    for name in names:
        print(name, file=sys.stderr, flush=True)
        text = make(name)
        if text is not None:
            made[name] = text
            print(text)
    write(made)
    sys.exit(0 if len(made) == len(names) else 1)


if __name__ == "__main__":
    main()
