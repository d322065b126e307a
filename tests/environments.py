"""Sets up the environments of environments.toml, and runs their tests in them.

    python tests/environments.py --list
    python tests/environments.py ray services       # sets up what is missing, and runs their tests
    python tests/environments.py --ci               # those of continuous integration, not `slow`
    python tests/environments.py --all
    python tests/environments.py ray -- -x -k killed

An environment that is complete is not set up again, until its table or what it lies on changes.
`pytest --environment NAME` (conftest.py) selects the tests, and fails those that skip.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venvs"
FAST = "not slow and not integration and not trainers and not environment"
# What is large, and what is tested: nothing that is installed on top of .venv may bring another.
KEPT = ("torch", "jax", "jaxlib")
DEVELOPERS = ("bench", "dev", "docs", "test")  # extras of which users need none


class CannotSetUp(Exception):
    """What an environment needs is not there."""


@dataclass(frozen=True)
class Environment:
    """A table of environments.toml, which says what the fields mean."""

    name: str
    install: tuple[str, ...]
    tests: tuple[str, ...] = ()
    ci: bool = False
    python: str | None = None
    npm: tuple[str, ...] = ()
    prepare: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    fast: bool = False
    without: tuple[str, ...] = ()
    oldest: bool = False
    workers: int = 2

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def executable(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def files(self) -> tuple[str, ...]:
        """What pytest collects."""
        return ("tests",) if self.fast else tuple({t.partition("::")[0]: None for t in self.tests})

    def selects(self, test: str) -> bool:
        """Whether a test is one of those that this environment is for.

        Arguments:
            test: as pytest names it, `tests/storage/test_s3.py::test_a_step[s3]`.
        """
        return self._pattern.fullmatch(test) is not None

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        each = "|".join(re.escape(each).replace(r"\*", ".*") for each in self.tests)
        return re.compile(rf"(?:{each or '(?!)'})(?:[\[:].*)?")


def environments() -> dict[str, Environment]:
    """All environments by their names."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return {name: Environment(name, **_frozen(table)) for name, table in tables.items()}


def _frozen(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}


# --- setting up -----------------------------------------------------------------------------------


def set_up(environment: Environment) -> bool:
    """Sets an environment up; False if it was complete.

    Raises:
        CannotSetUp: it needs a program that is not there, or an installation failed.
    """
    base = find_python(environment.python)
    mark, wanted = environment.folder / "complete", _digest(environment, base)
    if mark.is_file() and mark.read_text() == wanted:
        return False
    if environment.npm and shutil.which("npm") is None:
        raise CannotSetUp(f"needs npm (Node.js), for {', '.join(environment.npm)}")
    shutil.rmtree(environment.folder, ignore_errors=True)
    _call(environment, [base, "-m", "venv", environment.folder])
    if environment.python is None:
        _lay_on(environment, Path(sys.prefix))
    constraints = environment.folder / "constraints.txt"
    constraints.write_text("\n".join(_constraints(environment)))
    for line in environment.install:
        pip = [environment.executable, "-m", "pip", "install", "--quiet", "--constraint"]
        quiet = ["--disable-pip-version-check", "--no-warn-script-location", "--no-compile"]
        _call(environment, [*pip, constraints, *quiet, *shlex.split(line)])
    if environment.npm:
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-save"]
        _call(environment, [*npm, "--prefix", environment.folder, *environment.npm])
    for program in environment.prepare:
        _call(environment, [environment.executable, "-c", program])
    mark.write_text(wanted)
    return True


def find_python(version: str | None) -> str:
    """A Python of a version; for None, the one that runs this.

    Raises:
        CannotSetUp: there is none.
    """
    if version is None:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = sorted(pyenv.glob(f"{version}*/bin/python{version}"))
    names = [shutil.which(f"python{version}"), *map(str, reversed(found)), sys.executable]
    for name in filter(None, names):
        if _version_of(name) == version:
            return name
    raise CannotSetUp(
        f"needs Python {version}, and there is none: no python{version} on the PATH, none in "
        f"{pyenv}; `pyenv install {version}` or a package of the system brings it"
    )


def _version_of(python: str) -> str:
    """Such as "3.12"; empty if it does not start, as pyenv's shims of versions not in use."""
    source = "import sys; print(f'{sys.version_info[0]}.{sys.version_info[1]}')"
    done = subprocess.run([python, "-c", source], capture_output=True, text=True)
    return done.stdout.strip()


def _lay_on(environment: Environment, below: Path) -> None:
    """Has an environment see what another one has, unless it has it itself."""
    (packages,) = environment.folder.glob("lib/python*/site-packages")
    (others,) = below.glob("lib/python*/site-packages")
    # By a line that runs: packages below that are installed as editable are known by such files.
    (packages / "_below.pth").write_text(f"import site; site.addsitedir({str(others)!r})\n")


def _constraints(environment: Environment) -> list[str]:
    """The versions of some packages, whoever requires them."""
    if environment.oldest:
        return oldest_requirements()
    found = []
    if environment.python is None:
        for name in KEPT:
            with suppress(PackageNotFoundError):
                found.append(f"{name}=={version(name)}")
    return found


def oldest_requirements() -> list[str]:
    """The oldest version that pyproject.toml allows of each package that unickpt itself uses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = [each for name in extras if name not in DEVELOPERS for each in extras[name]]
    matches = (re.fullmatch(r"([\w-]+)>=([\w.]+)", each) for each in project["dependencies"] + used)
    return [f"{match[1]}=={match[2]}" for match in matches if match is not None]


def _digest(environment: Environment, base: str) -> str:
    """Of all that decides on what is installed."""
    parts: list[Any] = [base, environment.install, environment.npm, environment.prepare]
    parts += [dict(environment.variables), _constraints(environment)]
    if environment.python is None:
        parts.append(sys.prefix)
    else:  # its requirements may be those of unickpt
        parts.append(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _call(environment: Environment, command: Sequence[object]) -> None:
    done = subprocess.run(
        [*map(str, command)],
        env=variables(environment),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        told = "\n".join(done.stdout.splitlines()[-30:])
        raise CannotSetUp(f"{shlex.join(map(str, command))} failed:\n{told}")


def variables(environment: Environment) -> dict[str, str]:
    """The variables in which its programs run."""
    programs = [environment.folder / "bin", environment.folder / "node_modules" / ".bin"]
    return {
        **os.environ,
        **environment.variables,
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "VIRTUAL_ENV": str(environment.folder),
    }


# --- running --------------------------------------------------------------------------------------


def run(environment: Environment, more: Sequence[str]) -> bool:
    """Runs the tests of an environment; whether they pass.

    Arguments:
        environment: one that is set up.
        more: arguments for pytest.
    """
    command = [str(environment.executable), "-m", "pytest", "-n", str(environment.workers)]
    chosen = ["--environment", environment.name]
    if environment.fast:
        chosen = ["-m", FAST, "-rs", "--without", ",".join(environment.without)]
    # Some only import for a minute, on a machine that does nothing else.
    command += [
        *chosen,
        "--timeout=900",
        "-o",
        "faulthandler_timeout=600",
        *more,
        *environment.files,
    ]
    return subprocess.run(command, cwd=ROOT, env=variables(environment)).returncode == 0


def outcome_of(environment: Environment, more: Sequence[str]) -> tuple[bool, str]:
    """Sets an environment up and runs its tests; whether they pass, and a line that says so."""
    start, cpu = time.monotonic(), cpu_seconds()
    print(f"=== {environment.name}", flush=True)
    try:
        is_new = set_up(environment)
    except CannotSetUp as error:
        print(f"the environment {environment.name} cannot be set up: {error}", flush=True)
        return False, "not set up"
    ready, cpu_ready = time.monotonic(), cpu_seconds()
    passed = run(environment, more)
    took = f"set up in {ready - start:.0f} s ({cpu_ready - cpu:.0f} s of CPU)"
    tests = f"tests {'passed' if passed else 'FAILED'} in {time.monotonic() - ready:.0f} s"
    tests += f" ({cpu_seconds() - cpu_ready:.0f} s of CPU)"
    return passed, f"{took if is_new else 'was set up'}, {tests}"


def cpu_seconds() -> float:
    """What programs that have ended used, which says more on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    known = environments()
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(known)}")
    parser.add_argument("--ci", action="store_true", help="those of CI, without what is slow")
    parser.add_argument("--all", action="store_true", help="all that are for tests of their own")
    parser.add_argument("--list", action="store_true", help="lists them, and sets up none")
    given = parser.parse_args(sys.argv[1:at])
    if unknown := {*given.names} - {*known}:
        parser.error(f"no environment {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    chosen = [
        each
        for each in known.values()
        if each.name in given.names or (given.ci and each.ci) or (given.all and not each.fast)
    ]
    if given.list or not chosen:
        for each in known.values():
            where = "CI" if each.ci else ""
            what = "the fast tests" if each.fast else " ".join(each.files)
            print(f"{each.name:14} {each.python or '':5} {where:3} {what}")
        return 0
    more = sys.argv[at + 1 :]
    if given.ci:  # a tester that kills at every point is for other days: `make test-trainers-all`
        more = ["-m", "not slow", *more]
    found = {each.name: outcome_of(each, more) for each in chosen}
    print("\nenvironments:")
    for name, (_, line) in found.items():
        print(f"  {name}: {line}")
    return int(not all(passed for passed, _ in found.values()))


if __name__ == "__main__":
    sys.exit(main())
