"""XML input and output: a bounded parser of untrusted documents, and escaping of text.

Law: no DOCTYPE, entities or processing instructions; size, depth and number of elements are bounded.
Invariant: output is well-formed XML 1.0, except for keys with control characters (`escape_key`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from xml.parsers import expat

from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import NoReturn

MAX_DEPTH = 16
MAX_ELEMENTS = 1 << 16  # 10,000 parts with five fields each

# Characters that XML 1.0 forbids, even by reference (section 2.2).
_ILLEGAL = "[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]"
_SPECIAL = re.compile(f"[&<>\"'\r]|{_ILLEGAL}")
_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;", "\r": "&#13;"}


@dataclass(slots=True)
class Element:
    """A parsed element; `text` is the character data directly inside it."""

    name: str
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def find_all(self, name: str) -> list[Element]:
        return [child for child in self.children if child.name == name]

    def find_first(self, name: str) -> Element | None:
        for child in self.children:
            if child.name == name:
                return child
        return None

    def require_known(self, once: Iterable[str], several: Iterable[str] = ()) -> None:
        """Raise MalformedXML for a child that is neither in `several` nor a single occurrence of one in
        `once`."""
        names = [child.name for child in self.children if child.name not in several]
        odd = next(
            (name for number, name in enumerate(names) if name not in once or name in names[:number]), ""
        )
        if odd:
            why = "repeated in" if odd in once else "unknown in"
            raise S3Error("MalformedXML", f"The element {odd[:64]} is {why} {self.name}; leave it out.")

    def child_text(self, name: str, default: str = "") -> str:
        """Return the text of the first child with that name."""
        child = self.find_first(name)
        return default if child is None else child.text


def parse_xml(body: bytes, *, root: str, max_bytes: int) -> Element:
    """Parse a document and return its root without namespaces. Raises S3Error: MalformedXML,
    MaxMessageLengthExceeded."""
    if len(body) > max_bytes:
        raise S3Error("MaxMessageLengthExceeded", extra={"MaxMessageLengthBytes": str(max_bytes)})
    builder = _Builder()
    # Without namespace support expat keeps prefixes, which are stripped: S3 does not check their URIs.
    parser = expat.ParserCreate("utf-8")
    parser.buffer_text = True
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.text
    parser.StartDoctypeDeclHandler = _refuse
    parser.EntityDeclHandler = _refuse
    parser.ProcessingInstructionHandler = _refuse
    try:
        parser.Parse(body, True)
    except (expat.ExpatError, ValueError):
        raise S3Error("MalformedXML") from None
    document = builder.document
    if document is None or document.name != root:
        raise S3Error("MalformedXML", f"The XML you provided should be a {root} document.")
    return document


def _refuse(*_: object) -> NoReturn:
    raise S3Error(
        "MalformedXML", "DOCTYPE, entities and processing instructions are not allowed in a request."
    )


class _Builder:
    def __init__(self) -> None:
        self.document: Element | None = None
        self._open: list[Element] = []
        self._mixed: dict[int, list[str]] = {}  # by depth: text that came in pieces
        self._count = 0

    def start(self, name: str, _attributes: dict[str, str]) -> None:
        self._count += 1
        if len(self._open) >= MAX_DEPTH or self._count > MAX_ELEMENTS:
            raise S3Error("MalformedXML", "The XML you provided has too many or too deeply nested elements.")
        element = Element(name.rpartition(":")[2] if ":" in name else name, "", [])
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.document = element
        self._open.append(element)

    def end(self, _name: str) -> None:
        element = self._open.pop()
        if self._mixed and (pieces := self._mixed.pop(len(self._open), None)):
            element.text = "".join(pieces)

    def text(self, data: str) -> None:
        element = self._open[-1]
        if element.text:
            self._mixed.setdefault(len(self._open) - 1, [element.text]).append(data)
        else:
            element.text = data


def needs_escape(text: str) -> bool:
    """Whether `escape_xml` would change `text`."""
    return _SPECIAL.search(text) is not None


def escape_xml(text: str) -> str:
    """Escape `text` as character data; characters that XML 1.0 forbids become U+FFFD."""
    if _SPECIAL.search(text) is None:
        return text
    return _SPECIAL.sub(lambda match: _ESCAPES.get(match[0], "\ufffd"), text)


def escape_key(text: str) -> str:
    """Escape `text` as character data, with character references for characters that XML 1.0 forbids, as S3
    writes keys: most parsers reject them, and none reads a different name."""
    return _SPECIAL.sub(lambda match: _ESCAPES.get(match[0]) or f"&#x{ord(match[0]):x};", text)


def escape_message(text: str) -> str:
    """Escape like `escape_xml`, but leave quotes, as S3 does in messages, because clients search for them."""
    return escape_xml(text).replace("&quot;", '"').replace("&#39;", "'")


def xml_element(name: str, text: str) -> str:
    return f"<{name}>{escape_xml(text)}</{name}>"


def optional_element(name: str, text: str) -> str:
    """Return the element, or nothing if it would be empty."""
    return xml_element(name, text) if text else ""
