"""Sentences about what moves for a rank."""

from __future__ import annotations

from loops import each

from distdiag.diagnosis.activity_wording import moves_in_words
from distdiag.facts.process.activity import Activity, Moved


def child(pid: int, what: str, amount: float, detail: str = "rsync") -> Moved:
    return Moved(what, pid, "rsync", "child", detail, amount)


def own(what: str, amount: float, detail: str = "") -> Moved:
    return Moved(what, 7, "python", "self", detail, amount)


@each(
    "moved, words",
    [
        ([], ""),
        ([child(812, "read", 24e6)], "its child rsync (pid 812) reads 12 MB/s"),
        ([child(812, "read", 24e6), child(812, "cpu", 1.0)], "its child rsync (pid 812) reads 12 MB/s"),
        ([child(pid, "cpu", 1.95, "cc1") for pid in range(4)], "its 4 children compute (390 % of a core)"),
        ([child(9, "cpu", 1.5, "cc1")], "its child cc1 (pid 9) computes (75 % of a core)"),
        ([child(pid, "cpu", 2, "cc1") for pid in range(8)], "its 8 or more children compute (800 % of a core)"),
        (
            [Moved("cpu", 7, "python", "child", "children that ended", 3.0)],
            "the children that python starts compute and end (150 % of a core)",
        ),
        ([child(8, "received", 2000, "TCP 10.0.0.2:443")], "its child rsync (pid 8) receives 1 kB/s from 10.0.0.2:443"),
        ([own("received", 2.4e6, "TCP 10.0.0.2:443")], "receives 1.2 MB/s from 10.0.0.2:443"),
        ([own("sent", 1600, "TCP 10.0.0.2:443")], "sends 800 B/s to 10.0.0.2:443"),
        ([own("offset", 6e6, "/data/ckpt.pt")], "reads /data/ckpt.pt at 3 MB/s"),
        ([own("written", 6e9)], "writes 3 GB/s"),
        ([own("faults", 80)], "reads mapped files: 40 page faults a second"),
        ([own("cpu", 0.8, "uploader")], "its thread uploader uses 40 % of a core"),
        ([own("cpu", 0.8, "python")], "a thread of it uses 40 % of a core"),
        ([own("cpu", 2, "pool-1"), own("cpu", 1.9, "pool-2")], "2 of its threads use 195 % of a core"),
        (
            [Moved("cpu", 99, "python", "peer", "generate.py", 2.0)],
            "generate.py (pid 99), to which it is connected, computes",
        ),
        (
            [own("offset", 6e6, "/data/a"), child(3, "cpu", 2, "tar"), own("sent", 2e6, "TCP 10.0.0.2:443")],
            "reads /data/a at 3 MB/s and its child tar (pid 3) computes (100 % of a core)",
        ),
    ],
)
def test_what_moves_in_words(moved: list[Moved], words: str) -> None:
    assert moves_in_words(Activity(7, 2.0, tuple(moved))) == words
