"""One action on many keys of a bucket: what of a policy does not depend on the key is weighed once.

Law: says of every key what `Access.allows` says. Invariant: two rights with one `stamp` say the same of every
key, as long as `settled` holds: no record was looked up for its tags or its ACL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshwire.policies import Question, narrow, weigh

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from meshwire.policies import Policy

_PER_KEY: Final = "s3:existingobjecttag/"
# What is the same in every request of a user, or does not count in a pattern of resources.
_STEADY: Final = frozenset({"aws:username", "aws:userid", "aws:principalarn"})


class Rights:
    """`everything`: every key is allowed, none needs to be asked for. `stamp`: None when the answer holds for
    this request only."""

    def __init__(
        self,
        slow: Callable[[str], bool],
        *,
        everything: bool = False,
        fast: Narrowed | None = None,
    ) -> None:
        self._slow, self._fast = slow, fast
        self.everything = everything
        self.settled = fast is not None

    def __repr__(self) -> str:
        return f"<Rights everything={self.everything} settled={self.settled}>"

    @property
    def stamp(self) -> Hashable | None:
        return None if self._fast is None or not self.settled else self._fast.stamp

    def allows(self, key: str) -> bool:
        if self.everything:
            return True
        verdict = None if self._fast is None else self._fast.allows(key)
        if verdict is None:
            self.settled = False
            return self._slow(key)
        return verdict


class Narrowed:
    """The statements that are left once action, principal and conditions are settled."""

    def __init__(
        self,
        question: Question,
        bounds: tuple[Policy, ...],
        own: tuple[Policy, ...],
        policy: Policy | None,
        *,
        owner: bool,
        root: bool,
        restricted: bool,
    ) -> None:
        self._question = question
        self._prefix = question.resource + "/"
        self._bounds = tuple(narrow((bound,), question) for bound in bounds)
        self._own = narrow(own, question)
        self._policy = () if policy is None else narrow((policy,), question)
        self._owner, self._root, self._restricted = owner, root, restricted

    @property
    def stamp(self) -> Hashable | None:
        """Equal for equal answers; None if a resource has a variable that may change."""
        statements = [*self._own, *self._policy, *(each for bound in self._bounds for each in bound)]
        if any(glob.variables - _STEADY for each in statements for glob in each.resources.globs):
            return None
        return (
            (self._question.principal, self._owner, self._root, self._restricted),
            self._bounds,
            self._own,
            self._policy,
        )

    def allows(self, key: str) -> bool | None:
        """None: no policy says anything, and an ACL might."""
        asked = self._question
        question = Question(asked.action, self._prefix + key, asked.principal, asked.context)
        if any(weigh(bound, question) != "allow" for bound in self._bounds):
            return False
        if self._root:
            return True
        own, policy = weigh(self._own, question), weigh(self._policy, question)
        if "deny" in (own, policy):
            return False
        allowed = self._owner or own == "allow" or (policy == "allow" and not self._restricted)
        return True if allowed else None


def depends_on_keys(policies: tuple[Policy, ...]) -> bool:
    """Whether a policy asks for what differs from key to key beside its name."""
    return any(policy.asks(_PER_KEY) for policy in policies)
