"""boto3 sessions: one a thread, because building one costs more than a client, and ten requests.

Law: a session is used by one thread alone, as boto3 requires; service descriptions are read once per process.
What is made of them, and nothing changes, is made once for all clients: models with their shapes, methods,
and rules of endpoints with what they have answered. That is half of what a client and its first request cost.
"""

from __future__ import annotations

import inspect
import threading
from functools import cache
from typing import Any

import boto3
import botocore.hooks
import botocore.regions
import botocore.session
from botocore.client import ClientCreator

_LOADER = "data_loader"
_own = threading.local()


def boto_session() -> Any:
    """This thread's session. A client has its own hooks, credentials and connections."""
    if not hasattr(_own, "session"):
        session = botocore.session.get_session()
        session.register_component(_LOADER, _loader())
        _own.session = boto3.session.Session(botocore_session=session)
    return _own.session


@cache
def _loader() -> Any:
    return botocore.session.get_session().get_component(_LOADER)


_load_model, _make_methods = ClientCreator._load_service_model, ClientCreator._create_methods
_EndpointProvider, _accepts_kwargs = botocore.regions.EndpointProvider, botocore.hooks.accepts_kwargs
_models: dict[tuple[str, str | None], Any] = {}
_methods: dict[int, dict[str, Any]] = {}
_providers: dict[tuple[int, int, frozenset[str]], tuple[Any, Any, Any]] = {}


def _model_once(self: Any, service_name: str, api_version: str | None = None) -> Any:
    if self._loader is not _loader():  # a session of a test's own
        return _load_model(self, service_name, api_version)
    name = service_name, api_version
    if name not in _models:
        _models[name] = _load_model(self, service_name, api_version)
    return _models[name]


def _methods_once(self: Any, service_model: Any) -> dict[str, Any]:
    if not any(service_model is kept for kept in _models.values()):
        return dict(_make_methods(self, service_model))
    if id(service_model) not in _methods:
        _methods[id(service_model)] = _make_methods(self, service_model)
    return dict(_methods[id(service_model)])  # boto3 adds some


def _provider_once(ruleset_data: Any, partition_data: Any, excluded_params: Any = None) -> Any:
    excluded = frozenset(excluded_params or ())
    name = id(ruleset_data), id(partition_data), excluded
    if name not in _providers:
        provider = _EndpointProvider(ruleset_data, partition_data, excluded)
        _providers[name] = ruleset_data, partition_data, provider
    return _providers[name][-1]


def _copied(_: Any, node: dict[str, Any]) -> dict[str, Any]:
    """A level of the hooks of a session, which each client copies: as botocore's, in a third of its time."""
    found = {}
    for key, value in node.items():
        if type(value) is botocore.hooks.NodeList:
            found[key] = type(value)(value.first[:], value.middle[:], value.last[:])
        elif isinstance(value, dict):
            found[key] = _copied(_, value)
        else:
            found[key] = value
    return found


def _accepts_keywords(handler: Any) -> bool:
    """Whether a hook takes all keywords: asked for each hook of each client."""
    code = getattr(handler, "__code__", None)
    return bool(_accepts_kwargs(handler) if code is None else code.co_flags & inspect.CO_VARKEYWORDS)


ClientCreator._load_service_model = _model_once
ClientCreator._create_methods = _methods_once
botocore.regions.EndpointProvider = _provider_once
botocore.hooks._PrefixTrie._recursive_copy = _copied
botocore.hooks.accepts_kwargs = _accepts_keywords
