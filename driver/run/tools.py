"""Answers of a task to the turns of the model, with limits and a record of failures."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from ..common.numbers import shown
from ..config.load import Config
from ..config.sections import ToolConfig
from ..model.prompts import PromptEncoder
from ..rollout.request import Response, RunningRequest
from ..session.inbox import OnEnd
from ..tasks import Prompt, Task

SHOWN = 4  # failures of a rollout that have a warning each
MAX_CHARACTERS = 64  # of a token, in the mean of an answer's first tokens


@dataclass
class ToolStats:
    calls: int = 0  # turns that got an answer, or failed to
    cut: int = 0  # answers longer than the limit
    failures: dict[int, str] = field(default_factory=dict)  # by the id of the request

    def add(self, other: ToolStats) -> None:
        self.calls += other.calls
        self.cut += other.cut
        self.failures |= other.failures

    def metrics(self, responses: Sequence[Response]) -> dict[str, float]:
        answers = [len(r.token_ids) - r.num_generated for r in responses]
        return {
            "tool/turns": sum(r.turns for r in responses) / len(responses),
            "tool/answer_tokens": sum(answers) / len(responses),
            "tool/calls": float(self.calls),
            "tool/cut": float(self.cut),
            "tool/failures": float(len(self.failures)),
        }


class Tools:
    """Continues responses with the answers of `Task.respond`, called beside the rollout.

    `respond` is code of the user: it may raise, hang, or return no text. Such a turn ends the
    response, and `stats.failures` names the sample; `stats` are those since the last `start`.
    """

    def __init__(
        self, task: Task, encode: PromptEncoder, config: ToolConfig, timeout_s: float
    ) -> None:
        self.task, self.config, self.timeout_s = task, config, timeout_s
        self._encode = encode.turns
        texts = [encode.tokenizer.encode(text, add_special_tokens=False) for text in task.stop]
        self._kept = {ids[0] for ids in texts if len(ids) == 1}  # stop tokens of a turn's text
        self._lock = threading.Lock()
        self._prompts: Mapping[int, Prompt] = {}
        self.asked: set[Future[str | None]] = set()  # turns without an answer yet
        self.stats = ToolStats()

    @staticmethod
    def of(task: Task, encode: PromptEncoder, config: Config) -> Tools | None:
        """The tools of a task; None if it does not answer turns."""
        return Tools(task, encode, config.tool, config.reward.timeout_s) if task.has_turns else None

    def start(self, prompts: Mapping[int, Prompt]) -> None:
        """Begins a rollout; `prompts` are by the group of their requests."""
        self._prompts, self.stats = prompts, ToolStats()

    def on_end(self, state: RunningRequest) -> Sequence[int] | None:
        """The tokens that follow a turn, or None if it ends the response; for any thread."""
        if state.turn + 1 >= self.config.turns:
            return None
        prompt, tokens = self._prompts[state.request.group], state.turn_tokens
        text = self._encode.text(tokens if tokens[-1] in self._kept else tokens[:-1])
        limit, error = self.config.turn_tokens or state.room, ""
        ids: list[int] = []
        try:
            answer = self._ask(prompt, state.turn, text)
            if answer is None:
                return None
            answer = answer[: (limit + 1) * MAX_CHARACTERS]
            answer.encode()  # its error names the character, the tokenizer's does not
            ids = self._encode.plain(answer)
            error = "" if ids else f"expected a text with tokens, got {shown(answer)}"
        except (Exception, SystemExit) as failure:  # of user code, or a text that is not Unicode
            error = f"{type(failure).__name__}: {failure}"
        with self._lock:
            self.stats.calls += 1
            self.stats.cut += len(ids) > limit
            if error:
                where = f"tool of response {state.request.id} to prompt {prompt.id}"
                self.stats.failures[state.request.id] = f"{where}, turn {state.turn}: {error}"
        return None if error else self._encode.framed(ids[:limit], tokens[-1])

    def report(self) -> None:
        lines = sorted(self.stats.failures.values())
        rest = [f"{len(lines) - SHOWN} more responses: a tool failed"] if lines[SHOWN:] else []
        masked = self.config.on_error == "mask"
        after = "masked out" if masked else "ended there and scored"
        for line in [*lines[:SHOWN], *rest]:
            warnings.warn(f"{line}; {after} (tool.on_error)", stacklevel=2)

    def _ask(self, prompt: Prompt, turn: int, text: str) -> str | None:
        """The answer; raises what `respond` did, or that it was late or returned no text."""
        answered: Future[str | None] = Future()

        def ask() -> None:
            give: Callable[[Any], None]
            value: Any
            try:
                give, value = answered.set_result, self.task.respond(prompt, turn, text)
            except BaseException as error:
                give, value = answered.set_exception, error
            with contextlib.suppress(InvalidStateError):  # it was cancelled
                give(value)

        self.asked.add(answered)
        # A thread cannot be killed; one that hangs must not delay the end of the process.
        threading.Thread(target=ask, name="tool", daemon=True).start()
        try:
            answer = answered.result(self.timeout_s)
        except TimeoutError:
            if answered.done():  # the tool's own
                raise
            raise TimeoutError(f"no answer in reward.timeout_s={self.timeout_s:g}") from None
        finally:
            self.asked.discard(answered)
        if not (answer is None or isinstance(answer, str)):
            raise TypeError(f"expected a text or None, got {shown(answer)}")
        return answer


@contextlib.contextmanager
def answering(tools: Tools | None, prompts: Mapping[int, Prompt]) -> Iterator[OnEnd | None]:
    """Inside the block, `on_end` of the tools continues responses; None: there are no tools.

    The end of the block reports failed turns; after an error it cancels answers in progress.
    """
    if tools is None:
        yield None
        return
    tools.start(prompts)
    try:
        yield tools.on_end
    except BaseException:
        for asked in tuple(tools.asked):  # so that nothing waits for their answers
            asked.cancel()
        raise
    tools.report()
