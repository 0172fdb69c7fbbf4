"""A session: arrivals, aborts, tools and changes of the engine change no token and no bit."""

import random
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from driver.common.errors import UserError
from driver.config.strategy import Strategy
from driver.records.checkpoint import save_checkpoint
from driver.rollout.request import Request, SamplingParams
from driver.session import Session
from driver.session.inbox import SessionClosed
from driver.session.pretrained import SHARED_FREE_SHARE
from tests.driver.hugging_face import random_model
from tests.driver.rollout.test_bursts import LatePool, Pool, looping
from tests.driver.rollout.test_engine import (
    SETTINGS,
    STRATEGIES,
    Choose,
    make_rollout,
    observer,
    same,
)

WAIT_S = 60.0  # a test that hangs fails; no test waits so long
STOPS = (3, 5, 7, 11, 13, 17, 19, 23)  # turns end often


@pytest.fixture(scope="module")
def policy():
    return random_model("llama-tied-llama3")


@pytest.fixture(scope="module")
def rollout(policy):
    made = make_rollout(policy, "spot.mode=off", "engine.max_batch=6", "engine.num_pages=160")
    made.spot.swap()  # a drafter with random weights; some of its drafts are accepted
    return made


@pytest.fixture
def session(rollout):
    rollout.engine.bandit, rollout.engine.page_limit = Choose("off"), None
    rollout.engine.forget()
    with Session(rollout) as made:
        yield made
    rollout.engine.page_limit = None


def jobs(count, seed=0, new=40, stops=STOPS):
    rng = random.Random(seed)
    prompts = [[rng.randrange(29, 97) for _ in range(rng.randint(1, 17))] for _ in range(4)]
    return [
        Request(
            rng.randrange(2**62),
            i % 4,
            tuple(prompts[i % 4]),
            SamplingParams(*SETTINGS[i % len(SETTINGS)], rng.randint(new // 2, new), stops),
        )
        for i in range(count)
    ]


def answer(request, turn):
    """What the tool answers to a turn: nothing, a few tokens, or None, which ends the response."""
    rng = random.Random(f"{request.id}/{turn}")
    return None if rng.random() < 0.2 else [rng.randrange(97) for _ in range(rng.randrange(6))]


def tool(state):
    return answer(state.request, state.turn)


def turn_by_turn(session, requests):
    """Plain decoding of each turn, with all earlier tokens as its prompt."""
    session.engine.bandit = Choose("off")
    out = [[[], [], ""] for _ in requests]
    left = dict(enumerate(requests))
    turn = 0
    while left:
        parts = [
            replace(
                r,
                prompt_ids=(*r.prompt_ids, *out[i][0]),
                params=replace(r.params, max_new_tokens=r.params.max_new_tokens - len(out[i][0])),
            )
            for i, r in left.items()
        ]
        for (i, request), part in zip(
            list(left.items()), session.roll_out(parts, record=False), strict=True
        ):
            tokens, logprobs, _ = out[i]
            tokens += part.token_ids
            logprobs += part.logprobs
            out[i][2] = part.finish
            room = request.params.max_new_tokens - len(tokens)
            told = answer(request, turn) if part.finish == "stop" and room else None
            if told is not None:
                tokens += told[:room]
                logprobs += [0.0] * len(told[:room])
                if len(told) >= room:
                    out[i][2] = "length"
                    told = None
            if told is None:
                del left[i]
        turn += 1
    return out


def bits(responses):
    return [
        (r.token_ids, torch.tensor(r.logprobs).view(torch.int32).tolist(), r.finish)
        for r in responses
    ]


def wanted_bits(out):
    return [
        (tokens, torch.tensor(logprobs).view(torch.int32).tolist(), finish)
        for tokens, logprobs, finish in out
    ]


def interrupted(session, requests, seed, chance, latency_s=0.002):
    """Responses to requests that arrive late, are aborted and resumed, and call a slow tool."""
    rng = random.Random(seed)
    delays = {r.id: rng.random() * latency_s for r in requests}

    def slowly(state):
        time.sleep(delays[state.request.id])
        return tool(state)

    todo, done, aborts = list(requests), {}, 0
    running = {}
    while todo or running:
        for _ in range(min(len(todo), rng.randint(1, 4))):
            request = todo.pop()
            running[request.id] = session.submit(request, on_end=slowly)
        time.sleep(rng.random() * latency_s)
        if rng.random() < chance:
            some = None if rng.random() < 0.3 else rng.sample(sorted(running), len(running) // 2)
            for response in session.abort(some):
                assert response.finish == "abort"
                aborts += 1
                todo.append(replace(response.request, resume=response))
        for id, future in list(running.items()):
            if future.done():
                response = running.pop(id).result()
                if response.finish != "abort":
                    done[id] = response
        if not todo and running:
            next(iter(running.values())).result(WAIT_S)
    return [done[r.id] for r in requests], aborts


@pytest.mark.parametrize("pages", [None, 28])
@pytest.mark.parametrize("menu", [["ngram:4,1,5"], ["learned:4,3,12"], ["off", *STRATEGIES]])
def test_interruptions_change_no_bit(session, menu, pages):
    """With 28 pages requests are preempted, and those that wait for a tool lose their pages."""
    requests = jobs(40, seed=len(menu))
    wanted = turn_by_turn(session, requests)
    session.engine.bandit = Choose(*menu, seed=1)
    session.engine.page_limit = pages
    got, aborts = interrupted(session, requests, seed=3, chance=0.5)
    assert bits(got) == wanted_bits(wanted)
    assert aborts > 5 and sum(r.turns for r in got) > 1.5 * len(got)
    lengths = [r.accept_length for r in got if r.accept_length is not None]
    assert min(lengths) == 1 and (max(lengths) > 1 or menu[0].startswith("ngram"))
    for response in got:
        marked = zip(response.generated, response.logprobs, strict=True)
        assert all(logprob == 0.0 for generated, logprob in marked if not generated)
        assert response.num_generated == sum(response.generated)


@pytest.mark.parametrize("pool", [Pool, LatePool])
@pytest.mark.parametrize("pages", [None, 40])
def test_interruptions_of_bursts_change_no_bit(policy, session, pool, pages):
    """The device makes many passes, and requests end, while the host reads earlier ones."""
    requests = jobs(60, seed=31, new=60)
    wanted = turn_by_turn(session, requests)
    made = looping(policy, "spot.mode=off", pool=pool)
    made.engine.bandit = Choose("off", *STRATEGIES, seed=6, horizon=7)
    made.engine.page_limit = pages
    with Session(made) as bursts:
        got, aborts = interrupted(bursts, requests, seed=32, chance=0.5)
    assert bits(got) == wanted_bits(wanted) and aborts > 5


def test_an_arrival_ends_consecutive_bursts(policy):
    """Otherwise it would wait until a running request ends."""
    long, short = endless(jobs(1, seed=33, new=200)) + jobs(1, seed=34, new=4)
    made = looping(policy, "spot.mode=off")
    made.engine.bandit = Choose("off", horizon=2)
    with Session(made) as session:
        unfinished, futures = [], []

        def arrive(active, passes):
            if not futures:
                futures.append(session.submit(short))
                futures[0].add_done_callback(
                    lambda _: unfinished.extend(
                        s.num_emitted for s in made.engine.scheduler.running
                    )
                )

        session.roll_out([long], observer=observer(on_pass=arrive))
        assert futures[0].done() and len(unfinished) == 1 and unfinished[0] < 20


@pytest.mark.slow
def test_interruptions_change_no_bit_of_100k_tokens(session):
    tokens, round_index = 0, 0
    while tokens < 100_000:
        requests = jobs(200, seed=round_index, new=120)
        wanted = turn_by_turn(session, requests)
        session.engine.bandit = Choose("off", *STRATEGIES, seed=round_index)
        session.engine.page_limit = (None, 60)[round_index % 2]
        got, _ = interrupted(session, requests, round_index, chance=0.3)
        session.engine.page_limit = None
        assert bits(got) == wanted_bits(wanted)
        tokens += sum(len(r.token_ids) for r in got)
        round_index += 1


def test_a_rollout_of_the_driver_calls_the_tool(session):
    """`roll_out` in the caller's thread: features of a continued request are those of one pass."""
    requests, kept = jobs(12, seed=5), {}

    def keep(state):
        slots = session.engine.cache.features[state.pages].flatten(0, 1)
        kept.setdefault(state.request.id, []).append(slots[: state.context_len].clone())

    wanted = turn_by_turn(session, requests)
    session.engine.bandit = Choose(*STRATEGIES, seed=2)
    got = session.roll_out(requests, observer=observer(keep), on_end=tool)
    assert bits(got) == wanted_bits(wanted) and max(r.turns for r in got) > 2
    # Resumed just before their last token, they are recomputed from the first token on.
    again = [last_token_again(r) for r in got if r.token_ids]
    session.roll_out(again, observer=observer(keep))
    pairs = [k for r, k in zip(got, kept.values(), strict=True) if len(k) == 2]
    assert len(pairs) > 6
    for one, other in pairs:
        count = min(len(one), len(other))
        assert count > 0 and torch.equal(one[:count], other[:count])


def test_the_drafter_writes_the_entries_of_answers(session):
    """Its cache has the bits that it has if all tokens were known before its first draft."""
    runner, size = session.spot.runner, session.engine.cache.page_size
    requests, found = jobs(24, seed=35, new=60), {}

    def take(state):
        slots = [state.pages[t // size] * size + t % size for t in range(state.draft_len)]
        rows = [cache.flatten(0, 1)[slots] for cache in (runner.k, runner.v)]
        found.setdefault(state.request.id, []).append(torch.cat(rows, -1))

    session.engine.bandit = Choose("learned:4,3,12", "off", "ngram:4,1,5", seed=3)
    got = session.roll_out(requests, observer=observer(take), on_end=tool)
    session.engine.bandit = Choose("learned:4,3,12")
    several = [r for r in got if r.turns > 1 and r.token_ids]
    session.roll_out([last_token_again(r) for r in several], observer=observer(take))
    compared = 0
    for response in several:
        one, other = found[response.request.id]
        count = min(len(one), len(other))
        assert torch.equal(one[:count], other[:count])
        compared += count
    assert compared > 300


def last_token_again(response):
    """A request that goes on before the last token of a response, without its tools."""
    kept = {"token_ids": response.token_ids[:-1], "logprobs": response.logprobs[:-1]}
    resume = replace(response, **kept, tools=[], turn_ended=False, finish="abort")
    return replace(response.request, resume=resume)


def test_turns_have_a_limit_of_their_own(session):
    params = SamplingParams(1.0, 0, 1.0, 40, STOPS, max_turn_tokens=6)
    requests = [replace(r, params=params) for r in jobs(12, seed=8)]
    got = session.generate(requests, on_end=tool)
    lengths = []
    for r in got:
        edges = [0, *(edge for tool in r.tools for edge in tool), len(r.token_ids)]
        lengths += [end - begin for begin, end in zip(edges[::2], edges[1::2], strict=True)]
        cut = r.finish == "length" and len(r.token_ids) < 40
        assert (lengths[-1] == 6) or not cut
    assert max(lengths) == 6 and any(r.turns > 1 for r in got)


def test_two_threads_submit(session):
    requests = jobs(40, seed=9)
    wanted = turn_by_turn(session, requests)
    session.engine.bandit = Choose("off", *STRATEGIES, seed=4)
    halves = requests[::2], requests[1::2]
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda half: session.generate(half, on_end=tool), halves))
    for half, responses in zip((wanted[::2], wanted[1::2]), got, strict=True):
        assert bits(responses) == wanted_bits(half)


class Gate:
    """A tool that answers when the test lets it."""

    def __init__(self):
        self.called, self.open = threading.Semaphore(0), threading.Event()

    def __call__(self, state):
        self.called.release()
        assert self.open.wait(WAIT_S)
        return tool(state)


def paused(session, requests):
    """Futures of requests whose first turn has ended, and the gate of their tool."""
    gate = Gate()
    futures = [session.submit(r, on_end=gate) for r in requests]
    for _ in requests:
        assert gate.called.acquire(timeout=WAIT_S)
    return futures, gate


def endless(requests):
    """Requests that end at their limit only."""
    return [replace(r, params=replace(r.params, stop_ids=())) for r in requests]


def short_turns(requests):
    """Requests whose turns end soon, with any token."""
    return [
        replace(r, params=replace(r.params, temperature=1.0, stop_ids=tuple(range(16))))
        for r in requests
    ]


def several_turns(session, count, seed):
    """Requests of several turns, with their responses."""
    requests = short_turns(jobs(4 * count, seed=seed))
    got = session.generate(requests, on_end=tool)
    chosen = [(q, r) for q, r in zip(requests, got, strict=True) if r.turns > 1][:count]
    assert len(chosen) == count
    return [q for q, _ in chosen], [r for _, r in chosen]


def test_a_tool_holds_up_nobody_and_its_wait_does_not_spin(session, monkeypatch):
    requests, wanted = several_turns(session, 8, seed=10)
    futures, gate = paused(session, requests)  # more than fit into a batch
    others = jobs(3, seed=11)
    assert len(session.generate(others)) == 3
    assert not any(future.done() for future in futures)
    looks, due = [], session._inbox.due
    monkeypatch.setattr(session._inbox, "due", lambda s: looks.append(1) or due(s))
    other = threading.Thread(target=time.sleep, args=(0.2,))
    other.start()
    other.join()
    assert len(looks) < 10
    gate.open.set()
    assert same([f.result(WAIT_S) for f in futures], wanted)


def test_sleep_frees_the_memory_and_unfinished_requests_go_on(session):
    requests, wanted = several_turns(session, 3, seed=12)
    futures, gate = paused(session, requests)
    late = session.submit(endless(jobs(1, seed=13, new=60))[0])
    cache, runner = session.engine.cache, session.spot.runner
    arrays = (cache.k, cache.v, cache.features, runner.k, runner.v)
    session.sleep()
    session.sleep()  # does nothing more
    assert [a.untyped_storage().nbytes() for a in arrays] == [0] * 5
    gate.open.set()
    more = session.submit(requests[0], on_end=tool)
    with pytest.raises(UserError, match="it sleeps; call wake"):
        session.roll_out(requests)
    assert not more.done() and not any(f.done() for f in futures)
    session.wake()
    assert [a.untyped_storage().nbytes() for a in arrays] == [a.nbytes for a in arrays]
    assert same([f.result(WAIT_S) for f in futures], wanted)
    assert same([more.result(WAIT_S)], wanted[:1])
    session.engine.bandit = Choose("off")
    late = late.result(WAIT_S)
    assert same(session.generate(late.request), [late])


def test_new_weights_take_effect_between_two_passes(session, policy):
    """Requests keep their tokens; what follows is what the new policy gives after them."""
    requests, _ = several_turns(session, 3, seed=14)
    old = session.rollout.target.state_dict()
    old = {name: weight.clone() for name, weight in old.items()}
    gen = torch.Generator().manual_seed(0)
    new = {n: w + 0.05 * torch.randn(w.shape, generator=gen) for n, w in old.items()}
    session.engine.bandit = Choose("off", *STRATEGIES, seed=5)
    futures, gate = paused(session, requests)
    running = endless(jobs(2, seed=15, new=200))
    busy = [session.submit(r) for r in running]
    before = session.engine.target_version
    session.update_weights(iter(new.items()), version=before + 7)
    gate.open.set()
    got = [f.result(WAIT_S) for f in futures]
    after = [f.result(WAIT_S) for f in busy]
    assert {r.version for r in (*got, *after)} == {before + 7}
    for response in got:
        first = response.tools[0][1]
        prefix = (*response.request.prompt_ids, *response.token_ids[:first])
        params = replace(
            response.request.params, max_new_tokens=response.request.params.max_new_tokens - first
        )
        alone = replace(response.request, prompt_ids=prefix, params=params)
        (rest,) = session.generate([alone])
        count = len(rest.token_ids)
        assert response.token_ids[first : first + count] == rest.token_ids
        assert response.logprobs[first : first + count] == rest.logprobs
    session.update_weights(old)
    assert session.engine.target_version == before + 8
    stale = session.generate(running)
    session.update_weights(new)
    for response, other in zip(after, stale, strict=True):
        # Tokens of the old policy, then what the new one gives after them.
        pairs = zip(response.token_ids, other.token_ids, strict=True)
        count = next((i for i, (one, two) in enumerate(pairs) if one != two), 0)
        begun = replace(other, token_ids=other.token_ids[:count], logprobs=other.logprobs[:count])
        (rest,) = session.generate([replace(response.request, resume=begun)])
        assert rest.token_ids == response.token_ids
        assert rest.logprobs[count:] == response.logprobs[count:]
    assert not same(after, stale)
    session.update_weights(old)


def test_weights_that_do_not_fit_are_refused(session):
    weights = session.rollout.target.state_dict()
    name = "model.norm.weight"
    with pytest.raises(UserError, match=f"{name} has shape .3., config.json makes it .48."):
        session.update_weights((weights | {name: torch.zeros(3)}).items())
    with pytest.raises(UserError, match="what is not a tensor of"):
        session.update_weights((weights | {"what": torch.zeros(3)}).items())
    with pytest.raises(UserError, match="is missing"):
        session.update_weights([(name, weights[name])])


def test_an_error_of_the_engine_reaches_every_future_and_the_session_goes_on(session, monkeypatch):
    requests = jobs(8, seed=16)
    wanted = session.generate(requests)
    futures, gate = paused(session, short_turns(jobs(2, seed=17)))

    def fails(*args):
        raise RuntimeError("the device failed")

    with monkeypatch.context() as patch:
        patch.setattr(session.engine.program, "run", fails)
        futures += [session.submit(r) for r in requests]
        for future in futures:
            with pytest.raises(RuntimeError, match="the device failed"):
                future.result(WAIT_S)
    gate.open.set()  # the answers come too late
    assert same(session.generate(requests), wanted)


def test_an_error_of_a_tool_is_that_of_its_request(session):
    requests, wanted = several_turns(session, 4, seed=18)
    answers = {requests[0].id: [97], requests[1].id: "no ids"}

    def sometimes(state):
        if state.request.id == requests[2].id:
            raise ValueError("out of order")
        return answers.get(state.request.id) or tool(state)

    futures = [session.submit(r, on_end=sometimes) for r in requests]
    with pytest.raises(UserError, match="on_end: token 97 is not in the vocabulary of 97"):
        futures[0].result(WAIT_S)
    with pytest.raises(UserError, match="on_end: it returned a text; return its ids or None"):
        futures[1].result(WAIT_S)
    with pytest.raises(ValueError, match="out of order"):
        futures[2].result(WAIT_S)
    assert same([futures[3].result(WAIT_S)], wanted[3:])
    with pytest.raises(ValueError, match="out of order"):
        session.roll_out(requests[2:], on_end=sometimes)
    assert same(session.generate(requests, on_end=tool), wanted)


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
    with pytest.raises(SessionClosed, match="the session is closed"):
        session.submit(jobs(1)[0])
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
    rollout.allocate()


def test_a_cancelled_request_does_not_start(session):
    futures, gate = paused(session, short_turns(jobs(1, seed=21)))
    with session._between_bursts():  # the worker cannot take arrivals
        late = session.submit(jobs(1)[0])
        assert late.cancel()
    gate.open.set()
    futures[0].result(WAIT_S)
    with pytest.raises(CancelledError):
        late.result(WAIT_S)


def test_the_thread_of_the_rollout_is_told_to_use_another(session):
    """Otherwise it would wait for itself."""
    raised = []

    def change(*args):
        with pytest.raises(RuntimeError, match="called by the thread of the rollout"):
            session.abort()
        with pytest.raises(RuntimeError, match="called by the thread of the rollout"):
            session.generate(jobs(1))
        raised.append(args)

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


def test_an_unexpected_error_of_admission_reaches_the_future(session, monkeypatch):
    requests = jobs(2)
    with monkeypatch.context() as patch:
        patch.setattr(Request, "check", lambda self, *limits: None)
        future = session.submit(replace(requests[0], prompt_ids=[5, 6]))
        with pytest.raises(TypeError, match="unhashable"):
            future.result(WAIT_S)
    assert len(session.generate(requests)) == 2


def test_models_and_sizes_that_cannot_be_used_are_refused(policy):
    with pytest.raises(UserError, match="model: must be a folder, .* got Sequential; unwrap it"):
        Session.from_pretrained(torch.nn.Sequential(policy))
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
"""


def test_a_hung_tool_does_not_keep_the_process_and_a_fork_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", HUNG_TOOL], capture_output=True, text=True, timeout=2 * WAIT_S
    )
    assert (done.returncode, done.stdout) == (0, "SessionClosed\n"), done.stderr


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


def test_from_pretrained_reads_folders_texts_and_drafters(tmp_path):
    with Session.from_pretrained("tiny", seed=1, settings=["engine.page_size=8"]) as session:
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
        session.train_drafter()
        session.update_weights(policy.state_dict())
        assert session.spot.target_version == session.engine.target_version == 1
        again = session.generate([r.request for r in first])
        assert same(again, first) and any(r.drafter_versions for r in again)
        assert {r.version for r in again} == {1}
        states = {"spot": session.spot.state_dict()}
        saved = save_checkpoint(tmp_path, 1, policy.save_pretrained, states, keep=1)
        version = session.spot.runner.version
    with Session.from_pretrained(policy, device="cpu", drafter=str(saved.path)) as session:
        assert session.spot.runner.version == version and session.spot.mode == "off"
        session.rollout.fix(Strategy.parse("learned:4,2,8"))
        drafted = session.generate([r.request for r in first])
        assert same(drafted, first) and all(r.drafter_versions == [version] for r in drafted)
        with pytest.raises(UserError, match="no drafter is trained"):
            session.train_drafter()
    words = [*words, "drafter.draft_vocab=50"]
    with pytest.raises(UserError, match="drafter: its shape is not that of the model"):
        Session.from_pretrained(policy, drafter=str(saved.path), device="cpu", settings=words)


def test_importing_the_driver_stays_cheap():
    code = "import driver, sys; assert 'torch' not in sys.modules; driver.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "module 'driver' has no attribute 'nothing'" in done.stderr
