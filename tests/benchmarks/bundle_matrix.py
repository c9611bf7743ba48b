"""Whether a bundle says what hang says on the spot, and has no planted secret: the faults of hang_matrix.py.

    python tests/benchmarks/bundle_matrix.py [--launcher torchrun] [--faults sleeps,exits] [--out FILE]

Secrets are in the environment, in an argument, in a path, in a log and in a local variable shown by a traceback.
"same" compares class, ranks, verdict and finding ids of `hang --from BUNDLE` with those of the facts that the bundle
was made of; "beside" with a `hang` that was run just before; "leaks" counts secrets in the unpacked bytes of the
bundle, in plain, URL, hex and base64 form.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import hang_matrix

SECRETS = {
    "HF_TOKEN": "hf_QwErTyUiOpAsDfGhJkLz",
    "DB_PASSWORD": "correct-horse+battery/9",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzEXAMPLE1",
    "SERVICE_API_KEY": "0123-plain-words-as-key",
}
LOG = """Traceback (most recent call last):
  File "/home/alice/train.py", line 3, in connect
    password = '{DB_PASSWORD}'
  Authorization: Bearer {SERVICE_API_KEY}
RuntimeError: {AWS_SECRET_ACCESS_KEY} of alice@example.org was refused
"""
FAULTS = (
    "sleeps,load-batch,stopped,exits,killed,d-state,tokenizes,own-lock,debugger,recv-cycle,left-out,two-groups,slow"
)


def forms(secret: str) -> list[bytes]:
    """List the ways in which a secret may be written."""
    data = secret.encode()
    packed = [base64.b64encode(b"x" * before + data)[4:-4] for before in (3, 4, 5)]
    return [data, quote(secret, safe="").encode(), data.hex().encode(), *packed]


def leaks(bundle: Path) -> int:
    """Count the forms of secrets, and the name of this host, in the unpacked bundle."""
    plain = subprocess.run(["gzip", "-dc", str(bundle)], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        assert archive.getmembers()
    host = os.uname().nodename.encode()
    wanted = [form for secret in SECRETS.values() for form in forms(secret)]
    return sum(form in plain for form in wanted) + (len(host) > 3 and host in plain) + (b"alice" in plain)


def essence(report: dict[str, Any], *, ids: bool = True) -> list[Any]:
    """Return the parts that must be equal."""
    found = [report["verdict"], report["data"]["class_name"], report["data"]["ranks"]]
    return [*found, sorted(finding["id"] for finding in report["findings"])] if ids else found


def run(launcher: str, fault: str) -> dict[str, Any]:
    """Start one job, let it hang, and compare."""
    folder = Path(tempfile.mkdtemp(prefix=f"{SECRETS['HF_TOKEN']}-"))
    job = hang_matrix.launch(launcher, folder, fault)
    try:
        hang_matrix.wait_ready(folder, job)
        (folder / "extra.log").write_text(LOG.format(**SECRETS))
        time.sleep(hang_matrix.SETTLE_S)
        if job.poll() is not None:
            return {"fault": fault, "same": None, "why": "the launcher ended the job"}
        target = folder / "b.tar.gz"
        before = hang_matrix.report(launcher, "hang")
        began = time.monotonic()
        made = hang_matrix.report(launcher, "bundle", "-o", str(target), "--logs", str(folder / "extra.log"))
        seconds = time.monotonic() - began
        after = hang_matrix.report("torchrun", "hang", "--from", str(target))
        (here,) = [row for row in made["data"]["verdicts"] if row["command"] == "hang"]
        return {
            "fault": fault,
            "same": here["same"] and here["verdict"] == after["verdict"],
            "beside": essence(before, ids=False) == essence(after, ids=False),
            "verdict": essence(after, ids=False),
            "score": hang_matrix.score(fault, after["data"]["ranks"], after["data"]["class_name"], after["verdict"]),
            "leaks": leaks(target),
            "secrets": made["data"]["secrets"],
            "KiB": made["data"]["bytes"] >> 10,
            "seconds": round(seconds, 1),
        }
    finally:
        hang_matrix.end(job, folder)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run all of it, and print a line for each, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launcher", default="torchrun")
    parser.add_argument("--faults", default=FAULTS)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    os.environ.update(SECRETS)
    rows = []
    for fault in options.faults.split(","):
        rows.append(run(options.launcher, fault))
        print(json.dumps(rows[-1]), flush=True)
    judged = [row for row in rows if row["same"] is not None]
    for column in ("same", "beside"):
        print(column, sum(row[column] for row in judged), "of", len(judged))
    print("leaks", sum(row["leaks"] for row in judged))
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=1))
    hang_matrix.SLURMS.close()
    sys.exit(0 if all(row["same"] and not row["leaks"] for row in judged) else 1)


if __name__ == "__main__":
    main()
