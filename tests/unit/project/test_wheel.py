"""A release: two builds are equal, one from the sources' archive is equal, too, and what is installed
from the wheel runs outside a clone.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from meshwire.http_values.mesh_headers import RELEASE

ROOT = Path(__file__).resolve().parents[3]
TOOL = runpy.run_path(str(ROOT / "tools" / "release.py"))
pytestmark = pytest.mark.timeout(600)  # a release is built twice, on a machine that may be busy
OURS = {"meshd", "meshdemo", "meshoperator", "meshsdk", "meshwire"}


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a release of this tree would be; everything in it was built twice, and is equal."""
    place = tmp_path_factory.mktemp("release")
    told = run(sys.executable, ROOT / "tools" / "release.py", "--out", place, cwd=ROOT)
    assert f"shardmesh {RELEASE}" in told
    return place


@pytest.fixture(scope="module")
def wheel(released: Path) -> Path:
    return released / f"shardmesh-{RELEASE}-py3-none-any.whl"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel was installed, without its dependencies."""
    place = tmp_path_factory.mktemp("installed")
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-index", "--target", place)
    run(sys.executable, *map(str, pip), str(wheel), cwd=place)
    return place


def test_a_release_has_everything_and_its_sums(released: Path) -> None:
    tools = f"shardmesh_tools-{RELEASE}"
    distributions = [f"shardmesh-{RELEASE}.tar.gz", f"{tools}-py3-none-any.whl", f"{tools}.tar.gz"]
    helm = Path(sys.executable).with_name("helm")
    chart = [f"shardmesh-{RELEASE}.tgz"] if helm.exists() else []
    wanted = {f"shardmesh-{RELEASE}-py3-none-any.whl", *distributions, *chart, "NOTES.md"}
    lines = (released / "SHA256SUMS").read_text().splitlines()
    assert (
        {line.split()[1] for line in lines} == wanted == {p.name for p in released.iterdir()} - {"SHA256SUMS"}
    )
    for line in lines:
        digest, name = line.split()
        assert hashlib.sha256((released / name).read_bytes()).hexdigest() == digest
    assert "### " in (released / "NOTES.md").read_text()


def test_the_archive_of_the_sources_builds_the_same_wheel(
    released: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(released / f"shardmesh-{RELEASE}.tar.gz") as archive:
        archive.extractall(tmp_path)
    [sources] = tmp_path.iterdir()
    build = ("-m", "hatchling", "build", "-t", "wheel", "-d")
    run(sys.executable, *build, tmp_path / "dist", cwd=sources)
    assert (tmp_path / "dist" / wheel.name).read_bytes() == wheel.read_bytes()


def test_versions_that_differ_and_notes_that_are_missing_are_no_release() -> None:
    found = TOOL["versions"]()
    assert TOOL["agreed_version"](found) == TOOL["agreed_version"](found, RELEASE) == RELEASE
    changelog = "# Changelog\n\n## Unreleased\n\n## 0.1.0\n\nx\n"
    refused: list[tuple[str, tuple[object, ...]]] = [
        ("agreed_version", (found | {"Chart.yaml, version": "9.9.9"},)),
        ("agreed_version", (found, "9.9.9")),
        ("notes", (changelog, "Unreleased")),
        ("notes", (changelog, "0.2.0")),
    ]
    for name, arguments in refused:
        with pytest.raises(TOOL["ReleaseError"]):
            TOOL[name](*arguments)
    assert TOOL["notes"]("# C\n\n## 0.2.0 (2026-12-01)\n\nnew\n\n## 0.1.0\n\nold\n", "0.2.0") == "new\n"


def test_a_release_without_the_console_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TOOL["ReleaseError"], match="make console"):
        TOOL["require_console"](tmp_path / "index.html")
    (tmp_path / "index.html").touch()
    TOOL["require_console"](tmp_path / "index.html")


def test_the_chart_of_a_release_takes_its_images_from_the_registry(tmp_path: Path) -> None:
    for name in ("values.yaml", "README.md"):
        (tmp_path / name).write_text((ROOT / "helm" / "shardmesh" / name).read_text())
    TOOL["set_registry"](tmp_path, "ghcr.io/Some/Name")
    values, readme = (tmp_path / name for name in ("values.yaml", "README.md"))
    for image in ("operator", "meshd"):
        assert f"repository: ghcr.io/some/name/{image}\n" in values.read_text()
        assert f'image.repository` | `"ghcr.io/some/name/{image}"`' in readme.read_text()
    assert "registry.example.com" not in values.read_text() + readme.read_text()
    with pytest.raises(TOOL["ReleaseError"]):
        TOOL["set_registry"](tmp_path, "ghcr.io/Some/Name")


def test_the_wheel_has_our_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == OURS
    assert {f"{package}/py.typed" for package in OURS} <= set(names)


def test_what_is_installed_runs_outside_the_clone(installed: Path, tmp_path: Path) -> None:
    code = f"import importlib; print(*[importlib.import_module(name).__file__ for name in {sorted(OURS)}])"
    found = run(sys.executable, "-c", code, cwd=tmp_path, path=installed).split()
    assert len(found) == len(OURS)
    assert all(Path(file).is_relative_to(installed) for file in found), found
    for program, word in (("mesh", "demo"), ("meshd", "serve"), ("meshoperator", "usage")):
        told = run(sys.executable, installed / "bin" / program, "--help", cwd=tmp_path, path=installed)
        assert word in told
    digits = "from meshdemo.upload import digits; print(len(list(digits())))"
    assert run(sys.executable, "-c", digits, cwd=tmp_path, path=installed) == "1797\n"
