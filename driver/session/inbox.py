"""Queues the requests that arrive at a session, and calls the tools that continue them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from operator import index
from typing import Any

from ..common.errors import UserError
from ..common.numbers import shown
from ..rollout.request import Request, Response, RunningRequest
from ..rollout.scheduler import Scheduler
from ..rollout.source import RequestSource

OnEnd = Callable[[RunningRequest], Sequence[int] | None]
Change = Callable[[Scheduler], list[RunningRequest]]  # returns the interrupted requests


class SessionClosed(RuntimeError):
    """The session was closed before the request had finished."""


def check_ids(where: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises UserError if a token is not in the vocabulary."""
    wrong = next((t for t in ids if not (hasattr(t, "__index__") and 0 <= t < vocab_size)), None)
    if wrong is not None:
        raise UserError(
            f"{where}: token {wrong} is not in the vocabulary of {vocab_size}; use the model's own"
            " tokenizer"
        )


class Ticket(Future[Response]):
    """A submitted request: the future of its response."""

    def __init__(self, request: Request, on_end: OnEnd | None, inbox: Inbox, owner: Any) -> None:
        super().__init__()
        self.request, self.on_end, self._inbox = request, on_end, inbox
        self.owner = owner  # the session, referenced as long as the request waits

    def cancel(self) -> bool:
        """Cancels a waiting request, or aborts a running one after its burst and returns False."""
        if super().cancel():
            return True
        if not self.done():
            self._inbox.cancel(self)
        return False


class Inbox(RequestSource):
    """Arrivals, answers of tools, and changes of the engine by other threads.

    The thread of a rollout calls `due`, `exchange` and `ended`. Other threads call the rest.

    Attributes:
        engine: a lock, held by the thread that uses the engine.
        on_end: of requests without a ticket.
        poll_s: longest wait for a tool while there is an observer; None = no limit.
        kv_lost: set by a change after which the KV cache has to be computed again.
        asleep, mixed: the engine's memory is released; an update of the weights failed halfway.
    """

    def __init__(self, engine: threading.Lock, vocab_size: int) -> None:
        self.engine, self.vocab_size, self.version = engine, vocab_size, 0
        self.on_end: OnEnd | None = None
        self.poll_s: float | None = None
        self.kv_lost = self.asleep = self.mixed = self.closed = False
        self.tickets: dict[RunningRequest, Ticket] = {}  # of the rollout
        self._arrivals: deque[Ticket] = deque()
        self._changes: deque[Change] = deque()  # by cancelled tickets and answers of tools
        self._wanted = 0  # threads that wait for the engine
        self._changed = threading.Condition()

    # ---- called by other threads ----------------------------------------------------------------

    def put(self, tickets: Sequence[Ticket]) -> None:
        """Adds arrivals, whose equal prompts are computed once; SessionClosed if it is closed."""
        with self._changed:
            if self.closed:
                raise SessionClosed("the session is closed")
            self._arrivals += tickets
            self._changed.notify_all()

    def cancel(self, ticket: Ticket) -> None:
        self._post(partial(self._drop, ticket))

    @property
    def held(self) -> bool:
        """Whether requests wait for the engine's memory or weights."""
        return (self.asleep or self.mixed) and not self.closed

    def wait(self) -> Any:
        """Waits for an arrival and returns its session; None once that is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or (self._arrivals and not self.held))
            return None if self.closed else self._arrivals[0].owner

    def close(self) -> None:
        """Ends the running rollout, and every request with an error."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    @contextmanager
    def between_bursts(self) -> Iterator[None]:
        """Inside the block, no thread uses the engine; a running rollout waits between bursts."""
        with self._changed:
            self._wanted += 1
            self._changed.notify_all()
        try:
            with self.engine:
                yield
        finally:
            with self._changed:
                self._wanted -= 1
                self._changed.notify_all()

    def abort(
        self, chosen: Callable[[Ticket], bool], remove: Callable[[RunningRequest], None]
    ) -> list[tuple[Ticket, Response]]:
        """Removes requests while no thread uses the engine; returns tickets and responses."""
        aborted = []
        for state, ticket in list(self.tickets.items()):
            if chosen(ticket):
                del self.tickets[state]
                remove(state)
                aborted.append((ticket, state.response(self.version, aborted=True)))
        for ticket in self._withdraw(chosen):
            if ticket.set_running_or_notify_cancel():
                state = RunningRequest.begin(ticket.request)
                aborted.append((ticket, state.response(self.version, aborted=True)))
        return aborted

    def fail(self, error: BaseException) -> None:
        tickets = list(self.tickets.values())
        arrivals = self._withdraw(lambda ticket: True)
        tickets += [t for t in arrivals if t.set_running_or_notify_cancel()]
        self.tickets.clear()
        for ticket in tickets:
            ticket.set_exception(error)

    def _withdraw(self, chosen: Callable[[Ticket], bool]) -> list[Ticket]:
        with self._changed:
            taken = [ticket for ticket in self._arrivals if chosen(ticket)]
            self._arrivals = deque(t for t in self._arrivals if t not in taken)
        for ticket in taken:
            ticket.owner = None
        return taken

    # ---- called by the rollout ------------------------------------------------------------------

    def due(self, scheduler: Scheduler) -> bool:
        return bool(self._arrivals or self._changes or self._wanted or self.closed)

    def exchange(self, scheduler: Scheduler) -> list[RunningRequest]:
        interrupted: list[RunningRequest] = []
        while True:
            if self._wanted:
                interrupted += self._give_way(scheduler)
            if self.closed:
                raise SessionClosed("the session was closed while requests ran")
            while self._arrivals:
                self._admit(scheduler, self._arrivals.popleft())
            while self._changes:
                interrupted += self._changes.popleft()(scheduler)
            if not (scheduler.idle and scheduler.paused):
                return interrupted
            scheduler.release()  # finished requests need not wait for the tools
            with self._changed:
                if not self._changed.wait_for(lambda: self.due(scheduler), self.poll_s):
                    return interrupted

    def ended(self, state: RunningRequest) -> bool:
        """Starts the tool of a request, or delivers the response."""
        ticket = self.tickets.get(state)
        on_end = self.on_end if ticket is None else ticket.on_end
        if on_end is not None and state.finish == "stop" and state.room > 0:
            # One that hangs must not keep the process from ending.
            call = threading.Thread(target=self._call, args=(state, on_end), daemon=True)
            call.start()
            return True
        self._deliver(state)
        return False

    def _call(self, state: RunningRequest, on_end: OnEnd) -> None:
        answer: Future[Sequence[int] | None] = Future()
        try:
            answer.set_result(on_end(state))
        except BaseException as error:  # a tool may raise SystemExit
            answer.set_exception(error)
        self._post(partial(self._continue, state, answer))

    def _post(self, change: Change) -> None:
        with self._changed:
            self._changes.append(change)
            self._changed.notify_all()

    def _give_way(self, scheduler: Scheduler) -> list[RunningRequest]:
        scheduler.release()  # the drafter's features are those of the old policy
        self.engine.release()
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._wanted and not self.held)
        finally:
            self.engine.acquire()
        lost, self.kv_lost = self.kv_lost, False
        return scheduler.drop_kv() if lost else []

    def _drop(self, ticket: Ticket, scheduler: Scheduler) -> list[RunningRequest]:
        dropped = [state for state, other in self.tickets.items() if other is ticket]
        for _, response in self.abort(lambda other: other is ticket, scheduler.remove):
            ticket.set_result(response)
        return dropped

    def _admit(self, scheduler: Scheduler, ticket: Ticket) -> None:
        ticket.owner = None
        if not ticket.set_running_or_notify_cancel():
            return
        try:
            (state,) = scheduler.add([ticket.request])
        except BaseException as error:  # `fail` does not find this ticket
            ticket.set_exception(error)
            raise
        self.tickets[state] = ticket
        if state.finish and self.ended(state):
            scheduler.paused.append(state)

    def _continue(
        self, state: RunningRequest, answer: Future[Sequence[int] | None], scheduler: Scheduler
    ) -> list[RunningRequest]:
        if state not in scheduler.paused:  # aborted, or of a rollout that an error ended
            return []
        try:
            tokens = answer.result()
            if tokens is None:
                scheduler.end(state)
            else:
                scheduler.resume(state, self._checked(tokens))
        except BaseException as error:
            if state not in self.tickets:
                raise
            scheduler.remove(state)
            self.tickets.pop(state).set_exception(error)
            return [state]
        if state.finish:
            self._deliver(state)
        return []

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        try:
            ids = [index(token) for token in tokens]
        except TypeError:
            raise UserError(
                f"on_end: it must return ids of tokens or None, got {shown(tokens)}"
            ) from None
        check_ids("on_end", ids, self.vocab_size)
        return ids

    def _deliver(self, state: RunningRequest) -> None:
        if ticket := self.tickets.pop(state, None):
            ticket.set_result(state.response(self.version))
