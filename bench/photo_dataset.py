"""The photographs of the loader rows: on disk, in a server in three layouts, and the peers' environment.

Layouts: `raw/<class>/<index>.jpg` for boto3, s3torchconnector, Grain and meshsdk; `tar/` for webdataset;
`mds/` for mosaicml-streaming; `lit/` for litdata. Shards hold the same photographs in one random order.
"""

from __future__ import annotations

import compileall
import io
import os
import random
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

from meshdemo.photographs import photograph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.servers import Server

BUCKET = "loaders"
SHARD_SAMPLES = 250
LEAST_SHARDS = 8
"""So that each of a peer's workers has some, in a toy run too."""
ROOT = Path(__file__).resolve().parents[1]
FORMATS = ("mds", "lit")
PEERS = (
    *("torch==2.13.0", "boto3", "s3torchconnector", "webdataset", "mosaicml-streaming"),
    *("litdata", "grain", "datasets==4.4.2", "pillow", "numpy"),
)
"""`datasets` has a version, because pip looks for one that fits the others by trying all for many minutes."""


class PeersError(RuntimeError):
    """The peers' environment could not be made; the message says which command failed."""


@dataclass(frozen=True, slots=True)
class Album:
    """Photographs on this disk: `folder/<class>/<index>.jpg`; shards of a peer's format lie in `packed`."""

    folder: Path
    count: int

    def packed(self, format: str) -> Path:
        """Where the shards of "mds" or "lit" are."""
        return self.folder.with_name(f"{format}-{self.count}")

    def files(self) -> list[Path]:
        """All photographs, by name."""
        return sorted(self.folder.glob("*/*.jpg"))


def _save(index: int, folder: Path) -> None:
    made = photograph(index)
    target = folder / made.name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(made.jpeg)


def make_album(root: Path, count: int) -> Album:
    """Write the photographs unless an earlier run did; both cores."""
    album = Album(root / f"photographs-{count}", count)
    if len(album.files()) != count:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(_save, range(count), [album.folder] * count))
    return album


def peers_python(root: Path) -> Path:
    """The interpreter of the peers' environment."""
    return root / "peers" / "bin" / "python"


def make_peers(root: Path) -> Path:
    """Make the environment, or add what it lacks; raises PeersError when a package cannot be had."""
    python, ready, wanted = peers_python(root), root / "peers" / ".ready", " ".join(PEERS)
    if ready.exists() and ready.read_text() == wanted:
        return python
    steps: list[list[str | Path]] = (
        [] if python.exists() else [[sys.executable, "-m", "venv", root / "peers"]]
    )
    steps += [
        [python, "-m", "pip", "install", "-q", *PEERS],
        # mosaicml-streaming brings a torchvision for CUDA, which cannot be imported beside a CPU-only torch
        [python, "-m", "pip", "uninstall", "-q", "-y", "torchvision"],
    ]
    for step in steps:
        done = subprocess.run([str(part) for part in step], capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeersError(f"`{' '.join(map(str, step))}` failed: {done.stderr[-600:]}")
    ready.write_text(wanted)
    return python


def compile_ours() -> None:
    """The SDK's byte code, as pip makes that of the peers when it installs them. From a clone that was just
    changed every process would make it again, and where PYTHONDONTWRITEBYTECODE is set, for ever.
    """
    compileall.compile_dir(ROOT / "sdk", quiet=2)


def pack(python: Path, album: Album) -> None:
    """Write the shards of the peers' own formats unless an earlier run did."""
    for format in FORMATS:
        out = album.packed(format)
        if (out / "index.json").exists():
            continue
        argv = [str(python), "-m", "bench.peers.shard_writer", format, str(album.folder), str(out)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeersError(f"packing shards of {format} failed: {done.stderr[-600:]}")


def tars(album: Album) -> Iterator[tuple[str, bytes]]:
    """(key, bytes) of each WebDataset shard: `<index>.jpg` and `<index>.cls` beside each other."""
    files = album.files()
    numbers = {kind: number for number, kind in enumerate(sorted({file.parent.name for file in files}))}
    random.Random(1).shuffle(files)
    size = min(SHARD_SAMPLES, -(-len(files) // LEAST_SHARDS))
    for start in range(0, len(files), size):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as shard:
            for file in files[start : start + size]:
                _add(shard, f"{file.stem}.jpg", file.read_bytes())
                _add(shard, f"{file.stem}.cls", str(numbers[file.parent.name]).encode())
        yield f"tar/shard-{start // size:05d}.tar", out.getvalue()


def upload_long(server: Server, album: Album, count: int) -> None:
    """Put at least `count` photographs in the bucket as `long/`: copies of the shards of `tar/`."""
    s3, copies = client(server), -(-count // album.count)

    def put(shard: tuple[str, bytes]) -> None:
        key, body = shard
        for copy in range(copies):
            s3.put_object(Bucket=BUCKET, Key=f"long/{copy:02}-{key.rpartition('/')[2]}", Body=body)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, tars(album)))


def has_long(server: Server) -> bool:
    """Whether `upload_long` has put its copies in the bucket."""
    found = client(server).list_objects_v2(Bucket=BUCKET, Prefix="long/", MaxKeys=1)
    return bool(found["KeyCount"])


def _add(shard: tarfile.TarFile, name: str, body: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(body)
    shard.addfile(member, io.BytesIO(body))


def client(server: Server) -> Any:
    """boto3 against one of the bench's servers."""
    if server.account is None:
        raise ValueError(f"{server.name} speaks no S3")
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.account.access_key,
        aws_secret_access_key=server.account.secret_key,
        config=Config(max_pool_connections=16, retries={"max_attempts": 2}),
    )


def upload(
    server: Server, album: Album, say: Callable[[str], None], formats: Sequence[str] = FORMATS
) -> None:
    """Put the photographs into the server's bucket `loaders`: raw, as tar, and in these formats of peers."""
    s3 = client(server)
    s3.create_bucket(Bucket=BUCKET)
    say(f"uploading {album.count} photographs to {server.name}")

    def put(key: str, body: bytes) -> None:
        s3.put_object(Bucket=BUCKET, Key=key, Body=body)

    with ThreadPoolExecutor(8) as pool:
        files = [(f"raw/{file.parent.name}/{file.name}", file) for file in album.files()]
        list(pool.map(lambda pair: put(pair[0], pair[1].read_bytes()), files))
        list(pool.map(lambda pair: put(*pair), tars(album)))
        shards = [(f"{each}/{file.name}", file) for each in formats for file in _files(album.packed(each))]
        list(pool.map(lambda pair: put(pair[0], pair[1].read_bytes()), shards))


def _files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.glob("*")) if file.is_file()]


def environment(server: Server) -> dict[str, str]:
    """What a loader process needs to reach the server, and the two-core rules every contender gets."""
    if server.account is None:
        raise ValueError(f"{server.name} speaks no S3")
    return {
        **os.environ,
        "AWS_ACCESS_KEY_ID": server.account.access_key,
        "AWS_SECRET_ACCESS_KEY": server.account.secret_key,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server.endpoint,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
