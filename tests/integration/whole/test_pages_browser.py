"""Pages in a real browser: of hang with 8 and 1,024 ranks, light and dark, of doctor, of a bench; the site's search."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from typing import TYPE_CHECKING, Any

import make_site
import pytest
from browser import chromium
from hang_facts import judge
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from support import need
from support_warm import distdiag
from unit.commands.allreduce_bench.test_bench import plan_of, reported
from unit.commands.hang.test_hang_verdict import job_of

from distdiag.commands.allreduce_bench.types import Request
from distdiag.commands.hang.page import content
from distdiag.output import document
from distdiag.pages import make_page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from selenium import webdriver


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


@pytest.fixture
def doctor(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    file = tmp_path / "doctor.html"
    return file, distdiag("doctor", "--json", "--html", str(file)).report


@pytest.fixture
def bench(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    request = Request(sizes=(1024, 4096, 65536))
    times = {number: [number * 1e-4] * 20 for number in (1, 2, 3)}
    report = document(reported(request, times, plan_of(2), {0: 0.0, 1: 2e-5}))
    file = tmp_path / "bench.html"
    file.write_text(make_page(report), encoding="ascii")
    return file, report


TITLES = {
    "doctor": ["Nodes", "Not checked here"],
    "bench": ["all_reduce: bus bandwidth in GB/s by size", "How late each rank entered"],
}


@pytest.mark.parametrize("command", TITLES)
def test_a_report_is_one_page_that_fits_the_screen(
    command: str, browser: webdriver.Chrome, request: pytest.FixtureRequest
) -> None:
    file, report = request.getfixturevalue(command)
    for width in (1280, 390):
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(file.as_uri())
        heading = browser.find_element(By.TAG_NAME, "h1").text
        assert heading == f"{report['verdict'].upper()} {report['summary']}"
        assert [title.text for title in browser.find_elements(By.TAG_NAME, "h2")] == TITLES[command]
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


LINES = {
    "RuntimeError: CUDA error: no kernel image is available for execution on the device": "no kernel image",
    "[rank3]: torch.distributed.DistBackendError: NCCL error in: ../NCCLUtils.hpp:268, unhandled system error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5": "unhandled system error",
    "NVRM: Xid (PCI:0000:9d:00): 79, pid=4721, GPU has fallen off the bus.": "Xid 79",
    "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.": "DataLoader worker",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("site")
    make_site.build(folder)
    return folder


@pytest.mark.timeout(300)  # the site may take a busy machine 110 s
def test_the_site_is_built_without_a_dead_link(site: Path) -> None:
    assert (site / "symptoms" / "index.html").is_file()


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/commands/skill/"
        server.shutdown()


@pytest.mark.timeout(300)
def test_a_pasted_line_finds_its_entry_on_the_site(served: str, browser: webdriver.Chrome) -> None:
    browser.get(served)
    box = browser.find_element(By.CSS_SELECTOR, '[data-md-component="search-query"]')
    browser.execute_script("arguments[0].focus()", box)
    items = "return [...document.querySelectorAll('.md-search-result__item')].map((one) => one.textContent)"
    for line, title in LINES.items():
        box.send_keys(Keys.CONTROL + "a" + Keys.BACKSPACE)
        WebDriverWait(browser, 30).until(lambda page: not page.execute_script(items))
        browser.execute_cdp_cmd("Input.insertText", {"text": line})  # as pasted: one search, not one per key
        box.send_keys(Keys.SHIFT)
        found = WebDriverWait(browser, 30).until(lambda page: page.execute_script(items))
        assert title in "\n".join(found[:3]), line
