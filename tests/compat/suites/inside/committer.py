"""One of several processes that commit rows to one table on S3.

`committer.py LIBRARY create`
`committer.py LIBRARY commit --writer N --commits N --journal FILE`: one row a commit; the journal has a line
"begin ROW" before each and "done ROW" when the library has acknowledged it.
`committer.py LIBRARY rows`: the rows of the table, one a line of JSON, as another process reads them.

The table is in the bucket BUCKET at MESHD_ENDPOINT. A commit that the library gives up because of others' is
tried again with the same row; any other error ends the process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Protocol


class CrowdedError(Exception):
    """The library gave the commit up because of others' commits; nothing of it is in the table."""


class Table(Protocol):
    """A table of rows of text in a bucket."""

    def __init__(self, bucket: str) -> None: ...

    def create(self) -> None: ...
    def commit(self, row: str) -> None:
        """Add a row in a commit of its own. Raises CrowdedError."""

    def rows(self) -> list[str]: ...


class Delta:
    """delta-rs: a commit is a file of the log that only one writer can create."""

    def __init__(self, bucket: str) -> None:
        self.uri, self.storage = f"s3://{bucket}/delta", storage_options()

    def create(self) -> None:
        import deltalake
        import pyarrow

        schema = pyarrow.schema([("row", pyarrow.string())])
        deltalake.DeltaTable.create(self.uri, schema, storage_options=self.storage)

    def commit(self, row: str) -> None:
        import deltalake
        import pyarrow
        from deltalake.exceptions import CommitFailedError

        table = pyarrow.table({"row": [row]})
        try:
            deltalake.write_deltalake(self.uri, table, mode="append", storage_options=self.storage)
        except CommitFailedError as error:
            raise CrowdedError from error

    def rows(self) -> list[str]:
        import deltalake

        table = deltalake.DeltaTable(self.uri, storage_options=self.storage).to_pyarrow_table()
        return [str(row) for row in table["row"].to_pylist()]


class Icechunk:
    """icechunk: a commit replaces the branch's file if it is unchanged, and is rebased if it is not. A row is
    a group; what the history says is compared with the groups that there are."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket

    def _repository(self, *, create: bool = False) -> Any:
        import icechunk

        storage = icechunk.s3_storage(
            bucket=self.bucket,
            prefix="icechunk",
            region=os.environ["AWS_REGION"],
            endpoint_url=os.environ["MESHD_ENDPOINT"],
            allow_http=True,
            force_path_style=True,
            access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
            secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        )
        return icechunk.Repository.create(storage) if create else icechunk.Repository.open(storage)

    def create(self) -> None:
        import zarr

        session = self._repository(create=True).writable_session("main")
        zarr.create_group(session.store)
        session.commit("create")

    def commit(self, row: str) -> None:
        import icechunk
        import zarr

        session = self._repository().writable_session("main")
        zarr.create_group(session.store, path=row)
        try:
            session.commit(row, rebase_with=icechunk.ConflictDetector())
        except icechunk.ConflictError as error:
            raise CrowdedError from error

    def rows(self) -> list[str]:
        import zarr

        repository = self._repository()
        rows = [snapshot.message for snapshot in repository.ancestry(branch="main")][:-2]
        groups = zarr.open_group(repository.readonly_session("main").store, mode="r").group_keys()
        if set(groups) != set(rows):
            raise SystemExit(f"history and groups differ: {sorted(set(groups) ^ set(rows))}")
        return rows


class Lance:
    """Lance: a commit is a manifest that only one writer can create."""

    def __init__(self, bucket: str) -> None:
        self.uri, self.storage = f"s3://{bucket}/lance", storage_options()

    def create(self) -> None:
        import lance
        import pyarrow

        schema = pyarrow.schema([("row", pyarrow.string())])
        lance.write_dataset(schema.empty_table(), self.uri, storage_options=self.storage)

    def commit(self, row: str) -> None:
        import lance
        import pyarrow

        table = pyarrow.table({"row": [row]})
        try:
            lance.write_dataset(table, self.uri, mode="append", storage_options=self.storage)
        except OSError as error:
            if "concurrent writers" in str(error) or "conflict" in str(error).lower():
                raise CrowdedError from error
            raise

    def rows(self) -> list[str]:
        import lance

        table = lance.dataset(self.uri, storage_options=self.storage).to_table()
        return [str(row) for row in table["row"].to_pylist()]


def storage_options() -> dict[str, str]:
    """As the Rust crate object_store names them, which delta-rs and Lance have in common."""
    return {
        "aws_endpoint": os.environ["MESHD_ENDPOINT"],
        "aws_region": os.environ["AWS_REGION"],
        "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
        "aws_virtual_hosted_style_request": "false",
        "allow_http": "true",
    }


TABLES: dict[str, type[Table]] = {"delta": Delta, "icechunk": Icechunk, "lance": Lance}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", choices=TABLES)
    parser.add_argument("verb", choices=["create", "commit", "rows"])
    parser.add_argument("--writer", type=int, default=0)
    parser.add_argument("--commits", type=int, default=1)
    parser.add_argument("--journal", type=Path)
    options = parser.parse_args()
    table = TABLES[options.library](os.environ["BUCKET"])
    if options.verb == "create":
        table.create()
    elif options.verb == "rows":
        for row in table.rows():
            print(json.dumps(row))
    else:
        commit(table, options.journal, [f"w{options.writer}-{number}" for number in range(options.commits)])


def commit(table: Table, journal: Path, rows: list[str]) -> None:
    """Commit them one after the other; the journal is written past any buffer of this process."""
    out = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for row in rows:
        os.write(out, f"begin {row}\n".encode())
        while True:
            try:
                table.commit(row)
            except CrowdedError:
                os.write(out, f"again {row}\n".encode())
            else:
                break
        os.write(out, f"done {row}\n".encode())


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without the libraries' threads: delta-rs's abort now and then where an interpreter ends
