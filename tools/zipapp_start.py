"""The start of distdiag.pyz: unpacks the archive once into the user's cache, and runs distdiag from there.

Compiled modules (msgspec) and programs (py-spy) cannot be run out of an archive, and Pythons that distdiag starts need
a folder to import from. The folder is the user's own (0700) and named after the content, so a new file never meets old
modules. Where no such folder can be made, a temporary one serves, and is removed at the end.
"""

from __future__ import annotations

import os
import sys

DIGEST = "@DIGEST@"
# These start Pythons of this Python's kind that import torch.
RANKS = ("gpu-test", "allreduce-bench", "overflow", "floatcmp")


def cache_folders() -> list[str]:
    """List where the folder may be, the best first."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return [os.path.join(base, "distdiag"), os.path.join("/tmp", "distdiag-pyz-%d" % os.getuid())]


def is_own(folder: str) -> bool:
    """Return whether a folder is this user's, and no other user may write there; a link is not followed."""
    import stat

    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def unpack(archive: str, folder: str) -> None:
    """Unpack into a folder, with the modes that the archive has."""
    import zipfile

    with zipfile.ZipFile(archive) as packed:
        for member in packed.infolist():
            path = packed.extract(member, folder)
            os.chmod(path, member.external_attr >> 16 & 0o700 or 0o600)


def unpacked(archive: str) -> tuple[str, bool]:
    """Return the folder with the content, made if it is not there; and whether it must be removed at the end."""
    import shutil
    import tempfile

    for base in cache_folders():
        place = os.path.join(base, DIGEST)
        if is_own(base) and is_own(place):
            return place, False
        try:
            os.makedirs(base, mode=0o700, exist_ok=True)
            if not is_own(base):
                continue
            draft = tempfile.mkdtemp(prefix=".new-", dir=base)
            try:
                unpack(archive, draft)
                os.rename(draft, place)  # whole or not at all; another start may have been quicker
            except OSError:
                shutil.rmtree(draft, ignore_errors=True)
            if is_own(place):
                return place, False
        except OSError:
            continue
    draft = tempfile.mkdtemp(prefix="distdiag-pyz-")
    unpack(archive, draft)
    return draft, True


def switch_to_torch() -> None:
    """Start again with a Python that has torch, for commands that need it where this one has none.

    That of the active environment (VIRTUAL_ENV, CONDA_PREFIX), or else of PATH; only Python 3.11 or newer.
    """
    import importlib.util
    import shutil
    import subprocess

    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if command not in RANKS or importlib.util.find_spec("torch") or "DISTDIAG_PYZ_SWITCHED" in os.environ:
        return
    folders = [os.environ.get(name, "") for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
    pythons = [os.path.join(folder, "bin", "python") for folder in folders if folder]
    pythons += filter(None, map(shutil.which, ("python", "python3")))
    check = "import sys, importlib.util as u; sys.exit(sys.version_info < (3, 11) or u.find_spec('torch') is None)"
    for python in pythons:
        try:
            done = subprocess.run([python, "-c", check], stdin=subprocess.DEVNULL, timeout=20, check=False)
        except (OSError, subprocess.SubprocessError):
            continue
        if done.returncode == 0:
            archive = os.path.dirname(os.path.abspath(__file__))
            os.execve(python, [python, archive, *sys.argv[1:]], dict(os.environ, DISTDIAG_PYZ_SWITCHED="1"))


def main() -> None:
    """Run distdiag."""
    switch_to_torch()
    os.environ.pop("DISTDIAG_PYZ_SWITCHED", None)
    place, temporary = unpacked(os.path.dirname(os.path.abspath(__file__)))
    lib = os.path.join(place, "lib")
    # In place of the archive; behind the script's own place there is the environment, with torch if it has one.
    sys.path[0] = lib
    if "floatcmp" in sys.argv[1:2]:  # it compares in a process of its own, which imports distdiag
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (lib, os.environ.get("PYTHONPATH"))))
    tools = os.path.join(place, "bin", os.uname().machine)
    if os.path.isdir(tools):
        os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH", os.defpath), tools)))
    try:
        from distdiag.__main__ import main as run

        run()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "distdiag":
            raise
        sys.exit(
            "distdiag: missing package %s: distdiag.pyz does not have it for this Python (%s on %s): pip install %s"
            % (error.name, sys.implementation.cache_tag, os.uname().machine, (error.name or "").partition(".")[0])
        )
    finally:
        if temporary:
            import shutil

            shutil.rmtree(place, ignore_errors=True)
