"""The rules of the house: who may import whom, no torch in the scheduler, nothing that runs code of a checkpoint."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A room may import those at its right, and itself: scripts -> compiled_llm -> models -> ops.
ROOMS = ["scripts", "compiled_llm", "models", "ops"]
FILES = [path for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))]
WITHOUT_TORCH = [
    "block_pool",
    "chat_template",
    "config",
    "costs",
    "engine_stats",
    "error_texts",
    "forks",
    "grammar_processes",
    "grammar_texts",
    "grammar_worker",
    "invariants",
    "names",
    "outputs",
    "prefix_cache",
    "request",
    "request_queue",
    "roofline",
    "sampling_params",
    "scheduler",
    "scheduler_output",
    "step_log",
    "structured_outputs",
    "token_masks",
]

RUNS_CODE = ("eval", "exec", "torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler")
# Messages through a pipe, from a process that this program started.
UNPICKLES_ITS_OWN = [("compile_ahead.py", "pickle.loads")]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "compiled_llm":
        return parts[0] if parts[0] in ROOMS else None
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "compiled_llm"


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_rooms_import_in_one_direction(path: Path) -> None:
    own = ROOMS.index(path.parent.name)
    for module in imports(path):
        assert module.split(".")[0] not in ("ops", "models", "scripts", "tests"), f"{path}: imports {module}"
        room = room_of(module)
        if room is not None:
            assert ROOMS.index(room) >= own, f"{path}: imports {module}"


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_scheduler_and_what_it_reads_never_load_torch(name: str) -> None:
    code = f"import compiled_llm.{name}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_ops_loads_neither_transformers_nor_triton() -> None:
    code = "import compiled_llm.ops, sys; assert not {'transformers', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_runs_code_of_a_checkpoint(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in RUNS_CODE or (path.name, called) in UNPICKLES_ITS_OWN, f"{path}: {called}"
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False


def test_flags_of_all_scripts_are_written_out() -> None:
    """``argparse`` takes abbreviations unless it is told not to; ``FlagParser`` tells it."""
    parsers = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert not called.endswith("ArgumentParser"), f"{path}: {called} takes abbreviated flags, use FlagParser"
            parsers += [path.name] * (called == "FlagParser")
    assert {"serve_offline.py", "tune_buckets.py", "bench_arguments.py"} < set(parsers)


def test_torch_compile_is_said_in_one_file() -> None:
    said = {path.name for path in FILES if path.parent.name != "scripts" and "torch.compile(" in path.read_text()}
    assert said == {"compiler.py"}
