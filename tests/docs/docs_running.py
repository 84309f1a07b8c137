"""Inside the process of one page: one Python namespace and one bash for all its blocks, in order."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_names: dict[str, Any] = {"__name__": "__main__"}
_folder = tempfile.TemporaryDirectory(prefix="docs-page-")
_BLOCK, _ENV = (Path(_folder.name) / name for name in ("block.sh", "after.env"))


class Shell:
    """A bash that lives as long as the page; the first failing command ends it."""

    def __init__(self) -> None:
        self._said, said = os.pipe()
        self._bash = subprocess.Popen(["bash", "-euo", "pipefail"], stdin=subprocess.PIPE, pass_fds=[said])
        self._step = f"source {_BLOCK} </dev/null {said}>&-; env -0 >{_ENV}; pwd >>{_ENV}; echo >&{said}\n"

    def run(self, place: str, text: str) -> None:
        """Run a block and wait for it; programs it puts into the background go on."""
        _BLOCK.write_text(text + "\n")
        assert self._bash.stdin is not None
        self._bash.stdin.write(self._step.encode())
        self._bash.stdin.flush()
        while not select.select([self._said], [], [], 0.05)[0]:
            if self._bash.poll() is not None:
                sys.exit(f"{place}: the block ended with exit code {self._bash.returncode}")
        os.read(self._said, 1)


_shell: list[Shell] = []


def run_python(place: str, text: str) -> None:
    """One block, in the page's namespace; a traceback names the page and counts lines from the fence."""
    print(f"--- {place}", flush=True)
    exec(compile(text, place, "exec"), _names)


def run_shell(place: str, text: str) -> None:
    """One block in the page's bash; what it exports, and its folder, hold for Python blocks too."""
    print(f"--- {place}", flush=True)
    if not _shell:
        _shell.append(Shell())
    _shell[0].run(place, text)
    *pairs, folder = _ENV.read_text().split("\0")
    os.environ.update(dict(pair.split("=", 1) for pair in pairs if "=" in pair))
    os.chdir(folder.strip())
