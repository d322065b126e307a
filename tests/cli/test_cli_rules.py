"""The commands that take rules: convert, its plan as a table, and diff."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.processes import Processes
from support.quantized import codes_of
from typer.testing import CliRunner

import unickpt
from unickpt.cli.app import app

RULES = """
params/layers/up/kernel [l i o] <-> layers.{l}.up.weight [o i]
params/norm/scale [e] + 1       <-> norm.weight [e]
params/emb [(v + _) e]          <-> wte.weight [v e] = lm_head.weight [v e]
params/mask                     <-> drop
0                               <-> bias [e]    e=5
step                            <-> step
"""
SIZE = ("--size", "v=13")


def run(*arguments: str, code: int = 0) -> str:
    """Everything that a command prints which must exit with `code`."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result.output.removeprefix("\n")  # of a bar's end, from rich before 14.3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(0)
    params = {
        "layers": {"up": {"kernel": rng.random((4, 3, 5), np.float32)}},
        "norm": {"scale": np.ones(5, np.float32)},
        "emb": rng.random((16, 3), np.float32),
        "mask": np.ones(3),
    }
    unickpt.save(tmp_path / "jax", {"params": params, "step": 3})
    (tmp_path / "my.rules").write_text(RULES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_dry_run_prints_the_plan_and_writes_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    out = run("convert", "jax", "torch", "--rules", "my.rules", *SIZE, "--dry-run")
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert rows == [
        "stored made rule notes",
        "params/layers/up/kernel float32[4, 3, 5] layers.{0..3}.up.weight float32[5, 3] "
        "my.rules, line 2 a part, axes moved",
        "params/norm/scale float32[5] norm.weight float32[5] my.rules, line 3 + 1, inexact",
        "params/emb float32[16, 3] wte.weight float32[13, 3] my.rules, line 4 padding left out",
        "- bias float32[5] my.rules, line 6 constant 0",
        "step a plain value step a plain value my.rules, line 7",
        "wte.weight lm_head.weight my.rules, line 4 the same array",
        "params/mask float64[3] my.rules, line 5 dropped",
        "9 leaves made, 1 dropped, 1 inexact",
    ]
    assert sorted(folder.rglob("*")) == before
    plan = json.loads(run("convert", "jax", "torch", "--rules", "my.rules", *SIZE, "--dry-run",
                          "--json"))["plan"]  # fmt: skip
    assert len(plan) == 10
    assert plan[0] == {
        "made": "layers.0.up.weight",
        "made_of": "params/layers/up/kernel",
        "source": "float32[4, 3, 5]",
        "destination": "float32[5, 3]",
        "rule": "my.rules, line 2",
        "notes": ["a part", "axes moved"],
    }


def test_there_and_back(folder: Path) -> None:
    out = run("convert", "jax", "torch", "--rules", "my.rules", *SIZE)
    assert out.startswith("converted 7 arrays, 436 B in ")
    assert ", and checked: file://" in out
    out = run("diff", "jax", "torch", "--rules", "my.rules", *SIZE)
    assert out.startswith("same: 8 arrays compared")
    out = run("convert", "torch", "back", "--rules", "my.rules", *SIZE, "--inverse", "--json")
    assert json.loads(out)["arrays"] == 3
    out = run("diff", "jax", "back", code=1)
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [
        ["params/emb", "value"],
        ["params/mask", "unexpected"],
    ]
    found = json.loads(run("diff", "jax", "back", "--json", code=1))
    assert not found["same"]
    assert {row["name"]: row["unequal"] for row in found["differences"]} == {
        "params/mask": None,
        "params/emb": 9,
    }
    back = unickpt.load("back")
    assert np.array_equal(back["params"]["emb"][13:], np.zeros((3, 3)))


def test_fewer_bits(folder: Path) -> None:
    options = ("--quantize", "params/norm/**=none", "--quantize", "**/scale=int4")
    told = run("convert", "jax", "few", *options, "--quantize", "params/**=uint8", code=2)
    assert "'**/scale' matches no array, or only arrays that an earlier pattern matches" in told
    quantize = ("--quantize", "params/norm/**=none", "--quantize", "params/**=uint8")
    found = json.loads(run("convert", "jax", "few", *quantize, "--json"))["quantized"]
    codes = {name: codes_of(entry) for name, entry in unickpt.open("few").index.arrays.items()}
    assert codes.pop("params/norm/scale") is None
    assert set(codes.values()) == {"uint8"}
    assert set(found) == set(codes)
    assert 0 < found["params/emb"]["largest_relative_error"] < 1 / 255
    assert "3 arrays with fewer bits" in run("convert", "jax", "again", *quantize)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rules", "none"), "none is neither a file nor a preset; presets are "),
        (("--rules", "my.rules"), "the size of _, v is unknown: give it"),
        (("--rules", "my.rules", "--size", "v"), "expected an axis and its size"),
        (("--rules", "my.rules", "--size", "vv=3"), "a size is given for 'vv', which no rule has"),
        (
            ("--rules", "my.rules", *SIZE, "--inverse"),
            "the rules are the wrong way round: the stored names match",
        ),
        (("--inverse",), "--inverse and --size need --rules"),
        (("--compression", "xz"), "compression 'xz' is not one of"),
        (("--quantize", "=int4"), "expected a pattern and its codes, such as opt/**=uint8"),
        (("--quantize", "params/emb=int5"), "is 'int5', not one of uint8"),
        (("--quantize", "opt/**=int4"), "SaveOptions.quantize: 'opt/**' matches no array"),
    ],
)
def test_mistakes(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in run("convert", "jax", "torch", *arguments, code=2)
    assert not (folder / "torch").exists()


def test_names_of_the_other_side_tell_rules_apart(folder: Path) -> None:
    """What shapes do not tell, a checkpoint that is like the new one does; also to `diff`."""
    tree = {"up": {"kernel": np.ones((3, 5))}, "emb": {"embedding": np.ones((7, 5))}}
    unickpt.save("flax", tree | {"old": np.ones(2)})
    (folder / "two.rules").write_text("""
        {m...}/kernel [i o]     <-> {m...}.weight [o i]
        {m...}/embedding [v e]  <-> {m...}.weight [v e]
        old                     <-> drop
        drop 0                  <-> {m...}.count [] as int64
    """)
    out = run("convert", "flax", "hf", "--rules", "two.rules", "--dry-run")
    assert "- {m...}.count two.rules, line 5 not made: give the" in " ".join(out.split())
    assert "2 leaves made, 1 dropped, 0 inexact" in out
    run("convert", "flax", "hf", "--rules", "two.rules")
    rules = ("--rules", "two.rules", "--inverse")
    assert "is taken twice" in run("convert", "hf", "back", *rules, code=2)
    assert "as it is" in run("convert", "hf", "back", *rules, "--like", "flax", "--dry-run")
    run("convert", "hf", "back", *rules, "--like", "flax")
    assert np.array_equal(unickpt.load("back")["up"]["kernel"], tree["up"]["kernel"])
    assert run("diff", "hf", "flax", *rules).startswith("same: 2 arrays compared")
    assert run("diff", "flax", "hf", *rules[:2]).startswith("same: 2 arrays compared")
    assert "--like needs --rules" in run("convert", "flax", "x", "--like", "flax", code=2)
    half = {**tree, "up": {"kernel": np.ones((3, 5), np.float16)}}
    unickpt.save("half", half)
    assert "'up/kernel' is made as float64, but `like` has float16; write `as float16`" in run(
        "convert", "hf", "back", "--like", "half", "--overwrite", *rules, code=2
    )


def test_presets_are_listed_and_printed(folder: Path) -> None:
    lines = run("presets").splitlines()
    assert [line.split()[0] for line in lines] == unickpt.Rules.presets()
    assert "  Llama of transformers: the Flax classes (left) and the PyTorch ones;" in run(
        "presets"
    )
    (folder / "mine.rules").write_text(run("presets", "optax-adam"))
    assert str(unickpt.Rules.load("mine.rules").shared[0]).endswith(
        "lift 0/count <-> state/{p}/step"
    )
    assert "there is no preset 'other'; presets are bytecheckpoint, dcp, deepspeed, flax" in run(
        "presets", "other", code=2
    )
    assert json.loads(run("presets", "--json"))["presets"].keys() == set(unickpt.Rules.presets())


def test_numbers_that_leave_holes_are_asked_about(folder: Path) -> None:
    tree = {"q": np.ones((3, 4, 8)), "k": np.ones((3, 4)), "gap": np.ones((3, 8, 4))}
    unickpt.save("m", tree)
    (folder / "slip.rules").write_text("""
        q [l i o]   <-> layers.{l+1}.q [o i]
        k [l i]     <-> layers.{l+1}.k [i]
        gap [i l o] <-> layers.{l+1}.gap [o i]   # [l i o] was meant
    """)
    out = run("convert", "m", "out", "--rules", "slip.rules", "--dry-run")
    assert "warning: layers.8 is made, but layers.0 is not: is that intended?" in out
    assert "warning: layers.4 has 1 arrays, and others under 'layers.' have up to 3: is" in out
    text = (folder / "slip.rules").read_text().replace("l+1", "l").replace("[i l o]", "[l i o]")
    (folder / "good.rules").write_text(text)
    out = run("convert", "m", "out", "--rules", "good.rules", "--dry-run")
    assert "warning" not in out
    found = json.loads(run("convert", "m", "out", "--rules", "good.rules", "--dry-run", "--json"))
    assert found["doubts"] == []
    assert "layers.{0..2}.q float64[8, 4] good.rules, line 2 a part, axes moved" in " ".join(
        out.split()
    )


def test_what_rules_leave_to_the_other_side_is_taken_from_it(folder: Path) -> None:
    """So that a converted checkpoint has all that a strict load asks for."""
    unickpt.save("a", {"w": np.ones((2, 3))})
    group = {"lr": 0.1, "betas": [0.9, 0.99]}
    unickpt.save("b", {"w": np.zeros((3, 2)), "group": group, "mask": np.ones(2)})
    (folder / "r.rules").write_text("w [i o] <-> w [o i]\ndrop <-> group/{g...}\ndrop <-> mask")
    run("convert", "a", "out", "--rules", "r.rules", "--like", "b")
    like = {"w": np.zeros((3, 2)), "group": {"lr": 0.5, "betas": [0.0, 0.0]}}
    assert unickpt.load("out", like)["group"] == {"lr": 0.1, "betas": [0.9, 0.99]}
    out = run("convert", "a", "x", "--rules", "r.rules", "--like", "b", "--dry-run")
    assert "- group/lr a plain value taken from `like`" in " ".join(out.split())
    assert "- mask not made: a rule drops it on this side" in " ".join(out.split())
    assert "4 leaves made, 0 dropped" in out
    rules = unickpt.Rules.load("r.rules")
    unickpt.convert("a", "tree", rules=rules, like=like)
    assert unickpt.load("tree")["group"]["lr"] == 0.5
    with pytest.raises(ValueError, match="`like` gives the names that rules make"):
        unickpt.convert("a", "y", like=like)


def test_differences_that_arithmetic_leaves_behind(folder: Path) -> None:
    unickpt.save("a", {"w": np.ones(3)})
    unickpt.save("b", {"w": np.array([1, 1, 1 + 1e-7])})
    assert run("diff", "a", "b", code=1).startswith("leaf")
    assert run("diff", "a", "b", "--rtol", "1e-6").startswith("same")
    assert run("diff", "a", "b", "--rtol", "1e-8", code=1).startswith("leaf")
    unickpt.save("c", {"w": np.array([1, 1, np.nan])})
    assert run("diff", "a", "c", "--rtol", "1", code=1).startswith("leaf")


def test_exchanged_names_are_asked_about(folder: Path) -> None:
    (folder / "slip.rules").write_text("a/q [e] <-> a.k [e]\na/k [e] <-> a.q [e]")
    unickpt.save("qk", {"a": {"q": np.ones(2), "k": np.ones(2)}})
    out = run("convert", "qk", "out", "--rules", "slip.rules")
    assert "warning: slip.rules, line 2: a/k [e] <-> a.q [e]" in out
    assert "'k' becomes 'q', and 'q' becomes 'k': is that intended?" in out


def test_a_destination_that_is_taken(folder: Path) -> None:
    run("convert", "jax", "torch", "--rules", "my.rules", *SIZE)
    again = ("convert", "jax", "torch", "--rules", "my.rules", *SIZE)
    assert "already holds a checkpoint" in run(*again, code=2)
    run(*again, "--overwrite", "--no-verify", "--compression", "zstd", "--budget", "2000000")
    assert "same" in run("diff", "jax", "torch", "--rules", "my.rules", *SIZE)


def test_under_torchrun(folder: Path, processes: Processes) -> None:
    (folder / "my.rules").write_text(RULES.replace("[v e]\n", "[v e]  v=13\n"))
    source = "from unickpt.cli.main import main; main()"
    arguments = ("convert", "jax", "torch", "--rules", "my.rules")
    said = processes.finish(processes.torch(2, source, *arguments))
    assert "".join(said).count("converted 7 arrays") == 1
    assert unickpt.open("torch").index.processes == 2
    assert "same" in run("diff", "jax", "torch", "--rules", "my.rules")
