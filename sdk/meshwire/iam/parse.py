"""Parser of policy documents: statements, principals and conditions, read strictly.

Law: whatever could never take effect (an unknown action, key or operator, another bucket's resource) is
rejected with its path and the reason. A user is named by id, bare or in an ARN whose account is ignored, and
a role by its ARN or as `role/NAME`; groups do not exist here and are rejected. Services and federated users
match nobody.
Invariant: any text gives a Policy or a PolicyError.
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_grammar.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

from meshwire.errors import PolicyError
from meshwire.iam.actions_and_keys import (
    ACTIONS,
    ACTIONS_LOWERCASE,
    KNOWN_KEYS,
    is_known_key,
    is_unsupported_key,
)
from meshwire.iam.compiled_policies import ConditionTest, Patterns, Policy, Principals, Statement
from meshwire.iam.condition_operators import NULL, OPERATORS
from meshwire.iam.wildcards import Glob
from meshwire.strict_json import (
    PlanError,
    checked_object,
    join_path,
    read_json,
    required_field,
    shown_value,
    suggestion,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.iam.compiled_policies import Effect, Qualifier


def string_or_list(value: Any, path: str) -> tuple[str, ...]:
    """Return one or more texts as a tuple. Raises PolicyError."""
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str) and item for item in items):
        raise PolicyError(path, f"expected text or a list of texts, got {shown_value(value)}")
    return tuple(items)


def scalar_or_list(value: Any, path: str) -> tuple[str, ...]:
    """Return one or more texts, numbers or booleans as a tuple of texts. Raises PolicyError."""
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str | bool | int | float) for item in items):
        raise PolicyError(path, f"expected a value or a list of values, got {shown_value(value)}")
    return tuple(_plain(item) for item in items)


def _plain(item: str | float) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    return item if isinstance(item, str) else repr(item)


_KINDS = ("AWS", "CanonicalUser", "Federated", "Service")
_ARN = "arn:aws:iam::"


def user_arn(user: str) -> str:
    """Return the ARN that names a user."""
    return f"{_ARN}:user/{user}"


def role_arn(role: str) -> str:
    """Return the ARN that names a role, given as `role/NAME`."""
    return f"{_ARN}:{role}"


def read_principals(value: Any, path: str) -> Principals:
    """Parse a Principal element. Raises PolicyError."""
    if value == "*":
        return Principals(everyone=True)
    if isinstance(value, str):
        raise PolicyError(path, f'expected "*" or {{"AWS": "{user_arn("ann")}"}}, got {shown_value(value)}')
    document = checked_object(value, path, _KINDS)
    if not document:
        raise PolicyError(path, "it lists no principal")
    everyone, users = False, set()
    for kind, listed in document.items():
        place = f"{path}.{kind}"
        for name in string_or_list(listed, place):
            if kind in {"Federated", "Service"}:
                continue
            if name == "*" and kind == "AWS":
                everyone = True
            else:
                users.add(_user(name, place))
    return Principals(everyone, frozenset(users))


def _user(name: str, path: str) -> str:
    """Return the user id in an ARN, `role/NAME` for a role's, or the name itself if it is not an ARN."""
    if "*" in name or "?" in name:
        raise PolicyError(
            path, f'{shown_value(name)}: "*" alone means everyone and is not allowed within a name'
        )
    if not name.startswith("arn:"):
        return name
    account, _, resource = name.removeprefix(_ARN).partition(":")
    kind, slash, user = resource.partition("/")
    if name.startswith(_ARN) and kind == "user" and slash and user:
        return user
    if name.startswith(_ARN) and kind == "role" and slash and user:
        return resource
    if name.startswith(_ARN) and resource == "root" and account:
        return account
    raise PolicyError(
        path,
        f"{shown_value(name)} is not a user; write {user_arn('USER_ID')}, the user's id, or a role's ARN",
    )


_QUALIFIERS = ("ForAnyValue", "ForAllValues")
_IF_EXISTS = "IfExists"
# Valid in AWS but not supported: no key of S3 has binary values.
_UNSUPPORTED = frozenset({"BinaryEquals"})


def read_conditions(
    value: Any, path: str, variables: bool
) -> tuple[tuple[ConditionTest, ...], frozenset[str]]:
    """Parse a Condition element into its tests and all keys it refers to (variables included). Raises
    PolicyError."""
    if not isinstance(value, dict):
        raise PolicyError(
            path, f'expected {{"StringEquals": {{"s3:prefix": "train/"}}}}, got {shown_value(value)}'
        )
    tests = []
    keys: set[str] = set()
    for name, block in value.items():
        place = join_path(path, name)
        if not isinstance(block, dict) or not block:
            raise PolicyError(place, f"expected keys and their values, got {shown_value(block)}")
        for key, operands in block.items():
            test, used = _test(name, key, operands, join_path(place, key), variables)
            tests.append(test)
            keys |= used
    return tuple(tests), frozenset(keys)


def _test(name: str, key: str, value: Any, path: str, variables: bool) -> tuple[ConditionTest, set[str]]:
    qualifier, colon, rest = name.rpartition(":")
    base = rest.removesuffix(_IF_EXISTS)
    if colon and qualifier not in _QUALIFIERS:
        raise PolicyError(
            path, f"unknown qualifier {shown_value(qualifier)}{suggestion(qualifier, _QUALIFIERS)}"
        )
    if base in _UNSUPPORTED:
        raise PolicyError(path, f"the condition operator {base} is not supported", supported=False)
    operator = OPERATORS.get(base)
    if operator is None or (operator is NULL and rest != base):
        raise PolicyError(
            path, f"unknown condition operator {shown_value(name)}{suggestion(base, OPERATORS)}"
        )
    folded = key.lower()
    if is_unsupported_key(folded):
        raise PolicyError(path, f"the condition key {shown_value(key)} is not supported", supported=False)
    if not is_known_key(folded):
        raise PolicyError(
            path, f"there is no condition key {shown_value(key)}{suggestion(folded, KNOWN_KEYS)}"
        )
    operands = scalar_or_list(value, path)
    matches = tuple(operator.compile(operand, path, variables) for operand in operands)
    test = ConditionTest(
        folded,
        operator.name,
        operands,
        matches,
        operator.negated,
        rest != base,
        cast("Qualifier", qualifier),
    )
    return test, {folded, *_variables(operands, path, variables)}


def _variables(operands: tuple[str, ...], path: str, variables: bool) -> set[str]:
    found: set[str] = set()
    for operand in operands if variables else ():
        found |= Glob(operand, path, variables=True).variables if "${" in operand else set()
    return found


PolicyKind = Literal["bucket", "identity"]
MAX_POLICY_BYTES = 20 << 10

_CURRENT = "2012-10-17"
_VERSIONS = (_CURRENT, "2008-10-17")
_FIELDS = ("Version", "Id", "Statement")
_STATEMENT = ("Sid", "Effect", "Action", "NotAction", "Resource", "NotResource", "Condition")
_PRINCIPALS = ("Principal", "NotPrincipal")


def parse_policy(text: str | bytes, *, kind: PolicyKind, bucket: str = "") -> Policy:
    """Parse a JSON policy document. A `bucket` policy names principals and applies only to the bucket
    `bucket`; an `identity` policy (of a user, a key or a session) names none.

    Raises PolicyError with the fault and its path.
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
    """Parses one document and collects the condition keys it refers to."""

    def __init__(self, kind: PolicyKind, bucket: str) -> None:
        self._kind, self._bucket = kind, bucket
        self._variables = True
        self._keys: set[str] = set()

    def policy(self, value: Any) -> Policy:
        document = checked_object(value, "", _FIELDS)
        version = document.get("Version", "2008-10-17")
        if version not in _VERSIONS:
            raise PolicyError("Version", f"expected {_CURRENT!r}, got {shown_value(version)}")
        self._variables = version == _CURRENT  # the older version has no variables: ${…} is literal
        if not isinstance(document.get("Id", ""), str):
            raise PolicyError("Id", "expected text")
        listed = required_field(document, "Statement", "")
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
            raise PolicyError("Statement", "two statements have the same Sid; each must be unique")
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
                f"{path}.{name}", "a policy of a user or key applies to its holder; leave this out"
            )
        effect = _effect(document, path)
        if name == "NotPrincipal" and effect == "Allow":
            raise PolicyError(
                f"{path}.NotPrincipal", "allowed only with Deny; list the principals to allow instead"
            )
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
        named = [_action(text, place, self._kind) for text in string_or_list(document[name], place)]
        return Patterns(tuple(Glob(text.lower()) for text in named), negated=name == "NotAction")

    def _resources(self, document: Mapping[str, Any], path: str) -> Patterns:
        name = _one_of(document, ("Resource", "NotResource"), path)
        place = f"{path}.{name}"
        globs = []
        for text in string_or_list(document[name], place):
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
                path, f"{shown_value(text)} is not a resource; write arn:aws:s3:::bucket or …bucket/key*"
            )
        if self._kind == "identity":
            return
        name = parts[5].partition("/")[0]
        in_s3 = parts[1] in {"aws", "*"} and parts[2] == "s3" and parts[3] in {"", "*"}
        if not in_s3 or Glob(name).matches(self._bucket, lambda _: None) is not True:
            raise PolicyError(
                path,
                f"{shown_value(text)} is not in this bucket; write arn:aws:s3:::{self._bucket} or …/key*",
            )


def _effect(document: Mapping[str, Any], path: str) -> Effect:
    effect = required_field(document, "Effect", path)
    if effect not in ("Allow", "Deny"):
        raise PolicyError(f"{path}.Effect", f"expected Allow or Deny, got {shown_value(effect)}")
    return cast("Effect", effect)


def _one_of(document: Mapping[str, Any], names: tuple[str, str], path: str, *, needed: bool = True) -> str:
    found = [name for name in names if name in document]
    if len(found) == 2:
        raise PolicyError(path, f"{names[0]} and {names[1]} are mutually exclusive; keep one")
    if needed and not found:
        raise PolicyError(path, f"{names[0]} is missing")
    return found[0] if found else ""


def _action(text: str, path: str, kind: PolicyKind) -> str:
    """Check that an action exists; actions of other services are ignored, but rejected in bucket policies."""
    if text == "*":
        return text
    service, colon, name = text.partition(":")
    if not colon or not service or not name:
        raise PolicyError(path, f"{shown_value(text)} is not an action; write s3:GetObject, s3:Get* or *")
    if service.lower() != "s3":
        if kind == "bucket":
            raise PolicyError(
                path, f"{shown_value(text)} is not an action on a bucket; such actions begin with s3:"
            )
        if service.lower() != "mesh":
            return text
    if not _matching_actions(text.lower()):
        raise PolicyError(path, f"there is no action {shown_value(text)}{suggestion(text, ACTIONS)}")
    return text


def _matching_actions(folded: str) -> list[str]:
    """Return the known actions that a pattern matches."""
    glob = Glob(folded)
    if not glob.has_wildcards:
        return [folded] if folded in ACTIONS_LOWERCASE else []
    return [name for name in ACTIONS_LOWERCASE if glob.matches(name, lambda _: None)]


def _check_levels(actions: Patterns, resources: Patterns, path: str) -> None:
    """Check that each action can apply: an object action needs a resource that can be an object, a bucket
    action the bucket itself."""
    if actions.negated or resources.negated:
        return
    names = [glob.text.partition(":::")[2] or glob.text.rpartition(":")[2] for glob in resources.globs]
    reach = {"object" if "/" in name else "bucket" for name in names}
    if any("*" in name or "$" in name for name in names if "/" not in name):
        reach.add("object")
    for glob in actions.globs:
        levels = {ACTIONS_LOWERCASE[name] for name in _matching_actions(glob.text)} or {"object", "bucket"}
        if glob.text != "*" and levels.isdisjoint(reach):
            what = (
                "objects; add /* to the resource" if "object" in levels else "the bucket; name it without /"
            )
            raise PolicyError(
                path, f"{glob.text} does not apply to any resource of this statement; it applies to {what}"
            )
