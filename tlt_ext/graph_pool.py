"""Executable CUDA graphs of captured passes, with a loop on the device where it is supported."""

import dataclasses
from collections.abc import Sequence

from tlt_ext import _C
from tlt_ext.common import Array, current_stream

GraphError = _C.GraphError


def graph_bytes(nodes: int, loop: bool) -> int:
    """Device memory that the budget of a `GraphPool` counts for a graph.

    Args:
        nodes: of the captured graphs.
        loop: whether they are repeated in a loop.

    Example:
        >>> graph_bytes(nodes=100, loop=False)
        310960
    """
    return _C.graph_bytes(nodes, loop)


@dataclasses.dataclass(frozen=True)
class GraphUsage:
    """The memory and the launches of a graph of a pool.

    The CUDA driver allocates memory in blocks that graphs share, and keeps freed memory for the
    next graph. So the change of free memory gives the needs of a graph only on average over many
    nodes.
    """

    charged_bytes: int  # what the budget counts: that average times the nodes
    resident_bytes: int  # decrease of the device's free memory after the graph was made
    peak_bytes: int  # largest decrease while it was made
    nodes: int  # of the captured graphs and of the loop
    launches: int
    loop: bool


class GraphPool:
    """Makes, launches and evicts the executable graphs of captured passes.

    With `loop` the captured graphs, in their order, are the body of a WHILE node: one launch
    repeats them until `control[Control.GO]` is 0 (`advance_batch` decides), at most as often as
    `arm_passes` allowed passes. Without it a launch is one pass. All calls come from one thread.
    Everything that a graph reads or writes must outlive it.

    Args:
        device: index of the CUDA device.
        budget_bytes: upper bound of the memory that all graphs are charged with. Graphs of the
            lowest priority are evicted first, and of these the least recently used. 0 = no bound.

    Raises:
        GraphError: there is no CUDA in this build or on this machine.
        ValueError: an argument is out of range.

    Example:
        On a GPU, with a pass captured into `graph`, a `torch.cuda.CUDAGraph(keep_graph=True)`:

        >>> pool = GraphPool()  # doctest: +SKIP
        >>> pool.add("off b1", [graph.raw_cuda_graph()], control, loop=True)  # doctest: +SKIP
        >>> arm_passes(control, ring, limit=64)  # doctest: +SKIP
        >>> pool.launch("off b1")  # up to 64 passes  # doctest: +SKIP
        >>> ring.wait(timeout_s=1.0)  # doctest: +SKIP

    Source: conditional nodes of CUDA graphs, CUDA C++ Programming Guide.
    """

    def __init__(self, device: int = 0, budget_bytes: int = 0) -> None:
        self._pool = _C.GraphPool(device, budget_bytes)
        self._control: dict[str, Array] = {}

    @staticmethod
    def supports_loop(device: int = 0) -> bool:
        """Whether this build, the driver (CUDA 12.4 or newer) and the device have such loops."""
        return _C.GraphPool.supports_loop(device)

    def add(
        self,
        key: str,
        graphs: Sequence[int],
        control: Array,
        *,
        loop: bool,
        priority: int = 0,
        stream: int | None = None,
    ) -> list[str]:
        """Makes an executable graph; an earlier graph of the same key is removed first.

        Waits for `stream`. Graphs that are running, or of a higher priority, are never evicted.

        Args:
            key: its name.
            graphs: captured graphs (`cudaGraph_t`), run in this order. They are copied and may be
                destroyed after the call.
            control: int32 [8] on the device; the loop reads `Control.GO`.
            loop: whether the graphs are the body of a loop. A body may hold kernels, copies,
                memsets and child graphs of these, but no events and no allocations.
            priority: the graph is evicted only for graphs of the same or a higher priority.
            stream: CUDA stream; default is the array library's current one.

        Returns:
            Keys of the graphs that were evicted, for the budget or for lack of memory.

        Raises:
            GraphError: the graph cannot be made, or does not fit; the caller may run without it. An
                earlier graph of the same key is removed all the same. Other graphs are kept, except
                those that the message names: they were evicted before the device ran out of memory.
            TypeError, ValueError: an argument is wrong.
        """
        stream = current_stream(control, stream)
        try:
            evicted = self._pool.add(key, graphs, control, loop, priority, stream)
            self._control[key] = control
            return evicted
        finally:
            self._control = {k: array for k, array in self._control.items() if k in self}

    def launch(self, key: str, stream: int | None = None) -> None:
        """Launches a graph on a stream, by default the array library's current one.

        Raises:
            GraphError: there is no such graph, or the launch failed.
        """
        self._pool.launch(key, current_stream(self._control.get(key), stream))

    def remove(self, key: str) -> None:
        """Removes a graph; waits for its last launch.

        Raises:
            GraphError: there is no such graph.
        """
        self._pool.remove(key)
        del self._control[key]

    def usage(self) -> dict[str, GraphUsage]:
        """Memory and launches of each graph, the least recently used first."""
        return {key: GraphUsage(*values) for key, values in self._pool.usage().items()}

    def __contains__(self, key: str) -> bool:
        return key in self._pool
