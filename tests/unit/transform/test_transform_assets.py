"""Assets: named by content, checked before they are handed on, bounded in a process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from meshd.transform import registry
from meshd.transform.assets import Asset, BadAssetError, LoadedAssets, MissingAssetError, asset, verify_asset
from meshd.transform.compiler import asset_digests, compile_program
from meshd.transform.op_types import BYTES
from meshd.transform.parameters import Parameter
from meshd.transform.source_files import SourceFiles, SourceGoneError
from meshwire.plan.plan_spec import parse_spec
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshd.transform.op_types import FieldType
    from meshwire.plan.keyed_random import KeyedRandom

DATA = b"a table\n" * 10
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(autouse=True)
def appending() -> Iterator[None]:
    """An op that appends its asset's content."""

    @registry.operation("test_append", Parameter("file", asset), Parameter("other", asset, None))
    @dataclass(frozen=True, slots=True)
    class Append:
        """Appends."""

        file: Asset
        other: Asset | None

        def __post_init__(self) -> None:
            if self.file.data.startswith(b"no"):
                raise BadAssetError("file", "not a table")

        def infer(self, field: FieldType) -> FieldType:
            return BYTES

        def apply(self, value: bytes, random: KeyedRandom) -> bytes:
            return value + self.file.data

    yield
    del registry.OPS["test_append"]


def spec_of(**args: Any) -> Any:
    return parse_spec({"ops": [{"op": "test_append", "field": "x", "args": args}]})


def test_an_op_is_built_with_its_content() -> None:
    spec = spec_of(file=f"sha256:{DIGEST}")
    program = compile_program(spec, ["x"], load={DIGEST: Asset(DIGEST, DATA)}.__getitem__)
    assert program.chains["x"].render(b"row ", program.draw(0, 0)) == b"row " + DATA
    assert asset_digests(spec) == (DIGEST,)


def test_what_names_no_content_is_refused() -> None:
    for given, complaint in [
        ("s3://b/k", "is not pinned yet"),
        ("sha256:abc", "expected s3://BUCKET/KEY or sha256:HEX"),
        (7, "expected text"),
    ]:
        with pytest.raises(PlanError, match=complaint) as caught:
            compile_program(spec_of(file=given), ["x"])
        assert caught.value.path == "ops[0].args.file"
    with pytest.raises(MissingAssetError, match="does not have the asset"):
        compile_program(spec_of(file=f"sha256:{DIGEST}"), ["x"])


def test_content_an_op_cannot_use_is_a_fault_of_the_plan() -> None:
    digest = hashlib.sha256(b"no").hexdigest()
    with pytest.raises(PlanError, match="not a table") as caught:
        compile_program(spec_of(file=f"sha256:{digest}"), ["x"], load=lambda name: Asset(name, b"no"))
    assert caught.value.path == "ops[0].args.file"


def test_a_process_keeps_what_it_used_last(tmp_path: Path) -> None:
    contents = [bytes([number]) * 100 for number in range(4)]
    places = {}
    for number, content in enumerate(contents):
        path = tmp_path / str(number)
        path.write_bytes(b"before" + content)
        places[hashlib.sha256(content).hexdigest()] = [(str(path), 6, 40), (str(path), 46, 60)]
    files = SourceFiles()
    loaded = LoadedAssets(files, limit=250)
    load = loaded.loader(places)
    first, *_ = [load(digest) for digest in places]
    assert first.data == contents[0]
    assert repr(loaded) == "<LoadedAssets 2, 200 bytes>"
    last = list(places)[-1]
    assert loaded.loader({})(last) is load(last)
    with pytest.raises(MissingAssetError):
        loaded.loader({})(next(iter(places)))
    files.close()


def test_damaged_content_is_never_handed_on() -> None:
    with pytest.raises(SourceGoneError, match="damaged"):
        verify_asset(DIGEST, DATA[:-1])
