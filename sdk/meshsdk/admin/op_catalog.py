"""The node's op catalog, and modules of user ops: list, push, try and remove.

Law: one request per call; the client has no built-in knowledge of ops, and the node's errors name the line
of a module.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from meshsdk.client.request import Request, json_request
from meshsdk.errors import ConfigurationError, MeshError
from meshwire.plan.module_bundle import join_bundle
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from meshsdk.client.transport import Transport


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of an op. `kind`: a description of allowed values. `default` is meaningful only if it is
    not `required`."""

    name: str
    kind: str
    required: bool
    default: Any = None


@dataclass(frozen=True, slots=True)
class OpInfo:
    """An op. `takes` and `gives` are kinds with dtypes and shapes; `refuses` describes what makes a sample
    bad. An op that `mixes` rows of a batch can only be used in plans, as can one with several `inputs`.
    """

    op: str
    version: str
    versions: tuple[str, ...]
    summary: str
    takes: str
    gives: str
    refuses: str
    random: bool
    mixes: bool
    arguments: tuple[Argument, ...]
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpLine:
    """An op in brief; `arguments` by name."""

    op: str
    version: str
    summary: str
    takes: str
    gives: str
    arguments: tuple[str, ...]


def list_ops(transport: Transport) -> tuple[OpLine, ...]:
    """Return every op of the node, by name."""
    answer = transport.json(Request("GET", "/-/ops"))
    try:
        return tuple(OpLine(**item | {"arguments": tuple(item["arguments"])}) for item in answer["ops"])
    except (KeyError, TypeError) as error:
        raise MeshError(
            f"the node's response is not a list of ops ({error}); it may run another release"
        ) from error


def show_op(transport: Transport, name: str) -> OpInfo:
    """Return one op. Raises NotFoundError with the closest name."""
    answer = transport.json(Request("GET", f"/-/ops/{quote(name, safe='')}"))
    try:
        arguments = tuple(Argument(**item) for item in answer["arguments"])
        lists = {name: tuple(answer.get(name, ())) for name in ("versions", "inputs")}
        return OpInfo(**answer | {"arguments": arguments, **lists})
    except (KeyError, TypeError) as error:
        raise MeshError(f"the node's response is not an op ({error}); it may run another release") from error


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeVar

    from meshsdk.client.transport import Transport

    T = TypeVar("T")

PREFIX = "/-/modules"
PATIENCE = 180.0
"""Maximum seconds a node may take to import a module or to try its ops."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """A pushed module. `version` is what plans pin; `new`: whether the node did not have it before; `held`:
    what confines it on that node; `ops`: "op", "summary", "takes", "gives", "random" and "arguments" of
    each."""

    module: str
    version: str
    draft: bool
    new: bool
    held: tuple[str, ...]
    ops: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Build:
    """One version of a module's content; `source` is the SHA-256 of the file. A draft can only be used by
    its version."""

    version: str
    source: str
    pushed_ms: int
    pushed_by: str
    ops: tuple[str, ...]
    draft: bool


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """A module. `builds`: newest first; `version`: the one that the name currently refers to, empty if
    there are only drafts."""

    module: str
    version: str
    builds: tuple[Build, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one sample. Either `error` describes the failure, or the output has `size` bytes;
    `repeats`: whether a second run gave the same output (None: not tried); `result`: the output, if
    requested."""

    sample: str
    size: int = 0
    seconds: float = 0.0
    sha256: str = ""
    repeats: bool | None = None
    result: bytes | None = None
    code: str = ""
    op: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Trials:
    """The results of a trial. `ops`: (name, version) of the chain; `output`: the type of its output. Arrays
    are .npy files."""

    ops: tuple[tuple[str, str], ...]
    output: str
    results: tuple[Trial, ...]


def push_module(
    transport: Transport,
    name: str,
    source: bytes | str,
    *,
    draft: bool = False,
    wheels: Mapping[str, bytes] | None = None,
) -> Pushed:
    """Push a module of ops to the node. Pushing the same file again changes nothing.

    `wheels`: what it imports and nodes do not have, by the names of the files; each node uses those that suit
    it. Raises ConfigurationError for wheels that cannot come along, ServerError with the module's own
    traceback if it cannot be used, AccessError.
    """
    query = f"draft=1&name={quote(name, safe='')}" if draft else f"name={quote(name, safe='')}"
    text = source.encode() if isinstance(source, str) else source
    try:
        body = join_bundle(text, wheels) if wheels else text
    except PlanError as error:
        raise ConfigurationError(str(error)) from error
    query += "&bundle=1" if wheels else ""
    digest = hashlib.sha256(body).hexdigest()
    request = Request("POST", PREFIX, query, {"content-type": "text/x-python"}, body, digest)
    answer = transport.json(request, PATIENCE)
    return _read(
        lambda: Pushed(
            str(answer["module"]),
            str(answer["version"]),
            bool(answer["draft"]),
            bool(answer["new"]),
            tuple(map(str, answer["held"])),
            tuple(answer["ops"]),
        )
    )


def list_modules(transport: Transport) -> tuple[ModuleInfo, ...]:
    """Return every pushed module, by name."""
    answer = transport.json(Request("GET", PREFIX))
    return _read(lambda: tuple(_module(item) for item in answer["modules"]))


def _module(item: Mapping[str, Any]) -> ModuleInfo:
    builds = tuple(Build(**{**build, "ops": tuple(build["ops"])}) for build in item["builds"])
    return ModuleInfo(str(item["module"]), str(item["version"]), builds)


def remove_module(transport: Transport, name: str, version: str = "") -> tuple[str, ...]:
    """Remove a module, or one build, and return the removed versions. Plans that use one are rejected from
    then on. Raises NotFoundError, AccessError."""
    query = f"version={quote(version, safe='')}" if version else ""
    answer = transport.json(Request("DELETE", f"{PREFIX}/{quote(name, safe='')}", query))
    return _read(lambda: tuple(map(str, answer["removed"])))


def try_ops(
    transport: Transport,
    ops: Sequence[Mapping[str, Any]],
    samples: Sequence[str],
    *,
    seed: int = 0,
    results: bool = False,
) -> Trials:
    """Apply a chain of ops ({"op", "args", "version"} each) to objects (`s3://…`), each twice, as a plan
    would. Nothing is stored. `results`: return the outputs as well, up to 32 MiB."""
    document = {"ops": [dict(op) for op in ops], "samples": list(samples), "seed": seed, "results": results}
    answer = transport.json(json_request("POST", f"{PREFIX}/test", document), PATIENCE)
    return _read(
        lambda: Trials(
            tuple((str(op["op"]), str(op["version"])) for op in answer["ops"]),
            str(answer["output"]),
            tuple(_trial(item) for item in answer["results"]),
        )
    )


def _trial(item: Mapping[str, Any]) -> Trial:
    result = item.get("result")
    return Trial(**{**item, "result": None if result is None else base64.b64decode(result)})


def _read(make: Callable[[], T]) -> T:
    try:
        return make()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MeshError(
            f"cannot parse the server's response ({error!r}); upgrade the older of SDK and server"
        ) from error
