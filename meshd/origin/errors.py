"""What can go wrong with an origin, in our words.

Law: a message names the bucket's origin, never a credential; foreign text is cut short.
"""

from __future__ import annotations

from meshd.errors import MeshdError


class OriginError(MeshdError):
    """Base of what an origin raises on purpose."""


class OriginMissingError(OriginError):
    """The origin has no such object."""


class OriginChangedError(OriginError):
    """The object is not the version that was asked for any more."""


class OriginRangeError(OriginError):
    """The range begins behind the object's end."""


class OriginRefusedError(OriginError):
    """The origin does not let these credentials do that, or they cannot be used."""


class OriginDownError(OriginError):
    """The origin cannot be reached, or answers errors; what is cached is served."""


class OriginPieceError(OriginDownError):
    """The origin has answered, and a disk here cannot take, or give, what came: it is to be asked again."""


class OriginKeyError(OriginError):
    """A key that origins cannot be asked for."""
