"""Extracts a short reason from the error text of obstore.

Pure. Only recognized parts of foreign text are passed on, truncated, because the rest may quote a request.
The first line of an obstore error ends with the reason; if it only says that sending failed, the reason is
in the debug text.
"""

from __future__ import annotations

import re
from typing import Final

_CUT: Final = 160  # characters of foreign text
_READ: Final = 16 << 10  # characters that are searched: an origin's error page may have any length
_REASON: Final = re.compile(
    r"^.*?\bin [\d.]++[^\d.\s]?s(?:, after \d+ retr[^-]*)? +- (?:Server returned non-2xx status code: )?"
)
_FORBIDDEN: Final = re.compile(r" - Server returned non-2xx status code: 40[13] ")
_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
_MESSAGE: Final = re.compile(r"<Message>([^<]*)</Message>")
_PLACE: Final = re.compile(r"uri: Some\(\s*https?://([^/\s,]+)")
_WHY: Final = (
    re.compile(r'message: "([^"]+)"'),
    re.compile(r'error: "([^"]+)"'),
    re.compile(r"(InvalidCertificate\(\s*\w+)"),
    re.compile(r"(InvalidMessage\(\s*\w+)"),
    re.compile(r"kind: (Timeout)\b"),
)
_TIMED_OUT: Final = "no answer in time"
_METADATA: Final = re.compile(
    r"https?://(169\.254\.169\.254|169\.254\.170\.2|169\.254\.170\.23|metadata\.google\.internal|"
    r"\[fd00:ec2::\w+\])[:/\s,]"
)


def debug_text(error: BaseException) -> str:
    """Return the beginning of an error's text, which is all that is searched. The text contains the whole
    response of the origin, of any length."""
    return str(error)[:_READ]


def s3_error_code(said: str) -> str:
    """Return the code of S3's error document in the text; empty without one."""
    found = _CODE.search(said)
    return found[1] if found else ""


def is_forbidden(said: str) -> bool:
    """Whether the status was 401 or 403; for listings obstore has no error class for them."""
    return _FORBIDDEN.search(said.partition("\n")[0]) is not None


def lacks_credentials(said: str) -> bool:
    """Whether the client was given no credentials, and the cloud's metadata service gave it none either."""
    return _METADATA.search(said) is not None


def failure_reason(said: str) -> str:
    """Return why a request failed, in at most 160 characters of one line."""
    line, _, debug = said[:_READ].partition("\n")
    reason = _REASON.sub("", line)
    if code := s3_error_code(line):
        status = reason.partition(":")[0]
        message = _MESSAGE.search(line)
        reason = f"{status}: {code}" + (f", {message[1]}" if message else "")
    elif why := _found(debug):
        place = _PLACE.search(debug)
        reason = f"{place[1]}: {why}" if place else why
    return reason[:_CUT]


def _found(debug: str) -> str:
    """Return why a request could not be sent; empty if the text does not say."""
    if "inner: Http" not in debug:
        return ""
    matches = (pattern.search(debug) for pattern in _WHY)
    why = next((match[1] for match in matches if match), "")
    return _TIMED_OUT if why == "Timeout" else re.sub(r"\(\s*", ": ", why)
