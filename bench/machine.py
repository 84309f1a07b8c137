"""Where and with what the figures were taken. No host names, no paths."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from bench import photo_dataset
from bench.servers import binary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CORES = 2
PACKAGES = (
    "shardmesh",
    "httptools",
    "uvloop",
    "lmdb",
    "numpy",
    "simplejpeg",
    "opencv-python-headless",
    "torch",
)
PEER_PACKAGES = tuple(wanted.partition("==")[0] for wanted in photo_dataset.PEERS)


def pin() -> list[int]:
    """Keep this process, and all it starts, on the first two cores it may use."""
    chosen = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, chosen)
    return chosen


def busy(seconds: float = 1.0) -> float:
    """Share of the cores, in percent, that this machine uses while the bench itself does nothing."""
    return float(psutil.cpu_percent(interval=seconds))


def output(argv: Sequence[str]) -> str:
    """stdout and stderr of a short command; empty when it cannot run."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    except OSError:
        return ""
    return done.stdout + done.stderr


def commit() -> str:
    """The short id of the checkout's commit; with a plus sign where its code was changed since."""
    root = str(Path(__file__).resolve().parents[1])
    found = output(["git", "-C", root, "rev-parse", "--short", "HEAD"]).strip()
    if not re.fullmatch("[0-9a-f]+", found):
        return "unknown"
    report = (":!bench/figures", ":!docs/benchmarks.md")
    changed = output(["git", "-C", root, "status", "--porcelain", "-uno", "--", ".", *report])
    return f"{found}+" if changed else found


def cpu_model() -> str:
    """As the kernel names it."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def describe() -> dict[str, str | int]:
    """What the machine is, fact by fact."""
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "cpu": cpu_model(),
        "cores_used": CORES,
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        "kernel": platform.release().split("-")[0],
        "congestion_control": control.read_text().strip() if control.exists() else "unknown",
        "python": platform.python_version(),
    }


def sentence(facts: Mapping[str, str | int]) -> str:
    """One line about the machine that `describe` described."""
    cores = f"{facts['cores_used']} of {facts['cores']} cores, {facts['memory_gib']} GiB of memory"
    system = f"Linux {facts['kernel']} (TCP: {facts['congestion_control']}), Python {facts['python']}"
    return f"{facts['cpu']}, {cores}, {system}"


def versions(peers: Path) -> dict[str, dict[str, str]]:
    """Of everything that takes part, in groups; `peers`: the interpreter of the peers' environment."""
    groups = {
        "Servers and generator": server_versions(),
        "Ours": package_versions(PACKAGES),
        "Peers": peer_versions(peers),
    }
    return {name: group for name, group in groups.items() if group}


def package_versions(names: Sequence[str]) -> dict[str, str]:
    """Of this environment."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def peer_versions(python: Path) -> dict[str, str]:
    """Of the peers' environment; empty when there is none."""
    if not python.exists():
        return {}
    lines = output([str(python), "-m", "pip", "list", "--format=freeze"]).splitlines()
    pairs = dict(line.split("==", 1) for line in lines if "==" in line)
    return {name: pairs[name] for name in PEER_PACKAGES if name in pairs}


def server_versions() -> dict[str, str]:
    """Of the programs beside ours."""
    patterns = {"weed": (["version"], r"version \S+ ([\d.]+)"), "nginx": (["-v"], r"nginx/([\d.]+)")}
    patterns["wrk"] = (["-v"], r"wrk (\S+)")
    found = {}
    for name, (flags, pattern) in patterns.items():
        program = binary(name)
        match = re.search(pattern, output([program, *flags])) if program else None
        if match:
            found[name] = match[1]
    return found
