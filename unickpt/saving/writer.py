"""Write: staged chunks -> this process's own database, a bounded number of bytes at a time."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import xxhash

from unickpt.commit import places
from unickpt.commit.attempt import Attempt
from unickpt.commit.places import Places
from unickpt.commit.record import CHUNK_DTYPE, Record
from unickpt.format import chunk_store, patches
from unickpt.format.chunk_grid import Part
from unickpt.format.chunk_store import ChunkStore
from unickpt.format.index import INDEX_KEY
from unickpt.frameworks.per_process import blob_key
from unickpt.progress import ProgressFunction, nothing
from unickpt.reuse import linked_files
from unickpt.reuse.base import Base
from unickpt.saving.batches import Batch, Digest, batches_for
from unickpt.saving.chunk_source import ChunkSource, StagedChunk
from unickpt.saving.describe import Description
from unickpt.saving.write_plan import WriteItem
from unickpt.threads import Window, Workers, in_batches

_MOST_CHUNKS = 16384  # of a batch
_MOST_THREADS = 16  # which also quantise, or compare with the base
_LOOK_EVERY_S = 0.5


class Writer:
    """Stages, hashes and writes chunks in transactions.

    Arguments:
        attempt: the attempt to save that this is part of.
        description: what this process saves.
        budget_bytes: memory to write with.
        source: provides the chunks.
        base: the earlier checkpoint whose chunks are not written again.
        reuses: whether that goes for all chunks that are equal, or only for those of other experts.
        told: called with the bytes that are done and those in total.
    """

    def __init__(
        self,
        attempt: Attempt,
        description: Description,
        budget_bytes: int,
        source: ChunkSource,
        base: Base | None = None,
        reuses: bool = False,
        told: ProgressFunction = nothing,
    ) -> None:
        self._attempt, self._description, self._budget = attempt, description, budget_bytes
        database = attempt.database(attempt.group.index)
        self._store = ChunkStore(database, description.index.codecs)
        self._source = source
        self._base, self._looked_in = base, base if reuses else None
        self._batches = batches_for(self._store, behind=source.behind)
        self.nbytes, self.stored_bytes, self.count = 0, 0, 0
        self._told, self._done, self._total = told, 0, 0
        self._errors: dict[int, tuple[float, float]] = {}
        self._patched: set[tuple[str, int]] = set()

    @property
    def patched(self) -> int:
        """The number of chunks that were written as patches."""
        return len(self._patched)

    @property
    def reused_bytes(self) -> int:
        """Logical bytes of the chunks that were taken from the base."""
        return 0 if self._base is None else self._base.nbytes

    def write_all(self, items: Sequence[WriteItem]) -> Record:
        """Writes this process's chunks, its per-process values and its description."""
        started = time.perf_counter()
        self._total = sum(item.nbytes for item in items)
        self._count(0)
        blobs, sources = self._description.blobs, self._description.sources
        rest = {blob_key(name, self._attempt.group.index): data for name, data in blobs.items()}
        found = self._take_or_write(items, rest, {INDEX_KEY: self._description.encoded})
        arrays = self._description.index.arrays.items()
        return Record(
            description=self._description.digest,
            boxes={
                number: tuple(f.box for f in sources[name].fragments)
                for number, (name, entry) in enumerate(arrays)
                if entry.boxes == ()
            },
            blobs={name: (len(b), xxhash.xxh3_64_intdigest(b)) for name, b in blobs.items()},
            statistics={"bytes": self.nbytes, "seconds": time.perf_counter() - started},
            errors=self._errors,
            **found,
        )

    def write_more(self, items: Sequence[WriteItem]) -> Record:
        """Writes chunks that the coordinator asked for after all had written theirs."""
        before, count = self.reused_bytes, self.count
        nbytes, stored_bytes = self.nbytes, self.stored_bytes
        found = self._take_or_write(items, {}, {})
        return Record(
            description=self._description.digest,
            statistics={
                "reused_bytes": self.reused_bytes - before,
                "bytes": self.nbytes - nbytes,
                "stored_bytes": self.stored_bytes - stored_bytes,
                "chunks": self.count - count,
            },
            errors=self._errors,
            **found,
        )

    def _take_or_write(
        self, items: Sequence[WriteItem], blobs: dict[str, bytes], rest: dict[str, bytes]
    ) -> dict[str, Any]:
        """Takes from the base what it has, and writes the rest; returns what a record says."""
        if self._base is None:
            chunks = self._write(items, {**blobs, **rest})
            own = [chunk_store.key_of(item.part, item.number) for item in items]
            return {"chunks": chunks, "places": self._places([*own, *blobs])}
        offered = items if self._looked_in else [item for item in items if item.borrowed]
        self._base.offer((item.entry, item.part, item.number) for item in offered)
        if not self._source.behind:  # staged copies come in the order of the plan
            items = self._likely_changed_first(items, self._base)
        others, taken = list[WriteItem](), list[WriteItem]()
        for item in items:
            is_taken = item.borrowed and self._base.borrow(item.part, item.number)
            (taken if is_taken else others).append(item)
        self._count(sum(item.nbytes for item in taken))
        written = self._write(others, {**blobs, **rest}, self._looked_in)
        digests = map(self._source.digest, taken)
        found: dict[str, Any] = {"chunks": np.concatenate([written, self._table(taken, digests)])}
        every = [(item.part, item.number) for item in [*others, *taken]]
        if self._patched:
            found["patched"] = np.array([(part.key, n) in self._patched for part, n in every])
        share, elsewhere = self._base.share, set[tuple[str, int]]()
        if share is not None:
            share.publish(self._attempt.context)
            found["linked"] = share.linked
            for base, elsewhere in share.borrowed.items():
                of = [(part.key, number) in elsewhere for part, number in every]
                found |= {"base": base, "borrowed": np.array(of)}
        keys = [self._key(part, n) if (part.key, n) not in elsewhere else None for part, n in every]
        patch_keys = [
            chunk_store.key_of(patches.patch_of(part), n)
            for part, n in every
            if (part.key, n) in self._patched
        ]
        return {**found, "places": self._places([*keys, *patch_keys, *blobs])}

    def _key(self, part: Part, number: int) -> str:
        """Of a chunk, or of the full chunk that its patch refers to."""
        is_patched = (part.key, number) in self._patched
        return chunk_store.key_of(patches.full_of(part) if is_patched else part, number)

    def _places(self, keys: Sequence[str | None]) -> Places:
        """Where the values of keys are, as the databases of this process say."""
        attempt = self._attempt
        databases = [("", attempt.database(attempt.group.index))]
        if self._base is not None and self._base.share is not None and self._base.share.linked:
            folder = attempt.folder_of(attempt.group.index)
            linked = linked_files.database(folder, attempt.context)
            databases.append((f"{linked_files.FOLDER}/", linked))
        return places.find(keys, databases)

    @staticmethod
    def _likely_changed_first(items: Sequence[WriteItem], base: Base) -> Sequence[WriteItem]:
        """What is probably written comes first: the disk has time for it while the rest, which is
        only hashed, keeps the CPUs busy. Experts stay together."""

        def rank(item: WriteItem) -> tuple[Any, bool]:
            return item.expert or ("", -1), base.is_settled(item.part, item.number)

        return sorted(items, key=rank)

    def settle(self) -> None:
        """Waits, after a failure, until all writes in progress have ended."""
        self._batches.settle()

    def _write(
        self, items: Sequence[WriteItem], rest: dict[str, bytes], base: Base | None = None
    ) -> Any:
        size_of = attrgetter("nbytes")
        most_bytes = self._batches.most_bytes(sum(map(size_of, items)))
        most_bytes = min(most_bytes, max(1, self._budget // 4))
        # The rest of the budget is for what is needed besides the data.
        window = Window(self._budget - most_bytes, self._batches.at_once)
        digests: list[Digest] = []
        looked = time.monotonic()
        # Each makes a file: one expert's, so that a later save needs all of it or nothing.
        batches = [
            batch
            for _, run in itertools.groupby(items, attrgetter("expert"))
            for batch in in_batches(run, _MOST_CHUNKS, most_bytes, size_of)
        ] or [[]]
        workers = Workers(self._threads(items), behind=self._source.behind)
        with workers as pool, self._stopping():
            for batch in batches:
                while not self._source.ready(batch) and window.wait_oldest():
                    pass  # the chunks staged next may need the memory that this releases
                size = sum(item.nbytes for item in batch)
                window.make_room(size)
                begun = self._batches.begin(pool, last=batch is batches[-1])
                if batch is batches[0]:  # not in the file of an expert
                    for key, data in rest.items():
                        begun.put(key, data)
                held, wait = self._write_batch(batch, begun, pool, digests, base)
                window.add(held, partial(self._end_batch, wait, size))
                if time.monotonic() - looked > _LOOK_EVERY_S:
                    self._attempt.check_others()
                    looked = time.monotonic()
            window.drain()
            self._batches.finish()
            return self._table(items, [result() for result in digests])

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """A failure is told when what was begun has ended, not all that waits for its turn."""
        try:
            yield
        except BaseException:
            self._batches.stop()
            raise

    def _end_batch(self, wait: Callable[[], None], nbytes: int) -> None:
        wait()
        self._count(nbytes)

    def _count(self, nbytes: int) -> None:
        """Counts chunks that are written, or need not be; more may be requested than planned."""
        self._done += nbytes
        self._told(min(self._done, self._total), self._total)

    def _table(self, items: Sequence[WriteItem], digests: Iterable[int]) -> Any:
        table = np.zeros(len(items), CHUNK_DTYPE)
        table["array"] = [item.array for item in items]
        table["chunk"] = [item.position for item in items]
        table["digest"] = list(digests)
        return table

    def _threads(self, items: Sequence[WriteItem]) -> int:
        """How many threads hash, quantise and compare."""
        threads = self._batches.threads
        compared = [item.nbytes for item in items if self._patches(item)]
        if not compared and not any(item.entry.quantized for item in items):
            return threads
        cpus = os.cpu_count() or 1
        wanted = max(threads, cpus // 4 if self._source.behind else min(cpus, _MOST_THREADS))
        if compared and self._base is not None:
            wanted = min(wanted, max(1, self._base.comparable_at_once(max(compared))))
        return wanted

    def _patches(self, item: WriteItem) -> bool:
        """Whether a chunk may be written as a patch."""
        return self._looked_in is not None and self._looked_in.patches(item.entry)

    def _write_batch(
        self,
        items: Sequence[WriteItem],
        batch: Batch,
        pool: Workers,
        digests: list[Digest],
        base: Base | None,
    ) -> tuple[int, Callable[[], None]]:
        """Starts to write chunks; returns the memory they hold and a function that waits."""
        staged: list[StagedChunk] = []
        held, begin = 0, len(digests)
        prepared = self._prepared(items, pool, base)
        # A chunk that may be in the base, or is quantised, is hashed before it is written; others
        # meanwhile.
        waits = base is not None or any(item.entry.quantized for item in items)
        for item, chunk, found in list(prepared) if waits else prepared:
            digest: Digest | None = found
            if item.entry.quantized is not None:
                chunk, digest = self._quantized(item, chunk, found)
            elif base is not None and base.patches(item.entry):
                compared = found()
                digest = partial(int, compared.digest)
                if self._write_patch(item, compared.patch, batch):
                    held += len(compared.patch)
                    chunk.release()
                    digests.append(digest)
                    continue
            if (
                digest is not None
                and base is not None
                and base.takes(item.part, item.number, digest, chunk.data)
            ):
                chunk.release()
                digests.append(digest)
                continue
            if item.entry.quantized is None:
                staged.append(chunk)
            digests.append(batch.put_chunk(item, chunk, digest))
            self.nbytes += item.nbytes
            self.stored_bytes += chunk.data.nbytes
            self.count += 1
        ended = batch.end()
        hashing = digests[begin:]

        def wait() -> None:
            ended()
            for result in hashing:
                result()  # before the memory is reused for the next chunks
            for chunk in staged:  # which was written from this memory
                chunk.release()
            staged.clear()

        return held + batch.held, wait

    def _write_patch(self, item: WriteItem, patch: bytes | None, batch: Batch) -> bool:
        """Writes a chunk as a patch, if there is one, and its full chunk can be taken."""
        assert self._base is not None
        if patch is None or not self._base.take_full(item.part, item.number, patch):
            return False
        batch.put(chunk_store.key_of(patches.patch_of(item.part), item.number), patch)
        self._patched.add((item.part.key, item.number))
        self.nbytes += len(patch)
        self.stored_bytes += len(patch)
        return True

    def _quantized(
        self, item: WriteItem, chunk: StagedChunk, encoded: Callable[[], Any]
    ) -> tuple[StagedChunk, Callable[[], int]]:
        """A quantised chunk as it is stored, and its digest; releases the elements."""
        found = encoded()
        chunk.release()
        known = self._errors.get(item.array, (0.0, 0.0))
        self._errors[item.array] = max(known[0], found.absolute), max(known[1], found.relative)
        digest = partial(int, chunk_store.digest(found.data))
        return StagedChunk(found.data, found.data.nbytes, lambda: None), digest

    def _prepared(
        self, items: Sequence[WriteItem], pool: Workers, base: Base | None
    ) -> Iterator[tuple[WriteItem, StagedChunk, Any]]:
        """Chunks as they are staged, and what returns their digests, if these are needed before
        they are written; of quantised ones, what returns them encoded, and of those that may be
        patches, compared."""
        for item in items:
            chunk = self._source.fetch(item)
            found: Callable[[], Any] | None = None
            if item.entry.quantized is not None:
                found = pool.submit(partial(chunk_store.quantized, item.entry, chunk.data))
            elif base is not None and base.patches(item.entry):
                found = pool.submit(partial(base.compared, item.part, item.number, chunk.data))
            elif base is not None:
                found = pool.submit(partial(chunk_store.digest, chunk.data))
            yield item, chunk, found
