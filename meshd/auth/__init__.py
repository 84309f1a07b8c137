"""Authorization: required actions of a request, its condition facts, policies, ownership and ACLs.

This package decides and stores nothing. `policy_evaluator` alone defines the order in which policies,
ownership and ACLs are consulted; `meshwire.iam` defines what policies mean.
"""
