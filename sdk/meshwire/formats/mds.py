"""MDS, the shard format of mosaicml-streaming: `index.json`, and where the columns of each sample are.

Law: nothing in a shard is used before it is checked against the shard's own header and size. A shard
consists of the number of samples, their offsets and the end (uint32, little endian), a description, and the
samples. A sample consists of the lengths (uint32) of its variable-length columns, then the columns.
https://docs.mosaicml.com/projects/streaming (dataset format)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshwire.formats.record_index import RecordIndex
from meshwire.strict_json import PlanError, checked_integer, checked_text, join_path, read_json, shown_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from meshwire.frame.columns import Integers

MDS_INDEX: Final = "index.json"
MAX_INDEX: Final = 64 << 20
"""Maximum bytes of an index."""
MAX_COLUMNS: Final = 1000
UNSAFE_ENCODING: Final = "pkl"
_MAX_BYTES = (1 << 32) - 1
_MAX_CELLS = 1 << 26  # samples times columns
_BLOCK_CELLS = 1 << 20  # processed at a time
_EXAMPLES = 5


class MdsError(ValueError):
    """A shard does not match its index."""


@dataclass(frozen=True, slots=True)
class MdsShard:
    """A shard as its index describes it. `basename`: its key below the index's folder; `sizes`: by column,
    0 where samples differ; `packed`: name of its compressed form, "" if there is none, and `packed_bytes`
    its size."""

    basename: str
    bytes: int
    samples: int
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int, ...]
    packed: str = ""
    packed_bytes: int = 0

    @property
    def head_bytes(self) -> int:
        """Bytes of the sample count and offsets at the start of the shard."""
        return 4 * (self.samples + 2)

    @property
    def width(self) -> int:
        """Bytes of the column lengths at the start of each sample."""
        return 4 * sum(not size for size in self.sizes)


def parse_mds(document: bytes, path: str = MDS_INDEX) -> tuple[MdsShard, ...]:
    """Parse an index into its shards, in order of their names. Raises PlanError."""
    value = read_json(document, path)
    if not isinstance(value, dict) or value.get("version") != 2 or not isinstance(value.get("shards"), list):
        raise PlanError(path, "not an index of MDS shards in version 2")
    shards = [_parse_shard(item, f"{path}.shards[{number}]") for number, item in enumerate(value["shards"])]
    names = [shard.basename for shard in shards]
    if len(set(names)) != len(names):
        raise PlanError(path, "two shards have the same name")
    return tuple(sorted(shards, key=lambda shard: shard.basename))


def _parse_shard(value: Any, path: str) -> MdsShard:
    if (
        not isinstance(value, dict)
        or value.get("format") != "mds"
        or not isinstance(value.get("raw_data"), dict)
    ):
        found = value.get("format") if isinstance(value, dict) else value
        raise PlanError(path, f"a shard of the format {shown_value(found)}; only mds is supported")
    names, encodings, sizes = (
        _list(value, f"column_{part}", path) for part in ("names", "encodings", "sizes")
    )
    if not len(names) == len(encodings) == len(sizes):
        raise PlanError(path, "the numbers of column names, encodings and sizes differ")
    where = join_path(path, "column_names")
    texts = tuple(checked_text(name, where, at_most=500) for name in names)
    if len(set(texts)) != len(texts):
        raise PlanError(where, "two columns have the same name")
    raw, packed = value["raw_data"], value.get("zip_data") or {}
    if not isinstance(packed, dict):
        raise PlanError(join_path(path, "zip_data"), f"expected an object, got {shown_value(packed)}")
    return MdsShard(
        checked_text(raw.get("basename"), join_path(path, "raw_data.basename"), at_most=1000),
        checked_integer(raw.get("bytes"), join_path(path, "raw_data.bytes"), 0, _MAX_BYTES),
        checked_integer(value.get("samples"), join_path(path, "samples"), 0, _MAX_CELLS // len(texts)),
        texts,
        tuple(checked_text(item, join_path(path, "column_encodings"), at_most=200) for item in encodings),
        tuple(
            0 if size is None else checked_integer(size, join_path(path, "column_sizes"), 0, _MAX_BYTES)
            for size in sizes
        ),
        checked_text(packed.get("basename", ""), join_path(path, "zip_data.basename"), at_most=1000),
        checked_integer(packed.get("bytes", 0), join_path(path, "zip_data.bytes"), 0, _MAX_BYTES),
    )


def _list(value: dict[str, Any], name: str, path: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_COLUMNS:
        raise PlanError(join_path(path, name), f"expected a list of 1…{MAX_COLUMNS}")
    return found


def sample_bounds(shard: MdsShard, head: bytes) -> Integers:
    """int64[samples + 1]: the start of each sample and the end of the last one, from the first `head_bytes`
    of a shard. Raises MdsError."""
    numbers = np.frombuffer(head[: len(head) // 4 * 4], "<u4").astype(np.int64)
    if numbers.size != shard.samples + 2:
        raise MdsError(f"it ends before the offsets of its {shard.samples} samples")
    if int(numbers[0]) != shard.samples:
        raise MdsError(f"its header states {int(numbers[0])} samples, but its index {shard.samples}")
    bounds = numbers[1:]
    if int(bounds[0]) < shard.head_bytes or (np.diff(bounds) < 0).any() or int(bounds[-1]) > shard.bytes:
        raise MdsError("its samples are out of order or extend beyond it")
    return bounds


def index_samples(
    shard: MdsShard, bounds: Integers, heads: npt.NDArray[np.uint8], wanted: Sequence[str]
) -> RecordIndex:
    """Locate the `wanted` columns of the samples. `heads`: uint8[samples, width], the first bytes of each
    sample; for a sample shorter than that they may be arbitrary. A sample whose length differs from the sum
    of its columns is left out."""
    told = dict(zip(shard.names, shard.encodings, strict=True))
    kinds = {name: told.get(name, "") for name in wanted}
    known = [name for name in wanted if name in told]
    places = {name: (np.empty(shard.samples, np.int64), np.empty(shard.samples, np.int64)) for name in known}
    wrong = np.empty(shard.samples, np.bool_)
    step = max(1, _BLOCK_CELLS // len(shard.names))
    for begin in range(0, shard.samples, step):
        some = slice(begin, min(begin + step, shard.samples))
        sizes, ends = _columns(shard, heads[some])
        wrong[some] = ends[:, -1] != np.diff(bounds[some.start : some.stop + 1])
        for name, (starts, lengths) in places.items():
            column = shard.names.index(name)
            starts[some] = bounds[some] + ends[:, column] - sizes[:, column]
            lengths[some] = sizes[:, column]
    refused = np.flatnonzero(wrong)
    examples = tuple(
        f"the length of sample {number} differs from the sum of its columns"
        for number in refused[:_EXAMPLES].tolist()
    )
    if not all(kinds.values()):
        return RecordIndex(np.zeros(0, np.int64), {}, kinds, shard.samples, examples, told)
    kept = np.flatnonzero(~wrong).astype(np.int64)
    found = {name: (starts[kept], lengths[kept]) for name, (starts, lengths) in places.items()}
    return RecordIndex(kept, found, kinds, len(refused), examples, told)


def _columns(shard: MdsShard, heads: npt.NDArray[np.uint8]) -> tuple[Integers, Integers]:
    """Return two int64[samples, columns]: the lengths of the columns, and their ends within the sample."""
    fixed = np.array(shard.sizes, np.int64)
    sizes = np.empty((heads.shape[0], fixed.size), np.int64)
    sizes[:] = fixed
    sizes[:, fixed == 0] = np.ascontiguousarray(heads).view("<u4").reshape(heads.shape[0], -1)
    return sizes, shard.width + np.cumsum(sizes, axis=1)
