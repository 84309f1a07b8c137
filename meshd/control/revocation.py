"""Revocation of temporary credentials, as users, keys and roles record it."""

from __future__ import annotations

import msgspec


class Revocation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which temporary credentials are revoked: those of an earlier `round`, and those issued `before`
    (seconds since 1970). `at_ms`: when this was last changed."""

    round: int = 0
    before: int = 0
    at_ms: int = 0
