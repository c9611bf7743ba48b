"""System calls in which a thread may wait: numbers (asm/unistd.h), and the arguments that identify the object."""

from __future__ import annotations

NAMES = {
    "x86_64": {
        **{0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 7: "poll"},
        **{8: "lseek", 9: "mmap", 10: "mprotect", 11: "munmap", 12: "brk", 16: "ioctl", 17: "pread64"},
        **{18: "pwrite64", 19: "readv", 20: "writev", 21: "access", 23: "select", 24: "sched_yield"},
        **{25: "mremap", 26: "msync", 28: "madvise", 34: "pause", 35: "nanosleep", 40: "sendfile"},
        **{42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg"},
        **{48: "shutdown", 56: "clone", 57: "fork", 58: "vfork", 59: "execve", 60: "exit", 61: "wait4"},
        **{65: "semop", 69: "msgsnd", 70: "msgrcv", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync"},
        **{76: "truncate", 77: "ftruncate", 78: "getdents", 80: "chdir", 81: "fchdir", 82: "rename"},
        **{83: "mkdir", 85: "creat", 87: "unlink", 89: "readlink", 101: "ptrace", 128: "rt_sigtimedwait"},
        **{130: "rt_sigsuspend", 137: "statfs", 138: "fstatfs", 149: "mlock", 151: "mlockall", 162: "sync"},
        **{165: "mount", 166: "umount2", 202: "futex", 208: "io_getevents", 217: "getdents64"},
        **{219: "restart_syscall", 220: "semtimedop", 230: "clock_nanosleep", 231: "exit_group"},
        **{232: "epoll_wait", 237: "mbind", 242: "mq_timedsend", 243: "mq_timedreceive", 247: "waitid"},
        **{256: "migrate_pages", 257: "openat", 258: "mkdirat", 262: "newfstatat", 263: "unlinkat"},
        **{264: "renameat", 267: "readlinkat", 269: "faccessat", 270: "pselect6", 271: "ppoll"},
        **{275: "splice", 276: "tee", 277: "sync_file_range", 278: "vmsplice", 279: "move_pages"},
        **{281: "epoll_pwait", 285: "fallocate", 288: "accept4", 295: "preadv", 296: "pwritev"},
        **{299: "recvmmsg", 306: "syncfs", 307: "sendmmsg", 310: "process_vm_readv", 316: "renameat2"},
        **{318: "getrandom", 322: "execveat", 324: "membarrier", 325: "mlock2", 326: "copy_file_range"},
        **{327: "preadv2", 328: "pwritev2", 332: "statx", 333: "io_pgetevents", 426: "io_uring_enter"},
        **{435: "clone3", 437: "openat2", 439: "faccessat2", 441: "epoll_pwait2", 449: "futex_waitv"},
        **{455: "futex_wait"},
    },
    "aarch64": {
        **{4: "io_getevents", 22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 34: "mkdirat"},
        **{35: "unlinkat", 38: "renameat", 39: "umount2", 40: "mount", 43: "statfs", 44: "fstatfs"},
        **{45: "truncate", 46: "ftruncate", 47: "fallocate", 48: "faccessat", 49: "chdir", 50: "fchdir"},
        **{56: "openat", 57: "close", 61: "getdents64", 62: "lseek", 63: "read", 64: "write", 65: "readv"},
        **{66: "writev", 67: "pread64", 68: "pwrite64", 69: "preadv", 70: "pwritev", 71: "sendfile"},
        **{72: "pselect6", 73: "ppoll", 75: "vmsplice", 76: "splice", 77: "tee", 78: "readlinkat"},
        **{79: "newfstatat", 80: "fstat", 81: "sync", 82: "fsync", 83: "fdatasync", 84: "sync_file_range"},
        **{93: "exit", 94: "exit_group", 95: "waitid", 98: "futex", 101: "nanosleep"},
        **{115: "clock_nanosleep", 117: "ptrace", 124: "sched_yield", 128: "restart_syscall"},
        **{133: "rt_sigsuspend", 137: "rt_sigtimedwait", 182: "mq_timedsend", 183: "mq_timedreceive"},
        **{188: "msgrcv", 189: "msgsnd", 192: "semtimedop", 193: "semop", 202: "accept", 203: "connect"},
        **{206: "sendto", 207: "recvfrom", 210: "shutdown", 211: "sendmsg", 212: "recvmsg", 214: "brk"},
        **{215: "munmap", 216: "mremap", 220: "clone", 221: "execve", 222: "mmap", 226: "mprotect"},
        **{227: "msync", 228: "mlock", 230: "mlockall", 233: "madvise", 235: "mbind", 238: "migrate_pages"},
        **{239: "move_pages", 242: "accept4", 243: "recvmmsg", 260: "wait4", 267: "syncfs", 269: "sendmmsg"},
        **{270: "process_vm_readv", 276: "renameat2", 278: "getrandom", 281: "execveat", 283: "membarrier"},
        **{284: "mlock2", 285: "copy_file_range", 286: "preadv2", 287: "pwritev2", 291: "statx"},
        **{292: "io_pgetevents", 426: "io_uring_enter", 435: "clone3", 437: "openat2", 439: "faccessat2"},
        **{441: "epoll_pwait2", 449: "futex_waitv", 455: "futex_wait"},
    },
}
"""By machine, as named by uname(2), and number."""

_READ = (
    *("read", "pread64", "readv", "preadv", "preadv2", "recvfrom", "recvmsg", "recvmmsg", "accept", "accept4"),
    *("getdents", "getdents64", "mq_timedreceive"),
)
_WRITE = (
    *("write", "pwrite64", "writev", "pwritev", "pwritev2", "sendto", "sendmsg", "sendmmsg", "connect", "vmsplice"),
    *("mq_timedsend", "fallocate", "ftruncate"),
)
_OTHER = (
    *("fsync", "fdatasync", "syncfs", "sync_file_range", "flock", "fcntl", "ioctl", "shutdown", "close", "fstat"),
    *("fstatfs", "fchdir", "lseek", "io_uring_enter"),
)
DESCRIPTORS = {
    **{name: ((0, "r"),) for name in _READ},
    **{name: ((0, "w"),) for name in _WRITE},
    **{name: ((0, ""),) for name in _OTHER},
    **{"sendfile": ((1, "r"), (0, "w")), "tee": ((0, "r"), (1, "w"))},
    **{"splice": ((0, "r"), (2, "w")), "copy_file_range": ((0, "r"), (2, "w"))},
}
"""By name: the arguments that are file descriptors, and their use, "r" or "w"."""
POLLS = ("poll", "ppoll")
SELECTS = ("select", "pselect6")
EPOLLS = ("epoll_wait", "epoll_pwait", "epoll_pwait2")
FUTEXES = ("futex", "futex_wait")
WAITS = ("wait4", "waitid")
MAY_WAIT_FOR_OWN = (*FUTEXES, *POLLS, *SELECTS, *EPOLLS, *WAITS, "restart_syscall")
"""Calls in which a thread may wait for its own threads and children, and for several descriptors at once."""
SLEEPS = {"nanosleep": 0, "clock_nanosleep": 2}
"""Index of the time argument."""
PATHS = {
    **{"open": 0, "creat": 0, "stat": 0, "lstat": 0, "access": 0, "readlink": 0, "statfs": 0, "chdir": 0, "rename": 0},
    **{"unlink": 0, "mkdir": 0, "truncate": 0, "execve": 0, "openat": 1, "openat2": 1, "newfstatat": 1, "statx": 1},
    **{"faccessat": 1, "faccessat2": 1, "readlinkat": 1, "renameat": 1, "renameat2": 1, "unlinkat": 1, "mkdirat": 1},
    "execveat": 1,
}
"""Index of the path argument; if it is 1, argument 0 is the starting directory."""
