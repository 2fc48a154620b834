"""What could run code that is not this project's own appears nowhere but where ``ALLOWED`` gives the reason.

docs/security.md lists the rules that this and other tests keep.
"""

import ast
import re
from collections.abc import Iterator, Sequence

import pytest

from scripts import rooms
from scripts.rooms import ROOT, nodes

pytestmark = pytest.mark.usefixtures("without_garbage_collection")  # all files are parsed, and their trees kept
FILES = [*rooms.FILES, ROOT / "setup.py"]
NATIVE_FILES = sorted(path for path in (ROOT / "ops").rglob("*") if path.suffix in (".cpp", ".h", ".cu", ".cuh"))

# Modules and functions that run code or commands out of what they read, or make names that others can guess.
FORBIDDEN = (
    *("eval", "exec", "__import__", "builtins", "runpy"),
    *("importlib.util.spec_from_file_location", "importlib.util.module_from_spec", "importlib.machinery"),
    *("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"),
    *("torch.load", "torch.serialization", "torch.hub", "torch.jit.load", "torch.package", "torch.multiprocessing"),
    *("torch.ops.load_library", "torch.classes.load_library", "ctypes.CDLL", "ctypes.PyDLL", "ctypes.cdll"),
    *("numpy.load", "pandas.read_pickle", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"),
    *("os.system", "os.popen", "pty", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("tempfile.mktemp", "tempfile.gettempdir"),
)
# Arguments that open such a door, and the one value that keeps it closed.
CLOSED = {"shell": False, "trust_remote_code": False, "allow_pickle": False, "weights_only": True}
SHARED_DIRECTORY = re.compile(r"(^|[^\w.])/(var/)?tmp\b|/dev/shm\b")

_OWN_CACHE = "this program wrote it to the user's own cache, which is refused where others may write to it"
_OWN_PIPE = "messages through a pipe from a process that this program started"
_OWN_MODULE = "the name is a constant of this package"
_OWN_LIBRARY = "a library of this package, or one built from its sources into the user's own cache"
ALLOWED = {
    ("compiled_llm/__init__.py", "import_module"): _OWN_MODULE,
    ("compiled_llm/commands/__init__.py", "import_module"): _OWN_MODULE,
    ("compiled_llm/offline/reading.py", "import_module"): _OWN_MODULE,
    ("ops/library.py", "import_module"): _OWN_MODULE,
    (
        "scripts/train_draft_model.py",
        "numpy.load",
    ): "without pickles, which numpy refuses unless told; who trains names it",
    (
        "scripts/medusa_heads.py",
        "numpy.load",
    ): "without pickles, which numpy refuses unless told; who trains names it",
    ("models/registry.py", "import_module"): _OWN_MODULE,
    (
        "compiled_llm/step/logits_transforms.py",
        "import_module",
    ): "the program that serves names it in an argument of the engine; no request and no checkpoint can",
    ("compiled_llm/compiling/ready_code.py", "import_module"): _OWN_CACHE,
    ("compiled_llm/compiling/ready_code.py", "exec"): _OWN_CACHE,
    ("compiled_llm/compiling/ready_code.py", "marshal"): _OWN_CACHE,
    ("compiled_llm/compiling/ready_code.py", "pickle"): _OWN_CACHE,
    ("compiled_llm/checkpoint/kept_values.py", "pickle"): _OWN_CACHE,
    ("compiled_llm/compiling/build_processes.py", "pickle"): _OWN_PIPE,
    ("compiled_llm/worker/worker_process.py", "multiprocessing"): _OWN_PIPE,
    ("compiled_llm/worker/worker_process.py", "pickle"): _OWN_PIPE,
    ("compiled_llm/worker/rank_start.py", "multiprocessing"): _OWN_PIPE,
    ("compiled_llm/worker/message.py", "multiprocessing"): _OWN_PIPE,
    ("compiled_llm/worker/stage_link.py", "multiprocessing"): _OWN_PIPE,
    ("compiled_llm/parallel/stages.py", "multiprocessing"): _OWN_PIPE,
    ("compiled_llm/worker/message.py", "pickle"): _OWN_PIPE,
    ("compiled_llm/bench/shared.py", "multiprocessing"): _OWN_PIPE,
    ("compiled_llm/bench/speculation.py", "multiprocessing"): _OWN_PIPE,
    ("compiled_llm/bench/step_costs.py", "multiprocessing"): _OWN_PIPE,
    ("compiled_llm/bench/plan.py", "multiprocessing"): _OWN_PIPE,
    ("compiled_llm/bench/all_reduce.py", "multiprocessing"): _OWN_PIPE,
    ("compiled_llm/bench/harness.py", "multiprocessing"): _OWN_PIPE,
    ("scripts/gpu_step_tables.py", "multiprocessing"): _OWN_PIPE,
    ("ops/native.py", "ctypes.CDLL"): _OWN_LIBRARY,
    ("compiled_llm/report/cpu_loops.py", "ctypes.CDLL"): _OWN_LIBRARY,
    ("ops/native_program.py", "ctypes.CDLL"): _OWN_LIBRARY,
    ("ops/torch_private.py", "ctypes.CDLL"): "what torch's compiler has built for this user",
    ("ops/torch_private_gpu.py", "ctypes.CDLL"): "torch's own library",
    ("ops/parallel/device_memory.py", "ctypes.CDLL"): "the CUDA driver's library",
    ("compiled_llm/bench/peers/worker.py", "ctypes.CDLL"): "the C library",
    ("ops/c_library.py", "ctypes.CDLL"): "the C library",
    ("compiled_llm/system/resources.py", "ctypes.CDLL"): "the C library",
    ("ops/torch_private.py", "importlib.util.spec_from_file_location"): "torch's own files",
    ("ops/torch_private.py", "importlib.util.module_from_spec"): "torch's own files",
    ("ops/torch_private_gpu.py", "importlib.util.spec_from_file_location"): "torch's own files",
    ("ops/torch_private_gpu.py", "importlib.util.module_from_spec"): "torch's own files",
    ("setup.py", "importlib.util.spec_from_file_location"): "a file of this package, while it is built",
    ("setup.py", "importlib.util.module_from_spec"): "a file of this package, while it is built",
}


def names_in(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """What code imports, and what it refers to, by full names whatever it calls them."""
    full_names = {name: name for name in FORBIDDEN if "." not in name}  # the builtin ones
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                own = alias.name if alias.asname else alias.name.split(".")[0]
                full_names[alias.asname or own] = own
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full_names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute):
            first, *rest = dotted(node)
            if first in full_names:
                yield ".".join([full_names[first], *rest])


def dotted(node: ast.expr) -> list[str]:
    """The parts of a name or of attributes of one; [""] for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else [""]


def strings_in(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """All strings of the code but docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def findings(nodes: Sequence[ast.AST]) -> set[str]:
    """What a syntax tree has of ``FORBIDDEN``, and arguments and directories that are not allowed."""
    names = set(names_in(nodes))
    found = {rule for rule in FORBIDDEN if any(name == rule or name.startswith(f"{rule}.") for name in names)}
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg in CLOSED and ast.unparse(node.value) != str(CLOSED[node.arg]):
            found.add(f"{node.arg}={ast.unparse(node.value)}")
        elif isinstance(node, ast.Call) and dotted(node.func)[-1] == "import_module":
            found |= set() if isinstance(node.args[0], ast.Constant) else {"import_module"}
    return found | {text for text in strings_in(nodes) if SHARED_DIRECTORY.search(text)}


def test_nothing_runs_what_it_reads() -> None:
    found = {(path.relative_to(ROOT).as_posix(), name) for path in FILES for name in findings(nodes(path))}
    assert found == set(ALLOWED), "a new one needs a reason in ALLOWED; one that is gone leaves it"


def test_files_that_are_allowed_something_exist() -> None:
    assert {file for file, _ in ALLOWED} <= {path.relative_to(ROOT).as_posix() for path in FILES}
    assert all(ALLOWED.values())


def test_kernels_start_no_programs_and_load_no_libraries() -> None:
    assert len(NATIVE_FILES) > 20
    for path in NATIVE_FILES:
        found = re.findall(r"\b(?:system|popen|exec[lv]p?e?|fork|dlopen|tmpnam|mktemp)\s*\(", path.read_text())
        assert not found, f"{path}: {found}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch.load(path)", "torch.load"),
        ("from torch import load\nload(path)", "torch.load"),
        ("import torch as t\nread = t.load", "torch.load"),
        ("from torch.serialization import load as read", "torch.serialization"),
        ("import pickle as p\np.loads(data)", "pickle"),
        ("def read(data):\n    from pickle import loads\n    return loads(data)", "pickle"),
        ("import numpy as np\nnp.load(path)", "numpy.load"),
        ("f(path, allow_pickle=True)", "allow_pickle=True"),
        ("f(path, weights_only=False)", "weights_only=False"),
        ("run = eval\nrun(text)", "eval"),
        ("exec(code)", "exec"),
        ("__import__(name)", "__import__"),
        ("import builtins\nbuiltins.exec(code)", "builtins"),
        ("from importlib import import_module\nimport_module(name)", "import_module"),
        ("AutoModel.from_pretrained(path, trust_remote_code=True)", "trust_remote_code=True"),
        ("AutoModel.from_pretrained(path, trust_remote_code=trusts)", "trust_remote_code=trusts"),
        ("import yaml\nyaml.load(text, Loader=yaml.Loader)", "yaml.load"),
        ("import subprocess\nsubprocess.run(text, shell=True)", "shell=True"),
        ("import subprocess\nsubprocess.run(text, shell=1)", "shell=1"),
        ("from os import system\nsystem(text)", "os.system"),
        ("import tempfile\ntempfile.mktemp()", "tempfile.mktemp"),
        ("cache = '/tmp/cache'", "/tmp/cache"),
        ("cache = f'/var/tmp/{name}'", "/var/tmp/"),
        ("import ctypes\nctypes.CDLL(path)", "ctypes.CDLL"),
    ],
)
def test_the_search_finds(source: str, found: str) -> None:
    assert findings(list(ast.walk(ast.parse(source)))) == {found}


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "'''Not in /tmp, not with eval() or torch.load().'''",
        "from safetensors.torch import load_file\nload_file(path)",
        "import yaml\nyaml.safe_load(text)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "import tempfile\ntempfile.mkdtemp()",
        "pickled = code.co_code",
        "import importlib\nimportlib.import_module('pyarrow')",
    ],
)
def test_the_search_leaves(source: str) -> None:
    assert findings(list(ast.walk(ast.parse(source)))) == set()
