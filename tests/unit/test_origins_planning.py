"""What plans foretell: exactly the pieces that are read, in that order."""

from __future__ import annotations

import numpy as np

from meshd.service.backed.planning import pieces_read
from meshd.service.backed.shelf import CHUNK, Piece
from meshwire.fields import parse_fields, parse_source
from meshwire.snapshots import build_from_objects

FIELDS = parse_fields({"image": {"ext": ["jpg"]}, "mask": {"ext": ["png"]}})


def test_pieces_come_as_samples_are_read() -> None:
    sizes = {"a.jpg": 10, "a.png": 2 * CHUNK + 5, "b.jpg": CHUNK, "b.png": 0}
    listed = [(key, f"{number:032x}", size) for number, (key, size) in enumerate(sizes.items())]
    snapshot = build_from_objects(listed, source=parse_source("s3://photos"), fields=FIELDS).snapshot
    found = list(pieces_read(snapshot, np.array([1, 0, 1]), {"photos": "shelf"}))
    b = [Piece("shelf", "b.jpg", -1, CHUNK), Piece("shelf", "b.png", -1, 0)]
    big = [Piece("shelf", "a.png", number, CHUNK if number < 2 else 5) for number in range(3)]
    assert found == [*b, Piece("shelf", "a.jpg", -1, 10), *big, *b]
    assert list(pieces_read(snapshot, np.array([0]), {})) == []
