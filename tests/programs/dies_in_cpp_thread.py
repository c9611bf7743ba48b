"""A thread of C++ calls abort() while Python waits for it in wait_for_batches."""

import time

from native import library


def wait_for_batches() -> None:
    prefetch()
    time.sleep(600)


prefetch = library().abort_in_a_thread
print("ready", flush=True)
wait_for_batches()
