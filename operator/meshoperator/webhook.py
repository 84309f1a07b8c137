"""Mutating webhook of training pods and of daemons: HTTPS server for AdmissionReview v1, connection limits.

Law: every pod is allowed; a failure becomes a warning to the user and rejects no pod. The webhook creates
nothing. A connection that sends no whole request for too long is closed, but never while its request is
being answered.
Invariant: `planners.pod_admission` and `planners.disk_affinity` alone decide the patch.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import ssl
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from meshoperator import metrics
from meshoperator.listen_socket import listen
from meshoperator.planners.disk_affinity import machine_patch
from meshoperator.planners.pod_admission import (
    Admitted,
    InvalidPodError,
    admit,
    checked_pod,
    requested_datasets,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from pathlib import Path

    from aiohttp.web import Request, RequestHandler

    from meshoperator.controllers.daemon_machines import DaemonMachines
    from meshoperator.controllers.pod_credentials import DatasetCatalog


class ConnectionLimits:
    """Closes idle connections. `idle`: seconds without a whole request; `most`: open connections."""

    def __init__(self, idle: float, most: int) -> None:
        self._idle, self._most = idle, most
        self._since: dict[RequestHandler, float] = {}
        self._busy: set[RequestHandler] = set()

    def __repr__(self) -> str:
        return f"<ConnectionLimits of {len(self._since)} connections>"

    @contextmanager
    def answering(self, request: Request) -> Iterator[None]:
        """Keep the connection open while its request, received in full, is answered."""
        self._busy.add(request.protocol)
        try:
            yield
        finally:
            self._busy.discard(request.protocol)
            self._since[request.protocol] = asyncio.get_running_loop().time()

    def sweep(self, connections: Sequence[RequestHandler]) -> int:
        """Close connections that were idle for too long, and the longest idle ones beyond the limit; return
        how many."""
        now = asyncio.get_running_loop().time()
        self._since = {each: self._since.get(each, now) for each in connections}
        waiting = sorted(
            (each for each in connections if each not in self._busy), key=self._since.__getitem__
        )
        late = sum(now - self._since[each] >= self._idle for each in waiting)
        ended = waiting[: max(late, len(connections) - self._most)]
        for each in ended:
            if each.transport is not None:
                each.transport.abort()
        return len(ended)


_log = logging.getLogger(__name__)
_LARGEST: Final = 4 << 20
_LOOK: Final = 5.0  # seconds between checks of the certificate files
_UID: Final = 100  # longest request id; UUIDs have 36 characters
_IDLE: Final = 15.0  # seconds a connection may send no whole request
_CONNECTIONS: Final = 256
_PATIENCE: Final = 3.0  # seconds for the API server to answer; then the pod is left unchanged


class Webhook:
    """`async with Webhook(…) as hook: hook.port`."""

    def __init__(
        self,
        catalogue: DatasetCatalog,
        machines: DaemonMachines,
        folder: Path,
        host: str,
        port: int,
        look: float = _LOOK,
        idle: float = _IDLE,
    ) -> None:
        self._catalogue, self._machines = catalogue, machines
        self._folder, self._look, self._idle = folder, look, idle
        self._host, self._port = host, port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._loaded: tuple[float, float] = (0.0, 0.0)
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._limits = ConnectionLimits(idle, _CONNECTIONS)
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<Webhook {self._host}:{self.port}>"

    @property
    def port(self) -> int:
        """The port it listens on."""
        sockets = self._server.sockets if self._server else ()
        return int(sockets[0].getsockname()[1]) if sockets else self._port

    async def __aenter__(self) -> Webhook:
        self._load()
        app = web.Application(client_max_size=_LARGEST)
        app.router.add_post("/pods", self._review_training_pod)
        app.router.add_post("/daemons", self._review_daemon)
        app.router.add_get("/healthz", self._healthy)
        app.router.add_get("/ready", self._healthy)
        self._runner = web.AppRunner(app, access_log=None, auto_decompress=False)
        await self._runner.setup()
        assert self._runner.server is not None
        self._server = await asyncio.get_running_loop().create_server(
            self._runner.server,
            sock=listen(self._host, self._port),
            ssl=self._context,
            ssl_handshake_timeout=self._idle,
            ssl_shutdown_timeout=self._idle,
        )
        self._tasks = [
            asyncio.create_task(self._keep_loaded(), name="webhook certificate"),
            asyncio.create_task(self._keep_limits(), name="webhook connections"),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            opened = [] if self._runner.server is None else list(self._runner.server.connections)
            transports = [each.transport for each in opened if each.transport is not None]
            await self._runner.cleanup()
            for transport in transports:  # a client may take its time to answer the end of TLS
                with suppress(AttributeError):  # of CPython before 3.11.4, where it is closed already
                    transport.abort()
            await asyncio.sleep(0)  # the loop closes the sockets

    # --- its certificate ----------------------------------------------------------------------------------

    def _load(self) -> None:
        """Load the certificate and key if they changed. Raises OSError, ssl.SSLError."""
        pair = self._folder / "tls.crt", self._folder / "tls.key"
        seen = pair[0].stat().st_mtime, pair[1].stat().st_mtime
        if seen != self._loaded:
            self._context.load_cert_chain(*pair)  # for new connections
            self._loaded = seen

    async def _keep_loaded(self) -> None:
        while True:
            await asyncio.sleep(self._look)
            try:
                self._load()
            except (OSError, ssl.SSLError) as error:
                _log.warning(
                    "the webhook's certificate cannot be reloaded; the old one stays in use: %s", error
                )

    async def _keep_limits(self) -> None:
        while self._runner is not None and self._runner.server is not None:
            await asyncio.sleep(self._idle / 4)
            self._limits.sweep(self._runner.server.connections)

    # --- answering ----------------------------------------------------------------------------------------

    async def _healthy(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _review_training_pod(self, request: web.Request) -> web.Response:
        return await self._review(request, self._admit_training_pod)

    async def _review_daemon(self, request: web.Request) -> web.Response:
        return await self._review(request, self._admit_daemon)

    async def _review(
        self, request: web.Request, judge: Callable[[str, dict[str, Any]], Awaitable[Admitted]]
    ) -> web.Response:
        with metrics.admission_seconds.time():
            body = await request.read()  # ConnectionLimits ends it if the body does not arrive
            with self._limits.answering(request):
                uid, asked = await asyncio.to_thread(_request_of, body)
                admitted = await self._judge(uid, asked, judge)
        answer: dict[str, Any] = {"uid": uid, "allowed": True}
        if admitted.operations:
            patch = json.dumps(admitted.operations).encode()
            answer |= {"patchType": "JSONPatch", "patch": base64.b64encode(patch).decode()}
        if admitted.warnings:
            answer["warnings"] = [each[:250] for each in admitted.warnings[:5]]
        return web.json_response(
            {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}
        )

    async def _judge(
        self, uid: str, asked: dict[str, Any], judge: Callable[[str, dict[str, Any]], Awaitable[Admitted]]
    ) -> Admitted:
        try:
            admitted = await judge(uid, asked)
        except InvalidPodError as error:
            metrics.admissions.labels("odd").inc()
            return Admitted((), (f"shardmesh: the pod is left unchanged: {error}",))
        except Exception as error:  # no failure may keep a pod from running
            _log.warning("a pod is left unchanged: %r", error, exc_info=True)
            metrics.admissions.labels("failed").inc()
            return Admitted(
                (), ("shardmesh: the pod is left unchanged, because the API cannot be asked about it now",)
            )
        metrics.admissions.labels("patched" if admitted.operations else "same").inc()
        return admitted

    async def _admit_training_pod(self, uid: str, asked: dict[str, Any]) -> Admitted:
        pod, namespace = checked_pod(asked.get("object")), str(asked.get("namespace"))
        names = requested_datasets(pod)
        async with asyncio.timeout(_PATIENCE):
            found = await self._catalogue.readable_datasets(namespace, names) if names else {}
        token = hashlib.sha256(uid.encode()).hexdigest()[:12]
        return await asyncio.to_thread(admit, pod, {name: each.known for name, each in found.items()}, token)

    async def _admit_daemon(self, _: str, asked: dict[str, Any]) -> Admitted:
        pod = checked_pod(asked.get("object"))
        async with asyncio.timeout(_PATIENCE):
            machine = await self._machines.machine_of(pod, str(asked.get("namespace")))
        return Admitted(machine_patch(pod, machine) if machine else ())


def _request_of(body: bytes) -> tuple[str, dict[str, Any]]:
    """Return the uid and the request of an AdmissionReview. Raises HTTPBadRequest."""
    try:
        asked = json.loads(body)["request"]
        uid = asked["uid"]
        if isinstance(asked, dict) and isinstance(uid, str) and uid.isprintable() and len(uid) <= _UID:
            return uid, asked
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise web.HTTPBadRequest(text="expected an AdmissionReview\n")
