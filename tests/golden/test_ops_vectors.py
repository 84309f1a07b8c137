"""Frozen results of the image ops: an op whose output changes needs a new version.

`GOLDEN=rewrite pytest tests/golden/test_ops_vectors.py` writes the file anew, for a new version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshd.transform import registry
from tests.golden.ops_results import CHAINS, annotated, digest, mixed, results

DATA = Path(__file__).parent / "ops" / "images.json"
REWRITE = os.environ.get("GOLDEN") == "rewrite"


def frozen() -> dict[str, str]:
    if REWRITE:
        DATA.parent.mkdir(exist_ok=True)
        DATA.write_text(json.dumps(results(), indent=1) + "\n")
    found: dict[str, str] = json.loads(DATA.read_text())
    return found


FROZEN = frozen()


@pytest.mark.parametrize("name", CHAINS)
def test_ops_give_what_they_always_gave(name: str) -> None:
    assert digest(name) == FROZEN[name], f"{name} gives something else: that is a new version of the op"


@pytest.mark.parametrize("name", ["mixup", "cutmix", "mixup_or_cutmix"])
def test_mixing_gives_what_it_always_gave(name: str) -> None:
    assert mixed(name) == FROZEN[name], f"{name} gives something else: that is a new version of the op"


@pytest.mark.parametrize("name", ["boxes", "keypoints"])
def test_annotations_go_where_they_always_went(name: str) -> None:
    assert annotated(name) == FROZEN[name], f"{name} go elsewhere: that is a new version of an op"


def test_another_processor_gives_the_same() -> None:
    """OpenCV chooses its code by what the processor has; here it is told that there is next to none."""
    plain = {**os.environ, "OPENCV_CPU_DISABLE": "AVX512_SKX,AVX2,FMA3,AVX,SSE4_2,SSE4_1,NEON_DOTPROD"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.ops_results"],
        env=plain,
        cwd=root,
        capture_output=True,
        check=True,
        timeout=100,
    )
    assert json.loads(done.stdout) == FROZEN


def test_every_version_of_every_image_op_is_frozen() -> None:
    """Of ops with several versions, so that none can change when the next one comes."""
    frozen_ops = {(op, version) for steps in CHAINS.values() for op, version, _ in steps}
    several = {
        (name, version) for name, builds in registry.OPS.items() if len(builds) > 1 for version in builds
    }
    assert several - frozen_ops == {("decode", "1")}, "version 1 of decode differs in damaged files only"


def test_nothing_is_frozen_that_is_not_looked_at() -> None:
    assert set(FROZEN) == {*CHAINS, "mixup", "cutmix", "mixup_or_cutmix", "boxes", "keypoints"}
