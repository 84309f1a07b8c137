"""Loaders of small raw samples in random order, as their own manuals say; each yields lists of samples.

Law: standard library, numpy and torch at the top, so that it runs in the peers' environment too.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from torch.utils.data import DataLoader

from bench.peers.loaders import client, disconnect, stand_in_torchvision
from bench.peers.raw_rows import BATCH, BUCKET, BUFFER, SHARDS, WORKERS, samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def _loader(rows: Any) -> Iterable[list[Any]]:
    return DataLoader(rows, BATCH, num_workers=WORKERS, collate_fn=list, drop_last=True)  # type: ignore[no-any-return]


def webdataset(endpoint: str, folder: str) -> Iterable[list[Any]]:
    """WebDataset over tar shards fetched by curl with presigned URLs."""
    wds = import_module("webdataset")
    s3 = client(_source(endpoint))
    params = [{"Bucket": BUCKET, "Key": f"tar/{shard}.tar"} for shard in range(SHARDS)]
    urls = [f"pipe:curl -s -f '{s3.generate_presigned_url('get_object', Params=one)}'" for one in params]
    split = {"nodesplitter": wds.split_by_node, "workersplitter": wds.split_by_worker}
    rows = wds.WebDataset(urls, shardshuffle=len(urls), **split).shuffle(BUFFER).to_tuple("txt")
    return wds.WebLoader(rows.batched(BATCH, partial=False), batch_size=None, num_workers=WORKERS)  # type: ignore[no-any-return]


def _source(endpoint: str) -> Any:
    return import_module("bench.peers.loaders").Source(endpoint, BUCKET, BATCH, WORKERS, "")


def streaming(endpoint: str, folder: str) -> Iterable[list[Any]]:
    """mosaicml-streaming over MDS shards, with an empty local cache at the start."""
    stand_in_torchvision()
    package = import_module("streaming")
    os.environ["S3_ENDPOINT_URL"] = endpoint
    rows = package.StreamingDataset(
        remote=f"s3://{BUCKET}/mds",
        local=_empty("mds"),
        shuffle=True,
        batch_size=BATCH,
        num_canonical_nodes=1,
    )
    return _loader(disconnect(rows))


def litdata(endpoint: str, folder: str) -> Iterable[list[Any]]:
    """litdata over its own chunks, with an empty local cache at the start."""
    package = import_module("litdata")
    # Its client refuses http, and no setting of its own changes that.
    import_module("litdata.streaming.downloader")._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    rows = package.StreamingDataset(
        f"s3://{BUCKET}/lit",
        cache_dir=_empty("lit"),
        shuffle=True,
        drop_last=True,
        storage_options={"endpoint_url": endpoint},
    )
    made: Iterable[list[Any]] = package.StreamingDataLoader(
        rows, batch_size=BATCH, num_workers=WORKERS, collate_fn=_bytes
    )
    return made


def _bytes(rows: list[memoryview]) -> list[bytes]:
    """The samples, which come as views of a chunk: a worker cannot send those."""
    return [bytes(row) for row in rows]


def datasets(endpoint: str, folder: str) -> Iterable[list[Any]]:
    """Hugging Face datasets, streaming: lines of text files on the local disk, which no server delays."""
    files = [f"{folder}/txt/{shard}.txt" for shard in range(SHARDS)]
    rows = import_module("datasets").load_dataset("text", data_files=files, split="train", streaming=True)
    return _loader(rows.shuffle(seed=7, buffer_size=BUFFER))


class _Records:
    """Batches of an ArrayRecord file on the local disk by random access, in one process."""

    def __init__(self, folder: str) -> None:
        source = import_module("array_record.python.array_record_data_source")
        self._records = source.ArrayRecordDataSource(
            [f"{folder}/ar/{shard}.array_record" for shard in range(SHARDS)]
        )

    def __iter__(self) -> Iterator[list[Any]]:
        order = np.random.default_rng().permutation(len(self._records))
        for start in range(0, order.size - BATCH + 1, BATCH):
            yield self._records.__getitems__(order[start : start + BATCH].tolist())


def arrayrecord(endpoint: str, folder: str) -> Iterable[list[Any]]:
    """ArrayRecord, the format of Grain."""
    return _Records(folder)


def _empty(name: str) -> str:
    """A local cache, of which the last one is gone."""
    place = Path(tempfile.gettempdir()) / f"bench-raw-{name}-{os.getpid()}"
    shutil.rmtree(place, ignore_errors=True)
    return str(place)


def write_tar(folder: Path, lines: int) -> None:
    """Tar shards, a member a sample."""
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w", format=tarfile.USTAR_FORMAT) as file:
            for number, sample in enumerate(samples(shard, lines)):
                member = tarfile.TarInfo(f"{number:08}.txt")
                member.size = len(sample)
                file.addfile(member, io.BytesIO(sample))


def write_text(folder: Path, lines: int) -> None:
    """Files of lines."""
    for shard in range(SHARDS):
        (folder / f"{shard}.txt").write_bytes(b"".join(line + b"\n" for line in samples(shard, lines)))


def write_streaming(folder: Path, lines: int) -> None:
    """mosaicml-streaming's writer."""
    stand_in_torchvision()
    with import_module("streaming").MDSWriter(
        out=str(folder), columns={"text": "bytes"}, size_limit=1 << 22
    ) as shards:
        for shard in range(SHARDS):
            for sample in samples(shard, lines):
                shards.write({"text": sample})


class _Shard:
    """The samples of a shard, for the writer of litdata, which sends it to a process."""

    def __init__(self, lines: int) -> None:
        self._lines = lines

    def __call__(self, shard: int) -> Iterable[bytes]:
        yield from samples(shard, self._lines)


def write_litdata(folder: Path, lines: int) -> None:
    """litdata's writer, one worker."""
    import_module("litdata").optimize(
        _Shard(lines), list(range(SHARDS)), str(folder), chunk_bytes=1 << 22, num_workers=1, verbose=False
    )


def write_arrayrecord(folder: Path, lines: int) -> None:
    """ArrayRecord's writer, a group a record, as random access wants it."""
    module = import_module("array_record.python.array_record_module")
    for shard in range(SHARDS):
        writer = module.ArrayRecordWriter(str(folder / f"{shard}.array_record"), "group_size:1")
        for sample in samples(shard, lines):
            writer.write(sample)
        writer.close()


WRITERS: Final[dict[str, Callable[[Path, int], None]]] = {
    "webdataset": write_tar,
    "streaming": write_streaming,
    "litdata": write_litdata,
    "datasets": write_text,
    "arrayrecord": write_arrayrecord,
}
LOADERS: Final[dict[str, Callable[[str, str], Iterable[list[Any]]]]] = {
    "webdataset": webdataset,
    "streaming": streaming,
    "litdata": litdata,
    "datasets": datasets,
    "arrayrecord": arrayrecord,
}
