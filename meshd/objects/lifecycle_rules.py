"""Lifecycle rules: which objects, versions, delete markers and uploads expire at a given time. Pure.

Nothing expires before the midnight (UTC) after its last full day. A disabled rule has no effect.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/intro-lifecycle-rules.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from meshwire.http_values import dates, percent_encoding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshwire.s3.bucket_settings import LifecycleRule

DAY_MS: Final = 86_400_000
_LAST_DATE_MS: Final = 253_402_300_799_000  # 9999-12-31T23:59:59Z: the last date that can be written

Rules = tuple["LifecycleRule", ...]
Action = Literal["expire", "noncurrent", "marker", "upload"]


class ListedVersion(msgspec.Struct, frozen=True):
    """One version as a listing returns it; the `latest` version of a key comes first. Times are in ms since
    the epoch. Stamps decrease from a key's newest version to its oldest."""

    key: str
    modified: int
    stamp: int = 0
    size: int = 0
    tags: Mapping[str, str] = msgspec.field(default_factory=dict)
    version: str = "null"
    etag: str = ""
    marker: bool = False
    latest: bool = True


class ExpiryAction(msgspec.Struct, frozen=True):
    """An action that is due: `expire` the current object, or remove a `noncurrent` version or a lone
    `marker`."""

    action: Action
    version: ListedVersion


def due_time(since: int, days: int) -> int:
    """Return when something that began at `since` is `days` old as S3 counts: at the following midnight."""
    return (since // DAY_MS + days + 1) * DAY_MS


def applies(rule: LifecycleRule, key: str, size: int, tags: Mapping[str, str]) -> bool:
    """Whether an enabled rule applies to this object."""
    return (
        rule.enabled
        and key.startswith(rule.prefix)
        and (rule.larger_than is None or size > rule.larger_than)
        and (rule.smaller_than is None or size < rule.smaller_than)
        and all(tags.get(name) == value for name, value in rule.tags.items())
    )


def applies_to_marker(rule: LifecycleRule, key: str) -> bool:
    """Whether a rule applies to a delete marker, which has neither size nor tags to filter by."""
    sized = rule.larger_than is not None or rule.smaller_than is not None
    return rule.enabled and key.startswith(rule.prefix) and not sized and not rule.tags


def expiration(
    rules: Rules, key: str, size: int, tags: Mapping[str, str], modified: int
) -> tuple[int, LifecycleRule] | None:
    """Return when a current object expires, and by which rule: the earliest one."""
    found = [
        (moment, number)
        for number, rule in enumerate(rules)
        if applies(rule, key, size, tags) and (moment := _expires(rule, modified)) is not None
    ]
    if not found:
        return None
    moment, number = min(found)
    return moment, rules[number]


def _expires(rule: LifecycleRule, modified: int) -> int | None:
    by_age = None if rule.expire_days is None else due_time(modified, rule.expire_days)
    by_date = None if rule.expire_date is None else rule.expire_date * 1000
    return min((moment for moment in (by_age, by_date) if moment is not None), default=None)


def expiration_header(rules: Rules, key: str, size: int, tags: Mapping[str, str], modified: int) -> str:
    """Return the value of x-amz-expiration; empty when the object does not expire."""
    found = expiration(rules, key, size, tags, modified)
    if found is None or found[0] > _LAST_DATE_MS:
        return ""
    moment, rule = found
    return f'expiry-date="{dates.format_http(moment // 1000)}", rule-id="{percent_encoding.encode(rule.id)}"'


def noncurrent_is_due(rules: Rules, version: ListedVersion, since: int, newer: int, now: int) -> bool:
    """Whether a version that became noncurrent at `since` expires; `newer` noncurrent ones are newer than
    it."""
    for rule in rules:
        if rule.noncurrent_days is None or newer < (rule.noncurrent_keep or 0):
            continue
        about = (
            applies_to_marker(rule, version.key)
            if version.marker
            else applies(rule, version.key, version.size, version.tags)
        )
        if about and due_time(since, rule.noncurrent_days) <= now:
            return True
    return False


def expired_marker_is_due(rules: Rules, key: str, modified: int, now: int) -> bool:
    """Whether a delete marker without versions below it expires: if a rule asks for that, or when an object
    of its age would expire."""
    for rule in rules:
        if not applies_to_marker(rule, key):
            continue
        expires = _expires(rule, modified)
        if rule.expire_markers or (expires is not None and expires <= now):
            return True
    return False


def upload_is_due(rules: Rules, key: str, initiated: int, default_days: int, now: int) -> bool:
    """Whether an upload in progress is aborted: by a rule or, where none applies, after `default_days` (0:
    never)."""
    limits = [
        rule.abort_uploads_days
        for rule in rules
        if rule.enabled and rule.abort_uploads_days is not None and key.startswith(rule.prefix)
    ]
    days = min(limits, default=default_days)
    return days > 0 and due_time(initiated, days) <= now


def prefixes(rules: Rules) -> tuple[str, ...]:
    """Return the fewest prefixes, in byte order, that cover all versions that the rules may remove; none if
    they remove no versions."""
    every = {rule.prefix for rule in rules if rule.enabled and _removes_versions(rule)}
    kept: list[str] = []
    for prefix in sorted(every, key=str.encode):
        if not kept or not prefix.startswith(kept[-1]):
            kept.append(prefix)
    return tuple(kept)


def _removes_versions(rule: LifecycleRule) -> bool:
    dated = rule.expire_days is not None or rule.expire_date is not None
    return dated or rule.expire_markers or rule.noncurrent_days is not None


class ExpiryPlanner:
    """Reads a listing of versions, in order, and yields what expires.

    It keeps the state of the current key, so that pages may end anywhere. All keys up to `behind` are done.
    """

    def __init__(self, rules: Rules, now: int) -> None:
        self._rules, self._now = rules, now
        self.behind = ""
        self._key = ""
        self._stamp = 0  # of the preceding version
        self._since = 0  # when the preceding version was created: since then this one is noncurrent
        self._noncurrent = 0
        self._marker: ListedVersion | None = None  # newest of its key; lone unless another version follows

    def __repr__(self) -> str:
        return f"<ExpiryPlanner at {self._key!r} with {len(self._rules)} rules>"

    def add_version(self, version: ListedVersion) -> Iterator[ExpiryAction]:
        """Add the next version of the listing. After a page break a key may repeat versions that were already
        added: its position is lost when a null version is removed or written again as the newest."""
        if version.key != self._key:
            yield from self.finish()
            self.behind, self._key, self._noncurrent = self._key, version.key, 0
        elif version.stamp >= self._stamp:
            return
        if version.latest:
            yield from self._newest(version)
        else:
            self._marker = None
            if noncurrent_is_due(self._rules, version, self._since, self._noncurrent, self._now):
                yield ExpiryAction("noncurrent", version)
            self._noncurrent += 1
        self._stamp, self._since = version.stamp, version.modified

    def finish(self) -> Iterator[ExpiryAction]:
        """End the listing: yield the action for a lone marker that was held back."""
        marker, self._marker = self._marker, None
        if marker is not None and expired_marker_is_due(self._rules, marker.key, marker.modified, self._now):
            yield ExpiryAction("marker", marker)

    def _newest(self, version: ListedVersion) -> Iterator[ExpiryAction]:
        if version.marker:
            self._marker = version
            return
        found = expiration(self._rules, version.key, version.size, version.tags, version.modified)
        if found is not None and found[0] <= self._now:
            yield ExpiryAction("expire", version)
