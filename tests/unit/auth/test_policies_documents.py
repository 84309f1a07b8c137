"""Policy documents: what is read, and how each mistake is answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwire.iam import PolicyError, is_public_policy, parse_policy

PHOTOS = "arn:aws:s3:::photos"
READ = {
    "Effect": "Allow",
    "Principal": "*",
    "Action": "s3:GetObject",
    "Resource": "arn:aws:s3:::photos/*",
}


def document(*statements: dict[str, Any], **changes: Any) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": list(statements), **changes})


def statement(**changes: Any) -> dict[str, Any]:
    """READ with changes; None takes a field away."""
    return {name: value for name, value in {**READ, **changes}.items() if value is not None}


def bucket_problem(text: str) -> PolicyError:
    with pytest.raises(PolicyError) as excinfo:
        parse_policy(text, kind="bucket", bucket="photos")
    return excinfo.value


@pytest.mark.parametrize(
    "text",
    [
        document(READ),
        document(READ, Id="mine", Version="2008-10-17"),
        json.dumps({"Statement": READ}),
        document(statement(Sid="", Action=["s3:get*", "S3:LISTBUCKET"], Resource="arn:aws:s3:::photos*")),
        document(statement(Action="*"), statement(Action="s3:*", Effect="Deny")),
        document(statement(Principal={"AWS": "*"})),
        document(statement(Principal={"AWS": ["ann", "arn:aws:iam::123456789012:user/bob"]})),
        document(statement(Principal={"AWS": "arn:aws:iam::ann:root", "CanonicalUser": "bob"})),
        document(statement(Principal={"Service": "logging.s3.amazonaws.com"})),
        document(statement(Principal=None, NotPrincipal={"AWS": "ann"}, Effect="Deny")),
        document(statement(Action=None, NotAction="s3:DeleteObject")),
        document(statement(Resource=None, NotResource=["arn:aws:s3:::photos/secret/*"])),
        document(statement(Action="s3:ListBucket", Resource="arn:aws:s3:::photos")),
        document(statement(Action="s3:*Object*", Resource=["arn:aws:s3:::photos", "arn:aws:s3:::photos/*"])),
        document(statement(Resource="arn:aws:s3::*:photos/*")),
        document(statement(Resource=["arn:aws:s3:::*", "arn:aws:s3:::ph?t*/*"])),
        document(statement(Resource="arn:aws:s3:::photos/${aws:username}/*")),
        document(statement(Condition={})),
        document(statement(Condition={"Bool": {"aws:SecureTransport": False}})),
        document(statement(Condition={"NumericLessThan": {"s3:max-keys": 10, "s3:signatureAge": [1.5]}})),
        document(statement(Condition={"StringNotEquals": {"aws:SourceVpce": "vpce-1"}})),
        document(statement(Condition={"ForAnyValue:StringLikeIfExists": {"s3:RequestObjectTagKeys": "a*"}})),
    ],
)  # fmt: skip
def test_documents_that_are_read(text: str) -> None:
    written = json.loads(text)["Statement"]
    policy = parse_policy(text, kind="bucket", bucket="photos")
    assert len(policy.statements) == (len(written) if isinstance(written, list) else 1)


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("", "", "not a JSON document"),
        ("[]", "", "expected an object"),
        ("\ufeff" + document(READ), "", "not a JSON document"),
        ('{"Version": "2012-10-17", "Version": "2012-10-17"}', "", "appears twice"),
        (document(), "Statement", "at least one"),
        (document(READ, Statment=[]), "Statment", "unknown field; did you mean 'Statement'"),
        (document(READ, Version="2012-10-18"), "Version", "2012-10-17"),
        (document(READ, Id=3), "Id", "text"),
        (json.dumps({"Version": "2012-10-17"}), "Statement", "missing"),
        (document("no"), "Statement[0]", "expected an object"),  # type: ignore[arg-type]
        (json.dumps({"Statement": statement(Effect="allow")}), "Statement.Effect", "expected Allow or Deny"),
        (document(READ, statement(Effect=None)), "Statement[1].Effect", "missing"),
        (document(statement(Sid="a"), statement(Sid="a")), "Statement", "same Sid"),
        (document(statement(Principal=None)), "Statement[0]", "Principal is missing"),
        (document(statement(NotPrincipal="*")), "Statement[0]", "mutually exclusive"),
        (document(statement(Principal="ann")), "#.Principal", "arn:aws:iam:::user/ann"),
        (document(statement(Principal={})), "#.Principal", "no principal"),
        (document(statement(Principal={"AWS": []})), "#.Principal.AWS", "expected text"),
        (document(statement(Principal={"AWS": "an*"})), "#.Principal.AWS", "alone means everyone"),
        (document(statement(Principal={"AWS": "arn:aws:iam::1:role/"})), "#.Principal.AWS", "not a user"),
        (document(statement(Principal={"AWS": "arn:aws:iam::1:group/g"})), "#.Principal.AWS", "not a user"),
        (document(statement(Principal={"AWS": "arn:aws:sts::1:role/r"})), "#.Principal.AWS", "not a user"),
        (document(statement(Principal={"AWS": "arn:aws:iam:::root"})), "#.Principal.AWS", "not a user"),
        (document(statement(Principal={"Aws": "ann"})), "#.Principal.Aws", "known: AWS"),
        (document(statement(Action=None)), "Statement[0]", "Action is missing"),
        (document(statement(NotAction="s3:GetObject")), "Statement[0]", "mutually exclusive"),
        (document(statement(Action=[])), "#.Action", "expected text"),
        (document(statement(Action="GetObject")), "#.Action", "not an action"),
        (document(statement(Action="ec2:RunInstances")), "#.Action", "begin with s3:"),
        (document(statement(Action="s3:GetObjects")), "#.Action", "did you mean 's3:GetObject'"),
        (document(statement(Action="s3:Fetch*")), "#.Action", "no action"),
        (document(statement(Resource=None)), "Statement[0]", "Resource is missing"),
        (document(statement(Resource="*")), "#.Resource", "not a resource"),
        (document(statement(Resource="photos/*")), "#.Resource", "not a resource"),
        (document(statement(Resource="arn:aws:s3:::p*x/*")), "#.Resource", "not in this bucket"),
        (document(statement(Principal=None, NotPrincipal={"AWS": "a"})), "#.NotPrincipal", "only with Deny"),
        (document(statement(Resource="arn:aws:s3:::other/*")), "#.Resource", "not in this bucket"),
        (document(statement(Resource="arn:aws:s3:::photosx/*")), "#.Resource", "not in this bucket"),
        (document(statement(Resource="arn:aws:sqs:::photos")), "#.Resource", "not in this bucket"),
        (document(statement(Resource="arn:aws:s3:::photos")), "Statement[0]", "add /\\*"),
        (document(statement(Action="s3:ListBucket")), "Statement[0]", "without /"),
        (document(statement(Action="s3:GetObjec?", Resource=PHOTOS)), "Statement[0]", "add /\\*"),
        (document(statement(Action="s3:Abort*", Resource=PHOTOS)), "Statement[0]", "add /\\*"),
        (document(statement(Action="s3:???Object", Resource=PHOTOS)), "Statement[0]", "add /\\*"),
        (document(statement(Action="s3:GetBucket*")), "Statement[0]", "without /"),
        (document(statement(Resource="arn:aws:s3:::photos/${x")), "#.Resource", "policy variable"),
        (document(statement(Condition=[])), "#.Condition", "expected"),
    ],
)  # fmt: skip
def test_mistakes_are_named(text: str, path: str, message: str) -> None:
    problem = bucket_problem(text)
    assert problem.path == path.replace("#", "Statement[0]")
    assert problem.supported
    with pytest.raises(PolicyError, match=message):
        raise problem


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ({"StringEqual": {"s3:prefix": "a"}}, "did you mean 'StringEquals'"),
        ({"StringEquals": {}}, "expected"),
        ({"StringEquals": {"s3:perfix": "a"}}, "did you mean 's3:prefix'"),
        ({"StringEquals": {"s3:prefix": []}}, "expected"),
        ({"StringEquals": {"s3:prefix": {}}}, "expected"),
        ({"NullIfExists": {"s3:prefix": "true"}}, "unknown condition operator"),
        ({"ForSome:StringLike": {"s3:prefix": "a"}}, "unknown qualifier"),
        ({"Bool": {"aws:SecureTransport": "yes"}}, "true or false"),
        ({"IpAddress": {"aws:SourceIp": "10.0.0.0/33"}}, "IP address"),
        ({"NumericEquals": {"s3:max-keys": "ten"}}, "a number"),
        ({"DateLessThan": {"aws:CurrentTime": "soon"}}, "a date"),
        ({"DateLessThan": {"aws:CurrentTime": "2027"}}, "a date"),
        ({"DateLessThan": {"aws:CurrentTime": 20261231}}, "a date"),
        ({"ArnLike": {"aws:PrincipalArn": "ann"}}, "six parts"),
    ],
)
def test_mistakes_in_conditions_are_named(condition: dict[str, Any], message: str) -> None:
    problem = bucket_problem(document(statement(Condition=condition)))
    [(operator, block)] = condition.items()
    assert problem.path == ".".join(["Statement[0].Condition", operator, *block])
    assert problem.supported
    with pytest.raises(PolicyError, match=message):
        raise problem


@pytest.mark.parametrize(
    "condition",
    [
        {"BinaryEquals": {"s3:prefix": "QQ=="}},
        {"StringEquals": {"aws:RequestTag/a": "b"}},
        {"StringEquals": {"aws:RequestedRegion": "eu-west-1"}},
    ],
)
def test_what_s3_has_and_this_server_has_not_is_told_apart(condition: dict[str, Any]) -> None:
    assert not bucket_problem(document(statement(Condition=condition))).supported


def test_a_policy_is_not_too_long() -> None:
    text = document(READ)
    parse_policy(text + " " * (20480 - len(text)), kind="bucket", bucket="photos")
    assert "20480 bytes" in bucket_problem(text + " " * 20481).message
    assert "20480 bytes" in bucket_problem(text + "é" * 10240).message


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-32-le"])
def test_a_policy_is_utf_8(encoding: str) -> None:
    """What is kept as text is read again from text: nothing may be readable as bytes alone."""
    with pytest.raises(PolicyError):
        parse_policy(document(READ).encode(encoding), kind="bucket", bucket="photos")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"Principal": None}, ""),
        ({"Principal": None, "Resource": "*", "Action": "ec2:*"}, ""),
        ({"Principal": None, "Resource": "arn:aws:s3:::a*/b"}, ""),
        ({"Principal": None, "Resource": "arn:aws:dynamodb:eu-west-1:1:table/t"}, ""),
        ({}, "leave this out"),
        ({"Principal": None, "NotPrincipal": "*"}, "leave this out"),
        ({"Principal": None, "Action": "s3:GetObjcet"}, "did you mean"),
        ({"Principal": None, "Resource": "photos/*"}, "not a resource"),
    ],
)
def test_policies_of_users_and_keys(changes: dict[str, Any], expected: str) -> None:
    text = document(statement(**changes))
    if expected:
        with pytest.raises(PolicyError, match=expected):
            parse_policy(text, kind="identity")
    else:
        parse_policy(text, kind="identity")


def conditions(**blocks: dict[str, Any]) -> str:
    return document(statement(Condition={name.replace("_", ":"): block for name, block in blocks.items()}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (document(READ), True),
        (document(statement(Principal={"AWS": ["ann", "*"]})), True),
        (document(statement(Principal={"AWS": "ann"})), False),
        (document(statement(Effect="Deny")), False),
        (document(statement(Principal={"AWS": "ann"}), READ), True),
        (conditions(IpAddress={"aws:SourceIp": "203.0.113.0/24"}), False),
        (conditions(IpAddress={"aws:SourceIp": ["203.0.113.0/24", "0.0.0.0/0"]}), True),
        (conditions(IpAddress={"aws:SourceIp": "10.0.0.0/8"}), False),
        (conditions(IpAddress={"aws:SourceIp": "64.0.0.0/7"}), True),
        (conditions(IpAddress={"aws:SourceIp": "2001:db8::/32"}), False),
        (conditions(IpAddress={"aws:SourceIp": "::/0"}), True),
        (conditions(IpAddressIfExists={"aws:SourceIp": "203.0.113.0/24"}), True),
        (conditions(NotIpAddress={"aws:SourceIp": "203.0.113.0/24"}), True),
        (conditions(StringEquals={"aws:username": "ann"}), False),
        (conditions(StringLike={"aws:username": "a*"}), True),
        (conditions(StringEquals={"aws:username": "${aws:username}"}), True),
        (conditions(StringEquals={"aws:SourceVpc": "vpc-1"}), False),
        (conditions(StringEquals={"aws:Referer": "http://example.org/"}), True),
        (conditions(StringNotEquals={"aws:username": "ann"}), True),
        (conditions(ForAllValues_StringEquals={"aws:username": "ann"}), True),
        (conditions(ArnEquals={"aws:PrincipalArn": "arn:aws:iam:::user/ann"}), False),
        (conditions(Bool={"aws:SecureTransport": "true"}), True),
    ],
)
def test_what_is_public(text: str, expected: bool) -> None:
    assert is_public_policy(parse_policy(text, kind="bucket", bucket="photos")) is expected
