"""The `mesh` command against a real daemon: what it prints, what it does, how it exits."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from meshsdk import ops
from meshsdk.byte_sizes import format_size
from meshsdk.cli import run
from meshsdk.cli.bad_samples import file_name
from meshsdk.client.s3_client import connect
from meshsdk.loader.loader import Loader
from meshsdk.open_dataset import open as open_dataset
from tests.support.archive_files import tar_of
from tests.support.required import required_module

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.daemons import Daemon


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_where_there_is_nothing_what_to_do_is_told(
    mesh: Any, bucket: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*words: str) -> str:
        capfd.readouterr()
        assert run(list(words)) == 0
        out, err = capfd.readouterr()
        assert not out
        return err

    assert f"s3://{bucket}/ is empty: mesh cp" in told("ls", f"s3://{bucket}")
    assert "mesh view create --help" in told("view", "ls", bucket)
    assert "no op matches 'nosuch': `mesh op ls`" in told("op", "ls", "nosuch")
    assert not told("ls", "--json", f"s3://{bucket}") + told("-q", "view", "ls", bucket)


def test_up_list_stat_cat_down_remove(mesh: Any, bucket: str, folder: Path, tmp_path: Path) -> None:
    assert mesh("cp", "-r", folder, f"s3://{bucket}/t").count("copied") == 3
    assert [line["key"] for line in lines(mesh("ls", "--json", f"s3://{bucket}/t/"))] == ["t/sub/", "t/a.txt"]
    assert "3 objects, 30 B" in mesh("ls", "-r", f"s3://{bucket}/t")
    assert "3 objects" in mesh("stat", f"s3://{bucket}/t/")
    (known,) = lines(mesh("stat", "--json", f"s3://{bucket}/t/a.txt"))
    assert (known["size"], known["content_type"]) == (5, "text/plain")
    assert mesh("cat", f"s3://{bucket}/t/a.txt", f"s3://{bucket}/t/sub/b.txt") == "a.txtsub/b.txt"
    assert mesh("head", "-c", "3", f"s3://{bucket}/t/sub/b.txt") == "sub"
    mesh("cp", "-r", f"s3://{bucket}/t", tmp_path / "out")
    assert (tmp_path / "out/sub/deep/c d.txt").read_text() == "sub/deep/c d.txt"
    mesh("cp", f"s3://{bucket}/t/a.txt", f"{tmp_path}/")
    assert (tmp_path / "a.txt").read_text() == "a.txt"
    mesh("cp", f"s3://{bucket}/t/a.txt", f"s3://{bucket}/u/")
    assert mesh("cat", f"s3://{bucket}/u/a.txt") == "a.txt"
    assert "would delete" in mesh("rm", "-r", "--dryrun", f"s3://{bucket}/t")
    assert mesh("rm", "-r", f"s3://{bucket}/t").count("deleted") == 3
    assert "u/a.txt" in mesh("ls", "-r", f"s3://{bucket}")


def test_buckets(mesh: Any, bucket: str) -> None:
    name = f"{bucket}-made"
    assert mesh("mb", f"s3://{name}") == f"created s3://{name}\n"
    assert name in [line["bucket"] for line in lines(mesh("ls", "--json"))]
    assert f"s3://{name}" in mesh("ls")
    mesh("rb", f"s3://{name}")
    assert name not in mesh("ls")


def test_a_bucket_that_exists_is_not_called_created(mesh: Any, bucket: str) -> None:
    assert mesh("mb", f"s3://{bucket}") == f"s3://{bucket} exists already\n"
    (again,) = lines(mesh("mb", "--json", f"s3://{bucket}"))
    (new,) = lines(mesh("mb", "--json", f"s3://{bucket}-new"))
    assert (again["created"], new["created"]) == (False, True)


def test_standard_input_and_output(mesh: Any, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe")))
    mesh("cp", "-", f"s3://{bucket}/piped")
    assert mesh("cp", f"s3://{bucket}/piped", "-") == "from a pipe"
    assert mesh("cat", "--offset", "5", "--length", "1", f"s3://{bucket}/piped") == "a"


def test_deletes_that_are_only_counted(mesh: Any, s3: Any, bucket: str) -> None:
    for key in ("a", "t/b", "t/c"):
        s3.put_object(Bucket=bucket, Key=key, Body=b"")
    assert mesh("rm", "-q", "-r", "--dryrun", f"s3://{bucket}/t") == "would delete 2 objects\n"
    assert mesh("rm", "-q", "-r", f"s3://{bucket}/t") == "2 objects deleted\n"
    assert mesh("rm", "-q", f"s3://{bucket}/a") == "1 object deleted\n"


def test_a_folder_for_downloads_is_made_if_it_is_written_as_one(
    mesh: Any, s3: Any, bucket: str, tmp_path: Path
) -> None:
    for key in ("a/1", "a/2"):
        s3.put_object(Bucket=bucket, Key=key, Body=key.encode())
    mesh("cp", f"s3://{bucket}/a/1", f"{tmp_path}/one/")
    mesh("cp", f"s3://{bucket}/a/2", f"{tmp_path}/one/")
    mesh("cp", f"s3://{bucket}/a/1", f"s3://{bucket}/a/2", f"{tmp_path}/both/")
    for folder in ("one", "both"):
        found = {path.name: path.read_text() for path in (tmp_path / folder).iterdir()}
        assert found == {"1": "a/1", "2": "a/2"}


def test_a_download_into_a_pipe_does_not_replace_it(mesh: Any, s3: Any, bucket: str, tmp_path: Path) -> None:
    """Nor a device: a root's /dev/null would be a file from then on."""
    s3.put_object(Bucket=bucket, Key="k", Body=b"through the pipe")
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for target in (pipe, link):
            mesh("cp", f"s3://{bucket}/k", target)
            assert os.read(reader, 100) == b"through the pipe"
            assert (pipe.is_fifo(), link.is_symlink()) == (True, True)
    finally:
        os.close(reader)


def test_a_download_keeps_the_rights_of_the_file_that_it_replaces(
    mesh: Any, s3: Any, bucket: str, tmp_path: Path
) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"new")
    secret = tmp_path / "secret"
    secret.write_text("old")
    secret.chmod(0o600)
    mesh("cp", f"s3://{bucket}/k", secret)
    assert (secret.read_text(), secret.stat().st_mode & 0o777) == ("new", 0o600)


def test_an_empty_object_has_an_empty_beginning(mesh: Any, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="empty", Body=b"")
    assert mesh("head", f"s3://{bucket}/empty") == mesh("cat", f"s3://{bucket}/empty") == ""


def test_a_terminal_is_told_what_an_object_is_whose_bytes_are_no_text(
    mesh: Any, s3: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, picture = tar_of({f"{n:02}.txt": b"text" for n in range(20)}), b"\x89PNG\r\n\x1a\n" + bytes(600)
    s3.put_object(Bucket=bucket, Key="t/shard.tar", Body=shard)
    s3.put_object(Bucket=bucket, Key="t/broken.tar", Body=b"\xff" * 1024)
    s3.put_object(Bucket=bucket, Key="t/a.png", Body=picture, ContentType="image/png")
    s3.put_object(Bucket=bucket, Key="t/a.txt", Body="Größe\n".encode() * 200)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    def shown(key: str, *more: str) -> list[str]:
        return str(mesh("head", *more, f"s3://{bucket}/t/{key}")).splitlines()

    first, *files, everything, samples = shown("shard.tar")
    assert first == f"s3://{bucket}/t/shard.tar: an archive (tar) of 20 files, {format_size(len(shard))}"
    assert [line.split()[-1] for line in files] == [f"{n:02}.txt" for n in range(10)]
    assert everything.endswith(f"mesh archive ls s3://{bucket}/t/shard.tar")
    *_, command = samples.partition("mesh ")
    assert "20 samples" in mesh(*command.replace("NAME=EXT", "text=txt").split())
    assert shown("a.png")[0] == f"s3://{bucket}/t/a.png: image/png, 608 B; its bytes are no text"
    assert shown("broken.tar")[-1] == f"samples: mesh head s3://{bucket}/t/ --kind KIND"
    assert shown("a.txt", "-c", "11") == ["Größe", "Gr\ufffd"]  # cut within a character
    [told] = lines("\n".join(shown("shard.tar", "--json")))
    assert (told["kind"], told["files"], told["size"]) == ("tar", 20, len(shard))


def test_objects_that_stand_for_folders_do_not_stop_a_copy(
    mesh: Any, s3: Any, bucket: str, tmp_path: Path
) -> None:
    """As the web consoles of S3 stores make them."""
    for key in ("t/", "t/sub/", "t/sub/a", "t/empty/"):
        s3.put_object(Bucket=bucket, Key=key, Body=b"a" if key.endswith("a") else b"")
    for number, command in enumerate([("cp", "-r"), ("sync",), ("sync", "--delete")]):
        mesh(*command, f"s3://{bucket}/t", tmp_path / str(number))
        assert [path.name for path in (tmp_path / str(number)).rglob("*") if path.is_file()] == ["a"]
    assert mesh("sync", "--delete", tmp_path / "0", f"s3://{bucket}/t") == ""
    mesh("cp", "-r", f"s3://{bucket}/t", f"s3://{bucket}/u")
    assert [line["key"] for line in lines(mesh("ls", "-r", "--json", f"s3://{bucket}/u"))] == [
        "u/empty/",
        "u/sub/",
        "u/sub/a",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["ls", "s3://{b}/nope"], 3, "no key begins with"),
        (["cp", "-r", "s3://{b}/nope", "/tmp/nowhere"], 3, "check the address"),
        (["stat", "s3://{b}/nope"], 3, "mesh ls s3://"),
        (["cat", "s3://{b}/nope"], 3, "no object"),
        (["cat", "s3://{b}"], 2, "is a bucket; list it with `mesh ls s3://"),
        (["rm", "s3://{b}/nope"], 3, "no object"),
        (["ls", "s3://no-such-bucket-{b}"], 3, "mesh mb"),
        (["rm", "s3://{b}/"], 2, "add -r"),
        (["cp", "s3://{b}/x/", "."], 2, "add -r"),
        (["cp", "/nowhere/at/all", "s3://{b}/"], 3, "no file"),
        (["cp", "/etc", "s3://{b}/"], 2, "add -r"),
        (["cp", "/etc/hostname", "/tmp/x"], 2, "neither side"),
        (["sync", "/etc", "/tmp"], 2, "rsync"),
        (["sync", "/nowhere/at/all", "s3://{b}/x"], 3, "there is no folder /nowhere/at/all"),
        (["sync", "/etc/hostname", "s3://{b}/x"], 2, "is a file"),
        (["sync", "s3://{b}/x", "/etc/hostname"], 2, "is a file"),
        (["ls", "http://x/y"], 2, "s3://"),
        (["stat", "local"], 2, "not in the store"),
        (["mb", "s3://{b}/key"], 2, "names a key"),
        (["bench", "--op", "blur:image", "s3://{b}/"], 2, "--op"),
        (["cp", "-r", "/etc", "s3://Upper_Case/"], 2, "a bucket name has 3 to 63 characters"),
        (["ls", "s3:/{b}/x"], 2, "write s3://{b}/x"),
        (["head", "--kind", "jsonl", "s3://{b}/"], 2, "did you mean 'lines'?"),
        (
            ["archive", "s3://{b}/x.tar"],
            2,
            "Write one of ls, show, such as `mesh archive show s3://{b}/x.tar`",
        ),
        (["plans", "lss"], 2, "Did you mean 'ls'?"),
        (["frobnicate"], 2, "No such command"),
        (["--endpoint-url", "ftp://x", "ls"], 2, "endpoint"),
        (["ls", "--endpoint-url", "ftp://x"], 2, "endpoint"),
        (["ls", "--deadline", "-1"], 2, "--deadline"),
    ],
)
def test_refusals(mesh: Any, bucket: str, arguments: list[str], code: int, words: str) -> None:
    assert words.replace("{b}", bucket) in mesh(
        *(argument.replace("{b}", bucket) for argument in arguments), code=code
    )


@pytest.mark.parametrize("arguments", [["--deadline", "0", "ls"], ["ls", "--deadline", "0"]])
def test_a_server_that_is_away_is_waited_for_as_long_as_one_says(mesh: Any, arguments: list[str]) -> None:
    told = mesh("--endpoint-url", "http://127.0.0.1:1", *arguments, code=1)
    assert "gave up after 1 attempt in 0 s: " in told
    assert told.endswith("MESH_ENDPOINT is right. To wait longer: --deadline SECONDS.\n")


def test_failed_copies_are_told_as_failed_commands_are(mesh: Any, bucket: str) -> None:
    copying = ["cp", "/etc/hostname", f"s3://{bucket}/x"]
    told = mesh("--endpoint-url", "http://127.0.0.1:1", "--deadline", "0", *copying, code=1)
    assert told.startswith("mesh: /etc/hostname: gave up after 1 attempt")
    assert "To wait longer: --deadline SECONDS.\n" in told
    told = mesh("--json", "cp", "/etc/hostname", f"s3://no-such-{bucket}/x", code=1)
    assert json.loads(told)["error"] == "NoSuchBucket"
    assert (
        json.loads(mesh("--json", "cp", "/no/file", f"s3://{bucket}/x", code=3))["error"] == "NotFoundError"
    )


def test_errors_for_programs(mesh: Any, bucket: str) -> None:
    error = json.loads(mesh("--json", "stat", f"s3://{bucket}/nope", code=3))
    assert error["error"] == "NoSuchKey"


def test_a_key_that_is_no_file_name_is_refused(mesh: Any, s3: Any, bucket: str, tmp_path: Path) -> None:
    s3.put_object(Bucket=bucket, Key="t/../../evil", Body=b"x")
    assert "not a valid file name" in mesh("cp", "-r", f"s3://{bucket}/t", tmp_path / "out", code=2)
    assert list(tmp_path.iterdir()) == []


def test_one_failure_does_not_stop_the_others(mesh: Any, bucket: str, folder: Path) -> None:
    (folder / "closed").symlink_to("/proc/self/mem")
    mesh("cp", "-r", folder, f"s3://{bucket}/t", code=1)
    assert "3 objects" in mesh("stat", f"s3://{bucket}/t/")


def test_a_summary_ends_copies_and_quiet_leaves_it_alone(mesh: Any, bucket: str, folder: Path) -> None:
    summary = r"3 files, 30 B in \d+\.\d s"
    *each, last = mesh("cp", "-r", folder, f"s3://{bucket}/t").splitlines()
    assert [line.split()[0] for line in each] == ["copied"] * 3
    assert re.fullmatch(summary, last)
    assert re.fullmatch(summary + "\n", mesh("cp", "-q", "-r", folder, f"s3://{bucket}/t"))
    assert mesh("cp", "--only-show-errors", "-r", folder, f"s3://{bucket}/t") == ""
    assert mesh("sync", "--only-show-errors", folder, f"s3://{bucket}/u") == ""
    assert mesh("sync", "--only-show-errors", folder, f"s3://{bucket}/u") == ""
    assert len(lines(mesh("cp", "--json", "-r", folder, f"s3://{bucket}/t"))) == 3


def test_an_error_of_all_copies_is_told_once(mesh: Any, bucket: str, tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number:02}.txt").write_text("x")
    told = mesh("cp", "-r", "-j", "2", tmp_path, "s3://no-such-bucket-here/t", code=1).splitlines()
    assert len(told) == 2
    assert told[0].startswith("mesh: ")
    assert "[404 NoSuchBucket]" in told[0]
    assert re.fullmatch(r"mesh: stopped: 5[789] files were not tried, because all would fail alike", told[1])
    errors = lines(mesh("cp", "--json", "-r", tmp_path, "s3://no-such-bucket-here/t", code=1))
    assert [line["error"] for line in errors] == ["NoSuchBucket", "MeshError"]


def test_errors_of_one_kind_alone_end_copies_after_a_while(mesh: Any, bucket: str, tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number:02}").symlink_to("/proc/self/mem")
    told = mesh("cp", "-r", "-j", "1", tmp_path, f"s3://{bucket}/t", code=1).splitlines()
    assert len(told) == 21
    assert told[-1] == "mesh: stopped: 40 files were not tried, because all would fail alike"
    (tmp_path / "0.txt").write_text("one that can be copied, first")
    told = mesh("cp", "-r", "-j", "1", tmp_path, f"s3://{bucket}/t", code=1).splitlines()
    assert len(told) == 60


def test_head_and_bench_of_a_dataset(mesh: Any, s3: Any, bucket: str) -> None:
    cv2 = required_module("cv2")
    import numpy as np

    rng = np.random.default_rng(1)
    for number in range(12):
        picture = cv2.imencode(".jpg", rng.integers(0, 255, (40, 50, 3), dtype=np.uint8))[1].tobytes()
        s3.put_object(Bucket=bucket, Key=f"p/{'cat' if number % 2 else 'dog'}/{number:02}.jpg", Body=picture)
    text = mesh("head", f"s3://{bucket}/p/")
    assert mesh("head", f"s3://{bucket}/p") == text  # as mesh.open takes it
    assert "12 samples" in text
    assert "2 classes: cat, dog" in text
    assert text.count("label: ") == 4
    shown = lines(mesh("--json", "head", "-n", "1", f"s3://{bucket}/p", "--field", "image=jpg"))
    assert [line["type"] for line in shown] == ["dataset", "sample"]
    ops = ["--op", "decode:image", "--op", "random_resized_crop:image:16", "--op", "to_chw:image"]
    (first, second) = lines(mesh("--json", "bench", f"s3://{bucket}/p", *ops, "-b", "4", "--epochs", "2"))
    assert (first["samples"], second["epoch"]) == (12, 1)
    assert "samples/s" in mesh("bench", f"s3://{bucket}/p", *ops, "-b", "4")
    assert "50 GETs" in mesh("bench", "--gets", "-n", "50", "-c", "4", f"s3://{bucket}/p/")
    assert "nothing is under" in mesh("head", f"s3://{bucket}/none/", code=3)
    (first, *_) = lines(mesh("--json", "ls", "-r", f"s3://{bucket}/p/"))
    assert "open its folder" in mesh("head", f"s3://{bucket}/{first['key']}", "--kind", "lines", code=3)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("command", ["schema", "stats", "preflight", "head", "split"])
def test_who_waits_sees_how_far_it_is(
    mesh: Any, s3: Any, bucket: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put_object(Bucket=bucket, Key="0.txt", Body=b"text")
    more = ("--part", "all=1") if command == "split" else ()
    arguments = (command, f"s3://{bucket}/", "--filter", "size > 0", *more)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    shown = mesh(*arguments)
    assert f"{command}: " in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert mesh(*arguments, "--quiet") == shown
    assert terminal.getvalue() == ""


def test_datasets_are_split_and_mixed(
    mesh: Any, s3: Any, bucket: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in range(40):
        s3.put_object(Bucket=bucket, Key=f"{'web' if number < 30 else 'books'}/{number:02}.txt", Body=b"text")
    parts = lines(mesh("--json", "split", f"s3://{bucket}/", "--part", "train=0.7", "--part", "val=0.3"))
    assert [part["part"] for part in parts] == ["train", "val"]
    assert sum(part["samples"] for part in parts) == 40
    val = parts[1]
    (found,) = lines(mesh("--json", "stats", f"s3://{bucket}/", "--snapshot", val["snapshot"]))
    assert found["samples"] == val["samples"]
    assert f"{val['samples']} samples" in mesh(
        "split", f"s3://{bucket}/", "--part", "a=0.7", "--part", "b=0.3"
    )
    assert "train=0.9" in mesh("split", f"s3://{bucket}/", "--part", "train", code=2)
    assert "the same name" in mesh("split", f"s3://{bucket}/", "--part", "a=0.5", "--part", "a=0.5", code=2)
    whole = "--part", "train=0.8", "--part", "val=0.2"
    for wrong in (
        ("train=0.8", "val=0.2"),
        ("--part", "train=0.8", "val=0.2"),
        ("--part", "train=80", "--part", "val=20"),
    ):
        assert " ".join(("write", *whole)) in mesh("split", f"s3://{bucket}/", *wrong, code=2)
    for unclear in ((), ("val",), ("--part", "a=0.9", "--part", "b=0")):
        assert "write --part train=0.9 --part val=0.1" in mesh("split", f"s3://{bucket}/", *unclear, code=2)
    for parts_given, hint in (
        (whole[:2], "to less than 1; for a part of them, add --part rest=0.2\n"),
        (whole, ""),
    ):
        capfd.readouterr()
        assert run(["split", f"s3://{bucket}/", *parts_given]) == 0
        told = capfd.readouterr().err
        assert ("of 40 samples are in no part" in told, hint in told) == (bool(hint), True)
    of_pinned = ("--snapshot", val["snapshot"], "--field", "text=txt")
    assert "--field" in mesh("stats", f"s3://{bucket}/", *of_pinned, code=2)

    urls = f"s3://{bucket}/web/=0.5", f"s3://{bucket}/books/=0.5"
    mixed, web, books = lines(mesh("--json", "mix", *urls, "--epochs", "3"))
    assert (mixed["positions"], web["positions"], books["positions"]) == (40, 60, 60)
    assert (web["least"], web["most"], books["least"], books["most"]) == (2, 2, 6, 6)
    assert "of 10 samples 2 times" in mesh("mix", *urls)
    assert "two or more datasets" in mesh("mix", urls[0], code=2)
    assert "s3://web/=0.7" in mesh("mix", "s3://web", "s3://books", code=2)


def test_as_a_process_it_is_quiet_without_a_terminal(daemon: Daemon, bucket: str, folder: Path) -> None:
    env = os.environ | {
        "MESH_ENDPOINT": daemon.endpoint,
        "AWS_ACCESS_KEY_ID": daemon.access_key,
        "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
    }
    command = [sys.executable, "-c", "from meshsdk.cli import main; main()"]
    done = subprocess.run(
        [*command, "cp", "-r", str(folder), f"s3://{bucket}/t"],
        env=env,
        capture_output=True,
        check=True,
        timeout=100,
    )
    assert done.stderr == b""
    helped = subprocess.run(
        [*command, "sync", "--help"], env={}, capture_output=True, check=True, timeout=100
    )
    assert b"mesh sync ./photos s3://photos/train" in helped.stdout


def test_a_progress_bar_where_there_is_a_terminal(
    mesh: Any, bucket: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert mesh("cp", "-r", folder, f"s3://{bucket}/t").count("copied") == 3
    assert mesh("rm", "-r", f"s3://{bucket}/t").count("deleted") == 3


def test_long_work_tells_its_steps(
    mesh: Any, bucket: str, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh("cp", "-r", folder, f"s3://{bucket}/t")
    place = f"s3://{bucket}/t/"
    work = {
        ("split", place, "--part", "a=0.5", "--part", "b=0.5", "--seed", "1"): [
            "mesh: split: 3 samples pinned (1 of 3)",
            "mesh: split: a pinned (2 of 3)",
            "mesh: split: b pinned (3 of 3)",
        ],
        ("mix", f"{place}=3", f"{place}=1"): [
            f"mesh: mix: {place} pinned (1 of 4)",
            f"mesh: mix: {place} pinned (2 of 4)",
            "mesh: mix: datasets mixed (3 of 4)",
            "mesh: mix: epochs counted (4 of 4)",
        ],
    }
    for command, wanted in work.items():
        capfd.readouterr()
        assert run(list(command)) == 0
        out, err = capfd.readouterr()
        assert err.splitlines() == wanted
        for silent in ("--quiet", "--json"):
            assert run([*command, silent]) == 0
            assert capfd.readouterr().err == ""
        with monkeypatch.context() as terminal:
            terminal.setattr(sys.stderr, "isatty", lambda: True, raising=False)
            assert run(list(command)) == 0
        shown = capfd.readouterr()
        assert shown.out == out  # a pipe gets the same
        assert "mesh: " not in shown.err


IMPORTS = """
import sys
import meshsdk
assert not {"numpy", "torch", "click", "rich", "ssl", "awscrt"} & sys.modules.keys(), sys.modules.keys()
meshsdk.open, meshsdk.Loader, meshsdk.connect, meshsdk.ops
heavy = {"torch", "click", "rich", "aiohttp", "boto3", "meshd", "asyncio"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""


def test_importing_is_light() -> None:
    argv = [sys.executable, "-W", "error", "-c", IMPORTS]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_bad_samples_are_listed_and_replayed(
    mesh: Callable[..., str],
    daemon: Daemon,
    s3: Any,
    bucket: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (9, 8, 7)).save(buffer, "PNG")
    good = buffer.getvalue()
    for number in range(6):
        body = good[:50] if number == 4 else good
        s3.put_object(Bucket=bucket, Key=f"a/{number}.png", Body=body)
    with connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        dataset = open_dataset(f"s3://{bucket}/a", fields={"image": "png"}, client=client)
        dataset = dataset.map(ops.decode("image"), ops.resize("image", [8, 8]))
        with Loader(dataset, global_batch=3, shuffle=False, max_bad=0.5) as loader:
            assert len(list(loader)) == 2
            plan = loader.plan.hash
    (entry,) = lines(mesh("bad", "ls", plan, "--json"))
    assert (entry["op"], entry["position"], entry["epoch"], entry["times"]) == ("decode+resize", 4, 0, 1)
    assert entry["key"] in mesh("bad", "ls", plan)
    assert entry["key"] in mesh("bad", "ls", plan[:16])  # as `mesh plans ls` shows it
    folder = tmp_path / "sample"
    told = mesh("replay", plan, 3, "--save", folder)
    assert "position 3 of epoch 0: ok" in told
    assert "position 3 of epoch 0: ok" in mesh("replay", plan[:16], 3)
    assert "image  uint8 [8, 8, 3]" in told
    assert [path.read_bytes() for path in folder.iterdir()] == [good]
    capfd.readouterr()
    assert run(["replay", plan, "4", "--save", str(folder), "--json"]) == 1
    saved, outcome = lines(capfd.readouterr().out)
    assert saved["bytes"] == 50
    assert (outcome["status"], outcome["key"], outcome["op"]) == ("substituted", entry["key"], entry["op"])
    assert sorted(len(path.read_bytes()) for path in folder.iterdir()) == [50, len(good)]
    mesh("replay", "0" * 64, 0, code=3)
    for beyond, options in ((6, ()), (1000, ()), (6, ("--save", folder))):
        assert mesh("replay", plan, beyond, *options, code=2) == (
            f"mesh: position {beyond} is past the end: an epoch of this plan has 6 positions, 0 to 5\n"
        )
    mesh("bad", "ls", "0" * 64, code=3)
    mesh("bad", "ls", "no-plan", code=2)
    told = mesh("op", "test", "resize size=8", "--before", "decode", f"s3://{bucket}/a/0.png")
    assert re.search(r"^resize \d+ outputs .*1 of 1 correct", told, re.MULTILINE)
    mesh("stats", f"s3://{bucket}/a", "--snapshot", dataset.snapshot.hash[:16])


def test_what_a_replay_saves_stays_in_its_folder() -> None:
    assert file_name("../../etc/passwd", 0) == "0-passwd"
    assert file_name("a/..", 1) == "1-.."
    assert [file_name(name, 2) for name in ("a/", "", None)] == ["2"] * 3
