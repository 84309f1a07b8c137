"""Origins for tests: a real S3 server behind a proxy that delays, slows down, breaks and counts."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

from meshd.process.local_etcd import reserve_port
from meshd.util.clock import SystemClock
from tests.support.daemons import Daemon
from tests.support.server_shutdown import stop_listening

if TYPE_CHECKING:
    from collections.abc import Iterator

_clock = SystemClock()
_STEP = 64 << 10


@dataclass
class Faults:
    """What the proxy does. `delay` seconds before an answer begins; `rate` bytes a second of an answer, and
    `upload_rate` of a request's body; `refuse` connections; answer `fail` requests with 503; `cut` so many
    answers after `cut_after` bytes."""

    delay: float = 0.0
    rate: float = 0.0
    upload_rate: float = 0.0
    refuse: bool = False
    fail: int = 0
    cut: int = 0
    cut_after: int = 1 << 20
    reset: int = 0
    """Requests whose connection is reset before an answer."""
    stall: int = 0
    """Answers that stop after `cut_after` bytes and never go on."""
    short: int = 0
    """Answers whose connection is closed in order after `cut_after` bytes."""
    lie: int = 0
    """Answers to GET that claim another ETag."""
    heads: list[str] = field(default_factory=list)
    """First lines of the requests that passed, with their ranges."""

    def gets(self, key: str = "") -> list[str]:
        """GETs of objects whose name holds `key`."""
        return [
            head for head in self.heads if head.startswith("GET ") and key in head and "list-type" not in head
        ]


class Proxy:
    """A proxy on loopback, in a thread; `endpoint` speaks for `target`, a port: one request after the other a
    connection."""

    def __init__(self, target: int) -> None:
        self.faults, self._target = Faults(), target
        self._ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait(10)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        await stop_listening(server)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.faults.refuse:
            writer.transport.abort()
            return
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                faults = self.faults  # of now: connections outlive the test that made them
                if faults.refuse:
                    break
                if upstream is None:
                    upstream = await asyncio.open_connection("127.0.0.1", self._target, limit=1 << 20)
                line = head.split(b"\r\n", 1)[0].decode()
                ranged = re.search(rb"\r\nrange: *([^\r]*)", head, re.I)
                faults.heads.append(line + (f" {ranged[1].decode()}" if ranged else ""))
                upstream[1].write(head)
                await self._body(head, reader, upstream[1])
                answer = await upstream[0].readuntil(b"\r\n\r\n")
                if answer.startswith(b"HTTP/1.1 100"):
                    answer = await upstream[0].readuntil(b"\r\n\r\n")
                if faults.delay:
                    await asyncio.sleep(faults.delay)
                if faults.reset > 0:
                    faults.reset -= 1
                    writer.transport.abort()
                    break
                if faults.lie > 0 and line.startswith("GET "):
                    faults.lie -= 1
                    answer = re.sub(rb"(?i)\r\netag: *[^\r]*", b'\r\nETag: "%032x"' % faults.lie, answer)
                if faults.fail > 0:
                    faults.fail -= 1
                    writer.write(b"HTTP/1.1 503 Slow\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                    await writer.drain()
                    break
                writer.write(answer)
                if not line.startswith("HEAD") and not await self._answer(answer, upstream[0], writer):
                    break
        for end in (writer, *(upstream or ())[1:]):
            end.close()  # when all has gone that is still to be sent
            if self._stop.is_set():  # nobody may read that any more
                end.transport.abort()

    async def _body(self, head: bytes, reader: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.I)
        left = int(length[1]) if length else 0
        rate = self.faults.upload_rate
        while left:
            data = await reader.read(min(left, _STEP))
            if not data:
                raise ConnectionError
            left -= len(data)
            if rate:
                await asyncio.sleep(len(data) / rate)
            to.write(data)
            await to.drain()

    async def _answer(self, head: bytes, upstream: asyncio.StreamReader, to: asyncio.StreamWriter) -> bool:
        """Pass the body on; whether the connection goes on."""
        faults, sent, began = self.faults, 0, _clock.monotonic()
        length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.I)
        if length is None and b" 204 " not in head and b" 304 " not in head:  # chunked
            while data := await upstream.readline():
                to.write(data)
                size = int(data.split(b";")[0], 16)
                to.write(await upstream.readexactly(size + 2))
                await to.drain()
                if not size:
                    return True
            return False
        left = int(length[1]) if length else 0
        cuts = faults.cut > 0 and left > faults.cut_after
        faults.cut -= cuts
        stalls = faults.stall > 0 and left > faults.cut_after
        faults.stall -= stalls
        shortens = faults.short > 0 and left > faults.cut_after
        faults.short -= shortens
        while left:
            data = await upstream.read(min(left, _STEP))
            if not data:
                return False
            left -= len(data)
            sent += len(data)
            to.write(data)
            await to.drain()
            if shortens and sent >= faults.cut_after:
                return False
            if stalls and sent >= faults.cut_after:
                await self._stop.wait()
                return False
            if cuts and sent >= faults.cut_after:
                to.transport.abort()
                return False
            if faults.rate:
                await asyncio.sleep(max(0.0, sent / faults.rate - (_clock.monotonic() - began)))
        return True

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)


@dataclass(frozen=True)
class Place:
    """A real S3 server with a bucket, and the proxy before it."""

    name: str
    proxy: Proxy
    access_key: str
    secret_key: str
    client: Any
    bucket: str

    @property
    def faults(self) -> Faults:
        return self.proxy.faults

    def clear(self) -> None:
        """Remove every object."""
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket):
            if keys := [{"Key": found["Key"]} for found in page.get("Contents", [])]:
                self.client.delete_objects(Bucket=self.bucket, Delete={"Objects": keys, "Quiet": True})


def weed() -> str | None:
    """SeaweedFS, if it is installed."""
    beside = Path(sys.executable).parent / "weed"
    return shutil.which("weed") or (str(beside) if beside.exists() else None)


def s3_client(endpoint: str, access_key: str, secret_key: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 0}, read_timeout=60),
    )


@contextmanager
def place(scratch: Path) -> Iterator[Place]:
    """SeaweedFS, or a daemon of ours where that is not installed."""
    program = weed()
    if program is None:
        with Daemon.start() as daemon:
            port = int(daemon.endpoint.rpartition(":")[2])
            with _proxied("meshd", port, daemon.access_key, daemon.secret_key) as found:
                yield found
        return
    access, secret = "origin", secrets.token_hex(16)
    identities = scratch / "identities.json"
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    grant = {"name": "o", "credentials": [{"accessKey": access, "secretKey": secret}], "actions": actions}
    identities.write_text(json.dumps({"identities": [grant]}))
    data = scratch / "weed"
    data.mkdir()
    parts = [f"{part}.port{grpc}" for part in ("master", "volume", "filer", "s3") for grpc in ("", ".grpc")]
    ports = {part: reserve_port() for part in parts}
    flags = [f"-{part}={port}" for part, port in ports.items()]
    argv = [program, "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", *flags]
    argv += [f"-s3.config={identities}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=50"]
    with (scratch / "weed.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        with _proxied("seaweedfs", ports["s3.port"], access, secret) as found:
            yield found
    finally:
        process.kill()
        process.wait(60)


@contextmanager
def _proxied(name: str, port: int, access: str, secret: str) -> Iterator[Place]:
    direct = s3_client(f"http://127.0.0.1:{port}", access, secret)
    _until_ready(direct)
    proxy = Proxy(port)
    try:
        yield Place(name, proxy, access, secret, direct, "origin")
    finally:
        proxy.close()


def _until_ready(client: Any) -> None:
    deadline = _clock.monotonic() + 60
    while True:
        try:
            client.create_bucket(Bucket="origin")
            client.put_object(Bucket="origin", Key="ready", Body=b"1")
            client.delete_object(Bucket="origin", Key="ready")
        except Exception:
            if _clock.monotonic() > deadline:
                raise
            threading.Event().wait(0.2)
        else:
            return
