"""The page of hang in a real browser, opened from a file: 8 and 1,024 ranks, light and dark."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from hang_facts import judge
from selenium import webdriver
from selenium.webdriver.common.by import By
from support import need
from unit.test_hang_verdict import job_of

from distdiag.commands.hang.html_report import make_page
from distdiag.output import document

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    need("chromium", "chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1500,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("ranks", "hosts"), [(8, 2), (1024, 128)])
def test_every_rank_is_a_square_on_one_screen_and_a_click_shows_its_stack(
    ranks: int, hosts: int, scheme: str, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    file = tmp_path / "hang.html"
    file.write_text(make_page(document(judge(*job_of(ranks, hosts, ranks - 2)), strict=False)), encoding="ascii")
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(file.as_uri())
    squares = browser.find_elements(By.CSS_SELECTOR, ".hosts button.rank")
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
