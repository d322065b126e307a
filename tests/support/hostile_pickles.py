"""Hostile pickles: every known target, called in every way that the pickle machine has.

Targets are those that picklescan, fickling and modelscan list, and those with which each of them
was bypassed. Ways are opcodes, and the functions and classes that readers of checkpoints know.
"""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

# Names of functions and classes, and an argument each as an opcode. `MARK` is a file's path.
MARK = "@MARK@"
_SHELL = f"touch {MARK}"
_CODE = f"open({MARK!r}, 'w')"
TARGETS: tuple[tuple[str, str], ...] = (
    ("os system", _SHELL), ("posix system", _SHELL), ("nt system", _SHELL), ("os popen", _SHELL),
    ("os execvp", _SHELL), ("os remove", MARK), ("os mkdir", MARK), ("os putenv", MARK),
    ("subprocess Popen", _SHELL), ("subprocess run", _SHELL), ("subprocess getoutput", _SHELL),
    ("subprocess check_output", _SHELL), ("_posixsubprocess fork_exec", _SHELL),
    ("builtins eval", _CODE), ("builtins exec", _CODE), ("builtins compile", _CODE),
    ("builtins open", MARK), ("builtins __import__", "os"), ("builtins getattr", "os"),
    ("builtins setattr", "os"), ("builtins map", _CODE), ("builtins breakpoint", _CODE),
    ("__builtin__ eval", _CODE), ("__builtin__ execfile", MARK), ("__builtin__ file", MARK),
    ("importlib import_module", "antigravity"), ("importlib.util module_from_spec", "os"),
    ("runpy run_path", MARK), ("runpy _run_code", _CODE), ("code InteractiveInterpreter", _CODE),
    ("pty spawn", _SHELL), ("commands getoutput", _SHELL), ("pickle loads", "cos"),
    ("_pickle loads", "cos"), ("marshal loads", "x"), ("types FunctionType", _CODE),
    ("types CodeType", _CODE), ("operator attrgetter", "system"),
    ("operator methodcaller", "system"), ("functools partial", _CODE), ("functools reduce", _CODE),
    ("itertools starmap", _CODE), ("ctypes CDLL", MARK), ("_ctypes dlopen", MARK),
    ("webbrowser open", "file:///"), ("http.client HTTPConnection", "localhost"),
    ("urllib.request urlopen", "file:///etc/passwd"), ("requests get", "http://localhost"),
    ("aiohttp.client ClientSession", "localhost"), ("socket create_connection", "localhost"),
    ("smtplib SMTP", "localhost"), ("shutil rmtree", MARK), ("shutil copyfile", MARK),
    ("tempfile mktemp", MARK), ("io FileIO", MARK), ("io open", MARK), ("_io FileIO", MARK),
    ("codecs open", MARK), ("pathlib Path.touch", MARK), ("linecache getline", MARK),
    ("fileinput input", MARK), ("bdb Bdb.run", _CODE), ("pdb run", _CODE), ("cProfile run", _CODE),
    ("profile run", _CODE), ("timeit timeit", _CODE), ("trace Trace.run", _CODE),
    ("doctest debug_script", _CODE), ("test.support.script_helper assert_python_ok", _CODE),
    ("venv create", MARK), ("ensurepip _run_pip", _CODE), ("idlelib.run Executive.runcode", _CODE),
    ("idlelib.autocomplete AutoComplete.get_entity", _CODE),
    ("lib2to3.pgen2.pgen ParserGenerator", MARK), ("lib2to3.pgen2.grammar Grammar.loads", "cos"),
    ("asyncio.unix_events _UnixSubprocessTransport._start", _SHELL),
    ("multiprocessing.util spawnv_passfds", _SHELL), ("pydoc locate", "os.system"),
    ("pydoc pipepager", _SHELL), ("pkgutil resolve_name", "os:system"),
    ("logging.config listen", "1"), ("logging FileHandler", MARK), ("zipimport zipimporter", MARK),
    ("sys settrace", _CODE), ("sys setrecursionlimit", "1"), ("signal signal", "1"),
    ("gc get_objects", "1"), ("site addpackage", MARK), ("cgitb lookup", _CODE),
    ("dataclasses _create_fn", _CODE), ("collections _chain", _CODE),
    ("collections namedtuple", _CODE), ("enum Enum", _CODE), ("unittest.mock patch", "os.system"),
    ("distutils.file_util write_file", MARK), ("numpy.testing._private.utils runstring", _CODE),
    ("numpy load", MARK), ("numpy save", MARK), ("numpy.f2py.crackfortran getlincoef", _CODE),
    ("numpy.core.multiarray _reconstruct", "os"), ("numpy ndarray", "1"), ("numpy dtype", "O"),
    ("torch load", MARK), ("torch.hub load", MARK), ("torch.serialization load", MARK),
    ("torch.storage _load_from_bytes", "cos"), ("torch._utils _rebuild_wrapper_subclass", "1"),
    ("torch.jit load", MARK), ("torch._dynamo.guards GuardBuilder.get", _CODE),
    ("torch.utils.data.datapipes.utils.decoder basichandlers", MARK),
    ("torch.utils._config_module ConfigModule.load_config", "cos"),
    ("torch.fx.experimental.symbolic_shapes ShapeEnv.evaluate_guards_expression", _CODE),
    ("torch.utils.collect_env run", _SHELL),
    ("torch.utils.bottleneck.__main__ run_cprofile", _CODE),
    ("torch.distributed.elastic.rendezvous api", "x"), ("joblib load", MARK), ("dill loads", "cos"),
    ("cloudpickle loads", "cos"), ("pandas read_pickle", MARK), ("tensorflow load_library", MARK),
    ("sklearn.utils._testing _get_func_name", "x"), ("jax._src.lib xla_client", "x"),
    ("unickpt.backends._files.pickles _MACHINE.run", "x"),
    ("unickpt.storage.local_folders remove", MARK),
    ("copyreg _reconstructor", "os"), ("copyreg add_extension", "os"), ("copyreg __newobj__", "os"),
    ("__main__ anything", "x"), ("os.path join", "x"), ("os..system", _SHELL), (" os", _SHELL),
)  # fmt: skip


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def _line(name: str) -> bytes:
    module, _, attribute = name.partition(" ")
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def _stacked(name: str) -> bytes:
    module, _, attribute = name.partition(" ")
    return _text(module) + _text(attribute) + b"\x93"


def _called(name: str, arg: str) -> bytes:
    return _line(name) + _text(arg) + b"\x85R"


# Each turns a name and its argument into opcodes that leave one object on the stack.
WAYS: dict[str, Callable[[str, str], bytes]] = {
    "REDUCE": _called,
    "REDUCE of STACK_GLOBAL": lambda n, a: _stacked(n) + _text(a) + b"\x85R",
    "INST": lambda n, a: b"(" + _text(a) + b"i" + _line(n)[1:],
    "OBJ": lambda n, a: b"(" + _line(n) + _text(a) + b"o",
    "NEWOBJ": lambda n, a: _line(n) + _text(a) + b"\x85\x81",
    "NEWOBJ_EX": lambda n, a: _line(n) + b")}" + _text("args") + _text(a) + b"s\x92",
    "BUILD of what was called": lambda n, a: (
        _called(n, a) + b"}" + _text("__class__") + _text(a) + b"sb"
    ),
    "BUILD of a class": lambda n, a: _line(n) + b"}" + _text("__setstate__") + _line(n) + b"sb",
    "BUILD with slots": lambda n, a: (
        _line(n) + b"N}" + _text("__defaults__") + _text(a) + b"s\x86b"
    ),
    "state of a container": lambda n, a: (
        _line("collections OrderedDict") + b")R}" + _text("__reduce__") + _called(n, a) + b"sb"
    ),
    "key of a dict": lambda n, a: b"}" + _called(n, a) + b"K\x01s",
    "item of a set": lambda n, a: b"\x8f(" + _called(n, a) + b"\x90",
    "factory of a defaultdict": lambda n, a: (
        _line("collections defaultdict") + _line(n) + b"\x85R" + _text(a) + b"K\x01s"
    ),
    "result that is called": lambda n, a: _called(n, a) + _text(a) + b"\x85R",
    "result of getattr that is called": lambda n, a: (
        _line("builtins getattr") + _line(n) + _text("__call__") + b"\x86R" + _text(a) + b"\x85R"
    ),
    "method of a module": lambda n, a: (
        _line("operator methodcaller")
        + _text("system")
        + _text(a)
        + b"\x86R"
        + _called("builtins __import__", "os")
        + b"\x85R"
    ),
    "function of a subclass of tensors": lambda n, a: (
        _line("torch._tensor _rebuild_from_type_v2")
        + b"("
        + _line(n)
        + _line("torch Tensor")
        + _text(a)
        + b"\x85}tR"
    ),
    "hooks of a tensor": lambda n, a: (
        _line("torch._utils _rebuild_parameter")
        + b"("
        + _called(n, a)
        + b"\x89"
        + _called(n, a)
        + b"tR"
    ),
    "storage of a tensor": lambda n, a: (
        _line("torch._utils _rebuild_tensor_v2")
        + b"("
        + _called(n, a)
        + b"K\x00K\x01\x85K\x01\x85\x89}tR"
    ),
    "class of a storage": lambda n, a: (
        b"(" + _text("storage") + _line(n) + _text("0") + _text("cpu") + b"K\x01tQ"
    ),
    "persistent id": lambda n, a: _called(n, a) + b"Q",
    "text of a persistent id": lambda n, a: b"P" + a.encode() + b"\n",
    "extension": lambda n, a: b"\x82\x01" + _text(a) + b"\x85R",
    "remembered": lambda n, a: _line(n) + b"q\x000h\x00" + _text(a) + b"\x85R",
    "dtype of an array": lambda n, a: _line("numpy dtype") + _called(n, a) + b"\x85R",
    "class of an array": lambda n, a: (
        _line("numpy.core.multiarray _reconstruct") + b"(" + _line(n) + b"K\x00\x85C\x01btR"
    ),
    "state of an array": lambda n, a: (
        _line("numpy._core.multiarray _reconstruct")
        + b"("
        + _line("numpy ndarray")
        + b"K\x00\x85C\x01btR(K\x01K\x01\x85"
        + _called(n, a)
        + b"\x89C\x01xtb"
    ),
    "bytes of an array": lambda n, a: (
        _line("numpy._core.numeric _frombuffer")
        + b"("
        + _called(n, a)
        + _line("numpy dtype")
        + _text("f4")
        + b"\x85RK\x01\x85"
        + _text("C")
        + b"tR"
    ),
    "scalar": lambda n, a: (
        _line("numpy.core.multiarray scalar") + _called(n, a) + _called(n, a) + b"\x86R"
    ),
    "attributes": lambda n, a: _line("argparse Namespace") + b")\x81" + _called(n, a) + b"b",
    "items of a deque": lambda n, a: (
        _line("collections deque") + _called(n, a) + b"\x85R" + _called(n, a) + b"a"
    ),
    "codec of bytes": lambda n, a: _line("_codecs encode") + _text(a) + _line(n) + b"\x86R",
    "size of a tensor": lambda n, a: _line("torch Size") + _called(n, a) + b"\x85R",
    "path": lambda n, a: _line("pathlib PosixPath") + _called(n, a) + b"\x85R",
}


def all_of_them(mark: str, every: int = 1) -> Iterator[tuple[str, bytes]]:
    """What each is, and a dict of one value as a pickle of protocol 2 or 4.

    Arguments:
        mark: what is to be made, were it run.
        every: each target comes in this part of the ways, and each way with this part of the
            targets.
    """
    for number, ((target, arg), way) in enumerate(itertools.product(TARGETS, WAYS)):
        row, column = divmod(number, len(WAYS))
        if (row + column) % every:
            continue
        code = WAYS[way](target, arg.replace(MARK, mark))
        protocol = b"\x80\x02" if number % 2 else b"\x80\x04"
        yield f"{way}: {target}", protocol + b"}" + _text("found") + code + b"s."


def write_torch_file(path: Path, data: bytes) -> None:
    """A file as torch.save writes it, with any pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/byteorder", b"little")
        file.writestr("archive/data/0", bytes(4))
        file.writestr("archive/version", b"3\n")
