"""Whether a policy opens something to everyone, as S3's public access block understands it.

Law: an allow for everyone is public unless a condition ties it to fixed values of what a stranger cannot
choose.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/access-control-block-public-access.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwire.policies.operators import network

if TYPE_CHECKING:
    from meshwire.policies.statements import Policy, Statement, Test

_FIXING = frozenset(
    [
        "aws:principalarn",
        "aws:principalorgid",
        "aws:sourceaccount",
        "aws:sourcearn",
        "aws:sourceowner",
        "aws:sourcevpc",
        "aws:sourcevpce",
        "aws:userid",
        "aws:username",
        "s3:dataaccesspointaccount",
        "s3:dataaccesspointarn",
        "s3:x-amz-server-side-encryption-aws-kms-key-id",
    ]
)
_FIXING_OPERATORS = frozenset(
    {"StringEquals", "StringEqualsIgnoreCase", "StringLike", "ArnEquals", "ArnLike"}
)
# Ranges that are wider than this are the public, but for the private networks.
_NARROW = {4: 8, 6: 32}


def is_public(policy: Policy) -> bool:
    """Whether a bucket's policy allows anything to everyone."""
    return any(_is_open(statement) for statement in policy.statements)


def _is_open(statement: Statement) -> bool:
    principals = statement.principals
    if not statement.allows or principals is None or not (principals.everyone or principals.negated):
        return False
    return not any(_fixes(test) for test in statement.tests)


def _fixes(test: Test) -> bool:
    if test.if_exists or test.qualifier == "ForAllValues":
        return False
    if test.key == "aws:sourceip" and test.operator == "IpAddress":
        return all(_is_narrow(operand) for operand in test.operands)
    fixed = test.key in _FIXING and test.operator in _FIXING_OPERATORS
    return fixed and not any(sign in operand for operand in test.operands for sign in "*?$")


def _is_narrow(operand: str) -> bool:
    addresses = network(operand)
    return addresses is not None and (
        addresses.is_private or addresses.prefixlen >= _NARROW[addresses.version]
    )
