"""The policy document of an upload form: what its signer lets the form's fields and its file be.

Law: pure; the time is an argument. Every field must be covered by a condition, or the form is refused: what
the signer did not think of is not allowed.
https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-HTTPPOSTConstructPolicy.html
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from meshwire import httpdates
from meshwire.documents import PlanError, read_json
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_FILE = 5 << 30
_UNCOVERED = frozenset({"policy", "signature", "x-amz-signature", "awsaccesskeyid", "file"})
_FREE = ("x-ignore-", "x-amz-checksum-")  # a checksum allows nothing: it can only refuse
_LISTS = frozenset({"content-type"})


@dataclass(frozen=True, slots=True)
class Condition:
    """`operator` is `eq` or `starts-with`, `name` a lower-case field name."""

    operator: str
    name: str
    value: str

    def holds(self, value: str) -> bool:
        if self.operator == "eq":
            return value == self.value
        if self.name in _LISTS and "," in value:
            return all(piece.strip().startswith(self.value) for piece in value.split(","))
        return value.startswith(self.value)

    def __str__(self) -> str:
        return f'["{self.operator}", "${self.name}", "{self.value}"]'


@dataclass(frozen=True, slots=True)
class PostPolicy:
    """`expires_ms` since the epoch; the file has `least` to `most` bytes."""

    expires_ms: int
    conditions: tuple[Condition, ...]
    least: int = 0
    most: int = MAX_FILE

    def check(self, fields: Mapping[str, str], bucket: str, now_ms: int) -> None:
        """Return if a form with these fields (lower-case names) may be taken now. Raises S3Error
        AccessDenied."""
        if now_ms > self.expires_ms:
            _deny("Policy expired.")
        judged = {**fields, "bucket": bucket}
        for condition in self.conditions:
            value = judged.get(condition.name)
            if value is None or not condition.holds(value):
                _deny(f"Policy Condition failed: {condition}")
        covered = {condition.name for condition in self.conditions}
        for name in judged:
            if name not in covered and name not in _UNCOVERED and not name.startswith(_FREE):
                _deny(f"Extra input fields: {name[:64]}")


def read_policy(text: str) -> PostPolicy:
    """The policy of a form's `policy` field (base64 of JSON). Raises S3Error InvalidPolicyDocument."""
    try:
        document = read_json(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, PlanError) as error:
        raise _invalid("Invalid JSON.") from error
    if not isinstance(document, dict):
        raise _invalid("Invalid JSON.")
    expires = document.get("expiration")
    expires_ms = httpdates.parse_iso(expires) if isinstance(expires, str) else None
    if "expiration" not in document:
        raise _invalid("Policy missing expiration.")
    if expires_ms is None:
        raise _invalid(f"Invalid 'expiration' value: '{str(expires)[:64]}'")
    conditions = document.get("conditions")
    if not isinstance(conditions, list):
        raise _invalid("Policy missing conditions.")
    return _policy(expires_ms, conditions)


def _policy(expires_ms: int, conditions: list[Any]) -> PostPolicy:
    found: list[Condition] = []
    least, most = 0, MAX_FILE
    for condition in conditions:
        if isinstance(condition, dict):
            found.extend(_exact(condition))
        elif isinstance(condition, list) and condition and _lower(condition[0]) == "content-length-range":
            low, high = _range(condition)
            least, most = max(least, low), min(most, high)
        else:
            found.append(_comparison(condition))
    return PostPolicy(expires_ms, tuple(found), least, most)


def _exact(condition: dict[str, Any]) -> list[Condition]:
    if len(condition) != 1:
        raise _invalid("Invalid Simple-Condition: it must have exactly one property.")
    ((name, value),) = condition.items()
    if not isinstance(value, str):
        raise _invalid("Invalid Simple-Condition: value must be a string.")
    return [Condition("eq", name.lower(), value)]


def _comparison(condition: Any) -> Condition:
    if not isinstance(condition, list) or len(condition) != 3:
        raise _invalid("Invalid Condition: a condition has an operator, a field and a value.")
    operator, name, value = _lower(condition[0]), condition[1], condition[2]
    if operator not in {"eq", "starts-with"}:
        raise _invalid(f"Invalid Condition operator: {str(condition[0])[:64]}")
    if not isinstance(name, str) or not name.startswith("$") or not isinstance(value, str):
        raise _invalid("Invalid Condition: the field begins with $, and its value is a string.")
    return Condition(operator, name[1:].lower(), value)


def _range(condition: list[Any]) -> tuple[int, int]:
    if len(condition) != 3:
        raise _invalid("Invalid content-length-range: it has two limits.")
    low, high = (_size(limit) for limit in condition[1:])
    if low > high:
        raise _invalid("Invalid content-length-range: the first limit exceeds the second.")
    return low, high


def _size(limit: Any) -> int:
    """boto3 passes on what it is given, a number or its digits."""
    text = str(limit)
    if isinstance(limit, bool) or not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise _invalid("Invalid content-length-range: its limits are numbers of bytes.")
    return int(text)


def _lower(value: Any) -> str:
    return value.lower() if isinstance(value, str) else ""


def _invalid(message: str) -> S3Error:
    return S3Error("InvalidPolicyDocument", f"Invalid Policy: {message}")


def _deny(message: str) -> NoReturn:
    raise S3Error("AccessDenied", f"Invalid according to Policy: {message}")
