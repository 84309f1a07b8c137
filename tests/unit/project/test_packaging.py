"""The shape of the distribution: what a bare install imports; no folder of ours shadows the standard
library."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from meshwire.http_values.mesh_headers import RELEASE

ROOT = Path(__file__).resolve().parents[3]

_BLOCK = """
import sys
import tomllib
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is not part of the bare install", name=name)
sys.meta_path.insert(0, Refuse())
import meshsdk, meshsdk.ops, meshsdk.cli
"""
_EXTRAS = (
    "aiohttp",
    "httptools",
    "uvloop",
    "lmdb",
    "msgspec",
    "yaml",
    "prometheus_client",
    "simplejpeg",
    "cv2",
    "PIL",
    "torch",
    "kopf",
    "boto3",
    "botocore",
    "meshd",
    "meshtools",
)


def _python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False, timeout=60
    )


def test_bare_install_imports_the_sdk_without_any_extra() -> None:
    done = _python(_BLOCK.format(blocked=_EXTRAS), ROOT)
    assert done.returncode == 0, done.stderr


def test_standard_operator_is_not_shadowed_from_the_root() -> None:
    done = _python("import operator, sys; print(operator.__file__); operator.itemgetter(0)", ROOT)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).is_relative_to(ROOT)


def test_folders_that_hold_packages_are_not_packages() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert not (ROOT / "sdk" / "__init__.py").exists()
    assert not (ROOT / "tools" / "__init__.py").exists()


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    folders = ("meshd", "sdk", "operator", "tools", "bench")
    ours = [p for top in folders for p in (ROOT / top).rglob("*.py")]
    assert len(ours) > 50
    clashes = [
        p for p in ours if p.stem in sys.stdlib_module_names and p.stem not in {"__init__", "__main__"}
    ]
    assert clashes == []


def test_the_release_that_nodes_name_is_the_distributions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tools = tomllib.loads((ROOT / "tools" / "pyproject.toml").read_text())["project"]
    assert project["version"] == tools["version"] == RELEASE
    assert project["optional-dependencies"]["tools"] == [f"{tools['name']}=={RELEASE}"]
    assert tools["dependencies"][0] == f"{project['name']}=={RELEASE}"


def test_the_distribution_leaves_the_tools_out_and_theirs_has_nothing_else() -> None:
    def packages(project: Path) -> list[str]:
        hatch = tomllib.loads(project.read_text())["tool"]["hatch"]
        found: list[str] = hatch["build"]["targets"]["wheel"]["packages"]
        return found

    ours = ["meshd", "sdk/meshwire", "sdk/meshsdk", "sdk/meshdemo", "operator/meshoperator"]
    assert packages(ROOT / "pyproject.toml") == ours
    assert packages(ROOT / "tools" / "pyproject.toml") == ["meshtools"]
