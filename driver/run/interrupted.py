"""Rollouts with late arrivals, aborts and tools, and the plain rollouts that they must equal."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from ..rollout.request import Request, Response, RunningRequest
from ..session import Session
from ..session.inbox import OnEnd

MOST_TURNS = 4
ANSWERS = 1, 2, 17, 40  # tokens of an answer; a page has 16
TURN_LIMITS = 0, 0, 24  # tokens of a turn, for requests in turn; 0: no limit
MAX_LATENCY_S = 0.02  # of a tool, and between two actions of the client
ABORT_RATE = 0.3  # of the actions
ABORTS = 1  # of a request on average, at most; with more a large batch would stay small


def with_turn_limits(requests: Sequence[Request]) -> list[Request]:
    limits = [TURN_LIMITS[i % len(TURN_LIMITS)] for i in range(len(requests))]
    return [
        replace(request, params=replace(request.params, max_turn_tokens=limit))
        for request, limit in zip(requests, limits, strict=True)
    ]


def answer(state: RunningRequest) -> list[int] | None:
    """The answer of a tool, a function of the turn alone: a piece of the prompt, or None."""
    draw = random.Random(f"{state.request.id}/{state.turn}/{state.turn_tokens}")
    if state.turn + 1 == MOST_TURNS or draw.random() < 0.2:
        return None
    prompt, count = state.request.prompt_ids, draw.choice(ANSWERS)
    return list(prompt * -(-count // len(prompt)))[:count]


def by_turns(
    generate: Callable[[list[Request]], list[Response]], requests: Sequence[Request], tool: OnEnd
) -> list[Response]:
    """Responses made of a request for each turn, whose prompt is all that came before."""
    states = [RunningRequest.begin(request) for request in requests]
    while running := [state for state in states if state.finish is None]:
        turns = [
            replace(
                state.request,
                prompt_ids=tuple(state.tokens),
                params=replace(state.request.params, max_new_tokens=state.remaining),
            )
            for state in running
        ]
        for state, turn in zip(running, generate(turns), strict=True):
            state.tokens += turn.token_ids
            state.logprobs += turn.logprobs
            state.finish = turn.finish
            if state.finish == "stop" and state.room > 0:
                ids = tool(state)
                if ids is not None:
                    state.answer(ids)
    return [state.response(0) for state in states]


def interrupted(
    session: Session, requests: Sequence[Request], tool: OnEnd, draw: random.Random
) -> tuple[list[Response], Counter[str]]:
    """The responses of a session whose client submits, aborts and resumes at random.

    `draw` chooses what happens; the time at which it happens is not repeatable. Also returns the
    numbers of requests submitted `late`, while others ran, of `aborts` and of `answers`.
    """
    waiting = draw.sample(list(requests), len(requests))
    count = Counter({"late": 0, "aborts": 0, "answers": 0})
    most = max(3, session.engine.config.max_batch // 8)  # fills a large batch, too
    running: dict[Future[Response], Request] = {}
    done: dict[int, Response] = {}

    def slow_tool(state: RunningRequest) -> Sequence[int] | None:
        ids = tool(state)
        time.sleep(MAX_LATENCY_S * random.random())
        count["answers"] += ids is not None
        return ids

    while waiting or running:
        for _ in range(min(len(waiting), draw.randint(0, most))):
            count["late"] += bool(running)
            request = waiting.pop()
            running[session.submit(request, on_end=slow_tool)] = request
        time.sleep(MAX_LATENCY_S * draw.random())
        if count["aborts"] < ABORTS * len(requests) and draw.random() < ABORT_RATE:
            ids = sorted(request.id for request in running.values())
            count["aborts"] += len(session.abort(draw.sample(ids, -(-len(ids) // 3))))
        for future in [future for future in running if future.done()]:
            request, response = running.pop(future), future.result()
            if response.finish == "abort":
                waiting.insert(0, replace(request, resume=response))
            else:
                done[request.id] = response
    return [done[request.id] for request in requests], count
