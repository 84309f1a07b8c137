"""ObstoreOrigin: S3, Google and Azure storage, web servers and folders, accessed through obstore.

obstore retries a request for a few seconds; after that the caller gets a clear error. Chunk sizes grow with
the measured throughput, so that a reader waits only some milliseconds for a chunk. A key that obstore would
rewrite is refused, never requested.
Of an error text of obstore only recognized parts are passed on, truncated, because the rest may quote a
request. Its first line ends with the reason; if that only says that sending failed, the debug text has it.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import asynccontextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

import obstore
from obstore import exceptions

from meshd.origins.client.origin_api import (
    ObjectFacts,
    OriginChangedError,
    OriginDownError,
    OriginEntry,
    OriginError,
    OriginKeyError,
    OriginListing,
    OriginMissingError,
    OriginRangeError,
    OriginRefusedError,
    OriginResponse,
    list_page,
)
from meshd.origins.client.whole_listing import RESPONSE_SECONDS, WholeListing
from meshd.telemetry import metrics
from meshd.util.timeouts import timeout

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping, Sequence


MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 64 << 10, 1 << 20  # bytes of a chunk
_WAIT: Final = 0.005  # seconds that a chunk should take
_FAIR: Final = 50e6  # bytes per second, until measured
_TELLING: Final = 1 << 20  # minimum bytes of a response for a measurement


class ChunkSizer:
    """Chooses chunk sizes from the measured throughput. One instance per origin."""

    def __init__(self) -> None:
        self._rate = _FAIR

    def __repr__(self) -> str:
        return f"<ChunkSizer of {self._rate / 1e6:.1f} MB/s>"

    def chunk_bytes(self) -> int:
        """Return the bytes of a chunk of the next response."""
        return min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, int(self._rate * _WAIT)))

    def record_transfer(self, size: int, seconds: float) -> None:
        """Record that `size` bytes of a response arrived after `seconds` of waiting."""
        if size >= _TELLING:
            self._rate = size / max(seconds, 1e-6)


LISTING_SECONDS: Final = 300.0
"""Maximum seconds for a page of a listing: an origin that repeats its own pages would never end."""
_AT_ONCE: Final = 16 << 20  # larger objects are uploaded in parts
_MOST_PARTS: Final = 9_000
_read = metrics.origin_bytes.labels("read")
# obstore reports an unsatisfiable range only in the message, which contains URLs: a port may contain 416.
_UNSATISFIABLE: Final = re.compile(
    r"\b416 (?:Range|Requested Range) Not Satisfiable|status(?: code)?:? 416\b|<Code>InvalidRange</Code>"
    r"|\bStartTooLarge\b|\b[Ii]nvalid range\b"
)
_HEADERS: Final = {
    "Content-Type": "content-type",
    "Content-Disposition": "content-disposition",
    "Content-Encoding": "content-encoding",
    "Content-Language": "content-language",
    "Cache-Control": "cache-control",
}
_SPELLED: Final = {lower: name for name, lower in _HEADERS.items()}
_SKEWED: Final = {"RequestTimeTooSkewed", "RequestExpired"}
_OVER: Final = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}  # some origins answer 400
_REFUSED = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)


class ObstoreOrigin:
    """An `Origin` on an obstore store. `name` is the bucket's name in the mesh. `sorted_pages`: listings come
    in byte order, page by page (S3's do; a folder's do not); `ranged`: a listing can begin at any name.
    `plain`: the origin stores bytes without headers."""

    def __init__(
        self,
        name: str,
        store: Any,
        *,
        sorted_pages: bool,
        ranged: bool = False,
        listed: bool = True,
        plain: bool = False,
    ) -> None:
        self._name, self._store, self._sorted, self._listed = name, store, sorted_pages, listed
        self._plain, self._ranged = plain, ranged
        self._chunk_sizer = ChunkSizer()

    def __repr__(self) -> str:
        return f"<ObstoreOrigin of {self._name}>"

    async def get(self, key: str, offset: int, length: int, *, etag: str = "") -> OriginResponse:
        check_key(key)
        options: dict[str, Any] = {"range": (offset, offset + length)}
        if etag and not etag.startswith("~"):
            options["if_match"] = f'"{etag}"'
        try:
            found = await obstore.get_async(self._store, key, options=options)
        except BaseException as error:
            if offset == 0 and _is_range(error):  # an empty object has no valid range
                return OriginResponse(await self.head(key), 0, 0, _nothing())
            raise self._translate_error(error, key) from error
        facts = _facts(found.meta, found.attributes)
        if etag and facts.etag != etag:
            raise OriginChangedError(f"{key!r} changed at its origin")
        start, end = found.range
        return OriginResponse(facts, start, end - start, self._pieces(found, key))

    async def _pieces(self, found: Any, key: str) -> AsyncGenerator[bytes, None]:
        came, waited, asked = 0, 0.0, time.monotonic()
        try:
            async for piece in found.stream(min_chunk_size=self._chunk_sizer.chunk_bytes()):
                waited += time.monotonic() - asked
                came += len(piece)
                yield piece
                asked = time.monotonic()
        except Exception as error:
            raise self._translate_error(error, key) from error
        finally:
            _read.inc(came)
            self._chunk_sizer.record_transfer(came, waited)

    async def head(self, key: str) -> ObjectFacts:
        check_key(key)
        try:
            found = await obstore.get_async(self._store, key, options={"head": True})
        except BaseException as error:
            raise self._translate_error(error, key) from error
        return _facts(found.meta, found.attributes)

    async def list(self, prefix: str, delimiter: str, after: str, limit: int) -> OriginListing:
        async with self._listing(prefix):
            if delimiter == "/":
                return list_page(await self._level(prefix), prefix, delimiter, after, limit)
            if not self._sorted:
                return list_page(await self._everything(prefix), prefix, delimiter, after, limit)
            return await self._walk(prefix, delimiter, after, limit)

    async def list_all(self, prefix: str) -> Sequence[OriginEntry]:
        begin = _offset(_before(prefix)) if prefix else ""
        whole = WholeListing(self._store, self._name, prefix, begin, _offset, ranged=self._ranged)
        async with self._listing(prefix, in_ranges=self._sorted):
            if self._sorted:
                return [_entry(each) for each in await whole.objects()]
            found = await self._everything(prefix)
            return sorted((each for each in found if each.key.startswith(prefix)), key=lambda each: each.key)

    @asynccontextmanager
    async def _listing(self, prefix: str, *, in_ranges: bool = False) -> AsyncIterator[None]:
        """Translate the errors of a listing, and limit its time; one in ranges limits each response."""
        if "/" in prefix:
            check_key(prefix.rpartition("/")[0])
        if not self._listed:
            raise OriginRefusedError(f"the origin of {self._name} is a web server, which cannot be listed")
        try:
            async with timeout(None if in_ranges else LISTING_SECONDS):
                yield
        except OriginError:
            raise
        except TimeoutError:
            metrics.origin_errors.inc()
            most = RESPONSE_SECONDS if in_ranges else LISTING_SECONDS
            raise OriginDownError(
                f"the origin of {self._name} did not finish a listing within {most:.0f} s"
            ) from None
        except BaseException as error:
            raise self._translate_error(error, prefix) from error

    async def _level(self, prefix: str) -> Sequence[OriginEntry | str]:
        """Return everything directly below a folder, and its subfolders."""
        folder = prefix.rpartition("/")[0]
        found = await obstore.list_with_delimiter_async(self._store, folder or None)
        objects = [_entry(each) for each in found["objects"]]
        return [*objects, *(f"{name.rstrip('/')}/" for name in found["common_prefixes"])]

    async def _everything(self, prefix: str) -> Sequence[OriginEntry]:
        folder = prefix.rpartition("/")[0]
        pages = obstore.list(self._store, folder or None, chunk_size=1000)
        return [_entry(each) async for page in pages for each in page]

    async def _walk(self, prefix: str, delimiter: str, after: str, limit: int) -> OriginListing:
        """List a page from a store with ordered listings, starting at `after` without reading earlier
        keys."""
        folder = prefix.rpartition("/")[0]
        start = _offset(max(after, _before(prefix)) if prefix else after)
        entries: list[OriginEntry] = []
        prefixes: list[str] = []
        while True:
            jump = ""
            pages = obstore.list(
                self._store, folder or None, offset=start or None, chunk_size=min(1000, limit + 1)
            )
            async for page in pages:
                for each in page:
                    key = each["path"]
                    if key <= after:  # the start can be before `after`
                        continue
                    if not key.startswith(prefix):
                        if key > prefix:
                            return OriginListing(tuple(entries), tuple(prefixes))
                        continue
                    if len(entries) + len(prefixes) == limit:
                        last = max(entries[-1].key if entries else "", prefixes[-1] if prefixes else "")
                        return OriginListing(tuple(entries), tuple(prefixes), last)
                    at = key.find(delimiter, len(prefix)) if delimiter else -1
                    if at < 0:
                        entries.append(_entry(each))
                        continue
                    common = key[: at + len(delimiter)]
                    if common > after:
                        prefixes.append(common)
                    jump = common + "\U0010ffff"
                    break
                if jump:
                    break
            if not jump:
                return OriginListing(tuple(entries), tuple(prefixes))
            start = jump

    async def put(self, key: str, body: AsyncIterable[bytes], facts: ObjectFacts) -> str:
        check_key(key)
        if self._plain and facts.metadata:
            raise OriginKeyError(f"the origin of {self._name} is a folder, which cannot store metadata")
        headers = {_SPELLED[name]: value for name, value in facts.headers.items() if name in _SPELLED}
        attributes = {} if self._plain else {**headers, **facts.metadata}
        try:
            if facts.size <= _AT_ONCE:
                whole = b"".join([bytes(piece) async for piece in body])
                done = await obstore.put_async(
                    self._store, key, whole, attributes=attributes, use_multipart=False
                )
            else:
                chunk = max(8 << 20, -(-facts.size // _MOST_PARTS))
                done = await obstore.put_async(
                    self._store, key, body, attributes=attributes, chunk_size=chunk, max_concurrency=4
                )
        except BaseException as error:
            raise self._translate_error(error, key) from error
        metrics.origin_bytes.labels("written").inc(facts.size)
        return (done["e_tag"] or "").strip('"')

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        try:
            await obstore.delete_async(self._store, list(keys))
        except FileNotFoundError:
            if len(keys) > 1:  # a folder store stops at the first missing key
                await asyncio.gather(*[self.delete([key]) for key in keys])
        except BaseException as error:
            raise self._translate_error(error, keys[0]) from error

    def _translate_error(self, error: BaseException, key: str) -> BaseException:
        """Translate an error of obstore; errors of other origin stay as they are."""
        if isinstance(error, OriginError | asyncio.CancelledError | KeyboardInterrupt | SystemExit):
            return error
        if isinstance(error, FileNotFoundError | exceptions.NotFoundError):
            return OriginMissingError(f"the origin of {self._name} has no {key[:200]!r}")
        if isinstance(error, exceptions.PreconditionError):
            return OriginChangedError(f"{key[:200]!r} changed at its origin")
        if _is_range(error):
            return OriginRangeError("the range begins after the object's end")
        if isinstance(error, NotImplementedError | exceptions.NotSupportedError):
            return OriginKeyError(f"the origin of {self._name} does not support this operation")
        metrics.origin_errors.inc()
        if not isinstance(error, exceptions.BaseError | OSError | ValueError):
            return error
        said = debug_text(error)
        code = s3_error_code(said)
        if code in _SKEWED:
            return OriginRefusedError(
                f"the origin of {self._name} refuses the request ({code}): set this node's clock"
            )
        if isinstance(error, _REFUSED) or code in _OVER or is_forbidden(said):
            why = f" ({code})" if code else ""
            return OriginRefusedError(
                f"the origin of {self._name} refuses the request{why}: check its credentials and "
                "their permissions"
            )
        reason = failure_reason(said)
        if lacks_credentials(said):
            return OriginDownError(
                f"the origin of {self._name} has no credentials, and this machine provides none ({reason}): "
                "give it credentials by name (for a MeshDataset: source.secretRef), or `anonymous` if "
                "everybody may read it"
            )
        return OriginDownError(f"the origin of {self._name} failed: {reason}")


def check_key(key: str) -> None:
    """Raise OriginKeyError for a key that obstore would rewrite."""
    if any(_is_odd(segment) for segment in key.split("/")):
        raise OriginKeyError(
            f"{key[:200]!r} is not a valid key at an origin: it may have no empty, `.` or `..` segment, no "
            "slash at the end and no control characters"
        )


def _is_odd(segment: str) -> bool:
    """Whether obstore would rewrite this segment between two slashes."""
    return segment in {"", ".", ".."} or any(ord(c) < 32 or c == "\x7f" for c in segment)


def _before(prefix: str) -> str:
    """Return the greatest text that sorts before every key with this prefix, as far as is needed."""
    last = ord(prefix[-1])
    last -= 1 + (prefix[-1] == "0")  # before `0` comes the slash, which ends a name
    return prefix[:-1] + (chr(last) + "\U0010ffff" if last > 31 and last != 0xDFFF else "")


def _offset(after: str) -> str:
    """Return the key at which a listing of the keys after `after` starts: `after` itself, or an earlier name
    if obstore cannot handle `after`."""
    sound = list(takewhile(lambda segment: not _is_odd(segment), after.split("/")))
    return "/".join(sound)


def _is_range(error: BaseException) -> bool:
    return (
        isinstance(error, exceptions.BaseError | OSError | ValueError)
        and _UNSATISFIABLE.search(debug_text(error)) is not None
    )


def _facts(meta: Mapping[str, Any], attributes: Mapping[str, str]) -> ObjectFacts:
    headers = {lower: attributes[name] for name, lower in _HEADERS.items() if name in attributes}
    known = {*_HEADERS, "Storage-Class"}
    metadata = {name.lower(): value for name, value in attributes.items() if name not in known}
    return ObjectFacts(meta["size"], _etag(meta), _modified_ms(meta), headers, metadata)


def _etag(meta: Mapping[str, Any]) -> str:
    """Return the ETag. Without one at the origin, it is made of size and time; `~` marks that the origin
    cannot compare it."""
    given = meta["e_tag"]
    if given and not given.startswith("W/"):
        return str(given).strip('"')
    return f"~{meta['size']:x}-{_modified_ms(meta):x}"


def _modified_ms(meta: Mapping[str, Any]) -> int:
    return int(meta["last_modified"].timestamp() * 1000)


def _entry(meta: Mapping[str, Any]) -> OriginEntry:
    return OriginEntry(meta["path"], meta["size"], _etag(meta), _modified_ms(meta))


async def _nothing() -> AsyncGenerator[bytes, None]:
    none: tuple[bytes, ...] = ()
    for piece in none:
        yield piece


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
    elif why := _failure_reason(debug):
        place = _PLACE.search(debug)
        reason = f"{place[1]}: {why}" if place else why
    return reason[:_CUT]


def _failure_reason(debug: str) -> str:
    """Return why a request could not be sent; empty if the text does not say."""
    if "inner: Http" not in debug:
        return ""
    matches = (pattern.search(debug) for pattern in _WHY)
    why = next((match[1] for match in matches if match), "")
    return _TIMED_OUT if why == "Timeout" else re.sub(r"\(\s*", ": ", why)
