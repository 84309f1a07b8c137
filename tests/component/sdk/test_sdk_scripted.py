"""A server that speaks the native protocol over a synthetic dataset, and misbehaves when told to.

Sample i of N is an image filled with i % 251 and the label i, so that every row proves which sample it is.
Requests are checked with the SigV4 code of `meshwire`. Its own test is at the end.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import AccessError
from meshwire.errors import S3Error
from meshwire.frame import tensor_frame
from meshwire.plan import plan_spec, rank_slices
from meshwire.plan.shuffle import shuffle_order
from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import read_claim, verify
from tests.support.bounded_wait import await_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SAMPLES = 103
SIDE = 8
SNAPSHOT = "5a" * 32
ORDER = {"shuffle": {"kind": "global"}, "reason": "no disks", "distance": 1, "runs": 1}


class ScriptedMesh:
    """`faults`: what befalls the next frame requests, in order: "cut", "flip", "busy", "silent", "gone",
    "bad", None (nothing). `away`: steps whose data nobody can give now. `asked`: the targets of frame
    requests, in order of arrival. `gate`: while it is closed, no frame is answered; nor anything, if it is
    `still`. `frames_left`: so many frame requests are answered before it stands still by itself. `series`: of
    so many steps a response has frames, if the client asks for them; a fault befalls the last of them."""

    def __init__(self, samples: int = SAMPLES, side: int = SIDE) -> None:
        self.samples = samples
        self.side = side
        self.faults: deque[str | None] = deque()
        self.away: range = range(0)
        self.asked: list[str] = []
        self.plans: dict[str, plan_spec.PlanSpec] = {}
        self.snapshot = SNAPSHOT
        self.down = self.still = False
        self.frames_left: int | None = None
        self.series = 1
        self.gate = threading.Event()
        self.gate.set()
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        await_end(self._thread)
        self._server.server_close()

    def client(self, **more: Any) -> mesh.Client:
        return mesh.connect(self.endpoint, access_key="user", secret_key="secret", **more)

    def dataset(self) -> mesh.Dataset:
        ds = mesh.open(
            "s3://photos/train",
            fields={"image": "jpg", "label": mesh.class_of_prefix()},
            client=self.client(),
        )
        return ds.map(ops.decode("image"), ops.to_chw("image"))

    # --- answers ------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        fields = {"image": {"kind": "bytes"}, "label": {"kind": "label", "classes": ["cat", "dog"]}}
        return {
            "snapshot": self.snapshot, "samples": self.samples, "shards": 4, "objects": self.samples,
            "bytes": 1000, "fields": fields, "skipped": 0,
        }  # fmt: skip

    def register(self, document: dict[str, Any]) -> dict[str, Any]:
        spec = plan_spec.parse_spec(document["spec"])
        versions = [{"op": op.op, "version": "1", "field": op.field, "args": op.args} for op in spec.ops]
        spec = plan_spec.parse_spec(document["spec"] | {"ops": versions})
        digest = plan_spec.plan_hash(self.snapshot, spec)
        self.plans[digest] = spec
        shape = [3, self.side, self.side]
        fields = {"image": {"dtype": "uint8", "shape": shape}, "label": {"dtype": "int64", "shape": []}}
        listed = [{"op": op.op, "version": op.version} for op in spec.ops]
        positions = {"positions": self.samples, "samples": self.samples}
        return positions | {"plan": digest, "fields": fields, "ops": listed}

    def frame(self, plan: str, epoch: int, step: int, query: dict[str, str]) -> bytes:
        spec = self.plans[plan]
        rank, world, batch, origin = (int(query[name]) for name in ("rank", "world", "batch", "origin"))
        part = rank_slices.rank_slice(self.samples, batch, origin, step, rank, world, spec.tail)
        starts = np.linspace(0, self.samples, 5, dtype=np.int64)
        samples = shuffle_order(spec.shuffle, starts, spec.seed, epoch).samples_at(part.positions)
        metadata = {"version": "1", "plan": plan, "epoch": str(epoch), "step": str(step)}
        return self.render(samples, part.positions, np.where(part.pad, 3, 0), metadata)

    def render(self, samples: Any, positions: Any, status: Any, metadata: dict[str, str]) -> bytes:
        rows = len(samples)
        made = tensor_frame.frame_layout(
            [
                ("image", "uint8", (rows, 3, self.side, self.side)),
                ("label", "int64", (rows,)),
                ("__pos", "int64", (rows,)),
                ("__status", "uint8", (rows,)),
            ],
            metadata,
        )
        body = bytearray(made.size)
        view = memoryview(body)
        made.tensors["image"].view(view)[:] = (samples % 251).astype(np.uint8)[:, None, None, None]
        made.tensors["label"].view(view)[:] = samples
        made.tensors["__pos"].view(view)[:] = positions
        made.tensors["__status"].view(view)[:] = status
        made.seal(view)
        return bytes(body)


def _handler(server: ScriptedMesh) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 10
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            """Quiet."""

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            path, query = self._opened()
            if not path:
                return
            if path == "/-/snapshots":
                self._json(200, server.summary())
            elif path.endswith("/order"):
                self._json(200, ORDER)
            elif path == "/-/plans":
                self._json(200, server.register(body))
            else:
                samples = np.array(body["samples"], np.int64)
                metadata = {"version": "1", "plan": path.split("/")[3], "epoch": query["epoch"], "step": "0"}
                self._send(200, server.render(samples, samples, np.zeros(len(samples)), metadata))

        def do_GET(self) -> None:
            path, query = self._opened()
            if path.endswith("/bad"):
                entry = {"key": "a", "op": "decode", "error": "torn", "position": 3, "epoch": 0, "times": 2}
                self._json(200, [entry])
                return
            if path == "/-/map":
                if server.still:
                    server.gate.wait(60)
                self._json(404, _error("NotFound", "a node of its own"))
                return
            with server.lock:
                server.asked.append(self.path)
                fault = server.faults.popleft() if server.faults else None
                if server.frames_left is not None and len(server.asked) > server.frames_left:
                    server.still = True
                    server.gate.clear()
            if server.down:
                fault = "busy"
            server.gate.wait(60)
            if path.count("/") == 3:
                self._json(200, {"spec": plan_spec.spec_document(server.plans[path.split("/")[3]])})
                return
            _, _, _, plan, epoch, step = path.split("/")
            if int(step) in server.away:
                fault = "busy"
            more = min(int(self.headers.get("x-mesh-steps", "1")), server.series) - 1
            later = range(int(step) + 1, int(step) + 1 + more)
            steps = [int(step), *itertools.takewhile(lambda each: each not in server.away, later)]
            bodies = [server.frame(plan, int(epoch), each, query) for each in steps]
            sizes = {"x-mesh-frames": ",".join(str(len(body)) for body in bodies)} if bodies[1:] else {}
            self._answer(fault, b"".join(bodies), sizes)

        def _answer(self, fault: str | None, body: bytes, headers: dict[str, str]) -> None:
            if fault == "busy":
                self._json(503, _error("Busy", "the node prepares too much already"), {"retry-after": "0.05"})
            elif fault == "gone":
                self._json(409, _error("SnapshotChanged", "train/cat/1.jpg was replaced"))
            elif fault == "bad":
                self._json(
                    422, _error("BadSample", "train/cat/1.jpg: decode failed", {"key": "train/cat/1.jpg"})
                )
            elif fault == "silent":
                self.close_connection = True
            elif fault == "flip":
                torn = bytearray(body)
                torn[5000 - len(body)] ^= 1
                self._send(200, bytes(torn), headers=headers)
            elif fault == "cut":
                self._send(200, body, len(body) // 2, headers=headers)
                self.close_connection = True
            else:
                self._send(200, body, headers=headers)

        def _opened(self) -> tuple[str, dict[str, str]]:
            url = urlsplit(self.path)
            head = RequestHead(
                self.command,
                url.path,
                url.query,
                {name.lower(): value for name, value in self.headers.items()},
            )
            claim = read_claim(head)
            assert claim is not None
            try:
                verify(claim, head, "secret", int(time.time()))
            except S3Error as error:
                self._json(error.status, _error(error.code, error.message))
                return "", {}
            return url.path, {name: values[0] for name, values in parse_qs(url.query).items()}

        def _json(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
            self._send(status, json.dumps(document).encode(), headers=headers)

        def _send(
            self, status: int, body: bytes, sent: int | None = None, headers: dict[str, str] | None = None
        ) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.send_header("x-mesh-frame", "miss")
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body if sent is None else body[:sent])

        def handle(self) -> None:
            try:
                super().handle()
            except (ConnectionError, TimeoutError):
                """The client hung up, as some tests make it."""

    return Handler


def _error(code: str, message: str, detail: dict[str, Any] | None = None) -> dict[str, Any]:
    error = {"code": code, "message": message, "request_id": "r1", "detail": detail or {}, "help": "Do this."}
    return {"error": error}


# --- for the tests of other modules ------------------------------------------------------------


@pytest.fixture(scope="module", name="server")
def scripted_server() -> Iterator[ScriptedMesh]:
    server = ScriptedMesh()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def undisturbed(server: ScriptedMesh) -> Iterator[None]:
    server.faults.clear()
    server.asked.clear()
    server.down = server.still = False
    server.frames_left = None
    server.away = range(0)
    server.gate.set()
    yield
    assert threads() == []
    if sockets(server):
        gc.collect()  # what `pytest.raises` caught refers to the frame that refers to it, and to the client
    assert sockets(server) == 0
    # Requests of an ended pass that are still being answered must not meet the next test's faults.
    wait_for(lambda: not any("process_request" in thread.name for thread in threading.enumerate()))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mesh")]


def sockets(server: ScriptedMesh) -> int:
    """Sockets of this process that are connected to the server (its own ends have another remote port)."""
    with open("/proc/self/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    theirs = {row[9] for row in rows if int(row[2].partition(":")[2], 16) == server.port}
    links = (os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    return sum(link.rpartition("socket:[")[2].rstrip("]") in theirs for link in links)


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Until it holds, at most that long."""
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        threading.Event().wait(0.005)


def loader(server: ScriptedMesh, batch: int = 16, **more: Any) -> mesh.Loader:
    usual: dict[str, Any] = {"seed": 7, "output": "numpy", "rank": 0, "world": 1}
    return mesh.Loader(server.dataset(), batch, **usual | more)


def labels(batches: Iterable[mesh.Batch]) -> list[int]:
    """Samples in order, pads left out, each proven by its pixels."""
    found = []
    for batch in batches:
        assert (np.asarray(batch["image"])[:, 0, 0, 0] == np.asarray(batch["label"]) % 251).all()
        found += np.asarray(batch["label"])[np.asarray(batch.status) == 0].tolist()
    return found


def test_the_scripted_server_refuses_a_wrong_signature(server: ScriptedMesh) -> None:
    with (
        mesh.connect(server.endpoint, access_key="user", secret_key="other") as wrong,
        pytest.raises(AccessError, match=r"signature .*Do this") as raised,
    ):
        mesh.open("s3://photos/train", fields={"image": "jpg"}, client=wrong)
    assert raised.value.code == "SignatureDoesNotMatch"
    assert "other" not in str(raised.value)
