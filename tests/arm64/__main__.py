"""Runs the wheel on arm64, emulated, and compares what it gives with this machine.

    python -m tests.arm64 [--root DIR]

A Debian of arm64 is made in DIR (by mmdebstrap; some minutes) and kept; QEMU emulates its processor for the
programs in it. As root, with Debian's mmdebstrap, arch-test and qemu-user-static. Exits with 1 if a result
differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
HOUR: Final = 3600.0
GLIBC: Final = range(17, 37)
"""Minor releases of glibc that wheels may be built for; Debian 12 has 36."""
TAGS: Final = [f"manylinux_2_{minor}_aarch64" for minor in GLIBC] + ["manylinux2014_aarch64"]
TARGET: Final = ["--python-version", "3.11", "--implementation", "cp", "--only-binary", ":all:"]


def run(*command: object, **options: Any) -> str:
    """Return what a command prints; raises CalledProcessError."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=HOUR, **options)
    return str(done.stdout)


def debian(root: Path) -> None:
    """Make the root file system, unless it is there."""
    if not (root / "usr/bin/python3").exists():
        print(f"making a Debian of arm64 in {root}", flush=True)
        packages = "--include=python3,ca-certificates"
        run("mmdebstrap", "--arch=arm64", "--variant=minbase", packages, "bookworm", root)


def install(root: Path) -> None:
    """Install the wheel of this checkout with all that a daemon needs, and the checks."""
    print("installing the wheel, and those of arm64 that it needs", flush=True)
    pip = [sys.executable, "-m", "pip"]
    platforms = [word for tag in TAGS for word in ("--platform", tag)]
    with tempfile.TemporaryDirectory() as folder:
        run(*pip, "wheel", "-qq", "--no-deps", "-w", folder, ROOT)
        [wheel] = Path(folder).glob("*.whl")
        run(
            *pip,
            "install",
            "-q",
            "--upgrade",
            "--target",
            root / "wheel",
            *TARGET,
            *platforms,
            f"{wheel}[server]",
        )
    checks = run("git", "ls-files", "tests/golden/*.py", "tests/arm64", cwd=ROOT).split()
    for name in checks:
        path = root / "checks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((ROOT / name).read_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.arm64", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("--root", type=Path, default=ROOT / ".arm64", help="folder of the Debian [.arm64]")
    root = parser.parse_args().root.absolute()
    debian(root)
    install(root)
    print("running the ops, a daemon and an epoch there", flush=True)
    # QEMU reserves what a process maps, so the index gets less address space than elsewhere.
    there = {
        "PATH": "/usr/sbin:/usr/bin:/bin",
        "HOME": "/root",
        "PYTHONPATH": "/wheel:/checks",
        "MESHD_INDEX_MAP": "256MiB",
    }
    found = json.loads(run("chroot", root, "python3", "-m", "tests.arm64.results", env=there))
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    expected = json.loads(run(sys.executable, "-m", "tests.arm64.results", env=here, cwd=ROOT))
    machine, ours = found.pop("machine"), expected.pop("machine")
    different = sorted(name for name in expected if found.get(name) != expected[name])
    print(f"{machine} beside {ours}: {len(expected)} results, {len(different)} differ {' '.join(different)}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
