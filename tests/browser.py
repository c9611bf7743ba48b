"""chromium without a window, for tests of pages and for their pictures."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from selenium import webdriver

if TYPE_CHECKING:
    from collections.abc import Iterator

# No sandbox: chromium has none as root. No /dev/shm: it is small in containers.
_ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars")


@contextmanager
def chromium(size: str = "1500,1000") -> Iterator[webdriver.Chrome]:
    """Start chromium with a window of this size; it logs the pages' errors and requests."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (*_ARGUMENTS, f"--window-size={size}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()
