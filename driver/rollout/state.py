"""The running requests in static device arrays, so that one graph serves every batch.

The host fills mirrors of the arrays and uploads them between bursts; during a burst the device
updates them. On the CPU mirror and array are the same memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import tlt_ext
from tlt_ext.limits import CONTROL_WORDS, MAX_EMITTED

from .request import MAX_STOP_IDS, RunningRequest
from .token_store import GROUP_SLOTS, TokenStore
from .tree import Tree

DRAFT_TEMPERATURE = 0.75  # accept lengths at others: docs/notes/drafter.md

_INTS = ("slot", "context_len", "last_token", "remaining", "granted", "num_new", "status", "top_k")
_FLOATS = ("temperature", "draft_temperature", "top_p")
# Columns of the uploaded array: dtype and numbers of a request. Those of eight bytes are aligned.
_COLUMNS = {
    **dict.fromkeys(("request", "store_row"), (torch.int64, 1)),
    **dict.fromkeys(_INTS, (torch.int32, 1)),
    **dict.fromkeys(_FLOATS, (torch.float32, 1)),
    "stop_ids": (torch.int32, MAX_STOP_IDS),
    "group_slots": (torch.int32, GROUP_SLOTS),
}
_WORDS = [dtype.itemsize // 4 * count for dtype, count in _COLUMNS.values()]  # of a request
# With what a pass returns (three rows and two numbers) and two constants, but no block table.
WORDS_PER_REQUEST = sum(_WORDS) + 3 * MAX_EMITTED + 4


@dataclass(frozen=True)
class Batch:
    """The first B rows of the state: requests, then inert rows (slot -1, no pages)."""

    running: list[RunningRequest]
    request: Tensor  # int64 [B], key of the noise
    store_row: Tensor  # int64 [B], the slot, or the store's spare entry if the row is inert
    slot: Tensor  # int32 [B], row of the token store; -1 = inert
    context_len: Tensor  # int32 [B], committed KV entries; also the root's position
    last_token: Tensor  # int32 [B], the root of the next pass
    remaining: Tensor  # int32 [B], tokens that may still be emitted
    granted: Tensor  # int32 [B], KV slots of the granted pages
    num_new: Tensor  # int32 [B], newest entries that the drafter has yet to write
    status: Tensor  # int32 [B], status words that ops OR bits into
    top_k: Tensor  # int32 [B]
    temperature: Tensor  # float32 [B]
    draft_temperature: Tensor  # float32 [B], of a learned drafter
    top_p: Tensor  # float32 [B]
    stop_ids: Tensor  # int32 [B, MAX_STOP_IDS], -1 = unused
    group_slots: Tensor  # int32 [B, GROUP_SLOTS], rows of the store with the same prompt, -1 = none
    block_table: Tensor  # int32 [B, max_pages], -1 after the last page
    output: Any  # results of a pass, a `tlt_ext.VerifyOutput` of tensors
    roots: Tree  # of plain decoding
    table: tlt_ext.TokenTable  # the token store and its rows of the requests

    def __len__(self) -> int:
        return len(self.slot)

    # The arrays in the groups that ops take, cached since the arrays are static.

    @cached_property
    def sampling(self) -> tlt_ext.Sampling:
        return tlt_ext.Sampling(self.temperature, self.request, self.top_k, self.top_p)

    @cached_property
    def draft_sampling(self) -> tlt_ext.Sampling:
        return tlt_ext.Sampling(self.draft_temperature, self.request)

    @cached_property
    def requests(self) -> tlt_ext.Requests:
        return tlt_ext.Requests(
            self.context_len,
            self.status,
            self.last_token,
            self.remaining,
            self.num_new,
            self.granted,
        )

    def rows_of(self, tree: Tree) -> tlt_ext.Rows:
        return tlt_ext.Rows(
            tree.row_start, tree.position, self.status, self.context_len, self.block_table
        )


@dataclass(eq=False)
class BatchState:
    """Static arrays over `max_batch` rows."""

    max_batch: int
    max_pages: int  # largest number of pages of a request, rows in flight included
    page_size: int
    store: TokenStore
    device: torch.device
    draft_temperature: float = DRAFT_TEMPERATURE  # relative to that of the request

    def __post_init__(self) -> None:
        max_batch = self.max_batch
        self.running: list[RunningRequest] = []
        # One array: everything except the block table is uploaded by one copy.
        self._host, self._words = self._mirrored(max_batch * sum(_WORDS))
        self._host_table, self.block_table = self._mirrored(max_batch, self.max_pages)
        self._table = self._host_table.numpy()
        self._host_arrays = self._split(self._host)
        self._columns = {n: column.numpy() for n, column in self._host_arrays.items()}
        self._arrays = self._split(self._words)
        self._arrays["block_table"] = self.block_table
        tokens, path = (self._zeros(max_batch, MAX_EMITTED) for _ in range(2))
        logprobs = self._zeros(max_batch, MAX_EMITTED, dtype=torch.float32)
        num_emitted, finish = (self._zeros(max_batch) for _ in range(2))
        self._results = tokens, logprobs, num_emitted, finish, path
        self._no_parent = self._zeros(max_batch) - 1
        self._count_up = torch.arange(max_batch + 1, dtype=torch.int32, device=self.device)
        self.control = self._zeros(CONTROL_WORDS)
        # Contents of the rows, so that only changes are written.
        self._assigned: list[tuple[RunningRequest, int] | None] = [None] * max_batch
        self._pages: list[list[int]] = [[] for _ in range(max_batch)]
        self._group_versions = [0] * max_batch
        self._views: dict[int, Batch] = {}
        self._filled = 0
        self._clear(0, max_batch)
        self.upload(max_batch)

    def rows(self, count: int) -> Batch:
        """The first `count` rows, as cached views."""
        if count not in self._views:
            views = {name: array[:count] for name, array in self._arrays.items()}
            roots = Tree(
                views["last_token"],
                self._no_parent[:count],
                views["context_len"],
                None,
                self._count_up[: count + 1],
            )
            table = tlt_ext.TokenTable(
                self.store.tokens, views["slot"], self.store.length, views["group_slots"]
            )
            output = tlt_ext.VerifyOutput(*(array[:count] for array in self._results))
            self._views[count] = Batch(
                self.running, **views, output=output, roots=roots, table=table
            )
        return self._views[count]

    def is_stale(self, running: list[RunningRequest]) -> bool:
        """Whether the rows hold other requests than these, or one that was interrupted."""
        return set(self.running) != set(running) or not self.store.holds(running)

    def grant(self) -> None:
        """Uploads the pages that changed, and nothing else."""
        moved = [row for row, s in enumerate(self.running) if self._pages[row] != s.pages]
        for row in moved:
            pages = self._put_pages(row, self.running[row].pages)
            self._columns["granted"][row] = pages * self.page_size
        if moved:
            self._upload_column("granted")
            count = len(self.running)
            self._copy(self.block_table[:count], self._host_table[:count])

    def update_num_new(self) -> None:
        """Uploads how many entries the drafter has yet to write, and nothing else."""
        rows = slice(0, len(self.running))
        self._columns["num_new"][rows] = [s.num_new for s in self.running]
        self._upload_column("num_new")

    def fill(self, running: list[RunningRequest]) -> Batch:
        """Writes and uploads the rows of the running requests.

        A request keeps its row unless that is past the last one, so little changes when one of many
        requests finishes. Requests without a row of the token store get one.
        """
        new = set(self.store.take(running))
        self.running[:] = self._arranged(running)
        for row, state in enumerate(self.running):
            place = state, self.store.slot(state)
            if self._assigned[row] != place or state in new:
                self._assign(row, *place)
            if self._pages[row] != state.pages:
                self._put_pages(row, state.pages)
            version = self.store.group_version(state)
            if self._group_versions[row] != version:
                self._put("group_slots", row, self.store.group_slots(state))
                self._group_versions[row] = version
        count, columns = len(running), self._columns
        rows = slice(0, count)
        columns["context_len"][rows] = [s.context_len for s in self.running]
        columns["last_token"][rows] = [s.tokens[-1] for s in self.running]
        columns["remaining"][rows] = [s.remaining for s in self.running]
        columns["granted"][rows] = [len(s.pages) * self.page_size for s in self.running]
        columns["num_new"][rows] = [s.num_new for s in self.running]
        columns["status"][rows] = 0
        if count < self._filled:
            self._clear(count, self._filled)
        self.upload(max(count, self._filled))
        self._filled = count
        return self.rows(count)

    def _arranged(self, running: list[RunningRequest]) -> list[RunningRequest]:
        """The requests by row."""
        here = set(running)
        kept = [s if s in here else None for s in self.running[: len(running)]]
        kept += [None] * (len(running) - len(kept))
        placed = set(kept)
        others = (s for s in running if s not in placed)
        return [next(others) if s is None else s for s in kept]

    def _assign(self, row: int, state: RunningRequest, slot: int) -> None:
        """Writes the columns that stay constant while the request has this row."""
        columns, params = self._columns, state.request.params
        columns["slot"][row] = columns["store_row"][row] = slot
        columns["request"][row] = state.request.id
        columns["temperature"][row] = params.temperature
        columns["draft_temperature"][row] = self.draft_temperature * params.temperature
        columns["top_k"][row], columns["top_p"][row] = params.top_k, params.top_p
        self._put("stop_ids", row, params.stop_ids)
        self._assigned[row], self._group_versions[row] = (state, slot), 0

    def _put_pages(self, row: int, pages: list[int]) -> int:
        """Writes a row of the block table, or only the added pages; returns the number of pages."""
        had, self._pages[row] = self._pages[row], list(pages)
        begin = len(had) if pages[: len(had)] == had else 0
        if had and begin == 0:
            self._table[row] = -1
        self._table[row, begin : len(pages)] = pages[begin:]
        return len(pages)

    def _put(self, name: str, row: int, values: Sequence[int]) -> None:
        table = self._columns[name][row]
        table.fill(-1)
        table[: len(values)] = values

    def _clear(self, begin: int, end: int) -> None:
        """Makes rows inert."""
        rows = slice(begin, end)
        self._table[rows] = -1
        for row in range(begin, end):
            self._assigned[row], self._pages[row], self._group_versions[row] = None, [], 0
        for name in ("context_len", "last_token", "remaining", "granted", "num_new", "status"):
            self._columns[name][rows] = 0
        for name in ("slot", "stop_ids", "group_slots"):
            self._columns[name][rows] = -1
        self._columns["store_row"][rows] = self.store.spare
        self._columns["temperature"][rows] = self._columns["draft_temperature"][rows] = 1.0
        self._columns["top_p"][rows] = 1.0

    def upload(self, count: int) -> None:
        """Copies the mirrors to the device, of the block table only the first `count` rows."""
        self._copy(self._words, self._host)
        self._copy(self.block_table[:count], self._host_table[:count])

    def _upload_column(self, name: str) -> None:
        self._copy(self._arrays[name], self._host_arrays[name])

    def _copy(self, to: Tensor, mirror: Tensor) -> None:
        if self._words is not self._host:
            to.copy_(mirror, non_blocking=True)

    # ---- arrays ---------------------------------------------------------------------------------

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _mirrored(self, *shape: int) -> tuple[Tensor, Tensor]:
        """int32 arrays (host, device): pinned and separate on a GPU, the same array otherwise."""
        if self.device.type == "cpu":
            array = self._zeros(*shape)
            return array, array
        return torch.zeros(shape, dtype=torch.int32, pin_memory=True), self._zeros(*shape)

    def _split(self, words: Tensor) -> dict[str, Tensor]:
        parts = words.split([self.max_batch * count for count in _WORDS])
        columns = {}
        for (name, (dtype, count)), part in zip(_COLUMNS.items(), parts, strict=True):
            column = part.view(dtype)
            columns[name] = column if count == 1 else column.view(-1, count)
        return columns
