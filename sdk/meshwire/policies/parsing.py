"""A policy document, read strictly.

Law: what would never do what it says (an unknown action, a key this server cannot know, another bucket's
resource) is refused with the place and the reason, not kept. Invariant: any text gives a Policy or a
PolicyError.
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_grammar.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

from meshwire.documents import PlanError, checked_object, read_json, required, shown, suggestion
from meshwire.policies.actions import ACTIONS, FOLDED
from meshwire.policies.conditions import read_conditions
from meshwire.policies.errors import PolicyError
from meshwire.policies.globs import Glob
from meshwire.policies.principals import read_principals
from meshwire.policies.statements import Patterns, Policy, Statement
from meshwire.policies.texts import texts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.policies.statements import Effect

PolicyKind = Literal["bucket", "identity"]
MAX_POLICY_BYTES = 20 << 10

_CURRENT = "2012-10-17"
_VERSIONS = (_CURRENT, "2008-10-17")
_FIELDS = ("Version", "Id", "Statement")
_STATEMENT = ("Sid", "Effect", "Action", "NotAction", "Resource", "NotResource", "Condition")
_PRINCIPALS = ("Principal", "NotPrincipal")


def parse_policy(text: str | bytes, *, kind: PolicyKind, bucket: str = "") -> Policy:
    """The policy of a JSON document. A `bucket` policy names principals and is about the bucket `bucket`
    only; an `identity` policy (of a user, a key or a session) names none.

    Raises PolicyError with what is wrong and where.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError:
            raise PolicyError("", "the policy is not UTF-8") from None
    if len(text.encode("utf-8", "surrogatepass")) > MAX_POLICY_BYTES:
        raise PolicyError("", f"the policy has more than {MAX_POLICY_BYTES} bytes")
    try:
        return _Reader(kind, bucket).policy(read_json(text))
    except PlanError as error:
        raise PolicyError(error.path, error.message) from error


class _Reader:
    """Reads one document; collects the condition keys it asks for."""

    def __init__(self, kind: PolicyKind, bucket: str) -> None:
        self._kind, self._bucket = kind, bucket
        self._variables = True
        self._keys: set[str] = set()

    def policy(self, value: Any) -> Policy:
        document = checked_object(value, "", _FIELDS)
        version = document.get("Version", "2008-10-17")
        if version not in _VERSIONS:
            raise PolicyError("Version", f"expected {_CURRENT!r}, got {shown(version)}")
        self._variables = version == _CURRENT  # the older one takes ${…} as it stands
        if not isinstance(document.get("Id", ""), str):
            raise PolicyError("Id", "expected text")
        listed = required(document, "Statement", "")
        statements = listed if isinstance(listed, list) else [listed]
        if not statements:
            raise PolicyError("Statement", "a policy needs at least one statement")
        several = isinstance(listed, list)
        read = [
            self._statement(item, f"Statement[{number}]" if several else "Statement")
            for number, item in enumerate(statements)
        ]
        sids = [statement.sid for statement in read if statement.sid]
        if len(set(sids)) != len(sids):
            raise PolicyError("Statement", "a Sid stands twice; each must be its own")
        return Policy(tuple(read), frozenset(self._keys))

    def _statement(self, value: Any, path: str) -> Statement:
        of_bucket = self._kind == "bucket"
        document = checked_object(value, path, (*_STATEMENT, *_PRINCIPALS))
        sid = document.get("Sid", "")
        if not isinstance(sid, str):
            raise PolicyError(f"{path}.Sid", "expected text")
        name = _one_of(document, _PRINCIPALS, path, needed=of_bucket)
        if name and not of_bucket:
            raise PolicyError(
                f"{path}.{name}", "the policy of a user or key is about its holder; leave it out"
            )
        effect = _effect(document, path)
        if name == "NotPrincipal" and effect == "Allow":
            raise PolicyError(f"{path}.NotPrincipal", "it goes with Deny only; name whom to allow")
        principals = read_principals(document[name], f"{path}.{name}") if name else None
        if principals is not None and name == "NotPrincipal":
            principals = type(principals)(principals.everyone, principals.users, negated=True)
        actions, resources = self._actions(document, path), self._resources(document, path)
        if of_bucket:
            _check_levels(actions, resources, path)
        tests, keys = read_conditions(document.get("Condition", {}), f"{path}.Condition", self._variables)
        self._keys |= keys
        return Statement(effect, principals, actions, resources, tests, sid)

    def _actions(self, document: Mapping[str, Any], path: str) -> Patterns:
        name = _one_of(document, ("Action", "NotAction"), path)
        place = f"{path}.{name}"
        named = [_action(text, place, self._kind) for text in texts(document[name], place)]
        return Patterns(tuple(Glob(text.lower()) for text in named), negated=name == "NotAction")

    def _resources(self, document: Mapping[str, Any], path: str) -> Patterns:
        name = _one_of(document, ("Resource", "NotResource"), path)
        place = f"{path}.{name}"
        globs = []
        for text in texts(document[name], place):
            self._check_resource(text, place)
            glob = Glob(text, place, variables=self._variables)
            self._keys |= glob.variables
            globs.append(glob)
        return Patterns(tuple(globs), negated=name == "NotResource")

    def _check_resource(self, text: str, path: str) -> None:
        if text == "*" and self._kind == "identity":
            return
        parts = text.split(":", 5)
        if len(parts) != 6 or parts[0] != "arn":
            raise PolicyError(
                path, f"{shown(text)} is no resource; write arn:aws:s3:::bucket or …bucket/key*"
            )
        if self._kind == "identity":
            return
        name = parts[5].partition("/")[0]
        in_s3 = parts[1] in {"aws", "*"} and parts[2] == "s3" and parts[3] in {"", "*"}
        if not in_s3 or Glob(name).matches(self._bucket, lambda _: None) is not True:
            raise PolicyError(
                path, f"{shown(text)} is not of this bucket; write arn:aws:s3:::{self._bucket} or …/key*"
            )


def _effect(document: Mapping[str, Any], path: str) -> Effect:
    effect = required(document, "Effect", path)
    if effect not in ("Allow", "Deny"):
        raise PolicyError(f"{path}.Effect", f"expected Allow or Deny, got {shown(effect)}")
    return cast("Effect", effect)


def _one_of(document: Mapping[str, Any], names: tuple[str, str], path: str, *, needed: bool = True) -> str:
    found = [name for name in names if name in document]
    if len(found) == 2:
        raise PolicyError(path, f"{names[0]} and {names[1]} exclude each other; keep one")
    if needed and not found:
        raise PolicyError(path, f"it has no {names[0]}")
    return found[0] if found else ""


def _action(text: str, path: str, kind: PolicyKind) -> str:
    """An action that is there; other services' are another server's business, but not a bucket's."""
    if text == "*":
        return text
    service, colon, name = text.partition(":")
    if not colon or not service or not name:
        raise PolicyError(path, f"{shown(text)} is no action; write s3:GetObject, s3:Get* or *")
    if service.lower() != "s3":
        if kind == "bucket":
            raise PolicyError(path, f"{shown(text)} is no action on a bucket; they begin with s3:")
        if service.lower() != "mesh":
            return text
    if not _named(text.lower()):
        raise PolicyError(path, f"there is no action {shown(text)}{suggestion(text, ACTIONS)}")
    return text


def _named(folded: str) -> list[str]:
    """The known actions a pattern names."""
    glob = Glob(folded)
    if not glob.has_wildcards:
        return [folded] if folded in FOLDED else []
    return [name for name in FOLDED if glob.matches(name, lambda _: None)]


def _check_levels(actions: Patterns, resources: Patterns, path: str) -> None:
    """An action on objects needs a resource that can be an object, one on a bucket the bucket."""
    if actions.negated or resources.negated:
        return
    names = [glob.text.partition(":::")[2] or glob.text.rpartition(":")[2] for glob in resources.globs]
    reach = {"object" if "/" in name else "bucket" for name in names}
    if any("*" in name or "$" in name for name in names if "/" not in name):
        reach.add("object")
    for glob in actions.globs:
        levels = {FOLDED[name] for name in _named(glob.text)} or {"object", "bucket"}
        if glob.text != "*" and levels.isdisjoint(reach):
            what = (
                "objects: add /* to the resource" if "object" in levels else "the bucket: name it without /"
            )
            raise PolicyError(path, f"{glob.text} does not apply to any resource here; it is about {what}")
