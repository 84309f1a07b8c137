"""The distributions: two builds are equal, one from the sources' archive is equal, too, and what is installed
from them runs outside a clone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OURS = {"meshd", "meshdemo", "meshoperator", "meshsdk", "meshwire"}


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(project: Path, into: Path, *targets: str) -> dict[str, Path]:
    """Build a project; return the files by their endings."""
    run(sys.executable, "-m", "hatchling", "build", "-d", into, *targets, cwd=project)
    return {path.suffix: path for path in into.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel was installed, without its dependencies."""
    place = tmp_path_factory.mktemp("installed")
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-index", "--target", place)
    run(sys.executable, *map(str, pip), str(built[".whl"]), cwd=place)
    return place


def test_two_builds_are_equal(built: dict[str, Path], tmp_path: Path) -> None:
    again = build(ROOT, tmp_path)
    assert built.keys() == again.keys() == {".whl", ".gz"}
    for ending, path in built.items():
        assert path.name == again[ending].name
        assert path.read_bytes() == again[ending].read_bytes(), path.name


def test_the_archive_of_the_sources_builds_the_same_wheel(built: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(built[".gz"]) as archive:
        archive.extractall(tmp_path, filter="data") if hasattr(
            tarfile, "data_filter"
        ) else archive.extractall(tmp_path)
    [sources] = tmp_path.iterdir()
    wheel = build(sources, tmp_path / "dist", "-t", "wheel")[".whl"]
    assert wheel.read_bytes() == built[".whl"].read_bytes()


def test_the_wheel_has_our_packages_and_nothing_else(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built[".whl"]) as wheel:
        names = wheel.namelist()
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
    digits = "from meshdemo.digits import digits; print(len(list(digits())))"
    assert run(sys.executable, "-c", digits, cwd=tmp_path, path=installed) == "1797\n"
