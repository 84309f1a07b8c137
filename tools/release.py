"""Makes what a release consists of: `python tools/release.py --out dist [--version 0.1.0] [--registry NAME]`.

In the folder: wheels and archives of the sources of both distributions, the chart, `NOTES.md` from the
changelog, and `SHA256SUMS`. Everything is built twice and compared: the same commit gives the same bytes.
Images are built by docker/build; with a registry, the chart takes them from there. Status 1 with the reason
if the versions disagree, two builds do, or the web console is not built.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from shutil import copyfileobj, copytree, which
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = Path(__file__).resolve().parents[1]
DRAFT: Final = "Unreleased"
CONSOLE: Final = ROOT / "meshd" / "server" / "console" / "files" / "index.html"
_NO_REGISTRY: Final = "registry.example.com/shardmesh"
_BUILD_SECONDS: Final = 300.0
_TIME: Final = 1_580_601_600  # of all files in an archive: that of hatchling, 2020-02-02


class ReleaseError(Exception):
    """What keeps this tree from being released."""


def versions(root: Path = ROOT) -> dict[str, str]:
    """Return the version that each place names."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    tools = tomllib.loads((root / "tools" / "pyproject.toml").read_text())["project"]["version"]
    chart = (root / "helm" / "shardmesh" / "Chart.yaml").read_text()
    wire = (root / "sdk" / "meshwire" / "http_values" / "mesh_headers.py").read_text()
    return {
        "pyproject.toml": project,
        "tools/pyproject.toml": tools,
        "Chart.yaml, version": _only(r'^version: *"?([^"\s]+)', chart),
        "Chart.yaml, appVersion": _only(r'^appVersion: *"?([^"\s]+)', chart),
        "mesh_headers.py, RELEASE": _only(r'^RELEASE: Final = "([^"]+)"', wire),
    }


def _only(pattern: str, text: str) -> str:
    found: list[str] = re.findall(pattern, text, re.MULTILINE)
    return found[0] if len(found) == 1 else ""


def agreed_version(found: Mapping[str, str], wanted: str = "") -> str:
    """Return the version on which all places agree. Raises ReleaseError if they do not, or if it is not the
    wanted one."""
    if len(set(found.values())) != 1:
        raise ReleaseError("the versions differ: " + ", ".join(f"{at} {it}" for at, it in found.items()))
    version = next(iter(found.values()))
    if wanted and version != wanted:
        raise ReleaseError(f"this tree is version {version}, not {wanted}")
    return version


def notes(changelog: str, heading: str) -> str:
    """Return the part of the changelog below `## HEADING`. Raises ReleaseError if there is none."""
    sections = re.split(r"^## +", changelog, flags=re.MULTILINE)[1:]
    for section in sections:
        title, _, text = section.partition("\n")
        if title.split()[:1] == [heading] and text.strip():
            return f"{text.strip()}\n"
    raise ReleaseError(f"CHANGELOG.md has nothing below '## {heading}'")


def require_console(page: Path = CONSOLE) -> None:
    """Raise ReleaseError unless the web console is built: it is not committed, and wheels would lack it."""
    if not page.exists():
        raise ReleaseError("the web console is not built: run `make console`")


def build(out: Path, registry: str = "") -> None:
    """Build the distributions and the chart into a folder."""
    for project in (ROOT, ROOT / "tools"):
        _run([sys.executable, "-m", "hatchling", "build", "-d", str(out)], project)
    helm = which("helm") or which("helm", path=str(Path(sys.executable).parent))
    if helm is None:
        print("no helm: the chart is left out", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as scratch:
        chart, packages = Path(scratch, "shardmesh"), Path(scratch, "packages")
        packages.mkdir()
        copytree(ROOT / "helm" / "shardmesh", chart)
        if registry:
            set_registry(chart, registry)
        _run([helm, "package", str(chart), "--destination", str(packages)], ROOT)
        [packed] = packages.iterdir()
        _repack(packed, out / packed.name)


def set_registry(chart: Path, registry: str) -> None:
    """Make the chart's images those of a registry (`ghcr.io/OWNER/NAME`), in its values and in its README,
    which lists them. Raises ReleaseError if one of the two does not name both."""
    for name in ("values.yaml", "README.md"):
        file = chart / name
        text = file.read_text()
        if text.count(f"{_NO_REGISTRY}/") != 2:
            raise ReleaseError(f"{name} does not name two images of {_NO_REGISTRY}")
        file.write_text(text.replace(_NO_REGISTRY, registry.lower()))


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=_BUILD_SECONDS
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def _repack(packed: Path, target: Path) -> None:
    """Write an archive again without times and owners: helm takes the time of packing."""
    plain = io.BytesIO()
    with tarfile.open(packed) as source, tarfile.open(fileobj=plain, mode="w") as written:
        for member in sorted(source.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = _TIME, 0, 0, "", ""
            written.addfile(member, source.extractfile(member) if member.isfile() else None)
    plain.seek(0)
    with target.open("wb") as file, gzip.GzipFile("", "wb", mtime=_TIME, fileobj=file) as compressed:
        copyfileobj(plain, compressed)


def sums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def release(out: Path, wanted: str = "", registry: str = "") -> str:
    """Make everything in a folder, which must be empty or missing; return the version. Without a wanted
    version it is a draft: its notes are those of what is unreleased, and it may lack the web console."""
    version = agreed_version(versions(), wanted)
    if wanted:
        require_console()
    text = notes((ROOT / "CHANGELOG.md").read_text(), wanted or DRAFT)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ReleaseError(f"{out} is not empty")
    build(out, registry)
    with tempfile.TemporaryDirectory() as scratch:
        build(Path(scratch), registry)
        first, second = sums(out), sums(Path(scratch))
    if first != second:
        differing = sorted(
            name for name in first.keys() | second.keys() if first.get(name) != second.get(name)
        )
        raise ReleaseError(f"two builds differ: {', '.join(differing)}")
    (out / "NOTES.md").write_text(text)
    (out / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums(out).items()))
    return version


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description="Build wheels, sources and chart of a release, twice.")
    parser.add_argument("--out", type=Path, required=True, help="an empty folder")
    parser.add_argument("--version", default="", help="what the tag says; without it, a draft")
    parser.add_argument("--registry", default="", help="where the images are, such as ghcr.io/OWNER/NAME")
    given = parser.parse_args()
    try:
        version = release(given.out, given.version.removeprefix("v"), given.registry)
    except ReleaseError as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    print(f"shardmesh {version} in {given.out}: " + ", ".join(sorted(sums(given.out))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
