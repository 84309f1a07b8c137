"""Two servers over one store, one with the short way and one without, and a way to ask both the same."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from meshd.batches.assembly.assembler_client import AssemblerClient
from meshd.cluster.cluster_view import ClusterView, single_node_map
from meshd.config import HttpSettings, NodeSettings, StoreSettings
from meshd.control.buckets import Bucket, BucketTable
from meshd.control.cluster_secret import ClusterSecret
from meshd.control.deleted_documents import DeletedDocumentTable
from meshd.control.embedded import EmbeddedControl
from meshd.control.identities import Account, IdentityTable, Key, KeyLastUsed, User
from meshd.datasets.archives.archive_service import ArchiveService, LocalArchives
from meshd.documents.inventory import UsageFile
from meshd.peer_reads.remote_objects import RemoteObjects
from meshd.process.wiring.data_services import data_services
from meshd.process.wiring.node_context import NodeContext, node_access
from meshd.process.wiring.services import peer_services, server_services
from meshd.rpc.peer_client import PeerClient
from meshd.server.http_server import build_server
from meshd.server.request import flush_request_counters
from meshd.store.records import Meta, Upload
from meshd.store.store import Store
from meshd.telemetry import metrics
from meshd.telemetry.audit_log import AuditEntry
from meshwire.s3.bucket_settings import CorsRule
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl
from tests.support.server_shutdown import stop_listening
from tests.support.single_node_objects import single_node_objects

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from meshd.control.control_api import ControlStore
    from meshd.server.http_server import MeshServer
    from meshd.telemetry.audit_log import AuditLog
    from meshwire.s3.bucket_settings import Versioning

NOW = 1_700_000_000
BODY = bytes(range(256)) * 40
LARGE = b"large" * 40_000
ROOT, OTHER = ("root-key", "root-secret-key"), ("other-key", "other-secret-key")
_OWN = re.compile(rb'(?:x-amz-request-id: |<RequestId>|<HostId>|"request_id": "|Date: )[^\r<"]+')
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.I)


@dataclass(slots=True)
class Mouth:
    """One server and a connection to it that is kept as long as the server keeps it."""

    server: MeshServer
    port: int
    stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, pieces: list[bytes], *, answers: int = 1, head: bool = False) -> bytes:
        """What the server says to these writes: so many answers, and `closed` if it hangs up after them."""
        reader, writer = await self._connection()
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        said = b"".join([await self._answer(reader, head=head) for _ in range(answers)])
        if b"connection: close" in said.lower():
            said += b"closed" if not await reader.read() else b"more"
            self.close()
        return _OWN.sub(b"", said)

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        await asyncio.sleep(0)
        if self.stream is not None and self.stream[0].at_eof():
            self.close()
        if self.stream is None:
            self.stream = await asyncio.open_connection("127.0.0.1", self.port)
        return self.stream

    async def _answer(self, reader: asyncio.StreamReader, *, head: bool) -> bytes:
        said = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        if said.startswith(b"HTTP/1.1 100"):
            return said + await self._answer(reader, head=head)
        length = _LENGTH.search(said)
        silent = head or said.startswith((b"HTTP/1.1 304", b"HTTP/1.1 204"))
        return said if silent or length is None else said + await reader.readexactly(int(length[1]))

    def close(self) -> None:
        if self.stream is not None:
            self.stream[1].close()
            self.stream = None


class Lines:
    """Stands where the audit log stands, and keeps what it is told but for request ids."""

    def __init__(self) -> None:
        self.entries: list[AuditEntry] = []

    def write_entry(self, entry: AuditEntry) -> None:
        self.entries.append(msgspec.structs.replace(entry, request_id="", remote=""))


class Pair:
    """Both servers over one filled store. `loop` runs them while something is asked; `embedded`: whether the
    control state is in LMDB, as that of a standalone node, or in memory."""

    def __init__(self, *, embedded: bool = False, http: HttpSettings | None = None) -> None:
        self._embedded = embedded
        self._control: EmbeddedControl | None = None
        self._place = Path(tempfile.mkdtemp(prefix="hot-"))
        self.loop, self.clock = asyncio.new_event_loop(), ManualClock(NOW * 10**9)
        self._settings = NodeSettings(
            "n", StoreSettings.at(self._place, durability="relaxed"), http=http or HttpSettings()
        )
        self.store = Store.open(self._settings.store, writer="w0", clock=self.clock)
        self._uses = UsageFile(self._settings.last_used_path, self.clock)
        self.loop.run_until_complete(self._open())

    async def _open(self) -> None:
        control: ControlStore = MemoryControl(self.clock)
        if self._embedded:
            control = self._control = EmbeddedControl(self._place / "control", self.clock)
        self.buckets = buckets = BucketTable(control)
        secret = ClusterSecret(control)
        mesh = ClusterView(
            "n", control, buckets.replica_count, standalone_map=single_node_map("n", "http://127.0.0.1:9000")
        )
        peers = PeerClient("n", ClusterSecret(control).derive_key, self.clock)
        node = NodeContext(
            self._settings,
            self.clock,
            self.store,
            control,
            buckets,
            IdentityTable(control),
            KeyLastUsed(control),
            self._uses,
            DeletedDocumentTable(control),
            ArchiveService(LocalArchives(self.store, self._uses.note), single_node_objects(self.store)),
            mesh,
            peers,
            RemoteObjects(self.store, mesh, peers),
            self.store,
        )
        await secret.create_if_missing()
        await self._people(node)
        await self._fill(node)
        self._audit = Lines()
        self._frames = AssemblerClient(self._settings.coordinator_socket)  # nobody asks it anything
        self.hot, self.ordinary = [await self._serve(node, hot=hot) for hot in (True, False)]

    async def _people(self, node: NodeContext) -> None:
        accounts: list[Account] = [
            Account(
                User(user_id=name, display_name=name, root=name == "root", origin="root"),
                Key(access_key=pair[0], user_id=name, secret_key=pair[1], origin="root"),
            )
            for name, pair in (("root", ROOT), ("other", OTHER))
        ]
        await node.identities.replace_accounts(frozenset({"root"}), accounts, NOW * 1000)

    async def _fill(self, node: NodeContext) -> None:
        rule = CorsRule(("GET",), ("https://page.example",))
        for bucket in (
            Bucket("bench", "root", 1),
            Bucket("theirs", "other", 1),
            Bucket("pages", "root", 1, cors=(rule,)),
            Bucket("kept", "root", 1, versioning="Enabled"),
        ):
            await node.buckets.create(bucket)
        for where, key, body in (
            ("bench", "plain", BODY),
            ("bench", "a b/ü+%~", BODY),
            ("bench", "empty", b""),
            ("bench", "large", LARGE),
            ("theirs", "plain", BODY),
            ("pages", "plain", BODY),
        ):
            await self.put(where, key, body)
        await self._keep_versions()
        await self._assemble()

    async def put(self, bucket: str, key: str, body: bytes, *, versioning: Versioning = "") -> None:
        writer = self.store.writer(bucket, key, size=len(body))
        await writer.write(body)
        await writer.commit(self._meta(body), versioning=versioning)

    async def _keep_versions(self) -> None:
        for body in (b"old", BODY):
            await self.put("kept", "plain", body, versioning="Enabled")
        await self.put("kept", "gone", BODY, versioning="Enabled")
        await self.store.delete("kept", "gone", versioning="Enabled")

    async def _assemble(self) -> None:
        upload = await self.store.create_upload(Upload("", "bench", "parts"))
        for number in (1, 2):
            writer = self.store.part_writer(upload, number, len(BODY))
            await writer.write(BODY)
            await writer.commit(self._meta(BODY))
        await self.store.complete_upload(upload, [1, 2], self._meta(BODY))

    def _meta(self, body: bytes) -> Meta:
        return Meta(
            hashlib.md5(body).hexdigest(),
            {"content-type": "image/jpeg", "cache-control": "no-store"},
            {"origin": "here"},
            {"crc32": "AAAAAA=="},
            "FULL_OBJECT",
            "root",
        )

    async def _serve(self, node: NodeContext, *, hot: bool) -> Mouth:
        access = node_access(node)
        data = data_services(node, access, self._frames)
        audit = cast("AuditLog", self._audit)
        services = server_services(node, access, data, peer_services(node), audit)
        server = build_server(services, hot=hot)
        listener = await self.loop.create_server(server, "127.0.0.1", 0)
        self._listeners = [*getattr(self, "_listeners", []), listener]
        return Mouth(server, listener.sockets[0].getsockname()[1])

    @property
    def answered(self) -> int:
        """How many requests took the short way."""
        assert self.hot.server.hot is not None
        return self.hot.server.hot.answered

    def compare(
        self,
        pieces: list[bytes],
        *,
        answers: int = 1,
        head: bool = False,
        state: Callable[[], Awaitable[object]] | None = None,
    ) -> bytes:
        """Ask both; AssertionError unless answers and what was counted are the same, and what `state` says
        after each. The answer."""
        try:
            return self.loop.run_until_complete(self._compare(pieces, answers, state, head=head))
        except BaseException:
            self.reconnect()
            raise

    async def _compare(
        self,
        pieces: list[bytes],
        answers: int,
        state: Callable[[], Awaitable[object]] | None,
        *,
        head: bool,
    ) -> bytes:
        counts, said, told = [dict(counted())], list[bytes](), list[list[AuditEntry]]()
        states = list[object]()
        self._audit.entries = []
        for mouth in (self.hot, self.ordinary):
            said.append(await mouth.ask(pieces, answers=answers, head=head))
            await asyncio.sleep(0)
            states.append(await state() if state is not None else None)
            counts.append(dict(counted()))
            told.append(self._audit.entries)
            self._audit.entries = []
        assert said[0] == said[1], said
        assert states[0] == states[1], states
        assert told[0] == told[1], told
        assert _difference(counts[0], counts[1]) == _difference(counts[1], counts[2])
        return said[0]

    def reconnect(self) -> None:
        """The next request goes on connections of its own."""
        self.hot.close()
        self.ordinary.close()

    def close(self) -> None:
        self.loop.run_until_complete(self._close())
        self.loop.close()
        self.store.close()
        if self._control is not None:
            self._control.close()
        self._uses.close()
        shutil.rmtree(self._place)

    async def _close(self) -> None:
        for mouth, listener in zip((self.hot, self.ordinary), self._listeners, strict=True):
            mouth.close()
            await stop_listening(listener)
            await mouth.server.shutdown(1)
        await self._frames.aclose()


def counted() -> Iterator[tuple[tuple[str, ...], float]]:
    """Every sample of the metrics that requests change."""
    flush_request_counters()
    for metric in (metrics.http_requests, metrics.http_bytes, metrics.http_seconds):
        for family in metric.collect():
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    yield (sample.name, *map(str, sample.labels.items())), sample.value


def _difference(
    before: dict[tuple[str, ...], float], after: dict[tuple[str, ...], float]
) -> dict[tuple[str, ...], float]:
    return {
        name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)
    }
