"""How an upload is cut into parts: at most 10,000, whatever its length."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, cast

import pytest

from meshsdk import transfers
from meshsdk.transfers import MAX_PARTS, Tuning, upload

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from meshsdk.client.s3_client import Client

CLIENT = cast("Client", None)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The parts of the upload that a test does."""
    found: list[bytes] = []

    def note(client: object, parts: Iterable[bytes], *more: object) -> str:
        found.extend(parts)
        return "etag"

    monkeypatch.setattr(transfers, "_upload_parts", note)
    return found


class Pieces(io.BytesIO):
    """A source whose reads return pieces of its own size, as that of a checkpoint."""

    def read(self, _: int | None = -1, /) -> bytes:
        return super().read(3)


@pytest.mark.parametrize("source", [io.BytesIO, Pieces])
def test_a_long_stream_has_larger_parts(parts: list[bytes], source: Any) -> None:
    data = bytes(number % 251 for number in range(500_000))
    upload(CLIENT, source(data), "b", "k", tuning=Tuning(part=3))
    assert b"".join(parts) == data
    assert 5_000 < len(parts) <= MAX_PARTS
    assert {len(part) for part in parts[:1000]} == {3}, "a short one has no large parts"
    assert max(map(len, parts)) < 4 * len(data) / 1000


def test_a_file_has_equal_parts(parts: list[bytes], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(35_000))
    upload(CLIENT, file, "b", "k", tuning=Tuning(part=3))
    assert {len(part) for part in parts} == {4}
    assert len(parts) <= MAX_PARTS
