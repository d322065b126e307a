"""The names of `unickpt`: all are there, and many are imported when they are first used."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

import unickpt
from unickpt import doors, extend, types

LATE = """
import sys, unickpt
tools = "conversion", "difference", "copying"
late = {f"unickpt.tools.{name}" for name in tools}
late |= {"unickpt.plugins.merge.merging", "unickpt.plugins.report.html_report"}
late |= {"unickpt.rules.rule_set", "unickpt.runs.checkpointer", "unickpt.reading.verification"}
assert late.isdisjoint(sys.modules)
assert {*unickpt.__all__} <= {*dir(unickpt)}
assert late.isdisjoint(sys.modules), "dir() imports nothing"
assert unickpt.merge.__name__ == "merge"
assert "unickpt.plugins.merge.merging" in sys.modules
assert unickpt.report.__name__ == "report"
import unickpt.runs.checkpointer
assert unickpt.Checkpointer is unickpt.runs.checkpointer.Checkpointer
"""

# What a plain call enters is imported before it, so that the first call is as fast as the next;
# what only a feature needs is not. If more modules are imported now, say why in the commit.
EAGER = """
import sys, tempfile
import numpy as np
import unickpt

def own():
    return {name for name in sys.modules if name.split(".")[0] == "unickpt"}

before, folder = own(), tempfile.mkdtemp()
assert len(before) <= 84, sorted(before)
state = {"w": np.ones((30, 5)), "b": np.zeros(5), "step": 3}
unickpt.save(f"{folder}/a", state)
unickpt.save_async(f"{folder}/b", state).result()
unickpt.load(f"{folder}/a", state)
unickpt.load(f"{folder}/b")
unickpt.open(f"{folder}/a")
late = {name for name in own() - before if name.split(".")[1] not in ("adapters", "backends")}
assert late == {"unickpt.arrays.memory_region"}, late  # of the adapter of NumPy
"""

STAR = """
from unickpt import *
from unickpt import Checkpointer, Rules, verify
import unickpt
assert all(globals()[name] is getattr(unickpt, name) for name in unickpt.__all__)
"""

# Each name is first used by several threads at once, all names in a different order.
THREADS = """
import random, sys, threading
import unickpt
sys.setswitchinterval(1e-6)
names, failed, seen = sorted({*unickpt.__all__} - vars(unickpt).keys()), [], []
assert len(names) > 10
start = threading.Barrier(4)
def use(seed):
    mine = random.Random(seed).sample(names, len(names))
    start.wait()
    try:
        seen.append({name: getattr(unickpt, name) for name in mine})
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
[t.start() for t in threads], [t.join() for t in threads]
assert not failed, failed
assert all(one == seen[0] for one in seen)
"""


def run(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_public_name_is_there() -> None:
    assert {name: getattr(unickpt, name) for name in unickpt.__all__}.keys() <= {*dir(unickpt)}
    with pytest.raises(AttributeError, match=r"^module 'unickpt' has no attribute 'marge'$"):
        unickpt.marge  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'marge' from 'unickpt'"):
        from unickpt import marge  # noqa: F401


def test_errors_and_types_have_one_home() -> None:
    for name in {*unickpt.errors.__all__, *unickpt.types.__all__} - {*unickpt.__all__}:
        assert not hasattr(unickpt, name), name


@pytest.mark.parametrize("module", [unickpt, extend, types])
def test_type_checkers_see_what_is_imported_later(module: ModuleType) -> None:
    """Each late name is imported from the same module under `if _CHECKING`, and nothing else is."""
    source = ast.parse(Path(str(module.__file__)).read_text())
    (checking,) = (
        node for node in source.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)
    )
    seen = _imported(checking.body)
    of_plugins = {name: seen.pop(name) for name in getattr(module, "_OF_PLUGINS", ())}
    assert all(where.startswith("unickpt.plugins.") for where, _ in of_plugins.values())
    later = [f"from unickpt.{home} import {names}" for home, names in module._LATER.items() if home]
    assert seen == _imported(ast.parse("\n".join(later)).body)
    assert seen.keys() <= {*module.__all__}
    assert all(getattr(module, name) is not None for name in seen if name != "NamedOptimizer")


def _imported(statements: Sequence[ast.stmt]) -> dict[str, tuple[str, str]]:
    """Where names are imported from, and what they are called there."""
    return {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in statements
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_names_are_imported_when_they_are_used() -> None:
    run(LATE)


def test_plain_saves_and_loads_find_all_imported_and_no_more_is() -> None:
    run(EAGER)


def test_a_star_import_brings_all_names() -> None:
    run(STAR)


def test_threads_may_use_a_name_first_at_the_same_time() -> None:
    run(THREADS)


def test_late_names_pickle() -> None:
    for late in (unickpt.Checkpointer, unickpt.verify):
        assert pickle.loads(pickle.dumps(late)) is late


def test_the_version_is_that_of_the_package() -> None:
    assert unickpt.__version__ == importlib.metadata.version("unickpt")


def test_dir_and_help_show_what_users_need() -> None:
    shown = {name for name in dir(unickpt) if not name.startswith("_")}
    modules = {"errors", "extend", "integrations", "types"}
    assert shown == {*unickpt.__all__, *modules} - {"__version__"}
    assert all(hasattr(unickpt, name) for name in shown)
    told = unickpt.__doc__ or ""
    errors = {name for name in shown if name in unickpt.errors.__all__}
    assert [n for n in shown - errors - {"merge_methods"} if n not in told] == []


@pytest.mark.parametrize("name", unickpt._OF_PLUGINS)
def test_what_this_installation_lacks_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(unickpt), name, raising=False)
    monkeypatch.setattr(doors, "ours", lambda group: {})
    with pytest.raises(unickpt.errors.PluginError, match=f"lacks the plug-in '{name}'"):
        getattr(unickpt, name)


def test_data_has_the_classes_of_its_plug_in_and_none_of_its_own() -> None:
    from unickpt import data
    from unickpt.plugins import data as plugin

    assert data.__all__ == plugin.__all__
    assert all(getattr(data, name) is getattr(plugin, name) for name in data.__all__)
    assert data.__doc__ == plugin.__doc__
    assert pickle.loads(pickle.dumps(data.Shards)) is data.Shards
    with pytest.raises(ModuleNotFoundError, match="is not a package"):
        importlib.import_module("unickpt.data.shards")
