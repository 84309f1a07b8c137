"""docs/api.md, made of the SDK's docstrings; run as a program it writes it.

make reference
"""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))
from api_source import Module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from api_source import Documented

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"
_SDK = ROOT / "sdk"
_ENTRY = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)")


@dataclass(frozen=True, slots=True)
class Entry:
    """`home` is MODULE.NAME below sdk/, or MODULE.* for all it has; `title` how users write it. `made`: users
    call the class themselves; `base`: a class of its own module whose members it inherits."""

    home: str
    title: str = ""
    made: bool = True
    members: bool = True
    base: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    introduction: str
    entries: tuple[Entry, ...]


def _given(home: str, title: str = "") -> Entry:
    """Something users are given, and do not make."""
    return Entry(home, title, made=False)


SECTIONS = (
    Section(
        "Datasets",
        "Samples, their fields, and the ops that nodes apply to them: [guide](sdk.md#datasets).",
        (
            Entry("meshsdk.open_dataset.open", "mesh.open"),
            Entry("meshsdk.arrays.open_zarr.open_zarr", "mesh.open_zarr"),
            Entry("meshsdk.tables.open_iceberg.open_iceberg", "mesh.open_iceberg"),
            Entry("meshsdk.tables.open_lance.open_lance", "mesh.open_lance"),
            Entry("meshsdk.arrays.field_statistics.field_statistics", "mesh.field_statistics"),
            _given("meshsdk.arrays.field_statistics.FieldStatistics"),
            Entry("meshsdk.arrays.open_dicom.open_dicom", "mesh.open_dicom"),
            Entry("meshsdk.arrays.open_slides.open_slides", "mesh.open_slides"),
            Entry("meshsdk.open_annotated.open_coco", "mesh.open_coco"),
            Entry("meshsdk.open_annotated.open_voc", "mesh.open_voc"),
            Entry("meshsdk.open_annotated.open_yolo", "mesh.open_yolo"),
            Entry(
                "meshsdk.datasets.dataset.Dataset",
                "mesh.Dataset",
                made=False,
                base="meshsdk.datasets.sample_sequence.SampleSequence",
            ),
            Entry("meshsdk.datasets.dataset.mix", "mesh.mix"),
            Entry("meshsdk.datasets.split_mix.Stage", "mesh.Stage", members=False),
            Entry("meshsdk.datasets.fields.class_of_prefix", "mesh.class_of_prefix"),
            _given("meshsdk.client.native_api.SnapshotInfo"),
            _given("meshsdk.client.native_api.FieldInfo"),
            _given("meshsdk.client.native_api.FieldSchema"),
            Entry("meshsdk.datasets.schema.Schema", made=False, members=False),
            _given("meshsdk.client.native_api.PlanInfo"),
            _given("meshsdk.datasets.preflight.Preflight"),
            _given("meshsdk.datasets.default_order.Order"),
            _given("meshsdk.client.read_costs.DiskCost"),
            _given("meshsdk.client.read_costs.OrderCost"),
            Entry("meshwire.dataset.snapshot_stats.SnapshotStats", made=False, members=False),
            Entry("meshwire.dataset.snapshot_stats.Spread", made=False, members=False),
        ),
    ),
    Section(
        "The loader",
        "Batches for a training process: [guide](sdk.md#the-loader), [exact guarantees](batches.md).",
        (
            Entry("meshsdk.loader.loader.Loader", "mesh.Loader"),
            _given("meshsdk.loader.mapped_loader.MappedLoader"),
            Entry("meshsdk.loader.warm_up.warm", "mesh.warm"),
            _given("meshsdk.datasets.batch.Batch", "mesh.Batch"),
            _given("meshsdk.datasets.batch.Ragged", "mesh.Ragged"),
            Entry("meshsdk.datasets.shuffle.Blocks", "mesh.Blocks"),
            Entry("meshsdk.datasets.shuffle.LengthBuckets", "mesh.LengthBuckets", members=False),
            Entry("meshsdk.loader.output_stage.Normalize", "mesh.Normalize"),
            _given("meshsdk.loader_stats.LoaderStats"),
            _given("meshsdk.client.native_api.BadSample"),
        ),
    ),
    Section(
        "Ops",
        "`from meshsdk import ops`. Constructors for `ds.map(...)`; the nodes do the work."
        " [The op library](ops.md) says exactly what each op does and when a sample is bad. All of them raise"
        " ConfigurationError for an invalid argument.",
        (
            Entry("meshsdk.ops.*", "ops."),
            Entry("meshsdk.ops.array_ops.*", "ops."),
            Entry("meshsdk.ops.annotation_ops.*", "ops."),
            Entry("meshsdk.ops.chat_ops.*", "ops."),
            Entry("meshsdk.ops.sound_ops.*", "ops."),
            Entry("meshsdk.ops.video_ops.*", "ops."),
            Entry("meshsdk.ops.medical_ops.*", "ops."),
            Entry("meshsdk.ops.mixing_ops.*", "ops."),
        ),
    ),
    Section(
        "Writing samples",
        "Samples that a program makes: [guide](sdk.md#samples-you-generate).",
        (Entry("meshsdk.sample_writer.Writer", "mesh.Writer"),),
    ),
    Section(
        "Token files",
        "Tokens stored once: [guide](texts.md#tokens-stored-once).",
        (
            Entry("meshsdk.token_writer.write_tokens", "mesh.write_tokens"),
            Entry("meshsdk.token_files.TokenFiles", "mesh.TokenFiles"),
            _given("meshwire.formats.token_manifest.TokenManifest"),
            _given("meshwire.formats.token_manifest.TokenShard"),
        ),
    ),
    Section(
        "Packed rows",
        "`from meshsdk import packed_rows`. What models need of the segments of a packed batch:"
        " [packing](texts.md#packing).",
        (Entry("meshsdk.packed_rows.*", "packed_rows."),),
    ),
    Section(
        "The S3 client",
        "For scripts; datasets and loaders use it as well: [guide](sdk.md#the-s3-client).",
        (
            Entry("meshsdk.client.s3_client.connect", "mesh.connect"),
            _given("meshsdk.client.s3_client.Client", "mesh.Client"),
            _given("meshsdk.client.object_info.ObjectInfo"),
            Entry("meshsdk.client.gather.Item", "mesh.Item"),
            _given("meshsdk.client.gather.Gathered", "mesh.Gathered"),
            Entry("meshsdk.transfers.upload"),
            Entry("meshsdk.transfers.download"),
            Entry("meshsdk.transfers.stream"),
            Entry("meshsdk.transfers.copy"),
            Entry("meshsdk.transfers.Tuning"),
        ),
    ),
    Section(
        "Adapters",
        "One module per library; import the one you need: [guide](adapters.md).",
        tuple(
            Entry(f"meshsdk.{home}.{name}", f"plain.{name}", members=False)
            for home, name in (
                ("loader.plain_loader", "PlainLoader"),
                ("datasets.batch", "as_dict"),
                ("adapters.plain", "plain_types"),
            )
        )
        + tuple(
            Entry(f"meshsdk.adapters.{name}", name, members=False)
            for name in (
                "checkpoints.CheckpointWriter",
                "checkpoints.CheckpointReader",
                "torchdata.LoaderDataset",
                "torchdata.LoaderNode",
                "torchdata.as_it_is",
                "lightning.MeshDataModule",
                "lightning.DataStats",
                "huggingface.FedByLoader",
                "huggingface.as_iterable",
                "grains.LoaderDataset",
                "filesystems.MeshFileSystem",
                "zarrs.MeshStore",
                "webdatasets.register",
                "tensorflow.as_tf_dataset",
                "keras.endless_tuples",
                "keras.DataStats",
                "rays.as_ray_dataset",
                "dali.ExternalSource",
            )
        ),
    ),
    Section(
        "Test suites",
        "The guarantees of a loader, for your own test files: [guide](sdk.md#loader-conformance-tests).",
        (Entry("meshsdk.testing.loader_suite.LoaderSuite", made=False, members=False),),
    ),
)

_HEAD = """# API reference

Generated from the docstrings by `make reference`. `mesh.` stands for `import meshsdk as mesh`; import other
names from the module given with them. [The SDK guide](sdk.md) explains them step by step;
[the quick start](quickstart.md) is shorter.

"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    parts += [f"- [{section.title}](#{_anchor(section.title)})\n" for section in SECTIONS]
    parts.append("- [Errors](#errors)\n")
    for section in SECTIONS:
        parts.append(f"\n## {section.title}\n\n{section.introduction}\n")
        for home, found in _found(section):
            parts += _object(home, found)
    parts += _errors()
    return "".join(parts)


def _found(section: Section) -> Iterator[tuple[str, Documented]]:
    for entry in section.entries:
        home, _, name = entry.home.rpartition(".")
        module = _module(home)
        for each in module.names() if name == "*" else (name,):
            title = entry.title + each if name == "*" else entry.title or each
            found = module.find(each, title, made=entry.made, members=entry.members)
            if entry.base:
                base, _, inherited = entry.base.rpartition(".")
                found = replace(found, members=found.members + _module(base).members(inherited, each))
            yield home, found


def _module(home: str) -> Module:
    source = _SDK / home.replace(".", "/")
    return Module(source / "__init__.py" if source.is_dir() else source.with_suffix(".py"))


def _object(home: str, found: Documented) -> Iterator[str]:
    yield f"\n### {found.title}\n\n"
    if not found.title.startswith(("mesh.", "ops.")):
        yield f"In `{home}`.\n\n"
    yield _code(found.signature)
    yield markdown(found.text)
    for member in found.members:
        yield f"\n#### {member.title}\n\n{_code(member.signature)}{markdown(member.text)}"


def _errors() -> Iterator[str]:
    yield "\n## Errors\n\nIn `meshsdk.errors`, `mesh.errors`; [what to do about each](failures.md).\n\n"
    yield "| error | is a | when |\n|---|---|---|\n"
    module = Module(_SDK / "meshsdk" / "errors.py")
    for name in module.names():
        if name.endswith("Error"):
            found = module.find(name, name, members=False)
            yield f"| `{name}` | {', '.join(f'`{base}`' for base in found.bases)} | {_line(found.text)} |\n"


def _code(signature: str) -> str:
    return f"```\n{signature}\n```\n\n" if signature else ""


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def markdown(text: str) -> str:
    """A docstring: paragraphs, lists of the indented blocks after `Arguments:` and the like, and examples."""
    return "\n".join(_block(block) for block in re.split(r"\n\n+", text))


def _block(block: str) -> str:
    head, _, rest = block.partition("\n")
    if not head.endswith(":") or not rest.startswith("    "):
        return f"{_line_of(block)}\n"
    if head == "Example:":
        return f"{head}\n\n```\n{textwrap.dedent(rest)}\n```\n"
    items: list[str] = []
    for line in rest.splitlines():
        if line.startswith("     "):
            items[-1] += " " + line.strip()
        else:
            items.append(line.strip())
    return f"{head}\n\n" + "".join(f"- {_item(item)}\n" for item in items)


def _item(item: str) -> str:
    match = _ENTRY.fullmatch(item)
    if not match:
        return item
    names = ", ".join(f"`{name}`" for name in match[1].split(", "))
    return f"{names}: {match[2]}"


def _line_of(block: str) -> str:
    return "\n".join(line.strip() for line in block.splitlines())


def _anchor(title: str) -> str:
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))


if __name__ == "__main__":
    PAGE.write_text(page())
