"""Checkpoints that a thread writes: their content, their order and their errors."""

import threading

import pytest
import torch

from driver.common import host_copies, memory
from driver.common.errors import UserError
from driver.common.host_copies import HostCopies, held_bytes
from driver.records import checkpoint_writer
from driver.records.checkpoint import latest_checkpoint, save_checkpoint
from driver.records.checkpoint_writer import CheckpointWriter
from tests.driver.records.test_folder import full_disk, names, states, write_policy
from tests.kit import gpu, needs_gpu


def write_into(folder, step):
    """A writer of checkpoints; `seen` lists the threads that called it."""

    def write(state):
        write.seen.append(threading.current_thread())
        save_checkpoint(folder, step, write_policy, state, keep=2)

    write.seen = []
    return write


def test_a_storage_is_held_once():
    x = torch.zeros(8)
    assert held_bytes(x, [x[:4]], {"y": torch.zeros(2)}) == 32 + 8


def test_numbers_are_not_visited_one_by_one(monkeypatch):
    """A state of the drafter counts every token of the vocabulary."""
    visited = []
    monkeypatch.setattr(host_copies, "is_dataclass", visited.append)
    state = {"seen_tokens": dict.fromkeys(range(1000), 1), "w": [torch.zeros(2)]}
    assert held_bytes(state) == 8 and visited == []


def test_the_state_at_the_save_is_written_without_waiting(tmp_path):
    """The disk is slow, and the next step changes the state, counters in lists too."""
    go, writer, live = threading.Event(), CheckpointWriter(threaded=True), states(1)
    write = write_into(tmp_path, 1)
    writer.save(lambda state: (go.wait(30), write(state)), live)
    live["trainer"]["moment"].fill_(-1.0)
    live["bandit"]["arms"].append(7)
    writer.collect(wait=False)
    assert latest_checkpoint(tmp_path) is None and not write.seen
    go.set()
    writer.collect()
    saved = latest_checkpoint(tmp_path)
    assert torch.equal(saved.state("trainer")["moment"], states(1)["trainer"]["moment"])
    assert saved.state("bandit") == {"arms": [1, None]}
    assert write.seen[0] is not threading.current_thread()


def test_memory_for_the_copies_is_taken_in_the_thread(monkeypatch):
    """`prepare` is called with a part of the state first. Only a save waits for it."""
    calls, prepare, go = [], HostCopies.prepare, threading.Event()

    def noted(self, state):
        assert go.wait(30)
        calls.append(threading.current_thread())
        prepare(self, state)

    monkeypatch.setattr(HostCopies, "prepare", noted)
    live, written = states(1), []
    writer = CheckpointWriter(threaded=True)
    writer.prepare({"trainer": live["trainer"]})
    writer.prepare(live)
    writer.collect()
    assert not writer.busy and not calls
    threading.Timer(0.2, go.set).start()
    writer.save(written.append, live)
    writer.collect()
    rooms = {room.data_ptr() for room in writer._copies.room.values()}
    assert len(calls) == 2 and threading.current_thread() not in calls
    assert rooms and {t.data_ptr() for t in tensors(written[0])} == rooms
    CheckpointWriter(threaded=False).prepare(live)
    assert len(calls) == 2


def test_errors_of_a_write_and_of_an_allocation_are_raised(monkeypatch):
    """The latter by the next save."""
    writer = CheckpointWriter(threaded=True)
    writer.save(lambda state: 1 / 0, states(1))
    writer.prepare(states(1))
    with pytest.raises(ZeroDivisionError):
        writer.collect()
    monkeypatch.setattr(HostCopies, "prepare", lambda *_: exec("raise MemoryError"))
    writer.prepare(states(1))
    writer.collect()
    with pytest.raises(MemoryError):
        writer.save(print, states(1))


def tensors(state):
    if isinstance(state, torch.Tensor):
        return [state]
    items = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [tensor for item in items for tensor in tensors(item)]


def test_the_next_save_waits_for_the_previous_one(tmp_path):
    order, writer, go = [], CheckpointWriter(threaded=True), threading.Event()
    writer.save(lambda state: (go.wait(30), order.append(state["n"])), {"n": 1})
    threading.Timer(0.2, go.set).start()
    writer.save(lambda state: order.append(state["n"]), {"n": 2})
    writer.collect()
    assert order == [1, 2]


def test_without_a_thread_nothing_is_copied(tmp_path):
    writer, state, seen = CheckpointWriter(threaded=False), states(1), []
    writer.save(seen.append, state)
    assert seen[0] is state and not writer._copies.room


@pytest.mark.parametrize(("ranks", "numbers", "share"), [(1, 7, "25.0"), (4, 2, "6.2")])
def test_a_state_too_large_for_the_machine_is_written_at_once(ranks, numbers, share, monkeypatch):
    """Each rank of the machine has copies."""
    monkeypatch.setattr(checkpoint_writer, "host_bytes", lambda: 100)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    writer, state, seen = CheckpointWriter(threaded=True), {"w": torch.zeros(numbers)}, []
    with pytest.warns(
        UserWarning, match=f"a checkpoint of 0.0 GB exceeds {share}% of this machine's memory"
    ):
        writer.save(seen.append, state)
    assert seen[0] is state


def test_a_container_s_limit_counts(monkeypatch, tmp_path):
    limits = [tmp_path / "memory.max", tmp_path / "not there"]
    monkeypatch.setattr(memory, "LIMITS", limits)
    limits[0].write_text("max\n")
    whole = memory.host_bytes()
    assert whole > 1 << 28
    limits[0].write_text("1000000\n")
    assert memory.host_bytes() == 1_000_000


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_ends_the_run_with_one_line_and_keeps_the_previous_checkpoint(tmp_path, wait):
    writer = CheckpointWriter(threaded=True)
    writer.save(write_into(tmp_path, 1), states(1))
    writer.collect()
    with full_disk(1000):
        writer.save(write_into(tmp_path, 2), states(2))
        writer._written.exception()
    with pytest.raises(UserError, match="step-000002: cannot be written"):
        writer.collect(wait)
    assert names(tmp_path) == ["step-000001"]
    writer.collect()  # raised once
    writer.save(write_into(tmp_path, 3), states(3))
    writer.collect()
    assert latest_checkpoint(tmp_path).step == 3


def test_the_next_save_raises_the_error_of_the_previous_one(tmp_path):
    writer = CheckpointWriter(threaded=True)
    with full_disk(1000):
        writer.save(write_into(tmp_path, 1), states(1))
        writer._written.exception()
    with pytest.raises(UserError, match="step-000001: cannot be written"):
        writer.save(write_into(tmp_path, 2), states(2))


def test_tied_weights_stay_one_and_room_is_kept():
    weight, copies = torch.ones(4, 2), HostCopies()
    state = {"embed": weight, "head": weight.view(4, 2), "part": weight[:2], "none": torch.zeros(0)}
    first, _ = copies.take(state)
    assert first["embed"] is first["head"] and first["part"] is not first["embed"]
    assert first["embed"].data_ptr() != weight.data_ptr()
    room = {place: x.data_ptr() for place, x in copies.room.items()}
    weight.fill_(2.0)
    second, _ = copies.take(state)
    assert {place: x.data_ptr() for place, x in copies.room.items()} == room
    assert torch.equal(second["head"], weight) and torch.equal(second["part"], weight[:2])
    assert held_bytes(copies.room) == 4 * (8 + 4)


@pytest.mark.parametrize("card", [False, True])
def test_memory_for_copies_of_a_card_is_pinned_with_threads(card, monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.append)
    HostCopies()
    assert [memory.PINNED in settings for settings in made] == [True] * card


@gpu
@needs_gpu
def test_a_copy_of_a_card_is_in_the_order_of_its_stream():
    writer, live, seen = CheckpointWriter(threaded=True), {"w": torch.zeros(1 << 20).cuda()}, []
    for step in range(3):
        torch.cuda._sleep(1_000_000)
        live["w"].fill_(step)
        writer.save(lambda state: seen.append(state["w"].clone()), live)
        assert all(room.is_pinned() for room in writer._copies.room.values())
        live["w"].fill_(-1.0)
        writer.collect()
        assert torch.equal(seen[-1], torch.full((1 << 20,), float(step)))
