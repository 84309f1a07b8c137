"""Loaders of stored tokens: rows of one length in random order, as their own manuals say.

Law: standard library, numpy and torch at the top, so that it runs in the peers' environment too.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bench.peers.loaders import disconnect, stand_in_torchvision
from bench.peers.token_rows import (
    BATCH,
    BUCKET,
    LENGTH,
    MAPPED,
    MAPPED_NUMBERED,
    SHARD_ROWS,
    VALUES,
    WORKERS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class _Mapped(Dataset[Any]):  # type: ignore[misc]  # torch is not followed by mypy
    """Windows of a local file of uint16, mapped by each worker, as in Megatron and nanoGPT."""

    def __init__(self, file: str) -> None:
        self._file, self._count = file, os.stat(file).st_size // 2 // LENGTH
        self._map: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._map is None:
            self._map = np.memmap(self._file, np.uint16, "r")
        return torch.from_numpy(self._map[index * LENGTH : (index + 1) * LENGTH].astype(np.int64))


class _Numbered(_Mapped):
    """Also the segment, from 1, and the position of each token, int32 as ours; from a file of the ends of all
    texts, int64."""

    def __init__(self, file: str, ends: str) -> None:
        super().__init__(file)
        self._ends = np.fromfile(ends, np.int64)

    def __getitem__(self, index: int) -> Any:
        begin, end = index * LENGTH, (index + 1) * LENGTH
        inner = self._ends[np.searchsorted(self._ends, begin, "right") : np.searchsorted(self._ends, end)]
        cuts = np.concatenate(([0], inner - begin, [LENGTH])).astype(np.int32)
        lengths = np.diff(cuts)
        segments = np.repeat(np.arange(1, cuts.size, dtype=np.int32), lengths)
        positions = np.arange(LENGTH, dtype=np.int32) - np.repeat(cuts[:-1], lengths)
        return super().__getitem__(index), torch.from_numpy(segments), torch.from_numpy(positions)


def memmap(endpoint: str, folder: str) -> Iterable[torch.Tensor]:
    """A memory-mapped file on the local disk, in a DataLoader."""
    return _loader(_Mapped(f"{folder}/stream.bin"))


def numbered_memmap(endpoint: str, folder: str) -> Iterable[list[torch.Tensor]]:
    """The same with segments and positions."""
    return _loader(_Numbered(f"{folder}/stream.bin", f"{folder}/ends.bin"))


def _loader(rows: _Mapped) -> Iterable[Any]:
    return DataLoader(  # type: ignore[no-any-return]
        rows, BATCH, shuffle=True, drop_last=True, num_workers=WORKERS
    )


def streaming(endpoint: str, folder: str) -> Iterable[torch.Tensor]:
    """mosaicml-streaming over MDS shards of rows, with an empty local cache at the start."""
    stand_in_torchvision()
    package = import_module("streaming")

    class Rows(package.StreamingDataset):  # type: ignore[misc,name-defined]  # its types are not seen from here
        def __getitem__(self, at: Any) -> Any:
            return torch.from_numpy(super().__getitem__(at)["tokens"].astype(np.int64))

    os.environ["S3_ENDPOINT_URL"] = endpoint
    rows = Rows(
        remote=f"s3://{BUCKET}/mds",
        local=_empty("mds"),
        shuffle=True,
        batch_size=BATCH,
        num_canonical_nodes=1,
    )
    made: Iterable[torch.Tensor] = DataLoader(disconnect(rows), BATCH, num_workers=WORKERS, drop_last=True)
    return made


def litdata(endpoint: str, folder: str) -> Iterable[torch.Tensor]:
    """litdata's TokensLoader over its own chunks, with an empty local cache at the start."""
    package = import_module("litdata")
    # Its client refuses http, and no setting of its own changes that.
    import_module("litdata.streaming.downloader")._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    rows = package.StreamingDataset(
        f"s3://{BUCKET}/lit",
        cache_dir=_empty("lit"),
        item_loader=import_module("litdata.streaming.item_loader").TokensLoader(block_size=LENGTH),
        shuffle=True,
        drop_last=True,
        storage_options={"endpoint_url": endpoint},
    )
    return package.StreamingDataLoader(rows, batch_size=BATCH, num_workers=WORKERS)  # type: ignore[no-any-return]


def _empty(name: str) -> str:
    """A local cache, of which the last one is gone."""
    place = Path(tempfile.gettempdir()) / f"bench-tokens-{name}-{os.getpid()}"
    shutil.rmtree(place, ignore_errors=True)
    return str(place)


def _stream(number: int, tokens: int) -> np.ndarray[Any, np.dtype[Any]]:
    return (np.arange(number, number + tokens) % VALUES).astype(np.uint16)


def _shard(begin: int) -> Iterable[torch.Tensor]:
    yield torch.from_numpy(_stream(begin, SHARD_ROWS * LENGTH).astype(np.int32))


def write_litdata(folder: str, tokens: int) -> None:
    """litdata's writer of tokens, one worker."""
    item_loader = import_module("litdata.streaming.item_loader").TokensLoader(block_size=LENGTH)
    import_module("litdata").optimize(
        _shard,
        list(range(0, tokens, SHARD_ROWS * LENGTH)),
        folder,
        chunk_size=SHARD_ROWS * LENGTH,
        num_workers=1,
        reorder_files=False,
        item_loader=item_loader,
        verbose=False,
    )


def write_streaming(folder: str, tokens: int) -> None:
    """mosaicml-streaming's writer, a row a sample."""
    stand_in_torchvision()
    columns = {"tokens": f"ndarray:uint16:{LENGTH}"}
    with import_module("streaming").MDSWriter(out=folder, columns=columns, size_limit=8 << 20) as shards:
        for begin in range(0, tokens, LENGTH):
            shards.write({"tokens": _stream(begin, LENGTH)})


WRITERS: Final[dict[str, Callable[[str, int], None]]] = {
    "streaming": write_streaming,
    "litdata": write_litdata,
}
LOADERS: Final[dict[str, Callable[[str, str], Iterable[Any]]]] = {
    MAPPED: memmap,
    MAPPED_NUMBERED: numbered_memmap,
    "streaming": streaming,
    "litdata": litdata,
}
