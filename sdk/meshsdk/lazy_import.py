"""Loads modules of the SDK on first use, so that `import meshsdk` takes a millisecond."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def load_module(name: str) -> ModuleType:
    """Import a module below `meshsdk` with the garbage collector disabled.

    An import creates no garbage, and a collection that scans all objects of torch takes as long as the
    imports of the SDK.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return import_module(f"meshsdk.{name}")
    finally:
        if collecting:
            gc.enable()
