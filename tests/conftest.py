"""Fixtures that every test may use: real processes, and arrays that differ everywhere."""

from __future__ import annotations

import gc
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
from durations import Recorder
from environments import environments
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from support import forked, s3_server
from support.counts import ChunkRead, chunks_read
from support.forks import Forks
from support.processes import Processes

# Eight CPU devices for the tests that run JAX in this process; set before JAX starts.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# All cores are busy: threads of torch and BLAS would spin while they wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KERAS_BACKEND", "jax")  # TensorFlow is not installed

# Examples take as long as the machine's load makes them take. The same ones in each run, so that
# what fails was changed; `make soak` looks for others.
settings.register_profile("same", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("others", deadline=None)
settings.load_profile("same")


def _draws_the_same() -> None:
    """Hypothesis draws constants of all modules that a run has imported: of other ones in a run of
    other tests. The profile "same" does without."""
    drawn = getattr(providers, "_get_local_constants", None)  # older versions draw none
    if drawn is not None:
        constants = lambda: providers.Constants() if settings().derandomize else drawn()  # noqa: E731
        providers._get_local_constants = constants


_draws_the_same()


@pytest.fixture(autouse=True)
def _forgetful_saves() -> Iterator[None]:
    """What `save` knows of the trees of one test does not change what it does in the next."""
    yield
    if (saver := sys.modules.get("unickpt.saving.saver")) is not None:
        saver._plans.cache_clear()


# A test that uses one of these, as a fixture or in its own body, starts processes or a server.
INTEGRATION_FIXTURES = {
    "forks",
    "moto",
    "mount",
    "processes",
    "program",
    "server",
    "small_disk",
    "unchangeable",
}
INTEGRATION_NAMES = {"Forks", "Processes", "fork", "subprocess"}


ENVIRONMENTS = environments()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "only the tests of an environment of tests/environments.toml; what skips has failed"
    parser.addoption("--environment", choices=sorted(ENVIRONMENTS), help=text)
    text = "packages that are not there: tests that import them are skipped"
    parser.addoption("--without", default="", metavar="A,B", help=text)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config), "durations")
    if "UNICKPT_TESTS" not in os.environ:
        _share(config)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may not be there
def pytest_xdist_setupnodes(specs: Sequence[Any]) -> None:
    """Has workers, if there are many, forked from one process that has imported what tests do."""
    for spec in specs:
        if spec.popen and spec.python is None and len(specs) > 2:
            spec.python = shlex.join([sys.executable, forked.__file__])


def _share(config: pytest.Config) -> None:
    """Gives the processes of a run a folder: for servers of processes, and what XLA compiled.

    Jobs that are killed and go on, and ranks, compile the same programs again and again.
    """
    folder = tempfile.mkdtemp(prefix="unickpt-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["UNICKPT_TESTS"] = folder
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/jax")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not even import files of which, as a whole, nothing is asked for."""
    if collection_path.suffix != ".py":
        return None
    expression = config.option.markexpr
    if "not environment" in expression:
        name = collection_path.relative_to(config.rootpath).as_posix()
        if any(name in each.tests for each in ENVIRONMENTS.values()):
            return True
    for mark in ("integration", "trainers"):
        if f"not {mark}" in expression and mark in _marks_of_all(collection_path.read_text()):
            return True
    return None


def _marks_of_all(text: str) -> list[str]:
    """The names of the marks that a file gives all of its tests."""
    given = re.search(r"^pytestmark = (\[\n(?:.*\n)*?\]|.*)$", text, re.M)
    return re.findall(r"pytest\.mark\.(\w+)", given[1]) if given else []


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests `integration` by what they use, others say it themselves; and `environment`."""
    for item in items:
        if isinstance(item, pytest.Function) and _integrates(item):
            item.add_marker(pytest.mark.integration)
        if any(each.selects(item.nodeid) for each in ENVIRONMENTS.values()):
            item.add_marker(pytest.mark.environment)
    if config.option.environment is not None:
        selects = ENVIRONMENTS[config.option.environment].selects
        if others := [item for item in items if not selects(item.nodeid)]:
            config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if selects(item.nodeid)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Has the garbage collector pass over torch, JAX and all tests once, and then no more."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the one that turns exceptions into skips
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    return _judged(item, (yield), call.excinfo)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    return _judged(collector, report, report.call.excinfo)


def _judged(node: pytest.Item | pytest.Collector, report: Any, excinfo: Any) -> Any:
    """The report of what was collected or run, where an environment has a say in it."""
    # In an environment, all that a test needs is there: if it skips, nothing tests it.
    option = node.config.option
    if option.environment is not None and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in the environment that is for it: {report.longrepr[-1]}"
    if report.failed and excinfo is not None:
        error = excinfo.value
        error = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        name = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and name in option.without.split(","):
            report.outcome = "skipped"
            report.longrepr = (str(node.path), 0, f"this environment is without {name}")
    return report


def _integrates(item: pytest.Function) -> bool:
    if not INTEGRATION_FIXTURES.isdisjoint(item.fixturenames):
        return True
    if not INTEGRATION_NAMES.isdisjoint(_names_in(item.function.__code__)):
        return True
    # A fixture that offers several storages asks for the server only if the parameter is "s3".
    offered = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(isinstance(value, str) and value == "s3" for value in offered)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260)


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The address of an S3 server on this machine."""
    from moto.server import ThreadedMotoServer  # slow to import

    s3_server.prepare_moto()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    running = Processes(tmp_path_factory.mktemp("scripts"))
    yield running
    running.close()


@pytest.fixture
def chunk_reads() -> Iterator[list[ChunkRead]]:
    """The chunks that a test reads."""
    with chunks_read() as seen:
        yield seen


@pytest.fixture
def bits() -> Callable[[object], bytes]:
    """The bits of an array, for comparisons in which NaNs and signed zeros count."""
    return lambda x: np.ascontiguousarray(np.asarray(x)).tobytes()


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Real processes, forked from one that has imported unickpt."""
    running = Forks(tmp_path_factory.mktemp("output"))
    yield running
    running.close()
