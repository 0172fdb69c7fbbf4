"""Weights come from another process in buckets of shared memory: on a GPU by CUDA IPC.

`Sender` and `Receiver` do on a pipe what verl 0.9.1's `BucketedWeightSender` and
`BucketedWeightReceiver` do on a ZeroMQ socket, so that the test needs no verl. Where there is verl,
on a GPU, its own classes are tested too.
"""

import asyncio
import importlib.util
from multiprocessing.connection import Client, Listener

import pytest
import torch
from torch.multiprocessing.reductions import reduce_tensor

from driver.adapters.buckets import collect, transfer
from driver.common.errors import UserError
from driver.session import Session
from tests import forks, kit
from tests.driver.hugging_face import random_model
from tests.driver.rollout.test_engine import same
from tests.driver.session.test_session import WAIT_S, jobs

SHAPE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
BUCKET_BYTES = 20_000  # less than the embedding, which is shared by itself
GARBAGE = 0xA5
NO_VERL = [m for m in ("verl", "zmq") if importlib.util.find_spec(m) is None]
WIRES = [
    "cpu",
    pytest.param("cuda", marks=[kit.gpu, kit.needs_gpu]),
    pytest.param(
        "verl",
        marks=[kit.gpu, kit.needs_gpu, pytest.mark.skipif(bool(NO_VERL), reason=f"no {NO_VERL}")],
    ),
]


def make_policy(device, seed):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return random_model("qwen2", seed, **SHAPE).to(device, dtype)


class Sender:
    """Copies tensors into a shared buffer, announces each full one, and waits for its receipt."""

    def __init__(self, address, bucket_bytes, device):
        self.pipe = Client(address)
        self.buffer = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)

    def send(self, weights):
        self._exchange(reduce_tensor(self.buffer))
        bucket, offset = {}, 0
        for name, weight in weights:
            offset = -(-offset // weight.element_size()) * weight.element_size()
            if bucket and offset + weight.nbytes > len(self.buffer):
                self._announce(bucket, False)
                bucket, offset = {}, 0
            if weight.nbytes > len(self.buffer):  # shared itself
                self._announce({name: (reduce_tensor(weight), weight.shape, weight.dtype)}, False)
                continue
            room = self.buffer[offset : offset + weight.nbytes]
            room.view(weight.dtype).view(weight.shape).copy_(weight, non_blocking=True)
            bucket[name] = (offset, weight.shape, weight.dtype)
            offset += weight.nbytes
        self._announce(bucket, True)

    def _announce(self, bucket, is_last):
        wait_for(self.buffer)
        self._exchange((bucket, is_last))
        self.buffer.fill_(GARBAGE)
        wait_for(self.buffer)

    def _exchange(self, message):
        self.pipe.send(message)
        self.pipe.recv()


class Receiver:
    """Receives the buckets; `receive_weights` has the signature of verl's receiver."""

    def __init__(self, pipe, device):
        self.pipe, self.device = pipe, torch.device(device)
        self.buckets = 0

    def receive_weights(self, on_bucket_received):
        buffer, is_last = self._rebuild(self.pipe.recv()), False
        self.pipe.send(None)
        while not is_last:
            bucket, is_last = self.pipe.recv()
            got = []
            for name, (where, shape, dtype) in bucket.items():
                if isinstance(where, tuple):
                    got.append((name, self._rebuild(where)))
                    continue
                part = buffer[where : where + shape.numel() * dtype.itemsize]
                got.append((name, part.view(dtype).view(shape)))
            on_bucket_received(got, is_last)
            wait_for(buffer)
            del got
            if is_last:  # the sender's memory is not in use when it ends
                del buffer
            self.pipe.send(None)
            self.buckets += 1

    def _rebuild(self, handle):
        function, args = handle
        if self.device.type == "cuda":
            args = (*args[:6], self.device.index, *args[7:])
        return function(*args)


def wait_for(buffer):
    if buffer.device.type == "cuda":
        torch.cuda.synchronize()


def send(wire, address, seed, names):
    """What the process of the trainer does."""
    device = "cpu" if wire == "cpu" else "cuda:0"
    weights = make_policy(device, seed).state_dict().items()
    weights = [(name, weight) for name, weight in weights if names is None or name in names]
    if wire == "verl":
        sender = transfer().BucketedWeightSender(address, 1, False)
        sender.bucket_size = BUCKET_BYTES
        asyncio.run(sender.async_send_weights(weights))
    else:
        Sender(address, BUCKET_BYTES, device).send(weights)


def receive(wire, device, folder, seed, names=None):
    """The weights that a new process sends, and the number of its buckets."""
    address = f"{folder}/{seed}.sock"
    listener = None if wire == "verl" else Listener(address)
    if wire == "verl":
        address = f"ipc://{address}"
    process = forks.context.Process(target=send, args=(wire, address, seed, names), daemon=True)
    process.start()
    if listener is None:
        receiver = transfer().BucketedWeightReceiver(address, torch.device(device), False)
    else:
        receiver = Receiver(listener.accept(), device)
    weights = collect(receiver)
    process.join(WAIT_S)
    assert process.exitcode == 0
    return weights, getattr(receiver, "buckets", 0)


@pytest.mark.parametrize("wire", WIRES)
def test_weights_of_another_process_arrive(wire, tmp_path):
    device = "cpu" if wire == "cpu" else "cuda:0"
    old, new = make_policy(device, 1), make_policy(device, 2)
    words = ["engine.page_size=16"]
    make = {"device": device, "max_batch": 8, "settings": words}
    with Session.from_pretrained(new, **make) as session:
        wanted = session.generate(jobs(12, seed=1))
    with Session.from_pretrained(old, **make) as session:
        before = session.generate(jobs(12, seed=1))
        weights, buckets = receive(wire, device, tmp_path, 2)
        assert wire == "verl" or buckets > 3
        assert max(weight.nbytes for weight in weights.values()) > BUCKET_BYTES
        for name, weight in new.state_dict().items():
            assert torch.equal(weights[name], weight), name
        session.update_weights(weights, 7)
        got = session.generate(jobs(12, seed=1))
        assert same(got, wanted) and not same(before, wanted)
        assert {response.version for response in got} == {7}
        some, _ = receive(wire, device, tmp_path, 3, names=list(weights)[:2])
        with pytest.raises(UserError, match="is missing"):
            session.update_weights(some, 8)
        assert same(session.generate(jobs(12, seed=1)), wanted)
