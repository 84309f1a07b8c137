"""Which requests are about one name, and so go to the nodes that hold it."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from meshd.server.proxy.hops import _READS, _WRITES, object_name_of
from meshwire.s3 import operations as ops

ANY_NODE = frozenset({ops.Preflight})
"""They name a key, and every node answers: what it takes is the bucket's settings."""
BY_NAME = [
    operation
    for operation in get_args(ops.Operation)
    if {"bucket", "key"} <= {field.name for field in dataclasses.fields(operation)}
]


def test_every_operation_about_a_key_goes_to_its_holders() -> None:
    assert len(BY_NAME) >= 18
    assert {*_READS, *_WRITES} == {*BY_NAME} - ANY_NODE
    assert not {*_READS} & {*_WRITES}


@pytest.mark.parametrize("operation", get_args(ops.Operation), ids=lambda operation: operation.__name__)
def test_who_changes_something_asks_the_one_that_decides(operation: Any) -> None:
    """Only what is called a reading may be answered by any holder; a listing of parts is not called one."""
    one = object.__new__(operation)
    for field in dataclasses.fields(operation):
        if field.name in ("bucket", "key"):
            object.__setattr__(one, field.name, field.name)
    name = object_name_of(one)
    if operation not in BY_NAME or operation in ANY_NODE:
        assert name is None
        return
    assert name is not None
    assert (name.bucket, name.key) == ("bucket", "key")
    reads = operation.__name__.startswith(("Get", "List")) and operation is not ops.ListParts
    assert name.reading == reads
