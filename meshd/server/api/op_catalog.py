"""Op API: the catalog of transform ops (`/-/ops`) and user modules (`/-/modules`).

Handlers parse requests, call a service and answer JSON, with the errors of the batch API. Any signed caller
may read the catalog, which contains none of the node's data. The body of a pushed module is its source file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from meshd.core.api_errors import BatchError
from meshd.server.api import reply_types
from meshd.server.api.json_api import caller_of, parse_query
from meshd.server.http_route import HttpRoute
from meshd.server.openapi_operations import operation
from meshd.transform import op_chain, registry
from meshd.transform.errors import UnknownOpError
from meshwire.plan.op_declarations import is_user_op

if TYPE_CHECKING:
    from meshd.auth.identity import Identity
    from meshd.batches.op_trials import OpTrials
    from meshd.batches.user_module_registry import UserModules
    from meshd.server.api.json_api import JsonApi
    from meshd.server.request import MeshRequest
    from meshd.server.response import Reply

assert op_chain  # importing it registers the built-in ops
OPS_PREFIX = "/-/ops"


class OpCatalogEndpoint:
    """The op catalog. One instance per worker; stateless."""

    def __init__(self, user_ops: UserModules, api: JsonApi) -> None:
        self._user_ops, self._api = user_ops, api

    def routes(self) -> list[HttpRoute]:
        guarded = self._api.handle_errors
        return [
            HttpRoute("GET", OPS_PREFIX, guarded(self.list_all)),
            HttpRoute("GET", f"{OPS_PREFIX}/", guarded(self.show)),
        ]

    @operation("/-/ops", "The op library", reply=reply_types.Ops)
    async def list_all(self, request: MeshRequest, identity: Identity) -> Reply:
        return self._api.reply_json({"ops": registry.list_ops(self._user_ops.definitions())})

    @operation("/-/ops/{op}", "An op with its arguments")
    async def show(self, request: MeshRequest, identity: Identity) -> Reply:
        name = unquote(request.raw_path.partition("?")[0].removeprefix(f"{OPS_PREFIX}/"))
        try:
            version = self._user_ops.latest_version(name) if is_user_op(name) else ""
            return self._api.reply_json(registry.describe_op(registry.find(name, version, "")))
        except UnknownOpError as error:
            raise BatchError("NoSuchKey", error.message, help="list the ops with `mesh op ls`") from error


MODULES_PREFIX = "/-/modules"


class UserModuleEndpoint:
    """The API of user modules. One instance per worker."""

    def __init__(self, user_ops: UserModules, trials: OpTrials, api: JsonApi) -> None:
        self._user_ops, self._trials, self._api = user_ops, trials, api

    def routes(self) -> list[HttpRoute]:
        guarded = self._api.handle_errors
        return [
            HttpRoute("POST", f"{MODULES_PREFIX}/test", guarded(self._api.limit_concurrency(self.test))),
            HttpRoute("POST", MODULES_PREFIX, guarded(self._api.limit_concurrency(self.push))),
            HttpRoute("GET", MODULES_PREFIX, guarded(self.list_all)),
            HttpRoute("DELETE", f"{MODULES_PREFIX}/", guarded(self.remove)),
        ]

    @operation("/-/modules", "Push a module", query=("name", "draft", "bundle"), accepts="text")
    async def push(self, request: MeshRequest, identity: Identity) -> Reply:
        """Push a module, named by `?name=NAME`. With `draft=1`, it can be used only by its version; with
        `bundle=1`, the body also contains wheels."""
        query = parse_query(request, ("name", "draft", "bundle"))
        for name in ("draft", "bundle"):
            if query.get(name, "0") not in ("0", "1"):
                raise BatchError("BadRequest", f"{name} must be 0 or 1")
        draft = query.get("draft") == "1"
        caller, source = caller_of(request, identity), await request.read()
        bundle = query.get("bundle") == "1"
        return self._api.reply_json(
            await self._user_ops.push(caller, query.get("name", ""), source, draft=draft, bundle=bundle)
        )

    @operation("/-/modules", "The modules of users", reply=reply_types.Modules)
    async def list_all(self, request: MeshRequest, identity: Identity) -> Reply:
        parse_query(request, ())
        return self._api.reply_json({"modules": self._user_ops.list_all(caller_of(request, identity))})

    @operation("/-/modules/{module}", "Remove a module, or one build of it", query=("version",))
    async def remove(self, request: MeshRequest, identity: Identity) -> Reply:
        """Remove a module, or with `?version=sha256:HEX` only that build of it."""
        version = parse_query(request, ("version",)).get("version", "")
        name = unquote(request.raw_path.partition("?")[0].removeprefix(f"{MODULES_PREFIX}/"))
        return self._api.reply_json(await self._user_ops.remove(caller_of(request, identity), name, version))

    @operation(
        "/-/modules/test", "Try ops on objects; nothing is stored", accepts="json", reply=reply_types.Trial
    )
    async def test(self, request: MeshRequest, identity: Identity) -> Reply:
        parse_query(request, ())
        return self._api.reply_json(
            await self._trials.run_trial(caller_of(request, identity), await request.read())
        )
