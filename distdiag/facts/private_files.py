"""Files and folders readable only by their owner, also in world-writable places such as /tmp.

There, another user may have planted a link, a pipe or a folder under the name we are about to use. Entries owned
neither by this user nor by the owner of the place are refused, as the kernel does with fs.protected_symlinks,
fs.protected_fifos and fs.protected_regular, which containers often lack.
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
    """Resolve a path like os.path.realpath, but refuse links that another user may have planted.

    Raises:
        OSError: such a link; or a part of the path is not a folder, or not accessible.
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
    """Open a folder for new files; create it and its parents, accessible to this user alone, if missing.

    With `own` it must be owned by this user, and not a link, wherever it is.

    Raises:
        OSError: it cannot be created, or another user owns it in a world-writable place.
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
    """Create or find a folder of this user's own below $TMPDIR, /tmp or /dev/shm, and return its path.

    tempfile's last resort is the working directory, which many nodes may share.

    Args:
        name: part of the folder's name.
        longest: limit of the path, in bytes.

    Raises:
        OSError: in all of these places it belongs to another user, or cannot be created.
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
    """Create a folder like open_folder. Raises OSError."""
    os.close(open_folder(path))


def open_file(path: str, flags: int) -> int:
    """Open a file for writing, truncated or with os.O_APPEND; only its owner may read it.

    Anything but a regular file (/dev/stdout, a pipe) is opened unchanged.

    Raises:
        OSError: it cannot be opened, or another user owns it in a world-writable place.
    """
    place = follow(path)
    descriptor = _DESCRIPTOR.fullmatch(place)
    if descriptor and int(descriptor[1]) == os.getpid():
        return os.dup(int(descriptor[2]))  # opened anew, it would start at offset 0, over this process's earlier output
    before = _status(place)
    if before is not None:
        _check_owner(place, before)  # before opening: a pipe would block
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
    """Write a file atomically; anything but a regular file (/dev/stdout, a pipe) is written to, never replaced.

    Raises:
        OSError: it cannot be written, see open_file.
    """
    place = follow(path)
    if (os.path.exists(place) and not os.path.isfile(place)) or _DESCRIPTOR.fullmatch(place):
        with open(open_file(place, os.O_WRONLY | os.O_APPEND), "wb") as stream:
            stream.write(data)
        return
    import tempfile  # imported late: a job with line tracing does not need it

    # An unpredictable name, created with O_EXCL.
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
    """Refuse an entry that another user may have planted in a world-writable folder. Raises OSError."""
    folder = os.stat(os.path.dirname(path))
    if folder.st_mode & stat.S_IWOTH and status.st_uid not in (os.geteuid(), folder.st_uid):
        raise _not_ours(path, status)


def _not_ours(path: str, status: os.stat_result) -> OSError:
    what = f"{path} is a symbolic link owned by" if stat.S_ISLNK(status.st_mode) else "owned by"
    return PermissionError(errno.EPERM, f"{what} another user (uid {status.st_uid})", path)
