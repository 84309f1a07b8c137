"""Earlier path of `Preflight`, kept for one release: see `meshsdk.datasets.preflight`."""

from __future__ import annotations

from meshsdk.datasets.preflight import Preflight

__all__ = ["Preflight"]
