"""Methods, errors and messages of the one typed call between the processes of a node.

A method names its request, its reply and, for a stream, its updates. A message is a JSON array with a number
that the client chooses, so replies may arrive in any order. An error crosses as a value and is rebuilt as the
same class.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

import msgspec

from meshd.errors import MeshdError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Q = TypeVar("Q")
R = TypeVar("R")
U = TypeVar("U")
MAX_CALLS: Final = 1024
CANCEL: Final = ""  # the method of a message that cancels a call, or releases what its reply holds
NOTIFICATION: Final = 0  # the number of a message without a reply


class RpcRequest(msgspec.Struct, frozen=True, array_like=True):
    """A message from a client; `body` has the method's request type. `trace`: the span that the call belongs
    to (`tracing.context_text`)."""

    number: int
    method: str
    body: msgspec.Raw
    trace: str = ""


class RpcResponse(msgspec.Struct, frozen=True, array_like=True):
    """A message from a server: updates, then either the reply or the error."""

    number: int
    kind: Literal["reply", "update", "error"]
    body: msgspec.Raw


decode_request: Final = msgspec.json.Decoder(RpcRequest).decode
decode_response: Final = msgspec.json.Decoder(RpcResponse).decode


class Method(Generic[Q, R]):
    """A call: its name on the socket, and the types of its request and its reply.

    `ordered`: the server finishes each such call before it reads the next message of the connection. The call
    runs to its end even if its caller gives up or disconnects.
    """

    def __init__(self, name: str, request: Any, reply: Any, *, ordered: bool = False) -> None:
        """The types are Structs, unions of tagged Structs, or None."""
        self.name, self.ordered = name, ordered
        self.decode_request: Callable[[msgspec.Raw], Q] = msgspec.json.Decoder(request).decode
        self.decode_reply: Callable[[msgspec.Raw], R] = msgspec.json.Decoder(reply).decode

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class StreamMethod(Method[Q, R], Generic[Q, R, U]):
    """A call whose handler sends updates before its reply."""

    def __init__(self, name: str, request: Any, reply: Any, update: Any) -> None:
        super().__init__(name, request, reply)
        self.decode_update: Callable[[msgspec.Raw], U] = msgspec.json.Decoder(update).decode


class ProcessLostError(MeshdError, ConnectionError):
    """The other process is not running, or ended before it answered."""


class ErrorValue(msgspec.Struct, frozen=True):
    """An error as a value: the name of its class, and its message or its document."""

    kind: str
    message: str
    document: dict[str, Any] | None = None


class ErrorTypes:
    """The errors that cross one socket. A class is rebuilt from its message, or with `from_document` from the
    result of `to_document`; a subclass crosses as its nearest listed base.

    `unexpected` creates the error that a caller gets for any other exception, which the server logs; it must
    be of a listed class. `lost` creates, from a message, the error of a call whose process is not running or
    ended.
    """

    def __init__(
        self,
        types: Iterable[type[Exception]] = (),
        *,
        unexpected: Callable[[], Exception] = lambda: MeshdError(
            "the call failed; the node's log has the details"
        ),
        lost: Callable[[str], Exception] = ProcessLostError,
    ) -> None:
        self.unexpected, self.lost = unexpected, lost
        self._types = {kind.__name__: kind for kind in (*types, type(unexpected()))}

    def __repr__(self) -> str:
        return f"<ErrorTypes {', '.join(self._types)}>"

    def encode(self, error: BaseException) -> ErrorValue | None:
        """Return the error as a value; None if its class is not listed."""
        for kind in type(error).__mro__:
            if self._types.get(kind.__name__) is kind:
                to_document = getattr(error, "to_document", None)
                document = None if to_document is None else to_document()
                return ErrorValue(kind.__name__, str(error), document)
        return None

    def decode(self, value: ErrorValue) -> Exception:
        """Return the error of a value; the unexpected one if its class is not listed."""
        kind: Any = self._types.get(value.kind)
        if kind is None:
            return self.unexpected()
        error: Exception = (
            kind(value.message) if value.document is None else kind.from_document(value.document)
        )
        return error


decode_error: Final = msgspec.json.Decoder(ErrorValue).decode


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
