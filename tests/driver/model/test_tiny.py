"""The tiny policy: tokenizer, model folder, warm-up."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from driver.common.errors import SharedWarning, UserError
from driver.config.load import load_config
from driver.config.sections import ModelConfig, WarmupConfig
from driver.model.checkpoint import load_model
from driver.model.prompts import PromptEncoder
from driver.model.tiny import CHARACTERS, VOCABULARY, build_policy, build_tokenizer
from driver.policy.warmup import cross_entropy, demonstration, demonstrations, warm_up
from driver.tasks import Prompt, make_task
from driver.tasks.calculator import CalculatorTask

SHAPE = ModelConfig(hidden_size=64, num_layers=2)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def encode(tokenizer):
    return PromptEncoder(tokenizer)


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_tokenizer_round_trip(tokenizer):
    assert len(tokenizer) == len(VOCABULARY) == 32
    assert tokenizer.decode(tokenizer.encode(CHARACTERS)) == CHARACTERS
    for index in range(50):
        task = make_task("sums")
        prompt = task.prompt("train", index)
        text = prompt.text + task.demonstration(prompt)
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("") == []
    assert tokenizer.encode("a7") == [tokenizer.unk_token_id, tokenizer.encode("7")[0]]
    specials = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    assert len(specials) == 3


def test_folder_loads_in_transformers(tmp_path, tokenizer):
    model = build_policy(SHAPE, seed=0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in tmp_path.iterdir()
    }
    loaded, loaded_tokenizer = (
        kind.from_pretrained(tmp_path) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert torch.equal(weights(loaded), weights(model))
    assert loaded.config.eos_token_id == loaded_tokenizer.eos_token_id == tokenizer.eos_token_id
    assert loaded.config.pad_token_id == loaded_tokenizer.pad_token_id
    assert loaded_tokenizer.get_vocab() == tokenizer.get_vocab()
    text = "57+7*2=64+7*1=71"
    assert loaded_tokenizer.encode(text) == tokenizer.encode(text)
    assert loaded_tokenizer.decode(tokenizer.encode(text)) == text


def test_a_policy_in_half_precision_computes_as_when_it_is_loaded(tmp_path):
    """A resumed run loads it, and its updates must have the bits of an unbroken run."""
    made = build_policy(replace(SHAPE, dtype="bfloat16"), seed=0)
    made.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, torch.bfloat16)
    for kind in ("named_parameters", "named_buffers"):
        wanted, got = (dict(getattr(model, kind)()) for model in (made, loaded))
        assert wanted.keys() == got.keys()
        for name, value in wanted.items():
            assert value.dtype == got[name].dtype and torch.equal(value, got[name]), name


def test_preset_fits_the_kernels_and_the_longest_demonstration(tokenizer):
    config = load_config(["preset=tiny"])
    shape = build_policy(config.model, seed=0).config
    assert (shape.hidden_size, shape.head_dim, shape.intermediate_size) == (128, 64, 384)
    assert shape.num_attention_heads > shape.num_key_value_heads  # grouped queries are exercised
    task, longest = make_task("sums"), 0
    for index in range(2000):
        prompt = task.prompt("train", index)
        longest = max(longest, len(tokenizer.encode(task.demonstration(prompt))) + 1)
    assert longest < config.sampling.max_new_tokens
    assert longest + 8 < config.model.max_position


def test_policy_follows_its_seed_alone():
    torch.manual_seed(1)
    model = build_policy(SHAPE, seed=0)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator was left alone
    torch.manual_seed(2)
    assert torch.equal(weights(build_policy(SHAPE, seed=0)), weights(model))
    assert not torch.equal(weights(build_policy(SHAPE, seed=1)), weights(model))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_warm_up_lowers_the_loss_and_follows_its_seed(encode):
    task, config = make_task("sums"), WarmupConfig(steps=30, batch=8, lr=3e-3)

    def train(seed):
        model, seen = build_policy(SHAPE, seed=0), []
        losses = warm_up(model, encode, task, config, seed, lambda *step: seen.append(step))
        assert seen == list(enumerate(losses, 1))
        assert not model.training
        return model, losses

    model, losses = train(0)
    assert sum(losses[-5:]) / 5 < 0.7 * losses[0]
    again, same = train(0)
    assert same == losses
    assert torch.equal(weights(again), weights(model))
    assert train(1)[1] != losses


def test_only_response_and_end_token_are_learned(tokenizer, encode):
    task, config = make_task("sums"), WarmupConfig(steps=3, batch=4, micro_batch_tokens=1 << 20)
    shown = [demonstration(encode, task, (1 << 40) * 6 + i) for i in range(12)]
    for step, (row,) in enumerate(demonstrations(encode, task, config, seed=5)):
        responses = {tuple(r.token_ids) for r in shown[4 * step : 4 * step + 4]}
        ends = (row.tokens == tokenizer.eos_token_id).nonzero()[:, 0] + 1
        assert {tuple(t.tolist()) for t in row.tokens.tensor_split(ends)[:-1]} == responses
        assert torch.equal(row.input_ids[0, row.rows[:-1] + 1], row.tokens[:-1])
    prompt = task.prompt("train", 7)
    response = demonstration(encode, task, 7)
    text = prompt.text + task.demonstration(prompt)
    assert tokenizer.decode([*response.request.prompt_ids, *response.token_ids]) == text + "<eos>"


@pytest.mark.parametrize("chunk_logits", [1, 7 * 32, 1 << 28])
def test_packing_and_chunks_do_not_change_the_gradient(encode, monkeypatch, chunk_logits):
    task, model = make_task("sums"), build_policy(SHAPE, seed=0).double()

    def gradient(micro_batch_tokens):
        config = WarmupConfig(steps=1, batch=12, micro_batch_tokens=micro_batch_tokens)
        (rows,) = demonstrations(encode, task, config, seed=0)
        model.zero_grad()
        losses = [cross_entropy(model, row) for row in rows]
        sum(losses).backward()
        return len(rows), sum(losses), torch.cat([p.grad.flatten() for p in model.parameters()])

    count, whole_loss, whole = gradient(1 << 20)
    assert count == 1
    monkeypatch.setattr("driver.policy.logprobs.CHUNK_LOGITS", chunk_logits)
    count, alone_loss, alone = gradient(1)
    assert count == 12
    torch.testing.assert_close(alone_loss, whole_loss, rtol=1e-9, atol=0)
    torch.testing.assert_close(alone, whole, rtol=1e-7, atol=1e-9)


def test_workers_make_the_same_rows(encode):
    task = make_task("sums")
    here, beside = (
        demonstrations(encode, task, WarmupConfig(steps=4, batch=8), 0, workers)
        for workers in (0, 2)
    )
    for mine, theirs in zip(here, beside, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a.input_ids, b.input_ids)
            assert torch.equal(a.rows, b.rows)


class Faulty(CalculatorTask):
    """One of its demonstrations, or one of the answers in them, raises an error."""

    def __init__(self, method):
        super().__init__()
        self.method = method

    def respond(self, prompt, turn, text):
        assert self.method != "respond", "no\npower"
        return super().respond(prompt, turn, text)

    def demonstration(self, prompt):
        assert self.method != "demonstration", "no\npower"
        return super().demonstration(prompt)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("method", ["respond", "demonstration"])
def test_an_error_in_a_demonstration_names_the_sample_in_one_line(encode, method, workers):
    """From a worker process, too, whose errors have a traceback otherwise."""
    rows = demonstrations(encode, Faulty(method), WarmupConfig(steps=1, batch=2), 0, workers)
    where = r"demonstration of prompt calculator/train/\d+" + ": tool at turn 0" * (
        method[0] == "r"
    )
    with pytest.raises(UserError, match=where + r": AssertionError: no power .*test_tiny.py:\d+.$"):
        next(iter(rows))


def test_demonstrations_longer_than_the_context_are_left_out(encode):
    task, config = make_task("sums"), WarmupConfig(steps=3, batch=8)

    def lengths(longest):
        steps = demonstrations(encode, task, config, 0, longest=longest)
        return [n for rows in steps for row in rows for n in row.documents.lengths]

    whole = lengths(1 << 30)
    longest = sorted(whole)[-6]
    short = [n for n in whole if n <= longest]
    assert lengths(longest) == short and 0 < len(whole) - len(short) <= 5
    left_out = f"{len(whole) - len(short)} of 24 demonstrations .* context of {longest} tokens"
    with pytest.warns(SharedWarning, match=left_out):
        warm_up(build_policy(replace(SHAPE, max_position=longest), 0), encode, task, config, 0)
    with pytest.raises(UserError, match="all demonstrations of step 0 .* context of 9 tokens"):
        lengths(9)


def test_a_half_precision_model_learns_through_float32_masters(encode):
    """Steps of 1e-4 are far below bfloat16's resolution of a weight of one."""
    model = build_policy(SHAPE, seed=0).bfloat16()
    before = weights(model)
    config = WarmupConfig(steps=30, batch=8, lr=3e-3)
    losses = warm_up(model, encode, make_task("sums"), config, 0)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert sum(losses[-5:]) / 5 < 0.7 * losses[0]
    exact = build_policy(SHAPE, seed=0).bfloat16().float()
    same = warm_up(exact, encode, make_task("sums"), config, 0)
    assert losses[-1] == pytest.approx(same[-1], rel=0.1)
    assert not torch.equal(weights(model), before)


@pytest.mark.parametrize(
    ("worked", "message"),
    [
        (None, "task.name=silent: has no demonstrations; set warmup.step"),
        ([], "task.name=silent: has no demonstrations"),
        ("1\ud800", "demonstration of prompt 0: UnicodeEncodeError.*surrogates not allowed"),
        (["1", "2"], "demonstration of prompt 0: turn 0 has the answer '', no text"),
    ],
)
def test_warm_up_without_demonstrations(encode, worked, message):
    class Silent:
        name, stop = "silent", ()
        prompt = staticmethod(lambda split, index: Prompt("0", "1=", "1"))
        demonstration = staticmethod(lambda prompt: worked)
        respond = staticmethod(lambda prompt, turn, text: "")

    with pytest.raises(UserError, match=message):
        warm_up(build_policy(SHAPE, 0), encode, Silent(), WarmupConfig(steps=1), 0)
