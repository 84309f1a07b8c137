"""The ops every node has, one subject a file; each registers itself when imported.

Law: codecs live here and nowhere else. Whatever bytes come in, an op returns the whole, right value or raises
BadSampleError: never part of an image, never more memory than its documented bound.
"""

from __future__ import annotations

import importlib

SUBJECTS = (
    "arrays",
    "casting",
    "colours",
    "columns",
    "containers",
    "decoding",
    "encoding",
    "features",
    "flipping",
    "geometry",
    "labels",
    "layouts",
    "mixing",
    "policies",
    "resizing",
    "sequences",
    "texts",
    "tokens",
    "windows",
    "zarrs",
)


def load() -> None:
    """Registers every built-in op. Idempotent."""
    for subject in SUBJECTS:
        importlib.import_module(f"{__name__}.{subject}")
