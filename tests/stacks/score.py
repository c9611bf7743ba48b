#!/usr/bin/env python3.11
"""How often distdiag names the right rank of a hung job, on many training stacks, and no rank in a healthy job.

    python tests/stacks/score.py                      # all jobs of table.py, one round, 3 jobs at a time
    python tests/stacks/score.py ddp-sleep 'p2p-*'    # these; a name that ends in * is a pattern
    python tests/stacks/score.py --rounds 10 --out r.jsonl --parallel 4
    python tests/stacks/score.py --real               # no forks: each rank imports torch itself (about 4 times as long)
    python tests/stacks/score.py --list               # the jobs with their expected verdicts
    python tests/stacks/score.py --table r.jsonl      # only the table of results that are there

The virtual environments are made once, some gigabytes (or name others with --venv 311=PATH):

    for v in 311 312 313; do python3.${v#3} -m venv tests/stacks/v$v; tests/stacks/v$v/bin/pip install torch==2.13.0; done
    tests/stacks/v311/bin/pip install transformers accelerate lightning ray uvloop

Needs root (unshare), and v311, v312, v313 beside this file. Each job runs in a pid namespace and /proc of its own, so
distdiag sees nothing else of this machine; loopback is shared, ports are free ones. Jobs of a plain environment have
their ranks forked from a process that has imported torch (zygote.py; their environ and cmdline in /proc are as if they
had been started; below `<module> jobs.py` stand two frames of zygote.py); torchrun & co. are really started. When the job is ready (180 s) and,
if hung, everybody has rested for 6 s (no step done, hardly any CPU time but the culprits'), these run inside:
`distdiag hang --json`, `distdiag pyspy-all --json` and `distdiag trace blocked --json` (the order alternates from round
to round). Then the namespace's init ends, which ends all in it; what is left with the job's mark in its environment is
reported.

Each row has `tool`: the commit asked, and +hash if its tree had changes.

--out (JSON lines, default results.jsonl; made anew): job, round, status, per command {class, verdict, exit, named,
summary, seconds}. <out>.wrong.json has the whole documents of those that are not right or unknown; docs/ has all.

status  scored, or: not-ready (with the end of its log), not-hung / no-progress (the job did not do what it should; its
        answers are kept, and not counted).
right   hung: verdict fail or warn, and the ranks of the fail and warn findings are exactly the culprits (a cycle: its
        ranks). healthy: verdict ok, or warn that names no rank but the one that is really slow.
unknown verdict unknown and nobody innocent is named; or fail/warn, and no rank at all is named (`unnamed` in the row).
partial hung, some of the culprits and nobody innocent (cycles).
wrong   an innocent is named in a fail or warn finding; ok on a hung job; fail on a healthy one; a rank's label that
        does not belong to the pid it stands with; no answer in 90 s, or no JSON.
Where a finding has no ranks but pids, these are taken to the ranks that they are, or that their ancestors are.
"""

from __future__ import annotations

import argparse
import atexit
import concurrent.futures
import fnmatch
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from table import JOBS, Job  # noqa: E402

COMMANDS = {
    "hang": ["hang", "--json"],
    "pyspy-all": ["pyspy-all", "--json"],
    "trace blocked": ["trace", "blocked", "--json"],
}
READY_S, REST_S, SETTLE_S, ANSWER_S = 180.0, 6.0, 60.0, 90.0
NICE = 10
TICKS = os.sysconf("SC_CLK_TCK")


# ---- inside the namespace: start, wait, ask ----


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def script(job: Job, python: str, port: int) -> str:
    program = f"{python} {HERE}/jobs.py {job.name}"
    address = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    if job.launch == "torchrun":
        line = f"{python} -m torch.distributed.run --nproc-per-node {job.world} --master-addr 127.0.0.1 --master-port {port}"
        return f"{line} {HERE}/jobs.py {job.name}\n"
    if job.launch == "accelerate":
        line = f"{python} -m accelerate.commands.launch --multi_gpu --num_machines 1 --mixed_precision no --dynamo_backend no"
        return f"ACCELERATE_USE_CPU=true {line} --num_processes {job.world} --main_process_ip 127.0.0.1 --main_process_port {port} {HERE}/jobs.py {job.name}\n"
    if job.launch in ("spawn", "ray"):
        return f"STACKS_PORT={port} {program}\n"
    if job.launch == "lightning":
        return f"{address} {program}\n"
    lines = []
    for rank in range(job.world):
        feed = "sleep 1000000 | " if job.fault in ("input", "pdb") else ""
        lines.append(f"{feed}RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={job.world} {address} {program} &")
    return "\n".join([*lines, "wait", ""])


def cpu_seconds(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[11]) + int(fields[12])) / TICKS


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def environment(job: Job, folder: Path) -> dict[str, str]:
    """What every process of the job has in its environment."""
    scratch = folder / "t"
    scratch.mkdir(exist_ok=True)
    return {
        **{key: os.environ[key] for key in ("PATH", "HOME", "LANG", "STACKS_ID") if key in os.environ},
        **{"STACKS_DIR": str(folder), "STACKS_NAME": job.name, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        **{"TP_SOCKET_IFNAME": "lo", "TMPDIR": str(scratch), "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        **{
            "RAY_raylet_start_wait_time_s": "150",
            "RAY_DISABLE_MEMORY_MONITOR": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        **{"TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"), "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"},
        "PYTHONDONTWRITEBYTECODE": "1",
    }


class Launcher:
    """The process that a zygote made to start the ranks: our child, as exec keeps these."""

    def __init__(self, pid: int) -> None:
        self.pid, self.ended = pid, False

    def poll(self) -> int | None:
        if not self.ended:
            self.ended = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        return 0 if self.ended else None


class Inside:
    def __init__(self, job: Job, folder: Path, python: str, tool: str) -> None:
        self.job, self.folder, self.python, self.tool = job, folder, python, tool
        self.result: dict[str, object] = {}

    def pids(self) -> dict[int, int]:
        found = {}
        for rank in range(self.job.world):
            path = self.folder / f"READY.{rank}"
            if path.exists():
                found[rank] = int(path.read_text())
        return found

    def steps(self) -> list[int]:
        paths = [self.folder / f"STEP.{rank}" for rank in range(self.job.world)]
        return [int.from_bytes(path.read_bytes(), "little") if path.exists() else -1 for path in paths]

    def start(self) -> Launcher | subprocess.Popen[bytes]:
        if "STACKS_LAUNCHER" in os.environ:
            return Launcher(int(os.environ["STACKS_LAUNCHER"]))
        port = free_port()
        (self.folder / "run.sh").write_text("#!/bin/bash\n" + script(self.job, self.python, port))
        log = (self.folder / "log").open("wb")
        return subprocess.Popen(
            ["/bin/bash", str(self.folder / "run.sh")],
            cwd=self.folder,
            env=environment(self.job, self.folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def wait(self, condition, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            if self.launcher.poll() is not None:
                return condition()
            time.sleep(0.25)
        return False

    def rested(self) -> bool:
        """True once only the culprits have been active for REST_S."""
        end, since, before = time.monotonic() + SETTLE_S, time.monotonic(), None
        while time.monotonic() < end:
            others = {rank: pid for rank, pid in self.pids().items() if rank not in self.job.culprits}
            now = (self.steps(), {rank: cpu_seconds(pid) for rank, pid in others.items()})
            if None in now[1].values():
                return False
            if before and (before[0] != now[0] or any(now[1][r] - before[1].get(r, 0) > 0.12 for r in now[1])):
                since = time.monotonic()
            before = now
            if time.monotonic() - since >= REST_S:
                return True
            time.sleep(1)
        return False

    def rank_of(self, pid: int, ranks: dict[int, int]) -> int | str:
        first = pid
        while pid > 1:
            if pid in ranks:
                return ranks[pid]
            pid = parent(pid)
        return f"pid {first}"

    def ask(self, command: str) -> dict[str, object]:
        begun = time.monotonic()
        try:
            done = subprocess.run(
                [self.tool, *COMMANDS[command]],
                capture_output=True,
                timeout=ANSWER_S,
                text=True,
                stdin=subprocess.DEVNULL,
            )
            answer: dict[str, object] = {"exit": done.returncode, "stderr": done.stderr[-500:]}
            answer["document"] = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            answer = {"exit": None, "error": f"no answer in {ANSWER_S:.0f} s"}
        except ValueError:
            answer["error"] = f"no JSON: {done.stdout[-300:]!r}"
        answer["seconds"] = round(time.monotonic() - begun, 1)
        if "document" in answer:
            ranks = {pid: rank for rank, pid in self.pids().items()}
            named: set[int | str] = set()
            labels = []
            for finding in answer["document"]["findings"]:  # type: ignore[index]
                if finding["level"] not in ("fail", "warn"):
                    continue
                where = finding["where"]
                by_pid = {self.rank_of(pid, ranks) for pid in where.get("pids", [])}
                named |= set(where["ranks"]) or by_pid
                known = {one for one in by_pid if isinstance(one, int)}
                if where["ranks"] and known and not known & set(where["ranks"]):
                    labels.append(
                        f"{finding['id']}: ranks {where['ranks']} but its pids are {sorted(map(str, by_pid))}"
                    )
            answer.update(named=sorted(named, key=str), labels=labels)
        return answer

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-3000:]

    def go(self, order: list[str]) -> dict[str, object]:
        begun = time.monotonic()
        self.launcher = self.start()
        if not self.wait(lambda: len(self.pids()) == self.job.world, READY_S):
            return {"status": "not-ready", "log": self.log(), "ready": sorted(self.pids())}
        ready_s = time.monotonic() - begun
        if self.job.hung:
            if not self.rested():
                return {"status": "not-ready", "log": self.log(), "why": "did not come to rest", "steps": self.steps()}
        else:
            time.sleep(REST_S)
        before = self.steps()
        answers = {command: self.ask(command) for command in order}
        status = "scored"
        if self.job.hung:
            alive = {rank for rank, pid in self.pids().items() if cpu_seconds(pid) is not None}
            expected = set(range(self.job.world)) - (self.job.culprits if self.job.train == "exit" else set())
            if self.steps() != before or alive != expected:
                status = "not-hung"
        else:
            steps = range(self.job.world)
            slow = (
                self.job.culprits if self.job.train in ("mpf", "rank0", "compile", "export", "slowinit") else set(steps)
            )
            if self.job.train == "join":
                slow = set(steps) - {1}

            def busy() -> float:
                """CPU seconds of the slow ranks and their children."""
                ranks = {pid: rank for rank, pid in self.pids().items()}
                live = [int(name) for name in os.listdir("/proc") if name.isdigit()]
                return sum(cpu_seconds(pid) or 0 for pid in live if self.rank_of(pid, ranks) in slow)

            worked = busy()

            def on() -> bool:
                if self.job.train == "compile":  # one compilation may take minutes here
                    return busy() > worked + 1
                return all(self.steps()[rank] > before[rank] for rank in slow)

            if not self.wait(on, 90):
                status = "no-progress"
        return {
            "status": status,
            "answers": answers,
            "ready_s": round(ready_s, 1),
            "log": self.log() if status != "scored" else "",
            "steps": [before, self.steps()],
        }


def inside(arguments: list[str]) -> None:
    name, folder, python, tool, order = arguments
    os.nice(max(0, NICE - os.nice(0)))
    # The children of dead processes are reparented to us: the kernel reaps them.
    result = Inside(JOBS[name], Path(folder), python, tool).go(order.split(","))
    (Path(folder) / "result.json").write_text(json.dumps(result))


# ---- outside: namespaces, judging, tables ----


def judge(job: Job, answer: dict[str, object]) -> tuple[str, str]:
    if "document" not in answer:
        return "wrong", str(answer.get("error"))
    if answer["labels"]:
        return "wrong", f"label: {answer['labels']}"
    verdict, named = answer["document"]["verdict"], set(answer["named"])  # type: ignore[index,call-overload]
    innocent = named - job.culprits
    if innocent:
        return "wrong", f"innocent: {sorted(map(str, innocent))}"
    if verdict == "unknown":
        return "unknown", "names " + str(sorted(named)) if named else ""
    if job.hung:
        if verdict == "ok":
            return "wrong", "ok, but it hangs"
        if named == job.culprits:
            return "right", ""
        return ("partial", "not all") if named else ("unknown", "unnamed")
    if verdict == "fail":
        return "wrong", "fail, but it is healthy"
    return "right", "names the slow one" if named else ""


def left(mark: str) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                if f"STACKS_ID={mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
            except OSError:
                continue
    return found


LIMIT_S = READY_S + SETTLE_S + len(COMMANDS) * ANSWER_S + 60


def unshared(folder: Path, mark: str, inside_: list[str]) -> None:
    """All real processes: python for every rank, or torchrun and its children."""
    with (folder / "inside.log").open("wb") as log:
        process = subprocess.Popen(
            ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child=SIGKILL", *inside_],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "STACKS_ID": mark},
            start_new_session=True,
        )
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def forked(job: Job, options: argparse.Namespace) -> bool:
    return not options.real and job.launch == "env" and job.train not in ("hf", "accelerate", "compile")


class Zygotes:
    """For each python one process that has imported torch, from which ranks are forked."""

    def __init__(self) -> None:
        self.lock, self.running = threading.Lock(), {}

    def start(self, job: Job, folder: Path, python: str, mark: str, inside_: list[str]) -> None:
        place = {**environment(job, folder), "STACKS_ID": mark}
        request = {
            "name": job.name,
            "folder": str(folder),
            "world": job.world,
            "feed": job.fault in ("input", "pdb"),
            "python": python,
            "port": free_port(),
            "environment": place,
            "inside": inside_,
        }
        with self.lock:
            if python not in self.running:
                nobody = HERE / "w" / "zygote"
                nobody.mkdir(parents=True, exist_ok=True)
                plain = {**environment(job, nobody), "STACKS_ID": "zygote"}
                log = (HERE / f"zygote.{job.py}.log").open("wb")
                self.running[python] = subprocess.Popen(
                    ["nice", "-n", str(NICE), python, "-B", str(HERE / "zygote.py"), "-" * 120],
                    env={**plain, "PAD": "x" * 4000},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                )
            zygote = self.running[python]
            zygote.stdin.write(json.dumps(request).encode() + b"\n")
            zygote.stdin.flush()
        end = time.monotonic() + LIMIT_S
        while not (folder / "ended").exists() and time.monotonic() < end and zygote.poll() is None:
            time.sleep(0.2)
        if not (folder / "ended").exists() and (folder / "init").exists():
            os.kill(int((folder / "init").read_text()), signal.SIGKILL)

    def end(self) -> None:
        for zygote in self.running.values():
            zygote.kill()  # its containers die with it, and their processes with these
            zygote.wait()


def version(tool: str) -> str:
    """The commit of the distdiag that was asked, and whether its tree had changes: others may be working on it."""
    folder = Path(tool).parent
    while folder != folder.parent and not (folder / ".git").exists() and not (folder / "COMMIT").exists():
        folder = folder.parent
    if (folder / "COMMIT").exists():
        return (folder / "COMMIT").read_text().strip()
    git = ["git", "--no-optional-locks", "-C", str(folder)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    diff = subprocess.run([*git, "diff", "HEAD", "--", "distdiag"], capture_output=True).stdout
    return f"{head}+{hashlib.sha1(diff).hexdigest()[:6]}" if diff else head


def run_one(job: Job, round_: int, options: argparse.Namespace) -> dict[str, object]:
    mark = f"{os.getpid()}-{round_}-{job.name}"
    folder = HERE / "w" / f"{os.getpid()}.{round_}.{list(JOBS).index(job.name)}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    order = list(COMMANDS) if round_ % 2 == 0 else list(reversed(COMMANDS))
    python = f"{options.venvs.get(job.py, HERE / ('v' + job.py))}/bin/python"
    begun = time.monotonic()
    inside_ = [
        sys.executable,
        "-B",
        str(HERE / "score.py"),
        "--inside",
        job.name,
        str(folder),
        python,
        options.tool,
        ",".join(order),
    ]
    if forked(job, options):
        options.zygotes.start(job, folder, python, mark, inside_)
    else:
        unshared(folder, mark, inside_)
    row: dict[str, object] = {
        "job": job.name,
        "round": round_,
        "hung": job.hung,
        "culprits": sorted(job.culprits),
        "py": job.py,
    }
    try:
        result = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        result = {
            "status": "not-ready",
            "log": "no result: " + (folder / "inside.log").read_text(errors="replace")[-1500:],
        }
    row.update({key: value for key, value in result.items() if key != "answers"})
    for command, answer in result.get("answers", {}).items():
        document = answer.get("document") or {}
        kind, note = judge(job, answer)
        row[command] = {
            "class": kind,
            "note": note,
            "verdict": document.get("verdict"),
            "exit": answer["exit"],
            "named": answer.get("named"),
            "summary": document.get("summary", answer.get("error")),
            "seconds": answer["seconds"],
            "findings": [
                [one["id"], one["level"], one["where"]["ranks"], one["where"]["pids"]]
                for one in document.get("findings", [])
            ],
        }
        docs = HERE / "docs"
        docs.mkdir(exist_ok=True)
        (docs / f"{job.name}.{command.replace(' ', '-')}.{round_}.json").write_text(json.dumps(answer, indent=1))
        if kind in ("wrong", "partial"):
            row.setdefault("documents", {})[command] = document or answer  # type: ignore[index]
    row["tool"] = version(options.tool)
    time.sleep(0.2)
    row["left"] = left(mark)
    row["seconds"] = round(time.monotonic() - begun, 1)
    shutil.rmtree(folder, ignore_errors=True)
    return row


def table(rows: list[dict]) -> None:
    print(f"\n{'job':24} {'status':10} " + "  ".join(f"{command:34}" for command in COMMANDS))
    for row in sorted(rows, key=lambda row: (not row["hung"], row["job"], row["round"])):
        cells = []
        for command in COMMANDS:
            cell = row.get(command)
            cells.append(f"{cell['class']:8}{cell['verdict'] or '-':8}{str(cell['named']):18}" if cell else " " * 34)
        print(f"{row['job']:24} {row['status']:10} {'  '.join(cells)} truth {row['culprits']}")
    print()
    scored = [row for row in rows if row["status"] == "scored"]
    print("tool:", ", ".join(sorted({row.get("tool", "?") for row in rows})))
    print(
        f"{len(rows)} runs of {len({row['job'] for row in rows})} jobs, scored {len(scored)}; others: "
        + (", ".join(f"{row['job']} {row['status']}" for row in rows if row["status"] != "scored") or "none")
    )
    for command in COMMANDS:
        for label, some in (
            ("hung", [row for row in scored if row["hung"]]),
            ("healthy", [row for row in scored if not row["hung"]]),
        ):
            counts = {
                kind: sum(row[command]["class"] == kind for row in some)
                for kind in ("right", "unknown", "partial", "wrong")
            }
            print(f"  {command:14} {label:8} " + "  ".join(f"{kind} {count:3}" for kind, count in counts.items()))
    for command in COMMANDS:
        for row in scored:
            if row[command]["class"] in ("wrong", "partial"):
                print(
                    f"\n{row[command]['class'].upper()} {command}: {row['job']} (truth {row['culprits']}) {row[command]['note']}\n    {row[command]['summary']}"
                )
    if any(row["left"] for row in rows):
        print("LEFT BEHIND:", [(row["job"], row["left"]) for row in rows if row["left"]])


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=3)
    parser.add_argument("--out", default=str(HERE / "results.jsonl"))
    parser.add_argument("--tool", default=str(HERE.parents[1] / ".venv/bin/distdiag"))
    parser.add_argument("--venv", action="append", default=[], metavar="311=PATH")
    parser.add_argument("--real", action="store_true", help="fork no ranks from one that has torch already: slower")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", metavar="FILE")
    options = parser.parse_args()
    options.venvs = dict(one.split("=", 1) for one in options.venv)
    if options.table:
        table([json.loads(line) for line in Path(options.table).read_text().splitlines()])
        return
    names = [name for name in JOBS if not options.jobs or any(fnmatch.fnmatch(name, one) for one in options.jobs)]
    unheard = [one for one in options.jobs if not fnmatch.filter(JOBS, one)]
    if unheard:
        parser.error(f"no such jobs: {unheard}")
    if options.list:
        for name in names:
            job = JOBS[name]
            print(
                f"{name:24} py{job.py} {job.launch:10} world {job.world} {'hung, culprit ' if job.hung else 'healthy, slow '}{sorted(job.culprits)} {job.why}"
            )
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begun = time.monotonic()
    rows: list[dict] = []
    work = [(JOBS[name], round_) for round_ in range(options.rounds) for name in names]
    options.zygotes = Zygotes()
    atexit.register(options.zygotes.end)
    with open(options.out, "w") as out, concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
        for done in concurrent.futures.as_completed(
            [pool.submit(run_one, job, round_, options) for job, round_ in work]
        ):
            row = done.result()
            rows.append(row)
            print(json.dumps({key: value for key, value in row.items() if key != "documents"}), file=out, flush=True)
            cells = "  ".join(
                f"{command}: {row[command]['class']} {row[command]['named']} {row[command]['seconds']}s"
                for command in COMMANDS
                if command in row
            )
            print(
                f"[{time.monotonic() - begun:5.0f}s {len(rows)}/{len(work)}] {row['job']:22} {row['status']} {row['seconds']}s  {cells}",
                flush=True,
            )
    options.zygotes.end()
    wrong = {f"{row['job']}#{row['round']}": row["documents"] for row in rows if "documents" in row}
    Path(options.out + ".wrong.json").write_text(json.dumps(wrong, indent=1))
    table(rows)
    print(f"\n{time.monotonic() - begun:.0f} s; documents of the wrong ones: {options.out}.wrong.json")


if __name__ == "__main__":
    main()
