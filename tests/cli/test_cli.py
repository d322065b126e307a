"""The command line: what it prints, as text and as JSON, and how it exits, over every scheme."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.table import Table
from support import s3_server
from typer.testing import CliRunner

import unickpt
from unickpt import PerProcess, doors
from unickpt.cli import fragment_map
from unickpt.cli.app import app
from unickpt.reading.checkpoints_below import checkpoints_below
from unickpt.types import Box, Layout, LocalFragments, Mesh


def layer(seed: int) -> dict[str, Any]:
    return {
        "attn": {"q": np.full((8, 4), seed, np.float32), "o": np.full((4, 8), seed, np.float32)},
        "norm": {"scale": np.full(8, seed, np.float32)},
    }


def model() -> dict[str, Any]:
    embed = np.arange(32, dtype=np.float32).reshape(4, 8)
    return {
        "params": {"embed": embed, "layers": [layer(i) for i in range(12)], "head": embed},
        "step": 100,
        "name": "a small one",
        "rng": PerProcess({"seed": 7}),
        "rows": LocalFragments(
            (4, 6),
            [
                (Box((0, 0), (1, 6)), np.zeros((1, 6))),
                (Box((1, 0), (4, 2)), np.ones((3, 2))),
                (Box((1, 2), (4, 6)), np.ones((3, 4))),
            ],
        ),
        "nothing": {},
    }


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket in an S3 server on this machine."""
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "clibucket")
    return "s3://clibucket"


@pytest.fixture(params=["path", "file", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh folder in each storage."""
    if request.param == "path":
        return str(tmp_path)
    if request.param == "file":
        return tmp_path.as_uri()
    if request.param == "memory":
        return f"memory://cli/{tmp_path.name}"
    bucket: str = request.getfixturevalue("s3")
    return f"{bucket}/{tmp_path.name}"


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = tmp_path / "step_100"
    unickpt.save(path, model(), metadata={"run": "llama"})
    return str(path)


def run(*arguments: str, code: int = 0) -> str:
    """Standard output of a command that must exit with `code`."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    assert "\x1b" not in result.output
    return result.stdout


def error_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, (result.output, result.exception)
    assert not result.stdout
    assert "Traceback" not in result.stderr
    return result.stderr


def flip_a_byte(path: str, of: bytes) -> None:
    """Damages the one place in a checkpoint's files that holds `of`."""
    for file in Path(path).rglob("d/*"):
        data = file.read_bytes()
        if of in data:
            at = data.index(of)
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            return
    raise AssertionError("the bytes stand in no file")


# --- inspect ------------------------------------------------------------------------------------


def test_inspect_every_scheme(root: str) -> None:
    unickpt.save(f"{root}/step_7", model(), metadata={"run": "llama"})
    text = run("inspect", f"{root}/step_7")
    assert "format 1, created 20" in text
    assert 'metadata {"run": "llama"}' in text
    assert "total: 38 arrays of 920 elements, 3.8 kB in 40 chunks; 1 tie; 2 plain values" in text
    facts = json.loads(run("inspect", f"{root}/step_7", "--json"))
    assert facts["totals"].pop("by_dtype")["float64"] == {"arrays": 1, "bytes": 192}
    assert "by dtype: 3.6 kB float32 (37 arrays), 192 B float64 (1 array)" in text
    assert facts["totals"] == {"arrays": 38, "elements": 920, "bytes": 3776, "chunks": 40,
                               "reused_bytes": 0, "bases": []}  # fmt: skip
    assert facts["url"].endswith("/step_7/")


def test_inspect_folds_layers_that_are_alike(saved: str) -> None:
    lines = run("inspect", saved).splitlines()
    assert [line.split() for line in lines if "layers/" in line] == [
        ["layers/{0..11}/", "x12", "3.5", "kB"]
    ]
    (q,) = (line for line in lines if line.strip().startswith("q "))
    assert q.split() == ["q", "8", "x", "4", "float32", "-", "1", "1.5", "kB"]
    assert any("norm/scale" in line for line in lines)
    assert any("--all shows each" in line for line in lines)


def test_inspect_all_unfolds(saved: str) -> None:
    text = run("inspect", saved, "--all")
    assert text.count("norm/scale") == 12
    assert "{0..11}" not in text
    assert "--all" not in text


def test_inspect_all_of_many_arrays_makes_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of rich take 0.3 ms for each row; many rows are printed as plain lines."""
    tree = {f"w{i}": np.zeros((i % 7 + 1, 3), np.float32) for i in range(600)}
    unickpt.save(tmp_path / "x", {**tree, "step": 3})
    few = run("inspect", str(tmp_path / "x")).splitlines()
    monkeypatch.setattr(Table, "add_row", None)
    lines = run("inspect", str(tmp_path / "x"), "--all").splitlines()
    rows = [line.split() for line in lines if line.startswith("w")]
    assert [row[0] for row in rows] == list(tree)
    assert rows[8] == ["w8", "2", "x", "3", "float32", "24", "B"]
    assert "step = 3" in {line[:8] for line in lines}
    heading = next(line for line in lines if line.startswith("name"))
    assert heading.split() == next(line for line in few if line.startswith("name")).split()
    assert {len(line) for line in lines if line.startswith("w")} == {len(heading)}


def test_inspect_shows_every_kind_of_leaf(saved: str) -> None:
    text = run("inspect", saved)
    rows = {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line.strip()}
    assert rows["step"] == "step = 100 int"
    assert rows["name"] == "name = 'a small one' str"
    assert rows["head"] == "head = params/embed tied"
    assert rows["rng"].startswith("rng 1 value per process")
    assert rows["rows"] == "rows 4 x 6 float64 boxes 3 192 B"
    assert rows["nothing:"] == "nothing: empty"


def test_inspect_folds_flat_names(tmp_path: Path) -> None:
    tree = {f"h.{i}.mlp.{e}.w": np.zeros(2) for i in range(3) for e in range(4)}
    tree |= {f"h.{i}.norm": np.zeros(2) for i in (0, 1, 2, 5)}
    tree |= {"h.3.norm": np.zeros(3), "two.0": np.zeros(1), "two.1": np.zeros(1)}
    unickpt.save(tmp_path / "flat", tree)
    text = run("inspect", str(tmp_path / "flat"))
    first = [" ".join(line.split()[:2]) for line in text.splitlines()[4:-3]]
    assert first == [
        "h.{0..2}.mlp.{0..3}.w x12",
        "h.{0..2,5}.norm x4",
        "h.3.norm 3",
        "two.0 1",
        "two.1 1",
    ]


def test_inspect_shows_the_root_and_nothing(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "leaf", np.zeros(3))
    unickpt.save(tmp_path / "none", {})
    assert "(the root)  3" in run("inspect", str(tmp_path / "leaf"))
    assert "(the root): empty" in run("inspect", str(tmp_path / "none"))


def test_inspect_cleans_hostile_names(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "x", {"\x1b[31m[red]": np.zeros(1), "v": "\x1b[2J"})
    text = run("inspect", str(tmp_path / "x"))
    assert r"\x1b[31m[red]" in text
    assert r"'\x1b[2J'" in text


def test_inspect_container_value_and_per_process_leaf(saved: str) -> None:
    assert run("inspect", saved, "params/layers/").splitlines()[1].split()[0] == (
        "params/layers/{0..11}/"
    )
    assert run("inspect", saved, "step") == "100\n"
    assert json.loads(run("inspect", saved, "step", "--json")) == {"name": "step", "value": 100}
    assert run("inspect", saved, "rng").splitlines()[0] == "rng"
    assert len(json.loads(run("inspect", saved, "rng", "--json"))["per_process"]) == 1


def test_inspect_json_describes_every_array(saved: str) -> None:
    facts = json.loads(run("inspect", saved, "--json"))
    assert (facts["format"], facts["features"], facts["codecs"]) == ("1", [], [])
    assert facts["metadata"] == {"run": "llama"}
    assert facts["processes"] == 1
    assert facts["values"] == {"step": 100, "name": "a small one"}
    assert facts["ties"] == {"params/head": "params/embed"}
    embed = next(a for a in facts["arrays"] if a["name"] == "params/embed")
    assert embed == {
        "name": "params/embed",
        "shape": [4, 8],
        "dtype": "float32",
        "bytes": 128,
        "spec": [[], []],
        "chunk": [4, 8],
        "chunks": 1,
        "prng": None,
        "quantized": None,
        "patched": 0,
        "codecs": [],
        "mesh": 0,
        "fragments": 1,
        "parts": 1,
        "block": None,
    }
    assert facts["meshes"] == [{"axes": [], "shape": [], "processes": [0]}]


# --- inspect: one array -------------------------------------------------------------------------


def test_inspect_array_draws_its_fragments(saved: str) -> None:
    text = run("inspect", saved, "rows")
    assert text == run("inspect", saved, "--array", "rows")
    drawing = text[text.index("┌") - 4 :]
    assert (
        drawing
        == """\
    ┌────────────────────────────────────────────────────────┐
0:1 │                           p0                           │
    ├──────────────────┬─────────────────────────────────────┤
1:4 │        p0        │                 p0                  │
    └──────────────────┴─────────────────────────────────────┘
dimension 0 runs down, dimension 1 to the right
"""
    )
    assert "  parts        3\n" in text
    assert "[1:4, 2:6]" in text
    assert "|ocdbt:rows/part_1_2/" in text


def test_inspect_tied_array_json(saved: str) -> None:
    facts = json.loads(run("inspect", saved, "params/head", "--json"))
    assert facts["tied_to"] == "params/embed"
    assert facts["fragments"] == [{"start": [0, 0], "stop": [4, 8], "processes": [0]}]
    (part,) = facts["parts"]
    assert part["url"].endswith("/step_100/|ocdbt:params/embed/")
    assert part["grid"] == [1, 1]


def test_tensorstore_opens_the_urls_that_inspect_shows(tmp_path: Path) -> None:
    import tensorstore as ts

    names = ["a/b", "c|d", "e?f#g", "sp ace", "é", "100%"]
    unickpt.save(tmp_path / "x", {name: np.arange(3) for name in names})
    for array in unickpt.open(tmp_path / "x"):
        facts = json.loads(run("inspect", str(tmp_path / "x"), array, "--json"))
        assert ts.open(facts["parts"][0]["url"]).result().read().result().tolist() == [0, 1, 2]


def drawn(shape: tuple[int, ...], layout: Layout, width: int = 100) -> fragment_map.Map:
    return fragment_map.draw(shape, list(layout.fragments(shape)), layout, width)


def test_map_names_processes_and_devices() -> None:
    mesh = Mesh(("x", "y"), (2, 2), (0, 0, 1, 1))
    found = drawn((4, 2, 6), Layout(mesh, (("x",), (), ("y",))))
    assert [line.split() for line in found.lines[2:4]] == [
        ["0:2", "│", "p0", "│", "p0", "│"],
        ["│", "d0", "│", "d1", "│"],
    ]
    assert found.remark == "dimension 0 runs down, dimension 2 to the right"


def test_map_of_replicas_names_all_holders() -> None:
    mesh = Mesh(("d", "m"), (4, 2), tuple(range(8)))
    found = drawn((6,), Layout(mesh, (("m",),)))
    assert found.lines[2].split() == ["│", "p0,2,4,6", "│", "p1,3,5,7", "│"]


def test_map_of_third_split_dimension_says_what_it_leaves_out() -> None:
    mesh = Mesh(("x", "y", "z"), (2, 2, 2), tuple(range(8)))
    found = drawn((4, 4, 4), Layout(mesh, (("x",), ("y",), ("z",))))
    assert "the first of 2 pieces along dimension 2" in found.remark
    assert found.lines[2].split() == ["0:2", "│", "p0", "│", "p2", "│"]


def test_map_of_a_big_mesh_fits_the_width() -> None:
    mesh = Mesh(("x", "y"), (64, 64), tuple(range(4096)))
    found = drawn((64, 640), Layout(mesh, (("x",), ("y",))), width=80)
    assert max(map(len, found.lines)) <= 80
    assert len(found.lines) < 40
    assert "..." in found.lines[0]
    assert "p4095" in found.lines[-2]


@pytest.mark.parametrize("shape", [(), (0, 3), (5,)])
def test_map_of_arrays_without_a_plane(shape: tuple[int, ...]) -> None:
    found = drawn(shape, Layout.replicated(len(shape), 1))
    assert bool(found.lines) == (0 not in shape)
    if 0 in shape:
        assert found.remark == "The array has no elements, and so no fragments."


# --- ls -----------------------------------------------------------------------------------------


def test_ls_every_scheme_in_natural_order(root: str) -> None:
    for step in (10, 2, 9):
        unickpt.save(f"{root}/step_{step}", {"w": np.zeros(step)})
    lines = run("ls", root).splitlines()
    assert [line.split()[0] for line in lines] == ["name", "step_2", "step_9", "step_10"]
    assert lines[1].split()[-3:] == ["16", "B", "1"]
    found = json.loads(run("ls", root, "--json"))
    assert found["root"] == root
    assert [c["arrays"] for c in found["checkpoints"]] == [1, 1, 1]
    assert [c["error"] for c in found["checkpoints"]] == [None] * 3
    for listed in checkpoints_below(root):
        assert len(unickpt.open(listed.path)) == 1


def test_ls_names_that_urls_must_quote(root: str) -> None:
    if root.startswith("s3"):
        name = "a%20b%25"
    else:
        name = "a b" if root.startswith("memory") else "a b%25" if "://" not in root else "a%20b"
    unickpt.save(f"{root}/{name}", {"w": np.zeros(1)})
    (listed,) = checkpoints_below(root)
    assert listed.name.startswith("a b")
    assert len(unickpt.open(listed.path)) == 1


def test_ls_of_a_checkpoint_shows_itself(saved: str) -> None:
    assert run("ls", saved).splitlines()[1].startswith(".  ")


def test_ls_shows_damaged_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "good", {"w": np.zeros(1)})
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "manifest.ocdbt").write_bytes(b"no manifest")
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").touch()
    bad, good = json.loads(run("ls", str(tmp_path), "--json"))["checkpoints"]
    assert (good["name"], good["error"]) == ("good", None)
    assert bad["arrays"] is None
    assert "damaged" in bad["error"]
    assert "damaged" in run("ls", str(tmp_path))


def test_ls_of_empty_and_missing_folders(tmp_path: Path) -> None:
    assert run("ls", str(tmp_path)) == f"no checkpoints in {tmp_path}\n"
    assert json.loads(run("ls", str(tmp_path), "--json"))["checkpoints"] == []
    assert "no directory at" in error_of("ls", str(tmp_path / "missing"))


# --- verify -------------------------------------------------------------------------------------


def test_verify_every_scheme(root: str) -> None:
    unickpt.save(f"{root}/step_1", model())
    assert run("verify", f"{root}/step_1").startswith("ok: 38 arrays, 40 chunks, 3.8 kB checked")
    report = json.loads(run("verify", f"{root}/step_1", "--json"))
    assert (report["ok"], report["chunks"], report["damage"]) == (True, 40, [])


def test_verify_names_the_damage_and_exits_with_1(tmp_path: Path) -> None:
    data = np.arange(64, dtype=np.int32)
    path = str(tmp_path / "x")
    unickpt.save(path, {"a": data, "b": data + 1})
    flip_a_byte(path, data.tobytes())
    text = run("verify", path, code=1)
    assert "do not match their digest" in text
    assert "damaged: 1 place in 2 arrays" in text
    report = json.loads(run("verify", path, "--json", code=1))
    assert not report["ok"]
    (damage,) = report["damage"]
    assert (damage["array"], damage["box"], damage["process"]) == ("a", "[0:64]", 0)


def test_verify_without_a_checkpoint_is_no_damage(tmp_path: Path) -> None:
    assert "no checkpoint at" in error_of("verify", str(tmp_path))


# --- all of it ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{root}"], "no checkpoint at"),
        (["inspect", "ftp://host/x"], "unknown scheme 'ftp'"),
        (["ls", "s3://"], "give a bucket and a path"),
        (["inspect", "{saved}", "params/embd"], "did you mean 'params/embed'"),
        (
            ["inspect", "{saved}", "params", "--json"],
            "'params' is a container; --json shows one array or value",
        ),
        (["inspect", "{saved}", "a", "--array", "b"], "not two different names"),
        (["inspect"], "Missing argument"),
        (["nonsense"], "No such command"),
    ],
)
def test_errors_are_one_message_and_exit_code_2(
    arguments: list[str], message: str, saved: str
) -> None:
    root = str(Path(saved).parent)
    assert message in error_of(*(a.format(root=root, saved=saved) for a in arguments))


def test_version_and_help() -> None:
    assert run("--version") == f"unickpt {unickpt.__version__}\n"
    for command in ("inspect", "ls", "verify"):
        text = run(command, "--help")
        assert f"unickpt {command} runs/" in text
        assert "Fields are only ever added" in text


@pytest.fixture
def program() -> Callable[..., subprocess.CompletedProcess[str]]:
    def start(*arguments: str, source: str = "") -> subprocess.CompletedProcess[str]:
        how = ["-c", source] if source else ["-m", "unickpt.cli"]
        return subprocess.run(
            [sys.executable, *how, *arguments], capture_output=True, text=True, timeout=60
        )

    return start


def test_program(saved: str, program: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = program("inspect", saved, "rows")
    assert (done.returncode, done.stderr) == (0, "")
    assert "┌" in done.stdout
    assert "\x1b" not in done.stdout
    missing = program("inspect", f"{saved}/nothing")
    assert missing.returncode == 2
    assert missing.stderr.startswith("unickpt: no checkpoint at")
    assert len(missing.stderr.splitlines()) == 1


@pytest.mark.parametrize("module", ["unickpt", "unickpt.cli"])
def test_program_as_a_module(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"unickpt {unickpt.__version__}\n"), done.stderr


def test_program_over_s3(s3: str, program: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    unickpt.save(f"{s3}/program/step_1", {"w": np.zeros(3)}, overwrite=True)
    done = program("ls", f"{s3}/program")
    assert (done.returncode, done.stdout.splitlines()[1].split()[0]) == (0, "step_1")


WITHOUT_FRAMEWORKS = """
import sys
from unickpt.cli import main as cli
sys.argv = ["unickpt", "inspect", sys.argv[1]]
try:
    cli.main()
finally:
    assert not {"jax", "torch"} & set(sys.modules), "a framework was imported"
"""

WITHOUT_EXTRA = """
import sys
sys.modules["typer"] = None
from unickpt.cli import main as cli
cli.main()
"""


def test_program_imports_no_framework(
    saved: str, program: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    assert program(saved, source=WITHOUT_FRAMEWORKS).returncode == 0


def test_program_without_the_extra_says_how_to_install_it(
    program: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = program("ls", ".", source=WITHOUT_EXTRA)
    assert done.returncode == 2
    assert done.stderr == "unickpt: the command line needs typer; pip install 'unickpt[cli]'\n"


def test_output_that_cannot_be_written_is_no_damage(saved: str) -> None:
    def ends(command: str) -> tuple[int, str]:
        line = f"{sys.executable} -m unickpt.cli {command}"
        shell = ["bash", "-c", f"set -o pipefail; {line}"]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr

    full = "unickpt: the output cannot be written: [Errno 28] No space left on device\n"
    assert ends(f"verify {saved} > /dev/full") == (2, full)
    assert ends("presets transformers-llama > /dev/full") == (2, full)
    assert ends(f"inspect {saved} --all | true") == (0, "")
    assert ends(f"inspect {saved} --json | true") == (0, "")
    assert ends(f"verify {saved} >&-") == (0, "")


@pytest.mark.parametrize(
    "command", ["convert", "diff", "export", "import", "inspect", "merge", "verify"]
)
def test_the_help_of_a_command_explains_all_hints(command: str) -> None:
    told = "".join(run(command, "--help").split())
    formats = [door.open() for door in doors.ours("formats").values()]
    names = {name for each in formats for name in each.HINTS}
    assert len(names) >= 10
    for name in names:
        assert name in told
    assert "--hintNAME=VALUE" in told
