"""Policy evaluation: the decision on one request, on all keys below a prefix, and on public access.

Law: a deny overrides any allow, in any order; without either there is no decision.
Law: below a prefix, a statement that depends on an object's tags never allows, but may deny.
Law: an allow for everyone is public unless a condition ties it to values no stranger can choose.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/access-control-block-public-access.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from meshwire.iam.condition_operators import parse_network
from meshwire.iam.wildcards import matches_every_suffix, matches_some_suffix

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshwire.iam.compiled_policies import AccessRequest, ConditionTest, Patterns, Policy, Statement
    from meshwire.iam.wildcards import Glob


Decision = Literal["allow", "deny", "none"]


def evaluate(policies: Iterable[Policy], question: AccessRequest) -> Decision:
    """Return the combined decision of `policies`."""
    verdict: Decision = "none"
    for policy in policies:
        for statement in policy.statements:
            if statement.allows and verdict == "allow":
                continue
            if statement.matches_request(question):
                if not statement.allows:
                    return "deny"
                verdict = "allow"
    return verdict


def matching_statements(policies: Iterable[Policy], question: AccessRequest) -> tuple[Statement, ...]:
    """Return the statements that apply to `question`, whatever its resource: for one question about many
    resources, provided that no condition depends on them."""
    return tuple(
        statement
        for policy in policies
        for statement in policy.statements
        if statement.matches_principal_and_action(question) and statement.conditions_hold(question)
    )


def evaluate_statements(statements: Iterable[Statement], question: AccessRequest) -> Decision:
    """Return the decision of pre-selected statements on the question's resource."""
    verdict: Decision = "none"
    for statement in statements:
        if statement.allows and verdict == "allow":
            continue
        if statement.matches_resource(question):
            if not statement.allows:
                return "deny"
            verdict = "allow"
    return verdict


PER_RESOURCE: Final = "s3:existingobjecttag/"
"""Prefix of condition keys whose values differ between the objects of a bucket."""


def allows_whole_prefix(policies: Iterable[Policy], question: AccessRequest) -> bool:
    """Whether a single statement allows the question's action on every resource that begins with its
    resource."""
    return any(_allows_every(each, question) for policy in policies for each in policy.statements)


def may_deny_in_prefix(policies: Iterable[Policy], question: AccessRequest) -> bool:
    """Whether any resource that begins with the question's resource may be denied."""
    return any(_denies_some(each, question) for policy in policies for each in policy.statements)


def _allows_every(statement: Statement, question: AccessRequest) -> bool:
    if not statement.allows or not statement.matches_principal_and_action(question):
        return False
    if any(_is_per_resource(test) for test in statement.tests):
        return False
    return statement.conditions_hold(question) and _include_every(statement.resources, question)


def _denies_some(statement: Statement, question: AccessRequest) -> bool:
    if statement.allows or not statement.matches_principal_and_action(question):
        return False
    tests = (test for test in statement.tests if not _is_per_resource(test))
    if not all(test.holds(question, strict=False) for test in tests):
        return False
    if statement.resources.negated:
        return not any(_fits_every(glob, question) for glob in statement.resources.globs)
    return any(_fits_some(glob, question) for glob in statement.resources.globs)


def _include_every(resources: Patterns, question: AccessRequest) -> bool:
    if resources.negated:
        return not any(_fits_some(glob, question) for glob in resources.globs)
    return any(_fits_every(glob, question) for glob in resources.globs)


def _fits_every(glob: Glob, question: AccessRequest) -> bool:
    segments = None if _varies(glob) else glob.bind_variables(question.value)
    return segments is not None and matches_every_suffix(segments, question.resource)


def _fits_some(glob: Glob, question: AccessRequest) -> bool:
    """Whether the pattern may match; a variable without a value may stand for anything."""
    segments = None if _varies(glob) else glob.bind_variables(question.value)
    return segments is None or matches_some_suffix(segments, question.resource)


def _varies(glob: Glob) -> bool:
    return any(name.startswith(PER_RESOURCE) for name in glob.variables)


def _is_per_resource(test: ConditionTest) -> bool:
    return test.key.startswith(PER_RESOURCE) or any(
        f"${{{PER_RESOURCE}" in operand.lower().replace(" ", "") for operand in test.operands
    )


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
# Ranges wider than this count as public, except private networks.
_NARROW = {4: 8, 6: 32}


def is_public_policy(policy: Policy) -> bool:
    """Whether a bucket policy allows anything to everyone."""
    return any(_is_open(statement) for statement in policy.statements)


def _is_open(statement: Statement) -> bool:
    principals = statement.principals
    if not statement.allows or principals is None or not (principals.everyone or principals.negated):
        return False
    return not any(_fixes(test) for test in statement.tests)


def _fixes(test: ConditionTest) -> bool:
    if test.if_exists or test.qualifier == "ForAllValues":
        return False
    if test.key == "aws:sourceip" and test.operator == "IpAddress":
        return all(_is_narrow(operand) for operand in test.operands)
    fixed = test.key in _FIXING and test.operator in _FIXING_OPERATORS
    return fixed and not any(sign in operand for operand in test.operands for sign in "*?$")


def _is_narrow(operand: str) -> bool:
    addresses = parse_network(operand)
    return addresses is not None and (
        addresses.is_private or addresses.prefixlen >= _NARROW[addresses.version]
    )
