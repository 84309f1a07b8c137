"""Plans to look into that no dataset was opened for: by hash, or as a view of batches shows them.

Law: asks and reads; the plan is registered again under its own hash, which says what its rows are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshsdk.arenas import Arena
from meshsdk.doctor.checkups import Subject
from meshsdk.errors import ConfigurationError
from meshsdk.native import register_plan
from meshsdk.outputs import NumpyStage
from meshsdk.transport import Request
from meshsdk.views import show_view

if TYPE_CHECKING:
    from meshsdk.transport import Transport

_ARENA = 256 << 20


def plan_subject(transport: Transport, digest: str, batch: int, world: int = 1) -> Subject:
    """A registered plan as rank 0 of `world` reads it. Raises NotFoundError."""
    found = transport.json(Request("GET", f"/-/plans/{digest}"))
    plan = register_plan(transport, found["snapshot"], found["spec"], batch)
    stage = NumpyStage()
    return Subject(transport, plan, batch, 0, world, stage, Arena(_ARENA, stage.memory), 0)


def view_subject(transport: Transport, name: str, batch: int | None, world: int | None) -> Subject:
    """The plan of a view of batches. Raises NotFoundError, ConfigurationError."""
    view = show_view(transport, name)
    if view.kind != "batches":
        raise ConfigurationError(
            f"{name} is a view of {view.kind}: only one of batches has a plan (mesh view create --batches)"
        )
    document = view.view
    ranks = world or int(document.get("world", 1))
    return plan_subject(transport, str(document["plan"]), batch or int(document["batch"]), ranks)
