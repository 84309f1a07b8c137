"""Every code block of README.md and docs/*.md runs, or says why not.

The world they run in: a daemon at $MESH_ENDPOINT (and $AWS_ENDPOINT_URL) with its keys in the environment;
JPEGs in `s3://photos/train/<class>/`, tar shards with `jpg` and `cls` in `s3://shards/`; a folder of their
own with the same pictures in `./train/<class>/`; the `mesh`, `meshd`, `aws` and `s5cmd` commands.
"""

from __future__ import annotations

import io
import sys
import tarfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

import meshsdk as mesh
from tests.support.daemons import Daemon
from tests.support.interpreters import path, python

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.insert(0, str(Path(__file__).parent))
from docs_blocks import PATIENCE, Block, PageError, blocks, run_page, shell_text  # beside this file

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CLASSES = ("cat", "dog")
A_CLASS = 130


def picture(number: int) -> bytes:
    """A small JPEG; its colour tells the number."""
    out = io.BytesIO()
    Image.new("RGB", (64, 48), (number % 256, 99, 7)).save(out, "JPEG")
    return out.getvalue()


def shard(first: int, count: int) -> bytes:
    """A WebDataset tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number in range(first, first + count):
            for ext, body in (("jpg", picture(number)), ("cls", str(number % 2).encode())):
                member = tarfile.TarInfo(f"{number:06d}.{ext}")
                member.size = len(body)
                tar.addfile(member, io.BytesIO(body))
    return out.getvalue()


def fill(client: mesh.Client) -> None:
    client.create_bucket("photos")
    client.create_bucket("shards")
    keys = [(f"train/{kind}/{number:06d}.jpg", number) for number in range(A_CLASS) for kind in CLASSES]
    client.put_many("photos", [(key, picture(number)) for key, number in keys])
    client.put_many("shards", [(f"train-{number:05d}.tar", shard(number * 16, 16)) for number in range(4)])


@contextmanager
def filled() -> Iterator[Daemon]:
    """A daemon of its own, filled as the pages expect."""
    with Daemon.start() as running:
        with mesh.connect(
            running.endpoint, access_key=running.access_key, secret_key=running.secret_key
        ) as client:
            fill(client)
        yield running


@pytest.fixture(scope="module")
def documented() -> Iterator[Daemon]:
    """The daemon of all pages."""
    with filled() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for kind in CLASSES:
        (tmp_path / "train" / kind).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "train" / kind / f"{number:06d}.jpg").write_bytes(picture(number))
    return tmp_path


def environment(daemon: Daemon, home: Path) -> dict[str, str]:
    """`home`: where programs keep what they know; `aws` would use a role's keys again for an hour."""
    return {
        "HOME": str(home),
        "MESH_ENDPOINT": daemon.endpoint,
        "AWS_ENDPOINT_URL": daemon.endpoint,
        "S3_ENDPOINT_URL": daemon.endpoint,
        "AWS_ACCESS_KEY_ID": daemon.access_key,
        "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
        "PATH": path(),
        "PYTHON_EXEC": python(),  # of the ranks that torchrun starts
    }


@pytest.mark.timeout(PATIENCE + 10)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_the_page_run(page: Path, documented: Daemon, folder: Path) -> None:
    found = list(blocks(page.name, page.read_text()))
    if all(block.reason for block in found):
        return
    done = run_page(found, folder, environment(documented, folder))
    assert done.code == 0, done.output[-5000:]


def test_the_mark_leaves_a_block_out_and_needs_a_reason() -> None:
    text = "<!-- not run: needs a GPU -->\n```bash\nfalse\n```\n\n```bash\ntrue\n```\n"
    assert [block.reason for block in blocks("page", text)] == ["needs a GPU", ""]
    with pytest.raises(PageError, match="say why"):
        list(blocks("page", "<!-- not run -->\n```bash\nfalse\n```\n"))


def test_aliases_and_open_fences_are_refused() -> None:
    with pytest.raises(PageError, match="write bash"):
        list(blocks("page", "```sh\ntrue\n```"))
    with pytest.raises(PageError, match="not closed"):
        list(blocks("page", "```bash\ntrue\n"))


def test_other_languages_are_not_run_and_console_runs_its_commands() -> None:
    text = "```json\n{}\n```\n```console\n$ mesh ls\nphotos\n$ true\n```\n"
    [block] = blocks("page", text)
    assert shell_text(block) == "mesh ls\ntrue"


def test_blocks_share_names_folder_and_exports(tmp_path: Path) -> None:
    page = [
        Block("p", 1, "bash", "export COLOUR=blue; plain=1; mkdir d; cd d; sleep 99 & sleeper=$!"),
        Block("p", 2, "python", "import os\nseen = os.environ['COLOUR'], os.path.basename(os.getcwd())"),
        Block("p", 3, "python", "assert seen == ('blue', 'd')"),
        Block("p", 4, "bash", "test $plain = 1; kill $sleeper"),
    ]
    done = run_page(page, tmp_path, {})
    assert done.code == 0, done.output


def test_a_page_that_does_not_end_is_told_with_what_it_printed(tmp_path: Path) -> None:
    done = run_page([Block("page.md", 7, "bash", "echo begun; sleep 99")], tmp_path, {}, patience=10)
    assert done.code == 124
    assert "page.md:7\nbegun\n" in done.output
    assert "had not ended after 10 s" in done.output


def test_a_failing_block_is_named(tmp_path: Path) -> None:
    done = run_page([Block("page.md", 7, "bash", "true\nfalse\ntrue")], tmp_path, {})
    assert done.code == 1
    assert "page.md:7" in done.output
