"""What policies say of all resources that share a prefix: whether each is allowed, whether any is denied.

Law: an allow that depends on the single resource (by a tag of an existing object) covers nothing here, a deny
that does covers everything it names. Invariant: where `covers_every` holds, `decide` allows or denies each
resource; where `denies_some` does not, it denies none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshwire.policies.globs import fits_every, fits_some

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshwire.policies.globs import Glob
    from meshwire.policies.statements import Patterns, Policy, Question, Statement, Test

PER_RESOURCE: Final = "s3:existingobjecttag/"
"""Condition keys whose values differ between the objects of a bucket begin like this."""


def covers_every(policies: Iterable[Policy], question: Question) -> bool:
    """Whether one statement allows the question's action on every resource that begins with its resource."""
    return any(_allows_every(each, question) for policy in policies for each in policy.statements)


def denies_some(policies: Iterable[Policy], question: Question) -> bool:
    """Whether any resource that begins with the question's resource may be denied."""
    return any(_denies_some(each, question) for policy in policies for each in policy.statements)


def _allows_every(statement: Statement, question: Question) -> bool:
    if not statement.allows or not statement.concerns(question):
        return False
    if any(_is_per_resource(test) for test in statement.tests):
        return False
    return statement.conditions_hold(question) and _include_every(statement.resources, question)


def _denies_some(statement: Statement, question: Question) -> bool:
    if statement.allows or not statement.concerns(question):
        return False
    tests = (test for test in statement.tests if not _is_per_resource(test))
    if not all(test.holds(question, strict=False) for test in tests):
        return False
    if statement.resources.negated:
        return not any(_fits_every(glob, question) for glob in statement.resources.globs)
    return any(_fits_some(glob, question) for glob in statement.resources.globs)


def _include_every(resources: Patterns, question: Question) -> bool:
    if resources.negated:
        return not any(_fits_some(glob, question) for glob in resources.globs)
    return any(_fits_every(glob, question) for glob in resources.globs)


def _fits_every(glob: Glob, question: Question) -> bool:
    segments = None if _varies(glob) else glob.bound(question.value)
    return segments is not None and fits_every(segments, question.resource)


def _fits_some(glob: Glob, question: Question) -> bool:
    """A variable without a value may stand for anything."""
    segments = None if _varies(glob) else glob.bound(question.value)
    return segments is None or fits_some(segments, question.resource)


def _varies(glob: Glob) -> bool:
    return any(name.startswith(PER_RESOURCE) for name in glob.variables)


def _is_per_resource(test: Test) -> bool:
    return test.key.startswith(PER_RESOURCE) or any(
        f"${{{PER_RESOURCE}" in operand.lower().replace(" ", "") for operand in test.operands
    )
