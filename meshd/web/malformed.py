"""What a client sends that is no HTTP, or more of it than is read: in S3's words.

Law: the parser's own words stay inside; they quote what was sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp.http_exceptions import BadStatusLine, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import _ErrInfo

from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from aiohttp.http import RawRequestMessage
    from aiohttp.streams import StreamReader

_TOO_LARGE: Final = 431  # RFC 6585 §5; S3's own table has 400 for the code


def is_malformed(message: RawRequestMessage | _ErrInfo) -> bool:
    """Whether a parser's message stands for what it could not read."""
    return isinstance(message, _ErrInfo)


def endless_head(limit: int) -> tuple[_ErrInfo, StreamReader]:
    """The message that stands for a head of more than `limit` bytes."""
    error = LineTooLong(b"", limit)
    return _ErrInfo(status=400, exc=error, message=error.message), EMPTY_PAYLOAD


def described(error: BaseException | None, status: int) -> tuple[S3Error, int]:
    """(error, status) for what aiohttp could not parse or did not catch."""
    if isinstance(error, LineTooLong):
        return S3Error("RequestHeaderSectionTooLarge"), _TOO_LARGE
    if status == 400 and not isinstance(error, BadStatusLine):
        return S3Error("BadRequest", "An error occurred when parsing the HTTP request."), 400
    if status == 400:
        return S3Error("BadRequest", "The request line is not valid HTTP."), 400
    return S3Error("InternalError"), 500
