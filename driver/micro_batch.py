"""A packed row of prompts and responses, with what the policy loss needs at the response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from driver.packed_attention import packed_inputs
from driver.rollout.request import Response


@dataclass(frozen=True)
class MicroBatch:
    """Packed documents of one pass, T tokens, and what the loss needs at M response tokens."""

    input_ids: Tensor  # int64 [1, T]
    documents: dict[str, Any]  # the packing, as the model's forward pass takes it
    rows: Tensor  # int64 [M], the position before each response token
    tokens: Tensor  # int64 [M]
    owner: Tensor  # int64 [M], index of the response in the step
    temperature: Tensor  # float32 [M]
    rollout_logprobs: Tensor  # float32 [M]
    old_logprobs: Tensor | None = None  # float32 [M]
    entropy: Tensor | None = None  # float32 [M], of the step-start policy
    ref_logprobs: Tensor | None = None  # float32 [M]

    def to(self, device: torch.device) -> MicroBatch:
        """The same batch elsewhere."""

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: moved(item) for name, item in value.items()}
            return value.to(device) if isinstance(value, Tensor) else value

        return replace(self, **{f.name: moved(getattr(self, f.name)) for f in fields(self)})


def build_micro_batch(
    responses: Sequence[Response], owners: Sequence[int], device: torch.device
) -> MicroBatch:
    """Pack responses behind their prompts, every sampled token as it came and nothing added.

    Args:
        responses: of the whole step.
        owners: which of them to pack, in this order.
        device: where the tensors live.

    Returns:
        The packed row.
    """
    ids, lengths, rows, owner, temperature, logprobs, tokens = [], [], [], [], [], [], []
    for index in owners:
        response = responses[index]
        prompt, params = response.request.prompt_ids, response.request.params
        count = len(response.token_ids)
        # The token at place j is predicted by the hidden state at j - 1.
        first = len(ids) + len(prompt) - 1
        rows += range(first, first + count)
        ids += [*prompt, *response.token_ids]
        lengths.append(len(prompt) + count)
        tokens += response.token_ids
        owner += [index] * count
        temperature += [params.temperature] * count
        logprobs += response.logprobs
    return MicroBatch(
        input_ids=torch.tensor([ids], device=device),
        documents=packed_inputs(lengths, device),
        rows=torch.tensor(rows, dtype=torch.long, device=device),
        tokens=torch.tensor(tokens, dtype=torch.long, device=device),
        owner=torch.tensor(owner, dtype=torch.long, device=device),
        temperature=torch.tensor(temperature, dtype=torch.float32, device=device),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32, device=device),
    )
