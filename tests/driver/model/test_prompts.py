"""Prompts are tokenized in one place, in the form that the tokenizer prescribes."""

import warnings

import pytest
from tokenizers.processors import TemplateProcessing

from driver.common.errors import SharedWarning, UserError
from driver.config.options import GenerateOptions, IdentityOptions
from driver.generate import Generator
from driver.identity import Identity
from driver.model import tiny
from driver.model.prompts import PromptEncoder
from driver.policy.warmup import demonstration
from driver.run.assemble import stop_ids
from driver.session.load import end_ids, spec_of
from driver.tasks import make_task
from driver.tasks.calculator import CalculatorTask
from tests.driver.hugging_face import random_model, save_model

BEGIN, END = 2, 1
CHAT = (
    "{% for m in messages %}={{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}+{% endif %}"
)


def make_tokenizer(template=None, chat=None):
    """The tiny model's, whose unknown token is the begin token too, as in GPT-2's family."""
    tokenizer = tiny.build_tokenizer()
    if template:
        tokenizer.bos_token = "<unk>"
        tokenizer._tokenizer.post_processor = TemplateProcessing(
            single=template, special_tokens=[("<unk>", BEGIN), ("<eos>", END)]
        )
    tokenizer.chat_template = chat
    return tokenizer


def ids_of(text):
    return tuple(tiny.build_tokenizer().encode(text))


def save_model_with_begin_token(folder):
    """A model whose tokenizer puts a begin token in front of every text."""
    ends = {"eos_token_id": END, "bos_token_id": BEGIN, "pad_token_id": 0}
    save_model(folder, "qwen2", vocab_size=len(tiny.VOCABULARY), **ends)
    make_tokenizer("<unk> $A").save_pretrained(folder)


@pytest.mark.parametrize(
    ("template", "prefix"),
    [(None, ()), ("<unk> $A", (BEGIN,)), ("<unk> <eos> $A <eos>", (BEGIN, END)), ("$A <eos>", ())],
)
def test_plain_prompts_follow_the_tokenizer_s_own_special_tokens(template, prefix):
    """Those in front are kept; those behind are not, because the response follows."""
    encode = PromptEncoder(make_tokenizer(template))
    assert encode("12+3=") == (*prefix, *ids_of("12+3="))
    assert encode.batch(["1", "2+2="]) == [(*prefix, *ids_of("1")), (*prefix, *ids_of("2+2="))]
    assert encode.batch([]) == []
    assert not encode.uses_template


@pytest.mark.parametrize(
    ("chat", "setting", "is_message", "used"),
    [
        (CHAT, "auto", True, True),
        (CHAT, "auto", False, False),
        (CHAT, "true", False, True),
        (CHAT, "false", True, False),
        (None, "auto", True, False),
        (None, "false", True, False),
    ],
)
def test_the_chat_template_is_used_where_it_applies(chat, setting, is_message, used):
    """Rendered, it has its own begin token, so none is added to it."""
    encode = PromptEncoder(make_tokenizer("<unk> $A", chat), setting, is_message)
    assert encode.uses_template == used
    assert encode("3") == (ids_of("=3+") if used else (BEGIN, *ids_of("3")))
    named = "messages in the tokenizer's chat template" if used else "plain text after <unk>"
    assert named in encode.describe()
    assert ("task.chat_template=true would use" in encode.describe()) == (bool(chat) and not used)


def test_a_prompt_that_is_no_unicode_text_is_one_line():
    with pytest.raises(UserError, match=r"prompt '3.ud800': 'utf-8' codec can't .*; remove the ch"):
        PromptEncoder(make_tokenizer()).batch(["3", "3\ud800"])


def test_a_template_that_is_missing_or_fails_is_one_line():
    with pytest.raises(UserError, match="task.chat_template=true: the tokenizer has no chat"):
        PromptEncoder(make_tokenizer(), "true")
    for chat in ("{{ raise_exception('only system') }}", "{% for %}", "{{ messages[1]['x'] }}"):
        encode = PromptEncoder(make_tokenizer(chat=chat), "true")
        with pytest.raises(UserError, match="chat template fails .*; set task.chat_template=false"):
            encode("3")


@pytest.mark.parametrize(
    ("name", "options", "is_message"),
    [
        ("sums", {}, False),
        ("puzzles", {}, False),
        ("addition", {}, False),
        ("questions", {}, False),
        ("jsonl", {"shots": 0}, True),
        ("jsonl", {"shots": 2}, False),
    ],
)
def test_only_questions_without_worked_examples_are_messages(tmp_path, name, options, is_message):
    if name == "jsonl":
        lines = [f'{{"question": "{n}+1?", "answer": "#### {n + 1}"}}\n' for n in range(8)]
        (tmp_path / "d.jsonl").write_text("".join(lines))
        options = {**options, "path": str(tmp_path / "d.jsonl")}
    assert make_task(name, **options).is_message == is_message


def test_a_chat_response_ends_with_an_end_token_alone():
    spec = spec_of(random_model("qwen2", vocab_size=32, eos_token_id=END, pad_token_id=0))
    task = make_task("addition", shots=0)
    task.stop = ("=",)
    tokenizer = make_tokenizer(chat=CHAT)
    assert stop_ids(spec, task, PromptEncoder(tokenizer, "false")) == (END, *ids_of("="))
    assert stop_ids(spec, task, PromptEncoder(tokenizer, "true")) == (END,)


def test_the_end_tokens_of_model_and_tokenizer_both_end_a_response():
    """The warm-up teaches the tokenizer's."""

    def spec(eos):
        return spec_of(random_model("qwen2", vocab_size=32, eos_token_id=eos, pad_token_id=0))

    tokenizer = make_tokenizer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert end_ids(spec([5, END]), tokenizer) == (5, END)
    with pytest.warns(UserWarning, match=r"tokenizer is 1, .* configuration are \[5\]"):
        assert end_ids(spec(5), tokenizer) == (5, END)
    with pytest.warns(UserWarning, match=r"configuration are \[\]"):
        assert end_ids(spec(None), tokenizer) == (END,)
    tokenizer.eos_token = None
    with pytest.warns(SharedWarning, match="neither the model nor its tokenizer has an end token"):
        assert end_ids(spec(None), tokenizer) == ()
    with pytest.raises(UserError, match="the tokenizer has no end token to teach"):
        demonstration(PromptEncoder(tokenizer), make_task("sums"), 0)


def test_commands_put_the_begin_token_in_front(tmp_path):
    folder = tmp_path / "model"
    save_model_with_begin_token(folder)
    identity = Identity(IdentityOptions(model=str(folder), task="sums", strategies=["ngram:2,1,3"]))
    assert {r.prompt_ids[0] for r in identity.requests(0)} == {BEGIN}
    worked = demonstration(identity.encode, identity.task, 3)
    assert worked.request.prompt_ids == identity.encode(identity.task.prompt("train", 3).text)
    assert worked.request.prompt_ids[0] == BEGIN and BEGIN not in worked.token_ids
    generator = Generator(GenerateOptions(model=str(folder), prompt="1+2=", strategy="off"))
    assert generator.ids == (BEGIN, *ids_of("1+2="))


def test_demonstrations_of_several_turns_have_the_answers_that_a_rollout_would_have():
    tokenizer, task = make_tokenizer(), CalculatorTask()
    prompt = task.prompt("train", 0)
    turns = task.demonstration(prompt)
    worked = demonstration(PromptEncoder(tokenizer), task, 0)
    assert len(worked.tools) == len(turns) - 1 == worked.turns - 1 > 1
    answers = [task.respond(prompt, i, turn) for i, turn in enumerate(turns[:-1])]
    assert [tokenizer.decode(worked.token_ids[a:b]) for a, b in worked.tools] == answers
    ends = [worked.token_ids[a - 1] for a, _ in worked.tools]
    assert {tokenizer.decode([end]) for end in ends} == {">"}  # a stop text ends a turn
    generated = [t for t, g in zip(worked.token_ids, worked.generated, strict=True) if g]
    assert tokenizer.decode(generated) == "".join(turns) + "<eos>"


def test_turns_of_a_chat_end_with_the_end_token():
    """The template puts it behind the model's turn, where the demonstration has it already."""
    tokenizer = make_tokenizer(chat=CHAT.replace("}}", "}}<eos>", 1))
    task = CalculatorTask()
    first, *_ = task.demonstration(task.prompt("train", 0))
    worked = demonstration(PromptEncoder(tokenizer, "true"), task, 0)
    (begin, end), *_ = worked.tools
    assert tokenizer.decode(worked.token_ids[:begin]) == f"{first}<eos>"
    answer = task.respond(task.prompt("train", 0), 0, first)
    assert tokenizer.decode(worked.token_ids[begin:end]) == f"={answer}<eos>+"


def test_a_chat_template_that_drops_messages_cannot_continue():
    encode = PromptEncoder(make_tokenizer(chat="{{ messages[0]['content'] }}"), "true")
    with pytest.raises(UserError, match="cannot continue a conversation"):
        encode.turns("1")


def test_a_demonstration_ends_where_the_task_ends_it():
    class Deaf(CalculatorTask):
        answer = None

        def respond(self, prompt, turn, text):
            return self.answer

    with pytest.raises(UserError, match="turn 0 has no answer"):
        demonstration(PromptEncoder(make_tokenizer()), Deaf(), 0)
    Deaf.answer = 5
    with pytest.raises(UserError, match="turn 0 has the answer 5, no text"):
        demonstration(PromptEncoder(make_tokenizer()), Deaf(), 0)
