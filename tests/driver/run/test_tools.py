"""Answers to turns: limits, texts that must not control the model, and every way to fail."""

import threading
import time

import pytest

from driver.config.sections import ToolConfig
from driver.model import tiny
from driver.model.prompts import PromptEncoder
from driver.rollout.request import Request, Response, RunningRequest, SamplingParams
from driver.run.tools import SHOWN, Tools
from driver.tasks import Prompt, Task

CHAT = (
    "{% for m in messages %}={{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}+{% endif %}"
)


class Echo(Task):
    """Does as the turn says; other turns are repeated in the answer."""

    name, stop = "echo", (">",)

    def __init__(self):
        self.asked, self.free = [], threading.Event()

    def respond(self, prompt, turn, text):
        self.asked.append((prompt.id, turn, text))
        orders = {"0": None, "1": "", "2": 7, "3": "\ud800", "4": "9" * 10_000, "5": "<eos>1<pad>"}
        if text == "6>":
            raise KeyError("no such page")
        if text == "7>":
            self.free.wait(60)
        if text == "8>":
            raise TimeoutError("of the tool")
        if text == "9>":
            raise SystemExit(3)  # argparse does so
        return orders.get(text.strip(">"), text)


def make(chat=None, timeout_s=60.0, **config):
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = chat
    task = Echo()
    encode = PromptEncoder(tokenizer, is_message=chat is not None)
    tools = Tools(task, encode, ToolConfig(**config), timeout_s)
    tools.start({n: Prompt(f"echo/train/{n}", "", "") for n in range(10)})
    return tools, task, tokenizer


def ended(text, group=3, before=(), end=None):
    """A request whose turn ended with `text`; `before` are earlier turns and their answers."""
    encode, state = tiny.build_tokenizer().encode, None
    state = RunningRequest(Request(40 + group, group, (4,), SamplingParams()), [4], finish="stop")
    for turn, answer in before:
        begin = state.num_emitted + len(turn)
        state.tokens += encode(turn) + encode(answer)
        state.tools.append((begin, begin + len(answer)))
    state.tokens += encode(text) + ([] if end is None else [end])
    return state


def test_a_turn_has_its_stop_text_but_not_the_models_end_token():
    tools, task, tokenizer = make()
    end = tokenizer.eos_token_id
    first = tools.on_end(ended("<12>"))
    second = tools.on_end(ended("34", before=[("<12>", "<12>"), ("5>", "678")], end=end))
    assert task.asked == [("echo/train/3", 0, "<12>"), ("echo/train/3", 2, "34")]
    assert (tokenizer.decode(first), tokenizer.decode(second)) == ("<12>", "34")
    assert tools.on_end(ended("0>")) is None and not tools.stats.failures
    assert tools.stats.calls == 2  # a turn that ends the response calls no tool


def test_no_turn_follows_the_last_one():
    tools, task, _ = make(turns=2)
    assert tools.on_end(ended("<1>")) is not None
    assert tools.on_end(ended("<1>", before=[("2>", "3")])) is None
    assert len(task.asked) == 1


def test_long_answers_are_cut_in_tokens_and_counted():
    tools, *_ = make(turn_tokens=5)
    assert len(tools.on_end(ended("4>"))) == 5 and tools.stats.cut == 1
    assert len(tools.on_end(ended("12345"[:4] + ">"))) == 5 and tools.stats.cut == 1
    assert not tools.stats.failures


def test_special_tokens_in_an_answer_are_plain_characters():
    tools, _, tokenizer = make()
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    assert special & set(tokenizer.encode("<eos>1<pad>"))
    ids = tools.on_end(ended("5>"))
    assert not special & set(ids) and len(ids) == len("<eos>1<pad>")
    # The tokenizer of the prompts reads its special tokens as before.
    assert tokenizer.encode("<eos>") == [tokenizer.eos_token_id]


def test_with_a_chat_template_an_answer_is_the_next_message():
    """The model has ended its turn, so the template's end token of that turn is not repeated."""
    tools, task, tokenizer = make(CHAT, turn_tokens=2)
    ids = tools.on_end(ended("123", end=tokenizer.eos_token_id))
    assert tokenizer.decode(ids) == "=12<eos>+"
    assert ids.count(tokenizer.eos_token_id) == 1 and task.asked[0][2] == "123"


def test_the_end_of_a_turn_is_not_repeated():
    """That of the template may be an end token of the model alone, not of its tokenizer."""
    tools, _, tokenizer = make(chat=CHAT.replace("eos_token", "'<pad>'"))
    end, pad = tokenizer.convert_tokens_to_ids(["<eos>", "<pad>"])
    assert tokenizer.decode(tools.on_end(ended("12", end=pad))) == "=12<pad>+"
    assert tokenizer.decode(tools.on_end(ended("12", end=end))) == "<pad>=12<pad>+"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1>", "expected a text with tokens, got ''"),
        ("2>", "TypeError: expected a text or None, got 7"),
        ("3>", "Unicode"),
        ("6>", "KeyError: 'no such page'"),
        ("7>", "TimeoutError: no answer in reward.timeout_s=0.1"),
        ("8>", "TimeoutError: of the tool"),
        ("9>", "SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("on_error", ["end", "mask"])
def test_a_failure_ends_the_response_and_names_the_sample(text, reason, on_error):
    tools, task, _ = make(timeout_s=0.1 if text == "7>" else 60.0, on_error=on_error)
    try:
        assert tools.on_end(ended(text, group=5)) is None
    finally:
        task.free.set()
    (message,) = tools.stats.failures.values()
    assert list(tools.stats.failures) == [45] and tools.stats.calls == 1
    assert message.startswith("tool of response 45 to prompt echo/train/5, turn 0: ")
    assert reason in message
    after = "scored" if on_error == "end" else "masked out"
    with pytest.warns(UserWarning, match=after) as caught:
        tools.report()
    assert len(caught) == 1 and reason in str(caught[0].message)


def test_a_tool_that_hangs_delays_no_other_answer_and_not_the_end_of_the_process():
    tools, task, _ = make()
    waiting = threading.Thread(target=tools.on_end, args=(ended("7>"),), daemon=True)
    waiting.start()
    while not task.asked:
        time.sleep(0.001)
    assert tools.on_end(ended("<12>")) is not None and waiting.is_alive()
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "tool")
    task.free.set()
    waiting.join(60)
    assert not waiting.is_alive()


def test_many_failures_have_few_warnings():
    tools, *_ = make()
    for group in range(SHOWN + 3):
        tools.on_end(ended("6>", group))
    with pytest.warns(UserWarning) as caught:
        tools.report()
    assert len(caught) == SHOWN + 1 and "3 more responses" in str(caught[-1].message)


def test_metrics_are_means_over_responses_and_counts():
    tools, *_ = make()
    for text in ("<1>", "6>", "0>"):
        tools.on_end(ended(text))
    request = Request(1, 1, (4,), SamplingParams())
    responses = [
        Response(request, list(range(10)), [0.0] * 10, "stop", tools=[(2, 5), (7, 8)]),
        Response(request, list(range(4)), [0.0] * 4, "length"),
    ]
    assert tools.stats.metrics(responses) == {
        "tool/turns": 2.0,
        "tool/answer_tokens": 2.0,
        "tool/calls": 2.0,
        "tool/cut": 0.0,
        "tool/failures": 1.0,
    }
