"""The published schema of --json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

_FILE = Path(__file__).resolve().parents[1] / "docs/reference/distdiag-1.schema.json"
SCHEMA = jsonschema.Draft202012Validator(json.loads(_FILE.read_text()))


def check(text: str, status: int) -> dict[str, Any]:
    """Validate a document and its exit status; return it."""
    document = json.loads(text)
    SCHEMA.validate(document)
    assert document["exit_code"] == status
    return dict(document)
