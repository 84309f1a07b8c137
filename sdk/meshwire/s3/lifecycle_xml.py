"""Lifecycle configurations as XML, both ways, with S3's validation.

Law: a rule that asks for an unsupported action (storage classes) is rejected, never stored.
Invariant: any bytes give rules or an S3Error, and written rules parse back to the same rules.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/intro-lifecycle-rules.html
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwire.errors import S3Error
from meshwire.http_values import dates
from meshwire.s3 import listings, settings_xml
from meshwire.s3.bucket_settings import LifecycleRule
from meshwire.s3.settings_xml import parse_setting
from meshwire.s3.xml_io import xml_element

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshwire.s3.xml_io import Element

MAX_RULES = 1000
MAX_ID = 255
MAX_NONCURRENT_VERSIONS = 100
DAY = 86_400

# Unknown elements are rejected: ignoring a condition would expire objects that it is meant to keep.
_RULE = frozenset(
    {
        "ID",
        "Status",
        "Prefix",
        "Filter",
        "Expiration",
        "NoncurrentVersionExpiration",
        "AbortIncompleteMultipartUpload",
    }
)
_CONDITIONS = frozenset({"Prefix", "ObjectSizeGreaterThan", "ObjectSizeLessThan"})
_UNBUILT = ("Transition", "NoncurrentVersionTransition")
_MAX_DAYS = 2_147_483_647


def parse_lifecycle(body: bytes) -> tuple[LifecycleRule, ...]:
    """Parse 1 to 1,000 rules; a rule without an id gets a generated one.

    Raises S3Error: MalformedXML, InvalidArgument, InvalidRequest, NotImplemented.
    """
    root = parse_setting(body, "LifecycleConfiguration")
    root.require_known((), several=("Rule",))
    elements = root.find_all("Rule")
    if not 1 <= len(elements) <= MAX_RULES:
        raise S3Error("MalformedXML", f"A LifecycleConfiguration must have 1 to {MAX_RULES} rules.")
    rules = tuple(map(_rule, elements))
    named = [rule.id for rule in rules if rule.id]
    if len(set(named)) < len(named):
        raise S3Error("InvalidArgument", "Rule ID must be unique. Found same ID for more than one rule")
    return tuple(_with_rule_id(rule, number) for number, rule in enumerate(rules))


def _with_rule_id(rule: LifecycleRule, number: int) -> LifecycleRule:
    """Generate a missing id from the rule, so that the same document always gives the same ids."""
    made_up = hashlib.sha256(f"{number} {rule!r}".encode()).hexdigest()[:48]
    return rule if rule.id else replace(rule, id=made_up)


def _rule(element: Element) -> LifecycleRule:
    for name in _UNBUILT:
        if element.find_first(name) is not None:
            raise S3Error("NotImplemented", f"Storage classes are not supported: {name} is not implemented.")
    element.require_known(_RULE)
    status, name = element.child_text("Status").strip(), element.child_text("ID")
    if status not in {"Enabled", "Disabled"}:
        raise S3Error("MalformedXML", "The Status of a Rule must be Enabled or Disabled.")
    if len(name) > MAX_ID:
        raise S3Error("InvalidArgument", f"ID length should not exceed allowed limit of {MAX_ID}")
    rule = _actions(_parse_filter(LifecycleRule(name, status == "Enabled"), element), element)
    _check(rule)
    return rule


# --- selection of objects ---------------------------------------------------------------------------------


def _parse_filter(rule: LifecycleRule, element: Element) -> LifecycleRule:
    old, new = element.find_first("Prefix"), element.find_first("Filter")
    if (old is None) == (new is None):
        raise S3Error("MalformedXML", "A Rule needs a Filter (or, in the old form, a Prefix).")
    if old is not None:
        return replace(rule, form="prefix", prefix=_prefix(old.text))
    assert new is not None
    both = new.find_first("And")
    if both is None:
        if len(new.children) > 1:
            raise S3Error("MalformedXML", "A Filter with several conditions must have them in an And.")
        return _conditions(replace(rule, form="filter" if new.children else "empty"), new)
    if len(new.children) > 1 or len(both.children) < 2:
        raise S3Error(
            "MalformedXML", "And must hold at least two conditions and be the only child of Filter."
        )
    return _conditions(replace(rule, form="filter"), both)


def _conditions(rule: LifecycleRule, element: Element) -> LifecycleRule:
    element.require_known(_CONDITIONS, several=("Tag",))
    return replace(
        rule,
        prefix=_prefix(element.child_text("Prefix")),
        tags=_tags(element.find_all("Tag")),
        larger_than=_number(element, "ObjectSizeGreaterThan", 0),
        smaller_than=_number(element, "ObjectSizeLessThan", 1),
    )


def _prefix(text: str) -> str:
    if len(text.encode()) > 1024:
        raise S3Error("InvalidRequest", "The maximum size of a prefix is 1024.")
    return text


def _tags(elements: list[Element]) -> dict[str, str]:
    pairs = list(map(settings_xml.read_tag, elements))
    if len({key for key, _ in pairs}) < len(pairs):
        raise S3Error("InvalidRequest", "Duplicate Tag Keys are not allowed.")
    return settings_xml.checked_tags(pairs, settings_xml.OBJECT_TAGS)


def _number(element: Element, name: str, low: int, high: int = 1 << 50) -> int | None:
    child = element.find_first(name)
    if child is None:
        return None
    text = child.text.strip()
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
        raise S3Error("MalformedXML", f"{name} must be a whole number.")
    if not low <= int(text) <= high:
        raise S3Error("InvalidArgument", f"'{name}' must be between {low} and {high}")
    return int(text)


# --- actions ----------------------------------------------------------------------------------------------


def _actions(rule: LifecycleRule, element: Element) -> LifecycleRule:
    expiration, noncurrent = (
        element.find_first("Expiration"),
        element.find_first("NoncurrentVersionExpiration"),
    )
    uploads = element.find_first("AbortIncompleteMultipartUpload")
    if expiration is None and noncurrent is None and uploads is None:
        raise S3Error("InvalidRequest", "At least one action needs to be specified in a rule")
    if expiration is not None:
        rule = _expiration(rule, expiration)
    if noncurrent is not None:
        noncurrent.require_known(("NoncurrentDays", "NewerNoncurrentVersions"))
        rule = replace(
            rule,
            noncurrent_days=_days(noncurrent, "NoncurrentDays"),
            noncurrent_keep=_number(noncurrent, "NewerNoncurrentVersions", 1, MAX_NONCURRENT_VERSIONS),
        )
    if uploads is not None:
        uploads.require_known(("DaysAfterInitiation",))
        rule = replace(rule, abort_uploads_days=_days(uploads, "DaysAfterInitiation"))
    return rule


def _expiration(rule: LifecycleRule, element: Element) -> LifecycleRule:
    given = [child.name for child in element.children]
    if given == ["Days"]:
        return replace(rule, expire_days=_days(element, "Days"))
    if given == ["Date"]:
        return replace(rule, expire_date=_date(element.child_text("Date").strip()))
    marker = element.child_text("ExpiredObjectDeleteMarker").strip().lower()
    if given != ["ExpiredObjectDeleteMarker"] or marker not in {"true", "false"}:
        raise S3Error(
            "MalformedXML", "An Expiration needs exactly one of Days, Date and ExpiredObjectDeleteMarker."
        )
    return replace(rule, expire_markers=marker == "true", keep_markers=marker == "false")


def _days(element: Element, name: str) -> int:
    days = _number(element, name, 1, _MAX_DAYS)
    if days is None:
        raise S3Error("MalformedXML", f"{element.name} needs {name}.")
    return days


def _date(text: str) -> int:
    """Parse a date into seconds since the epoch; it must be midnight UTC."""
    milliseconds = dates.parse_iso(text if "T" in text else f"{text}T00:00:00Z")
    if milliseconds is None:
        raise S3Error("MalformedXML", "The Date of an Expiration must be an ISO 8601 date.")
    if milliseconds % (DAY * 1000):
        raise S3Error("InvalidArgument", "'Date' must be at midnight GMT")
    return milliseconds // 1000


def _check(rule: LifecycleRule) -> None:
    sized = rule.larger_than is not None or rule.smaller_than is not None
    for unfit, action in (
        (rule.expire_markers or rule.keep_markers, "ExpiredObjectDeleteMarker"),
        (rule.abort_uploads_days is not None, "AbortIncompleteMultipartUpload"),
    ):
        if unfit and rule.tags:
            raise S3Error("InvalidRequest", f"{action} cannot be specified with Tags.")
        if unfit and sized:
            raise S3Error("InvalidRequest", f"{action} cannot be specified with an object size.")
    low, high = rule.larger_than, rule.smaller_than
    if low is not None and high is not None and high <= low:
        message = "'ObjectSizeLessThan' has to be a value greater than 'ObjectSizeGreaterThan'."
        raise S3Error("InvalidRequest", message)


# --- writing --------------------------------------------------------------------------------------------


def lifecycle_document(rules: Iterable[LifecycleRule]) -> bytes:
    return listings.root_element("LifecycleConfiguration", *map(_rule_pieces, rules)).encode()


def _rule_pieces(rule: LifecycleRule) -> str:
    status = "Enabled" if rule.enabled else "Disabled"
    pieces = [
        xml_element("ID", rule.id),
        _filter(rule),
        xml_element("Status", status),
        _expiration_pieces(rule),
    ]
    if rule.noncurrent_days is not None:
        keep = rule.noncurrent_keep
        inside = xml_element("NoncurrentDays", str(rule.noncurrent_days))
        inside += "" if keep is None else xml_element("NewerNoncurrentVersions", str(keep))
        pieces.append(f"<NoncurrentVersionExpiration>{inside}</NoncurrentVersionExpiration>")
    if rule.abort_uploads_days is not None:
        inside = xml_element("DaysAfterInitiation", str(rule.abort_uploads_days))
        pieces.append(f"<AbortIncompleteMultipartUpload>{inside}</AbortIncompleteMultipartUpload>")
    return f"<Rule>{''.join(pieces)}</Rule>"


def _filter(rule: LifecycleRule) -> str:
    if rule.form == "prefix":
        return xml_element("Prefix", rule.prefix)
    conditions = [xml_element("Prefix", rule.prefix)] if rule.prefix else []
    conditions += [
        f"<Tag>{xml_element('Key', key)}{xml_element('Value', value)}</Tag>"
        for key, value in rule.tags.items()
    ]
    if rule.larger_than is not None:
        conditions.append(xml_element("ObjectSizeGreaterThan", str(rule.larger_than)))
    if rule.smaller_than is not None:
        conditions.append(xml_element("ObjectSizeLessThan", str(rule.smaller_than)))
    if not conditions and rule.form == "filter":
        conditions = [xml_element("Prefix", "")]
    inside = "".join(conditions)
    return f"<Filter><And>{inside}</And></Filter>" if len(conditions) > 1 else f"<Filter>{inside}</Filter>"


def _expiration_pieces(rule: LifecycleRule) -> str:
    if rule.expire_days is not None:
        inside = xml_element("Days", str(rule.expire_days))
    elif rule.expire_date is not None:
        inside = xml_element("Date", dates.format_iso(rule.expire_date * 1000))
    elif rule.expire_markers or rule.keep_markers:
        inside = xml_element("ExpiredObjectDeleteMarker", str(rule.expire_markers).lower())
    else:
        return ""
    return f"<Expiration>{inside}</Expiration>"
