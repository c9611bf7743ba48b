"""The page of pyspy-all: embedded data, its size, and no escape from it."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from distdiag import pages
from distdiag.commands.pyspy_all import page as pyspy_page


def make_page(document: dict[str, Any]) -> str:
    return pages.make_page(document, pyspy_page.content)


HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&\u2028\udc80@data@"


def frame(function: str, line: int, file: str = "/home/me/train.py") -> dict[str, Any]:
    return {"function": function, "file": file, "line": line}


@functools.cache
def stack(number: int, depth: int = 2) -> list[dict[str, Any]]:
    """Frames of a rank in all_reduce, innermost first; `number` is the line of the step that it is in."""
    torch = "/usr/lib/python3/site-packages/torch/distributed/c10d_logger.py"
    library = [frame("all_reduce", 2806, torch), frame("wrapper", 81, torch)]
    steps = [frame(f"layer_{at}", 100 + at) for at in range(depth)]
    return [*library, frame("train_step", number), *steps, frame("main", 20), frame("<module>", 30)]


def process(rank: int | None, kind: str, frames: list[dict[str, Any]], **changes: object) -> dict[str, Any]:
    number = rank or 0
    threads = [
        {"name": "MainThread", "os_thread_id": 70_000 + number, "class": kind, "frames": frames},
        {"name": "pin_memory", "os_thread_id": 90_000 + number, "class": "data loading", "frames": stack(7, 2)},
    ]
    return {
        **{"host": f"node{number // 8}", "pid": 1000 + number, "rank": rank, "local_rank": number % 8, "job": "train"},
        **{"role": "rank", "state": "S", "status": "ok", "reason": "", "class": kind, "moving": False, "cpu_s": 1.5},
        **{"counters": {"step": 2}, "helpers": [], "threads": threads},
        **changes,
    }


def group(members: list[dict[str, Any]]) -> dict[str, Any]:
    first = members[0]
    frames = first["threads"][0]["frames"] if first["threads"] else []
    return {
        "job": first["job"],
        "ranks": [one["rank"] for one in members if one["rank"] is not None],
        "hosts": sorted({one["host"] for one in members}),
        "pids": [one["pid"] for one in members],
        "class": first["class"],
        "moving": False,
        "count": len(members),
        "frames": [{**one, "user": one["file"].startswith("/home")} for one in frames],
    }


def report(groups: list[list[dict[str, Any]]], *others: dict[str, Any], outlier: int | None = None) -> dict[str, Any]:
    """Make the document of a hung job; the group number `outlier` is stuck."""
    strange = groups[outlier] if outlier is not None else []
    where = {
        "hosts": sorted({one["host"] for one in strange}),
        "ranks": [one["rank"] for one in strange],
        "pids": [one["pid"] for one in strange],
    }
    finding = {
        **{
            "id": "hang.data-loading",
            "level": "fail",
            "title": "one rank is elsewhere",
            "detail": "the others wait",
        },
        **{"where": where, "evidence": ["read_batch (train.py:12)"]},
        "fix": {"text": "look at its data", "commands": ["ls -l '/data/shard 2'"]},
    }
    everyone = [one for members in groups for one in members] + list(others)
    ranks = [one for one in everyone if one["role"] == "rank"]
    job = {"job": "train", "launcher": "torchrun", "world_size": len(ranks), "ranks": len(ranks)}
    shown = {
        **where,
        "kind": "stuck",
        "class": "data loading",
        "frame": frame("read_batch", 12),
        "reason": "in no collective",
    }
    return {
        **{"schema": "distdiag/1", "version": "0.1.0", "command": "pyspy-all", "verdict": "fail", "exit_code": 1},
        **{"summary": "rank 2 is not where the others are", "findings": [finding] if strange else []},
        "data": {
            **{"samples": 2, "interval_s": 1.0, "processes": everyone, "outliers": [shown] if strange else []},
            "jobs": [{**job, "hosts": sorted({one["host"] for one in everyone})}] if everyone else [],
            "groups": [group(members) for members in groups],
        },
    }


def hung_job(ranks: int = 8) -> dict[str, Any]:
    """All ranks wait in all_reduce but rank 2, which reads data; rank 0 has a helper, and there is a launcher."""
    waiting = [
        process(rank, "communication wait", stack(44), helpers=[5000] if rank == 0 else [])
        for rank in range(ranks)
        if rank != 2
    ]
    reading = [frame("read_batch", 12), frame("__next__", 630, "/usr/lib/torch/dataloader.py"), *stack(44)[3:]]
    helper = process(0, "idle", [], pid=5000, role="helper", threads=[], status="exited", reason="it ended meanwhile")
    launcher = process(None, "launcher", stack(3, 1), pid=900, role="launcher", host="node0", local_rank=None)
    return report([waiting, [process(2, "data loading", reading)]], helper, launcher, outlier=1)


def large_job(ranks: int = 16_384, groups: int = 40) -> dict[str, Any]:
    """Ranks in groups of different sizes that part at the innermost line of ours; group 1 is stuck."""
    of_group: list[list[dict[str, Any]]] = [[] for _ in range(groups)]
    for rank in range(ranks):
        number = rank % 97 if rank % 97 < groups else 0
        of_group[number].append(process(rank, "communication wait", stack(number, 24)))
    return report(of_group, outlier=1)


def embedded(page: str) -> dict[str, Any]:
    match = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    content = json.loads(match[1])
    assert isinstance(content, dict)
    return content


class Elements(HTMLParser):
    """What a browser makes of the page: elements with their attributes, and comments."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.comments: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


def hostile_job() -> dict[str, Any]:
    """Write hostile text into every string of the report, but the roles and the command, which are our own words."""
    document = hung_job()

    def spoil(value: object) -> object:
        if isinstance(value, dict):
            return {key: inside if key in ("role", "command") else spoil(inside) for key, inside in value.items()}
        if isinstance(value, list):
            return [spoil(inside) for inside in value]
        return value + HOSTILE if isinstance(value, str) else value

    spoilt = spoil(document)
    assert isinstance(spoilt, dict)
    return spoilt


@pytest.mark.parametrize("document", [hung_job(), report([]), hostile_job()], ids=["hung", "nothing", "hostile"])
def test_the_page_has_the_elements_of_the_template_and_no_others(document: dict[str, Any]) -> None:
    page, plain = Elements(make_page(document)), Elements(make_page(report([])))
    assert page.tags == plain.tags
    assert page.comments == []
    assert [tag for tag, _ in page.tags].count("script") == 2


def test_the_policy_names_the_style_and_the_script_and_nothing_else() -> None:
    page = make_page(hostile_job())
    metas = [attributes for tag, attributes in Elements(page).tags if tag == "meta"]
    policy = next(one["content"] for one in metas if one.get("http-equiv") == "Content-Security-Policy")
    hashes = {}
    for element in ("style", "script"):
        inside = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
        assert len(inside) == 1
        hashes[element] = base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "base-uri 'none'; form-action 'none'"
    )


def test_no_address_is_in_the_page_and_it_can_be_written_in_any_encoding() -> None:
    assert make_page(hostile_job()).isascii()
    page = make_page(hung_job()).replace("http://www.w3.org/2000/svg", "")  # the name of a kind of element
    assert not re.search(r"https?:|//[a-z]+\.|\bsrc=|\bhref=|\burl\(", page)


def test_hostile_text_is_embedded_without_a_character_that_could_end_it() -> None:
    page = make_page(hostile_job())
    inside = page.partition('type="application/json">')[2].partition("</script>")[0]
    assert not re.search("[<>&]", inside)
    assert embedded(page)["findings"][0]["title"].endswith(HOSTILE)


def places(folded: str) -> list[int]:
    ranges = (part.split("-") for part in folded.split(",") if part)
    return [place for first, *last in ranges for place in range(int(first), int(last[0] if last else first) + 1)]


def ranks_of(content: dict[str, Any], folded: str) -> list[tuple[int | None, str]]:
    rank, role = (content["columns"].index(name) for name in ("rank", "role"))
    rows = [content["rows"][place] for place in places(folded)]
    return [(row[rank], content["strings"][row[role]]) for row in rows]


def test_a_group_knows_its_processes_and_no_helper_or_launcher() -> None:
    content = embedded(make_page(hung_job()))
    waiting, reading = content["groups"]
    assert ranks_of(content, waiting["members"]) == [(rank, "rank") for rank in range(8) if rank != 2]
    assert ranks_of(content, reading["members"]) == [(2, "rank")]
    assert content["outliers"][0]["members"] == reading["members"]


def test_the_same_rank_or_pid_elsewhere_is_another_process() -> None:
    ranks = [process(0, "wait", stack(1), pid=10), process(8, "wait", stack(1), pid=11)]
    helper = process(8, "idle", stack(2), pid=10, role="helper")
    launcher = process(None, "launcher", stack(3), pid=11, role="launcher")
    other_job = process(8, "wait", stack(2), pid=12, job="evaluation")
    content = embedded(make_page(report([ranks, [other_job]], helper, launcher, outlier=1)))
    mine, others = content["groups"]
    assert ranks_of(content, mine["members"]) == [(0, "rank"), (8, "rank")]
    assert ranks_of(content, others["members"]) == [(8, "rank")]
    assert content["outliers"][0]["members"] == others["members"] != mine["members"]


def test_a_rank_that_was_not_found_is_a_member_without_host_and_pid() -> None:
    missing = process(3, "not found", [], host="", pid=None, threads=[])
    document = report([[process(2, "wait", stack(1)), missing]])
    document["data"]["groups"][0].update(hosts=["node0"], pids=[1002])
    content = embedded(make_page(document))
    assert ranks_of(content, content["groups"][0]["members"]) == [(2, "rank"), (3, "rank")]


def test_processes_without_a_rank_are_found_by_host_and_pid() -> None:
    content = embedded(make_page(report([[process(None, "wait", stack(1))]])))
    assert ranks_of(content, content["groups"][0]["members"]) == [(None, "rank")]


def test_the_page_for_4096_ranks_holds_each_stack_once() -> None:
    document = large_job(4096)
    page = make_page(document)
    content = embedded(page)
    assert len(content["rows"]) == 4096
    assert len(content["stacks"]) == 41
    assert len(content["frames"]) < 80
    assert sum(len(places(one["members"])) for one in content["groups"]) == 4096
    assert len(page) < 630_000 < len(json.dumps(document)) / 20
