"""Doors: what packages of others bring by entry points, used by programs that do not know them.

The packages are real ones, installed into a folder that is on the path: modules and metadata.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import list_doors
import pytest
from support.processes import Processes

from unickpt import _doors, doors
from unickpt.errors import PluginError

FORMAT = """
import json
from unickpt import CheckpointCorrupt, extend
from unickpt.errors import UnsupportedFormat

class Reader(extend.RangeReader):
    format = "acme"

class Format:
    HINTS = ()
    def open(self, files, hints):
        if "arrays.json" not in files.here:
            return None
        table = extend.ArrayTable()
        for name, shape in json.loads(files.whole("arrays.json")).items():
            where = extend.FileRange("data.bin", 0)
            table.add(name, extend.TensorSource("uint8", tuple(shape), where))
        return Reader(files, table.index(), table.boxes)

FORMAT = Format()
def refusal(files, error):
    return UnsupportedFormat("a kit of Acme; assemble it") if "kit.acme" in files.here else None

SCHEME = extend.Scheme("acme", lambda url: {"driver": "memory", "path": url[7:] + "/"})
"""
POINTS = {
    "formats": {"acme": "acme_checkpoints:FORMAT"},
    "schemes": {"acme": "acme_checkpoints:SCHEME"},
    "writers": {"acme": "unickpt.backends.numpy.npz:NpzWriter"},
    "presets": {"acme": "acme_rules"},
    "refusals": {"acme": "acme_checkpoints"},
}
Doctor = Callable[[str], tuple[int, str]]
Run = Callable[[str], "subprocess.CompletedProcess[str]"]


def install(site: Path, name: str, points: Mapping[str, Mapping[str, str]]) -> None:
    """A package with entry points; its modules are the caller's."""
    info = site / f"{name}-1.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    lines = [
        f"[unickpt.{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "acme_checkpoints.py").write_text(FORMAT)
    (folder / "acme_rules").mkdir()
    (folder / "acme_rules" / "acme-bert.rules").write_text("a/b <-> a.b\n")
    stored = tmp_path / "stored"
    stored.mkdir()
    (stored / "arrays.json").write_text(json.dumps({"w": [3], "b": [2, 3]}))
    (stored / "data.bin").write_bytes(bytes(range(6)))
    return folder


@pytest.fixture
def run(tmp_path: Path, site: Path) -> Run:
    """Runs a program in a process that finds the packages of `site`."""

    def run(source: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(site), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, "-W", "error", "-c", source]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )

    return run


@pytest.fixture
def doctor(
    tmp_path: Path, site: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> Doctor:
    """Runs a program likewise, in a process that has imported torch and JAX; its exit code and
    what it said."""
    monkeypatch.chdir(tmp_path)

    def run(source: str) -> tuple[int, str]:
        env = {"PYTHONPATH": str(site)}
        strict = "import warnings; warnings.simplefilter('error')\n"
        process = processes.forked(strict + source, of=["jax", "torch"], env=env)
        out, err = process.communicate(timeout=120)
        return process.returncode, out + err

    return run


@pytest.mark.plugins
def test_ours_are_those_of_the_project() -> None:
    assert list_doors.FILE.read_text() == list_doors.source(), "run `make doors`"
    assert set(_doors.DOORS) == set(doors.GROUPS)


@pytest.mark.integration  # imports large libraries
@pytest.mark.parametrize("group", doors.GROUPS)
def test_each_of_ours_opens(group: doors.Group) -> None:
    assert all(door.open() is not None for door in doors.ours(group).values())


@pytest.mark.plugins
def test_what_another_package_brings_is_used_by_name_and_by_content(site: Path, run: Run) -> None:
    install(site, "acme", POINTS)
    done = run(
        "import unickpt, numpy as np\n"
        "assert unickpt.load('stored')['b'].tolist() == [[0, 1, 2], [3, 4, 5]]\n"
        "assert unickpt.open('stored').reader.format == 'acme'\n"
        "unickpt.save('acme://bucket/run', {'w': np.arange(3)})\n"
        "assert unickpt.load('acme://bucket/run')['w'].tolist() == [0, 1, 2]\n"
        "unickpt.convert('stored', 'c.npz', to='acme')\n"
        "assert str(unickpt.Rules.preset('acme-bert')) == 'a/b [...] <-> a.b [...]'\n"
        "assert unickpt.Rules.presets()[-1] == 'acme-bert'\n"
        "unickpt.Rules.parse('include acme-bert')\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


COMMAND = """
import sys, typer
app = typer.Typer()
@app.command()
def command(path: str) -> None:
    "Weigh a checkpoint."
    print("weighed", path, "unickpt.plugins.merge" in sys.modules)
"""


def test_a_command_of_another_package_is_one_of_unickpts(site: Path, run: Run) -> None:
    install(
        site, "acme", {"commands": {"weigh": "acme_command:app", "broken": "broken_command:app"}}
    )
    (site / "acme_command.py").write_text(COMMAND)
    (site / "broken_command.py").write_text("import of_which_there_is_none\n")
    called = run(
        "from typer.testing import CliRunner\n"
        "from unickpt.cli.app import app\n"
        "for arguments in ['weigh', 'stored'], ['--help'], ['broken']:\n"
        "    print(CliRunner().invoke(app, arguments).output)\n"
    )
    weighed, told = called.stdout.split("\n", 1)
    assert weighed == "weighed stored False", called.stderr
    assert "the command 'broken' of acme 1.5 (broken_command:app) cannot be used" in told
    assert told.count("cannot be used") == 2


def test_another_package_says_what_a_file_is_that_no_format_reads(
    site: Path, run: Run, tmp_path: Path
) -> None:
    install(site, "acme", POINTS)
    for name in ("kit.acme", "other.acme"):
        folder = tmp_path / name[:-5]
        folder.mkdir()
        (folder / name).write_bytes(b"acme")
    done = run(
        "import unickpt\n"
        "for path in ('kit', 'kit/kit.acme', 'other'):\n"
        "    try: unickpt.load(path)\n"
        "    except unickpt.UnickptError as error: print(type(error).__name__, error)\n"
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == ["UnsupportedFormat a kit of Acme; assemble it"] * 2
    assert lines[2].startswith("CheckpointNotFound"), lines


@pytest.mark.plugins
def test_packages_are_looked_up_only_for_what_ours_do_not_know(site: Path, run: Run) -> None:
    install(site, "acme", POINTS)
    done = run(
        "import unickpt, numpy as np\n"
        "from unickpt import doors\n"
        "unickpt.save('run/1', {'w': np.arange(3)})\n"
        "unickpt.convert('run/1', 'c.npz')\n"
        "unickpt.load('c.npz'), unickpt.load('run/1'), unickpt.Rules.preset('maxtext-llama')\n"
        "assert not list(unickpt.Checkpointer('new').steps())\n"
        "assert doors._of_packages.cache_info().currsize == 0\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.plugins
@pytest.mark.integration  # doctor opens every door, torch's and JAX's too
def test_ours_come_first_and_doctor_says_so(site: Path, doctor: Doctor) -> None:
    install(site, "acme", {"writers": {"npz": "acme_checkpoints:FORMAT"}})
    code, said = doctor(
        "import unickpt, numpy as np\n"
        "unickpt.save('run/1', {'w': np.arange(3)})\n"
        "unickpt.convert('run/1', 'c.npz', to='npz')\n"
        "from unickpt.cli.app import app\n"
        "app(['doctor'])\n"
    )
    assert code == 2
    assert "writers npz, acme 1.5 (acme_checkpoints:FORMAT): PluginError" in said
    assert "comes before it" in said


@pytest.mark.plugins
@pytest.mark.integration  # doctor opens every door, torch's and JAX's too
def test_one_that_fails_is_named_where_it_is_needed(site: Path, run: Run, doctor: Doctor) -> None:
    install(site, "acme", POINTS)
    (site / "acme_checkpoints.py").write_text("import of_which_there_is_none\n")
    done = run(
        "import unickpt, numpy as np\n"
        "unickpt.save('run/1', {'w': np.arange(3)})\n"
        "unickpt.load('run/1')\n"
        "for path in ('stored', 'acme://bucket/run', 'missing'):\n"
        "    try: unickpt.load(path)\n"
        "    except unickpt.UnickptError as error: print(type(error).__name__, error)\n"
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        "PluginError the format 'acme' of acme 1.5 (acme_checkpoints:FORMAT) cannot be used: "
        "ModuleNotFoundError: No module named 'of_which_there_is_none'"
    )
    assert lines[1].startswith("PluginError the scheme 'acme' of acme 1.5"), lines
    assert lines[2].startswith("CheckpointNotFound"), lines
    code, said = doctor("from unickpt.cli.app import app\napp(['doctor', '.'])\n")
    assert code == 2
    assert "formats acme, acme 1.5 (acme_checkpoints:FORMAT): PluginError" in said
    assert "presets acme, acme 1.5 (acme_rules): works" in said
    assert "hard links" in said


@pytest.mark.parametrize("group", [group for group in doors.GROUPS if group != "names"])
def test_one_that_is_something_else_is_named(group: doors.Group) -> None:
    with pytest.raises(
        PluginError, match=r"'acme' of acme 1.5 \(math:pi\) cannot be used: .*has no"
    ):
        doors.Door(group, "acme", "math:pi", "acme 1.5").open()


def test_two_packages_with_one_name_are_named(site: Path, run: Run) -> None:
    install(site, "acme", POINTS)
    install(site, "best", POINTS)
    done = run(
        "import unickpt\n"
        "try: unickpt.load('stored')\n"
        "except unickpt.errors.PluginError as error: print(error)\n"
    )
    assert "acme 1.5 and best 1.5 both have an entry point 'acme'" in done.stdout
    assert "Uninstall one of them" in done.stdout
