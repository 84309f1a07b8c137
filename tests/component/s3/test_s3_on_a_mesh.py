"""The most telling tests of S3, run again against a node of a mesh that owns little of what it is asked for.

All of them run so with `MESH_TEST_NODES=3 pytest tests/component/s3`; these, whenever tests run.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.interpreters import python
from tests.support.one_node import NODES

ROOT = Path(__file__).parents[3]
TELLING = {
    "archives": ("members_become_objects", "members_are_versions_where_there_are_versions"),
    "attributes": ("of_versions", "pages_of_parts", "composite_checksums"),
    "cors": ("answers_can_be_read", "refusals_can_be_read"),
    "forms": ("acl_tags_and_checksums",),
    "lifecycle": ("answers_tell_when_an_object_expires",),
    "listings": ("pages_are_the_model", "start_after"),
    "multipart": (
        "an_upload_becomes_an_object",
        "a_part_sent_again_replaces_the_first",
        "refused_completions",
        "lists_of_parts_and_uploads",
        "parts_copied_from_objects",
        "conditional_completion",
    ),
    "objects": (
        "bytes_come_back",
        "headers_and_metadata_come_back_as_given",
        "ranges",
        "conditional_reads",
        "conditional_writes",
        "a_wrong_checksum_is_refused_and_nothing_kept",
        "copies",
        "delete_many",
    ),
    "presigned": ("get_put_head_delete", "what_was_signed_cannot_be_changed", "multipart_by_url"),
    "tagging": ("tags_come_with_uploads", "tags_of_versions"),
    "versions": (
        "versions_are_read_by_their_ids",
        "delete_markers",
        "null_versions",
        "pages_of_versions",
        "many_deletions",
        "copies_of_versions",
    ),
    "wire": ("a_small_unread_body_keeps_the_connection",),
}


@pytest.mark.timeout(600)  # a run of its own, on machines that are slow
def test_a_node_of_a_mesh_answers_as_one_alone() -> None:
    """With two copies of everything, as meshes have them."""
    tests = [
        f"tests/component/s3/test_s3_{module}.py::test_{name}"
        for module, names in TELLING.items()
        for name in names
    ]
    argv = [python(), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, NODES: "3", "MESH_TEST_COPIES": "2"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
