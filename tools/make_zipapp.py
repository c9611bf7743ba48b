"""Builds dist/distdiag.pyz, distdiag in one file, for `make zipapp`: `python tools/make_zipapp.py [--installed] [FILE]`.

In it are distdiag, what it imports that is pure Python (typer, rich and what these need), and of compiled
packages msgspec for CPython 3.11 to 3.14 and py-spy, for x86_64 and aarch64 Linux. The archive unpacks itself once into
the user's cache (zipapp_start.py). torch, paramiko and pystack are not in it. --installed takes the compiled packages
from this environment, for this Python and machine alone: no network is needed.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import distribution, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START = Path(__file__).with_name("zipapp_start.py")
# A file of its own, which any Python can parse: the python3 of RHEL 8 is 3.6, and stops at the first annotation of START.
CHECK = """\
import sys

if sys.version_info < (3, 11):
    sys.exit("distdiag needs Python 3.11 or newer; this is %s" % sys.version.split()[0])

from distdiag_start import main

main()
"""
PURE = ("typer", "rich", "shellingham", "annotated-doc", "markdown-it-py", "mdurl", "pygments")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = {
    "x86_64": ("manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_5_x86_64"),
    "aarch64": ("manylinux_2_17_aarch64", "manylinux2014_aarch64"),
}


def download(folder: Path, package: str, *options: str) -> Path:
    """Download one wheel, of the version that is installed here, into a folder of its own."""
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    command += ["--only-binary", ":all:", "--dest", str(folder), *options, f"{package}=={version(package)}"]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    return wheel


def wheels(folder: Path) -> dict[str, list[Path]]:
    """Download all wheels; by the name of the machine, or `any`."""
    found: dict[str, list[Path]] = {"any": [download(folder / package, package) for package in PURE]}
    for machine, platforms in MACHINES.items():
        where = [word for platform in platforms for word in ("--platform", platform)]
        found[machine] = [download(folder / machine / "py-spy", "py-spy", *where)]
        for python in PYTHONS:
            on = [*where, "--python-version", python, "--implementation", "cp"]
            found[machine].append(download(folder / machine / python, "msgspec", *on))
    return found


def own() -> dict[str, tuple[bytes, int]]:
    """List distdiag's own files: content and mode by name."""
    paths = [
        path for path in sorted((ROOT / "distdiag").rglob("*")) if path.is_file() and "__pycache__" not in path.parts
    ]
    return {f"lib/{path.relative_to(ROOT)}": (path.read_bytes(), 0o600) for path in paths}


def installed() -> dict[str, tuple[bytes, int]]:
    """List the packages of this environment in the same way."""
    files: dict[str, tuple[bytes, int]] = {}
    for package in (*PURE, "msgspec", "py-spy"):
        for path in distribution(package).files or ():
            if path.name == "py-spy":
                files[f"bin/{os.uname().machine}/py-spy"] = (Path(path.locate()).read_bytes(), 0o700)
            elif "__pycache__" not in path.parts and ".." not in path.parts:
                files[f"lib/{path}"] = (Path(path.locate()).read_bytes(), 0o600)
    return files


def downloaded(found: dict[str, list[Path]]) -> dict[str, tuple[bytes, int]]:
    """List the contents of the wheels; modules of each Python and machine are side by side."""
    files: dict[str, tuple[bytes, int]] = {}
    for machine, paths in found.items():
        for path in paths:
            with zipfile.ZipFile(path) as wheel:
                for name in wheel.namelist():
                    if name.endswith("/scripts/py-spy"):
                        files[f"bin/{machine}/py-spy"] = (wheel.read(name), 0o700)
                    elif not name.endswith("/") and ".data/" not in name and "py_spy" not in name:
                        files.setdefault(f"lib/{name}", (wheel.read(name), 0o600))
    return files


def write(target: Path, files: dict[str, tuple[bytes, int]]) -> None:
    """Write the archive; the same files give the same bytes."""
    digest = hashlib.sha256()
    for name, (data, mode) in sorted(files.items()):
        digest.update(f"{name}\0{mode}\0{len(data)}\0".encode() + data)
    start = START.read_text().replace("@DIGEST@", digest.hexdigest()[:32])
    starts = {"__main__.py": (CHECK.encode(), 0o600), "distdiag_start.py": (start.encode(), 0o600)}
    with target.open("wb") as file:
        file.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for name, (data, mode) in sorted({**starts, **files}.items()):
                info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
                info.external_attr = (stat.S_IFREG | mode) << 16
                archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    target.chmod(0o755)


def main() -> None:
    """Build it."""
    words = [word for word in sys.argv[1:] if word != "--installed"]
    target = Path(words[0]) if words else ROOT / "dist" / "distdiag.pyz"
    target.parent.mkdir(parents=True, exist_ok=True)
    if "--installed" in sys.argv:
        packages = installed()
    else:
        with tempfile.TemporaryDirectory() as folder:
            packages = downloaded(wheels(Path(folder)))
    write(target, {**packages, **own()})
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
