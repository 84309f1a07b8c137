"""The verdict of policies on a question.

Law: a deny wins, whatever allows; without either there is no verdict. Invariant: neither the order of
policies nor that of statements matters; `narrow` then `weigh` says what `decide` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshwire.policies.statements import Policy, Question, Statement

Verdict = Literal["allow", "deny", "none"]


def decide(policies: Iterable[Policy], question: Question) -> Verdict:
    """What `policies`, taken together, say."""
    verdict: Verdict = "none"
    for policy in policies:
        for statement in policy.statements:
            if statement.allows and verdict == "allow":
                continue
            if statement.applies(question):
                if not statement.allows:
                    return "deny"
                verdict = "allow"
    return verdict


def narrow(policies: Iterable[Policy], question: Question) -> tuple[Statement, ...]:
    """The statements that say something about `question`, whatever its resource: for one question about many
    resources, as long as no condition depends on them."""
    return tuple(
        statement
        for policy in policies
        for statement in policy.statements
        if statement.concerns(question) and statement.conditions_hold(question)
    )


def weigh(statements: Iterable[Statement], question: Question) -> Verdict:
    """What narrowed statements say of the question's resource."""
    verdict: Verdict = "none"
    for statement in statements:
        if statement.allows and verdict == "allow":
            continue
        if statement.covers(question):
            if not statement.allows:
                return "deny"
            verdict = "allow"
    return verdict
