"""What a confined process loads before the module does: the libraries it names, and what they load late.

Law: installed libraries alone, by name; nothing of the module is run, only read.
"""

from __future__ import annotations

import ast
import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

_ALWAYS = (
    *("meshsdk.userops", "meshwire.randomness", "random"),
    *("numpy", "numpy.fft", "numpy.linalg", "numpy.ma", "numpy.polynomial", "numpy.random"),
    *(f"encodings.{name}" for name in ("ascii", "cp1252", "cp437", "idna", "latin_1", "punycode", "utf_7")),
    *(f"encodings.{name}" for name in ("utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_8_sig")),
)
"""What is there whether a module names it or not; numpy and codecs load much of it when it is first used."""
_NOT_IMPORTED = ("meshd", "antigravity")


def preload(source: str) -> dict[str, str]:
    """Load what the module imports by name, anywhere in it: installed libraries alone. Their memory is not
    the op's, and where files are sealed they cannot be loaded later. Returns why some could not be."""
    failures: dict[str, str] = {}
    sys.meta_path.insert(0, _NotOurs())
    for name in (*_ALWAYS, *_imported(source)):
        try:
            _warm(importlib.import_module(name))
        except BaseException as error:
            failures[name] = f"{type(error).__name__}: {error}"
    return failures


class _NotOurs:
    """The daemon's own code is nothing for an op to build on."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in _NOT_IMPORTED:
            raise ImportError(f"user ops cannot import {name!r}", name=name)


def _warm(module: ModuleType) -> None:
    """Libraries that load parts of themselves when first used."""
    if module.__name__ in ("PIL", "PIL.Image"):
        importlib.import_module("PIL.Image").init()


def _imported(source: str) -> list[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # running it says what is wrong
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name: None for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found[node.module] = None
            found |= {f"{node.module}.{alias.name}": None for alias in node.names if alias.name != "*"}
    return list(found)[:200]
