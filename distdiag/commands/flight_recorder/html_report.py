"""flight-recorder as one HTML page that needs no network."""

from __future__ import annotations
