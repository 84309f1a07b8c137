"""`python -m bench.checkpoint_writer WRITER ENDPOINT BYTES SERVER`: saves and loads checkpoints.

Law: a line on stdin is a round, a line of JSON its figures. What is loaded goes into tensors of zeros and is
compared, outside the clock; a round's objects are removed when it is over.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any, Protocol

import boto3
import torch
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from s3torchconnector import S3ClientConfig
from s3torchconnector._s3client import S3Client
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
from s3torchconnector.dcp.s3_file_system import S3FileSystem
from torch.distributed import checkpoint

from bench.checkpoints import BOTO, BUCKET, CONNECTOR, OURS, PARTS
from bench.processes import cpu_seconds
from bench.rows import MIB
from meshsdk.adapters.checkpoints import CheckpointReader, CheckpointWriter
from meshsdk.client.s3_client import connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.client.s3_client import Client

State = dict[str, torch.Tensor]
_REGION = "us-east-1"


class Way(Protocol):
    """How a checkpoint gets to a place and back."""

    def save(self, state: State, place: str) -> None: ...

    def load(self, state: State, place: str) -> None:
        """Into the tensors given."""


class Ours:
    def __init__(self, client: Client) -> None:
        self._client = client

    def save(self, state: State, place: str) -> None:
        writer = CheckpointWriter(f"s3://{BUCKET}/{place}", self._client)
        checkpoint.save(state, storage_writer=writer, no_dist=True)

    def load(self, state: State, place: str) -> None:
        reader = CheckpointReader(f"s3://{BUCKET}/{place}", self._client)
        checkpoint.load(state, storage_reader=reader, no_dist=True)


class Connector:
    """Its classes take no endpoint, their file system a client that has one."""

    def __init__(self, endpoint: str) -> None:
        made = S3Client(_REGION, endpoint=endpoint, s3client_config=S3ClientConfig(force_path_style=True))
        self._fs = S3FileSystem(_REGION, s3_client=made)

    def save(self, state: State, place: str) -> None:
        writer = S3StorageWriter(_REGION, f"s3://{BUCKET}/{place}")
        writer.fs = self._fs
        checkpoint.save(state, storage_writer=writer, no_dist=True)

    def load(self, state: State, place: str) -> None:
        reader = S3StorageReader(_REGION, f"s3://{BUCKET}/{place}")
        reader.fs = self._fs
        checkpoint.load(state, storage_reader=reader, no_dist=True)


class Boto:
    """What one writes without any of them."""

    def __init__(self, endpoint: str) -> None:
        config = Config(s3={"addressing_style": "path"}, max_pool_connections=8)
        self._client = boto3.client("s3", endpoint_url=endpoint, region_name=_REGION, config=config)
        self._transfer = TransferConfig(
            multipart_threshold=16 * MIB, multipart_chunksize=16 * MIB, max_concurrency=4
        )

    def save(self, state: State, place: str) -> None:
        whole = io.BytesIO()
        torch.save(state, whole)
        whole.seek(0)
        self._client.upload_fileobj(whole, BUCKET, f"{place}/whole.pt", Config=self._transfer)

    def load(self, state: State, place: str) -> None:
        whole = io.BytesIO()
        self._client.download_fileobj(BUCKET, f"{place}/whole.pt", whole, Config=self._transfer)
        whole.seek(0)
        for name, tensor in torch.load(whole, weights_only=True).items():
            state[name].copy_(tensor)


def tensors(size: int) -> State:
    """What is saved: `size` bytes in equal parts, and the step."""
    made = torch.Generator().manual_seed(7)
    each = size // PARTS // 4
    state = {f"layer{number}.weight": torch.randn(each, generator=made) for number in range(PARTS)}
    return {**state, "step": torch.tensor(700)}


def round_of(way: Way, client: Client, state: State, server: int) -> dict[str, float]:
    """Saved and loaded once."""
    size = sum(tensor.nbytes for tensor in state.values())
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    place = f"step-{time.monotonic_ns()}"
    saved, save_cpu = timed(lambda: way.save(state, place), server)
    loaded, load_cpu = timed(lambda: way.load(found, place), server)
    wrong = [name for name, tensor in state.items() if not torch.equal(tensor, found[name])]
    client.delete_many(BUCKET, [entry.key for entry in client.list(BUCKET, f"{place}/")])
    if wrong:
        raise SystemExit(f"not what was saved: {', '.join(wrong)}")
    mebibytes = size / MIB
    return {
        "save": size / saved / 1e6,
        "load": size / loaded / 1e6,
        "save_cpu": 1000 * save_cpu / mebibytes,
        "load_cpu": 1000 * load_cpu / mebibytes,
    }


def timed(work: Callable[[], None], server: int) -> tuple[float, float]:
    """Seconds it took, and of CPU of this process and the server's."""
    spent, begun = cpu_seconds(os.getpid()) + cpu_seconds(server), time.perf_counter()
    work()
    taken = time.perf_counter() - begun
    return taken, cpu_seconds(os.getpid()) + cpu_seconds(server) - spent


def main() -> None:
    """Warm up, then a round a line."""
    name, endpoint, size, server = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with connect(endpoint, region=_REGION) as client:
        ways: dict[str, Callable[[], Any]] = {
            OURS: lambda: Ours(client),
            CONNECTOR: lambda: Connector(endpoint),
            BOTO: lambda: Boto(endpoint),
        }
        way, state = ways[name](), tensors(size)
        round_of(way, client, tensors(PARTS * 64), server)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for _ in iter(sys.stdin.readline, ""):
            sys.stdout.write(json.dumps(round_of(way, client, state, server)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
