"""Every library that the product imports is declared, in the extra with which the module is installed.

What another library merely brings may be another one, or none, in its next release. A module is loaded with
what its distribution and these extras require; inside functions it may use any extra, and says which one is
missing.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parents[3]
OURS = {"meshd", "meshwire", "meshsdk", "meshdemo", "meshoperator", "meshtools"}
EXTRAS = {
    "meshd": ("server",),
    "meshd/transform/parquet": ("server", "parquet"),
    "sdk/meshwire": (),
    "sdk/meshsdk": (),
    "sdk/meshsdk/adapters/checkpoints.py": ("torch",),
    "sdk/meshsdk/adapters/filesystems.py": ("fsspec",),
    "sdk/meshsdk/adapters/grains.py": ("grain",),
    "sdk/meshsdk/adapters/torchdata.py": ("torch", "torchdata"),
    "sdk/meshsdk/adapters/webdatasets.py": ("webdataset",),
    "sdk/meshsdk/adapters/zarrs.py": ("zarr",),
    "sdk/meshsdk/loader/torch_iterable.py": ("torch",),
    "sdk/meshdemo": ("server", "torch"),
    "operator/meshoperator": ("operator",),
    "tools/meshtools": (),
}
"""By the longest beginning of a module's path: with which extras it is installed."""
PROVIDED = {
    "sdk/meshsdk/adapters/rays.py": {"ray"},
    "sdk/meshsdk/adapters/tensorflow.py": {"tensorflow"},
    "sdk/meshdemo/upload.py": {"boto3", "botocore"},
}
"""Used inside functions when a program brings it: none of our extras installs it."""
UNINSTALLED = {"lance": "pylance"}
"""Distributions that are not in every developer's environment, and are not named as their module."""
NEWER = {"compression"}
"""Of a standard library newer than the one that runs this."""


def project(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    return found


OWN = project(".")
TOOLS = project("tools")
OWNERS = packages_distributions()


def names(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in requirements}


def declared(extras: Iterable[str]) -> set[str]:
    return names(OWN["dependencies"]).union(*(names(OWN["optional-dependencies"][each]) for each in extras))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Each module that is imported, and whether that is when the module itself is loaded. What only type
    checkers read is left out."""
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text()), True)]
    while waiting:
        parent, loaded = waiting.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.Import):
                yield from ((alias.name, loaded) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield str(node.module), loaded
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                waiting.append((ast.Module(node.orelse, []), loaded))
            elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
                waiting.append(
                    (node, loaded and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
                )


def undeclared(path: Path, loaded_with: set[str], used_with: set[str]) -> Iterator[str]:
    """What a module imports that is in neither set of distributions, as said above."""
    for module, loaded in imports(path):
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names or top in OURS | NEWER:
            continue
        owners = set(map(canonicalize_name, OWNERS.get(top, (UNINSTALLED.get(top, top),))))
        if owners.isdisjoint(loaded_with if loaded else used_with):
            yield f"{path.relative_to(ROOT)}: {module}, {'at its start' if loaded else 'in a function'}"


@pytest.mark.parametrize("package", ["meshd", "operator", "sdk", "tools"])
def test_what_is_imported_is_declared(package: str) -> None:
    anywhere = declared(OWN["optional-dependencies"])
    found, modules = list[str](), 0
    for path in sorted((ROOT / package).rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        start = max((each for each in EXTRAS if f"{place}/".startswith(f"{each}/")), key=len, default=None)
        if start is None:  # such as a script for releases
            continue
        modules += 1
        own = declared(EXTRAS[start])
        if package == "operator":  # its image installs this extra alone
            anywhere = own
        elif package == "tools":
            own |= names(TOOLS["dependencies"])
        found += undeclared(path, own, anywhere | own | PROVIDED.get(place, set()))
    assert modules > 10
    assert found == []


def test_an_import_that_is_not_declared_is_found(tmp_path: Path) -> None:
    source = (
        "if TYPE_CHECKING:\n    import torch\nelse:\n    import yaml\ntry:\n    import numpy\nexcept E:\n"
    )
    source += "    from lmdb import x\ndef f():\n    import jwt\n"
    (tmp_path / "m.py").write_text(source)
    assert sorted(imports(tmp_path / "m.py")) == [
        ("jwt", False),
        ("lmdb", True),
        ("numpy", True),
        ("yaml", True),
    ]
    own = declared(("server",))
    file, inside = (
        ROOT / "meshd" / place for place in ("process/users_file.py", "transform/sandbox/wheel_tags.py")
    )
    assert [*undeclared(file, own, set()), *undeclared(inside, own, own)] == []
    told = list(undeclared(file, own - {"PyYAML", "pyyaml"}, own - {"PyYAML", "pyyaml"}))
    assert told == ["meshd/process/users_file.py: yaml, at its start"]
    told = list(undeclared(inside, own - {"packaging"}, own - {"packaging"}))
    assert "meshd/transform/sandbox/wheel_tags.py: packaging, in a function" in told


def test_no_exception_is_left_over() -> None:
    for place, brought in PROVIDED.items():
        assert brought <= {module.partition(".")[0] for module, _ in imports(ROOT / place)}
    assert all((ROOT / place).exists() for place in EXTRAS)
