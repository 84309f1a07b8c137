"""On the path of an interpreter that finds no other modules than an image has (../image_environment.py)."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_MISSING = frozenset(os.environ["MESH_TEST_IMAGE_LACKS"].split(","))


class _ImageFinder(PathFinder):
    """As the import system's own, but blind for what the image lacks."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        first, *others = fullname.split(".")
        if first in _MISSING or fullname in _MISSING or any(f"*.{each}" in _MISSING for each in others):
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = _ImageFinder
