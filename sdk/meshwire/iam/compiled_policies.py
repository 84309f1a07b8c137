"""Compiled policies: statements, their conditions, and the request they are evaluated against.

Law: data and matching only; `iam.parse` compiles documents, `iam.evaluate` decides.
Invariant: a statement whose variables have no value never allows a request because of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.iam.condition_operators import Match
    from meshwire.iam.wildcards import Glob, Resolve

Effect = Literal["Allow", "Deny"]
Values = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AccessRequest:
    """The question whether `principal` (a user id, empty for anonymous) may do `action` on `resource`.

    `resource` is an ARN: `arn:aws:s3:::bucket/key`. `context` holds the facts by the lower-case name of
    their condition key; a missing fact is absent.
    """

    action: str
    resource: str
    principal: str = ""
    context: Mapping[str, Values] = field(default_factory=dict)

    def values(self, key: str) -> tuple[str, ...]:
        """Return the values of a fact; empty if it is absent."""
        found = self.context.get(key, ())
        return (found,) if isinstance(found, str) else found

    def value(self, key: str) -> str | None:
        """Return the value of a fact that has exactly one, which is what a policy variable stands for."""
        values = self.values(key)
        return values[0] if len(values) == 1 else None


@dataclass(frozen=True, slots=True)
class Principals:
    """The principals a statement applies to; with `negated`, everyone except them."""

    everyone: bool = False
    users: frozenset[str] = frozenset()
    negated: bool = False

    def matches_user(self, user: str) -> bool:
        named = self.everyone or (user != "" and user in self.users)
        return named != self.negated


@dataclass(frozen=True, slots=True, eq=False)
class Patterns:
    """Actions or resources; with `negated`, all except them."""

    globs: tuple[Glob, ...]
    negated: bool = False

    def matches_text(self, text: str, resolve: Resolve, *, strict: bool) -> bool:
        """Whether the patterns include `text`. `strict`: a negation whose variables have no value does not
        hold."""
        unresolved = False
        for glob in self.globs:
            verdict = glob.matches(text, resolve)
            if verdict:
                return not self.negated
            unresolved = unresolved or verdict is None
        return self.negated and not (strict and unresolved)


Qualifier = Literal["", "ForAnyValue", "ForAllValues"]


@dataclass(frozen=True, slots=True, eq=False)
class ConditionTest:
    """One key of one condition operator. `operands` in source form, `matches` compiled."""

    key: str
    operator: str
    operands: tuple[str, ...]
    matches: tuple[Match, ...]
    negated: bool = False
    if_exists: bool = False
    qualifier: Qualifier = ""

    def holds(self, question: AccessRequest, *, strict: bool) -> bool:
        values = question.values(self.key)
        if self.operator == "Null":
            absent = "true" if not any(values) else "false"
            return any(match(absent, question.value) for match in self.matches)
        if not values:
            return self._without()
        if self.qualifier == "ForAllValues":
            return all(self._fits(value, question, strict=strict) for value in values)
        if self.qualifier == "ForAnyValue" or not self.negated:
            return any(self._fits(value, question, strict=strict) for value in values)
        return all(self._fits(value, question, strict=strict) for value in values)

    def _without(self) -> bool:
        """Whether the test holds for an absent key."""
        if self.qualifier:
            return self.if_exists or self.qualifier == "ForAllValues"
        return self.if_exists or self.negated

    def _fits(self, value: str, question: AccessRequest, *, strict: bool) -> bool:
        unresolved = False
        for match in self.matches:
            verdict = match(value, question.value)
            if verdict:
                return not self.negated
            unresolved = unresolved or verdict is None
        return self.negated and not (strict and unresolved)


@dataclass(frozen=True, slots=True, eq=False)
class Statement:
    """A compiled statement. `principals` is None in an identity policy, which applies to its holder."""

    effect: Effect
    principals: Principals | None
    actions: Patterns
    resources: Patterns
    tests: tuple[ConditionTest, ...] = ()
    sid: str = ""

    @property
    def allows(self) -> bool:
        return self.effect == "Allow"

    def matches_request(self, question: AccessRequest) -> bool:
        """Whether the statement applies to the request."""
        return (
            self.matches_principal_and_action(question)
            and self.matches_resource(question)
            and self.conditions_hold(question)
        )

    def matches_principal_and_action(self, question: AccessRequest) -> bool:
        """Whether the statement covers the principal and the action."""
        if self.principals is not None and not self.principals.matches_user(question.principal):
            return False
        return self.actions.matches_text(question.action.lower(), question.value, strict=self.allows)

    def matches_resource(self, question: AccessRequest) -> bool:
        """Whether the statement covers the resource."""
        return self.resources.matches_text(question.resource, question.value, strict=self.allows)

    def conditions_hold(self, question: AccessRequest) -> bool:
        """Whether every condition holds."""
        return all(test.holds(question, strict=self.allows) for test in self.tests)


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A compiled policy. Compared by identity, so a cache can detect a replaced policy."""

    statements: tuple[Statement, ...]
    keys: frozenset[str] = frozenset()
    """Every condition key it refers to, in lower case, variables included."""

    def uses_key_prefix(self, prefix: str) -> bool:
        """Whether it refers to a condition key with this prefix."""
        return any(key.startswith(prefix) for key in self.keys)
