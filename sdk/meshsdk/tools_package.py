"""Lookup of the optional package `shardmesh-tools`: `mesh doctor`, `mesh top`, `mesh cache` and traces.

Law: the SDK never imports `meshtools`. The package registers its commands and its hooks for loaders as
entry points, and a command or hook is loaded when it is used.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final

from meshsdk.errors import ConfigurationError

COMMANDS: Final = "meshsdk.commands"
"""Entry points: commands of `mesh`, by name."""
LOADER_HOOKS: Final = "meshsdk.loader_hooks"
"""Entry points: `trace`, `nvtx` and `doctor`, which `meshsdk.loader` calls."""


@cache
def find_tool(group: str, name: str) -> Any:
    """Loads an entry point; None if no installed package has it."""
    found = next(iter(entry_points(group=group, name=name)), None)
    return None if found is None else found.load()


def load_tool(group: str, name: str, feature: str) -> Any:
    """Loads an entry point. Raises ConfigurationError with the command that installs it."""
    found = find_tool(group, name)
    if found is None:
        raise ConfigurationError(missing_tool(feature))
    return found


def missing_tool(feature: str) -> str:
    """Returns the sentence that names the command which installs a feature."""
    return (
        f"{feature} needs the package shardmesh-tools: run pip install 'shardmesh[tools]', or "
        "pip install ./tools in a clone of Shardmesh"
    )
