"""--markdown: the ticket's text equals the report."""

from __future__ import annotations

from distdiag.markdown import markdown
from distdiag.report import Finding, Fix, Level, Report, Where


def made() -> str:
    finding = Finding(
        id="hang.lock",
        level=Level.FAIL,
        title="rank 2 waits in `load_batch` for <module> of [rank0]",
        detail="since *3 s*",
        where=Where(ranks=(2,)),
        evidence=("a ``` fence", "<b>"),
        fix=Fix(text="resume it", commands=("kill -CONT 5",)),
    )
    return markdown(Report(command="hang", data=None, findings=(finding,), summary="stuck"), "the page\n")


def test_code_stays_and_the_rest_is_shown_as_it_is() -> None:
    lines = made().splitlines()
    assert lines[0] == "## distdiag hang: FAIL"
    assert r"**FAIL** `hang.lock`: rank 2 waits in `load_batch` for \<module\> of \[rank0\]" in lines
    assert r"since \*3 s\*" in lines


def test_evidence_with_a_fence_does_not_end_its_own() -> None:
    lines = made().splitlines()
    at = lines.index("````text")
    assert lines[at + 1 : at + 4] == ["a ``` fence", "<b>", "````"]


def test_the_fix_pastes_and_the_page_is_folded() -> None:
    text = made()
    assert "Fix: resume it\n\n```sh\nkill -CONT 5\n```\n" in text
    assert "<details><summary>The whole report</summary>\n\n```text\nthe page\n```\n\n</details>" in text
