"""Samples of a source: files grouped by name (WebDataset's rule), and expressions evaluated on them.

Law: pure; a file is read only through the function passed in, and only for an expression that names its
extension.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from meshwire.dataset.archive_paths import ARCHIVE_EXTENSIONS
from meshwire.dataset.fields import sample_key
from meshwire.formats.shard_encoding import SourceObject
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from meshwire.dataset.expression_parser import Expression, Value

ReadContents = Callable[[SourceObject], bytes | None]
"""Returns a small file's bytes; None if it is too large or has changed."""
EvaluationKey = tuple[str, ...]
"""An expression and the files for which it was evaluated."""
EXPRESSION_NAMES: Final = ("key", "stem", "ext", "size", "files", "modified", "sizes")


class Sample(NamedTuple):
    """A sample. `stem`: the name of its files without extensions (of the first file, if archives are
    regrouped)."""

    stem: str
    files: tuple[SourceObject, ...]

    @property
    def size(self) -> int:
        return sum(item.size for item in self.files)


def file_name(item: SourceObject) -> str:
    return item.name or item.key


def group_samples(files: Iterable[SourceObject]) -> list[Sample]:
    """Group files into samples, in the order of their first files. Equal names in different archives are
    different samples; their names are then prefixed with the archive's."""
    plain: dict[str, list[SourceObject]] = {}
    found: dict[tuple[str, str], list[SourceObject]] = {}
    for item in files:
        if item.name:
            found.setdefault((sample_key(item.name)[0], item.key), []).append(item)
            continue
        key = item.key  # inlined `sample_key`, to save a call for each of a million keys
        start = key.rfind("/") + 1
        dot = key.find(".", start)
        stem = key[:dot] if dot > start else key
        held = plain.get(stem)
        if held is None:
            plain[stem] = [item]
        else:
            held.append(item)
    doubled: dict[str, int] = {}
    for stem, _ in found:
        doubled[stem] = doubled.get(stem, 0) + 1
    return [Sample(stem, tuple(items)) for stem, items in plain.items()] + [
        _apart(stem, archive, items) if doubled[stem] > 1 else Sample(stem, tuple(items))
        for (stem, archive), items in found.items()
    ]


def _apart(stem: str, archive: str, items: Iterable[SourceObject]) -> Sample:
    name = archive.rpartition("/")[2]
    ending = max((end for end in ARCHIVE_EXTENSIONS if name.lower().endswith(end)), key=len, default="")
    folder = name[: len(name) - len(ending)]
    return Sample(f"{folder}/{stem}", tuple(item._replace(name=f"{folder}/{item.name}") for item in items))


def check_names(expression: Expression, path: str) -> None:
    """Check the names in an expression, which are those of `EXPRESSION_NAMES`, else extensions. Raises
    PlanError for a likely misspelling of the former."""
    for name in sorted(expression.names - set(EXPRESSION_NAMES)):
        close = difflib.get_close_matches(name, EXPRESSION_NAMES, n=1, cutoff=0.7)
        if close:
            raise PlanError(path, f"there is no {name!r}; did you mean {close[0]!r}?")


class Evaluation:
    """Evaluates expressions for samples. Results read from files are kept by ETag, for the next layout of
    the same view."""

    def __init__(
        self, contents: ReadContents | None = None, known: Mapping[EvaluationKey, Value] | None = None
    ) -> None:
        self._contents, self._known = contents, known or {}
        self.results: dict[EvaluationKey, Value] = {}

    def __repr__(self) -> str:
        return f"<Evaluation, {len(self.results)} answers from files>"

    def evaluate(self, expression: Expression, sample: Sample) -> Value:
        asked = expression.names.difference(EXPRESSION_NAMES)
        if not asked:
            return expression.evaluate(_describe_sample(sample, expression.names))
        files = [item for item in sample.files if sample_key(file_name(item))[1] in asked]
        question = (expression.text, *(f"{item.key}\0{item.etag}\0{item.offset}" for item in files))
        if question not in self._known:
            described = _describe_sample(sample, expression.names) | dict(self._read(files))
            self.results[question] = expression.evaluate(described)
        else:
            self.results[question] = self._known[question]
        return self.results[question]

    def _read(self, files: Iterable[SourceObject]) -> Iterator[tuple[str, bytes | None]]:
        for item in files:
            content = None if self._contents is None else self._contents(item)
            yield sample_key(file_name(item))[1], content


def _describe_sample(sample: Sample, names: Iterable[str]) -> dict[str, object]:
    return {name: _DESCRIBED[name](sample) for name in names if name in _DESCRIBED}


_DESCRIBED: Final[Mapping[str, Callable[[Sample], object]]] = {
    "key": lambda sample: sample.files[0].key,
    "stem": lambda sample: sample.stem,
    "ext": lambda sample: sample_key(file_name(sample.files[0]))[1],
    "size": lambda sample: sample.size,
    "files": lambda sample: len(sample.files),
    "modified": lambda sample: max(item.modified for item in sample.files),
    "sizes": lambda sample: {sample_key(file_name(item))[1]: item.size for item in sample.files},
}
