"""A session: arrivals, aborts, tools and changes of the engine change no token and no bit."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from driver.common.errors import UserError
from driver.rollout.request import Request, SamplingParams
from driver.session import Session
from tests.driver.rollout.test_bursts import LatePool, Pool, looping
from tests.driver.rollout.test_engine import (
    SETTINGS,
    STRATEGIES,
    Choose,
    observer,
    same,
)

WAIT_S = 60.0  # a test that hangs fails; no test waits so long
STOPS = (3, 5, 7, 11, 13, 17, 19, 23)  # turns end often


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
    with pytest.raises(
        UserError, match="on_end: it must return ids of tokens or None, got 'no ids'"
    ):
        futures[1].result(WAIT_S)
    with pytest.raises(ValueError, match="out of order"):
        futures[2].result(WAIT_S)
    assert same([futures[3].result(WAIT_S)], wanted[3:])
    with pytest.raises(ValueError, match="out of order"):
        session.roll_out(requests[2:], on_end=sometimes)
    assert same(session.generate(requests, on_end=tool), wanted)
