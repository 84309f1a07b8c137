"""The `mesh` command on folders: sync, copies and deletions of many files."""

from __future__ import annotations

import errno
import importlib
import os
from typing import TYPE_CHECKING, Any

from meshsdk.cli import run
from tests.component.sdk.test_sdk_command import lines

cp_command = importlib.import_module("meshsdk.cli.cp")  # whose name is also that of its command

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_sync_copies_what_differs(mesh: Any, bucket: str, folder: Path, tmp_path: Path) -> None:
    target = f"s3://{bucket}/s"
    assert mesh("sync", "--dryrun", folder, target).count("would copy") == 3
    assert mesh("sync", folder, target).count("copied") == 3
    assert mesh("sync", folder, target) == ""
    (folder / "a.txt").write_text("longer than before")
    assert [line["target"] for line in lines(mesh("sync", "--json", folder, target))] == [f"{target}/a.txt"]
    for path in folder.rglob("*.txt"):
        os.utime(path, (4e9, 4e9))  # newer, of the same content
    assert mesh("sync", folder, target) == ""
    (folder / "a.txt").unlink()
    assert mesh("sync", folder, target) == ""
    assert "deleted" in mesh("sync", "--delete", folder, target)
    back = tmp_path / "back"
    assert mesh("sync", target, back).count("copied") == 2
    assert mesh("sync", target, back) == ""
    (back / "extra").write_text("x")
    mesh("sync", "--delete", "--exclude", "ex*", target, back)
    assert (back / "extra").exists()
    mesh("sync", "--delete", target, back)
    assert not (back / "extra").exists()
    assert mesh("sync", target, f"s3://{bucket}/s2").count("copied") == 2
    assert mesh("sync", target, f"s3://{bucket}/s2") == ""


def test_sync_never_deletes_for_an_empty_source(mesh: Any, bucket: str, folder: Path, tmp_path: Path) -> None:
    mesh("sync", folder, f"s3://{bucket}/s")
    (tmp_path / "empty").mkdir()
    assert "check the address" in mesh("sync", "--delete", tmp_path / "empty", f"s3://{bucket}/s", code=3)
    assert "3 objects" in mesh("stat", f"s3://{bucket}/s/")


def test_sync_deletes_nothing_while_a_part_of_the_source_is_out_of_sight(
    mesh: Any, bucket: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without rights, a file system that is not mounted: its copies in the store may be the last."""
    target = f"s3://{bucket}/s"
    mesh("sync", folder, target)
    (folder / "a.txt").unlink()
    (folder / "new.txt").write_text("new")
    with monkeypatch.context() as patched:
        unreadable(patched, folder / "sub/deep")
        told = mesh("sync", "--delete", folder, target, code=1)
        assert "nothing is deleted" in mesh(
            "sync", "--delete", "--exclude", "sub/deep", folder, target, code=1
        )
        excluded = mesh("sync", "--delete", "--exclude", "sub/deep/*", "--dryrun", folder, target)
        assert excluded.count("would delete") == 1, "what is left out does not have to be readable"
    assert f"{folder}/sub/deep is left out: Permission denied" in told
    assert "nothing is deleted, because not all of" in told
    kept = ["s/a.txt", "s/new.txt", "s/sub/b.txt", "s/sub/deep/c d.txt"]
    assert [line["key"] for line in lines(mesh("ls", "-r", "--json", target))] == kept
    assert mesh("sync", "--delete", folder, target).count("deleted") == 1


def test_links_to_folders_are_reported_and_nothing_behind_them_is_deleted(
    mesh: Any, bucket: str, folder: Path, tmp_path: Path
) -> None:
    """Other clients follow such links, or a folder was moved to another disk since the last time."""
    target = f"s3://{bucket}/s"
    mesh("sync", folder, target)
    (folder / "sub").rename(tmp_path / "elsewhere")
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    told = mesh("sync", "--delete", folder, target, code=1)
    assert "links to folders are not followed" in told
    assert "nothing is deleted" in told
    assert mesh("ls", "-r", target).count("sub/") == 2
    assert "are not followed" in mesh("cp", "-r", folder, f"s3://{bucket}/cp", code=1)
    assert "sub" not in mesh("ls", "-r", f"s3://{bucket}/cp")
    assert mesh("sync", "--delete", "--exclude", "sub/*", folder, target) == ""


def test_sync_deletes_nothing_after_a_copy_that_failed(mesh: Any, bucket: str, folder: Path) -> None:
    """A file that was renamed is still in the store under its earlier name, and nowhere else."""
    target = f"s3://{bucket}/s"
    mesh("sync", folder, target)
    (folder / "a.txt").unlink()
    (folder / "renamed.txt").symlink_to("/proc/self/mem")
    assert "nothing is deleted, because not all files were copied" in mesh(
        "sync", "--delete", folder, target, code=1
    )
    assert "3 objects" in mesh("stat", f"{target}/")


def test_what_cannot_be_read_is_left_out_and_reported(
    mesh: Any, bucket: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "dangling").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    with monkeypatch.context() as patched:
        unreadable(patched, folder / "sub/deep")
        told = mesh("cp", "-r", folder, f"s3://{bucket}/t", code=1)
    for name, why in [
        ("dangling", "No such file or directory"),
        ("pipe", "not a regular file"),
        ("sub/deep", "Permission denied"),
    ]:
        assert f"{folder}/{name} is left out: {why}" in told
    assert "2 objects" in mesh("stat", f"s3://{bucket}/t/")


def unreadable(patched: pytest.MonkeyPatch, folder: Path) -> None:
    """Let a folder be one that cannot be read, even by root."""
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if os.fspath(path) == str(folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return scan(path)

    patched.setattr(os, "scandir", refuse)


def test_a_folder_is_copied_without_others_whose_names_begin_alike(
    mesh: Any, s3: Any, bucket: str, tmp_path: Path
) -> None:
    for key in ("train", "train/a", "train/sub/b", "train-2/c", "train2"):
        s3.put_object(Bucket=bucket, Key=key, Body=key.encode())
    for source in ("train", "train/"):
        out = tmp_path / source.replace("/", "-folder")
        mesh("cp", "-r", f"s3://{bucket}/{source}", out)
        found = {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file()}
        alone = {} if source.endswith("/") else {"train": "train"}
        assert found == {"a": "train/a", "sub/b": "train/sub/b"} | alone
    assert "check the address" in mesh("cp", "-r", f"s3://{bucket}/tra", tmp_path / "none", code=3)


def test_a_folder_is_deleted_without_others_whose_names_begin_alike(
    mesh: Any, s3: Any, bucket: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def keys() -> list[str]:
        return [line["key"] for line in lines(mesh("ls", "-r", "--json", f"s3://{bucket}/train"))]

    for key in ("train", "train/a", "train-2/c", "train2"):
        s3.put_object(Bucket=bucket, Key=key, Body=b"")
    assert mesh("rm", "-r", f"s3://{bucket}/train/").count("deleted") == 1
    assert keys() == ["train", "train-2/c", "train2"]
    capfd.readouterr()
    assert run(["rm", "-r", f"s3://{bucket}/train"]) == 0
    assert f"2 other keys begin with s3://{bucket}/train; --prefix" in capfd.readouterr().err
    assert keys() == ["train-2/c", "train2"]
    capfd.readouterr()
    assert run(["rm", "--prefix", f"s3://{bucket}/train"]) == 0
    shown = capfd.readouterr()
    assert (shown.out.count("deleted"), shown.err) == (2, "2 objects deleted\n")


def test_an_interrupted_copy_says_how_much_is_done(
    mesh: Any, bucket: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_one = cp_command.copy_one

    def interrupted(client: Any, copy: Any, advance: Any) -> None:
        if "b.txt" in str(copy.source):
            raise KeyboardInterrupt  # as Ctrl-C while the main thread waits for the copies
        copy_one(client, copy, advance)

    with monkeypatch.context() as patched:
        patched.setattr(cp_command, "copy_one", interrupted)
        patched.setattr(cp_command, "_put_together", lambda *_: ())
        told = mesh("cp", "-r", "-j", "1", folder, f"s3://{bucket}/p", code=130)
    assert "1 of 3 files copied; `mesh sync` copies what is missing in a folder" in told
    assert mesh("sync", folder, f"s3://{bucket}/p").count("copied") == 2


def test_folders_whose_files_would_meet_are_told_with_both(mesh: Any, bucket: str, tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_bytes(b"x")
    told = mesh("cp", "-r", tmp_path / "cats", tmp_path / "dogs", f"s3://{bucket}/pets/", code=2)
    assert f"{tmp_path}/cats/1.jpg and {tmp_path}/dogs/1.jpg would both be s3://{bucket}/pets/1.jpg" in told
    assert "give each a target of its own" in told
