"""Fast path for PUT of small objects to a standalone node: callbacks, and no task, from the request to the
response.

The request is admitted before `100 Continue` is sent, the body is verified before anything of it is
committed, and the response is sent when the commit is durable. What is unusual takes the regular path, and so
does a request that fails before its commit or in it: nothing of it is visible then, and the regular path
executes it from the start and names the error.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from meshd.objects.archive_upload import unpack_options
from meshd.server.request import CLIENT_GONE, RequestTrace
from meshd.server.request_body import CONTINUE, HASHED_INLINE
from meshd.server.response import head_bytes
from meshd.server.response_body import PendingResponse
from meshd.server.s3.response_headers import common_headers
from meshd.store.errors import StoreError
from meshd.store.records import WriteContext
from meshd.telemetry import tracing
from meshwire.checksums.body_checksums import BodyVerifier
from meshwire.dataset.archive_paths import MEMBER_SEPARATOR
from meshwire.errors import S3Error
from meshwire.s3.operations import PutObject, operation_name
from meshwire.s3.parse_request import parse_request
from meshwire.s3.responses import render, render_error
from meshwire.sigv4 import STREAMING_PAYLOADS, Claim

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from meshd.auth.identity import Identity
    from meshd.server.connection import Connection
    from meshd.server.s3.request_auth import RequestAdmission
    from meshd.server.services import ServerServices
    from meshd.store.records import Record
    from meshwire.s3.parse_request import RequestHead
    from meshwire.s3.responses import RenderedResponse
    from meshwire.s3.result_types import ObjectStored

log = logging.getLogger(__name__)

_DIGITS: Final = 8  # of a Content-Length


class SmallPutPath:
    """Begins the PUTs it can. One per process."""

    def __init__(self, deps: ServerServices, admission: RequestAdmission) -> None:
        self._deps, self._admission = deps, admission
        self._most = min(HASHED_INLINE, deps.objects.small_bytes)
        self._incomplete = IncompleteBodies(deps.http.body_timeout)

    def __repr__(self) -> str:
        return f"<SmallPutPath of up to {self._most} bytes>"

    def try_begin(self, connection: Connection, data: bytes, head: RequestHead, body_at: int) -> bool:
        """Whether the request in `data`, whose body begins at `body_at`, is answered here. Some of its body
        may still be missing."""
        size = _body_size(head)
        if not 0 <= size <= self._most or len(data) - body_at > size:
            return False
        deps, started = self._deps, self._deps.clock.monotonic()
        span = tracing.start_request(head.headers, started)
        trace = RequestTrace(deps.clock, deps.audit, connection.remote, span, started)
        admitted: _Admitted | None = None
        try:
            with deps.control_snapshot():
                admitted = self._admit(connection, head, size, trace)
        except (S3Error, StoreError):
            pass  # the regular path names the error
        except Exception:
            log.exception("the fast path failed; the request takes the regular path")
        trace.suspend()
        if admitted is None:
            return False
        put = PendingPut(deps, connection, data[:body_at], admitted, trace, self._incomplete)
        connection.leave_to(put, put.client_lost)
        put.begin(data[body_at:], expects_continue="expect" in head.headers)
        return True

    def _admit(
        self, connection: Connection, head: RequestHead, size: int, trace: RequestTrace
    ) -> _Admitted | None:
        deps, operation = self._deps, parse_request(head)
        if type(operation) is not PutObject:
            return None
        bucket = deps.bucket_table.get(operation.bucket)
        if bucket is None or not bucket.is_plain:
            return None
        if MEMBER_SEPARATOR in operation.key or unpack_options(operation.headers.metadata) is not None:
            return None
        trace.extra_headers = common_headers(deps, head, operation.bucket)
        trace.operation, trace.target = operation_name(operation), operation
        signer = self._admission.admit(head, operation, connection, trace).signer
        claim = signer.claim
        if not isinstance(claim, Claim) or claim.payload_hash in STREAMING_PAYLOADS:
            return None
        verifier = BodyVerifier(operation.digests, claim.payload_hash)
        return _Admitted(operation, signer.identity, verifier, size, bucket.created_ms, head.raw_path)


class _Admitted(NamedTuple):
    """A PUT that may be executed. `born`: see `VersionLookup.bucket_created`."""

    operation: PutObject
    identity: Identity
    verifier: BodyVerifier
    size: int
    born: int
    path: str


class IncompleteBodies:
    """PUTs whose bodies have not arrived. After `seconds` they leave the fast path, which does not watch how
    slowly a client sends. One timer for all of them: one for each costs as much as reading the body."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._pause = seconds, min(5.0, seconds / 4)
        self._puts: dict[PendingPut, float] = {}  # with the times at which they began
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<IncompleteBodies {len(self._puts)}>"

    def add(self, put: PendingPut, began: float) -> None:
        self._puts[put] = began
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._scan)

    def discard(self, put: PendingPut) -> None:
        self._puts.pop(put, None)

    def _scan(self) -> None:
        loop = asyncio.get_running_loop()
        latest = loop.time() - self._seconds
        for put in [put for put, began in self._puts.items() if began < latest]:
            put.hand_over()
        self._timer = loop.call_later(self._pause, self._scan) if self._puts else None


class PendingPut(PendingResponse):
    """Collects the body of one PUT, commits it and sends the response."""

    def __init__(
        self,
        deps: ServerServices,
        connection: Connection,
        request: bytes,
        admitted: _Admitted,
        trace: RequestTrace,
        incomplete: IncompleteBodies,
    ) -> None:
        super().__init__(connection, request)
        self._deps, self._connection, self._admitted, self._trace = deps, connection, admitted, trace
        self._incomplete = incomplete
        self._body: bytes | bytearray = b""
        self._committing = self._answered = self._lost = False
        self._finish: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<PendingPut, {len(self._body)} of {self._admitted.size} bytes received>"

    @property
    def response_started(self) -> bool:
        return self._answered

    @property
    def closes_connection(self) -> bool:
        return self.is_last and not self.held

    def begin(self, body: bytes, *, expects_continue: bool) -> None:
        """Take what has arrived of the body."""
        if expects_continue and self._connection.transport is not None:
            self._connection.transport.write(CONTINUE)
            self.continued = True
        if len(body) == self._admitted.size:
            self._body = body
            self._commit()
        else:
            self._body = bytearray(body)
            self._incomplete.add(self, self._connection.last_received)

    # --- called by the connection ---------------------------------------------------------------------------

    def hold_input(self, data: bytes) -> None:
        """Take more of the body; what follows it is kept."""
        if self._committing:
            super().hold_input(data)
            return
        missing = self._admitted.size - len(self._body)
        self._body += data[:missing]
        if len(data) > missing:
            super().hold_input(data[missing:])
        if len(self._body) == self._admitted.size:
            self._commit()

    def input_ended(self) -> None:
        """The client has closed its side: the regular path refuses a body that ended early."""
        if not self._committing:
            self.hand_over()

    def client_lost(self) -> None:
        """The client is gone. What is being committed is still committed."""
        self._lost = True
        if not self._committing:
            self._end()

    # --- the steps ------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        self._committing = True
        self._incomplete.discard(self)
        deps, (operation, identity, verifier, _, born, _) = self._deps, self._admitted
        body = bytes(self._body)
        try:
            verifier.update(body)
            digest = verifier.finish()
        except S3Error:
            self.hand_over()
            return
        try:
            with deps.control_snapshot():
                context = WriteContext(deps.mesh.node_id, deps.mesh.lease_confirmed_version)
                future = deps.objects.commit_small(operation, identity, body, digest, born, context)
        except S3Error as error:  # the bucket is gone; another one of its name is no place for this body
            self._refuse(error)
            return
        except Exception:  # also a closing store; the regular path names the error
            self.hand_over()
            return
        if self._trace.span is not None:
            ended = partial(tracing.record_until_done, self._trace.span, "commit", tracing.now())
            future.add_done_callback(ended)
        future.add_done_callback(self._on_commit)

    def _on_commit(self, future: asyncio.Future[Record]) -> None:
        if future.cancelled() or future.exception() is not None:
            self.hand_over()
            return
        record, operation = future.result(), self._admitted.operation
        objects = self._deps.objects
        try:
            with self._deps.control_snapshot():
                steps = objects.remaining_steps(operation.bucket, operation.key, record)
                stored = objects.stored(operation, record) if steps is None else None
            if stored is not None:
                self._respond(stored)
            elif steps is not None:
                self._finish = asyncio.get_running_loop().create_task(self._finish_write(steps, record))
        except Exception:
            self._fail()

    async def _finish_write(self, steps: Awaitable[None], record: Record) -> None:
        try:
            await steps
            with self._deps.control_snapshot():
                stored = self._deps.objects.stored(self._admitted.operation, record)
            self._respond(stored)
        except S3Error as error:
            self._refuse(error)
        except Exception:
            self._fail()

    def _fail(self) -> None:
        log.exception("a request failed")
        if not self._answered:
            self._refuse(S3Error("InternalError"))

    def _respond(self, stored: ObjectStored) -> None:
        self._trace.result = stored
        self._send(render(self._admitted.operation, stored, self._trace.request_id))

    def _refuse(self, error: S3Error) -> None:
        self._trace.code = error.code
        self._send(render_error(error, self._trace.request_id, self._admitted.path))

    def _send(self, rendered: RenderedResponse) -> None:
        if self._client_gone:
            self._end()
            return
        trace, word = self._trace, "close" if self.closes_connection else ""
        headers, now = [*rendered.headers, *trace.extra_headers], self._deps.clock.now_ms() // 1000
        head = head_bytes(rendered.status, headers, now, connection=word)
        self._connection.queue_response(head + rendered.body)
        self._answered = True
        trace.received, trace.sent = self._admitted.size, len(rendered.body)
        trace.finish(rendered.status, later=True)
        self._read_on()
        self._connection.pending_ended(self)

    def hand_over(self) -> None:
        """Have the regular path execute the request, of which nothing was stored."""
        self._incomplete.discard(self)
        if self._client_gone:
            self._end()
            return
        self._trace.suspend()
        self.data += self._body
        self._read_on()
        self._connection.pending_ended(self)

    @property
    def _client_gone(self) -> bool:
        transport = self._connection.transport
        return self._lost or transport is None or transport.is_closing()

    def _end(self) -> None:
        """Count a request whose client did not wait for the response."""
        self._incomplete.discard(self)
        self._trace.received = len(self._body)
        self._trace.finish(CLIENT_GONE, later=True)
        self._connection.pending_ended(self)


def _body_size(head: RequestHead) -> int:
    """Return the size of a body that is sent as it is; -1 for any other."""
    text, expect = head.headers.get("content-length", ""), head.headers.get("expect", "100-continue")
    if not (text.isascii() and text.isdigit()) or len(text) > _DIGITS or expect.lower() != "100-continue":
        return -1
    return int(text)
