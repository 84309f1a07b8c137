"""The policy language: JSON documents that say who may do what, and the verdict on one question.

Law: pure; a document is read once into frozen statements and asked often. Time, addresses and tags are
facts of the question. Invariant: any text gives a Policy or a PolicyError; a deny wins over any number of
allows, in whatever order they stand.
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html
"""

from meshwire.policies.deciding import Verdict, decide, narrow, weigh
from meshwire.policies.errors import PolicyError
from meshwire.policies.parsing import PolicyKind, parse_policy
from meshwire.policies.prefixes import covers_every, denies_some
from meshwire.policies.publicity import is_public
from meshwire.policies.statements import Policy, Question, Statement

__all__ = [
    "Policy",
    "PolicyError",
    "PolicyKind",
    "Question",
    "Statement",
    "Verdict",
    "covers_every",
    "decide",
    "denies_some",
    "is_public",
    "narrow",
    "parse_policy",
    "weigh",
]
