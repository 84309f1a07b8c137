"""Watch cache: this process's copy of all resources of one kind, kept current by a watch.

Law: a lookup never waits. The copy is the state at one resource version, and versions only rise unless
the API server's own store was restored from a backup. Each end of a watch checks for that, because a
watch from a future version stays silent. While the API is unreachable the copy stays as it is.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from meshd.control.control_api import MESH_ID
from meshd.control.kubernetes.api_client import ApiStatusError, KubernetesError
from meshd.control.kubernetes.resource_encoding import STORE, decode_resource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshd.control.control_api import Versioned
    from meshd.control.kubernetes.api_client import ApiClient
    from meshd.control.kubernetes.resource_encoding import Resource

_log = logging.getLogger(__name__)
_WATCH_SECONDS: Final = 60  # then the server ends it, and a new one continues there
_PAUSE: Final = 0.5
_PATIENCE: Final = 5.0  # for this process's own write to come back by the watch


class _ForeignError(KubernetesError):
    """The API has the state of another mesh."""


class LocalCopy(NamedTuple):
    """All keys at `revision`; `topics`: the revision of the newest change of each. `restores`: how often the
    API's store was restored from a backup."""

    entries: Mapping[str, Versioned]
    topics: Mapping[str, int]
    revision: int
    restores: int = 0


class WatchCache:
    """The copy and the thread that watches; `close` ends it. Raises ControlError if the first read fails."""

    def __init__(
        self, api: ApiClient, namespace: str, resource: Resource, store: str, moved: Callable[[], None]
    ) -> None:
        self._api, self._resource, self._notify = api, resource, moved
        self._path = f"/api/v1/namespaces/{namespace}/{resource}"
        self._selector, self._one = f"{STORE}={store}", f"metadata.name={store}"
        self._closed = False
        self._lost: type[KubernetesError] | None = None  # the error that was last reported
        self._moved = threading.Condition()
        self._copy = self._load(LocalCopy({}, {}, 0))
        self._thread = threading.Thread(target=self._follow, name=f"watch-{resource}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<WatchCache of {self._path} at {self._copy.revision}>"

    def snapshot(self) -> LocalCopy:
        """The newest known state."""
        return self._copy

    def await_write(self, version: int) -> None:
        """Wait until the copy includes the write at `version`."""
        self._await(lambda copy: copy.revision >= version)

    def await_deletion(self, key: str, version: int) -> None:
        """Wait until the copy no longer has `version` of the key."""

        def gone(copy: LocalCopy) -> bool:
            entry = copy.entries.get(key)
            return copy.revision >= version and (entry is None or entry.version > version)

        self._await(gone)

    def close(self) -> None:
        """End the thread. Idempotent; it ends soon after the API client is closed."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()

    def _await(self, enough: Callable[[LocalCopy], bool]) -> None:
        with self._moved:
            if self._moved.wait_for(lambda: self._closed or enough(self._copy), _PATIENCE):
                return
        self._take(self._load(self._copy))

    def _load(self, before: LocalCopy) -> LocalCopy:
        """Read everything again: at the start, and after the watch has fallen too far behind."""
        answer = self._api.call("GET", self._path, labelSelector=self._selector)
        revision = int(answer["metadata"]["resourceVersion"])
        entries: dict[str, Versioned] = {}
        topics = dict(before.topics)
        for item in answer.get("items") or []:
            entry = decode_resource(self._resource, item)
            if entry is not None:
                entries[entry.key] = entry.value
                topic = entry.key.partition("/")[0]
                topics[topic] = max(topics.get(topic, 0), entry.value.version)
        for key in before.entries:  # what is gone went at some revision up to this one
            if key not in entries:
                topics[key.partition("/")[0]] = revision
        restores = before.restores
        if revision < before.revision:  # put back: anything may be otherwise, and nothing shows what
            restores, topics = restores + 1, dict.fromkeys(topics, revision)
        return LocalCopy(dict(sorted(entries.items())), topics, revision, restores)

    def _follow(self) -> None:
        """Run in the thread: watch, and read again after a gap."""
        while not self._closed:
            began = self._copy.revision
            try:
                self._watch()
                self._lost = None
            except KubernetesError as error:
                reported = self._lost is type(error) or self._closed
                level = logging.DEBUG if reported else logging.WARNING
                _log.log(level, "the control store is out of reach: %s; data is served all the same", error)
                self._lost = type(error)
            except Exception:
                _log.exception("the watch of the control store failed and will be restarted")
            if not self._closed and self._copy.revision == began:
                threading.Event().wait(_PAUSE)

    def _look_back(self) -> None:
        """Return whether the API's versions continue from this copy; otherwise everything is read again.

        Listing one name is cheap, and without a version it reports the newest of all. Raises KubernetesError.
        """
        before = self._copy
        answer = self._api.call("GET", self._path, fieldSelector=self._one)
        if int(answer["metadata"]["resourceVersion"]) >= before.revision:
            return
        copy = self._load(before)
        if copy.revision >= before.revision:
            return
        if _foreign(before, copy):
            raise _ForeignError(
                "the API's store was emptied, or has another mesh's objects: nothing is read from it; put "
                "this mesh's back from their backup"
            )
        fields = {"resource": str(self._resource), "revision": copy.revision, "before": before.revision}
        _log.error("the API's store was put back from a backup: what was changed since is lost", extra=fields)
        with self._moved:
            self._copy = copy
            self._moved.notify_all()
        self._notify()

    def _watch(self) -> None:
        self._look_back()
        events = self._api.watch(
            self._path,
            _WATCH_SECONDS + 15,
            labelSelector=self._selector,
            resourceVersion=str(self._copy.revision),
            allowWatchBookmarks="true",
            timeoutSeconds=str(_WATCH_SECONDS),
        )
        try:
            for event in events:
                if self._closed:
                    return
                if event.get("type") == "ERROR":  # 410: what came between is forgotten
                    self._take(self._load(self._copy))
                    return
                self._apply(str(event.get("type")), event["object"])
        except ApiStatusError as error:
            if error.status != 410:
                raise
            self._take(self._load(self._copy))

    def _apply(self, kind: str, document: Mapping[str, Any]) -> None:
        with self._moved:  # another thread may have read everything in the meantime
            copy = _after(self._copy, self._resource, kind, document)
            if copy is None:
                return
            self._copy = copy
            self._moved.notify_all()
        self._notify()

    def _take(self, copy: LocalCopy) -> None:
        with self._moved:
            if copy.revision <= self._copy.revision:
                return
            self._copy = copy
            self._moved.notify_all()
        self._notify()


def _foreign(before: LocalCopy, after: LocalCopy) -> bool:
    """Whether the restored state belongs to another mesh."""
    mine, theirs = before.entries.get(MESH_ID), after.entries.get(MESH_ID)
    if mine is not None and (theirs is None or theirs.value != mine.value):
        return True
    return bool(before.entries) and not after.entries


def _after(before: LocalCopy, resource: Resource, kind: str, document: Mapping[str, Any]) -> LocalCopy | None:
    """Return the copy with an event applied, or None if the copy already had it."""
    version = int(document["metadata"]["resourceVersion"])
    if version <= before.revision:
        return None
    entry = None if kind == "BOOKMARK" else decode_resource(resource, document)
    if entry is None:
        return before._replace(revision=version)
    entries = dict(before.entries)
    fresh = entry.key not in entries
    if kind == "DELETED":
        entries.pop(entry.key, None)
    else:
        entries[entry.key] = entry.value
    topics = {**before.topics, entry.key.partition("/")[0]: version}
    entries = dict(sorted(entries.items())) if fresh else entries
    return before._replace(entries=entries, topics=topics, revision=version)
