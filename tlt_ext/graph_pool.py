"""Executable CUDA graphs of captured passes, with a loop around them where the device can."""

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
    """What a graph of a pool costs.

    The driver takes memory in blocks that graphs share and keeps what a graph gives back for the
    next one, so free memory shows a graph's needs only on average over many nodes.
    """

    charged_bytes: int  # what the budget counts, by that average
    settled_bytes: int  # by how much the device's free memory fell when the graph was made
    peak_bytes: int  # the most that it fell meanwhile
    nodes: int  # of the captured graphs, and the loop's own
    launches: int
    loop: bool


class GraphPool:
    """Makes, launches and evicts the executable graphs of captured passes.

    With `loop` the captured graphs, one after the other, are the body of a WHILE node: one launch
    repeats them until `control[Control.GO]` is 0 (`advance_batch` decides), at most as often as
    `arm_passes` allowed passes. Without it a launch is one pass. All calls come from one thread.
    Everything that a graph reads or writes must outlive it.

    Args:
        device: index of the CUDA device.
        budget_bytes: most device memory that the graphs are charged with together, those of the
            lowest priority giving way, the least recently used first; 0 = no limit but the
            device's.

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
        """Makes an executable graph; an earlier one of the same key goes first.

        Waits for `stream`. Graphs that are running, or of a higher priority, are never evicted.

        Args:
            key: its name.
            graphs: captured graphs (`cudaGraph_t`), run in this order; they are copied, so their
                owners may go after the call.
            control: int32 [8] on the device; the loop's word is read from it.
            loop: whether they are a loop's body; it may hold kernels, copies, memsets and such
                graphs, no events and no allocations.
            priority: it gives way to graphs of the same one or a higher one.
            stream: CUDA stream; default is the array library's current one.

        Returns:
            Keys of the graphs that were evicted, for the budget or for lack of memory.

        Raises:
            GraphError: the graph cannot be made, or does not fit; the caller may run without it. An
                earlier graph of the same key is gone. Other graphs are kept, except those that the
                message names: they were evicted before the device's memory turned out too small.
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
        """Drops a graph once its last launch has ended.

        Raises:
            GraphError: there is no such graph.
        """
        self._pool.remove(key)
        del self._control[key]

    def usage(self) -> dict[str, GraphUsage]:
        """What each graph costs, the least recently used first."""
        return {key: GraphUsage(*values) for key, values in self._pool.usage().items()}

    def __contains__(self, key: str) -> bool:
        return key in self._pool
