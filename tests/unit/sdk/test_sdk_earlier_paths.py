"""Module paths of the SDK's earlier releases: they work, and name the present path in a warning."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from importlib import import_module

import pytest

import meshsdk
from meshsdk.adapters.plain import as_dict
from meshsdk.admin import documents, jobs
from meshsdk.client.request import Request
from meshsdk.client.s3_client import Client
from meshsdk.datasets.dataset import Dataset
from meshsdk.earlier_paths import ELSEWHERE, MOVED, RENAMED, SPLIT, present_path
from meshsdk.loader.epoch_iterator import FrameAddress
from meshsdk.loader.loader import Loader
from meshtools.top import loader_pages


@pytest.mark.parametrize(("earlier", "present"), MOVED.items())
def test_every_earlier_module_gives_the_names_of_the_present_one(earlier: str, present: str) -> None:
    old, new = import_module(f"meshsdk.{earlier}"), import_module(present_path(present))
    for name, renamed in RENAMED.get(earlier, {}).items():
        with pytest.warns(
            DeprecationWarning,
            match=rf"^meshsdk\.{earlier}\.{name} is deprecated: use {new.__name__}\.{renamed};",
        ):
            assert getattr(old, name) is getattr(new, renamed)
    public = [name for name, value in vars(new).items() if getattr(value, "__module__", "") == new.__name__]
    for name in public:
        with pytest.warns(DeprecationWarning, match=rf"use {new.__name__}\.{name};"):
            assert getattr(old, name) is getattr(new, name)
    for name, path in ELSEWHERE.get(earlier, {}).items():
        home, _, renamed = present_path(path).rpartition(".")
        with pytest.warns(DeprecationWarning, match=rf"^meshsdk\.{earlier}\.{name} is .* use {home}\."):
            assert getattr(old, name) is getattr(import_module(home), renamed)


def test_an_earlier_module_of_the_tools_names_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    old = import_module("meshsdk.doctor.advice")
    monkeypatch.setattr("meshsdk.earlier_paths.import_module", missing)
    with pytest.raises(
        ModuleNotFoundError, match=r"now meshtools\.doctor\.advice.*pip install 'shardmesh\[tools\]'"
    ):
        old.advise  # noqa: B018 the name is looked up


def test_the_ways_to_import() -> None:
    with pytest.warns(
        DeprecationWarning, match=r"meshsdk\.loaders\.Loader is deprecated: use meshsdk\.loader"
    ) as told:
        from meshsdk.loaders import Loader as earlier_loader  # type: ignore[import-not-found]
    assert earlier_loader is Loader
    assert told[0].filename == __file__  # the line that is to be changed
    from meshsdk import jobs as earlier_jobs  # type: ignore[attr-defined]

    with pytest.warns(DeprecationWarning, match=r"use meshsdk\.admin\.jobs\.reshard_job"):
        assert earlier_jobs.reshard_job is jobs.reshard_job
    with pytest.warns(DeprecationWarning, match=r"use meshsdk\.client\.request\.Request"):
        from meshsdk.transport import (  # type: ignore[import-not-found]
            Request as earlier_request,
        )
    assert earlier_request is Request
    with pytest.warns(DeprecationWarning, match=r"use meshsdk\.admin\.documents\.list_documents"):
        from meshsdk.keeping import list_kept  # type: ignore[import-not-found]
    assert list_kept is documents.list_documents


def test_a_module_is_imported_from_its_earlier_package() -> None:
    from meshsdk.tops import pages as earlier_pages  # type: ignore[import-not-found]

    with pytest.warns(DeprecationWarning, match=r"use meshtools\.top\.loader_pages\.read_pages"):
        assert earlier_pages.pages is loader_pages.read_pages


def test_modules_that_became_packages_keep_their_names() -> None:
    with pytest.warns(
        DeprecationWarning, match=r"meshsdk\.datasets\.Dataset is deprecated: use meshsdk\.datasets\.dataset"
    ) as told:
        from meshsdk.datasets import (  # type: ignore[attr-defined]
            Dataset as earlier_dataset,
        )
    assert told[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"use meshsdk\.client\.s3_client\.Client"):
        from meshsdk.client import Client as earlier_client  # type: ignore[attr-defined]
    assert (earlier_dataset, earlier_client) == (Dataset, Client)
    for package, homes in SPLIT.items():
        for name, home in homes.items():
            assert hasattr(import_module(f"meshsdk.{home}"), name), package


def test_names_that_left_a_module_are_found_through_it() -> None:
    with pytest.warns(DeprecationWarning, match=r"use meshsdk\.loader\.epoch_iterator\.FrameAddress"):
        from meshsdk.client.native_api import (  # type: ignore[attr-defined]
            FrameAddress as earlier_address,
        )
    with pytest.warns(DeprecationWarning, match=r"use meshsdk\.datasets\.dataset\.mix"):
        from meshsdk.datasets.split_mix import mix as earlier_mix  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match=r"use meshsdk\.adapters\.plain\.as_dict"):
        from meshsdk.loader.plain_batches import (  # type: ignore[import-not-found]
            as_dict as earlier_as_dict,
        )
    assert (earlier_address, earlier_mix, earlier_as_dict) == (FrameAddress, meshsdk.mix, as_dict)


def test_what_was_pickled_under_an_earlier_path_is_read() -> None:
    with pytest.warns(DeprecationWarning, match=r"meshsdk\.orders\.Blocks"):
        assert pickle.loads(b"cmeshsdk.orders\nBlocks\n.") is meshsdk.Blocks


def test_unknown_names_stay_unknown() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("meshsdk.lodaers")
    with pytest.raises(ImportError, match="cannot import name 'Lodaer'"):
        from meshsdk.loaders import Lodaer  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Datasets'"):
        from meshsdk.datasets import Datasets  # type: ignore[attr-defined]  # noqa: F401


def test_the_sdk_itself_uses_no_earlier_path() -> None:
    code = "import meshsdk, meshsdk.cli, meshsdk.loader; [getattr(meshsdk, name) for name in meshsdk.__all__]"
    subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:meshsdk", "-c", code], check=True, timeout=60
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from meshsdk.client import s3_client  # a module, whose name the package is asked for first
        from meshsdk.datasets import batch
    assert s3_client.Client is Client
    assert batch.Batch is meshsdk.Batch
