"""Writes at the primary: it alone commits them, and every other node forwards them to it.

Law: this node acts as primary only under a map that is known to be current, after former primaries have
handed the name over, and under the fence of that map version. What it committed, and the state by which
it rejected a request, is on every node of the write set before the client is answered.
A write is forwarded only while nothing of it is committed here; one that may have been applied is never
forwarded again, unless its caller says that it is `repeatable`. A node never forwards a forwarded write: it
commits as primary or answers 421 with its map version. A node that was marked away never applies a write it
accepted (or that was forwarded to it) under an earlier map version: the client was told the outcome is
unknown and may have written more since. A write that no client waits for (`WriteContext.accepted_by` is
empty) is never rejected.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar

from meshd.cluster.read_barrier import ANSWER_VALID_SECONDS, ReadBarrier
from meshd.cluster.replication.primary_handover import PrimaryHandover
from meshd.cluster.replication.replicator import Replicator
from meshd.cluster.replication.unconfirmed_writes import UnconfirmedWrites
from meshd.errors import MeshdError
from meshd.rpc.peer_client import PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.rpc.peer_rpc import BodyFramingError
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    DiskFullError,
    NotPrimaryError,
    NotReplicatedError,
    StaleEpochError,
)
from meshd.store.records import NO_DEADLINE, WriteContext
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.peer_client import PeerClient
    from meshd.rpc.peer_rpc import PeerCall
    from meshd.store.api import ObjectStore
    from meshd.store.errors import StoreError
    from meshd.store.records import Record
    from meshd.util.clock import Clock
    from meshwire.cluster import Node

_T = TypeVar("_T")
Request = TypeVar("Request")
Response = TypeVar("Response")
WriteAction = Callable[[WriteContext], Awaitable[_T]]
"""A write to the local store, under the fence of the context that it is called with."""
_FORWARD_TIMEOUT: Final = 15.0  # seconds after which a write without a primary is given up
_NAMES_AT_ONCE: Final = 256  # names whose handover is waited for together
_PAUSE: Final = 0.05
_MAP_WAIT: Final = 2.0  # seconds to wait for a map that another process of this node already has


class WriteNotTakenError(MeshdError):
    """The node did not act on a write, or may do so again without harm: read the map, and send it again."""


class WriteForwarder:
    """The one way to hand a write to its owner. Stateless: callers with the same `mesh` and `peers` may share
    one, or have one each."""

    def __init__(self, mesh: ClusterView, peers: PeerClient, clock: Clock) -> None:
        self._mesh, self._peers, self._clock = mesh, peers, clock

    def __repr__(self) -> str:
        return f"<WriteForwarder of {self._mesh.node_id}>"

    def owner(self, bucket: str, key: str) -> Node | None:
        """Returns the node that is primary of a name; None if it is this one. Raises NotReplicatedError if
        there is none."""
        if self._mesh.single_node:
            return None  # whatever state the map shows for this node
        primary = self._mesh.route_for(bucket, key).primary
        if primary is None:
            raise NotReplicatedError(
                "every node with this name's data is away: no node can accept writes of it until the one "
                "that left last is back; try again shortly"
            )
        return None if primary.node_id == self._mesh.node_id else primary

    def reject_if_abandoned(self, context: WriteContext) -> None:
        """Raises NotReplicatedError if the client may have been told meanwhile that the outcome is unknown:
        then the write must not happen any more."""
        if not context.accepted_by:
            return
        for node_id in {self._mesh.node_id, context.accepted_by}:
            if self._mesh.last_absence_version(node_id) > context.map_version:
                metrics.replication_given_up.inc()
                raise NotReplicatedError(
                    f"node {node_id} was marked away since it accepted the request, so the client may have "
                    "given up; nothing was changed; try again"
                )

    async def run_on_primary(
        self,
        bucket: str,
        key: str,
        here: Callable[[], Awaitable[_T]],
        there: Callable[[Node], Awaitable[_T]],
        context: WriteContext,
        *,
        local_time_counts: bool = True,
    ) -> _T:
        """Returns the result of `here` while this node is primary, otherwise that of `there` on the primary.

        `here` raises NotPrimaryError as long as nothing was changed, `there` WriteNotTakenError (see `send`);
        both may be called again. Raises NotReplicatedError if nobody acts as primary in time, NotPrimaryError
        for a write that was forwarded already, and what the two raise. Without `local_time_counts` the
        seconds that `here` takes do not count.
        """
        deadline = self._clock.monotonic() + _FORWARD_TIMEOUT
        while True:
            version, began = self._mesh.current_map().version, self._clock.monotonic()
            try:
                return await here()
            except NotPrimaryError as error:
                now = self._clock.monotonic()
                deadline += 0.0 if local_time_counts else now - began
                if context.forwarded:
                    raise
                if now > deadline:
                    raise NotReplicatedError(
                        f"no node acted as primary within {_FORWARD_TIMEOUT:g} s: {error}"
                    ) from error
            node = self.owner(bucket, key)
            if node is None:
                await self._mesh.wait_for_newer_map(version, _PAUSE)
                continue
            with suppress(WriteNotTakenError):
                return await there(node)

    async def send(
        self,
        node: Node,
        call: PeerCall[Request, Response],
        request: Request,
        context: WriteContext,
        body: AsyncGenerator[bytes, None] | None = None,
        *,
        repeatable: bool = False,
        refused: Callable[[Node, PeerRefusedError], Exception] | None = None,
    ) -> Response:
        """Sends a write to its owner and returns the response. Raises as `attempt`, and for a refusal what
        `refused` returns: NotReplicatedError or DiskFullError by default."""
        try:
            return await self.attempt(
                node,
                lambda: self._peers.call_typed(node, call, request, body=body),
                context,
                repeatable=repeatable,
            )
        except PeerRefusedError as error:
            raise (refused or write_failed)(node, error) from error
        finally:
            if body is not None:
                await body.aclose()

    async def attempt(
        self,
        node: Node,
        send: Callable[[], Awaitable[_T]],
        context: WriteContext,
        *,
        repeatable: bool = False,
    ) -> _T:
        """Returns the result of `send`, which sends a write to node `node`.

        Raises WriteNotTakenError after a pause if the node did not act, or may not have acted on a
        `repeatable` write; NotReplicatedError if the outcome is unknown, or if the write was abandoned; and
        PeerRefusedError.
        """
        version = self._mesh.current_map().version
        try:
            self.reject_if_abandoned(context)  # under the map version that is sent: no await in between
            return await send()
        except StaleMapError as error:
            await self._mesh.wait_for_newer_map(version, 1.0 if error.version > version else _PAUSE)
            raise WriteNotTakenError(f"node {node.node_id} is not the primary of this name") from error
        except PeerUnreachableError as error:
            await self._mesh.report_suspect(node.node_id, version)
            if error.begun and not repeatable:
                raise _outcome_unknown(node) from error
            await self._mesh.wait_for_newer_map(version, _PAUSE)
            raise WriteNotTakenError(str(error)) from error
        except BodyFramingError as error:
            if not repeatable:
                raise _outcome_unknown(node) from error
            await self._mesh.wait_for_newer_map(version, _PAUSE)
            raise WriteNotTakenError(str(error)) from error


class PrimaryWrites:
    """Commits writes of names that this node is the primary of, and replicates them. One per process.
    `store`: this node's own."""

    def __init__(
        self,
        store: ObjectStore,
        mesh: ClusterView,
        peers: PeerClient,
        clock: Clock,
        forwarder: WriteForwarder,
    ) -> None:
        self._store, self._mesh, self._clock, self._forwarder = store, mesh, clock, forwarder
        self.replicator = Replicator(mesh, peers, store, clock)
        self.handover = PrimaryHandover(mesh, peers, clock)
        self.unconfirmed = UnconfirmedWrites(store, clock, self.replicator, self._require_still_primary)
        self._read_barrier = ReadBarrier(mesh, clock)
        self._running: set[asyncio.Future[Any]] = set()

    def __repr__(self) -> str:
        return f"<PrimaryWrites of {self._mesh.node_id} to {self._store!r}>"

    async def run_as_primary(self, bucket: str, key: str, act: WriteAction[_T], context: WriteContext) -> _T:
        """Runs `act` under the fence of the map by which this node is primary, after former primaries have
        handed the name over, and returns its result. `act` may be called again after an attempt that changed
        nothing."""
        return await self.run_all_as_primary(bucket, (key,), act, context)

    async def run_all_as_primary(
        self, bucket: str, keys: Sequence[str], act: WriteAction[_T], context: WriteContext
    ) -> _T:
        """Runs `act` once for all of these names; see `run_as_primary`."""
        deadline = self._clock.monotonic() + self.replicator.timeout
        while True:
            latest = min([await self.ensure_lease_valid(bucket, key) for key in keys])
            version = max([self.primary_epoch(bucket, key) for key in keys])  # of one map: no await between
            self._forwarder.reject_if_abandoned(context)
            if not self._mesh.single_node:
                complete = partial(self.handover.is_complete, bucket, version=version)
                waiting = list(itertools.islice((key for key in keys if not complete(key)), _NAMES_AT_ONCE))
                if waiting:
                    patience = deadline - self._clock.monotonic()
                    received = [self.handover.wait_until_received(bucket, key, patience) for key in waiting]
                    await self.run_to_completion(asyncio.gather(*received))
                    continue  # the map may have changed during the handover
            try:
                return await act(context.under_fence(version, latest))
            except StaleEpochError as error:
                if self._clock.monotonic() > deadline:
                    raise NotReplicatedError(
                        "the cluster map changes too often for this node to act as primary, or the node was "
                        "suspended; nothing was changed; try again shortly"
                    ) from error
                await self._mesh.wait_for_newer_map(error.version - 1, _MAP_WAIT)

    async def run_checked(self, bucket: str, key: str, act: WriteAction[_T], context: WriteContext) -> _T:
        """Runs `act` as primary; if a condition did not hold, replicates what it was checked against
        first."""
        try:
            return await self.run_as_primary(bucket, key, act, context)
        except (ConditionFailedError, ConditionMissingError):
            await self.unconfirmed.confirm_newest(bucket, key)
            raise

    def primary_epoch(self, bucket: str, key: str) -> int:
        """Returns the map version under which this node is the primary of a name. Raises NotPrimaryError,
        NotReplicatedError."""
        version = self._mesh.current_map().version
        primary = self._forwarder.owner(bucket, key)
        if primary is not None:
            raise NotPrimaryError(
                f"node {primary.node_id} is the primary of this name now; nothing was changed; try again"
            )
        return version

    def _require_still_primary(self, bucket: str, key: str) -> int:
        """Returns the epoch like `primary_epoch`, for a write that is already committed here: another node
        may have become primary since. Raises NotReplicatedError."""
        try:
            return self.primary_epoch(bucket, key)
        except NotPrimaryError as error:
            raise NotReplicatedError(
                "another node has become the primary of this name; the write may or may not have taken "
                "effect; try again"
            ) from error

    async def ensure_lease_valid(self, bucket: str, key: str) -> int:
        """Returns the stamp up to which this node may act as primary, once its map is confirmed.

        A write without this check could commit here alone and, when the node returns, supersede writes that
        others have acknowledged since. Raises NotReplicatedError; then nothing was changed.
        """
        # The time is read first: if the process is suspended in between, the deadline is too early, not late.
        now = self._clock.stamp()
        left = self._mesh.lease_remaining
        if left == inf:
            return NO_DEADLINE
        if left <= 0:
            now, left = await self._confirm_with_owners(bucket, key), ANSWER_VALID_SECONDS
        return now + int(left * 1e9)

    async def _confirm_with_owners(self, bucket: str, key: str) -> int:
        """Returns the stamp at which the last of the other owners was asked; none of them uses a newer
        map."""
        now = self._clock.stamp()
        why = await self._read_barrier.wait_until_current(bucket, key)
        if why:
            raise NotReplicatedError(
                f"this node {why}, so it cannot confirm that it is still the primary; nothing was changed; "
                "use another node, or try again"
            )
        return now

    async def replicate_and_restamp(
        self, bucket: str, key: str, record: Record, had: Iterable[str] = (), newest: int = 0
    ) -> Record:
        """Replicates a version committed here to the nodes that lack it; returns the final record, which may
        have a newer stamp."""
        newest = await self.replicator.replicate_version(bucket, key, record, had, newest)
        if newest <= record.stamp:
            return record
        return await self.unconfirmed.restamp_if_behind(bucket, key, record, newest)

    async def run_to_completion(self, awaitable: Awaitable[_T]) -> _T:
        """Runs something to completion even if the caller is cancelled."""
        task = asyncio.ensure_future(awaitable)
        self._running.add(task)
        task.add_done_callback(self._forget_task)
        return await asyncio.shield(task)

    def _forget_task(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # the caller gets it, unless it is gone


def write_failed(node: Node, error: PeerRefusedError) -> StoreError:
    """Returns the error of a write that its primary refused."""
    if error.code == "InsufficientStorage":
        return DiskFullError(f"node {node.node_id} has no space for it; delete objects or add a disk")
    return NotReplicatedError(
        f"node {node.node_id} failed as the primary of this name: {error}; the write may or may not "
        "have taken effect; try again"
    )


def _outcome_unknown(node: Node) -> NotReplicatedError:
    return NotReplicatedError(
        f"node {node.node_id} is the primary of this name and did not answer; the write may or may not "
        "have taken effect; try again"
    )
