"""The names that modules of user ops import: the `op` decorator, field types and keyed randomness.

Law: importing this module needs only the standard library and numpy, so a user module runs on every node.
"""

from __future__ import annotations

from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.op_declarations import BYTES
from meshwire.plan.op_decorator import BadSample, array, image, op

__all__ = ["BYTES", "BadSample", "KeyedRandom", "array", "image", "op"]
