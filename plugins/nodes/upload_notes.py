"""Notes about the steps on the nodes: how many processes saved each, whether it is to be uploaded,
and whose files are in the root or on another node."""

from __future__ import annotations

from unickpt.extend import Location, storage_context

_PAUSE_S, _PAUSE_REMOTE_S = 0.05, 1.0
_YES, _NO = b"yes", b"no"


class UploadNotes:
    """The notes.

    Per step and attempt, the notes say how many processes saved it (`parts`), whether it is to be
    uploaded (`due`), and whose files are in the root.

    Arguments:
        control: the folder for small files.
        job: the name of the job, which decides anew what is uploaded.
    """

    def __init__(self, control: Location, job: str) -> None:
        self._notes = control.child("uploads").store(storage_context(fsync=False))
        self._job = job
        self._counts: dict[str, int] = {}
        self.pause_s = _PAUSE_REMOTE_S if control.is_remote else _PAUSE_S

    def part_count(self, step: str, attempt: str) -> int | None:
        """How many processes saved a step; None if that is not known."""
        name = f"{step}.{attempt}.parts"
        if name not in self._counts:
            value = self._notes.read(name).result()
            if value.state != "value" or not value.value.isdigit():
                return None
            self._counts[name] = int(value.value)
        return self._counts[name]

    def set_part_count(self, step: str, attempt: str, count: int) -> None:
        """Records how many processes save a step."""
        self._notes.write(f"{step}.{attempt}.parts", b"%d" % count).result()

    def decide(self, step: str, attempt: str, *, due: bool) -> None:
        """Records whether a step is to be uploaded."""
        self._notes.write(f"{step}.{attempt}.due-{self._job}", _YES if due else _NO).result()

    def is_due(self, step: str, attempt: str) -> bool | None:
        """Whether a step is to be uploaded; None if that is not decided."""
        read = self._notes.read(f"{step}.{attempt}.due-{self._job}").result()
        return read.value == _YES if read.state == "value" else None

    def missing(self, step: str, attempt: str) -> list[int]:
        """The processes whose files of a step are not in the root yet."""
        prefix, count = f"{step}.{attempt}.", self.part_count(step, attempt)
        names = {key.decode(errors="replace") for key in self._notes.list().result()}
        return [n for n in range(count or 0) if f"{prefix}{n:05d}" not in names]

    def note_upload(self, step: str, attempt: str, process: int) -> None:
        """Records that the files of a process are in the root."""
        self._notes.write(f"{step}.{attempt}.{process:05d}", b"").result()

    def note_copy(self, step: str, attempt: str, process: int) -> None:
        """Records that another node has the files of a process, of the nodes of this job."""
        self._notes.write(f"{step}.{attempt}.copy-{self._job}-{process:05d}", b"").result()

    def has_copies(self, step: str, attempt: str) -> bool:
        """Whether another node has the files of each process, as far as this job knows."""
        prefix = f"{step}.{attempt}.copy-{self._job}-"
        count = self.part_count(step, attempt)
        names = {key.decode(errors="replace") for key in self._notes.list().result()}
        return bool(count) and all(f"{prefix}{n:05d}" in names for n in range(count or 0))

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
        names = [key.decode(errors="replace") for key in self._notes.list().result()]
        notes = [name[len(prefix) :].split(".") for name in names if name.startswith(prefix)]
        has_all = bool(notes) and len(notes) == int(notes[0][0])
        return max(by_copies, int(notes[0][1]) if has_all else 0)

    def forget(self, step: str) -> None:
        """Removes the notes about a step."""
        for key in self._notes.list().result():
            if key.decode(errors="replace").startswith(f"{step}."):
                self._notes.write(key.decode(errors="replace"), None).result()
