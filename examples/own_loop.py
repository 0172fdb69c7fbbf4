"""A GRPO loop of your own: a `Session` makes the rollouts, the rest is plain torch.

Run from the root of the checkout: `python -m examples.own_loop`. The model is small and random, and
the reward is the share of even tokens, so that some steps on a CPU show that it learns.
"""

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from driver import SamplingParams, Session

STEPS, PROMPTS, SAMPLES, CLIP = 8, 4, 8, 0.2
SHAPE = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}

torch.manual_seed(0)
policy = LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS, eos_token_id=1))
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)


def reward(response):
    return sum(token % 2 == 0 for token in response.token_ids) / len(response.token_ids)


def padded(rows):
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def after_prompt(response, values):
    return [0.0] * (len(response.request.prompt_ids) - 1) + [float(value) for value in values]


def loss_of(responses, advantages):
    """The clipped GRPO loss, averaged over the tokens that the model generated."""
    ids = padded([[*r.request.prompt_ids, *r.token_ids] for r in responses])
    old = padded([after_prompt(r, r.logprobs) for r in responses])
    mask = padded([after_prompt(r, r.generated) for r in responses])
    logprobs = policy(ids[:, :-1]).logits.log_softmax(-1)
    new = logprobs.gather(-1, ids[:, 1:, None])[..., 0]  # [responses, tokens]
    ratio, advantage = (new - old).exp(), advantages[:, None]
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return -(surrogate * mask).sum() / mask.sum()


with Session.from_pretrained(policy, max_batch=32) as session:
    params = SamplingParams(max_new_tokens=32)
    for step in range(STEPS):
        prompts = torch.randint(2, 64, (PROMPTS, 5)).tolist()
        responses = session.generate(prompts, params, samples=SAMPLES)
        rewards = torch.tensor([reward(r) for r in responses])
        groups = rewards.view(PROMPTS, SAMPLES)
        spread = groups.std(dim=1, keepdim=True) + 1e-4
        advantages = ((groups - groups.mean(dim=1, keepdim=True)) / spread).flatten()
        optimizer.zero_grad()
        loss_of(responses, advantages).backward()
        optimizer.step()
        session.update_weights(policy.state_dict())
        print(f"step {step + 1}: mean reward {rewards.mean():.3f}")
