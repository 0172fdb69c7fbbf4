"""The tiny policy: tokenizer, model folder, warm-up."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from driver.config import load_config
from driver.errors import UserError
from driver.sections import ModelConfig, WarmupConfig
from driver.tasks import Prompt, make_task
from driver.tiny import CHARACTERS, VOCABULARY, build_policy, build_tokenizer
from driver.warmup import IGNORE, _accumulate, _chunks, _pad, warm_up

SHAPE = ModelConfig(hidden_size=64, num_layers=2, head_dim=64, intermediate_size=128)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


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


def test_preset_fits_the_kernels_and_the_longest_demonstration(tokenizer):
    config = load_config(["preset=tiny"])
    assert config.model.head_dim in (64, 128)
    assert config.model.num_heads > config.model.num_kv_heads  # grouped queries are exercised
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


def test_warm_up_lowers_the_loss_and_follows_its_seed(tokenizer):
    task, config = make_task("sums"), WarmupConfig(steps=30, batch=8, lr=3e-3)

    def train(seed):
        model, seen = build_policy(SHAPE, seed=0), []
        losses = warm_up(model, tokenizer, task, config, seed, lambda *step: seen.append(step))
        assert seen == list(enumerate(losses, 1))
        assert not model.training
        return model, losses

    model, losses = train(0)
    assert sum(losses[-5:]) / 5 < 0.7 * losses[0]
    again, same = train(0)
    assert same == losses
    assert torch.equal(weights(again), weights(model))
    assert train(1)[1] != losses


def test_only_response_and_end_token_are_learned(tokenizer):
    prompt, response = tokenizer.encode("3+4*2="), [*tokenizer.encode("11"), 1]
    tokens, labels = _pad([(prompt, response), (prompt[:1], response)], torch.device("cpu"))
    assert tokens[0].tolist() == prompt + response
    assert labels[0].tolist() == [IGNORE] * 6 + response
    assert labels[1].tolist() == [IGNORE, *response] + [IGNORE] * 5


def test_chunks_and_padding_do_not_change_the_gradient(tokenizer, monkeypatch):
    task = make_task("sums")
    prompts = [task.prompt("train", i) for i in range(12)]
    batch = [
        (tokenizer.encode(p.text), [*tokenizer.encode(task.demonstration(p)), 1]) for p in prompts
    ]
    model = build_policy(SHAPE, seed=0).double()

    def gradient(chunk_tokens):
        monkeypatch.setattr("driver.warmup.CHUNK_TOKENS", chunk_tokens)
        assert sorted(pair for chunk in _chunks(batch) for pair in chunk) == sorted(batch)
        model.zero_grad()
        loss = _accumulate(model, batch)
        return loss, torch.cat([p.grad.flatten() for p in model.parameters()])

    whole_loss, whole = gradient(1 << 30)
    alone_loss, alone = gradient(1)
    assert alone_loss == pytest.approx(whole_loss, rel=1e-6)
    torch.testing.assert_close(alone, whole, rtol=1e-5, atol=1e-7)


def test_warm_up_without_demonstrations(tokenizer):
    class Silent:
        name = "silent"
        prompt = staticmethod(lambda split, index: Prompt("0", "1=", "1"))
        demonstration = staticmethod(lambda prompt: None)

    with pytest.raises(UserError, match="task.name=silent: has no demonstrations; set warmup.step"):
        warm_up(build_policy(SHAPE, 0), tokenizer, Silent(), WarmupConfig(steps=1), 0)
