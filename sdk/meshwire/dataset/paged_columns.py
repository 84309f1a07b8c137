"""Columns of a snapshot that consists of pages: each page is opened when a sample of it is asked for.

Law: immutable, and equal to the column that has the values of all pages one after the other. Only
`object`, `offset`, `length` and `values` make that column; the methods for some samples do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshwire.dataset.sample_columns import BytesColumn, LabelColumn
from meshwire.frame.columns import StringColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from meshwire.frame.columns import Integers

    Int32 = np.ndarray[Any, np.dtype[np.int32]]
    Narrow = npt.NDArray[Any]
    """Integers of any width."""

_DIGITS: Final = 9
_JOINED_SAMPLES: Final = 1 << 20
_JOINED_PAGES: Final = 4096
"""Up to so many samples and pages, the columns of a snapshot are joined in memory once enough are looked up:
a batch touches most pages of a small snapshot, and each costs a microsecond."""
_SHARE: Final = 4  # of the samples; one in so many is looked up before


@dataclass(frozen=True, slots=True, eq=False)
class PageNames:
    """Names of the samples of a page: UTF-8 in one blob, uint8[m], and where each ends, integers [n]."""

    blob: Narrow
    ends: Narrow

    def __getitem__(self, sample: int) -> str:
        first = int(self.ends[sample - 1]) if sample else 0
        return self.blob[first : int(self.ends[sample])].tobytes().decode()

    def all(self) -> StringColumn:
        """Return all names."""
        bounds: Integers = np.concatenate(([0], self.ends)).astype(np.int64)
        return StringColumn(self.blob.tobytes(), np.diff(bounds))


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """Where the samples of one shard are: `offsets`, `lengths`, for each part, integers [n] of any width, in
    bytes of the shard's object; `names`: theirs, or their numbers [n], None for `first`, `first` + 1 …;
    `classes` [n]: numbers among the classes of the page, None if the samples have one class."""

    offsets: tuple[Narrow, ...]
    lengths: tuple[Narrow, ...]
    names: PageNames | Narrow | None
    first: int = 1
    classes: Narrow | None = None

    def __len__(self) -> int:
        return self.offsets[0].size

    @property
    def numbers(self) -> Narrow | None:
        """The numbers that are the names of the samples, None for a run of them."""
        assert not isinstance(self.names, PageNames)
        return self.names

    def name(self, sample: int) -> str:
        """Return the name of a sample of the page; a number has at least nine digits."""
        if isinstance(self.names, PageNames):
            return self.names[sample]
        number = self.first + sample if self.names is None else int(self.names[sample])
        return f"{number:0{_DIGITS}}"

    def all_names(self) -> StringColumn:
        """Return the names of all samples of the page."""
        if isinstance(self.names, PageNames):
            return self.names.all()
        numbers = self.names
        if numbers is None:
            numbers = np.arange(self.first, self.first + len(self), dtype=np.int64)
        return StringColumn.from_numbers(numbers.astype(np.int64))


class Pages:
    """The pages of a snapshot, in order. `starts` int64[P+1]: the first sample of each; `open_pages`
    returns pages by their numbers, and may raise what its owner likes; `is_small`: columns are joined in
    memory."""

    __slots__ = ("_joined", "_last", "_left", "_numbers", "_open", "is_small", "starts")

    def __init__(self, starts: Integers, open_pages: Callable[[Sequence[int]], list[Page]]) -> None:
        self.starts, self._open = starts, open_pages
        self._last = _Groups(self, np.zeros(0, np.int64))  # several columns are asked for the same samples
        self._joined: dict[Callable[[Page], Narrow], Narrow] = {}
        self._numbers: Narrow | None = None  # of the page of each sample, once columns are joined
        self.is_small = int(starts[-1]) <= _JOINED_SAMPLES and len(self) <= _JOINED_PAGES
        # Samples to look up before columns are joined.
        self._left = int(starts[-1]) // _SHARE if self.is_small else None

    def __repr__(self) -> str:
        return f"<Pages, {len(self)}>"

    def __len__(self) -> int:
        return self.starts.size - 1

    def open(self, number: int) -> Page:
        """Return a page."""
        return self._open((number,))[0]

    def open_all(self, numbers: Sequence[int]) -> list[Page]:
        """Return some pages, in the order of their numbers in `numbers`."""
        return self._open(numbers)

    def numbers_of(self, samples: Any) -> Integers:
        """Return the number of the page of each sample; int64, in the shape of `samples`. Raises
        IndexError."""
        wanted = np.asarray(samples, np.int64)
        self._check(wanted)
        found: Integers = np.searchsorted(self.starts, wanted, side="right") - 1
        return found

    def _check(self, wanted: Integers) -> None:
        # Read as unsigned, a number below 0 is above all others.
        if wanted.size and int(wanted.view(np.uint64).max()) >= int(self.starts[-1]):
            raise IndexError(f"a sample outside 0…{int(self.starts[-1]) - 1}")

    def _joined_numbers(self, wanted: Integers) -> Narrow:
        """Return the number of the page of each sample, where columns are joined. Raises IndexError."""
        self._check(wanted)
        if self._numbers is None:
            self._numbers = np.repeat(np.arange(len(self), dtype=np.uint16), np.diff(self.starts))
        return self._numbers[wanted]

    def _try_to_join(self, column: Callable[[Page], Narrow]) -> Narrow | None:
        try:
            joined = self._joined[column] = np.concatenate([column(page) for page in self])
        except Exception:  # a page cannot be opened, which matters only to those who ask for its samples
            self._left = None
            return None
        return joined

    def _group_by_page(self, wanted: Integers) -> _Groups:
        groups = self._last
        if not np.array_equal(groups.samples, wanted):
            groups = self._last = _Groups(self, wanted)
        return groups

    def objects_at(self, samples: Any) -> Int32:
        """Return the number of the object of each sample, which is that of its page."""
        wanted = np.asarray(samples, np.int64)
        if self._joined:
            return self._joined_numbers(wanted).astype(np.int32)
        numbers = self.numbers_of(wanted) if wanted.ndim == 0 else self._group_by_page(wanted).numbers
        return numbers.astype(np.int32)

    def gather(self, samples: Any, column: Callable[[Page], Narrow]) -> Integers:
        """Return a column's values for some samples; int64, in the shape of `samples`."""
        wanted = np.asarray(samples, np.int64)
        joined = self._joined.get(column)
        if joined is None and self._left is not None:
            self._left -= wanted.size
            joined = self._try_to_join(column) if self._left < 0 else None
        if joined is not None:
            self._check(wanted)
            return joined[wanted].astype(np.int64)
        if wanted.ndim == 0:
            number = int(self.numbers_of(wanted))
            found: Any = np.int64(column(self.open(number))[int(wanted - self.starts[number])])
            return found  # type: ignore[no-any-return]  # a scalar, as an array gives for an index
        return self._group_by_page(wanted).values(column).reshape(wanted.shape)

    def join(self, column: Callable[[Page], Narrow]) -> Integers:
        """Return a column's values for all samples: int64[N]."""
        result = np.empty(int(self.starts[-1]), np.int64)
        for number, page in enumerate(self):
            result[self.starts[number] : self.starts[number + 1]] = column(page)
        return result

    def __iter__(self) -> Iterator[Page]:
        return map(self.open, range(len(self)))

    def name(self, sample: int) -> str:
        """Return the name of a sample within its shard."""
        number = int(self.numbers_of(sample))
        return self.open(number).name(sample - int(self.starts[number]))

    def names(self) -> StringColumn:
        """Return the names of all samples."""
        runs = [page.all_names() for page in self]
        return StringColumn(b"".join(run.blob for run in runs), np.concatenate([run.lengths for run in runs]))


class _Groups:
    """Samples grouped by page. `numbers`: the page of each, int64, in the shape of `samples`."""

    __slots__ = ("_groups", "_pages", "numbers", "samples")

    def __init__(self, pages: Pages, samples: Integers) -> None:
        self._pages = pages
        self.samples = samples.copy()
        self.numbers = pages.numbers_of(samples)
        self._groups: tuple[Integers, Integers, list[tuple[Page, int, int]]] | None = None

    def _open_groups(self) -> tuple[Integers, Integers, list[tuple[Page, int, int]]]:
        """Return the places of the samples, page after page; their numbers within their pages, in that order;
        and each page, opened, with its part of both."""
        pages, numbers = self._pages, self.numbers.ravel()
        narrow = numbers.astype(np.uint16) if len(pages) <= 1 << 16 else numbers
        order = np.argsort(narrow, kind="stable")  # of narrow integers a radix sort
        numbers = numbers[order]
        local = self.samples.ravel()[order] - pages.starts[numbers]
        ends = [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), numbers.size] if numbers.size else []
        opened = pages.open_all(numbers[np.array(ends, np.int64) - 1].tolist())
        return order, local, list(zip(opened, [0, *ends], ends, strict=False))

    def values(self, column: Callable[[Page], Narrow]) -> Integers:
        """Return a column's values in the order of the samples: int64[n]."""
        if self._groups is None:  # who asks for their objects alone opens no page
            self._groups = self._open_groups()
        order, local, groups = self._groups
        result = np.empty(local.size, np.int64)
        if 4 * len(groups) > local.size:  # single values are faster than arrays of one
            places = local.tolist()
            found = [column(page)[at] for page, first, end in groups for at in places[first:end]]
            result[order] = np.array(found, np.int64)
            return result
        for page, first, end in groups:
            result[order[first:end]] = column(page)[local[first:end]]
        return result


@cache  # one function a part: what is joined is found by it
def _offsets_of(part: int) -> Callable[[Page], Narrow]:
    return lambda page: page.offsets[part]


@cache
def _lengths_of(part: int) -> Callable[[Page], Narrow]:
    return lambda page: page.lengths[part]


class PagedColumn(BytesColumn):
    """A field of bytes, which is a part of the samples on each page; page n is in the snapshot's object n.
    `total`: bytes of all samples."""

    __slots__ = ("_lengths", "_offsets", "pages", "part", "total")

    pages: Pages
    part: int
    total: int
    _offsets: Callable[[Page], Narrow]
    _lengths: Callable[[Page], Narrow]

    def __init__(self, pages: Pages, part: int, total: int) -> None:
        for name, value in {
            "pages": pages, "part": part, "total": total,
            "_offsets": _offsets_of(part), "_lengths": _lengths_of(part),
        }.items():  # fmt: skip
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<PagedColumn, part {self.part} of {self.pages!r}>"

    @property
    def object(self) -> Int32:
        return np.repeat(np.arange(len(self.pages), dtype=np.int32), np.diff(self.pages.starts))

    @property
    def offset(self) -> Integers:
        return self.pages.join(self._offsets)

    @property
    def length(self) -> Integers:
        return self.pages.join(self._lengths)

    def objects_at(self, samples: Any) -> Int32:
        return self.pages.objects_at(samples)

    def offsets_at(self, samples: Any) -> Integers:
        return self.pages.gather(samples, self._offsets)

    def lengths_at(self, samples: Any) -> Integers:
        return self.pages.gather(samples, self._lengths)

    def total_bytes(self) -> int:
        return self.total

    def take(self, samples: Integers) -> BytesColumn:
        return BytesColumn(self.objects_at(samples), self.offsets_at(samples), self.lengths_at(samples))

    def renumber(self, numbers: Integers) -> BytesColumn:
        return BytesColumn(numbers[self.object].astype(np.int32), self.offset, self.length)


class PagedLabels(LabelColumn):
    """A label whose classes each page lists: `of_pages` int64[C] has those of all pages, and `bounds`
    int64[P+1] says which are those of a page. Where it is one, it is the class of all its samples."""

    __slots__ = ("bounds", "of_pages", "pages")

    of_pages: Integers
    bounds: Integers
    pages: Pages

    def __init__(self, of_pages: Integers, bounds: Integers, classes: tuple[str, ...], pages: Pages) -> None:
        for name, value in {
            "of_pages": of_pages, "bounds": bounds, "classes": classes, "pages": pages
        }.items():  # fmt: skip
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<PagedLabels of {len(self.classes)} classes>"

    @property
    def uniform(self) -> bool:
        """Whether the samples of each page have one class."""
        return self.of_pages.size == len(self.pages)

    @property
    def values(self) -> Integers:
        numbers = np.repeat(self.bounds[:-1], np.diff(self.pages.starts))
        found: Integers = self.of_pages[numbers if self.uniform else numbers + self.pages.join(_classes)]
        return found

    def values_at(self, samples: Any) -> Integers:
        numbers: Integers = self.bounds[self.pages.numbers_of(samples)]
        if not self.uniform:
            numbers = numbers + self.pages.gather(samples, _classes)
        return self.of_pages[numbers]

    def counts(self) -> Integers:
        if self.uniform:
            found = np.bincount(self.of_pages, np.diff(self.pages.starts), minlength=len(self.classes))
            return found.astype(np.int64)
        return np.bincount(self.values, minlength=len(self.classes))


def _classes(page: Page) -> Narrow:
    if page.classes is not None:
        return page.classes
    return np.broadcast_to(np.uint8(0), (len(page),))
