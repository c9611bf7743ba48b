"""The page of pyspy-all in a real browser, opened from a file: what a person clicks, types and reads."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from browser import chromium
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from support import need, wait_until
from unit.commands.pyspy_all.test_pyspy_all_page import (
    HOSTILE,
    hostile_job,
    hung_job,
    large_job,
    process,
    report,
    stack,
)

from distdiag.commands.pyspy_all.page import content
from distdiag.pages import make_page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from selenium import webdriver
    from selenium.webdriver.remote.webelement import WebElement

SIZE = 16_384
pytestmark = pytest.mark.xdist_group("browser")  # one worker, so one browser, except for tests marked alone


class Page:
    """One page in the browser, by its visible content."""

    def __init__(self, browser: webdriver.Chrome, folder: Path) -> None:
        self.browser = browser
        self.folder = folder

    def open(self, document: dict[str, Any]) -> None:
        file = self.folder / "page.html"
        file.write_text(make_page(document, content), encoding="ascii")
        self.browser.get(file.as_uri())

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """Read all visible text in one round trip."""
        texts = self.browser.execute_script(
            "const visible = (one) => one.checkVisibility({contentVisibilityAuto: true, visibilityProperty: true});"
            "const found = [...document.querySelectorAll(arguments[0])].filter(visible);"
            "return found.map((one) => one.innerText.toWellFormed().trim());",
            selector,
        )
        assert isinstance(texts, list)
        return texts

    def text(self, selector: str = "body") -> str:
        return str(self.texts(selector)[0])

    def lines(self, selector: str = "body") -> list[str]:
        return [line for line in self.text(selector).splitlines() if line]

    def click(self, selector: str) -> None:
        self.browser.find_element(By.CSS_SELECTOR, selector).click()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.browser.switch_to.active_element.send_keys(key)

    def filter(self, text: str) -> str:
        """Type into the filter like a user; return the page's message."""
        field = self.browser.find_element(By.ID, "filter")
        field.send_keys(Keys.CONTROL + "a" + Keys.NULL + text)
        return self.text("#message")

    def ranks(self) -> list[str]:
        return self.texts("button.rank")

    def wrong(self) -> str | None:
        return self.browser.find_element(By.ID, "filter").get_attribute("aria-invalid")

    def elements(self) -> int:
        return int(self.browser.execute_script("return document.querySelectorAll('*').length"))

    def complaints(self) -> list[str]:
        """Empty what the browser noted since it was last asked: errors, and requests other than the page itself."""
        events = [json.loads(message)["message"] for message in self.noted("performance")]
        requests = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
        return self.noted("browser") + [url for url in requests if url != (self.folder / "page.html").as_uri()]

    def noted(self, log: str) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log(log)]  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    need("chromium", "chromedriver")
    with chromium("1200,900") as driver:
        yield driver


@pytest.fixture
def page(browser: webdriver.Chrome, tmp_path: Path) -> Iterator[Page]:
    """Open pages; in every test, no page may request a resource or have an error."""
    page = Page(browser, tmp_path)
    yield page
    assert page.complaints() == []


def test_the_verdict_comes_first_then_the_finding_the_outlier_the_tree_and_the_processes(page: Page) -> None:
    page.open(hung_job())
    lines = page.lines()
    assert lines[:2] == ["distdiag pyspy-all", "FAIL rank 2 is not where the others are"]
    wanted = ("FAIL one rank is elsewhere", "STUCK rank 2, host node0", "train, torchrun, 8 of 8 ranks", "Processes")
    found = [next(at for at, line in enumerate(lines) if line.startswith(start)) for start in wanted]
    assert found == sorted(found)


def test_the_tree_parts_where_the_ranks_part_and_says_in_words_who_is_stuck(page: Page) -> None:
    page.open(hung_job())
    whole, stuck, others = page.texts("summary")
    assert whole.startswith("<module> (/home/me/train.py:30) ranks 0-7 (8)")
    assert whole.endswith("STUCK inside: rank 2")
    assert "__next__" in stuck
    assert stuck.endswith("rank 2 (1) data loading, no progress STUCK")
    assert others == "train_step (/home/me/train.py:44) ranks 0-1,3-7 (7) communication wait, no progress"
    assert page.texts(".inside > ol")[0].splitlines() == [
        "main (/home/me/train.py:20)",
        "layer_1 (/home/me/train.py:101)",
        "layer_0 (/home/me/train.py:100)",
    ]


def test_branches_fold_by_click_and_by_keyboard(page: Page) -> None:
    page.open(hung_job())
    page.click("summary")
    assert len(page.texts("summary")) == 1
    page.browser.find_element(By.ID, "filter").click()
    page.press(*[Keys.TAB] * 5)
    assert page.browser.switch_to.active_element.tag_name == "summary"
    page.press(Keys.ENTER)
    assert len(page.texts("summary")) == 3
    page.press(Keys.SPACE)
    assert len(page.texts("summary")) == 1


def test_all_branches_fold_and_unfold_at_once(page: Page) -> None:
    page.open(hung_job())
    page.click("#collapse")
    assert len(page.texts("summary")) == 1
    page.click("summary")
    assert page.texts(".inside .inside") == []
    page.click("#expand")
    assert len(page.texts(".inside .inside")) == 2


def test_library_frames_are_one_line_until_they_are_asked_for(page: Page) -> None:
    page.open(hung_job())
    assert "\u2026 2 library frames, the innermost all_reduce (" in page.text("#tree")
    assert "wrapper (" not in page.text("#tree")
    page.click("#library")
    assert "wrapper (" in page.text("#tree")
    assert page.text("#tree").count("[library]") == 3
    page.click("#library")
    assert "wrapper (" not in page.text("#tree")


def test_the_filter_takes_ranks_and_hosts(page: Page) -> None:
    page.open(hung_job(24))
    for text, ranks, says in (
        ("3", [3], "1 of 26 processes."),
        ("0-1, 12", [0, 0, 1, 12], "4 of 26 processes."),
        ("NODE1", list(range(8, 16)), "8 of 26 processes."),
        ("2,node2,", [2, *range(16, 24)], "9 of 26 processes."),
        ("3,99,nowhere", [3], '1 of 26 processes. No rank or host matches "99", "nowhere".'),
    ):
        assert page.filter(text) == says
        assert page.ranks() == [str(rank) for rank in ranks]
        assert page.wrong() == "false"


def test_the_filter_shows_only_branches_that_match(page: Page) -> None:
    page.open(hung_job())
    page.filter("3-4")
    whole, branch = page.texts("summary")
    assert "ranks 3-4 (2 of 8)" in whole
    assert "STUCK" not in whole
    assert branch.startswith("train_step (/home/me/train.py:44) ranks 3-4 (2 of 7)")
    page.filter("77")
    assert page.text("#tree") == "No branch matches the filter."
    assert page.text("#shown") == "No process matches the filter."


def test_wrong_input_is_said_and_filters_nothing(page: Page) -> None:
    page.open(hung_job())
    for text in ("7-0", "3-", "1--2", "1,,2", "0-1-2", "-"):
        assert "Write ranks, such as 3 or 0-7,12, or part of a host name. No filter is applied." in page.filter(text)
        assert (page.wrong(), len(page.ranks())) == ("true", 10)
    page.click("#clear")
    assert (page.text("#message"), page.wrong()) == ("", "false")


def test_an_outlier_can_be_shown_and_the_filter_cleared(page: Page) -> None:
    page.open(hung_job())
    page.click("#outliers button")
    assert page.texts("#rows td:first-child") == ["2 STUCK"]
    page.click("#clear")
    assert len(page.ranks()) == 10
    assert page.browser.switch_to.active_element.get_attribute("id") == "filter"


def test_a_click_on_a_rank_shows_its_stacks_and_another_hides_them(page: Page) -> None:
    page.open(hung_job())
    page.filter("2")
    page.click("button.rank")
    lines = page.lines(".stacks")
    assert lines[0] == "job train, local rank 2, no progress, 1.5 s of CPU, step 2, innermost frame first"
    assert lines[1:3] == ["thread MainThread, os thread 70002, data loading", "read_batch (/home/me/train.py:12)"]
    assert "thread pin_memory, os thread 90002, data loading" in lines
    assert page.all("button.rank")[0].get_attribute("aria-expanded") == "true"
    page.click("button.rank")
    assert page.texts(".stacks") == []


def test_a_process_without_stacks_says_why(page: Page) -> None:
    page.open(hung_job())
    page.all("button.rank")[1].click()
    assert page.text(".stacks").endswith("No stack was read: it ended meanwhile")


def test_a_fix_command_can_be_copied(page: Page) -> None:
    page.open(hung_job())
    copy = page.all(".finding button")[0]
    copy.click()
    wait_until(lambda: copy.text == "Copied", 2, lambda: copy.text)
    page.click("#filter")
    page.press(Keys.CONTROL + "v")
    assert page.browser.find_element(By.ID, "filter").get_property("value") == "ls -l '/data/shard 2'"


def test_hostile_text_is_shown_and_does_nothing(page: Page) -> None:
    page.open(hung_job())
    plain = page.elements()
    page.open(hostile_job())
    shown = HOSTILE.replace("\udc80", "\ufffd").replace("\u2028", "")
    assert f"train_step{shown} (/home/me/train.py{shown}:44)" in page.text().replace("\u2028", "")
    assert page.elements() == plain
    page.click("button.rank")
    page.click("#library")
    assert page.filter("<img src=y>").endswith('matches "<img src=y>".')
    assert page.filter("<script>").startswith("10 of 10 processes.")
    assert page.all("img, #tree script, #rows script") == []


def test_a_script_or_an_image_that_got_into_the_page_would_do_nothing(page: Page) -> None:
    page.open(hung_job())
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        page.browser.execute_script(
            "const add = (tag, changes) => document.body.append(Object.assign(document.createElement(tag), changes));"
            "add('script', {textContent: 'window.ran = true'}); add('img', {src: arguments[0]});",
            f"http://127.0.0.1:{server.getsockname()[1]}/x",
        )

        def blocked() -> bool:
            said.extend(page.complaints())
            return str(said).count("The action has been blocked") == 2

        wait_until(blocked, 5, lambda: str(said))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert page.browser.execute_script("return window.ran") is None


def test_a_report_without_groups_or_processes_says_so(page: Page) -> None:
    page.open(report([]))
    assert page.text("#tree") == "No stacks were read."
    assert page.text("#shown") == "No processes found."
    assert page.filter("3") == '0 of 0 processes. No rank or host matches "3".'


@pytest.mark.timed
def test_a_job_of_16384_ranks_loads_and_filters_without_an_element_for_each_rank(page: Page) -> None:
    content = large_job(SIZE)
    page.open(content)
    timing = "const [load] = performance.getEntriesByType('navigation'); return load.loadEventEnd"
    assert page.browser.execute_script(timing) < 10_000
    assert page.elements() < 3000
    assert f"ranks 0-{SIZE - 1} ({SIZE})" in page.text("summary")
    started = time.monotonic()
    assert page.filter("16000-16383,node7") == "1272 of 16384 processes."
    assert time.monotonic() - started < 60  # 18 key strokes, each of which filters
    assert page.text("#shown") == "1-100 of 1272"
    page.click("#next")
    assert page.text("#shown") == "101-200 of 1272"
    assert page.elements() < 3000


def test_thousands_of_branches_come_in_parts(page: Page) -> None:
    page.open(report([[process(rank, "running", stack(rank))] for rank in range(2000)], outlier=1500))
    page.click("summary")
    page.click("summary")
    assert len(page.texts("summary")) == 41
    assert page.texts("summary")[1].endswith("STUCK")
    page.click("#tree button")
    assert len(page.texts("summary")) == 81
    assert page.text("#tree button") == "Show 40 of 1920 more branches"
    assert page.elements() < 3000


def test_dark_and_light_have_enough_contrast(page: Page) -> None:
    page.open(hung_job())
    for scheme in ("dark", "light"):
        page.browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        for selector in ("h1", "header .quiet", ".info, .warn, .quiet", "#tree .outlier", "#tree .library", "button"):
            ink = page.browser.find_element(By.CSS_SELECTOR, selector).value_of_css_property("color")
            paper = page.browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
            assert contrast(ink, paper) >= 4.5, (scheme, selector)


def contrast(one: str, other: str) -> float:
    """Contrast of two colours as WCAG 2 defines it, from "rgba(1, 2, 3, 1)"."""
    low, high = sorted(luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    shares = [int(part) / 255 for part in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    red, green, blue = (share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
