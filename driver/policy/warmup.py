"""Supervised warm-up: the policy is trained on a task's worked responses before RL."""

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel

from ..common.deterministic import deterministic
from ..common.errors import SharedWarning, UserError, user_code
from ..common.numbers import shown
from ..config.sections import WarmupConfig
from ..model.prompts import PromptEncoder
from ..rollout.request import Request, Response, SamplingParams
from ..tasks import Task
from .micro_batch import MicroBatch, build_micro_batch
from .packed_forward import packed_logprobs
from .packing import pack
from .weights import PolicyWeights, in_dtype

RAMP_STEPS = 20
FINAL_LR_SHARE = 0.1
MAX_GRAD_NORM = 1.0
MAX_WORKERS = 12  # processes that make demonstrations while a GPU trains
# First index of the train split that the warm-up reads; RL starts at 0 and does not get here.
FIRST_INDEX = 1 << 40


def warm_up(
    model: PreTrainedModel,
    encode: PromptEncoder,
    task: Task,
    config: WarmupConfig,
    seed: int,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Trains the model in place on demonstrations of the train split; the loss of each step.

    The loss is the mean cross-entropy over response tokens, including the end token. The optimizer
    is AdamW on float32 weights, with a short linear ramp and then a cosine down to a tenth of `lr`.
    Operations are deterministic: GPUs of one kind get the same weights, bit for bit. The seed
    selects the prompts. `progress` is called after each step with the number of finished steps and
    its loss. Demonstrations that exceed the model's context are left out, with a warning. Raises
    UserError if the task has no demonstrations.

    Example:
        >>> losses = warm_up(model, encode, task, WarmupConfig(steps=200), 0)  # doctest: +SKIP
    """
    demonstration(encode, task, FIRST_INDEX)  # raises before any work if the task has none
    weights = PolicyWeights(model)
    optimizer = torch.optim.AdamW(weights.params, lr=config.lr, betas=(0.9, 0.98))
    losses = []
    model.train()
    # Beside a GPU the cores are free; these are the ones that the process may use.
    workers = 0 if model.device.type == "cpu" else min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    context, trained = model.config.max_position_embeddings, 0
    batches = demonstrations(encode, task, config, seed, workers, context)
    with deterministic(model.device):
        for step, batch in enumerate(batches):
            tokens = sum(len(row.tokens) for row in batch)
            trained += sum(len(row.documents.lengths) for row in batch)
            total = torch.zeros((), device=model.device)
            for row in batch:
                loss = cross_entropy(model, row.to(model.device), weights.dtype) / tokens
                loss.backward()
                total += loss.detach()
            weights.step(optimizer, MAX_GRAD_NORM, config.lr * lr_share(step, config.steps))
            losses.append(float(total))
            progress(step + 1, losses[-1])
    if left_out := config.steps * config.batch - trained:
        warnings.warn(
            f"warm-up: {left_out} of {config.steps * config.batch} demonstrations are longer, with"
            f" their prompts, than the model's context of {context} tokens and were left out",
            SharedWarning,
            stacklevel=2,
        )
    model.eval()
    in_dtype(model, weights.dtype)
    return losses


def lr_share(step: int, steps: int) -> float:
    """A short linear ramp, then a cosine down to `FINAL_LR_SHARE`."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / RAMP_STEPS) * max(FINAL_LR_SHARE, cosine)


def demonstrations(
    encode: PromptEncoder,
    task: Task,
    config: WarmupConfig,
    seed: int,
    workers: int = 0,
    longest: int = sys.maxsize,
) -> Iterator[list[MicroBatch]]:
    """The packed rows of each step, on the CPU; `workers` processes prefetch them, 0: none.

    Documents of more than `longest` tokens are left out. Raises UserError if a step has no other.
    """
    steps = _Steps(encode, task, config, FIRST_INDEX * (seed + 1), longest)
    for rows in DataLoader(steps, batch_size=None, num_workers=workers):
        if isinstance(rows, UserError):
            raise rows
        yield rows


def demonstration(encode: PromptEncoder, task: Task, index: int) -> Response:
    """The worked response to a prompt of the train split, in the form of a sampled one.

    Raises UserError if the task has no demonstrations, or no answer to a turn that is not the last
    one, or its code raised an error; or the tokenizer has no end token.
    """
    prompt = task.prompt("train", index)
    with user_code(f"demonstration of prompt {prompt.id}"):
        worked = task.demonstration(prompt)
        turns = [worked] if isinstance(worked, str) else worked or ()
        for text in turns:
            text.encode()  # the tokenizer's own error does not name the character
    if not turns:
        raise UserError(f"task.name={task.name}: has no demonstrations; set warmup.steps=0")
    tokenizer = encode.tokenizer
    if tokenizer.eos_token_id is None:
        raise UserError("warmup.steps: the tokenizer has no end token to teach; set it to 0")
    end = tokenizer.eos_token_id
    tokens: list[int] = []
    tools: list[tuple[int, int]] = []
    for turn, text in enumerate(turns):
        tokens += tokenizer.encode(text, add_special_tokens=False)
        last = turn == len(turns) - 1
        if last or encode.uses_template or not text.endswith(task.stop):
            tokens.append(end)
        if not last:
            with user_code(f"demonstration of prompt {prompt.id}: tool at turn {turn}"):
                answer = task.respond(prompt, turn, text)
            if not (isinstance(answer, str) and answer):
                got = "no answer" if answer is None else f"the answer {shown(answer)}, no text"
                raise UserError(
                    f"demonstration of prompt {prompt.id}: turn {turn} has {got}, but turns follow"
                    " it; end the demonstration there"
                )
            begin = len(tokens)
            tokens += encode.turns(answer)
            tools.append((begin, len(tokens)))
    request = Request(index, index, encode(prompt.text), SamplingParams(max_new_tokens=len(tokens)))
    return Response(request, tokens, [0.0] * len(tokens), "stop", tools=tools)


def cross_entropy(
    model: PreTrainedModel, row: MicroBatch, dtype: torch.dtype | None = None
) -> Tensor:
    """Cross-entropy summed over the response tokens of a packed row on the model's device, []."""
    return -packed_logprobs(model, row, dtype=dtype)[0].sum()


class _Steps(Dataset):
    """The packed rows of each step."""

    def __init__(
        self, encode: PromptEncoder, task: Task, config: WarmupConfig, first: int, longest: int
    ) -> None:
        self.encode, self.task, self.config = encode, task, config
        self.first, self.longest = first, longest

    def __len__(self) -> int:
        return self.config.steps

    def __getitem__(self, step: int) -> list[MicroBatch] | UserError:
        batch = self.config.batch
        begin = self.first + step * batch
        try:
            worked = [demonstration(self.encode, self.task, begin + i) for i in range(batch)]
        except UserError as error:  # raised in a worker process, it would have a traceback
            return error
        # Documents of a row then have similar lengths.
        worked.sort(key=lambda r: -len(r.request.prompt_ids) - len(r.token_ids))
        lengths = [len(r.request.prompt_ids) + len(r.token_ids) for r in worked]
        fits = sum(length > self.longest for length in lengths)  # the first that does
        worked, lengths = worked[fits:], lengths[fits:]
        if not worked:
            return UserError(
                f"warmup.batch={batch}: all demonstrations of step {step} are longer, with their"
                f" prompts, than the model's context of {self.longest} tokens; use shorter ones, or"
                " a model with a longer context"
            )
        return [
            build_micro_batch(worked, row, torch.device("cpu"))
            for row in pack(lengths, self.config.micro_batch_tokens)
        ]
