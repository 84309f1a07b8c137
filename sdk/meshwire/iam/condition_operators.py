"""Condition operators of policies: how a value of the request is compared with an operand.

Law: operands are parsed with the policy, so a comparison never fails; a value that is not of the operator's
type (a word compared as a number) does not match.
Invariant: None means that a policy variable in the operand has no value.
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements_condition_operators.html
"""

from __future__ import annotations

import ipaddress
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from meshwire.errors import PolicyError
from meshwire.iam.wildcards import Glob

if TYPE_CHECKING:
    from meshwire.iam.wildcards import Resolve

Match = Callable[[str, "Resolve"], "bool | None"]
Compile = Callable[[str, str, bool], Match]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Order = Callable[[float, float], bool]
_FIRST_SECOND = 100_000_000  # in 1973; a smaller number such as 20261231 is a date without hyphens
_NUMBER = re.compile(r"[+-]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})([eE][+-]?\d{1,3})?\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Operator:
    """A condition operator. `negated`: holds if no operand matches, and if the request lacks the key.
    `compile` parses an operand: (text, its path, whether variables apply)."""

    name: str
    compile: Compile
    negated: bool = False


def _text(*, wild: bool = False, fold: bool = False) -> Compile:
    def read(text: str, path: str, variables: bool) -> Match:
        return Glob(text, path, wild=wild, variables=variables, fold=fold).matches

    return read


def _arn(text: str, path: str, variables: bool) -> Match:
    """Compare part by part: a `*` does not match across a colon, except in the last part."""
    parts = [Glob(part, path, variables=variables) for part in text.split(":", 5)]
    if len(parts) != 6:
        raise PolicyError(path, "an ARN has six parts, for example arn:aws:iam:::user/ann")

    def match(value: str, resolve: Resolve) -> bool | None:
        given = value.split(":", 5)
        if len(given) != 6:
            return False
        verdicts = [part.matches(text, resolve) for part, text in zip(parts, given, strict=True)]
        return None if None in verdicts else all(verdicts)

    return match


def _bool(text: str, path: str, variables: bool) -> Match:
    wanted = text.lower()
    if wanted not in {"true", "false"}:
        raise PolicyError(path, "expected true or false")
    return lambda value, _: value.lower() == wanted


def parse_number(text: str) -> float | None:
    """Parse a decimal number, or return None."""
    value = float(text) if _NUMBER.match(text) else math.inf
    return value if math.isfinite(value) else None


def parse_date(text: str) -> float | None:
    """Parse an ISO 8601 date or time (UTC unless stated otherwise), or a number of seconds, into seconds
    since 1970; None if it is invalid or a number that looks like a year or a date."""
    seconds = parse_number(text)
    if seconds is not None:
        return seconds if seconds >= _FIRST_SECOND else None
    try:
        parsed = datetime.fromisoformat(text)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _compare_with(read: Callable[[str], float | None], order: _Order, expected: str) -> Compile:
    def compile_operand(text: str, path: str, variables: bool) -> Match:
        bound = read(text)
        if bound is None:
            raise PolicyError(path, f"expected {expected}")

        def match(value: str, _: Resolve) -> bool:
            given = read(value)
            return given is not None and order(given, bound)

        return match

    return compile_operand


def parse_network(text: str) -> Network | None:
    """Parse `10.1.0.0/16`, `10.1.2.3` or `2001:db8::/32` into a network; None if it is not an address."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _address(text: str, path: str, variables: bool) -> Match:
    within = parse_network(text)
    if within is None:
        raise PolicyError(path, "expected an IP address or range, such as 10.0.0.0/8 or 2001:db8::/32")

    def match(value: str, _: Resolve) -> bool:
        try:
            given = ipaddress.ip_address(value)
        except ValueError:
            return False
        mapped = given.ipv4_mapped if isinstance(given, ipaddress.IPv6Address) else None
        return (mapped or given) in within

    return match


def _family(name: str, read: Callable[[str], float | None], expected: str) -> tuple[Operator, ...]:
    return (
        Operator(f"{name}Equals", _compare_with(read, operator.eq, expected)),
        Operator(f"{name}NotEquals", _compare_with(read, operator.eq, expected), negated=True),
        Operator(f"{name}LessThan", _compare_with(read, operator.lt, expected)),
        Operator(f"{name}LessThanEquals", _compare_with(read, operator.le, expected)),
        Operator(f"{name}GreaterThan", _compare_with(read, operator.gt, expected)),
        Operator(f"{name}GreaterThanEquals", _compare_with(read, operator.ge, expected)),
    )


NULL = Operator("Null", _bool)
OPERATORS = {
    found.name: found
    for found in (
        Operator("StringEquals", _text()),
        Operator("StringNotEquals", _text(), negated=True),
        Operator("StringEqualsIgnoreCase", _text(fold=True)),
        Operator("StringNotEqualsIgnoreCase", _text(fold=True), negated=True),
        Operator("StringLike", _text(wild=True)),
        Operator("StringNotLike", _text(wild=True), negated=True),
        *_family("Numeric", parse_number, "a number"),
        *_family("Date", parse_date, "a date, such as 2026-12-31T00:00:00Z"),
        Operator("Bool", _bool),
        Operator("IpAddress", _address),
        Operator("NotIpAddress", _address, negated=True),
        # ArnEquals and ArnLike are identical.
        Operator("ArnEquals", _arn),
        Operator("ArnLike", _arn),
        Operator("ArnNotEquals", _arn, negated=True),
        Operator("ArnNotLike", _arn, negated=True),
        NULL,
    )
}
