"""Builds the sdist and the wheel from what git tracks, and checks them as a user would get them.

    python tests/dist.py dist              # what `make dist` runs
    python tests/dist.py dist --quick      # without environments: seconds instead of minutes

Checks that both pass `twine check`, that the sdist builds the same wheel as the checkout, and that
the wheel has all files of the packages and none of the tests. Then installs the wheel into a clean
environment: by itself, and with the extras cli, jax and torch, one on top of the other.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "unickpt": "unickpt",
    "adapters": "unickpt/adapters",
    "backends": "unickpt/backends",
    "integrations": "unickpt/integrations",
    "plugins": "unickpt/plugins",
}
TORCH = "torch==2.13.0"  # the build for CPUs, where there is one; as in the Makefile

BY_ITSELF = """
import sys, time
start = time.perf_counter()
import unickpt
took = time.perf_counter() - start
others = {"jax", "torch", "typer", "rich", "tqdm"} & {*sys.modules}
assert not others, others
import numpy as np
state = {"w": np.arange(12.0).reshape(3, 4), "step": 7}
unickpt.save("by_itself", state)
found = unickpt.load("by_itself")
assert found["step"] == 7 and np.array_equal(found["w"], state["w"])
assert unickpt.verify("by_itself").ok
unickpt.Rules.preset("transformers-llama")
unickpt.report("by_itself", "report.html")
print(f"import unickpt: {took:.2f} s, version {unickpt.__version__}")
"""
WITH_JAX = """
import jax, jax.numpy as jnp, numpy as np, unickpt
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2, 4), ("data", "model"))
w = jax.device_put(jnp.arange(96.0).reshape(8, 12), NamedSharding(mesh, P("data", "model")))
unickpt.save("with_jax", {"w": w, "step": 7})
found = unickpt.load("with_jax", {"w": w, "step": 0})
assert found["step"] == 7 and found["w"].sharding == w.sharding
assert np.array_equal(found["w"], np.arange(96.0).reshape(8, 12))
print("jax", jax.__version__)
"""
WITH_TORCH = """
import torch, unickpt
found = unickpt.load("with_jax", {"w": torch.zeros(8, 12), "step": 0})
assert torch.equal(found["w"], torch.arange(96.0).reshape(8, 12))
model = torch.nn.Linear(3, 5)
unickpt.save_async("with_torch", model).result()
other = torch.nn.Linear(3, 5)
unickpt.load("with_torch", other)
assert torch.equal(model.weight, other.weight)
print("torch", torch.__version__)
"""


def call(*command: object, cwd: Path = ROOT, code: int = 0) -> str:
    """Runs a program that must end with an exit code; what it printed."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != code:
        raise SystemExit(
            f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}"
        )
    return done.stdout


# --- building -------------------------------------------------------------------------------------


def build(out: Path, folder: Path) -> tuple[Path, Path]:
    """Builds an sdist, and a wheel from it; their paths.

    Arguments:
        out: where they go; emptied first.
        folder: an empty one, for a copy of what git tracks.
    """
    names = call("git", "ls-files", "-z").split("\0")
    for name in filter(None, names):
        if os.path.lexists(ROOT / name):  # else it has been removed, and that is not committed yet
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    shutil.rmtree(out, ignore_errors=True)
    call(sys.executable, "-m", "build", "--outdir", out, folder)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    call(sys.executable, "-m", "build", "--wheel", "--outdir", folder / "direct", folder)
    (direct,) = (folder / "direct").glob("*.whl")
    if (of_sdist := contents(wheel)) != (of_tree := contents(direct)):
        names = sorted(n for n in {*of_sdist, *of_tree} if of_sdist.get(n) != of_tree.get(n))
        raise SystemExit(f"the sdist builds another wheel than the checkout: {', '.join(names)}")
    return sdist, wheel


def contents(wheel: Path) -> dict[str, int]:
    """The files of a wheel, with the checksums of their bytes."""
    with zipfile.ZipFile(wheel) as archive:
        return {each.filename: each.CRC for each in archive.infolist() if not each.is_dir()}


def check_files(sdist: Path, wheel: Path) -> None:
    """The wheel has what git tracks of the packages, and nothing else; the sdist has no links."""
    tracked = filter(None, call("git", "ls-files", "-z", *PACKAGES).split("\0"))
    wanted = set()
    for name in tracked:
        top, _, rest = name.partition("/")
        if rest and not (ROOT / name).is_symlink() and (ROOT / name).exists():
            wanted.add(f"{PACKAGES[top]}/{rest}")
    found = {name for name in contents(wheel) if ".dist-info/" not in name}
    if found != wanted:
        raise SystemExit(
            f"missing in the wheel: {sorted(wanted - found)}; too much: {sorted(found - wanted)}"
        )
    with tarfile.open(sdist) as archive:
        links = [member.name for member in archive if not (member.isfile() or member.isdir())]
        names = {member.name.partition("/")[2] for member in archive}
    if links or not {"LICENSE", "README.md", "pyproject.toml", *wanted} <= names:
        raise SystemExit(f"the sdist has links {links}, or lacks {sorted(wanted - names)}")
    print(f"{wheel.name}: {len(found)} files; {sdist.name}: {len(names)} files")


# --- installing -----------------------------------------------------------------------------------


def check_installed(wheel: Path, folder: Path) -> None:
    """The wheel works in an environment of its own, outside of the checkout."""
    call(sys.executable, "-m", "venv", folder / "venv")
    python, unickpt = folder / "venv" / "bin" / "python", folder / "venv" / "bin" / "unickpt"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    call(*pip, wheel)
    print(call(python, "-W", "error", "-c", BY_ITSELF, cwd=folder), end="")
    told = call(unickpt, "--version", cwd=folder, code=2)
    assert "pip install 'unickpt[cli]'" in told, told
    call(*pip, f"{wheel}[cli]")
    print(call(unickpt, "--version", cwd=folder), end="")
    assert "3 x 4" in call(unickpt, "inspect", "by_itself", cwd=folder).replace("×", "x")
    call(unickpt, "verify", "by_itself", cwd=folder)
    assert "transformers-llama" in call(unickpt, "presets", cwd=folder)
    call(*pip, f"{wheel}[jax]")
    print(call(python, "-c", WITH_JAX, cwd=folder), end="")
    call(*pip, TORCH)
    call(*pip, f"{wheel}[torch]")
    print(call(python, "-c", WITH_TORCH, cwd=folder), end="")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="the folder for the sdist and the wheel")
    parser.add_argument("--quick", action="store_true", help="does not install the wheel")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        sdist, wheel = build(given.out.resolve(), Path(name))
    check_files(sdist, wheel)
    print(call(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel), end="")
    if not given.quick:
        with tempfile.TemporaryDirectory() as name:
            check_installed(wheel, Path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
