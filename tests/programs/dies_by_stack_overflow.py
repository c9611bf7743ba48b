"""A function of C++ calls itself until its stack is full."""

import resource

from native import library


def count_nodes() -> int:
    return int(defects.walk_tree())


resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
defects = library()
print("ready", flush=True)
count_nodes()
