"""What a module of one's own ops is written with, and how it gets to the nodes.

Law: importing this needs the standard library and numpy alone, so that a module runs wherever it is pushed.
"""

from __future__ import annotations

from meshwire.declarations import BYTES
from meshwire.randomness import KeyedRandom
from meshwire.userops import BadSample, array, image, op

__all__ = ["BYTES", "BadSample", "KeyedRandom", "array", "image", "op"]
