"""The site's search in a real browser: a pasted error line finds its entry among the symptoms."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from typing import TYPE_CHECKING

import make_site
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from support import need

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("browser")

LINES = {
    "RuntimeError: CUDA error: no kernel image is available for execution on the device": "no kernel image",
    "[rank3]: torch.distributed.DistBackendError: NCCL error in: ../NCCLUtils.hpp:268, unhandled system error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5": "unhandled system error",
    "NVRM: Xid (PCI:0000:9d:00): 79, pid=4721, GPU has fallen off the bus.": "Xid 79",
    "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.": "DataLoader worker",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("site")
    make_site.build(folder)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/symptoms/"
        server.shutdown()


@pytest.mark.timeout(300)  # the site may take a busy machine 110 s
def test_a_pasted_line_finds_its_entry(site: str) -> None:
    need("chromium", "chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1500,1000"):
        options.add_argument(argument)
    with webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver"))) as browser:
        browser.get(site)
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
