"""Verdicts, case by case. What is expected comes from AWS's description of how policies are evaluated:
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html and the pages on
condition operators, multivalued keys, policy variables and principals.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from meshwire.iam import AccessRequest, evaluate, parse_policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.iam import Decision, Policy
    from meshwire.iam.compiled_policies import Values

KEY = "arn:aws:s3:::b/k"


def policy(*statements: dict[str, Any], version: str = "2012-10-17", kind: str = "identity") -> Policy:
    text = json.dumps({"Version": version, "Statement": list(statements)})
    return parse_policy(text, kind="bucket" if kind == "bucket" else "identity", bucket="b")


def allow(**fields: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"Effect": "Allow"}
    if "NotAction" not in fields:
        defaults["Action"] = "s3:*"
    if "NotResource" not in fields:
        defaults["Resource"] = "arn:aws:s3:::*"
    return {**defaults, **fields}


def deny(**fields: Any) -> dict[str, Any]:
    return allow(**fields) | {"Effect": "Deny"}


def verdict(
    *statements: dict[str, Any],
    action: str = "s3:GetObject",
    resource: str = KEY,
    user: str = "ann",
    version: str = "2012-10-17",
    kind: str = "identity",
    facts: Mapping[str, Values] | None = None,
) -> Decision:
    question = AccessRequest(action, resource, user, facts or {})
    return evaluate([policy(*statements, version=version, kind=kind)], question)


# --- allow, deny, neither ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        ([allow()], "allow"),
        ([deny()], "deny"),
        ([allow(), deny()], "deny"),
        ([deny(), allow()], "deny"),
        ([allow(Action="s3:PutObject")], "none"),
        ([deny(Action="s3:PutObject"), allow()], "allow"),
        ([allow(Action="S3:GETOBJECT")], "allow"),
        ([allow(Action="s3:Get*")], "allow"),
        ([allow(Action="s3:Get??ject")], "allow"),
        ([allow(Action="*")], "allow"),
        ([allow(Action="ec2:*")], "none"),
        ([allow(NotAction="s3:GetObject")], "none"),
        ([allow(NotAction=["s3:Put*", "s3:Delete*"])], "allow"),
        ([deny(NotAction="s3:GetObject"), allow()], "allow"),
        ([allow(Resource="arn:aws:s3:::b/k")], "allow"),
        ([allow(Resource="arn:aws:s3:::b/K")], "none"),
        ([allow(Resource="arn:aws:s3:::b")], "none"),
        ([allow(Resource="arn:aws:s3:::b*")], "allow"),
        ([allow(Resource="arn:aws:s3:::b/?")], "allow"),
        ([allow(Resource="arn:aws:s3:::b/??")], "none"),
        ([allow(Resource=["arn:aws:s3:::x/*", "*"])], "allow"),
        ([allow(Resource="arn:*:s3:::b/k")], "allow"),
        ([allow(Resource="arn:aws-cn:s3:::b/k")], "none"),
        ([allow(NotResource="arn:aws:s3:::b/k*")], "none"),
        ([allow(NotResource="arn:aws:s3:::b/secret/*")], "allow"),
        ([deny(NotResource="arn:aws:s3:::b/public/*"), allow()], "deny"),
    ],
)
def test_effects_actions_and_resources(statements: list[dict[str, Any]], expected: str) -> None:
    assert verdict(*statements) == expected


def test_a_bucket_is_not_its_keys() -> None:
    keys = allow(Resource="arn:aws:s3:::b/*")
    assert verdict(keys, resource="arn:aws:s3:::b/k") == "allow"
    assert verdict(keys, resource="arn:aws:s3:::b") == "none"
    assert verdict(keys, resource="arn:aws:s3:::bb/k") == "none"


def test_several_policies_are_one() -> None:
    question = AccessRequest("s3:GetObject", KEY, "ann")
    yes, no, other = policy(allow()), policy(deny()), policy(allow(Action="s3:PutObject"))
    assert evaluate([], question) == "none"
    assert evaluate([other], question) == "none"
    assert evaluate([other, yes], question) == "allow"
    assert evaluate([yes, no, other], question) == "deny"


# --- principals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("principal", "ann", "nobody"),
    [
        ({"Principal": "*"}, "allow", "allow"),
        ({"Principal": {"AWS": "*"}}, "allow", "allow"),
        ({"Principal": {"AWS": "ann"}}, "allow", "none"),
        ({"Principal": {"AWS": ["bob", "arn:aws:iam:::user/ann"]}}, "allow", "none"),
        ({"Principal": {"AWS": "arn:aws:iam::123456789012:user/ann"}}, "allow", "none"),
        ({"Principal": {"AWS": "arn:aws:iam::ann:root"}}, "allow", "none"),
        ({"Principal": {"CanonicalUser": "ann"}}, "allow", "none"),
        ({"Principal": {"AWS": "bob"}}, "none", "none"),
        ({"Principal": {"AWS": "Ann"}}, "none", "none"),
        ({"Principal": {"Service": "ann"}}, "none", "none"),
        ({"Principal": {"CanonicalUser": "bob", "AWS": "*"}}, "allow", "allow"),
        ({"NotPrincipal": {"AWS": "ann"}}, "none", "deny"),
        ({"NotPrincipal": {"AWS": "bob"}}, "deny", "deny"),
        ({"NotPrincipal": "*"}, "none", "none"),
    ],
)
def test_principals(principal: dict[str, Any], ann: str, nobody: str) -> None:
    effect = "Deny" if "NotPrincipal" in principal else "Allow"
    statement = allow(Resource="arn:aws:s3:::b/*", Action="s3:GetObject") | principal | {"Effect": effect}
    assert verdict(statement, kind="bucket") == ann
    assert verdict(statement, kind="bucket", user="") == nobody


# --- conditions -------------------------------------------------------------------------------------------


def holds(operator: str, key: str, operands: Any, given: Values | None = None) -> bool:
    statement = allow(Condition={operator: {key: operands}})
    facts = {} if given is None else {key.lower(): given}
    allowed = verdict(statement, facts=facts) == "allow"
    assert (verdict(statement | {"Effect": "Deny"}, facts=facts) == "deny") is allowed
    return allowed


@pytest.mark.parametrize(
    ("operator", "operands", "given", "expected"),
    [
        ("StringEquals", "train/", "train/", True),
        ("StringEquals", "train/", "Train/", False),
        ("StringEquals", "train*", "train/", False),
        ("StringEquals", ["a", "b"], "b", True),
        ("StringNotEquals", ["a", "b"], "b", False),
        ("StringNotEquals", ["a", "b"], "c", True),
        ("StringEqualsIgnoreCase", "TRAIN/", "train/", True),
        ("StringNotEqualsIgnoreCase", "TRAIN/", "train/", False),
        ("StringLike", "train/*", "train/a/b", True),
        ("StringLike", "train/?", "train/ab", False),
        ("StringLike", "TRAIN/*", "train/a", False),
        ("StringNotLike", ["train/*", "val/*"], "val/a", False),
        ("StringNotLike", ["train/*", "val/*"], "test/a", True),
        ("NumericEquals", "10", "10.0", True),
        ("NumericEquals", 10, "10", True),
        ("NumericNotEquals", 10, "10", False),
        ("NumericLessThan", 10, "9", True),
        ("NumericLessThan", 10, "10", False),
        ("NumericLessThanEquals", 10, "10", True),
        ("NumericGreaterThan", "-1", "0", True),
        ("NumericGreaterThanEquals", 1.5, "1.4", False),
        ("NumericEquals", 10, "ten", False),
        ("NumericNotEquals", 10, "ten", True),
        ("DateLessThan", "2026-06-01T00:00:00Z", "2026-05-31T23:59:59Z", True),
        ("DateLessThan", "2026-06-01", "2026-06-01T00:00:00Z", False),
        ("DateLessThanEquals", "2026-06-01", "2026-06-01T00:00:00Z", True),
        ("DateGreaterThan", "2026-06-01T02:00:00+02:00", "2026-06-01T00:00:01Z", True),
        ("DateGreaterThanEquals", 1780272000, "2026-06-01T00:00:00Z", True),
        ("DateEquals", "2026-06-01T00:00:00Z", "1780272000", True),
        ("DateNotEquals", "2026-06-01", "1780272000", False),
        ("Bool", "true", "true", True),
        ("Bool", True, "True", True),
        ("Bool", "false", "true", False),
        ("IpAddress", "10.1.0.0/16", "10.1.255.1", True),
        ("IpAddress", "10.1.0.0/16", "10.2.0.1", False),
        ("IpAddress", ["10.1.0.0/16", "10.2.0.1"], "10.2.0.1", True),
        ("IpAddress", "10.1.0.0/16", "::ffff:10.1.2.3", True),
        ("IpAddress", "2001:db8::/32", "2001:db8::7", True),
        ("IpAddress", "2001:db8::/32", "10.1.0.1", False),
        ("IpAddress", "10.1.0.0/16", "nonsense", False),
        ("NotIpAddress", "10.1.0.0/16", "10.1.0.1", False),
        ("NotIpAddress", "10.1.0.0/16", "192.0.2.1", True),
        ("ArnEquals", "arn:aws:iam:::user/a*", "arn:aws:iam:::user/ann", True),
        ("ArnLike", "arn:*:iam:::user/ann", "arn:aws:iam:::user/ann", True),
        ("ArnLike", "arn:*:user/ann::x:y", "arn:aws:iam:::user/ann", False),
        ("ArnLike", "arn:aws:iam:::user/ann", "ann", False),
        ("ArnNotLike", "arn:aws:iam:::user/ann", "arn:aws:iam:::user/bob", True),
        ("ArnNotEquals", "arn:aws:iam:::user/*", "arn:aws:iam:::user/bob", False),
        ("Null", "true", "here", False),
        ("Null", "false", "here", True),
        ("Null", "true", "", True),
        ("Null", ["true", "false"], "here", True),
    ],
)
def test_operators(operator: str, operands: Any, given: str, expected: bool) -> None:
    key = {"A": "aws:PrincipalArn", "I": "aws:SourceIp", "D": "aws:CurrentTime"}.get(operator[0], "s3:prefix")
    assert holds(operator, key, operands, given) is expected


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("StringEquals", False),
        ("StringLike", False),
        ("StringNotEquals", True),
        ("StringNotLike", True),
        ("StringNotEqualsIgnoreCase", True),
        ("NumericLessThan", False),
        ("NumericNotEquals", True),
        ("DateGreaterThan", False),
        ("Bool", False),
        ("IpAddress", False),
        ("NotIpAddress", True),
        ("ArnLike", False),
        ("ArnNotLike", True),
        ("StringEqualsIfExists", True),
        ("StringNotEqualsIfExists", True),
        ("NumericLessThanIfExists", True),
        ("IpAddressIfExists", True),
        ("BoolIfExists", True),
        ("Null", True),
        ("ForAllValues:StringEquals", True),
        ("ForAnyValue:StringEquals", False),
        ("ForAnyValue:StringNotEquals", False),
        ("ForAnyValue:StringEqualsIfExists", True),
    ],
)
def test_an_absent_key(operator: str, expected: bool) -> None:
    kind = operator.rpartition(":")[2].removeprefix("Not")[0]
    operands = {
        "S": "x",
        "N": "true",
        "D": "2026-01-01",
        "B": "true",
        "I": "10.0.0.0/8",
        "A": "arn:a:b:c:d:e",
    }
    operand = 1 if operator.startswith("Numeric") else operands[kind]
    assert holds(operator, "s3:prefix", operand) is expected


@pytest.mark.parametrize(
    ("operator", "operands", "given", "expected"),
    [
        ("ForAllValues:StringEquals", ["a", "b"], ("a",), True),
        ("ForAllValues:StringEquals", ["a", "b"], ("a", "b"), True),
        ("ForAllValues:StringEquals", ["a", "b"], ("a", "c"), False),
        ("ForAllValues:StringLike", "a*", ("aa", "ab"), True),
        ("ForAllValues:StringNotEquals", ["a", "b"], ("c", "d"), True),
        ("ForAllValues:StringNotEquals", ["a", "b"], ("c", "a"), False),
        ("ForAnyValue:StringEquals", ["a", "b"], ("c", "a"), True),
        ("ForAnyValue:StringEquals", ["a", "b"], ("c", "d"), False),
        ("ForAnyValue:StringNotEquals", ["a", "b"], ("a", "c"), True),
        ("ForAnyValue:StringNotEquals", ["a", "b"], ("a", "b"), False),
        ("ForAnyValue:StringLike", "b*", ("a", "bb"), True),
    ],
)
def test_many_values(operator: str, operands: Any, given: tuple[str, ...], expected: bool) -> None:
    assert holds(operator, "s3:RequestObjectTagKeys", operands, given) is expected


def test_every_operator_and_every_key_must_hold() -> None:
    statement = allow(
        Condition={
            "StringEquals": {"s3:prefix": "a", "s3:delimiter": "/"},
            "IpAddress": {"AWS:SOURCEIP": "10.0.0.0/8"},
        }
    )
    facts = {"s3:prefix": "a", "s3:delimiter": "/", "aws:sourceip": "10.0.0.1"}
    assert verdict(statement, facts=facts) == "allow"
    for name in facts:
        assert verdict(statement, facts={**facts, name: "192.0.2.1"}) == "none"


# --- variables --------------------------------------------------------------------------------------------


def test_a_home_for_everyone() -> None:
    home = allow(Resource="arn:aws:s3:::b/home/${aws:username}/*")
    mine = "arn:aws:s3:::b/home/ann/x"
    assert verdict(home, resource=mine, facts={"aws:username": "ann"}) == "allow"
    assert verdict(home, resource=mine, facts={"aws:username": "bob"}) == "none"
    assert verdict(home, resource=mine, facts={"aws:username": "*"}) == "none"
    assert verdict(home, resource=mine) == "none"
    assert verdict(home, resource=mine, version="2008-10-17", facts={"aws:username": "ann"}) == "none"


def test_variables_in_conditions() -> None:
    listing = allow(Condition={"StringLike": {"s3:prefix": ["", "home/${aws:username}/*"]}})
    assert verdict(listing, facts={"s3:prefix": "home/ann/x", "aws:username": "ann"}) == "allow"
    assert verdict(listing, facts={"s3:prefix": "home/bob/x", "aws:username": "ann"}) == "none"
    assert verdict(listing, facts={"s3:prefix": ""}) == "allow"
    equal = allow(Condition={"StringEquals": {"s3:prefix": "${aws:username, 'guest'}"}})
    assert verdict(equal, facts={"s3:prefix": "guest"}) == "allow"
    assert verdict(equal, facts={"s3:prefix": "guest", "aws:username": "ann"}) == "none"


def test_a_variable_without_a_value_never_opens_anything() -> None:
    for field in ({"NotResource": "arn:aws:s3:::b/${aws:username}/*"},):
        assert verdict(allow(**field)) == "none"
        assert verdict(deny(**field), allow()) == "deny"
    for operator in ("StringNotLike", "StringNotEquals", "ForAllValues:StringNotEquals"):
        condition = {operator: {"s3:prefix": "${aws:username}/*"}}
        assert verdict(allow(Condition=condition), facts={"s3:prefix": "x"}) == "none"
        assert verdict(deny(Condition=condition), allow(), facts={"s3:prefix": "x"}) == "deny"
