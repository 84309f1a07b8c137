"""The conditions of a statement: {operator: {key: values}}, all of which must hold.

Law: an operator or a key that is not known is refused where the policy is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from meshwire.documents import join, shown, suggestion
from meshwire.policies.errors import PolicyError
from meshwire.policies.globs import Glob
from meshwire.policies.keys import KNOWN, is_known, is_unsupported
from meshwire.policies.operators import NULL, OPERATORS
from meshwire.policies.statements import Test
from meshwire.policies.texts import scalars

if TYPE_CHECKING:
    from meshwire.policies.statements import Qualifier

_QUALIFIERS = ("ForAnyValue", "ForAllValues")
_IF_EXISTS = "IfExists"
# Right for AWS, and not compared here: no key of S3 holds binary values.
_UNSUPPORTED = frozenset({"BinaryEquals"})


def read_conditions(value: Any, path: str, variables: bool) -> tuple[tuple[Test, ...], frozenset[str]]:
    """The tests, and every key they ask for (variables included). Raises PolicyError."""
    if not isinstance(value, dict):
        raise PolicyError(path, f'expected {{"StringEquals": {{"s3:prefix": "train/"}}}}, got {shown(value)}')
    tests = []
    keys: set[str] = set()
    for name, block in value.items():
        place = join(path, name)
        if not isinstance(block, dict) or not block:
            raise PolicyError(place, f"expected keys and their values, got {shown(block)}")
        for key, operands in block.items():
            test, used = _test(name, key, operands, join(place, key), variables)
            tests.append(test)
            keys |= used
    return tuple(tests), frozenset(keys)


def _test(name: str, key: str, value: Any, path: str, variables: bool) -> tuple[Test, set[str]]:
    qualifier, colon, rest = name.rpartition(":")
    base = rest.removesuffix(_IF_EXISTS)
    if colon and qualifier not in _QUALIFIERS:
        raise PolicyError(path, f"unknown qualifier {shown(qualifier)}{suggestion(qualifier, _QUALIFIERS)}")
    if base in _UNSUPPORTED:
        raise PolicyError(path, f"the condition operator {base} is not supported", supported=False)
    operator = OPERATORS.get(base)
    if operator is None or (operator is NULL and rest != base):
        raise PolicyError(path, f"unknown condition operator {shown(name)}{suggestion(base, OPERATORS)}")
    folded = key.lower()
    if is_unsupported(folded):
        raise PolicyError(path, f"the condition key {shown(key)} is not supported", supported=False)
    if not is_known(folded):
        raise PolicyError(path, f"there is no condition key {shown(key)}{suggestion(folded, KNOWN)}")
    operands = scalars(value, path)
    matches = tuple(operator.compile(operand, path, variables) for operand in operands)
    test = Test(
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
