"""CUDA graphs captured by hand, one for each bucket; the alternative are the compiler's own CUDA graph trees.

A bucket's weights, inputs and KV cache stay at their addresses from step to step, which is all that a graph needs. So a
step is one ``replay()``: no guards, no check of addresses, no copies of inputs. The activations of all graphs of an
engine are in one pool of memory, since only one graph runs at a time; the tensors that they return are never reused.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from compiled_llm.compiling.argument_specs import same_objects
from compiled_llm.compiling.gpu_properties import GpuProperties, GpuTarget
from compiled_llm.ops.programmatic_launch import CAPABILITY, programmatic_launches
from compiled_llm.ops.torch_private import clear_cublas_workspaces, use_cuda_graph_trees


class GraphPool:
    """A stream to capture on and memory, shared by the graphs of one engine.

    Args:
        programmatic: let launches of its graphs start while the one before still runs, see ``programmatic_launch.py``.
        pinned: let its graphs read their inputs from pinned memory, and write their tokens there.

    Attributes:
        before, after: called with a function's arguments as its graph is captured: what the graph begins and ends with.
    """

    def __init__(self, device: torch.device, programmatic: bool = False, pinned: bool = False) -> None:
        self.device, self.programmatic, self.pinned = device, programmatic, pinned
        self.before: Callable[[tuple], None] = _nothing
        self.after: Callable[[tuple], None] = _nothing
        self.stream = torch.cuda.Stream(device)
        self.handle = torch.cuda.graph_pool_handle()

    def renew(self) -> None:
        """Take other memory for the graphs to come, once all those before are dropped; theirs is free again."""
        self.handle = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()


def graph_pool(
    cuda_graphs: str, device: torch.device, enforce_eager: bool = False, in_order: bool = False
) -> GraphPool | None:
    """The pool for graphs captured by hand, as the engine arguments ask for them; None where there are none.

    ``in_order``: no kernel may start early: weights come while a step runs (``ops/fetch.py``), or ranks share them.

    Raises:
        ValueError: those of ``check_cuda_graphs``.
    """
    check_cuda_graphs(cuda_graphs, device)
    if device.type != "cuda" or enforce_eager or cuda_graphs == "trees":
        return None
    capability = torch.cuda.get_device_capability(device)
    programmatic = is_programmatic(cuda_graphs, capability, in_order=in_order)
    return GraphPool(device, programmatic, cuda_graphs == "pinned")


def is_programmatic(cuda_graphs: str, capability: tuple[int, int], *, in_order: bool = False) -> bool:
    """Whether the engine arguments let launches start early on such a GPU, see ``programmatic_launch.py``.

    Not where weights are fetched: a kernel asks for its weights before it waits for the launches before it. Nor with
    ranks: their sums are behind products of cuBLAS, which may not stand directly behind launches that start early.
    """
    return cuda_graphs == "programmatic" or (cuda_graphs == "auto" and capability >= CAPABILITY and not in_order)


def gpu_target(pool: GraphPool | None) -> GpuTarget | None:
    """The GPU to compile the functions for whose graphs are in ``pool``; None where no GPU's are captured by hand."""
    if pool is None or pool.device.type != "cuda":
        return None
    return GpuTarget(GpuProperties.of(pool.device), pool.programmatic)


def check_cuda_graphs(cuda_graphs: str, device: torch.device) -> None:
    """``ValueError`` where the engine argument asks for what the device lacks."""
    if device.type != "cuda" and cuda_graphs != "auto":
        raise ValueError(f"cuda_graphs must be 'auto', the default, on a {device.type}, given {cuda_graphs!r}")
    if cuda_graphs == "programmatic" and torch.cuda.get_device_capability(device) < CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        raise ValueError(
            "cuda_graphs='programmatic' needs a GPU of compute capability 9.0 or more (H100, B200), given one of "
            f"{major}.{minor}: 'manual' records the same graphs without it"
        )


def begin_step_of_trees() -> None:
    """Before each step whose CUDA graphs are torch's: what its graphs returned before is not used any more."""
    use_cuda_graph_trees()
    torch.compiler.cudagraph_mark_step_begin()


class CapturedFunction:
    """CUDA graphs of one function, a graph for each tuple of inputs that it was captured with.

    The second argument decides which graph it is: it holds a bucket's input buffers, which live as long as the bucket.
    """

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._graphs: dict[int, _Graph] = {}  # by the id of the second argument, which the graph keeps alive

    def drop(self) -> None:
        """Forget all graphs, so that their memory is free."""
        self._graphs.clear()

    def capture(self, call: Callable, args: tuple) -> None:
        """Run ``call`` once and capture it for replay; an earlier graph of the same inputs is dropped.

        Args:
            call: works on the device only, and on the same memory at each replay: that of ``args``, and its own.
            args: nested tuples of tensors. If some are results of another graph, that one must be replayed before.
        """
        stream = self._pool.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), programmatic_launches(self._pool.programmatic):
            self._run(call, args)  # compiles and loads kernels, which must not happen while capturing
        graph = torch.cuda.CUDAGraph()
        # cuBLAS keeps a workspace for each stream, which other code may free, and so may the end of another graph
        # (pytorch #193402). With none before and none after, this graph's own comes from the pool, as activations do.
        clear_cublas_workspaces()
        around = torch.cuda.graph(graph, pool=self._pool.handle, stream=stream, capture_error_mode="thread_local")
        with around, programmatic_launches(self._pool.programmatic):
            output = self._run(call, args)
        clear_cublas_workspaces()
        self._graphs[id(args[1])] = _Graph(args, graph, output)

    def _run(self, call: Callable, args: tuple) -> Any:
        self._pool.before(args)
        output = call(*args)
        self._pool.after(args)
        return output

    def __call__(self, *args: Any) -> Any:
        """Replay the graph of these arguments on the current stream. Returns the same tensors each time."""
        captured = self._graphs[id(args[1])]
        assert same_objects(args, captured.args), (
            "a CUDA graph must be replayed with the tensors that it was captured with"
        )
        captured.graph.replay()
        return captured.output


def _nothing(args: tuple) -> None:
    """A graph has nothing besides its function."""


class _Graph(NamedTuple):
    args: tuple
    graph: torch.cuda.CUDAGraph
    output: Any
