"""Which files of tests are handed out first, and which together, where several processes run them.

Law: every test is run once, wherever it stands here; a file that is not named comes after those that are.
Files that need the shared Kubernetes control plane go to one process: it is a dozen programs, one set is
enough, and it ends after the last of them. So do those that look at the console, for its mesh and browser.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    import pytest

LONGEST: Final = (
    "faults/test_schedules",
    "linearizability/test_running",
    "kubernetes/",
    "bench/test_bench_harness",
    "component/console/",
    "crash/test_job_kills",
    "component/mesh/test_mesh_movement",
    "docs/test_docs_blocks",
    "component/mesh/test_mesh_control_lost",
    "examples/test_examples",
    "examples/test_notebooks",
    "component/mesh/test_mesh_jobs",
    "component/mesh/test_rolling_upgrade",
    "component/mesh/test_mesh_scrub",
    "component/mesh/test_mesh_writes",
    "component/store/test_integrity_copies",
    "component/process/test_daemon_users",
    "component/server/test_health_crowds",
    "component/views/test_views_transforms",
    "component/origins/test_origins_mesh",
    "component/project/test_demo",
    "component/mesh/test_mesh_epochs",
    "component/s3/test_s3_on_a_mesh",
    "component/reads/test_merged_listings",
    "component/tools/test_doctor",
    "bench/test_rotational_row",
    "component/transform/test_transform_limits",
    "component/origins/test_origins_writing",
    "crash/test_worker_kills",
    "crash/test_store_kills",
    "compat/test_compat_",
    "component/mesh/test_mesh_",
    "component/jobs/test_job_service",
    "property/batches/test_permutations_laws",
    "property/operator/test_operator_day",
    "monitoring/",
    "component/origins/",
    "contract/store/test_store_processes",
    "component/mesh/test_movement",
    "component/views/",
    "component/process/test_daemon_",
)
"""Beginnings of paths below tests/, what takes longest first; seldom changed: the order need not be exact."""
TOGETHER: Final = ("kubernetes/", "component/console/")
_APART: Final = re.compile(
    r"kubernetes/test_(\w+_emulated|upgrade_end_to_end|foreign_kinds|images|pod_security|rights)\.py"
)
"""Files below `TOGETHER` that have no control plane, or one of their own."""


def _below_tests(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


def place(nodeid: str) -> int:
    """Where its file stands in the order."""
    path = _below_tests(nodeid)
    return next((at for at, start in enumerate(LONGEST) if path.startswith(start)), len(LONGEST))


def group(nodeid: str) -> str:
    """What is handed out with it: its file, or all files of a kind."""
    path = _below_tests(nodeid)
    if _APART.fullmatch(path):
        return path
    return next((start for start in TOGETHER if path.startswith(start)), path)


def sort(items: list[pytest.Item]) -> None:
    """In place; what is equal stays in its order."""
    items.sort(key=lambda item: place(item.nodeid))


class LongestFirst(LoadFileScheduling):  # type: ignore[misc]
    """As `--dist loadfile`, in the order of the collection, which `sort` made."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False  # it would sort by the number of tests
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)

    def remove_node(self, node: object) -> str | None:
        """The test in which a process ended, which has failed; others go on with what came after it.

        As it was, but that the test is not run again: what hangs would end the next process, too.
        """
        left: dict[str, dict[str, bool]] = self.assigned_work.pop(node)
        pending = [(unit, test) for unit in left.values() for test, done in unit.items() if not done]
        if not pending:
            return None
        unit, crashed = pending[0]
        unit[crashed] = True
        self.workqueue.update({scope: unit for scope, unit in left.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed
