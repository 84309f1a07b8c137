"""What tests of the native protocol do again and again."""

from __future__ import annotations

import io
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from meshd.util.clock import SystemClock
from meshwire.frame import tensor_frame
from tests.support.bounded_wait import WAIT_TIMEOUT
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from tests.support.s3_raw import Answer

_clock = SystemClock()
_PATIENCE = 3 * WAIT_TIMEOUT
SIDE = 12
CROP: list[dict[str, Any]] = [
    {"op": "decode", "field": "image", "args": {}},
    {"op": "random_resized_crop", "field": "image", "args": {"size": SIDE}},
    {"op": "hflip", "field": "image", "args": {}},
    {"op": "to_chw", "field": "image", "args": {}},
]
FIELDS = {"image": {"ext": ["png"]}, "label": {"class": "prefix"}}


class Mesh(Wire):
    """Requests of the native protocol."""

    def post(self, target: str, document: Any) -> Answer:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        return self._whole("POST", target, body)

    def _whole(self, method: str, target: str, body: bytes = b"") -> Answer:
        deadline = _clock.monotonic() + _PATIENCE
        while _goes_on(answer := self.call(method, target, body)) and _clock.monotonic() < deadline:
            pass  # each is waited for by the node, for as long as a request may
        return answer

    def snapshot(self, source: str, fields: Any = None, **more: Any) -> dict[str, Any]:
        return self.ok(self.post("/-/snapshots", {"source": source, "fields": fields or FIELDS, **more}))

    def plan(self, snapshot: str, ops: Any = CROP, batch: int | None = None, **spec: Any) -> dict[str, Any]:
        document = {"snapshot": snapshot, "spec": {"ops": ops, "seed": 7, **spec}}
        return self.ok(self.post("/-/plans", document if batch is None else {**document, "batch": batch}))

    def ok(self, answer: Answer) -> dict[str, Any]:
        assert answer.status == 200, answer.body
        document: dict[str, Any] = json.loads(answer.body)
        return document

    def frame(
        self, plan: str, epoch: int = 0, step: int = 0, **query: Any
    ) -> dict[str, np.ndarray[Any, Any]]:
        answer = self.raw(plan, epoch, step, **query)
        assert answer.status == 200, answer.body
        assert int(answer.headers["content-length"]) == len(answer.body)
        tensor_frame.verify_frame(answer.body)
        return tensor_frame.tensor_views(answer.body)

    def raw(self, plan: str, epoch: int = 0, step: int = 0, **query: Any) -> Answer:
        text = "&".join(f"{name}={value}" for name, value in query.items())
        return self._whole("GET", f"/-/plans/{plan}/{epoch}/{step}" + (f"?{text}" if text else ""))

    def metric(self, name: str, labels: str = "") -> float:
        text = self.exchange(
            f"GET /metrics HTTP/1.1\r\nHost: {self.host}\r\n\r\n".encode(), method="GET"
        ).body
        found = re.findall(
            rf"^{name}{re.escape(labels)}(?:\{{[^}}]*\}})? (\S+)$", text.decode(), re.MULTILINE
        )
        return sum(float(value) for value in found)


def _goes_on(answer: Answer) -> bool:
    """Whether what was asked for takes longer than a request may, and who asks again finds it further."""
    return answer.status == 503 and "progress" in json.loads(answer.body)["error"].get("detail", {})


def error(answer: Answer) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(answer.body)["error"]
    assert set(document) >= {"code", "message", "request_id"}
    assert "Traceback" not in answer.body.decode()
    return document


def png(sample: int) -> bytes:
    """A picture that tells which sample it is."""
    y, x = np.mgrid[0:20, 0:24]
    image = np.stack([np.full_like(x, sample % 256), x * 10, y * 12], -1).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def fill(s3: Any, bucket: str, count: int, bad: tuple[int, ...] = ()) -> None:
    for sample in range(count):
        body = png(sample)[:60] if sample in bad else png(sample)
        s3.put_object(
            Bucket=bucket, Key=f"train/{'cat' if sample % 3 else 'dog'}/{sample:04d}.png", Body=body
        )
