"""crc32c of a tensor from the crc32c of its rows: no byte is read twice.

Invariant: `fold_rows` gives what crc32c over the rows' bytes, one after the other, gives.
"""

from __future__ import annotations

from functools import lru_cache

from awscrt.checksums import crc32c


def fold_rows(sums: list[int], row_bytes: int) -> int:
    """The checksum of rows of `row_bytes` bytes each. About half a microsecond a row.

    crc(A‖B) = shift(crc(A)) ⊕ crc(B), and shift, which is linear, depends on the length of B alone.
    """
    if not row_bytes:
        return 0
    first, second, third, fourth = _shift_tables(row_bytes)
    value = 0
    for crc in sums:
        value = (
            first[value & 255]
            ^ second[value >> 8 & 255]
            ^ third[value >> 16 & 255]
            ^ fourth[value >> 24]
            ^ crc
        )
    return value


@lru_cache(maxsize=64)
def _shift_tables(length: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """`shift` over `length` bytes, as one table a byte of its argument."""
    zeros = bytes(length)
    constant = crc32c(zeros)
    bits = [crc32c(zeros, 1 << bit) ^ constant for bit in range(32)]
    tables = [_table(bits[start : start + 8]) for start in range(0, 32, 8)]
    return tables[0], tables[1], tables[2], tables[3]


def _table(bits: list[int]) -> list[int]:
    table = [0]
    for bit in bits:
        table += [value ^ bit for value in table]
    return table
