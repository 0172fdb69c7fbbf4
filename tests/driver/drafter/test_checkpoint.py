"""Checkpoints of the drafter: atomic, asynchronous, and their failures."""

import copy
import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

from driver.drafter.checkpoint import DraftCheckpoints
from tests.driver.drafting import build_parts, finish
from tests.kit import gpu, needs_gpu, same_bits


def state(value: float) -> dict:
    return {"drafter": {"w": torch.full((3,), value)}, "steps": 7, "groups": [torch.ones(1), None]}


def test_saved_states_are_read_back_and_old_files_are_removed(tmp_path):
    checkpoints = DraftCheckpoints(tmp_path / "drafter", keep=2)
    assert checkpoints.latest() is None
    for step in (8, 16, 24):
        assert checkpoints.save(lambda step=step: state(step), step)
        checkpoints.collect()
    step, back = checkpoints.latest()
    assert step == 24 and torch.equal(back["drafter"]["w"], torch.full((3,), 24.0))
    assert (back["steps"], back["groups"][1]) == (7, None)
    names = sorted(path.name for path in (tmp_path / "drafter").iterdir())
    assert names == ["step-00000016.pt", "step-00000024.pt"]


def test_files_of_an_earlier_start_are_removed(tmp_path):
    """A new run counts from 0 again, so old files would look newest."""
    checkpoints = DraftCheckpoints(tmp_path / "drafter", keep=2)
    checkpoints.clear()  # the folder does not exist yet
    for step in (80, 88):
        assert checkpoints.save(lambda step=step: state(step), step)
        checkpoints.collect()
    checkpoints.clear()
    assert checkpoints.save(lambda: state(8.0), 8)
    checkpoints.collect()
    assert checkpoints.latest()[0] == 8


def test_the_state_at_the_save_is_written_without_waiting(tmp_path, monkeypatch):
    """The disk is slow; training changes the weights and saves again meanwhile."""
    go, whole = threading.Event(), torch.save

    def slow(*args: object) -> None:
        assert go.wait(500)
        whole(*args)

    monkeypatch.setattr(torch, "save", slow)
    checkpoints, live = DraftCheckpoints(tmp_path), state(1.0)
    assert checkpoints.save(lambda: live, 1)
    live["drafter"]["w"].fill_(2.0)
    made = []
    assert not checkpoints.save(lambda: made.append(1), 2) and not made  # still being written
    checkpoints.collect(wait=False)
    assert checkpoints.stall_s < 250 and not checkpoints._writes[-1].done()
    go.set()
    checkpoints.collect()
    step, back = checkpoints.latest()
    assert step == 1 and torch.equal(back["drafter"]["w"], torch.ones(3))


def test_copies_are_allocated_once(tmp_path):
    """A state without optimizer moments may come first; theirs are allocated later."""
    checkpoints = DraftCheckpoints(tmp_path)
    checkpoints.copies.prepare({"w": torch.ones(2)})
    held = dict(checkpoints.copies.room)
    checkpoints.copies.prepare({"w": torch.ones(2), "moments": [{"m": torch.ones(3)}]})
    assert checkpoints.copies.room[("w",)] is held[("w",)] and len(checkpoints.copies.room) == 2
    room = {place: x.data_ptr() for place, x in checkpoints.copies.room.items()}
    for value in (4.0, 5.0):
        live = {"w": torch.full((2,), value), "moments": [{"m": torch.full((3,), -value)}]}
        assert checkpoints.save(lambda live=live: live, int(value))
        checkpoints.collect()
        assert {place: x.data_ptr() for place, x in checkpoints.copies.room.items()} == room
        assert torch.equal(checkpoints.latest()[1]["moments"][0]["m"], torch.full((3,), -value))


def test_token_counts_are_copied_fast(tmp_path):
    """One call for each of 150,000 tokens would take too long."""
    checkpoints, seen = DraftCheckpoints(tmp_path), {token: token % 7 for token in range(150_000)}
    calls = []
    plain = checkpoints.copies._each
    checkpoints.copies._each = lambda *args: (calls.append(args), plain(*args))[1]
    assert checkpoints.save(lambda: {"steps": 3, "seen_tokens": seen, "w": torch.ones(2)}, 1)
    seen[0] = 99  # training goes on
    checkpoints.collect()
    assert checkpoints.latest()[1]["seen_tokens"][0] == 0 and len(calls) < 10


def test_a_full_disk_is_a_warning_and_leaves_no_file(tmp_path, monkeypatch):
    checkpoints = DraftCheckpoints(tmp_path)
    checkpoints.save(lambda: state(1.0), 1)
    checkpoints.collect()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert checkpoints.save(lambda: state(2.0), 2)
            assert checkpoints._writes[-1].exception()
        with pytest.warns(UserWarning, match="No space left on device.*; training and rollout go"):
            checkpoints.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.pt"]
    assert checkpoints.latest()[0] == 1
    assert checkpoints.save(lambda: state(3.0), 3)  # and the next one is tried again
    checkpoints.collect()
    assert checkpoints.latest()[0] == 3


def test_damaged_files_are_skipped_with_a_warning(tmp_path):
    checkpoints = DraftCheckpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(lambda step=step: state(step), step)
        checkpoints.collect()
    newest = tmp_path / "step-00000002.pt"
    newest.write_bytes(newest.read_bytes()[:100])
    with pytest.warns(UserWarning, match="cannot be read .*the previous one is used"):
        assert checkpoints.latest()[0] == 1


KILLED = """
import sys, torch
from pathlib import Path
from driver.drafter.checkpoint import DraftCheckpoints

class Slow(DraftCheckpoints):
    pass

checkpoints = DraftCheckpoints(Path(sys.argv[1]))
checkpoints.save(lambda: {"w": torch.ones(4)}, 1)
checkpoints.collect()
whole = torch.save
def half(state, file):
    buffer = __import__("io").BytesIO()
    whole(state, buffer)
    file.write(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    file.flush()
    print("half", flush=True)
    __import__("time").sleep(60)
torch.save = half
checkpoints.save(lambda: {"w": torch.zeros(4)}, 2)
checkpoints.collect()
"""


def test_a_process_killed_while_it_writes_leaves_the_previous_checkpoint(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / ".step-00000002.pt.tmp").exists()
    step, back = DraftCheckpoints(tmp_path).latest()
    assert step == 1 and torch.equal(back["w"], torch.ones(4))
    assert not (tmp_path / ".step-00000002.pt.tmp").exists()


def test_a_trainer_resumes_from_its_newer_checkpoint(tmp_path):
    """Weights, optimizer and vocabulary; the head is gathered from the target again."""
    parts = build_parts()
    trainer = parts.trainer(checkpoint_every=4, final_steps=0)
    trainer.checkpoints = DraftCheckpoints(tmp_path)
    for seed in (1, 2):
        trainer.buffer.add(parts.document(40, seed))
    file = io.BytesIO()
    for step in range(10):
        if step == 4:
            torch.save(trainer.state_dict(), file)
        trainer.micro_step()
        for write in trainer.checkpoints._writes:
            write.result()
        if step == 7:
            wanted = {name: value.clone() for name, value in parts.drafter.state_dict().items()}
            average = {name: w.clone() for name, w in trainer.step.average.values.items()}
    finish(trainer)
    saved = torch.load(tmp_path / "step-00000008.pt", weights_only=True)
    assert "lm_head.weight" not in saved["drafter"]
    assert trainer.metrics()["drafter/checkpoint_stall_ms"] > 0

    again = build_parts()
    resumed = again.trainer()
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    resumed.resume()
    assert resumed.steps == 4  # it has no checkpoints of its own
    resumed.checkpoints = DraftCheckpoints(tmp_path)
    resumed.resume()
    assert resumed.steps == 8
    got = again.drafter.state_dict()
    assert all(same_bits(value, got[name]) for name, value in wanted.items())
    got = resumed.step.average.values
    assert all(same_bits(value, got[name]) for name, value in average.items())
    resumed.resume()
    assert resumed.steps == 8


def test_training_and_rollout_go_on_while_the_disk_is_full(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    parts = build_parts()
    trainer = parts.trainer(checkpoint_every=1, final_steps=1)
    trainer.checkpoints = DraftCheckpoints(tmp_path)
    trainer.buffer.add(parts.document(40, 1))
    monkeypatch.setattr(os, "fsync", full)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            trainer.on_pass(1)
        assert trainer.checkpoints._writes[-1].exception()
    with pytest.warns(UserWarning, match="drafter checkpoint not written .*No space left"):
        finish(trainer)
        trainer.close()
    assert trainer.steps == 5 and parts.runner.version > 1 and not list(tmp_path.iterdir())


def test_optimizer_state_of_a_gpu_is_loaded_on_the_cpu():
    parts = build_parts()
    trainer = parts.trainer()
    trainer.buffer.add(parts.document(40, 1))
    trainer.micro_step()
    state = copy.deepcopy(trainer.state_dict())
    for group in state["optimizer"]["param_groups"]:
        group["capturable"] = True
    trainer.load_state_dict(state)
    trainer.set_lr(0.0)
    before = parts.drafter.fc.weight.clone()
    assert trainer.micro_step() and torch.equal(parts.drafter.fc.weight, before)
    trainer.set_lr(1e-2)
    assert trainer.micro_step() and not torch.equal(parts.drafter.fc.weight, before)


@gpu
@needs_gpu
def test_a_copy_on_the_gpu_is_ordered_by_its_stream(tmp_path):
    checkpoints, live = DraftCheckpoints(tmp_path), {"w": torch.zeros(1 << 20, device="cuda")}
    checkpoints.copies.prepare(live)
    waits = []
    for step in range(3):
        live["w"].fill_(step)
        torch.cuda._sleep(200_000_000)  # 0.1 s
        assert checkpoints.save(lambda: live, step)
        assert all(room.is_pinned() for room in checkpoints.copies.room.values())
        begin = time.perf_counter()
        live["w"].fill_(-1.0)
        checkpoints.collect()
        waits.append(time.perf_counter() - begin)
        assert torch.equal(checkpoints.latest()[1]["w"], torch.full((1 << 20,), float(step)))
    assert checkpoints.stall_s < min(waits)  # `collect` waits for the device, `save` does not
