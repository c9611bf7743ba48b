"""The files of a bundle: redacted facts, verdicts on these, a manifest; cut to size. Pure."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec  # noqa: TID253 - this module is only imported when there are facts

from distdiag import __version__, runner
from distdiag.bundle_file import pack
from distdiag.cluster.hosts import fold
from distdiag.commands.bundle.collect import Names
from distdiag.commands.bundle.find_job import in_words
from distdiag.commands.bundle.redact import Redactor, learn
from distdiag.commands.bundle.types import Member, Verdict
from distdiag.diagnosis.wording import counted, format_size
from distdiag.errors import DistdiagError
from distdiag.output import as_page, document
from distdiag.saved_facts import decode, documents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.bundle.collect_all import Collected
    from distdiag.commands.bundle.types import NodeDetails, Request, TakenJob
    from distdiag.report import Report
    from distdiag.saved_facts import Gathered

MANIFEST = "MANIFEST.txt"
_WORST = ("fail", "unknown", "warn", "ok")
_WIDTH = 100
_SHARES = (1.0, 0.5, 0.25, 0.1, 0.0)
"""Shares of the logs' ends to keep, tried in turn until the file is small enough."""


@dataclass(kw_only=True)
class Composed:
    """The files of a bundle by name, with descriptions and the manifest's contents."""

    files: dict[str, bytes] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    hosts: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    job: list[str] = field(default_factory=list)
    """The job, and the processes read."""

    def add(self, name: str, content: bytes, about: str) -> None:
        """Add a file."""
        self.files[name] = content
        self.about[name] = about

    def members(self) -> tuple[Member, ...]:
        """List the files."""
        return tuple(
            Member(name=name, bytes=len(content), about=self.about[name]) for name, content in self.files.items()
        )


def compose(
    request: Request, job: TakenJob | None, details: Gathered[NodeDetails], collected: Sequence[Collected]
) -> tuple[Composed, Redactor]:
    """Compose the files. Raises DistdiagError if one of them would contain a secret."""
    raw = {
        each.part.name: [
            (name, json.loads(content)) for name, content in documents(each.part.name, each.request, each.gathered)
        ]
        for each in collected
    }
    own = [msgspec.to_builtins(replace(node, names=None)) for node in details.facts]
    trees = [*own, *(tree for files in raw.values() for _, tree in files)]
    redactor = Redactor(learn(_known(request, details, collected), trees))
    composed = Composed(hosts=[redactor.text(host, is_host=True) for host in _hosts(details, collected)])
    if job is not None:
        processes = [f"{redactor.text(each.host, is_host=True)}: {in_words(each)}" for each in job.processes]
        composed.job = [redactor.text(job.title), *processes]
    for each in collected:
        _add_part(composed, each, raw[each.part.name], redactor)
    composed.verdicts = in_order(composed.verdicts, job)
    for node, tree in zip(details.facts, own, strict=True):
        _add_node(composed, node.host, tree, redactor)
    composed.missing = {
        redactor.text(host, is_host=True): redactor.text(why) for host, why in _missing(details, collected).items()
    }
    for name, content in composed.files.items():
        if redactor.leaks(content):
            raise DistdiagError(f"nothing is written: {name} still has a secret", hint="please report this")
    return composed, redactor


def _known(request: Request, details: Gathered[NodeDetails], collected: Sequence[Collected]) -> Names:
    own = runner.merged([node.names for node in details.facts if node.names is not None])
    typed = [value for _, _, value in (text.partition("=") for text in request.cluster.env) if len(value) > 5]
    return Names(
        hosts=(*_hosts(details, collected), *own.get("hosts", ())),
        users=(*own.get("users", ()), *re.findall(r"([\w.-]+)@", request.cluster.hosts)),
        homes=own.get("homes", ()),
        addresses=own.get("addresses", ()),
        secrets=(*own.get("secrets", ()), *typed),
    )


def _hosts(details: Gathered[Any], collected: Sequence[Collected]) -> list[str]:
    found: dict[str, None] = {}
    for gathered in (*(each.gathered for each in collected), details):
        found.update(dict.fromkeys([*(row.host for row in gathered.rows), *(facts.host for facts in gathered.facts)]))
        found.update(dict.fromkeys([*gathered.refusals, *gathered.missing]))
    return list(found)


def _missing(details: Gathered[Any], collected: Sequence[Collected]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, gathered in (*((each.part.name, each.gathered) for each in collected), ("logs and limits", details)):
        found.update({host: error.message for host, error in gathered.refusals.items() if host not in found})
        found.update({host: f"{name}: {why}" for host, why in gathered.missing.items() if host not in found})
    return found


def _add_part(composed: Composed, each: Collected, files: list[tuple[str, Any]], redactor: Redactor) -> None:
    """Add one command's facts in the format of --save, and the verdict on the redacted facts."""
    name, subcommand = each.part.name, each.part.subcommand()
    redacted: list[tuple[str, bytes]] = []
    for _, tree in files:
        clean = redactor.tree(tree)
        file = _file_name(f"{name}.{clean['host']}")[:190]
        file = f"{file}.{clean['number']}.json" if f"facts/{file}.json" in composed.files else f"{file}.json"
        content = msgspec.json.encode(clean)
        redacted.append((file, content))
        composed.add(f"facts/{file}", content, f"{clean['host']}: {each.part.about}")
    if each.report is None or not redacted:
        return
    request, gathered = decode(
        [(Path("facts", file), content) for file, content in redacted], name, (subcommand.request, subcommand.facts)
    )
    report = subcommand.diagnose(request, gathered)
    page = as_page(
        report, lambda made: subcommand.view(request, gathered, made), findings_in_view=subcommand.findings_in_view
    )
    composed.add(f"verdicts/{name}.txt", page.encode("utf-8", "replace"), f"what `distdiag {name} --from` says of them")
    text = json.dumps(document(report), indent=1)
    composed.add(f"verdicts/{name}.json", text.encode("utf-8", "replace"), "the same, for programs")
    composed.verdicts.append(
        Verdict(
            command=name,
            verdict=str(report.verdict),
            summary=report.summary,
            same=_essence(report) == _essence(each.report),
        )
    )


def in_order(verdicts: Sequence[Verdict], job: TakenJob | None) -> list[Verdict]:
    """Sort verdicts, worst first; those perhaps unrelated to the job come last."""
    no_gpu = "no rank has a GPU open" if job is not None and not job.has_gpu else ""
    marked = [replace(each, aside=no_gpu if each.command == "cuda-env" else "") for each in verdicts]
    return sorted(marked, key=lambda each: (bool(each.aside), _WORST.index(each.verdict)))


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text)


def _essence(report: Report[Any]) -> list[Any]:
    """Return a report's findings by id, level and ranks, without names, for comparison."""
    return [
        report.verdict,
        getattr(report.data, "class_name", ""),
        sorted((finding.id, finding.level, finding.where.ranks) for finding in report.findings),
    ]


def _add_node(composed: Composed, host: str, tree: dict[str, Any], redactor: Redactor) -> None:
    """Add bundle's own facts of one node, with each log as a file; `tree`: NodeDetails as JSON."""
    name = _file_name(redactor.text(host, is_host=True))
    logs = tree.pop("logs")
    del tree["names"]
    clean = redactor.tree(tree)
    clean["logs"] = []
    for number, log in enumerate(logs):
        path = redactor.text(log["path"])
        entry = {"path": path, "rank": log["rank"], "size_bytes": log["size_bytes"], "error": log["error"]}
        if log["text"]:
            entry["file"] = f"logs/{name}/{number}-{_file_name(PurePosixPath(path).name)[:80]}"
            text = redactor.text(log["text"]).encode("utf-8", "replace")
            rank = "" if log["rank"] is None else f" of rank {log['rank']}"
            composed.add(entry["file"], text, f"the end{rank} of {path}, {format_size(log['size_bytes'])} in all")
        clean["logs"].append(entry)
    content = json.dumps(clean, indent=1).encode("utf-8", "replace")
    about = f"{name}: limits, cgroup, settings and command line of each rank"
    composed.add(f"nodes/{name}.json", content, about)


def as_text(composed: Composed) -> str:
    """Return the text of all files under their names, with JSON indented."""
    parts = []
    for name, content in composed.files.items():
        text = json.dumps(json.loads(content), indent=1) if name.startswith("facts/") else content.decode()
        parts.append(f"==> {name} <==\n{text.rstrip()}\n")
    return "\n".join(parts)


def packed(request: Request, composed: Composed, redactor: Redactor, at: float) -> bytes:
    """Pack the files; if too large, shorten the ends of logs and record that."""
    logs = {name: content for name, content in composed.files.items() if name.startswith("logs/")}
    for share in _SHARES:
        for name, content in logs.items():
            kept = content[len(content) - int(share * len(content)) :]
            composed.files[name] = kept if share == 1.0 else kept[kept.find(b"\n") + 1 :]
        if share < 1.0 and logs:
            composed.cut = [f"of the ends of {counted(len(logs), 'log')}, {share:.0%} is kept: --max-size"]
        manifest = _manifest(composed, redactor, at).encode()
        data = pack([(MANIFEST, manifest), *composed.files.items()], at)
        if len(data) <= request.most_bytes or not logs:
            break
    if len(data) > request.most_bytes:
        composed.cut.append(f"the facts alone take {format_size(len(data))}: nothing of them is left out")
    return data


def _manifest(composed: Composed, redactor: Redactor, at: float) -> str:
    import time

    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
    lines = [
        f"Evidence of a distributed PyTorch job, collected by distdiag {__version__} on {day}.",
        "",
        f"Of {composed.job[0]}" if composed.job else "No rank was found: it has only what the nodes say themselves.",
        *(f"  {line}" for line in composed.job[1:]),
        f"Hosts: {fold(composed.hosts) or 'none'}",
        *(f"  not complete: {host}: {why}" for host, why in composed.missing.items()),
        *(f"  cut: {sentence}" for sentence in composed.cut),
        "",
        "Verdicts:",
        *(f"  {verdict_in_words(each)}" for each in composed.verdicts),
        "",
        "To read it with distdiag:",
        *(f"  distdiag {each.command} --from FILE" for each in composed.verdicts),
        "",
        "Files:",
        *(
            f"  {name}  ({format_size(len(content))}) {composed.about[name]}"
            for name, content in composed.files.items()
        ),
        "",
        "Redacted: host names, domains, addresses, users, home folders, mail addresses and secrets are replaced.",
        "The same name has the same placeholder in all files (host-1, 10.0.0.1, user-1, secret-1).",
        "Loopback addresses, root and pids are unchanged. The map of placeholders stays with the sender.",
        "Project names in paths are not replaced.",
        f"Secrets replaced: {sum(redactor.secrets.values())}, by rule:",
        *(f"  {rule}: {number}" for rule, number in redactor.secrets.items()),
        "Variables of NCCL, Gloo, torch, CUDA, launchers and the loader: with values. All others: names only.",
        "Not in it: tensors, checkpoints, source files, local variables (except loop counters), cores, and",
        "raw recorder dumps (their decoded records are in facts/).",
        "",
    ]
    return "".join(f"{folded}\n" for line in lines for folded in _folded(line))


def _folded(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line, _WIDTH, subsequent_indent=f"{indent}    ", break_long_words=False, break_on_hyphens=False
    ) or [""]


def verdict_in_words(verdict: Verdict) -> str:
    """Format a verdict in one line; uppercase only if it matters to the job."""
    if verdict.aside:
        return f"{verdict.command}: {verdict.verdict}, but {verdict.aside}: {verdict.summary}"
    return f"{verdict.command}: {verdict.verdict.upper()}: {verdict.summary}"
