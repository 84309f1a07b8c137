"""What plans foretell: exactly the pieces that are read, in that order."""

from __future__ import annotations

import numpy as np

from meshd.core.plan_record import Plan
from meshd.origins.access_hints import epoch_samples, pieces_read
from meshd.origins.cache.cache_store import CHUNK_BYTES, Piece
from meshwire.dataset.build_snapshot import build_from_objects
from meshwire.dataset.fields import parse_fields, parse_source
from meshwire.plan.plan_spec import parse_spec

FIELDS = parse_fields({"image": {"ext": ["jpg"]}, "mask": {"ext": ["png"]}})


def test_pieces_come_as_samples_are_read() -> None:
    sizes = {"a.jpg": 10, "a.png": 2 * CHUNK_BYTES + 5, "b.jpg": CHUNK_BYTES, "b.png": 0}
    listed = [(key, f"{number:032x}", size) for number, (key, size) in enumerate(sizes.items())]
    snapshot = build_from_objects(listed, source=parse_source("s3://photos"), fields=FIELDS).snapshot
    found = list(pieces_read(snapshot, np.array([1, 0, 1]), {"photos": "shelf"}))
    b = [Piece("shelf", "b.jpg", -1, CHUNK_BYTES), Piece("shelf", "b.png", -1, 0)]
    big = [Piece("shelf", "a.png", number, CHUNK_BYTES if number < 2 else 5) for number in range(3)]
    assert found == [*b, Piece("shelf", "a.jpg", -1, 10), *big, *b]
    assert list(pieces_read(snapshot, np.array([0]), {})) == []


def test_an_epoch_that_goes_round_and_round_is_foretold_for_its_first_rounds() -> None:
    listed = [(f"{number:02}.jpg", f"{number:032x}", 5) for number in range(10)]
    fields = parse_fields({"image": {"ext": ["jpg"]}})
    snapshot = build_from_objects(listed, source=parse_source("s3://photos"), fields=fields).snapshot
    for mix, positions in ((None, 10), ({"positions": 1 << 40}, 40), ({"positions": 7}, 7)):
        whole = None if mix is None else {"parts": [10], "stages": [{"weights": [1]}], **mix}
        plan = Plan("h", snapshot.hash, "photos", 10, parse_spec({"mix": whole}), {})
        samples = epoch_samples(plan, snapshot, 3)
        assert samples.size == positions
        assert np.bincount(samples, minlength=10).size == 10
        assert positions > 10 or np.unique(samples).size == positions
