"""Pages in a real browser, opened from a file: hang with 8 and 1,024 ranks, light and dark; doctor and a bench."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from browser import chromium
from hang_facts import judge
from selenium.webdriver.common.by import By
from support import need
from support_warm import distdiag
from unit.commands.hang.test_hang_verdict import job_of

from distdiag.commands.hang.page import content
from distdiag.output import document
from distdiag.pages import make_page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from selenium import webdriver

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    need("chromium", "chromedriver")
    with chromium() as driver:
        yield driver


@pytest.mark.parametrize(("ranks", "hosts", "scheme"), [(8, 2, "dark"), (1024, 128, "light")])
def test_every_rank_is_a_square_on_one_screen_and_a_click_shows_its_stack(
    ranks: int, hosts: int, scheme: str, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    file = tmp_path / "hang.html"
    report = document(judge(*job_of(ranks, hosts, ranks - 2)), strict=False)
    file.write_text(make_page(report, content), encoding="ascii")
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(file.as_uri())
    squares = browser.find_elements(By.CSS_SELECTOR, ".hosts button.square")
    assert len(squares) == ranks
    stuck = browser.find_elements(By.CSS_SELECTOR, ".hosts button.stuck")
    assert [square.text for square in stuck] == ["P"]
    last_row = browser.execute_script("return document.querySelector('.hosts').getBoundingClientRect().bottom")
    assert last_row <= browser.execute_script("return innerHeight")
    assert f"rank {ranks - 2} on" in browser.find_element(By.CSS_SELECTOR, ".detail h3").text
    browser.execute_script("arguments[0].click()", squares[0])
    assert "rank 0 on" in browser.find_element(By.CSS_SELECTOR, ".detail h3").text
    assert "all_reduce" in browser.find_element(By.CSS_SELECTOR, ".detail pre").text
    colours = browser.execute_script(
        "return ['.hosts .stuck', '.hosts .comm', 'body'].map((where) => "
        "getComputedStyle(document.querySelector(where)).backgroundColor)"
    )
    assert len(set(colours)) == 3
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]  # type: ignore[no-untyped-call]
    requests = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert set(requests) <= {file.as_uri()}


@pytest.mark.parametrize(
    ("command", "titles"),
    [
        (("doctor",), ["Nodes", "Not checked here"]),
        (
            ("allreduce-bench", "--nproc", "2", "--sizes", "1KiB:64KiB:x4", "--iters", "3"),
            ["all_reduce: bus bandwidth in GB/s by size", "How late each rank entered"],
        ),
    ],
    ids=["doctor", "allreduce-bench"],
)
def test_a_report_is_one_page_that_fits_the_screen(
    command: tuple[str, ...], titles: list[str], browser: webdriver.Chrome, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    result = distdiag(*command, "--json", "--html", str(file))
    for width in (1280, 390):
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(file.as_uri())
        heading = browser.find_element(By.TAG_NAME, "h1").text
        assert heading == f"{result.report['verdict'].upper()} {result.report['summary']}"
        assert [title.text for title in browser.find_elements(By.TAG_NAME, "h2")] == titles
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
