"""The disks of a mesh's daemons, in the spec of a MeshCluster."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from meshoperator.resources.spec_types import Part, ResourceName, Rule, ShortName, Size, immutable

DiskClass = Literal["nvme", "ssd", "hdd", "mem"]
Content = Literal["Data", "Index"]


class VolumeClaim(Part, frozen=True, kw_only=True):
    """A volume claim; each daemon of the pool gets its own."""

    storage_class: (
        Annotated[
            ResourceName,
            Meta(description="StorageClass. Default: the cluster's. A change applies to new volumes."),
        ]
        | None
    ) = None
    size: Annotated[Size, Meta(description="Size. It can grow if the StorageClass allows it.")]


class Tier(Part, frozen=True, kw_only=True):
    """One kind of disk in every node of a pool."""

    rules: ClassVar = (
        Rule(
            "self.class == 'mem' ? !has(self.hostPath) && !has(self.volumeClaim)"
            " : has(self.hostPath) != has(self.volumeClaim)",
            "a disk tier needs either hostPath or volumeClaim; a tier of class mem has neither",
        ),
        Rule("self.class != 'mem' || has(self.quota)", "a tier of class mem needs a quota"),
        Rule(
            "self.content != 'Index' || (self.class != 'mem' && !has(self.quota))",
            "a tier for the index is a disk, and has no quota: it holds no data",
        ),
    )

    name: Annotated[ShortName, Meta(description="Name; mounted at `/var/lib/meshd/NAME`.")]
    class_: Annotated[
        DiskClass,
        Meta(
            description="Kind of disk. mem: memory. Without a tier for it, the index is on the fastest.",
            extra_json_schema=immutable("class"),
        ),
    ] = field(name="class")
    content: Annotated[
        Content,
        Meta(
            description="Index: the index and no data, so that nothing else fills that disk.",
            extra_json_schema=immutable("content"),
        ),
    ] = "Data"
    host_path: (
        Annotated[
            str,
            Meta(
                min_length=2,
                max_length=255,
                pattern=r"^/[^:]*[^:/]$",
                description="Directory on the Kubernetes node.",
                extra_json_schema=immutable("hostPath"),
            ),
        ]
        | None
    ) = None
    volume_claim: Annotated[VolumeClaim, Meta(description="Or a volume claim.")] | None = None
    quota: (
        Annotated[
            Size,
            Meta(
                description="Limit on cached copies of remote data (the sum over all disk tiers counts; "
                "default: half of the free space). Data stored in the mesh is limited by the disk alone. "
                "Class mem: memory for finished batches."
            ),
        ]
        | None
    ) = None
