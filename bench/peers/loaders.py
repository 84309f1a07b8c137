"""Six loaders over the same photographs in one S3 server; each yields (images, labels) batches.

Objects: `raw/<class>/<index>.jpg`, `tar/shard-*.tar` (WebDataset naming), `mds/*` (mosaicml-streaming's
format), `lit/*` (litdata's).
"""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import sys
import threading
import types
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset

from bench.peers.random_crop import transform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

Batches = Any
"""An iterable of (uint8 images, labels); the peers' types are not seen from here."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the photographs are, and how they are asked for."""

    endpoint: str
    bucket: str
    batch: int
    workers: int
    cache: str


def client(source: Source) -> Any:
    """boto3's S3 client; keys come from the environment."""
    config = import_module("botocore.config").Config(signature_version="s3v4")  # presigned URLs too
    return import_module("boto3").client("s3", endpoint_url=source.endpoint, config=config)


def keys(source: Source, prefix: str) -> list[str]:
    """All keys under the prefix, in order."""
    pages = client(source).get_paginator("list_objects_v2").paginate(Bucket=source.bucket, Prefix=prefix)
    return [entry["Key"] for page in pages for entry in page.get("Contents", ())]


def class_table(names: Iterable[str]) -> dict[str, int]:
    """Class name → number, by name."""
    return {name: number for number, name in enumerate(sorted({key.split("/")[-2] for key in names}))}


class _Objects(Dataset):  # type: ignore[misc]  # torch is not followed by mypy
    """One GetObject a sample: the loader everybody writes first."""

    def __init__(self, source: Source) -> None:
        self.source, self.keys = source, keys(source, "raw/")
        self.classes = class_table(self.keys)
        self.client: Any = None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.client = self.client or client(self.source)  # one a worker process
        key = self.keys[index]
        body = self.client.get_object(Bucket=self.source.bucket, Key=key)["Body"].read()
        return transform(body), self.classes[key.split("/")[-2]]


def boto3_loader(source: Source) -> Batches:
    """boto3 in a map-style Dataset under DataLoader."""
    return DataLoader(_Objects(source), source.batch, shuffle=True, num_workers=source.workers)


def s3torchconnector_loader(source: Source) -> Batches:
    """Amazon's connector, map-style, under DataLoader."""
    connector = import_module("s3torchconnector")
    classes = class_table(keys(source, "raw/"))
    dataset = connector.S3MapDataset.from_prefix(
        f"s3://{source.bucket}/raw/",
        region="us-east-1",
        endpoint=source.endpoint,
        transform=lambda item: (transform(item.read()), classes[item.key.split("/")[-2]]),
        s3client_config=connector.S3ClientConfig(force_path_style=True),
    )
    return DataLoader(dataset, source.batch, shuffle=True, num_workers=source.workers)


def webdataset_loader(source: Source) -> Batches:
    """WebDataset over tar shards fetched by curl with presigned URLs; a shuffle buffer of 1,000."""
    wds = import_module("webdataset")
    s3 = client(source)
    params = [{"Bucket": source.bucket, "Key": key} for key in keys(source, "tar/")]
    urls = [f"pipe:curl -s -f '{s3.generate_presigned_url('get_object', Params=one)}'" for one in params]
    split = {"nodesplitter": wds.split_by_node, "workersplitter": wds.split_by_worker}
    dataset = wds.WebDataset(urls, shardshuffle=len(urls), **split).shuffle(1000)
    dataset = dataset.to_tuple("jpg", "cls").map_tuple(transform, int).batched(source.batch)
    return wds.WebLoader(dataset, batch_size=None, num_workers=source.workers)


def stand_in_torchvision() -> None:
    """Let mosaicml-streaming be imported: it wants names of torchvision for data sets that are not used
    here.
    """
    names: dict[str, dict[str, object]] = {
        "torchvision": {"__path__": []},
        "torchvision.datasets": {"VisionDataset": object},
        "torchvision.transforms": {"__path__": []},
        "torchvision.transforms.functional": {"to_tensor": None},
    }
    for name, attributes in names.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)  # other packages look for it
        vars(module).update(attributes)
        sys.modules[name] = module


def disconnect(dataset: Any) -> Any:
    """Return a dataset of mosaicml-streaming whose workers open connections of their own.

    It has fetched the index with a client that forked workers inherit, connection included: two of them then
    read each other's responses, and a shard gets the bytes of another.
    """
    for stream in dataset.streams:
        stream._downloader.clean_up()
    return dataset


def streaming_loader(source: Source) -> Batches:
    """mosaicml-streaming over MDS shards, with an empty local cache at the start."""
    streaming = import_module("streaming")

    class Photographs(streaming.StreamingDataset):  # type: ignore[misc,name-defined]  # its types are not seen from here
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return transform(sample["jpg"]), sample["cls"]

    shutil.rmtree(source.cache, ignore_errors=True)
    os.environ["S3_ENDPOINT_URL"] = source.endpoint
    dataset = Photographs(
        remote=f"s3://{source.bucket}/mds",
        local=source.cache,
        shuffle=True,
        batch_size=source.batch,
        num_canonical_nodes=1,
    )
    return DataLoader(disconnect(dataset), source.batch, num_workers=source.workers)


def litdata_loader(source: Source) -> Batches:
    """litdata over its own chunks, with an empty local cache at the start."""
    litdata = import_module("litdata")
    # Its client refuses http, and no setting of its own changes that.
    import_module("litdata.streaming.downloader")._OBSTORE_CLIENT_OPTIONS["allow_http"] = True

    class Photographs(litdata.StreamingDataset):  # type: ignore[misc,name-defined]  # its types are not seen from here
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return transform(sample["jpg"]), sample["cls"]

    cache = source.cache + "-lit"
    shutil.rmtree(cache, ignore_errors=True)
    dataset = Photographs(
        f"s3://{source.bucket}/lit",
        cache_dir=cache,
        shuffle=True,
        drop_last=False,
        storage_options={"endpoint_url": source.endpoint},
    )
    return litdata.StreamingDataLoader(dataset, batch_size=source.batch, num_workers=source.workers)


class _Records:
    """What Grain wants: samples by number, from any thread of any worker. One GetObject each."""

    def __init__(self, source: Source) -> None:
        self.source, self.keys = source, keys(source, "raw/")
        self.classes = class_table(self.keys)
        self.clients = threading.local()

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: Any) -> tuple[bytes, int]:
        found = getattr(self.clients, "client", None)
        if found is None:
            found = self.clients.client = client(self.source)
        key = self.keys[int(index)]
        body = found.get_object(Bucket=self.source.bucket, Key=key)["Body"].read()
        return body, self.classes[key.split("/")[-2]]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "clients": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, clients=threading.local())


class _Epochs:
    """An order of Grain's for each pass, keyed by the pass."""

    def __init__(self, source: Source) -> None:
        self.source, self.passes = source, 0

    def __iter__(self) -> Any:
        grain = import_module("grain")
        seed, self.passes = self.passes, self.passes + 1
        read = grain.ReadOptions(num_threads=8, prefetch_buffer_size=256)
        dataset = grain.MapDataset.source(_Records(self.source)).shuffle(seed=seed).map(_decoded)
        workers = grain.MultiprocessingOptions(num_workers=self.source.workers)
        batches = dataset.batch(self.source.batch, drop_remainder=False).to_iter_dataset(read)
        return iter(batches.mp_prefetch(workers))


def _decoded(record: tuple[bytes, int]) -> tuple[Any, int]:
    return transform(record[0]).numpy(), record[1]


def grain_loader(source: Source) -> Batches:
    """Grain, JAX's loader, over the objects one by one, as it has no reader of S3 of its own. Two processes
    with eight threads each; batches are numpy's."""
    return _Epochs(source)


def packages(loader: str) -> tuple[str, ...]:
    """What a script that uses the loader imports; their import is timed."""
    if loader == "streaming":
        stand_in_torchvision()
    return {
        "s3torchconnector": ("boto3", "s3torchconnector"),
        "webdataset": ("boto3", "webdataset"),
        "litdata": ("litdata", "litdata.streaming.downloader"),
        "grain": ("boto3", "grain"),
    }.get(loader, (loader,))


LOADERS: dict[str, Callable[[Source], Batches]] = {
    "boto3": boto3_loader,
    "s3torchconnector": s3torchconnector_loader,
    "webdataset": webdataset_loader,
    "streaming": streaming_loader,
    "litdata": litdata_loader,
    "grain": grain_loader,
}
