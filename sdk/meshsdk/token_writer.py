"""Writes a dataset of tokens to token files: Megatron's `NAME.bin` and `NAME.idx`, and a manifest.

Law: the files are a function of the plan, the batch and the size of a file. A run that is started again
continues after the last finished file.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from meshsdk.client.settings import checked_seconds
from meshsdk.errors import ConfigurationError, NotFoundError
from meshsdk.loader.loader import Loader
from meshwire.dataset.fields import parse_source
from meshwire.formats.token_index import (
    INDEX_SUFFIX,
    TOKENS_SUFFIX,
    TokenIndexError,
    encode_token_index,
    stored_dtype,
)
from meshwire.formats.token_manifest import MANIFEST, TokenManifest, TokenShard, parse_token_manifest
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.batch import Batch
    from meshsdk.datasets.dataset import Dataset
    from meshwire.dataset.fields import Source

SHARD_TOKENS: Final = 1 << 26
"""Tokens after which a file ends."""
_BATCH: Final = 64
_MASKED: Final = 2


@dataclass(slots=True)
class _OpenShard:
    """The file that is being filled."""

    pieces: list[npt.NDArray[Any]] = field(default_factory=list)
    lengths: list[npt.NDArray[np.int64]] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    bad: int = 0

    def add(self, batch: Batch, name: str) -> None:
        ragged = batch[name]
        kept = batch.status != _MASKED
        lengths = np.diff(ragged.offsets)
        data = np.array(ragged.data)  # a copy: the arena's slot is free for the next batch
        self.pieces.append(data if kept.all() else data[np.repeat(kept, lengths)])
        self.lengths.append(lengths[kept])
        self.steps += 1
        self.tokens += int(lengths[kept].sum())
        self.bad += int((~kept).sum())


def write_tokens(
    dataset: Dataset,
    destination: str,
    *,
    shard_tokens: int = SHARD_TOKENS,
    skip_bad: bool = False,
    deadline: float = 600.0,
    on_batch: Callable[[int, int], None] | None = None,
) -> TokenManifest:
    """Write the tokens of a dataset to token files under a URL, and return their manifest.

    The nodes tokenise, this process only collects. If the destination holds a part of the same work, it
    continues there; if it holds all of it, nothing is done. `mesh.open(destination, kind="tokens")` reads the
    files, and so does Megatron.

    Arguments:
        dataset: one field, which is a sequence of integers; see `ops.tokenize`.
        destination: a folder, such as "s3://corpus/tokens".
        shard_tokens: tokens after which a file ends, at a batch of 64 samples.
        skip_bad: leave samples out that cannot be tokenised, and count them, instead of raising.
        deadline: seconds for which an unavailable server is retried.
        on_batch: called with the samples and tokens done so far.

    Raises:
        ConfigurationError: the dataset has other fields, or the destination holds tokens of another plan.
        BadSampleError: a sample cannot be tokenised.

    Example:
        ds = mesh.open("s3://corpus/v1", {"tokens": "jsonl"}, kind="lines")
        ds = ds.map(ops.json("tokens", "text"), ops.tokenize("tokens", "s3://corpus/tokenizer.json"))
        write_tokens(ds, "s3://corpus/tokens")
    """
    checked_seconds("deadline", deadline)
    name, dtype = _token_field(dataset)
    place, client = _folder(destination), dataset.client
    on_bad: Literal["mask", "raise"] = "mask" if skip_bad else "raise"
    loader = Loader(
        dataset, _BATCH, shuffle=False, tail="ragged", on_bad=on_bad, max_bad=1.0, rank=0, world=1,
        output="numpy", deadline=deadline,
    )  # fmt: skip
    with loader:
        wanted = TokenManifest(
            loader.plan.hash, dataset.snapshot.hash, dtype, _BATCH, shard_tokens,
            about={"source": dataset.snapshot.source},
        )  # fmt: skip
        manifest = _present(client, place, wanted) or wanted
        if manifest.complete:
            return manifest
        loader.seek(0, manifest.steps)
        shard = _OpenShard()
        for batch in loader if manifest.steps < len(loader) else ():
            shard.add(batch, name)
            if on_batch is not None:
                done = min(len(dataset), (manifest.steps + shard.steps) * _BATCH)
                on_batch(done, manifest.tokens + shard.tokens)
            if shard.tokens >= shard_tokens:
                manifest = _finish(client, place, manifest, shard)
                shard = _OpenShard()
    if shard.steps:
        manifest = _finish(client, place, manifest, shard)
    manifest = replace(manifest, complete=True)
    client.put(place.bucket, place.prefix + MANIFEST, manifest.to_bytes())
    return manifest


def _token_field(dataset: Dataset) -> tuple[str, str]:
    """Return the name of the only field, and the dtype in which it is stored."""
    schema = dataset.schema()
    if len(schema) != 1:
        raise ConfigurationError(
            f"the dataset has the fields {', '.join(schema)}: select the one with the tokens"
        )
    ((name, found),) = schema.items()
    if found.shape is not None:
        raise ConfigurationError(f"the field {name!r} is {found}: leave out pad_to and pack")
    if not dataset.ops and found.dtype == "uint8":
        raise ConfigurationError(
            f"the field {name!r} has the bytes of files, not tokens: ds.map(ops.tokenize({name!r}, "
            '"s3://BUCKET/tokenizer.json")) tokenises them; mesh.open reads files that already have tokens '
            'with kind="tokens"'
        )
    try:
        return name, stored_dtype(found.dtype)
    except TokenIndexError as error:
        raise ConfigurationError(f"the field {name!r} is {found}: {error}") from error


def _folder(destination: str) -> Source:
    try:
        place = parse_source(destination, "destination")
    except PlanError as error:
        raise ConfigurationError(str(error)) from error
    return place


def _present(client: Client, place: Source, wanted: TokenManifest) -> TokenManifest | None:
    """Return the manifest under the destination. Raises ConfigurationError if it is of other work."""
    try:
        found = parse_token_manifest(client.get(place.bucket, place.prefix + MANIFEST))
    except NotFoundError:
        return None
    except PlanError as error:
        raise ConfigurationError(f"{place}: {error}") from error
    if not found.is_of(wanted):
        raise ConfigurationError(
            f"{place} holds tokens of another plan ({found.plan[:12]}, now {wanted.plan[:12]}): the source, "
            "the tokenizer or an option has changed. Choose another destination, or delete it first: "
            f"mesh rm -r {place}"
        )
    return found


def _finish(client: Client, place: Source, manifest: TokenManifest, shard: _OpenShard) -> TokenManifest:
    """Store a file, its index, and the manifest that lists it, in this order."""
    name = f"{len(manifest.shards):05}"
    lengths = np.concatenate(shard.lengths)
    data = np.concatenate([piece.astype(manifest.dtype, copy=False) for piece in shard.pieces])
    index = encode_token_index(lengths, manifest.dtype)
    client.put(place.bucket, f"{place.prefix}{name}{TOKENS_SUFFIX}", data.view(np.uint8).data)
    client.put(place.bucket, f"{place.prefix}{name}{INDEX_SUFFIX}", index)
    done = manifest.with_shard(TokenShard(name, shard.steps, lengths.size, int(lengths.sum()), shard.bad))
    client.put(place.bucket, place.prefix + MANIFEST, done.to_bytes())
    return done
