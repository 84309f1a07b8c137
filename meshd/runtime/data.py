"""The services of datasets and views in one process: made once, for the S3 endpoint and the native one alike.

Law: what a kind of view needs is handed to it here, in the two tables below; nowhere else are kinds listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from meshd.assembly.catalog import Catalog
from meshd.control.modules import ModuleTable
from meshd.runtime import memory
from meshd.runtime.transforming import confinement
from meshd.service.authorization.readers import Readers
from meshd.service.batches.assets import AssetService
from meshd.service.batches.service import BatchService
from meshd.service.batches.userops import UserOps
from meshd.service.datasets.births import SnapshotBirths
from meshd.service.datasets.capacity import SnapshotCapacity
from meshd.service.datasets.service import DatasetService
from meshd.service.views.batches import BatchReader, complete_batches
from meshd.service.views.definitions import complete_transform
from meshd.service.views.shards.reading import ShardReader
from meshd.service.views.transforms import TransformReader
from meshd.service.views.zarr.laying import ZarrLayouts, ZarrMaker
from meshd.service.views.zarr.reading import ZarrReader
from meshwire.batchviews import BatchesView
from meshwire.shardviews import ShardsView
from meshwire.transformviews import TransformView
from meshwire.zarrviews import ZarrView

if TYPE_CHECKING:
    from meshd.assembly.addressing import FrameSource
    from meshd.runtime.node import Node
    from meshd.service.authorization.access import Access
    from meshd.service.views.kinds import Maker, ViewKind


@dataclass(frozen=True, slots=True)
class DataServices:
    """`frames` is the steward's assembler, here or behind its socket."""

    frames: FrameSource
    catalog: Catalog
    readers: Readers
    datasets: DatasetService
    assets: AssetService
    batches: BatchService
    user_ops: UserOps


def node_catalog(node: Node) -> Catalog:
    """The node's documents, as this process has them."""
    return Catalog(node.store, node.objects, node.uses, node.removals)


def data_services(node: Node, access: Access, frames: FrameSource) -> DataServices:
    """Snapshots, plans, frames, with the rights of whoever asks."""
    catalog = node_catalog(node)
    readers = Readers(access)
    births = SnapshotBirths(node.buckets, catalog, node.objects)
    capacity = SnapshotCapacity(memory.free)
    datasets = DatasetService(node.store, catalog, readers, node.archives, node.objects, births, capacity)
    user_ops = UserOps(
        ModuleTable(node.control), node.store, catalog, access, node.clock, confinement(node.settings)
    )
    assets = AssetService(catalog, readers, user_ops, node.objects)
    batches = BatchService(
        node.store, catalog, datasets, readers, frames, assets, node.archives, node.objects
    )
    return DataServices(frames, catalog, readers, datasets, assets, batches, user_ops)


def view_kinds(node: Node, data: DataServices) -> dict[type, ViewKind[Any]]:
    """Who reads which kind of view."""
    layouts = ZarrLayouts(node.store, node.clock, data.catalog, data.datasets, data.batches, node.objects)
    return {
        TransformView: TransformReader(node.store, data.frames, node.uses, node.objects),
        ShardsView: ShardReader(node.store, node.clock, node.archives, node.objects),
        ZarrView: ZarrReader(node.store, layouts, data.frames, node.uses, node.objects),
        BatchesView: BatchReader(
            node.store, data.catalog, data.batches, data.frames, node.uses, node.objects
        ),
    }


def view_makers(data: DataServices) -> dict[type, Maker]:
    """What is done to a view before it is kept; a kind that needs nothing is not listed."""
    return {
        TransformView: partial(complete_transform, data.assets),
        ZarrView: ZarrMaker(data.datasets, data.batches),
        BatchesView: partial(complete_batches, data.batches),
    }
