"""A thread opens a file on a dead file system: FUSE, without a process serving its requests."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading

folder = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
disk = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={disk},rootmode=40000,user_id=0,group_id=0"
alive = os.open(os.path.join(folder, "alive"), os.O_RDWR | os.O_CREAT)
os.write(alive, b"hello")
if libc.mount(b"dead", folder.encode(), b"fuse", 0, options.encode()):
    raise OSError(ctypes.get_errno(), "mount")
dead = os.open(folder, os.O_PATH)  # the only thing that can be had of it without an answer
thread = threading.Thread(target=os.stat, args=(os.path.join(folder, "data"),), daemon=True)
thread.start()
print(json.dumps({"tids": {"stat": thread.native_id}, "fds": {"dead": dead, "alive": alive}}), flush=True)
threading.Event().wait()
