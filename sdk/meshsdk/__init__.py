"""The Shardmesh SDK for training processes: datasets, the loader, the S3 client and the `mesh` command.

Law: the package needs numpy, awscrt, click, rich, the standard library and `meshwire`; it never imports
`meshd`, aiohttp or boto3, and imports torch only if the caller asks for tensors. Order, randomness and
content of batches are decided by `meshwire` and the nodes. Public names load on first use, so
`import meshsdk` takes a millisecond.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from meshsdk.earlier_paths import install_earlier_paths
from meshsdk.lazy_import import load_module

if TYPE_CHECKING:
    from meshsdk import errors, ops, packed_rows
    from meshsdk.arrays.field_statistics import field_statistics
    from meshsdk.arrays.open_dicom import open_dicom
    from meshsdk.arrays.open_slides import open_slides
    from meshsdk.arrays.open_zarr import open_zarr
    from meshsdk.client.gather import Gathered, Item
    from meshsdk.client.s3_client import Client, connect
    from meshsdk.datasets.batch import Batch, Ragged
    from meshsdk.datasets.dataset import Dataset, mix
    from meshsdk.datasets.fields import class_of_prefix
    from meshsdk.datasets.shuffle import Blocks, LengthBuckets
    from meshsdk.datasets.split_mix import Stage
    from meshsdk.errors import MeshError
    from meshsdk.loader.loader import Loader
    from meshsdk.loader.output_stage import Normalize
    from meshsdk.loader.warm_up import warm
    from meshsdk.open_annotated import open_coco, open_voc, open_yolo
    from meshsdk.open_dataset import open
    from meshsdk.sample_writer import Writer
    from meshsdk.tables.open_iceberg import open_iceberg
    from meshsdk.tables.open_lance import open_lance
    from meshsdk.token_files import TokenFiles
    from meshsdk.token_writer import write_tokens

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
    "TokenFiles",
    "Writer",
    "class_of_prefix",
    "connect",
    "errors",
    "field_statistics",
    "mix",
    "open",
    "open_coco",
    "open_dicom",
    "open_iceberg",
    "open_lance",
    "open_slides",
    "open_voc",
    "open_yolo",
    "open_zarr",
    "ops",
    "packed_rows",
    "warm",
    "write_tokens",
]

_MODULES = ("errors", "ops", "packed_rows")
_HOMES = {
    "Batch": "datasets.batch",
    "Blocks": "datasets.shuffle",
    "Client": "client.s3_client",
    "Dataset": "datasets.dataset",
    "Gathered": "client.gather",
    "Item": "client.gather",
    "LengthBuckets": "datasets.shuffle",
    "Loader": "loader.loader",
    "MeshError": "errors",
    "Normalize": "loader.output_stage",
    "Ragged": "datasets.batch",
    "Stage": "datasets.split_mix",
    "TokenFiles": "token_files",
    "Writer": "sample_writer",
    "class_of_prefix": "datasets.fields",
    "connect": "client.s3_client",
    "field_statistics": "arrays.field_statistics",
    "mix": "datasets.dataset",
    "open": "open_dataset",
    "open_coco": "open_annotated",
    "open_dicom": "arrays.open_dicom",
    "open_iceberg": "tables.open_iceberg",
    "open_lance": "tables.open_lance",
    "open_slides": "arrays.open_slides",
    "open_voc": "open_annotated",
    "open_yolo": "open_annotated",
    "open_zarr": "arrays.open_zarr",
    "warm": "loader.warm_up",
    "write_tokens": "token_writer",
}

install_earlier_paths()

if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Load a public name on first use, so that `import meshsdk` alone takes a millisecond."""
        if name in _MODULES:
            return load_module(name)
        if name in _HOMES:
            value = globals()[name] = getattr(load_module(_HOMES[name]), name)
            return value
        # `obj` lets Python suggest a similar name.
        raise AttributeError(
            f"module 'meshsdk' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
