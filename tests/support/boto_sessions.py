"""boto3 sessions: one a thread, because building one costs more than a client, and ten requests.

Law: a session is used by one thread alone, as boto3 requires; service descriptions are read once per process,
and the rules of endpoints, a third of what a client costs, parsed once: nothing changes them.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import boto3
import botocore.endpoint_provider
import botocore.session

_LOADER = "data_loader"
_own = threading.local()


def boto_session() -> Any:
    """This thread's session. A client has its own hooks, credentials and connections."""
    if not hasattr(_own, "session"):
        session = botocore.session.get_session()
        session.register_component(_LOADER, _loader())
        _own.session = boto3.session.Session(botocore_session=session)
    return _own.session


_RuleSet = botocore.endpoint_provider.RuleSet
_parsed: dict[int, tuple[Any, Any]] = {}


def _parsed_once(*, rules: Any, **more: Any) -> Any:
    if id(rules) not in _parsed:
        _parsed[id(rules)] = rules, _RuleSet(rules=rules, **more)
    return _parsed[id(rules)][1]


botocore.endpoint_provider.RuleSet = _parsed_once


@cache
def _loader() -> Any:
    return botocore.session.get_session().get_component(_LOADER)
