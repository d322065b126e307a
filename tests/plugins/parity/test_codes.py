"""The arithmetic of parity, beside a slow one of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unickpt.extend import Damaged
from unickpt.plugins.parity import codes, tables
from unickpt.plugins.parity.codes import ParitySums, solve
from unickpt.plugins.parity.tables import GroupTable

# The powers of 2 in GF(256) modulo x^8 + x^4 + x^3 + x^2 + 1, and their logarithms.
POWERS = [1]
while len(POWERS) < 255:
    POWERS.append(POWERS[-1] << 1 ^ (0x11D if POWERS[-1] & 0x80 else 0))
LOGARITHMS = {value: exponent for exponent, value in enumerate(POWERS)}


def product(left: int, right: int) -> int:
    return POWERS[(LOGARITHMS[left] + LOGARITHMS[right]) % 255] if left and right else 0


def slow_sums(files: list[bytes], count: int) -> list[bytes]:
    """The sums as docs/format.md defines them."""
    size = max(map(len, files))
    padded = [file.ljust(size, b"\0") for file in files]
    sums = [bytearray(size) for _ in range(count)]
    for position in range(size):
        for number, file in enumerate(padded):
            sums[0][position] ^= file[position]
            if count > 1:
                factor = POWERS[len(files) - 1 - number]
                sums[1][position] ^= product(factor, file[position])
    return [bytes(total) for total in sums]


SPARE: dict[int, list[Any]] = {1: [], 2: []}  # sums begin with memory that has others


def sums_of(files: list[bytes], count: int, cut: int = 1 << 18) -> list[Any]:
    sums = ParitySums(count, SPARE[count])
    for file in files:
        view = memoryview(file)
        sums.add((view[start : start + cut] for start in range(0, len(file), cut)), len(file))
    added = [np.concatenate(parts) for parts in sums.sums()]
    sums.release()
    return added


@pytest.mark.parametrize("count", [1, 2])
def test_threads_may_add_files_at_the_same_time(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codes, "SEGMENT_BYTES", 64)
    monkeypatch.setattr(codes, "PIECE_BYTES", 24)
    rng = np.random.default_rng(0)
    files = [rng.bytes(int(rng.integers(1, 500))) for _ in range(40)]
    sums, order = codes.ParitySums(count), list[bytes]()

    def add(file: bytes) -> None:
        sums.add([memoryview(file)], len(file), begin=lambda: order.append(file))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, files))
    assert sorted(order) == sorted(files)
    added = [b"".join(part.tobytes() for part in parts) for parts in sums.sums()]
    assert added == slow_sums(order, count)


def test_pieces_may_be_added_in_any_order_to_a_single_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "SEGMENT_BYTES", 64)
    rng, spare = np.random.default_rng(0), list[Any]()
    for _ in range(30):
        files = [rng.bytes(int(rng.integers(1, 300))) for _ in range(8)]
        sums = codes.ParitySums(1, spare)
        left = {number: memoryview(file) for number, file in enumerate(files)}
        while left:
            number = int(rng.choice([*left]))
            piece = left[number][: int(rng.integers(1, 100))]
            sums.add_piece(len(files[number]) - len(left[number]), piece)
            left[number] = left[number][len(piece) :]
            if not left[number]:
                del left[number]
        sums.nbytes = max(map(len, files))
        assert [b"".join(part.tobytes() for part in sums.sums()[0])] == slow_sums(files, 1)
        sums.release()  # the next ones begin with memory that has these
    assert len(spare) <= 5


def test_threads_may_add_pieces_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "SEGMENT_BYTES", 1 << 10)
    rng = np.random.default_rng(0)
    files = [rng.bytes(int(rng.integers(1, 20_000))) for _ in range(40)]
    sums = codes.ParitySums(1)

    def add(file: bytes) -> None:
        for start in range(0, len(file), 100):
            sums.add_piece(start, memoryview(file)[start : start + 100])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, files))
    sums.nbytes = max(map(len, files))
    assert b"".join(part.tobytes() for part in sums.sums()[0]) == slow_sums(files, 1)[0]


@pytest.mark.parametrize("count", [1, 2])
def test_bytes_that_no_file_has_are_zeros(count: int) -> None:
    spare = list[Any]()
    before = codes.ParitySums(count, spare)
    before.add([memoryview(b"x" * 99)], 99)
    before.release()
    sums = codes.ParitySums(count, spare)
    for file in (b"abc", b"de"):  # parts of lost files are left out
        sums.add([memoryview(file)], 20)
    expected = slow_sums([b"abc".ljust(20, b"\0"), b"de"], count)
    assert [total.tobytes() for (total,) in sums.sums()] == expected


contents = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=9)


@given(contents, st.sampled_from([1, 2]), st.integers(1, 50))
def test_sums_are_those_of_the_format(files: list[bytes], count: int, cut: int) -> None:
    assert [total.tobytes() for total in sums_of(files, count, cut)] == slow_sums(files, count)


@given(contents, st.sampled_from([1, 2]), st.data())
def test_lost_files_come_back(files: list[bytes], count: int, data: st.DataObject) -> None:
    numbers = st.integers(0, len(files) + count - 1)
    losses = data.draw(st.sets(numbers, max_size=count))
    lost = sorted(number for number in losses if number < len(files))
    stored = sums_of(files, count)
    size = len(stored[0])
    others = sums_of([b"" if n in lost else file for n, file in enumerate(files)], count)
    differences = {}
    for number, (total, other) in enumerate(zip(stored, others, strict=True)):
        if len(files) + number not in losses:
            padded = np.zeros(size, np.uint8)
            padded[: len(other)] = other
            # A sum of fewer bytes lacks zeros, which no factor changes.
            differences[number] = total ^ padded
    restored = solve(lost, len(files), differences) if lost else {}
    for number in lost:
        assert restored[number].tobytes() == files[number].ljust(size, b"\0")


def test_255_files_have_different_factors() -> None:
    files = [bytes([number, 7, number ^ 0x55]) for number in range(255)]
    stored = sums_of(files, 2)
    for lost in ([0, 254], [17, 18]):
        others = sums_of([bytes(3) if n in lost else file for n, file in enumerate(files)], 2)
        differences = {number: stored[number] ^ others[number] for number in (0, 1)}
        restored = solve(lost, 255, differences)
        assert [restored[number].tobytes() for number in lost] == [files[n] for n in lost]


TABLE = GroupTable([("d/ab", 3, "0" * 32)], [("p/cd", "1" * 32)])


def test_a_table_is_read_back() -> None:
    assert tables.decode(tables.encode([TABLE])) == [TABLE]


@pytest.mark.parametrize(
    "table",
    [
        GroupTable([("d/../../x", 3, "0" * 32)], TABLE.parity),
        GroupTable([("d/..", 3, "0" * 32)], TABLE.parity),
        GroupTable([("/etc/passwd", 3, "0" * 32)], TABLE.parity),
        GroupTable([("d/ab", -1, "0" * 32)], TABLE.parity),
        GroupTable([("d/ab", 3, "0")], TABLE.parity),
        GroupTable([], TABLE.parity),
        GroupTable(TABLE.files, []),
        GroupTable(TABLE.files * 2, TABLE.parity),
        GroupTable(TABLE.files, [(f"p/{n}", "1" * 32) for n in range(3)]),
    ],
)
def test_hostile_tables_are_refused(table: GroupTable) -> None:
    with pytest.raises(Damaged, match="the table of a parity file"):
        tables.decode(tables.encode([table]))


@given(st.integers(0, len(tables.encode([TABLE])) - 1), st.integers(1, 255))
def test_a_changed_byte_of_a_table_is_noticed(position: int, change: int) -> None:
    data = bytearray(tables.encode([TABLE]))
    data[position] ^= change
    with pytest.raises(Damaged):
        read(bytes(data))


def read(data: bytes) -> None:
    length = tables.table_bytes(data[-tables.TRAILER_BYTES :]) + tables.TRAILER_BYTES
    if length > len(data):
        raise Damaged("it is too short")
    tables.decode(data[-length:])
