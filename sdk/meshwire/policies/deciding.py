"""The verdict of policies on a question.

Law: a deny wins, whatever allows; without either there is no verdict. Invariant: neither the order of
policies nor that of statements matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshwire.policies.statements import Policy, Question

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
