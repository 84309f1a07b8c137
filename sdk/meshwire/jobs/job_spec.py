"""Job documents: the kind of a job, its source and target, and its options.

Law: a job's canonical document states everything its output depends on besides the source; the same
document of the same user is the same job. Every fault raises PlanError with the path of the field.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from meshwire import names
from meshwire.dataset.archive_paths import archive_kind
from meshwire.strict_json import (
    PlanError,
    canonical_json,
    checked_choice,
    checked_hash,
    checked_integer,
    checked_object,
    checked_text,
    read_json,
    required_field,
    shown_value,
)
from meshwire.views.shard_view import ShardsView, parse_shards

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.dataset.archive_paths import ArchiveKind

Kind = Literal["shard", "reshard", "extract", "materialize", "prefetch", "warm", "relayout"]
Names = Literal["keep", "archive"]
OnBad = Literal["fail", "skip"]
KINDS: Final = ("shard", "reshard", "extract", "materialize", "prefetch", "warm", "relayout")
FORMATS: Final[Mapping[ArchiveKind, str]] = {
    "tar": "application/x-tar",
    "tgz": "application/gzip",
    "tar.zst": "application/zstd",
    "zip": "application/zip",
}
"""The formats of shards, with the content type of each."""
_COMMON = ("kind", "source", "target")
_ARCHIVED = ("names", "on_bad")
_LAYOUT = (
    *("match", "count", "size", "shuffle", "split", "name"),
    *("where", "group", "sort", "split_by"),
)
_KNOWN: Final[Mapping[Kind, tuple[str, ...]]] = {
    "shard": (*_COMMON, *_LAYOUT, "format"),
    "reshard": (*_COMMON, *_LAYOUT, "format", *_ARCHIVED),
    "extract": (*_COMMON, "match", *_ARCHIVED),
    "materialize": _COMMON,
    "prefetch": ("kind", "source", "keys", "manifest", "plan", "epoch", "rate"),
    "warm": ("kind", "plan", "source", "epoch", "cache", "rate"),
    "relayout": ("kind", "source", "dry_run", "rate"),
}
_MOST_KEYS: Final = 1000


@dataclass(frozen=True, slots=True)
class Folder:
    """A bucket and a key prefix: empty, a folder ending in `/`, or (for a source) the key of one archive."""

    bucket: str
    prefix: str = ""

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


@dataclass(frozen=True)
class JobSpec:
    """A job document. `shard`: packs objects of the source into archives; `reshard`: repacks the members of
    archives; `extract`: writes members of archives as objects; `materialize`: writes the objects of a view
    (the source's bucket) as ordinary objects.

    `layout` selects and orders the files and sets the size of a shard, as in a view of kind `shards`.
    `names`: `keep` keeps the names of archive members (samples with the same name in several archives go
    into folders named after these), `archive` puts all into such folders. `on_bad`: an unreadable archive
    fails the job, or is skipped and reported.

    `prefetch`: loads objects of a bucket with an origin into its cache: those under the source, or these
    `keys`, or those listed in the object `manifest` (`s3://BUCKET/KEY`), one per line, or those under the
    source that `plan` (its hash) reads, in the order of `epoch`. `rate`: maximum bytes per second over all
    nodes, 0 for no limit; the rate is not part of the job's identity.

    `warm`: fills the decoded caches of the nodes with what comes before the first random op of `plan`, for
    the samples that it reads in `epoch`; with a `source`, only for those in its objects. `cache`: bytes that
    each node may keep of the plan, None if it decides. `rate`: as above, of the samples' source bytes.

    `relayout`: puts the objects under the source next to each other on rotational disks, in order of key;
    `dry_run`: only measures what that would gain and cost. `rate`: as above, of the bytes written.
    """

    kind: Kind
    source: Folder
    target: Folder
    layout: ShardsView = field(default_factory=lambda: ShardsView(""))
    format: ArchiveKind = "tar"
    names: Names = "keep"
    on_bad: OnBad = "fail"
    keys: tuple[str, ...] = ()
    manifest: str = ""
    plan: str = ""
    epoch: int = 0
    rate: int = 0
    cache: int | None = None
    dry_run: bool = False

    def to_json(self) -> bytes:
        """Encode the canonical document, with only the fields of the kind."""
        document = (
            json.loads(self.layout.to_json())
            | {
                "kind": self.kind,
                "source": str(self.source),
                "target": str(self.target),
                "format": self.format,
                "names": self.names,
                "on_bad": self.on_bad,
                "keys": list(self.keys),
                "manifest": self.manifest,
                "plan": self.plan,
                "epoch": self.epoch,
            }
            | ({"rate": self.rate} if self.rate else {})
            | ({} if self.cache is None else {"cache": self.cache})
            | ({"dry_run": True} if self.dry_run else {})
        )
        if not self.source.bucket:
            del document["source"]
        return canonical_json({name: document[name] for name in _KNOWN[self.kind] if name in document})

    def job_id(self, owner: str) -> str:
        """Return the id of this job of a user: 16 hexadecimal digits."""
        document = replace(self, rate=0).to_json()
        return hashlib.sha256(owner.encode() + b"\0" + document).hexdigest()[:16]


def parse_job(source: bytes | str | Mapping[str, Any]) -> JobSpec:
    """Parse a job document. Raises PlanError with the path of the bad field."""
    value = read_json(source) if isinstance(source, (bytes, str)) else dict(source)
    if not isinstance(value, dict):
        raise PlanError("", 'expected an object such as {"kind": "shard", "source": …, "target": …}')
    kind = cast("Kind", checked_choice(required_field(value, "kind", ""), "kind", KINDS))
    document = checked_object(value, "", _KNOWN[kind])
    if kind == "prefetch":
        return _parse_prefetch(document)
    if kind == "warm":
        return _parse_warm_up(document)
    if kind == "relayout":
        return _parse_relayout(document)
    place = _parse_folder(required_field(document, "source", ""), "source", literal=kind == "materialize")
    target = _parse_folder(required_field(document, "target", ""), "target")
    if is_archive(target.prefix):
        raise PlanError("target", "expected a folder, not an archive; leave out the last part")
    if place.bucket == target.bucket and target.prefix.startswith(place.prefix):
        raise PlanError("target", f"{target} is inside the source; choose another bucket or folder")
    layout = {name: document[name] for name in _LAYOUT if name in document}
    return JobSpec(
        kind,
        place,
        target,
        parse_shards({"kind": "shards", "prefix": place.prefix, **layout}, place.bucket),
        cast("ArchiveKind", checked_choice(document.get("format", "tar"), "format", FORMATS)),
        cast("Names", checked_choice(document.get("names", "keep"), "names", ("keep", "archive"))),
        cast("OnBad", checked_choice(document.get("on_bad", "fail"), "on_bad", ("fail", "skip"))),
    )


def _parse_prefetch(document: Mapping[str, Any]) -> JobSpec:
    place = _parse_folder(required_field(document, "source", ""), "source", literal=True)
    keys, manifest = document.get("keys", []), document.get("manifest", "")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise PlanError("keys", "expected a list of keys")
    if len(keys) > _MOST_KEYS:
        raise PlanError(
            "keys", f"at most {_MOST_KEYS} keys are allowed; list more of them in an object and set manifest"
        )
    if manifest:
        checked_text(manifest, "manifest", at_most=2048)
        named = _parse_folder(manifest, "manifest", literal=True)
        if not named.prefix or keys:
            raise PlanError("manifest", "expected one object, s3://BUCKET/KEY, and no keys")
    plan = document.get("plan", "")
    if plan:
        checked_hash(plan, "plan")
    if plan and (keys or manifest):
        raise PlanError("plan", "give either a plan, or keys or a manifest")
    epoch = checked_integer(document.get("epoch", 0), "epoch", 0, 1 << 40)
    if epoch and not plan:
        raise PlanError("epoch", "an epoch needs a plan; set plan as well")
    rate = checked_integer(document.get("rate", 0), "rate", 0, 1 << 50)
    return JobSpec(
        "prefetch", place, place, keys=tuple(keys), manifest=manifest, plan=plan, epoch=epoch, rate=rate
    )


def _parse_warm_up(document: Mapping[str, Any]) -> JobSpec:
    place = Folder("")
    if document.get("source"):
        place = _parse_folder(document["source"], "source", literal=True)
    plan = checked_hash(required_field(document, "plan", ""), "plan")
    epoch = checked_integer(document.get("epoch", 0), "epoch", 0, 1 << 40)
    rate = checked_integer(document.get("rate", 0), "rate", 0, 1 << 50)
    cache = document.get("cache")
    if cache is not None:
        cache = checked_integer(cache, "cache", 0, 1 << 60)
    return JobSpec("warm", place, place, plan=plan, epoch=epoch, rate=rate, cache=cache)


def _parse_relayout(document: Mapping[str, Any]) -> JobSpec:
    place = _parse_folder(required_field(document, "source", ""), "source", literal=True)
    dry_run = document.get("dry_run", False)
    if not isinstance(dry_run, bool):
        raise PlanError("dry_run", f"expected true or false, got {shown_value(dry_run)}")
    rate = checked_integer(document.get("rate", 0), "rate", 0, 1 << 50)
    return JobSpec("relayout", place, place, rate=rate, dry_run=dry_run)


def is_archive(key: str) -> bool:
    """Whether a key has the ending of an archive."""
    return archive_kind(key) is not None


def _parse_folder(value: Any, path: str, *, literal: bool = False) -> Folder:
    """Parse `s3://BUCKET/PREFIX`; a prefix is a folder, with or without its final `/`, or one archive; a
    `literal` one is any key prefix."""
    address = checked_text(value, path, at_most=2048)
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    if not address.startswith("s3://") or not bucket:
        raise PlanError(path, f"expected s3://BUCKET/PREFIX, got {shown_value(address)}")
    try:
        names.check_bucket_name(bucket)
        if prefix:
            names.check_key(prefix)
    except names.NameProblemError as error:
        raise PlanError(path, str(error)) from None
    if prefix and not literal and not prefix.endswith("/") and not is_archive(prefix):
        prefix += "/"
    return Folder(bucket, prefix)
