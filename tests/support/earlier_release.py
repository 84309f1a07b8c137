"""Earlier commits of this repository, run as releases of their own by tests.

Law: the code comes from the history of this checkout, the libraries from its virtual environment.
"""

from __future__ import annotations

import compileall
import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FORMER: Final = "2f06c54254cbc0c9f6703091177a366606e09716"
"""The last one with the names that CHANGELOG.md calls earlier."""
EARLIER: Final = "a78d64589d71f8770ebadb6a409fe819a39c6c10"
"""A day before that. Before volumes that grow and neighbours on one disk: rights and definitions of
Kubernetes have changed since."""

BEFORE_PAGES: Final = "65f03ed6b348f40291963ce27d6e294f65b41c4c"
"""The last one whose nodes do not know snapshots of pages."""


def unpack(commit: str, place: Path, *parts: str) -> Path:
    """Unpack folders of a commit at a place, compiled, and return it. Skips the test where there is no
    history."""
    archive = ["git", "-C", str(ROOT), "archive", commit, *parts]
    done = subprocess.run(archive, capture_output=True, check=False, timeout=60)
    if done.returncode:
        import pytest  # nodes of the demo and of benchmarks do without

        pytest.skip(f"the history of this checkout does not reach back to {commit[:7]}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
        files.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian's 3.11.2 has none
        files.extractall(place)
    compileall.compile_dir(place, quiet=1)  # or each of its processes would, all at once
    return place


def code_path(checkout: Path) -> str:
    """Return the PYTHONPATH of a process that runs a checkout's code instead of this one's."""
    return os.pathsep.join(str(checkout / part) for part in ("", "sdk", "operator"))
