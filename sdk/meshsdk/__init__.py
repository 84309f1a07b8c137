"""What a training pod imports: datasets, the loader, an S3 client and the `mesh` command.

Law: the bare install (numpy, awscrt, click, rich, the standard library) and `meshwire`; never `meshd`,
aiohttp or boto3. torch is optional and imported only where tensors are asked for. Order, randomness and
content are decided by `meshwire` and the storage nodes; what lives here only asks, receives and hands
over.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshsdk import errors, ops
    from meshsdk.batches import Batch, Ragged
    from meshsdk.client import Client
    from meshsdk.connecting import connect
    from meshsdk.datasets import Dataset
    from meshsdk.errors import MeshError
    from meshsdk.gathers import Gathered, Item
    from meshsdk.loaders import Loader
    from meshsdk.mixing import Stage, mix
    from meshsdk.normalizing import Normalize
    from meshsdk.opening import open
    from meshsdk.orders import Blocks, LengthBuckets
    from meshsdk.selecting import class_of_prefix

__all__ = [
    "Batch",
    "Blocks",
    "Client",
    "Dataset",
    "Gathered",
    "Item",
    "LengthBuckets",
    "Loader",
    "MeshError",
    "Normalize",
    "Ragged",
    "Stage",
    "class_of_prefix",
    "connect",
    "errors",
    "mix",
    "open",
    "ops",
]

_MODULES = ("errors", "ops")
_HOMES = {
    "Batch": "batches",
    "Blocks": "orders",
    "Client": "client",
    "Dataset": "datasets",
    "Gathered": "gathers",
    "Item": "gathers",
    "LengthBuckets": "orders",
    "Loader": "loaders",
    "MeshError": "errors",
    "Normalize": "normalizing",
    "Ragged": "batches",
    "Stage": "mixing",
    "class_of_prefix": "selecting",
    "connect": "connecting",
    "mix": "mixing",
    "open": "opening",
}


if not TYPE_CHECKING:  # or checkers would let every name pass

    def __getattr__(name: str) -> Any:
        """Public names load with their module on first use: `import meshsdk` alone takes a millisecond."""
        if name in _MODULES:
            return _loaded(name)
        if name in _HOMES:
            value = globals()[name] = getattr(_loaded(_HOMES[name]), name)
            return value
        # With the module, for Python to say what name is near.
        raise AttributeError(
            f"module 'meshsdk' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )


def _loaded(module: str) -> Any:
    """A module, with the collector at rest: what an import makes stays, and looking for garbage through all
    that torch has made takes as long as everything of ours."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return import_module(f"meshsdk.{module}")
    finally:
        if collecting:
            gc.enable()


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
