"""Small JSON files beside a checkpoint can hold anything: none of it ends in a bare error."""

from __future__ import annotations

import pytest
import xxhash
from support import s3_server

from unickpt.commit import lease, messages
from unickpt.commit.messages import Record
from unickpt.errors import SaveConflict
from unickpt.format import timing
from unickpt.runs import lineage_notes
from unickpt.storage import paths
from unickpt.storage.locations import Location
from unickpt.storage.paths import resolve

ANYTHING = [
    b"", b"\xff", b"\0", b"null", b"[]", b"7", b'"x"', b"NaN", b"{", b"[" * 100_000,
    b'{"a":' * 100_000, b"1" * 5000, b'{"renewed": 1' + b"0" * 400 + b"}", b'{"renewed": null}',
    b'{"renewed": {}, "session": [], "host": {}}', b'"\\ud800"', b'{"supersedes": 1}',
    b'{"supersedes": [[]], "follows": [[]]}',
]  # fmt: skip


@pytest.fixture(params=["memory", "s3"])
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Location:
    if request.param == "memory":
        return resolve("memory://damaged/notes")
    moto = request.getfixturevalue("moto")
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "damaged")
    return resolve("s3://damaged/notes")


def test_a_lease_of_anything_is_that_of_another_process(folder: Location) -> None:
    store = folder.store(paths.context())
    for data in ANYTHING:
        store.write(lease.NAME, data).result()
        assert lease.holder(folder) == "another process"


def test_a_lineage_of_anything_is_as_if_it_were_missing(folder: Location) -> None:
    store = folder.child("processes/a/notes").store(paths.context())
    for data in ANYTHING:
        store.write("lineage", data).result()
        assert lineage_notes._recorded(folder, "a") == lineage_notes.Lineage()


@pytest.mark.parametrize("line", ANYTHING)
def test_records_and_timings_of_anything_are_malformed(line: bytes) -> None:
    heads = [line, b'{"columns":[],"collected":1' + b"0" * 400 + b',"merged":0,"processes":1}',
             b'{"base":null,"inline":1' + b"0" * 30 + b"}"]  # fmt: skip
    for head in heads:
        data = head + b"\n"
        data += xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")
        with pytest.raises(ValueError, match=r"malformed|its head has"):
            timing.decode(data, 1)
        with pytest.raises(ValueError, match="malformed"):
            Record.decode(data)
    assert messages.parse_note(line, messages.Announcement) is None
    assert messages.parse_note(line, dict[int, dict[str, list[int]]]) is None
    said = messages.parse_note(line, messages._ErrorNote)
    assert said in (None, messages._ErrorNote())


def test_the_message_of_a_conflict_is_short(folder: Location) -> None:
    for said in ["[" * 100_000, "9" * 10_000, '{"process": 1, "host": "' + "x" * 100_000 + '"}']:
        error = lease._conflict(folder, lease.SAVES, said)
        assert isinstance(error, SaveConflict)
        assert len(str(error)) < 2000
