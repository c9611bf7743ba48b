"""Shared by the tests that compute with torch in their own process."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread_of_torch: None) -> None: ...
