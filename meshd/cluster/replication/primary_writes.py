"""Writes at the primary: it alone commits them, and every other node forwards them to it.

Law: this node acts as primary only under a map that is known to be current, after former primaries have
handed the name over, and under the fence of that map version. What it committed, and the state by which
it rejected a request, is on every node of the write set before the client is answered.
Before its first write to a name under a new map, the primary asks every recent primary that still answers to
hand the name over, and reports one that does not answer as suspect: otherwise a condition would be checked
against stale data. That check costs two dictionary look-ups while the map does not change.
A write is forwarded only while nothing of it is committed here; one that may have been applied is never
forwarded again, unless its caller says that it is `repeatable`. A node never forwards a forwarded write: it
commits as primary or answers 421 with its map version. A node that was marked away never applies a write it
accepted (or that was forwarded to it) under an earlier map version: the client was told the outcome is
unknown and may have written more since. Nor does it acknowledge one that it had committed: another node may
have decided about the name without it. A write that no client waits for (`WriteContext.accepted_by` is
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
from meshd.cluster.replication.clock_errors import skew_error
from meshd.cluster.replication.full_nodes import OWN_TEXTS, is_full, nothing_changed
from meshd.cluster.replication.primary_handover import HAND_OVER, HandedName
from meshd.cluster.replication.replicator import WRITE_TIMEOUT, Replicator
from meshd.cluster.replication.unconfirmed_writes import UnconfirmedWrites
from meshd.errors import MeshdError
from meshd.rpc.peer_client import PeerClockError, PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.rpc.peer_rpc import BodyFramingError
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    DiskFullError,
    NodeFullError,
    NotPrimaryError,
    NotReplicatedError,
    StaleEpochError,
)
from meshd.store.records import NO_DEADLINE, WriteContext
from meshd.telemetry import metrics
from meshwire.cluster import routes
from meshwire.cluster.cluster_map import REACHABLE_STATES

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.peer_client import PeerClient
    from meshd.rpc.peer_rpc import PeerCall
    from meshd.store.api import ObjectStore
    from meshd.store.errors import StoreError
    from meshd.store.records import Record
    from meshd.util.clock import Clock
    from meshwire.cluster import ClusterMap, Node, Routes

_T = TypeVar("_T")
Request = TypeVar("Request")
Response = TypeVar("Response")
WriteAction = Callable[[WriteContext], Awaitable[_T]]
"""A write to the local store, under the fence of the context that it is called with."""
RECENT_SECONDS: Final = 2 * WRITE_TIMEOUT
"""Seconds after a newer map arrived during which a former primary is asked: longer than a write may take to
reach the other nodes before it is given up."""
_MAX_NAMES: Final = 10_000  # names remembered as handed over
_HANDOVER_PAUSE: Final = 0.1
_NOT_FOUND: Final = 404
_FORWARD_TIMEOUT: Final = 15.0  # seconds after which a write without a primary is given up
_NAMES_AT_ONCE: Final = 256  # names whose handover is waited for together
_PAUSE: Final = 0.05
_UNKNOWN: Final = "the write may or may not have taken effect; try again"
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
            node = self._mesh.other_primary(bucket, key)
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
        `refused` returns: NotReplicatedError or NodeFullError by default."""
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
            self._mesh.reject_if_abandoned(context)  # under the map version that is sent: no await in between
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


class _FormerMap:
    """A former map, or None for maps that this process did not see. It matters until `until` (monotonic)."""

    def __init__(self, cluster: ClusterMap | None, until: float) -> None:
        self.cluster, self.until = cluster, until
        self._routes: dict[int, Routes] = {}

    def nodes_to_ask(self, mesh: ClusterView, bucket: str, key: str) -> set[str]:
        """Returns the nodes that may have been primary of a name under it."""
        if self.cluster is None or self.cluster.counts != mesh.current_map().counts:
            route = mesh.route_for(bucket, key)
            return {node.node_id for node in (*route.read_set, *route.write_set)}
        copies = mesh.replica_count(bucket)
        found = self._routes.get(copies)
        if found is None:
            found = self._routes[copies] = routes(self.cluster, copies)
        primary = found.route_of_key(bucket, key).primary
        return set() if primary is None else {primary.node_id}


class PrimaryHandover:
    """Ensures that names are handed over. One per process. Checks never wait."""

    def __init__(self, mesh: ClusterView, peers: PeerClient, clock: Clock) -> None:
        self._mesh, self._peers, self._clock, self.window = mesh, peers, clock, RECENT_SECONDS
        self._known: ClusterMap | None = None
        self._former: list[_FormerMap] = []
        self._done: set[tuple[str, str]] = set()  # names handed over under the known map

    def __repr__(self) -> str:
        return f"<PrimaryHandover to {self._mesh.node_id}, {len(self._former)} former maps>"

    def observe_map(self) -> int:
        """Records a change of the map; returns its version."""
        cluster = self._mesh.current_map()
        if cluster is not self._known:
            known, self._known, self._done = self._known, cluster, set()
            seen = known is not None and known.version + 1 == cluster.version
            self._former.append(_FormerMap(known if seen else None, self._clock.monotonic() + self.window))
        return cluster.version

    def is_complete(self, bucket: str, key: str, version: int) -> bool:
        """Returns True if nothing of a name remains to be handed over under this map version."""
        if self.observe_map() != version:
            return False
        return not self._former or (bucket, key) in self._done or not self._former_primaries(bucket, key)

    def _former_primaries(self, bucket: str, key: str) -> list[Node]:
        """Returns the nodes to ask, according to the current map."""
        now, cluster = self._clock.monotonic(), self._mesh.current_map()
        self._former = [former for former in self._former if former.until > now]
        found = {
            node_id for former in self._former for node_id in former.nodes_to_ask(self._mesh, bucket, key)
        }
        found.discard(self._mesh.node_id)
        nodes = [cluster.node(node_id) for node_id in sorted(found)]
        return [node for node in nodes if node is not None and node.state in REACHABLE_STATES]

    async def wait_until_received(self, bucket: str, key: str, patience: float) -> None:
        """Returns when the name was completely handed over under the map that is current then. Raises
        NotReplicatedError after `patience` seconds."""
        deadline = self._clock.monotonic() + patience
        while True:
            version = self.observe_map()
            if self.is_complete(bucket, key, version):
                return
            nodes = self._former_primaries(bucket, key)
            answers = await asyncio.gather(*[self._ask(node, bucket, key, version) for node in nodes])
            if self.observe_map() != version:
                continue
            if all(answer is True for answer in answers):
                if len(self._done) >= _MAX_NAMES:
                    self._done.clear()  # later writes ask again
                self._done.add((bucket, key))
                return
            if self._clock.monotonic() > deadline:
                if skew := skew_error(answers, "nothing was changed"):
                    raise skew
                missing = ", ".join(n.node_id for n, answer in zip(nodes, answers, strict=True) if not answer)
                raise NotReplicatedError(
                    f"{missing} was recently the primary of this name, does not hand it over, and is "
                    "not known to be away; nothing was changed; try again shortly"
                )
            await self._mesh.wait_for_newer_map(version, _HANDOVER_PAUSE)

    async def _ask(self, node: Node, bucket: str, key: str, version: int) -> bool | PeerClockError:
        """Returns True if a node has handed the name over, PeerClockError if it refuses for its clock."""
        result, skew = "done", None
        try:
            await self._peers.call_typed(node, HAND_OVER, HandedName(bucket, key))
        except StaleMapError as error:
            result = "map"
            if error.version > version:
                await self._mesh.wait_for_newer_map(version, 1.0)
        except (PeerUnreachableError, BodyFramingError):
            result = "silent"
            await self._mesh.report_suspect(node.node_id, version)
        except PeerRefusedError as error:
            result = "unknown" if error.status == _NOT_FOUND else "refused"
            skew = error if isinstance(error, PeerClockError) else None
        metrics.replication_handovers.labels(result).inc()
        return skew or result in ("done", "unknown")  # nodes of an earlier release do not have this call


class PrimaryWrites:
    """Commits writes of names that this node is the primary of, and replicates them. One per process.
    `store`: this node's own."""

    def __init__(self, store: ObjectStore, mesh: ClusterView, peers: PeerClient, clock: Clock) -> None:
        self._store, self._mesh, self._clock = store, mesh, clock
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
            self._mesh.reject_if_abandoned(context)
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
            except NodeFullError:
                raise
            except DiskFullError as error:
                raise nothing_changed(self._mesh.node_id, error) from error
            except StaleEpochError as error:
                if self._clock.monotonic() > deadline:
                    raise NotReplicatedError(
                        "the cluster map changes too often for this node to act as primary, or the node was "
                        "suspended; nothing was changed; try again shortly"
                    ) from error
                await self._mesh.wait_for_newer_map(error.version - 1, _MAP_WAIT)

    def acknowledge(self, result: _T, context: WriteContext) -> _T:
        """Returns the result of a write that this node has committed and replicated. Raises
        NotReplicatedError if the node was marked away since it accepted the write."""
        self._mesh.reject_if_absent_since(context)
        return result

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
        primary = self._mesh.other_primary(bucket, key)
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
                f"another node has become the primary of this name; {_UNKNOWN}"
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
    if is_full(error):
        if error.message not in OWN_TEXTS:  # it names a replica
            return NodeFullError(error.message)
        return nothing_changed(node.node_id, error)
    return skew_error((error,), "nothing was changed") or NotReplicatedError(
        f"node {node.node_id} failed as the primary of this name: {error}; {_UNKNOWN}"
    )


def _outcome_unknown(node: Node) -> NotReplicatedError:
    return NotReplicatedError(
        f"node {node.node_id} is the primary of this name and did not answer; {_UNKNOWN}"
    )
