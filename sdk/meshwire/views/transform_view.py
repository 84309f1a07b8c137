"""Views of kind `transform`: every object passed through a chain of ops, and how keys are mapped.

Law: the canonical document states everything the results depend on besides the source. Keys are mapped by
pure functions, and a view is iterated in order of its own keys without sorting them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import re
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from meshwire.plan.plan_spec import PlanSpec, parse_spec, spec_document
from meshwire.strict_json import PlanError, canonical_json, checked_object, checked_text, required_field
from meshwire.views.view_fields import checked_ending, checked_match, checked_prefix, checked_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from meshwire.plan.plan_spec import OpSpec

T = TypeVar("T")
OBJECT_FIELD = "object"
"""The only field of a transform view's ops: the source object's bytes."""
_TYPE = re.compile(r"[a-z0-9.+-]{1,64}/[a-z0-9.+-]{1,64}")


@dataclass(frozen=True)
class TransformView:
    """Every object under `prefix` whose key ends in one of `match` (empty: every object), passed through
    `ops`.

    `suffix` replaces the matched ending (empty: the key stays); `content_type` is that of the results.
    """

    source: str
    ops: tuple[OpSpec, ...]
    prefix: str = ""
    match: tuple[str, ...] = ()
    suffix: str = ""
    content_type: str = "application/octet-stream"
    kind: Literal["transform"] = "transform"

    def to_json(self) -> bytes:
        """Encode the canonical document."""
        document = dataclasses.asdict(self) | {"ops": _ops_document(self.ops)}
        return canonical_json({name: list(v) if isinstance(v, tuple) else v for name, v in document.items()})

    @property
    def digest(self) -> str:
        """A digest of the view's transform of source bytes, independent of keys: 32 hexadecimal digits."""
        return hashlib.sha256(canonical_json(_ops_document(self.ops))).hexdigest()[:32]

    @property
    def plan(self) -> PlanSpec:
        """The ops as a plan over the field `object`."""
        return PlanSpec(ops=self.ops)

    def view_key(self, key: str) -> str | None:
        """Return the view's key for a source key, or None if the view excludes the object."""
        if not key.startswith(self.prefix):
            return None
        if not self.match:
            return key
        ending = max((end for end in self.match if key.endswith(end)), key=len, default=None)
        if ending is None or len(key) == len(ending):
            return None
        return key[: len(key) - len(ending)] + self.suffix if self.suffix else key

    def source_keys(self, key: str) -> Iterator[str]:
        """Yield the source keys that `key` may be computed from, the one with precedence first."""
        if not self.match or not self.suffix:
            if self.view_key(key) == key:
                yield key
            return
        if key.endswith(self.suffix):
            stem = key[: len(key) - len(self.suffix)]
            for candidate in sorted((stem + ending for ending in self.match), key=str.encode):
                if self.view_key(candidate) == key:
                    yield candidate


def parse_transform(value: Mapping[str, Any], bucket: str) -> TransformView:
    """Parse a document. Raises PlanError with the path of the bad field."""
    known = ("kind", "source", "ops", "prefix", "match", "suffix", "content_type")
    document = checked_object(dict(value), "", known)
    match = checked_match(document)
    suffix = checked_text(document.get("suffix", ""), "suffix", at_most=33)
    if suffix:
        checked_ending(suffix, "suffix")
        if not match:
            raise PlanError("suffix", "set `match` to the endings that suffix replaces")
    content_type = checked_text(
        document.get("content_type", "application/octet-stream"), "content_type", at_most=130
    )
    if _TYPE.fullmatch(content_type) is None:
        raise PlanError("content_type", f"expected a media type such as image/webp, not {content_type!r}")
    ops = _parse_ops(required_field(document, "ops", ""))
    source = checked_source(document, bucket)
    return TransformView(source, ops, checked_prefix(document), match, suffix, content_type)


def _parse_ops(value: Any) -> tuple[OpSpec, ...]:
    """Parse ops without a field, because a view has only one."""
    if not isinstance(value, list) or not value:
        raise PlanError("ops", "a transform view needs at least one op")
    for number, item in enumerate(value):
        if isinstance(item, dict) and "fields" in item:
            raise PlanError(
                f"ops[{number}].fields",
                "a view of objects has only one field; use a plan instead",
            )
        if isinstance(item, dict) and item.get("field", OBJECT_FIELD) != OBJECT_FIELD:
            raise PlanError(
                f"ops[{number}].field", "the ops of a view apply to the object; leave the field out"
            )
    filled = [{"field": OBJECT_FIELD, **item} if isinstance(item, dict) else item for item in value]
    return parse_spec({"ops": filled}).ops


def _ops_document(ops: tuple[OpSpec, ...]) -> list[Any]:
    found = spec_document(PlanSpec(ops=ops))["ops"]
    assert isinstance(found, list)
    return found


# --- iterating a view in order of its keys -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ViewEntry(Generic[T]):
    """A key of the view, its source key, and the source's value."""

    key: str
    origin: str
    value: T


def iter_view(
    view: TransformView,
    source: Iterable[tuple[str, T]],
    look: Callable[[str], T | None],
    *,
    prefix: str = "",
    after: str = "",
) -> Iterator[ViewEntry[T]]:
    """Yield the view's keys under `prefix` and above `after`, sorted by UTF-8 bytes; of several source keys
    the first counts.

    `source` yields the source's keys under `prefix` above `after` in order; `look` finds one by name.
    Replacing an ending moves a key past others only if those begin with its stem and a dot, so looking up
    the stems of a key that end before a dot finds all that are out of order. Memory: one pair per dot.
    """
    held: list[tuple[bytes, bytes, int, ViewEntry[T]]] = []
    numbers = (
        count()
    )  # tie-breaker: an object found twice may have changed in between, and pairs are not compared
    last = after.encode() if after else b""

    def hold(origin: str, value: T) -> None:
        key = view.view_key(origin)
        if key is not None and key.startswith(prefix) and (raw := key.encode()) > last:
            heapq.heappush(held, (raw, origin.encode(), next(numbers), ViewEntry(key, origin, value)))

    def hold_displaced(near: str, known: str = "") -> None:
        for origin in _displaced_keys(view, near):
            value = look(origin) if origin != known else None
            if value is not None:
                hold(origin, value)

    for place in {after, prefix}:
        hold_displaced(place)
    for origin, value in source:
        hold_displaced(origin, origin)
        hold(origin, value)  # first, since of equal keys the one with the first source counts
        raw = origin.encode()
        while held and held[0][0] <= raw:
            key, *_, pair = heapq.heappop(held)
            if key > last:
                last = key
                yield pair
    while held:
        key, *_, pair = heapq.heappop(held)
        if key > last:
            last = key
            yield pair


def _displaced_keys(view: TransformView, near: str) -> Iterator[str]:
    """Yield source keys that are on the other side of `near` than the keys they map to."""
    if not view.suffix:
        return
    dot = near.find(".")
    while dot >= 0:
        stem, rest = near[:dot], near[dot:]
        for ending in view.match:
            low, high = sorted((ending, view.suffix))
            if low <= rest <= high or view.suffix.startswith(rest):
                yield stem + ending
        dot = near.find(".", dot + 1)
