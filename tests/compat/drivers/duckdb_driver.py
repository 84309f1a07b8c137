"""duckdb with its httpfs extension: SQL over Parquet and CSV files in buckets."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any, NoReturn

import duckdb
from driving import CannotError, Driver, serve

if TYPE_CHECKING:
    from driving import Endpoint


class Duckdb(Driver):
    name = "duckdb"

    def _no(self, verb: str) -> NoReturn:
        raise CannotError("it reads and writes tables")

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self.db = duckdb.connect()
        try:
            import duckdb_extensions

            duckdb_extensions.import_extension("httpfs", con=self.db)
        except ImportError:
            self.db.execute("LOAD httpfs")
        if endpoint.ca:
            self.db.execute(f"SET ca_cert_file='{endpoint.ca}'; SET enable_server_cert_verification=true")
        self.db.execute(
            f"CREATE SECRET (TYPE s3, KEY_ID '{endpoint.access_key}', SECRET '{endpoint.secret_key}', "
            f"ENDPOINT '{endpoint.host}', URL_STYLE 'path', REGION '{endpoint.region}', "
            f"USE_SSL {str(endpoint.secure).lower()})"
        )

    def version(self) -> str:
        return importlib.metadata.version("duckdb")

    def listing(self, bucket: str, prefix: str, delimiter: str) -> dict[str, list[str]]:
        if delimiter:
            self._no("listing")
        found = self.db.execute("SELECT file FROM glob(?)", [f"s3://{bucket}/{prefix}**"]).fetchall()
        return {"keys": [row[0].removeprefix(f"s3://{bucket}/") for row in found], "prefixes": []}

    def own_work(self, bucket: str, prefix: str) -> str:
        where = f"s3://{bucket}/{prefix}"
        self.db.execute(
            f"COPY (SELECT i AS n, i % 3 AS kind, md5(i::TEXT) AS text FROM range(200000) t(i)) "
            f"TO '{where}/one.parquet' (FORMAT parquet, ROW_GROUP_SIZE 20000)"
        )
        self._same(f"SELECT sum(n), count(*) FROM '{where}/one.parquet'", (19_999_900_000, 200_000))
        self._same(
            f"SELECT text FROM '{where}/one.parquet' WHERE n = 12345", self._one("SELECT md5('12345')")
        )
        self.db.execute(
            f"COPY (SELECT * FROM '{where}/one.parquet') TO '{where}/parts' (FORMAT csv, PARTITION_BY kind)"
        )
        self._same(
            f"SELECT sum(n) FROM read_csv('{where}/parts/kind=1/*.csv')",
            self._one("SELECT sum(i) FROM range(200000) t(i) WHERE i % 3 = 1"),
        )
        return "Parquet written in parts and read by range; CSV by pattern"

    def _one(self, sql: str) -> Any:
        return self.db.execute(sql).fetchone()

    def _same(self, sql: str, expected: Any) -> None:
        got = self._one(sql)
        assert got == expected, (sql, got, expected)


if __name__ == "__main__":
    serve(Duckdb)
