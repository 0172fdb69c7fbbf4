"""A session is closed, refuses what it cannot do, and is made from models and folders."""

import asyncio
import functools
import gc
import re
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, wait
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from driver.common.errors import UserError
from driver.config.strategy import Strategy
from driver.drafter.eagle3 import drafter_config
from driver.model.spec import read_json
from driver.rollout.request import Request, Response, SamplingParams
from driver.session import Session
from driver.session.inbox import SessionClosed
from driver.session.pretrained import SHARED_FREE_SHARE
from tests.driver.rollout.test_engine import (
    Choose,
    make_rollout,
    observer,
    same,
)
from tests.driver.session.test_session import (
    WAIT_S,
    endless,
    jobs,
    paused,
    short_turns,
)
from tests.kit import same_bits


def test_close_ends_every_request_with_an_error(rollout):
    rollout.engine.bandit = Choose("off")
    session = Session(rollout)
    futures, gate = paused(session, short_turns(jobs(2, seed=19)))
    futures += [session.submit(r) for r in endless(jobs(2, seed=20, new=200))]
    session.close()
    for future in futures:
        with pytest.raises(SessionClosed):
            future.result(WAIT_S)
    gate.open.set()
    assert not session._worker.is_alive()
    for use in (session.submit, session.generate, lambda request: session.roll_out([request])):
        with pytest.raises(SessionClosed, match="the session is closed"):
            use(jobs(1)[0])
    for change in (session.sleep, session.wake, session.abort, lambda: session.update_weights({})):
        with pytest.raises(SessionClosed, match="the session is closed"):
            change()
    session.close()


def test_close_ends_a_session_that_sleeps(rollout):
    rollout.engine.bandit = Choose("off")
    session = Session(rollout)
    futures, gate = paused(session, short_turns(jobs(1, seed=19)))
    session.sleep()
    late = session.submit(jobs(1)[0])
    session.close()
    gate.open.set()
    for future in (*futures, late):
        with pytest.raises(SessionClosed):
            future.result(WAIT_S)
    rollout.engine.cache.memory.restore()


def test_a_cancelled_request_does_not_start(session):
    futures, gate = paused(session, short_turns(jobs(1, seed=21)))
    with session._between_bursts():  # the worker cannot take arrivals
        late = session.submit(jobs(1)[0])
        assert late.cancel()
    gate.open.set()
    futures[0].result(WAIT_S)
    with pytest.raises(CancelledError):
        late.result(WAIT_S)


def test_a_cancelled_request_ends_with_the_tokens_so_far(session):
    """In a rollout, before its first pass, while a tool works, and as a task of asyncio."""
    long = endless(jobs(3, seed=41, new=200))
    whole = session.generate(long)
    futures, gate = paused(session, short_turns(jobs(1, seed=42)))
    futures += [session.submit(r) for r in long[:2]]
    for future in futures:
        assert not future.cancel() or future.cancelled()
    gate.open.set()
    wait(futures, WAIT_S)
    ended = [future.result() for future in futures if not future.cancelled()]
    assert ended and {response.finish for response in ended} == {"abort"}
    resumed = [replace(r.request, resume=r) for r in ended if r.request in long]
    assert same(session.generate(resumed), [whole[long.index(r)] for r in resumed])
    with mock.patch.object(session._inbox, "cancel") as cancel:
        assert not futures[0].cancel() and not cancel.called  # it has ended

    async def stop():
        begun = session.submit(long[2])
        task = asyncio.ensure_future(asyncio.wrap_future(begun))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return begun

    begun = asyncio.run(stop())
    wait([begun], WAIT_S)
    assert begun.cancelled() or begun.result().finish == "abort"
    assert same(session.generate(long), whole)


@pytest.mark.parametrize("cut", [False, True])
def test_a_request_without_room_that_is_aborted_before_it_starts_ends_as_before(session, cut):
    """It has no tokens to generate, or is the continuation of a response at its limit."""
    (request,) = endless(jobs(1, seed=45, new=4 if cut else 0))
    (whole,) = session.generate(request)
    session.sleep()
    session.submit(replace(request, resume=whole) if cut else request)
    (aborted,) = session.abort()
    session.wake()
    assert not aborted.turn_ended
    (resumed,) = session.generate(replace(request, resume=aborted), on_end=lambda state: [7])
    assert (resumed.token_ids, resumed.finish) == (whole.token_ids, "length")


def test_a_response_cut_at_its_limit_resumes_only_with_more_room(session):
    """At the limit of its turn or of all its tokens it ends at once, and others run on."""
    (request,) = endless(jobs(1, seed=46, new=20))
    (whole,) = session.generate(request)
    for changes in ({"max_turn_tokens": 4}, {"max_new_tokens": 4}):
        cut = replace(request, params=replace(request.params, **changes))
        (first,) = session.generate(cut)
        again, other = session.generate([replace(cut, resume=first), request])
        assert (len(first.token_ids), first.finish) == (4, "length")
        assert same([again, other], [first, whole])
        assert same(session.generate(replace(request, resume=first)), [whole])


def test_a_callback_of_an_aborted_request_may_use_the_session(session):
    future, called = session.submit(endless(jobs(1, seed=44, new=200))[0]), []
    future.add_done_callback(lambda _: called.append(session.wake()))
    aborting = threading.Thread(target=session.abort, daemon=True)
    aborting.start()
    aborting.join(WAIT_S)
    assert not aborting.is_alive() and called == [None]


def test_an_interrupted_generate_ends_its_own_requests_only(session, monkeypatch):
    requests = endless(jobs(2, seed=43, new=200))
    other = session.submit(requests[0])

    def interrupt(futures):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("driver.session.session.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.generate(requests)
    assert other.result(WAIT_S).finish == "length"
    assert session.abort() == []


def test_the_thread_of_the_rollout_is_told_to_use_another(session):
    """Otherwise it would wait for itself."""
    raised = []

    def change(*args):
        with pytest.raises(RuntimeError, match="called by the thread of the rollout"):
            session.abort()
        with pytest.raises(RuntimeError, match="called by the thread of the rollout"):
            session.generate(jobs(1))
        raised.append(args)

    with session._between_bursts():  # it cannot end before it has the callback
        future = session.submit(jobs(1)[0])
        future.add_done_callback(change)
    future.result(WAIT_S)
    session.roll_out(jobs(2), observer=observer(on_pass=change))
    assert len(raised) > 2 and session.abort() == []


def test_requests_that_can_never_run_are_refused_at_once(session):
    request = jobs(1)[0]
    with pytest.raises(UserError, match="request 1: token 97 is not in the vocabulary of 97"):
        session.submit(replace(request, id=1, prompt_ids=(97,)))
    with pytest.raises(UserError, match="exceed the 256 of a request"):
        session.submit(replace(request, params=SamplingParams(max_new_tokens=300)))
    with pytest.raises(UserError, match="a text needs a tokenizer"):
        session.generate("text")
    response = session.submit(request).result(WAIT_S)
    stopped = next(r for r in session.generate(jobs(8)) if r.finish == "stop")
    with pytest.raises(UserError, match="resume is a response to request"):
        session.submit(replace(request, id=7, resume=response))
    with pytest.raises(UserError, match="resume has ended with a stop token"):
        session.submit(replace(stopped.request, resume=stopped))
    for changes, match in [
        ({"token_ids": [5, 97], "logprobs": [0.0] * 2}, "request 9: resume: token 97 is not in"),
        ({"token_ids": [5, 6]}, "request 9: resume has 2 tokens and 0 log-probs"),
        (
            {"token_ids": [5, 6], "logprobs": [0.0] * 2, "tools": [(1, 3)]},
            r"request 9: resume has 2 tokens, and a tool wrote .1, 3.",
        ),
    ]:
        made = Response(replace(request, id=9), [], [], "abort")
        with pytest.raises(UserError, match=match):
            session.submit(replace(made.request, resume=replace(made, **changes)))
    with pytest.raises(UserError, match="the id must fit into 64 bits"):
        session.submit(replace(request, id=2**63))
    with pytest.raises(UserError, match="prompt_ids must be a tuple of ints, got a list"):
        session.submit(replace(request, prompt_ids=[1]))
    with pytest.raises(UserError, match="a prompt must be a text, ids or a Request, got 5"):
        session.generate([5, 6])
    with pytest.raises(UserError, match="a prompt must be .* got .0.5."):
        session.generate([[0.5]])
    with pytest.raises(UserError, match="samples: must be at least 1, got 0"):
        session.generate([[5, 6]], samples=0)
    session.sleep()
    with pytest.raises(UserError, match="it sleeps; call wake"):
        session.generate(request)  # would wait for ever in a program of one thread
    session.wake()


REQUEST = Request(1, 0, (5, 6), SamplingParams(max_new_tokens=4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.generate(None), "prompts must be a list, got None"),
        (lambda s: s.generate({5: 6}), "prompts must be a list, got {5: 6}"),
        (lambda s: s.generate([b"ab"]), "must be a text, ids or a Request, got b'ab'"),
        (lambda s: s.generate([[5]], {"top_k": 3}), "got {'top_k': 3} of builtins"),
        (lambda s: s.generate([[5]], samples=1.5), "samples: must be at least 1, got 1.5"),
        (lambda s: s.generate(REQUEST, on_end=3), "on_end: must be a function, got 3"),
        (lambda s: s.generate(replace(REQUEST, id="a")), "id must be an integer, got a str"),
        (lambda s: s.generate(replace(REQUEST, prompt_ids=(5.0,))), "token 5.0 is not in the voc"),
        (lambda s: s.generate(replace(REQUEST, params=None)), "params must be SamplingParams, got"),
        (lambda s: s.generate(replace(REQUEST, resume="a")), "resume must be a response, got a st"),
        (lambda s: s.roll_out(["a"]), "expected a Request, got 'a'"),
        (lambda s: s.roll_out([replace(REQUEST, prompt_ids=(97,))]), "token 97 is not in the voc"),
        (lambda s: s.abort(5), "abort: ids must be those of requests, got 5"),
        (lambda s: s.update_weights({}, version="a"), "version must be an integer, got 'a'"),
        (lambda s: SamplingParams(temperature=None), "temperature: must be a number, got None"),
        (lambda s: SamplingParams(top_k=1.5), "top_k: must be an integer, got 1.5"),
        (lambda s: SamplingParams(stop_ids="a"), "stop_ids: must be a tuple of ids of tokens, got"),
        (lambda s: Session.from_pretrained("tiny", tokenizer=5), "tokenizer: must be a tokenizer"),
        (lambda s: Session.from_pretrained("tiny", drafter=5), "drafter: must be a folder, got 5"),
        (lambda s: Session.from_pretrained("tiny", device=0), "run.device: must be cpu, cuda or"),
        (
            lambda s: Session.from_pretrained("tiny", settings="run.seed=1"),
            "settings: must be a li",
        ),
        (
            lambda s: Session.from_pretrained("tiny", settings=[5]),
            "settings: must be a list of key",
        ),
        (
            lambda s: Session.from_pretrained("tiny", settings={"run.seed": 1}),
            "settings: must be a list of key",
        ),
    ],
)
def test_wrong_types_are_refused(session, call, message):
    with pytest.raises(UserError, match=re.escape(message)):
        call(session)


def test_an_unexpected_error_of_admission_reaches_the_future(session, monkeypatch):
    requests = jobs(2)

    def fails(request):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("driver.rollout.scheduler.RunningRequest.begin", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            session.submit(requests[0]).result(WAIT_S)
    assert len(session.generate(requests)) == 2


def test_models_and_sizes_that_cannot_be_used_are_refused(policy):
    with pytest.raises(UserError, match="model: must be a folder, .* got Sequential; unwrap it"):
        Session.from_pretrained(torch.nn.Sequential(policy))
    with torch.device("meta"):
        empty = type(policy)(policy.config)
    with pytest.raises(UserError, match="model: model.embed_tokens.weight is on the meta device"):
        Session.from_pretrained(empty)
    with pytest.raises(UserError, match="model: a LlamaModel has no head; give a model for causa"):
        Session.from_pretrained(policy.model)
    with pytest.raises(UserError, match="max_len: must be at least 2, .* got 0"):
        Session.from_pretrained(policy, max_len=0)
    with pytest.raises(UserError, match="engine.max_batch: must be at least 1, got 0"):
        Session.from_pretrained(policy, max_batch=0)
    with pytest.raises(UserError, match="tokenizer=/none: no usable tokenizer"):
        Session.from_pretrained(policy, tokenizer="/none")


HUNG_TOOL = """
import os, threading
from driver import SamplingParams, Session

called = threading.Event()

def hang(state):
    called.set()
    threading.Event().wait()

session = Session.from_pretrained("tiny", device="cpu", max_len=128)
future = session.submit([5, 6], SamplingParams(max_new_tokens=99, stop_ids=tuple(range(9))), hang)
assert called.wait(60)
child = os.fork()
if child == 0:
    try:
        session.generate([[5, 6]])
    except RuntimeError as error:
        os._exit(7 if "made before a fork" in str(error) else 8)
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
session.close()
print(type(future.exception(60)).__name__)

open = Session.from_pretrained("tiny", device="cpu")  # and not closed, as after an exception
open.submit([5, 6], SamplingParams(max_new_tokens=3)).result(60)
endless = SamplingParams(max_new_tokens=1000, stop_ids=(99,))
running = [open.submit([5, 6], endless) for _ in range(64)]
raise SystemExit(7)  # would be an abort if the thread of the session were in an op at the exit
"""


def test_neither_a_hung_tool_nor_an_open_session_keeps_the_process_and_a_fork_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", HUNG_TOOL], capture_output=True, text=True, timeout=2 * WAIT_S
    )
    assert (done.returncode, done.stdout) == (7, "SessionClosed\n"), done.stderr


def test_ids_of_prompts_follow_the_order_of_the_calls(policy):
    """Two sessions that are asked the same give the same; samples and calls differ."""
    drawn = []
    for _ in range(2):
        with Session.from_pretrained(policy, device="cpu", max_batch=4, max_len=64) as session:
            params = SamplingParams(max_new_tokens=16)
            drawn.append(session.generate([[6, 7], [8]], params, samples=2))
            drawn[-1] += session.generate([[6, 7]], params)
            assert session.rollout.target.spec.max_position == 64
            assert session.params.stop_ids == (3, 5) == drawn[-1][0].request.params.stop_ids
    assert same(*drawn)
    assert len({tuple(r.token_ids) for r in drawn[0]}) == 5
    assert [r.request.group for r in drawn[0]] == [0, 0, 1, 1, 2]


def test_settings_give_the_params_of_prompts_without_their_own(policy):
    words = ["sampling.temperature=0.5", "sampling.max_new_tokens=9"]
    with Session.from_pretrained(policy, device="cpu", settings=words) as session:
        (response,) = session.generate([[6, 7]])
        assert response.request.params == SamplingParams(0.5, max_new_tokens=9, stop_ids=(3, 5))


def test_from_pretrained_reads_folders_texts_and_drafters(tmp_path):
    make = {"device": "cpu", "seed": 1, "settings": ["engine.page_size=8"]}
    with Session.from_pretrained("tiny", **make) as session:
        params = SamplingParams(max_new_tokens=12)
        (response,) = session.generate("12 + 34 = ", params)
        assert isinstance(session.decode(response), str)
        assert response.request.prompt_ids == session.encode("12 + 34 = ")
        assert session.spot is None and session.engine.cache.page_size == 8
        with pytest.raises(UserError, match="no drafter is trained"):
            session.train_drafter()
    with pytest.raises(UserError, match="has no drafter"):
        Session.from_pretrained("tiny", drafter=str(tmp_path))


def test_the_cache_takes_a_share_of_the_memory(policy, monkeypatch):
    """As many pages as a full batch needs, or as fit beside the weights."""
    make = {"device": "cpu", "max_batch": 8, "max_len": 64, "settings": ["engine.page_size=4"]}
    with Session.from_pretrained(policy, **make) as session:
        assert session.engine.cache.num_pages == 8 * (16 + 1) + 8 * (2 + 1)
        weights = sum(w.nbytes for w in session.rollout.target.state_dict().values())
        cache = session.engine.cache
        page = (cache.k.nbytes + cache.v.nbytes) // cache.num_pages
    free = (weights + 30 * page) / SHARED_FREE_SHARE
    monkeypatch.setattr("driver.session.pretrained._free_bytes", lambda device: free + 1)
    with Session.from_pretrained(policy, **make) as session:
        assert session.engine.cache.num_pages == 30
    make["settings"] = [*make["settings"], "engine.num_pages=50"]
    with Session.from_pretrained(policy, **make) as session:
        assert session.engine.cache.num_pages == 50


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "mode",
    [
        functools.partial(default_dtype, torch.bfloat16),
        torch.inference_mode,
        torch.no_grad,
    ],
)
def test_modes_of_torch_that_a_program_sets_change_nothing(policy, mode):
    words = ["engine.strategies=off ngram:4,1,5 learned:3,1,4", "bandit.epsilon=1"]
    make = {"device": "cpu", "max_batch": 4, "train_drafter": True, "settings": words}

    def use():
        with Session.from_pretrained(policy, **make) as session:
            first = session.generate(jobs(4, seed=47))
            assert session.train_drafter(1) > 0
            session.update_weights(policy.state_dict())
            assert same(session.generate(jobs(4, seed=47)), first)
            return first

    plain = use()
    with mode():
        found = use()
    with torch.device("meta"):  # as torch.set_default_device
        elsewhere = Session.from_pretrained(policy, **make)
    with elsewhere:
        assert same(elsewhere.generate(jobs(4, seed=47)), plain)
    assert same(found, plain)


def test_a_session_trains_its_drafter(policy, tmp_path):
    """During the tail, on the session's own responses, and when it is called."""
    words = ["spot.every=1", "spot.tokens_per_step=32", "spot.swap_every=1"]
    words += ["engine.strategies=off learned:3,1,4", "bandit.policy=learned:3,1,4"]
    make = {"device": "cpu", "max_batch": 4, "train_drafter": True, "settings": words}
    with Session.from_pretrained(policy, **make) as session:
        params = SamplingParams(max_new_tokens=40, stop_ids=(90,))
        first = session.generate([[6, 7]], params, samples=4)
        with session._between_bursts():  # the features are recorded by then
            assert session.spot.buffer.num_tokens > 0
        session.generate([[8, 9]], params, samples=4)
        with session._between_bursts():
            trained = session.spot.steps
        assert trained > 0 and session.spot.runner.version > 0
        assert session.train_drafter(3) == trained + 3
        with pytest.raises(UserError, match="steps: must be at least 0 or None, got 1.5"):
            session.train_drafter(1.5)
        with pytest.raises(UserError, match="folder: must be a path, got None"):
            session.save_drafter(None)
        session.train_drafter()
        session.update_weights(policy.state_dict())
        assert session.spot.target_version == session.engine.target_version == 1
        again = session.generate([r.request for r in first])
        assert same(again, first) and any(r.drafter_versions for r in again)
        assert {r.version for r in again} == {1}
        before = session.spot.runner.version
        session.train_drafter()
        session.save_drafter(tmp_path)
        version, steps = session.spot.runner.version, session.spot.steps
        assert version > before  # it is saved with the final steps
        weights = session.spot.step.average.state_dict()
    exported = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(same_bits(exported[name], weights[name]) for name in weights)
    shape, layers = session.spot.drafter.spec, session.rollout.target.feature_layers
    expected = drafter_config(shape, policy.config.to_dict(), layers, torch.half)
    assert read_json(tmp_path / "config.json") == expected | {"torch_dtype": "float32"}
    make |= {"drafter": str(tmp_path)}
    with Session.from_pretrained(policy, **make) as session:
        assert session.spot.steps == steps
        session.generate([r.request for r in first])
        assert session.train_drafter(3) > steps
    with Session.from_pretrained(policy, device="cpu", drafter=str(tmp_path)) as session:
        assert session.spot.runner.version == version and session.spot.mode == "off"
        session.rollout.fix(Strategy.parse("learned:4,2,8"))
        drafted = session.generate([r.request for r in first])
        assert same(drafted, first) and all(r.drafter_versions == [version] for r in drafted)
        with pytest.raises(UserError, match="no drafter is trained"):
            session.train_drafter()
    with (
        Session.from_pretrained(policy, device="cpu") as session,
        pytest.raises(UserError, match="no drafter to save; give from_pretrained"),
    ):
        session.save_drafter(tmp_path)
    unused = ["engine.strategies=off ngram:4,1,5"]
    for given in ({"drafter": str(tmp_path)}, {"train_drafter": True}):
        with pytest.raises(UserError, match="strategies=off ngram:4,1,5: none uses the drafter"):
            Session.from_pretrained(policy, device="cpu", settings=unused, **given)
    with pytest.raises(UserError, match="learned:3,1,4: a learned or hybrid one needs a drafter"):
        Session.from_pretrained(policy, device="cpu", settings=words)
    words = [*words, "drafter.draft_vocab=50"]
    with pytest.raises(UserError, match="drafter: its shape is not that of the model"):
        Session.from_pretrained(policy, drafter=str(tmp_path), device="cpu", settings=words)


def test_a_session_without_references_is_collected_with_its_thread(policy):
    """As in a notebook, whose cell makes another one; `close` frees the KV cache at once."""
    session = Session.from_pretrained(policy, device="cpu", max_batch=4, max_len=64)
    session.generate([[6, 7]], SamplingParams(max_new_tokens=4))
    worker, gone = session._worker, weakref.ref(session)
    del session
    deadline = time.monotonic() + WAIT_S
    while gone() is not None and time.monotonic() < deadline:  # until the thread sleeps
        gc.collect()
    assert gone() is None
    worker.join(WAIT_S)
    assert not worker.is_alive()
    future = Session.from_pretrained(policy, device="cpu", max_len=64).submit([6, 7, 8])
    gc.collect()
    assert future.result(WAIT_S).token_ids  # it waits for no one
    with Session.from_pretrained(policy, device="cpu", max_batch=4, max_len=64) as session:
        cache = session.engine.cache
    assert cache.k.untyped_storage().nbytes() == 0 < cache.k.nbytes
    session.close()


def test_importing_the_driver_stays_cheap():
    code = "import driver, sys; assert 'torch' not in sys.modules; driver.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "module 'driver' has no attribute 'nothing'" in done.stderr


def test_what_only_training_reads_is_not_recorded_without_it(policy):
    """The final hidden state, a quarter of the features."""
    requests = jobs(6, seed=31)
    made = {mode: make_rollout(policy, f"spot.mode={mode}") for mode in ("off", "serial")}
    found = []
    for mode, rollout in made.items():
        rollout.spot.swap()
        rollout.engine.observer = None
        rollout.engine.bandit = Choose("learned:4,2,8")
        responses = rollout.engine.generate(requests)
        width = rollout.target.spec.hidden_size
        assert rollout.engine.cache.features.shape[2] == (3 if mode == "off" else 4) * width
        passes = rollout.engine.stats.spec_passes
        assert passes > 0
        found.append(([(r.token_ids, r.logprobs) for r in responses], passes))
    assert found[0] == found[1]  # the drafts are the same
