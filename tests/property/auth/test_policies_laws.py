"""Laws of the policy language: any text is answered, a deny wins, order does not matter, and the shortcut
for many keys says the same."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from meshwire.iam import (
    AccessRequest,
    PolicyError,
    allows_whole_prefix,
    evaluate,
    evaluate_statements,
    is_public_policy,
    matching_statements,
    may_deny_in_prefix,
    parse_policy,
)

if TYPE_CHECKING:
    from meshwire.iam import Policy

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def one_or_many(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return values | st.lists(values, min_size=1, max_size=3)


users = st.sampled_from(["ann", "bob", ""])
actions = st.sampled_from(["s3:GetObject", "s3:PutObject", "s3:ListBucket", "s3:DeleteObject"])
keys = st.sampled_from(["", "/a", "/train/1", "/train/2", "/home/ann/x", "/home/bob/x"])
facts = st.fixed_dictionaries(
    {},
    optional={
        "s3:prefix": st.sampled_from(["", "train/", "home/ann/", "home/bob/"]),
        "aws:sourceip": st.sampled_from(["10.0.0.1", "192.0.2.1", "::1", "odd"]),
        "aws:username": st.sampled_from(["ann", "bob", "*"]),
        "s3:requestobjecttagkeys": st.lists(st.sampled_from(["a", "b", "c"]), max_size=3).map(tuple),
        "s3:max-keys": st.sampled_from(["1", "10", "1000"]),
    },
)
string_operators = st.sampled_from(
    [
        prefix + name + suffix
        for prefix in ("", "ForAnyValue:", "ForAllValues:")
        for name in ("StringEquals", "StringNotEquals", "StringLike", "StringNotLike")
        for suffix in ("", "IfExists")
    ]
)
string_blocks = st.dictionaries(
    st.sampled_from(["s3:prefix", "aws:username", "s3:RequestObjectTagKeys"]),
    one_or_many(st.sampled_from(["", "a", "train/", "home/${aws:username}/*", "*", "${aws:nothing}"])),
    min_size=1,
    max_size=2,
)
networks = st.sampled_from(["10.0.0.0/8", "::/0"])
conditions = st.fixed_dictionaries(
    {},
    optional={
        "IpAddress": st.fixed_dictionaries({"aws:SourceIp": one_or_many(networks)}),
        "NotIpAddress": st.fixed_dictionaries({"aws:SourceIp": st.just("10.0.0.0/8")}),
        "NumericLessThan": st.fixed_dictionaries({"s3:max-keys": st.integers(0, 2000)}),
        "Null": st.fixed_dictionaries({"aws:SourceIp": st.booleans()}),
    },
)


@st.composite
def statements(draw: st.DrawFn) -> dict[str, Any]:
    statement: dict[str, Any] = {"Effect": draw(st.sampled_from(["Allow", "Deny"]))}
    principals = st.just("*") | st.fixed_dictionaries(
        {"AWS": one_or_many(st.sampled_from(["ann", "bob", "*"]))}
    )
    forms = ["Principal", "NotPrincipal"] if statement["Effect"] == "Deny" else ["Principal"]
    statement[draw(st.sampled_from(forms))] = draw(principals)
    named = one_or_many(st.sampled_from(["s3:*", "s3:Get*", "s3:GetObject", "s3:ListBucket", "*", "s3:?ut*"]))
    statement[draw(st.sampled_from(["Action", "NotAction"]))] = draw(named)
    resources = st.sampled_from(
        [f"arn:aws:s3:::b{rest}" for rest in ("", "*", "/*", "/train/*", "/home/${aws:username}/*", "/?")]
    )
    # Not the plain field: an action that fits none of the resources would be refused.
    statement["NotResource"] = draw(one_or_many(resources))
    blocks = dict(draw(conditions))
    blocks.update(draw(st.dictionaries(string_operators, string_blocks, max_size=2)))
    statement["Condition"] = blocks
    return statement


documents = st.lists(statements(), min_size=1, max_size=4)
questions = st.builds(
    lambda action, key, user, context: AccessRequest(action, "arn:aws:s3:::b" + key, user, context),
    actions,
    keys,
    users,
    facts,
)


def read(document: list[dict[str, Any]]) -> Policy:
    text = json.dumps({"Version": "2012-10-17", "Statement": document})
    return parse_policy(text, kind="bucket", bucket="b")


@given(documents, questions)
def test_a_deny_wins_and_an_allow_is_needed(document: list[dict[str, Any]], question: AccessRequest) -> None:
    single = [evaluate([read([statement])], question) for statement in document]
    expected = "deny" if "deny" in single else "allow" if "allow" in single else "none"
    assert evaluate([read(document)], question) == expected
    assert evaluate([read([statement]) for statement in document], question) == expected


@given(documents, questions, st.randoms(use_true_random=False))
def test_order_does_not_matter(document: list[dict[str, Any]], question: AccessRequest, random: Any) -> None:
    shuffled = list(document)
    random.shuffle(shuffled)
    assert evaluate([read(shuffled)], question) == evaluate([read(document)], question)


@given(documents, questions)
def test_more_denies_never_open_more_allows_never_close(
    document: list[dict[str, Any]], question: AccessRequest
) -> None:
    verdict = evaluate([read(document)], question)
    every = {"NotAction": "s3:PutBucketWebsite", "NotResource": "arn:aws:s3:::b/none", "Principal": "*"}
    assert evaluate([read([*document, {"Effect": "Deny", **every}])], question) == "deny"
    opened = evaluate([read([*document, {"Effect": "Allow", **every}])], question)
    assert opened == ("deny" if verdict == "deny" else "allow")


@given(documents, questions)
def test_narrowed_statements_say_the_same(document: list[dict[str, Any]], question: AccessRequest) -> None:
    policy = read(document)
    bare = AccessRequest(question.action, "arn:aws:s3:::b", question.principal, question.context)
    assert evaluate_statements(matching_statements([policy], bare), question) == evaluate([policy], question)


patterns = st.text("a/?*", max_size=5)
prefixes = st.text("a/", max_size=3)
by_tag = {"StringEquals": {"s3:ExistingObjectTag/a": "b"}}


@given(
    st.sampled_from(["Allow", "Deny"]),
    st.sampled_from(["Resource", "NotResource"]),
    st.lists(patterns, min_size=1, max_size=3),
    prefixes,
    prefixes,
    st.sampled_from([{}, by_tag]),
    st.booleans(),
)
def test_what_is_said_of_a_prefix_holds_for_each_resource(
    effect: str,
    form: str,
    globs: list[str],
    prefix: str,
    rest: str,
    condition: dict[str, Any],
    tagged: bool,
) -> None:
    named = [f"arn:aws:s3:::b/{glob}" for glob in globs]
    statement = {"Effect": effect, "Principal": "*", "Action": "s3:GetObject", form: named}
    policy = read([{**statement, "Condition": condition}])
    every = AccessRequest("s3:GetObject", f"arn:aws:s3:::b/{prefix}", "ann")
    facts = {"s3:existingobjecttag/a": "b"} if tagged else {}
    verdict = evaluate([policy], AccessRequest("s3:GetObject", every.resource + rest, "ann", facts))
    if allows_whole_prefix([policy], every):
        assert verdict == "allow"
    if verdict == "deny":
        assert may_deny_in_prefix([policy], every)


@given(documents, questions, prefixes)
def test_a_prefix_without_denies_has_no_denied_resource(
    document: list[dict[str, Any]], question: AccessRequest, rest: str
) -> None:
    policy = read(document)
    one = AccessRequest(question.action, question.resource + rest, question.principal, question.context)
    verdict = evaluate([policy], one)
    assert verdict != "deny" or may_deny_in_prefix([policy], question)
    if allows_whole_prefix([policy], question) and not may_deny_in_prefix([policy], question):
        assert verdict == "allow"


@given(documents, questions)
def test_what_strangers_are_allowed_is_public(
    document: list[dict[str, Any]], question: AccessRequest
) -> None:
    """Soundness of `is_public`: a stranger gets nothing from a policy that is not, but for an address."""
    policy = read(document)
    if question.principal or "aws:username" in question.context or "aws:sourceip" in question.context:
        return
    if evaluate([policy], question) == "allow":
        assert is_public_policy(policy)


@given(documents, st.sampled_from(["bucket", "identity"]))
def test_principals_belong_to_buckets(document: list[dict[str, Any]], kind: Any) -> None:
    text = json.dumps({"Version": "2012-10-17", "Statement": document})
    if kind == "bucket":
        parse_policy(text, kind=kind, bucket="b")
    else:
        with contextlib.suppress(PolicyError):
            parse_policy(text, kind=kind)
            raise AssertionError("a principal in an identity's policy")


fields = st.sampled_from(
    ["Sid", "Effect", "Condition"]
    + [no + name for no in ("", "Not") for name in ("Principal", "Action", "Resource")]
)
wild_statements = st.dictionaries(
    fields,
    json_values
    | st.sampled_from(["Allow", "Deny", "*", "s3:*", "arn:aws:s3:::b/*", "arn:aws:s3:::b/${aws:username}"])
    | st.dictionaries(string_operators, string_blocks | json_values, max_size=2),
    max_size=7,
)
wild_documents = st.fixed_dictionaries(
    {"Statement": wild_statements | st.lists(wild_statements, max_size=3)},
    optional={"Version": st.sampled_from(["2012-10-17", "2008-10-17"]) | json_values, "Id": json_values},
)


@given(
    st.binary(max_size=200)
    | st.text(max_size=200)
    | json_values.map(json.dumps)
    | wild_documents.map(json.dumps),
    st.sampled_from(["bucket", "identity"]),
    questions,
)
def test_any_text_is_a_policy_or_a_policy_error(text: Any, kind: Any, question: AccessRequest) -> None:
    with contextlib.suppress(PolicyError):
        policy = parse_policy(text, kind=kind, bucket="b")
        assert evaluate([policy], question) in {"allow", "deny", "none"}
        is_public_policy(policy)
