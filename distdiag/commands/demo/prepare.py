"""Takes the lock on the data and is stopped, as by Ctrl-Z; ends, and releases it, once it is resumed."""

import fcntl
import os
import signal

with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "data.lock"), "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.kill(os.getpid(), signal.SIGSTOP)
