"""Files and folders that only their owner may read, also in a place where everybody may write, as in /tmp.

There, another user may have put a link, a pipe or a folder in the way, under the name that we are about to use. What is
not this user's own, or the owner's of that place, is refused then: as the kernel does where fs.protected_symlinks,
fs.protected_fifos and fs.protected_regular are set, which containers often lack.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat

_MOST_LINKS = 40
_DESCRIPTOR = re.compile(r"/proc/(\d+)/fd/(\d+)")
_HERE = os.O_NOFOLLOW | os.O_CLOEXEC


def follow(path: str) -> str:
    """Return a path without links, as os.path.realpath does, but for those that another user may have laid for us.

    Raises:
        OSError: such a link; or a part of the path is no folder, or may not be looked into.
    """
    done, left, links = "/", os.path.join(os.getcwd(), path).split("/")[::-1], 0
    while left:
        name = left.pop()
        place = os.path.dirname(done) if name == ".." else os.path.normpath(os.path.join(done, name))
        status = _status(place)
        # A link of /proc/PID/fd has no path to follow.
        if status is None or not stat.S_ISLNK(status.st_mode) or _DESCRIPTOR.fullmatch(place):
            done = place
            continue
        _check_owner(place, status)
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(place)
        done = "/" if target.startswith("/") else done
        left += target.split("/")[::-1]
    return done


def open_folder(path: str, *, own: bool = False) -> int:
    """Open a folder to make files in; it and those above it are made, for this user alone, where they are missing.

    With `own` it must be this user's own, and no link, wherever it lies.

    Raises:
        OSError: it cannot be made, or it belongs to another user and lies where everybody may write.
    """
    place = os.path.abspath(path) if own else follow(path)
    _make(place)
    if own and os.path.islink(place):
        raise OSError(errno.ELOOP, "a symbolic link", place)
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | _HERE)
    try:
        status = os.fstat(folder)
        _check_owner(place, status)
        if own and status.st_uid != os.geteuid():
            raise _not_ours(place, status)
    except OSError:
        os.close(folder)
        raise
    return folder


def temporary_folder(name: str, *, longest: int = 4096) -> str:
    """Make or find a folder of this user's own below $TMPDIR, /tmp or /dev/shm, and return its path.

    tempfile would choose the working directory in the end, which many nodes may share.

    Args:
        name: what it is for.
        longest: bytes that the path may have.

    Raises:
        OSError: it belongs to another user, or cannot be made, in any of these places.
    """
    failed = OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    for above in (os.environ.get("TMPDIR", ""), "/tmp", "/dev/shm"):
        path = os.path.join(above, f"distdiag-{name}-{os.geteuid()}")
        if os.path.isabs(path) and len(os.fsencode(path)) <= longest:
            try:
                os.close(open_folder(path, own=True))
            except OSError as error:
                failed = error
            else:
                return path
    raise failed


def make_folder(path: str) -> None:
    """Make a folder, as open_folder does. Raises OSError."""
    os.close(open_folder(path))


def open_file(path: str, flags: int) -> int:
    """Open a file to write to it from its beginning, or with os.O_APPEND to its end; only its owner may read it.

    What is no file (/dev/stdout, a pipe) is opened as it is.

    Raises:
        OSError: it cannot be opened, or it belongs to another user and lies where everybody may write.
    """
    place = follow(path)
    descriptor = _DESCRIPTOR.fullmatch(place)
    if descriptor and int(descriptor[1]) == os.getpid():
        return os.dup(int(descriptor[2]))  # opened anew, it would begin where this process has written already
    before = _status(place)
    if before is not None:
        _check_owner(place, before)  # before it is opened: a pipe may keep us waiting
    file = os.open(place, flags | os.O_CREAT | _HERE, 0o600)
    try:
        status = os.fstat(file)
        _check_owner(place, status)
        if stat.S_ISREG(status.st_mode):
            if not flags & os.O_APPEND:
                os.ftruncate(file, 0)
            if status.st_uid == os.geteuid():
                os.fchmod(file, 0o600)
    except OSError:
        os.close(file)
        raise
    return file


def write_whole(path: str, data: bytes, mode: int = 0o600) -> None:
    """Write a file whole or not at all; what is no file (/dev/stdout, a pipe) is written to, and never replaced.

    Raises:
        OSError: it cannot be written, see open_file.
    """
    place = follow(path)
    if (os.path.exists(place) and not os.path.isfile(place)) or _DESCRIPTOR.fullmatch(place):
        with open(open_file(place, os.O_WRONLY | os.O_APPEND), "wb") as stream:
            stream.write(data)
        return
    import tempfile  # only here: a job whose lines are traced has no use for it

    # A name that nobody can foresee, made with O_EXCL.
    file, draft = tempfile.mkstemp(prefix=".distdiag-", suffix=".part", dir=os.path.dirname(place))
    try:
        with open(file, "wb") as out:
            out.write(data)
            os.fchmod(file, mode)
        os.replace(draft, place)
    except BaseException:  # Ctrl-C as well
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _make(path: str) -> None:
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another rank was first
            os.mkdir(folder, 0o700)


def _check_owner(path: str, status: os.stat_result) -> None:
    """Refuse what another user may have put where everybody may write. Raises OSError."""
    folder = os.stat(os.path.dirname(path))
    if folder.st_mode & stat.S_IWOTH and status.st_uid not in (os.geteuid(), folder.st_uid):
        raise _not_ours(path, status)


def _not_ours(path: str, status: os.stat_result) -> OSError:
    what = f"{path} is a symbolic link owned by" if stat.S_ISLNK(status.st_mode) else "owned by"
    return PermissionError(errno.EPERM, f"{what} another user (uid {status.st_uid})", path)
