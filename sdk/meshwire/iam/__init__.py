"""The policy language of IAM: JSON documents of statements, compiled once, and the decision on a request.

Law: time, addresses and tags are part of the request that is evaluated.
Invariant: any text gives a Policy or a PolicyError; a deny overrides any number of allows in any order.
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html
"""

from meshwire.errors import PolicyError
from meshwire.iam.compiled_policies import AccessRequest, Policy, Statement
from meshwire.iam.evaluator import (
    Decision,
    allows_whole_prefix,
    evaluate,
    evaluate_statements,
    is_public_policy,
    matching_statements,
    may_deny_in_prefix,
)
from meshwire.iam.parse import PolicyKind, parse_policy

__all__ = [
    "AccessRequest",
    "Decision",
    "Policy",
    "PolicyError",
    "PolicyKind",
    "Statement",
    "allows_whole_prefix",
    "evaluate",
    "evaluate_statements",
    "is_public_policy",
    "matching_statements",
    "may_deny_in_prefix",
    "parse_policy",
]
