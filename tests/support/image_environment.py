"""What an image has of this environment: `ImageEnvironment.read(text of its Dockerfile)`.

Law: the Dockerfile, pyproject.toml and docker/slim.py are read and not repeated here. An interpreter with
`variables` in its environment, and whatever it forks or starts with them, finds the modules of the image:
those of the distributions that the Dockerfile installs and of all that these require, without those that it
uninstalls or deletes, and a standard library without what slim.py removes. Libraries that are not Python
modules, such as the stubs in OpenCV's wheel, are as they are here; `make e2e` looks at those.
"""

from __future__ import annotations

import runpy
import shlex
import sysconfig
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ROOT: Final = Path(__file__).resolve().parents[2]
SITE: Final = Path(__file__).with_name("image_site")
_OURS: Final = frozenset({"shardmesh", "shardmesh-tools"})
_PYTHON: Final = "/opt/mesh/bin/python"
_packages_distributions = cache(packages_distributions)


@dataclass(frozen=True, slots=True)
class ImageEnvironment:
    """`projects`: what it installs of this checkout, as `.[server]`. `uninstalled`: distributions. `deleted`:
    packages of ours that are removed as folders."""

    projects: tuple[str, ...]
    uninstalled: frozenset[str]
    deleted: frozenset[str]

    @classmethod
    def read(cls, dockerfile: str) -> Self:
        """Parse a Dockerfile of docker/."""
        projects, uninstalled, deleted = list[str](), set[str](), set[str]()
        for words in _commands(dockerfile):
            plain = [word for word in words if not word.startswith("-")]
            if "pip" in words and _PYTHON in words and "install" in words:
                projects += plain[plain.index("install") + 1 :]
            elif "pip" in words and _PYTHON in words and "uninstall" in words:
                uninstalled |= set(map(canonicalize_name, plain[plain.index("uninstall") + 1 :]))
            elif words[0] == "rm":
                deleted |= {Path(word).name for word in plain if Path(word).parent.name == "site-packages"}
        return cls(tuple(projects), frozenset(uninstalled), frozenset(deleted))

    @property
    def variables(self) -> Mapping[str, str]:
        """Of the environment of a process that is to find what the image has."""
        return {"PYTHONPATH": str(SITE), "MESH_TEST_IMAGE_LACKS": ",".join(sorted(self.missing()))}

    def missing(self) -> set[str]:
        """Modules of this environment that the image lacks; `*.name` is each of this name inside packages."""
        kept = self.distributions() - self.uninstalled
        found = {
            module
            for module, owners in _packages_distributions().items()
            if module != "tests" and kept.isdisjoint(map(canonicalize_name, owners))
        }
        ours = self._packages()
        return (found - ours) | (_all_packages() - ours) | set(_slimmed())

    def distributions(self) -> set[str]:
        """Those that are installed at first, with all that they require, but ours."""
        seen = set[tuple[str, frozenset[str]]]()
        waiting = list[tuple[str, frozenset[str]]]()
        for project in self.projects:
            told, extras = _project(project)["project"], Requirement(f"it{_extras(project)}").extras
            waiting += _wanted(told["dependencies"], ())
            for extra in extras:
                waiting += _wanted(told["optional-dependencies"][extra], ())
        while waiting:
            if (one := waiting.pop()) not in seen and one[0] not in _OURS:
                seen.add(one)
                waiting += _wanted(requires(one[0]) or (), one[1])
        return {name for name, _ in seen}

    def _packages(self) -> set[str]:
        """Packages of ours that stay."""
        return {each for project in self.projects for each in _packages_of(project)} - self.deleted


def _commands(dockerfile: str) -> Iterator[list[str]]:
    """The words of each command that the Dockerfile runs."""
    for line in dockerfile.replace("\\\n", " ").splitlines():
        if line.startswith("RUN "):
            yield from (shlex.split(command) for command in line.removeprefix("RUN ").split("&&"))


def _extras(project: str) -> str:
    """`[server]` of `.[server]`."""
    return "".join(project.partition("[")[1:])


@cache
def _read_project(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


def _project(project: str) -> dict[str, Any]:
    return _read_project(project.partition("[")[0])


def _packages_of(project: str) -> set[str]:
    packages = _project(project)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return {Path(each).name for each in packages}


def _all_packages() -> set[str]:
    return {each for folder in (".", "./tools") for each in _packages_of(folder)}


def _wanted(requirements: Iterable[str], extras: Iterable[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """What these lines require in this interpreter, when these extras are asked for, each with its extras."""
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": each}) for each in (*extras, "")):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def _slimmed() -> Iterator[str]:
    """Modules of the standard library and of wheels that slim.py removes."""
    slim = runpy.run_path(str(ROOT / "docker" / "slim.py"))
    library = Path(sysconfig.get_path("stdlib"))
    for pattern in " ".join(slim["UNUSED_MODULES"]).split():
        yield from (path.name.partition(".")[0] for path in library.glob(pattern))
    for pattern in slim["UNUSED_FILES"].split():
        folder, _, name = pattern.rpartition("/")
        if "*" not in name:
            yield f"*.{name}" if folder == "**" else f"{folder}.{name}"
