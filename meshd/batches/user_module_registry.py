"""Modules of user ops: push, list, pin and remove.

Law: changing modules requires mesh:PushOp or mesh:DeleteOp; anybody who may read data may use them.
Declarations are read by running the module in the sandbox, never in this process. Invariant: only code
pushed under a name runs under that name; the name resolves to its latest build only until a plan or view
is created.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from meshd.auth.required_actions import RequiredAction
from meshd.control.user_modules import Build, PushedModule
from meshd.core.api_errors import BatchError
from meshd.core.document_store import RESERVED_BUCKET, asset_key
from meshd.transform.errors import UnknownOpError
from meshd.transform.sandbox.sandbox_process import SandboxDiedError, UnusableModuleError, read_declarations
from meshd.transform.sandbox.user_op_definitions import MODULES, encode_module, missing_build_error
from meshwire.errors import S3Error
from meshwire.plan.module_bundle import split_bundle
from meshwire.plan.op_declarations import MAX_SOURCE, VERSION_PREFIX, checked_module, is_user_op, split_name
from meshwire.strict_json import PlanError, join_path, shown_value, suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.auth.authorizer import Authorizer
    from meshd.auth.identity import Caller
    from meshd.control.user_modules import ModuleTable
    from meshd.core.document_store import DocumentStore
    from meshd.store.api import ObjectStore
    from meshd.transform.op_types import OpDefinition
    from meshd.transform.sandbox.sandbox_process import SandboxPolicy
    from meshd.util.clock import Clock
    from meshwire.plan.module_bundle import SharedObject
    from meshwire.plan.op_declarations import OpDeclaration
    from meshwire.plan.plan_spec import OpSpec, PlanSpec

MAX_BUILDS: Final = 100
MAX_DRAFTS: Final = 8
"""Limit per module; the oldest draft is removed when another one is pushed."""
_MODULE_HELP: Final = (
    "a node runs a module with its own libraries, without files or network; the module must import by name "
    "everything that it does not define itself, such as `op` from meshsdk.userops. If the nodes lack a "
    "library, send it with the module (mesh op push --wheel NAME), or install it beside meshd on every node"
)
_DECORATOR_HELP: Final = (
    "a function becomes an op by the decorator `op` from meshsdk.userops, which takes the types of input and "
    "output by name: write `from meshsdk.userops import image, op` at the top of the file and "
    "`@op(input=image('h', 'w', 3), output=image('h', 'w', 3))` above the function, whose own arguments are "
    "keyword-only parameters (docs/userops.md)"
)
_ABOUT_DECORATOR: Final = re.compile(r"^ops: |^\s*@[\w.]*op\b|PlanError: |name 'op' |from 'meshsdk", re.M)
_AT_A_TIME = 2  # modules whose declarations one worker reads at a time


class UserModules:
    """Modules of user ops, for one worker. If `confinement` is None, this node runs no user ops."""

    def __init__(
        self,
        table: ModuleTable,
        store: ObjectStore,
        catalog: DocumentStore,
        access: Authorizer,
        clock: Clock,
        confinement: SandboxPolicy | None,
    ) -> None:
        self._table, self._store, self._catalog = table, store, catalog
        self._access, self._clock = access, clock
        self._confinement = confinement
        self._reading = asyncio.Semaphore(_AT_A_TIME)

    def __repr__(self) -> str:
        return f"<UserModules {len(self._table.list_all())} modules>"

    # --- names to versions -----------------------------------------------------------------------------

    def pin_versions(self, spec: PlanSpec) -> PlanSpec:
        """Return the spec with the version of every user op; each version exists on this node.

        Raises UnknownOpError, UnknownBuildError, BatchError NotImplemented.
        """
        if not any(is_user_op(op.op) for op in spec.ops):
            return spec
        ops = [self._pin_version(op, f"ops[{index}]") for index, op in enumerate(spec.ops)]
        return replace(spec, ops=tuple(ops))

    def _pin_version(self, op: OpSpec, path: str) -> OpSpec:
        if not is_user_op(op.op):
            return op
        version = op.version or self.latest_version(op.op, path)
        self.require_build(op.op, version, path)
        return replace(op, version=version)

    def latest_version(self, name: str, path: str = "") -> str:
        """Return the version a name resolves to now. Raises UnknownOpError, BatchError NotImplemented."""
        self._require_on()
        module, function = split_name(name)
        found = self._table.get(module)
        build = None if found is None else found.latest
        if build is None or function not in build.ops:
            raise UnknownOpError(
                join_path(path, "op"), f"there is no op {shown_value(name)}{suggestion(name, self._names())}"
            )
        return build.version

    def _names(self) -> list[str]:
        found = [(module.name, module.latest) for module in self._table.list_all().values()]
        return [f"{name}/{op}" for name, build in found if build is not None for op in build.ops]

    def require_build(self, name: str, version: str, path: str = "") -> None:
        """Raises UnknownBuildError unless the build was pushed under the name and was not removed.

        Content alone is not enough: anybody's asset could be a module. Raises BatchError NotImplemented.
        """
        self._require_on()
        module = self._table.get(split_name(name)[0])
        if module is None or version not in {build.version for build in module.builds}:
            raise missing_build_error(name, version, path)

    def definitions(self) -> list[OpDefinition]:
        """Return the latest build of every op, sorted by name."""
        found = []
        for name in sorted(self._names()) if self._confinement is not None else ():
            try:
                found.append(MODULES.find_op(name, self.latest_version(name), ""))
            except PlanError:  # removed since the names were listed
                continue
        return found

    # --- modules ---------------------------------------------------------------------------------------

    async def push(
        self, caller: Caller, name: str, body: bytes, *, draft: bool = False, bundle: bool = False
    ) -> dict[str, Any]:
        """Store a module and return the answer to `POST /-/modules`. Pushing the same file again is a no-op.

        Raises BatchError AccessDenied, InvalidPlan (with the module's own traceback), TooLarge, Busy.
        """
        self._require_on()
        try:
            checked_module(name)
        except PlanError as error:
            raise BatchError("BadRequest", str(error)) from error
        self._require(caller, "mesh:PushOp", name)
        try:
            source, wheels, objects = split_bundle(body) if bundle else (body, {}, ())
        except PlanError as error:
            raise BatchError("BadRequest", str(error)) from error
        text = _decoded_source(source)
        ops, held = await self._read_declarations(name, source, wheels, objects)
        self._check_limits(ops)
        data = encode_module(text, ops, wheels, objects)
        digest = hashlib.sha256(data).hexdigest()
        version = VERSION_PREFIX + digest
        await self._catalog.put_shared(asset_key(digest), data)
        build = Build(
            version,
            hashlib.sha256(source).hexdigest(),
            self._clock.now_ms(),
            caller.identity.user_id,
            tuple(sorted(ops)),
            draft,
        )
        before: list[PushedModule] = []

        def add(present: PushedModule) -> PushedModule:
            before[:] = [present]
            return _with_build(present, build)

        after = await self._table.update_module(name, add)
        await self._drop(_versions([before[0]]) - _versions([after]))
        return {
            "module": name,
            "version": version,
            "draft": draft,
            "new": before[0] != after,
            "held": list(held),
            "ops": [_describe_op(name, declared) for _, declared in sorted(ops.items())],
        }

    async def _read_declarations(
        self, name: str, source: bytes, wheels: Mapping[str, bytes], objects: Sequence[SharedObject]
    ) -> tuple[dict[str, OpDeclaration], tuple[str, ...]]:
        assert self._confinement is not None
        async with self._reading:
            try:
                return await asyncio.to_thread(
                    read_declarations, name, source, self._confinement, wheels, objects
                )
            except (UnusableModuleError, SandboxDiedError) as error:
                raise BatchError(
                    "InvalidPlan",
                    f"{name}.py cannot be used: {error}",
                    help=_help_for(str(error)),
                ) from error

    def _check_limits(self, ops: Mapping[str, OpDeclaration]) -> None:
        assert self._confinement is not None
        for declared in ops.values():
            if declared.seconds > self._confinement.seconds or declared.memory > self._confinement.memory:
                raise BatchError(
                    "InvalidPlan",
                    f"{declared.name} declares {declared.seconds:g} s and {declared.memory} bytes; this node "
                    f"allows {self._confinement.seconds:g} s per sample and {self._confinement.memory} bytes",
                    help="declare less in @op(…), or start the node with a larger --user-op-seconds or "
                    "--user-op-memory",
                )

    def list_all(self, caller: Caller) -> list[dict[str, Any]]:
        """Return every module with its builds, latest first; for a bounded key, those within its bounds."""
        found = sorted(self._table.list_all().items())
        return [
            _describe_module(module)
            for name, module in found
            if self._access.is_within_bounds(caller, _need("mesh:ListOps", name))
        ]

    async def remove(self, caller: Caller, name: str, version: str = "") -> dict[str, Any]:
        """Remove a module, or one build of it. Plans that use it are refused from then on.

        Raises BatchError AccessDenied, NoSuchKey.
        """
        self._require(caller, "mesh:DeleteOp", name)
        removed: list[Build] = []

        def take(present: PushedModule) -> PushedModule:
            removed[:] = [build for build in present.builds if version in ("", build.version)]
            return PushedModule(name, tuple(build for build in present.builds if build not in removed))

        await self._table.update_module(name, take)
        if not removed:
            what = f"build {shown_value(version)} of {name!r}" if version else f"module {shown_value(name)}"
            raise BatchError(
                "NoSuchKey",
                f"there is no {what}{suggestion(name, self._table.list_all())}",
                help="list the modules with: mesh op modules",
            )
        await self._drop({build.version for build in removed})
        return {"module": name, "removed": [build.version for build in removed]}

    async def _drop(self, versions: set[str]) -> None:
        """Delete builds that no module has any more."""
        for version in versions - _versions(self._table.list_all().values()):
            MODULES.forget(version)
            await self._store.delete(RESERVED_BUCKET, asset_key(version.removeprefix(VERSION_PREFIX)))

    # --- authorization and limits ----------------------------------------------------------------------

    def _require(self, caller: Caller, action: str, name: str) -> None:
        need = _need(action, name)
        try:
            self._access.require_action(caller.identity, need, caller.context)
        except S3Error as error:
            raise BatchError(
                "AccessDenied",
                error.message,
                help=f"requires root, or a policy that allows {action} on {need.arn}",
            ) from error

    def _require_on(self) -> None:
        if self._confinement is None:
            raise BatchError(
                "NotImplemented",
                "this node does not run user ops",
                help="it was started with --user-ops off",
            )


def _need(action: str, module: str) -> RequiredAction:
    return RequiredAction(action, arn=f"arn:aws:mesh:::op/{module}")


def _help_for(error: str) -> str:
    """Return what to do about a module that cannot be used."""
    if error.startswith("SyntaxError"):
        return ""
    return _DECORATOR_HELP if _ABOUT_DECORATOR.search(error) else _MODULE_HELP


def _decoded_source(source: bytes) -> str:
    if len(source) > MAX_SOURCE:
        raise BatchError("TooLarge", f"the module has {len(source)} bytes; at most {MAX_SOURCE} are allowed")
    try:
        return source.decode()
    except UnicodeDecodeError as error:
        raise BatchError("InvalidPlan", f"the file is not UTF-8 (byte {error.start})") from error


def _with_build(present: PushedModule, build: Build) -> PushedModule:
    """Return the module with `build` as its latest build, or as a draft; unchanged if it is that already.

    Raises BatchError TooLarge.
    """
    latest = present.latest
    known = {item.version: item for item in present.builds}
    if build.version in known and (build.draft or (latest is not None and latest.version == build.version)):
        return present
    builds = [item for item in present.builds if item.version != build.version]
    drafts = [item for item in builds if item.draft]
    if build.draft and len(drafts) >= MAX_DRAFTS:
        builds.remove(drafts[0])
    if not build.draft and len(builds) - len(drafts) >= MAX_BUILDS:
        raise BatchError(
            "TooLarge",
            f"{present.name} has {MAX_BUILDS} builds, which is the maximum",
            help=f"remove a build that no plan needs any more: mesh op rm {present.name} --version "
            f"{builds[0].version}",
        )
    return PushedModule(present.name, (*builds, build))


def _versions(modules: Any) -> set[str]:
    return {build.version for module in modules for build in module.builds}


def _describe_op(module: str, declared: OpDeclaration) -> dict[str, Any]:
    return {
        "op": f"{module}/{declared.name}",
        "summary": declared.summary,
        "takes": declared.input_signature,
        "gives": declared.output_signature,
        "random": declared.random,
        "arguments": [argument.document() for argument in declared.arguments],
    }


def _describe_module(module: PushedModule) -> dict[str, Any]:
    latest = module.latest
    return {
        "module": module.name,
        "version": "" if latest is None else latest.version,
        "builds": [
            {
                "version": build.version,
                "source": build.source,
                "pushed_ms": build.pushed_ms,
                "pushed_by": build.pushed_by,
                "ops": [f"{module.name}/{op}" for op in build.ops],
                "draft": build.draft,
            }
            for build in reversed(module.builds)
        ],
    }
