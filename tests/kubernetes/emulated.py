"""An emulated Kubernetes API, in the process: for faults, not for truth.

It stamps uid, resourceVersion and generation, knows label selectors, optimistic concurrency, server-side
apply (as a deep merge, which makes what is not there), status as a subresource, finalizers and owners. It
knows no schemas, admission, rights or field managers: the real control plane is asked about those.
"""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

import httpx2
from lightkube import AsyncClient
from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import Cluster, Context, User

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

Document = dict[str, Any]
Place = tuple[str, str, str]  # plural, namespace, name


class KilledError(BaseException):
    """The operator ends here, without another word."""


@dataclass
class Fault:
    """What happens to a call instead. `when`: (method, plural, how many calls changed something before)."""

    when: Callable[[str, str, int], bool]
    status: int = 0  # 0: the operator is killed
    message: str = ""

    def raised(self) -> httpx2.Response:
        if self.status == 0:
            raise KilledError
        return refusal(self.status, self.message)


@dataclass
class Api:
    """`effects`: calls so far that changed something, `changed`: what each of them changed. `streams`: what
    the next watches without a field selector answer; others are quiet. `orphaned`: names of what was deleted
    without what belongs to it. `absent`: plurals that the API server does not serve."""

    objects: dict[Place, Document] = field(default_factory=dict)
    version: int = 0
    effects: int = 0
    changed: list[str] = field(default_factory=list)
    calls: int = 0
    fault: Fault | None = None
    streams: list[list[Document | Exception]] = field(default_factory=list)
    orphaned: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=lambda: {"servicemonitors"})

    def client(self) -> AsyncClient:
        """lightkube, on this; one for all, for making one takes longer than a scene."""
        _WIRE.api = self
        return _client()

    def put(self, plural: str, document: Document) -> Document:
        """As somebody else does it."""
        self.version += 1
        metadata = document["metadata"]
        metadata |= {"resourceVersion": str(self.version)}
        metadata.setdefault("uid", f"uid-{self.version}")
        metadata.setdefault("generation", 1)
        metadata.setdefault("creationTimestamp", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        self.objects[plural, metadata.get("namespace", ""), metadata["name"]] = document
        return document

    def of(self, plural: str) -> list[Document]:
        """Everything of a kind, by name."""
        return [self.objects[place] for place in sorted(self.objects) if place[0] == plural]

    def find(self, plural: str, name: str) -> Document | None:
        """One object, in whatever namespace."""
        return next((each for each in self.of(plural) if each["metadata"]["name"] == name), None)

    # --- requests -----------------------------------------------------------------------------------------

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """As a transport of httpx."""
        self.calls += 1
        path = [unquote(part) for part in request.url.path.strip("/").split("/")]
        path = path[2:] if path[0] == "api" else path[3:]
        namespace = ""
        if path[0] == "namespaces" and len(path) > 2:
            namespace, path = path[1], path[2:]
        plural, name, sub = (*path, "", "")[:3]
        if plural in self.absent:
            return httpx2.Response(404, text="404 page not found")
        query = {key: values[0] for key, values in parse_qs(request.url.query.decode()).items()}
        body = json.loads(request.content) if request.content else {}
        if "watch" in query:
            heard = self.streams and "fieldSelector" not in query
            return httpx2.Response(200, stream=_Stream(self.streams.pop(0) if heard else None))
        if self.fault is not None and self.fault.when(request.method, plural, self.effects):
            fault, self.fault = self.fault, None if self.fault.status == 0 else self.fault
            return fault.raised()
        before = self.version
        answer = self._done(request, (plural, namespace, name), sub, query, body)
        if self.version != before:
            self.effects += 1
            self.changed.append(plural)
        return answer

    def _done(
        self, request: httpx2.Request, place: Place, sub: str, query: dict[str, str], body: Document
    ) -> httpx2.Response:
        there, method = self.objects.get(place), request.method
        if not place[2]:
            return self._of_many(method, place, query, body)
        if method == "PATCH" and "apply" in request.headers["content-type"]:
            return self._changed(place, there or _empty(body), body, sub)
        if there is None:
            return refusal(404)
        if method == "GET":
            return _answer(there)
        if method == "DELETE":
            wanted = (body.get("preconditions") or {}).get("uid")
            if wanted not in (None, there["metadata"]["uid"]):
                return refusal(409)
            self.orphaned |= {place[2]} if query.get("propagationPolicy") == "Orphan" else set()
            return self._deleted(place)
        expected = (body.get("metadata") or {}).get("resourceVersion")
        if expected not in (None, there["metadata"]["resourceVersion"]):
            return refusal(409)
        return self._changed(place, there, body, sub, whole=method == "PUT")

    def _of_many(self, method: str, place: Place, query: dict[str, str], body: Document) -> httpx2.Response:
        plural, namespace, _ = place
        if method == "POST":
            target = (plural, namespace, body["metadata"]["name"])
            if target in self.objects:
                return refusal(409)
            body["metadata"].setdefault("namespace", namespace)
            return _answer(self.put(plural, body))
        found = [
            each
            for each in self.of(plural)
            if namespace in ("", each["metadata"].get("namespace", ""))
            and _chosen(query.get("labelSelector", ""), each["metadata"].get("labels") or {})
            and _about(query.get("fieldSelector", ""), each)
        ]
        if method == "DELETE":
            for each in found:
                self._deleted((plural, namespace, each["metadata"]["name"]))
        return _answer({"kind": "List", "metadata": {}, "items": found})

    def _changed(
        self, place: Place, there: Document, body: Document, sub: str, *, whole: bool = False
    ) -> httpx2.Response:
        after = copy.deepcopy(body) if whole else copy.deepcopy(there)
        if not whole:
            _merge(after, {"status": body.get("status")} if sub == "status" else _without_status(body))
        for name in ("uid", "generation", "creationTimestamp", "deletionTimestamp"):
            if name in there["metadata"]:
                after["metadata"][name] = there["metadata"][name]
        after["metadata"]["resourceVersion"] = there["metadata"].get("resourceVersion")
        if after == there and place in self.objects:
            return _answer(there)
        if place in self.objects and _fixed(after) != _fixed(there):
            return refusal(422)
        if after.get("spec") != there.get("spec"):
            after["metadata"]["generation"] = int(there["metadata"].get("generation") or 0) + 1
        after["metadata"].setdefault("namespace", place[1])
        self.put(place[0], after)
        if after["metadata"].get("deletionTimestamp") and not after["metadata"].get("finalizers"):
            self._gone(place)
        return _answer(after)

    def _deleted(self, place: Place) -> httpx2.Response:
        there = self.objects[place]
        if there["metadata"].get("finalizers"):
            there["metadata"].setdefault("deletionTimestamp", "2030-01-01T00:00:00Z")
            self.put(place[0], there)
        else:
            self._gone(place)
        return _answer({"kind": "Status", "status": "Success"})

    def _gone(self, place: Place) -> None:
        """With what it owns."""
        self.version += 1
        uid = self.objects.pop(place)["metadata"]["uid"]
        for other in list(self.objects):
            owners = (
                self.objects[other]["metadata"].get("ownerReferences") or () if other in self.objects else ()
            )
            if any(owner["uid"] == uid for owner in owners):
                self._gone(other)


class _Wire(httpx2.AsyncBaseTransport):
    """To the API that a client was asked of last."""

    api: Api

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return await self.api.handle_async_request(request)


_WIRE = _Wire()


@cache
def _client() -> AsyncClient:
    config = SingleConfig(
        context_name="e",
        context=Context(cluster="e", namespace="default"),
        cluster=Cluster(server="http://emulated"),
        user=User(),
    )
    return AsyncClient(config=config, transport=_WIRE)


class _Stream(httpx2.AsyncByteStream):
    """Events of a watch; then it ends, or breaks. None: nothing happens any more."""

    def __init__(self, events: list[Document | Exception] | None) -> None:
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._events is None:
            await asyncio.Event().wait()
        for each in self._events or ():
            if isinstance(each, Exception):
                raise each
            yield json.dumps(each).encode() + b"\n"


def refusal(status: int, message: str = "") -> httpx2.Response:
    """As the API says no."""
    reason = {404: "NotFound", 409: "Conflict", 410: "Expired"}.get(status, "InternalError")
    document = {"kind": "Status", "status": "Failure", "code": status, "reason": reason}
    document["message"] = message or reason
    return httpx2.Response(status, json=document)


def _fixed(document: Document) -> object:
    """What of it never changes."""
    return (document.get("spec") or {}).get("volumeClaimTemplates")


def _answer(document: Document) -> httpx2.Response:
    return httpx2.Response(200, json=document)


def _empty(body: Document) -> Document:
    metadata = {"name": body["metadata"]["name"]}
    return {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": metadata}


def _without_status(body: Document) -> Document:
    return {key: value for key, value in body.items() if key != "status"}


def _merge(base: Document, over: Document) -> None:
    for key, value in over.items():
        if value is None:
            base.pop(key, None)
        elif isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = copy.deepcopy(value)


def _about(selector: str, event: Document) -> bool:
    """Of an event: `involvedObject.name=…`."""
    terms = (term.partition("=") for term in filter(None, selector.split(",")))
    return all(event["involvedObject"].get(key.partition(".")[2]) == value for key, _, value in terms)


def _chosen(selector: str, labels: dict[str, str]) -> bool:
    for term in filter(None, selector.split(",")):
        key, equals, value = term.partition("=")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True
