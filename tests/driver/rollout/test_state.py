"""Static arrays of a batch: rows of requests, inert rows past the last, constant addresses."""

import pytest
import torch

from driver.rollout.request import Request, RunningRequest, SamplingParams
from driver.rollout.state import BatchState
from driver.rollout.token_store import TokenStore
from tests import kit

PAGE = 4


def state(device="cpu"):
    store = TokenStore(4, 30, torch.device(device))
    return BatchState(4, 8, PAGE, store, torch.device(device))


def running(number, length=6, stop_ids=(3, 5)):
    params = SamplingParams(0.5 + number, number, 0.9, 20, stop_ids)
    request = Request(2**61 + number, 0, tuple(range(length)), params)
    pages = [10 * number + i for i in range(length // PAGE + 1)]
    return RunningRequest(request, list(range(length)), pages=pages, context_len=length - 1)


@pytest.mark.parametrize("device", kit.DEVICES)
def test_rows_hold_their_requests_and_the_rest_is_inert(device):
    """Fault 26: mixed requests in a bucket of four."""
    made = state(device)
    first, second = running(1), running(2, length=9, stop_ids=())
    second.draft_len = 5
    gone = running(3)
    made.fill([gone, first, running(4), second])
    made.store.release(gone, keep=False)
    assert len(made.fill([first, second])) == 2
    rows = made.rows(4)
    assert made.running == [second, first]  # the second fills the gap; the first keeps its row
    assert rows.slot.tolist() == rows.store_row.tolist()[:2] + [-1, -1] == [3, 1, -1, -1]
    assert rows.store_row.tolist()[2:] == [4, 4]
    assert rows.group_slots[:, :3].tolist() == [[3, -1, -1], [1, 2, -1], [-1] * 3, [-1] * 3]
    assert made.store.tokens[3, :10].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0]
    assert rows.context_len.tolist() == [8, 5, 0, 0]
    assert rows.last_token.tolist() == [8, 5, 0, 0]
    assert rows.remaining.tolist() == [20, 20, 0, 0]
    assert rows.granted.tolist() == [12, 8, 0, 0]
    assert rows.num_new.tolist() == [3, 5, 0, 0]
    assert rows.request.tolist()[:2] == [2**61 + 2, 2**61 + 1]
    assert rows.temperature.tolist() == [2.5, 1.5, 1.0, 1.0]
    assert rows.top_k.tolist()[:2] == [2, 1]
    assert rows.top_p.tolist() == pytest.approx([0.9, 0.9, 1.0, 1.0])
    assert rows.stop_ids[:, :3].tolist() == [[-1] * 3, [3, 5, -1], [-1] * 3, [-1] * 3]
    assert rows.block_table[:, :4].tolist() == [
        [20, 21, 22, -1], [10, 11, -1, -1], [-1] * 4, [-1] * 4,
    ]  # fmt: skip


def test_addresses_never_change():
    made = state()
    before = {n: t.data_ptr() for n, t in vars(made.rows(4)).items() if torch.is_tensor(t)}
    made.fill([running(1), running(2)])
    after = {n: t.data_ptr() for n, t in vars(made.rows(3)).items() if torch.is_tensor(t)}
    assert before == after


@pytest.mark.parametrize("device", kit.DEVICES)
def test_moved_pages_and_requests_are_noticed(device):
    """Like fault 35: a table of the same length with other pages."""
    made = state(device)
    first, second = running(1), running(2)
    made.fill([first, second])
    assert not made.is_stale([first, second])
    assert not made.is_stale([second, first])  # the order of the rows is internal
    assert made.is_stale([first]) and made.is_stale([first, running(2)])
    first.pages[0] += 1
    second.pages += [5, 6]
    first.context_len = 77  # the device advances this
    made.grant()
    rows = made.rows(4)
    assert rows.block_table[:, :5].tolist() == [
        [11, 11, -1, -1, -1], [20, 21, 5, 6, -1], [-1] * 5, [-1] * 5,
    ]  # fmt: skip
    assert rows.granted.tolist() == [8, 16, 0, 0]
    assert rows.context_len.tolist() == [5, 5, 0, 0]
    second.pages = [9]
    made.grant()
    assert rows.block_table[1, :3].tolist() == [9, -1, -1] and int(rows.granted[1]) == 4
    second.draft_len = 3
    made.update_num_new()
    assert rows.num_new.tolist() == [77, 2, 0, 0]
    assert rows.context_len.tolist() == [5, 5, 0, 0]
