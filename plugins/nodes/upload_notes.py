"""Notes about the steps on the nodes: how many processes saved each, whether it is to be uploaded,
and whose files are in the root or on another node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import xxhash

from unickpt.extend import Location, replaced_in, storage_context

_PAUSE_S, _PAUSE_REMOTE_S = 0.05, 1.0
_YES, _NO = b"yes", b"no"


class UploadNotes:
    """The notes.

    Per step and attempt, the notes say how many processes saved it (`parts`), whether it is to be
    uploaded (`due`), and whose files this job has put into the root: those of an earlier job may be
    gone. A choice identifies the files that an upload leaves out, because its experts are in
    earlier steps; it is empty if none are.

    Arguments:
        control: the folder for small files.
        job: the name of the job, which decides anew what is uploaded.
    """

    def __init__(self, control: Location, job: str) -> None:
        self._notes = control.child("uploads").store(storage_context(fsync=False))
        self._control, self._job = control, job
        self._processes: dict[str, frozenset[int]] = {}
        self.pause_s = _PAUSE_REMOTE_S if control.is_remote else _PAUSE_S

    def processes(self, step: str, attempt: str) -> frozenset[int]:
        """The processes whose files a committed step needs: not those for which others wrote.
        Empty if that is not known."""
        if attempt not in self._processes:
            value = self._notes.read(f"{step}.{attempt}.parts").result()
            if value.state != "value" or not value.value.isdigit():
                return frozenset()
            folder = self._control.child(f"{step}/processes/{attempt}")
            replaced = replaced_in(folder.store(storage_context()))
            self._processes[attempt] = frozenset(range(int(value.value))) - replaced
        return self._processes[attempt]

    def set_part_count(self, step: str, attempt: str, count: int) -> None:
        """Records how many processes save a step."""
        self._notes.write(f"{step}.{attempt}.parts", b"%d" % count).result()

    def decide(self, step: str, attempt: str, *, due: bool, choice: str = "") -> None:
        """Records whether a step is to be uploaded."""
        value = _YES + choice.encode() if due else _NO
        self._notes.write(f"{step}.{attempt}.due-{self._job}", value).result()

    def due_choice(self, step: str, attempt: str) -> str | Literal[False] | None:
        """The choice with which a step is to be uploaded, False if it is not; None if that is not
        decided."""
        read = self._notes.read(f"{step}.{attempt}.due-{self._job}").result()
        if read.state != "value":
            return None
        if not read.value.startswith(_YES):
            return False
        return str(read.value.removeprefix(_YES).decode(errors="replace"))

    def choose(self, step: str, attempt: str, files: Mapping[int, Sequence[str]]) -> str:
        """Records the files that an upload leaves out, by process; returns the choice."""
        choice = xxhash.xxh3_64_hexdigest(msgspec.json.encode(files))
        writes = [
            self._notes.write(f"{step}.{attempt}.left-{choice}-{p:05d}", msgspec.json.encode(names))
            for p, names in files.items()
        ]
        for written in writes:
            written.result()
        return choice

    def left_out(self, step: str, attempt: str, choice: str, process: int) -> list[str]:
        """The files of a process that an upload leaves out."""
        read = self._notes.read(f"{step}.{attempt}.left-{choice}-{process:05d}").result()
        return msgspec.json.decode(read.value, type=list[str]) if read.state == "value" else []

    def missing(self, step: str, attempt: str, choice: str = "") -> list[int]:
        """The processes whose files of a step this job has not put into the root yet."""
        numbers = sorted(self.processes(step, attempt))
        names = {*self._listed(f"{step}.{attempt}.")}
        return [n for n in numbers if self._uploaded(step, attempt, n, choice) not in names]

    def note_upload(self, step: str, attempt: str, process: int, choice: str = "") -> None:
        """Records that the files of a process are in the root."""
        self._notes.write(self._uploaded(step, attempt, process, choice), b"").result()

    def _uploaded(self, step: str, attempt: str, process: int, choice: str) -> str:
        """The name of the note that the files of a process are in the root."""
        return f"{step}.{attempt}.up-{self._job}-{process:05d}{choice and '-'}{choice}"

    def note_damage(self, step: str, attempt: str, process: int, text: str) -> None:
        """Records that a file of a process is damaged, so that the step cannot be uploaded."""
        self._notes.write(f"{step}.{attempt}.bad-{self._job}-{process:05d}", text.encode()).result()

    def damage(self, step: str, attempt: str) -> str:
        """Why a step cannot be uploaded; empty if nothing is known against it."""
        noted = self._listed(f"{step}.{attempt}.bad-{self._job}-")
        return self._notes.read(noted[0]).result().value.decode(errors="replace") if noted else ""

    def note_recovered(self, step: str, attempt: str) -> None:
        """Records that all that the nodes lack of a step is in the root."""
        self._notes.write(f"{step}.{attempt}.recovered-{self._job}", b"").result()

    def is_recovered(self, step: str, attempt: str) -> bool:
        """Whether all that the nodes lack of a step is in the root."""
        name = f"{step}.{attempt}.recovered-{self._job}"
        return bool(self._notes.read(name).result().state == "value")

    def note_copy(self, step: str, attempt: str, process: int) -> None:
        """Records that another node has the files of a process, of the nodes of this job."""
        self._notes.write(f"{step}.{attempt}.copy-{self._job}-{process:05d}", b"").result()

    def has_copies(self, step: str, attempt: str) -> bool:
        """Whether another node has the files of each process, as far as this job knows."""
        prefix = f"{step}.{attempt}.copy-{self._job}-"
        processes = self.processes(step, attempt)
        names = {*self._listed(prefix)}
        return bool(processes) and all(f"{prefix}{n:05d}" in names for n in processes)

    def note_sum(self, step: str, attempt: str, name: str, count: int, survives: int) -> None:
        """Records that a node has a sum of other nodes' files, of the files as they now lie.

        Arguments:
            step, attempt: which save.
            name: of the sum.
            count: how many sums there are.
            survives: how many nodes may be lost when all of them are there.
        """
        note = f"{step}.{attempt}.{self._job}.{count}.{survives}.{name}"
        self._notes.write(note, b"").result()

    def lost_nodes(self, step: str, attempt: str) -> int:
        """How many nodes may be lost without losing files of a step, by copies or sums."""
        by_copies = int(self.has_copies(step, attempt))
        prefix = f"{step}.{attempt}.{self._job}."
        notes = [name.removeprefix(prefix).split(".") for name in self._listed(prefix)]
        has_all = bool(notes) and len(notes) == int(notes[0][0])
        return max(by_copies, int(notes[0][1]) if has_all else 0)

    def forget(self, step: str) -> None:
        """Removes the notes about a step."""
        for name in self._listed(f"{step}."):
            self._notes.write(name, None).result()

    def _listed(self, prefix: str) -> list[str]:
        """The names of notes that begin so."""
        names = (key.decode(errors="replace") for key in self._notes.list().result())
        return [name for name in names if name.startswith(prefix)]
