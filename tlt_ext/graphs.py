"""Passes that run without the host: the end of a pass, and the ring that holds its results.

A *pass* is one step of the engine over its batch. `arm_passes` allows a number of passes and
`advance_batch` ends each of them. The host, or a loop inside a CUDA graph, repeats passes while
`control[Control.GO]` is 1.
"""

import enum
from functools import cached_property
from typing import Any

from tlt_ext import _C
from tlt_ext.common import Array, current_stream
from tlt_ext.groups import Requests, TokenTable, VerifyOutput
from tlt_ext.limits import MAX_EMITTED


class Control(enum.IntEnum):
    """Words of a `control` array, int32 [8]; the rest is reserved."""

    GO = 0  # 1: another pass may run
    PASSES = 1  # passes since they were armed
    LIMIT = 2  # passes that were armed
    REASON = 3  # StopReason bits of the last pass
    SEQUENCE = 4  # number of the next record in the ring
    ENDS = 5  # the passes stop when so many requests have finished
    ENDED = 6  # requests that finished since the passes were armed


class StopReason(enum.IntFlag):
    """Why passes stop; 0 = they do not."""

    FINISHED = 1  # `ends` requests reached a stop id or their limit
    PAGES = 2  # a request lacks KV slots that the next pass may write
    LIMIT = 4  # all armed passes were made
    STOPPED = 8  # the host requested it
    STALLED = 16  # an active request emitted nothing: its state is damaged


class PassRing:
    """Results of the last passes, in memory that the host reads while the device runs.

    Record p (counted from 0 since the ring was made) lies at row `p % passes` of every array and
    is complete when `sequence > p`. The arrays are NumPy views.

    Args:
        passes: records held, and the most passes that can be armed at once.
        max_batch: most requests of a pass.
        max_emitted: most tokens of a request in a pass, up to 32.
        pinned: use page-locked memory, which a GPU can write; False serves CPU arrays only.

    Raises:
        ValueError: an argument is out of range, or this build has no CUDA.
        RuntimeError: pinned memory could not be allocated.

    Example:
        >>> ring = PassRing(64, max_batch=2)   # `advance_batch` fills it, `collect` reads it
        >>> ring.sequence, ring.tokens.shape
        (0, (64, 2, 17))

    Source: design of this package.
    """

    def __init__(
        self, passes: int, max_batch: int, max_emitted: int = MAX_EMITTED, *, pinned: bool = False
    ) -> None:
        self._ring = _C.PassRing(passes, max_batch, max_emitted, pinned)

    @property
    def passes(self) -> int:
        """Records that the ring holds."""
        return self._ring.passes

    @property
    def sequence(self) -> int:
        """Passes recorded since the ring was made."""
        return self._ring.sequence

    @property
    def reason(self) -> StopReason:
        """Why passes stopped after the last recorded one; 0 while they run."""
        return StopReason(self._ring.reason)

    @cached_property
    def begin_ns(self) -> Any:
        """int64 [1]: when passes were armed, by the clock of `time_ns`."""
        return self._ring.begin_ns

    @cached_property
    def time_ns(self) -> Any:
        """int64 [passes]: end of each pass, by the clock of the device that ran it."""
        return self._ring.time_ns

    @cached_property
    def num_emitted(self) -> Any:
        """int32 [passes, max_batch]."""
        return self._ring.num_emitted

    @cached_property
    def finish(self) -> Any:
        """int32 [passes, max_batch]: as `verify_tree` wrote it, 0 in inert rows."""
        return self._ring.finish

    @cached_property
    def status(self) -> Any:
        """int32 [passes, max_batch]: Status bits."""
        return self._ring.status

    @cached_property
    def tokens(self) -> Any:
        """int32 [passes, max_batch, max_emitted]; undefined past `num_emitted`."""
        return self._ring.tokens

    @cached_property
    def logprobs(self) -> Any:
        """float32 [passes, max_batch, max_emitted]; undefined past `num_emitted`."""
        return self._ring.logprobs

    def request_stop(self) -> None:
        """Stops the passes after the current one."""
        self._ring.request_stop()

    def wait(self, timeout_s: float) -> StopReason:
        """Waits until passes stop, without holding the GIL; returns 0 on a time-out."""
        return StopReason(self._ring.wait(timeout_s))

    def collect(
        self, begin: int, end: int, rows: int
    ) -> list[tuple[list[int], list[float], list[int], int, int]]:
        """The results of each request in passes `begin` to `end - 1`.

        Args:
            begin, end: record numbers; the ring must still hold them.
            rows: number of requests, from the first row of the batch.

        Returns:
            For each row its tokens, their log-probs, and the number of tokens of each pass up to
            the one in which it finished; then its finish word (0: not finished) and status bits.

        Raises:
            ValueError: the ring does not hold these passes, or more rows than it has.
        """
        return self._ring.collect(begin, end, rows)


def arm_passes(
    control: Array, ring: PassRing, *, limit: int, ends: int = 1, stream: int | None = None
) -> None:
    """Allows up to `limit` passes and records the time.

    Clears an earlier request to stop. The passes that were armed before must have ended. A request
    that finishes before the passes stop leaves an inert row.

    Args:
        control: int32 [8], written.
        ring: pinned where control is on a GPU.
        limit: 1 to `ring.passes`, so that no record is lost before the host reads it.
        ends: 1 to the ring's rows; the passes stop when so many requests have finished.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a layout, shape or value is wrong.

    Example:
        >>> import numpy as np
        >>> control = np.zeros(8, np.int32)
        >>> arm_passes(control, PassRing(8, max_batch=1), limit=8)
        >>> print(control[Control.GO], control[Control.LIMIT])
        1 8

    Source: design of this package.
    """
    _C.arm_passes(control, ring._ring, limit, ends, current_stream(control, stream))


def advance_batch(
    verified: VerifyOutput,
    table: TokenTable,
    requests: Requests,
    control: Array,
    ring: PassRing,
    *,
    lookahead: int,
    stream: int | None = None,
) -> None:
    """Ends a pass: stores and records what was emitted, and decides whether another may follow.

    Runs after `verify_tree` and `commit_path`. The emitted tokens take the positions up to
    `context_len[b]`; the last of them is the root of the next pass. A request that finished is
    inert in later passes: `verify_tree` emits nothing for it.

    Args:
        verified: all fields but path and filtered_logprobs; finish is 0 unless a request finished.
        table: tokens and slot. The tokens are written. The slot of a request that finished becomes
            -1. A request with a negative slot is ignored.
        requests: all fields. context_len is already advanced by num_emitted. status: BAD_LENGTH for
            a count outside 0 to E, a slot outside `tokens` or a position outside its row; nothing
            is taken then. last_token and num_new (the tokens taken) are written, remaining is
            decreased by the tokens taken, 0 where the request finished.
        control: int32 [8], updated; see `Control`.
        ring: the record is written to it; pinned where the arrays are on a GPU.
        lookahead: slots past `context_len` that a next pass may write.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        A request of ten committed slots emitted 7 and 8 and has not finished:

        >>> import numpy as np
        >>> tokens, control = np.zeros((1, 32), np.int32), np.zeros(8, np.int32)
        >>> last_token, num_new = np.zeros((2, 1), np.int32)
        >>> ring = PassRing(8, max_batch=1)
        >>> arm_passes(control, ring, limit=8)
        >>> advance_batch(
        ...     VerifyOutput(emitted=np.int32([[7, 8]]), logprobs=np.float32([[-0.5, -0.25]]),
        ...                  num_emitted=np.int32([2]), finish=np.int32([0])),
        ...     TokenTable(tokens, slot=np.int32([0])),
        ...     Requests(context_len=np.int32([12]), status=np.int32([0]), last_token=last_token,
        ...              remaining=np.int32([10]), num_new=num_new, granted=np.int32([16])),
        ...     control, ring, lookahead=4)
        >>> print(tokens[0, 11:13], last_token, control[Control.GO])
        [7 8] [8] 1
        >>> ring.collect(0, ring.sequence, 1)
        [([7, 8], [-0.5, -0.25], [2], 0, 0)]

    Source: design of this package.
    Reference: `tests/reference.py::advance_batch`.
    """
    _C.advance_batch(
        verified,
        table,
        requests,
        control,
        ring._ring,
        lookahead,
        current_stream(control, stream),
    )
