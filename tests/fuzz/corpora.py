"""The corpora: files under tests/golden/corpora/TARGET, each an input that once taught something.

Law: small and ours; a crash that was fixed leaves its input here.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

CORPORA = Path(__file__).resolve().parents[1] / "golden" / "corpora"


def corpus(target: str) -> list[Path]:
    """The inputs of a target, in the order of their names."""
    return sorted(path for path in (CORPORA / target).glob("*") if path.is_file())


def keep(folder: Path, data: bytes, kind: str) -> Path:
    """Write an input under a name made of its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path
