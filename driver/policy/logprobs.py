"""Log-probs of sampled tokens from hidden states, without all logits in memory at once.

Shapes: M tokens, m of them in a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .fused import fused

# Logits of a chunk of rows: 512 MiB in float32. Adding a chunk's share of the head's gradient in
# float32 moves 16 bytes per weight. With 2,000 rows that takes a seventh of the products' time.
CHUNK_LOGITS = 1 << 27
# Stands for -inf where it is multiplied by a probability of 0: exp(-1e4) is 0 in float64 too.
LEAST_LOGPROB = -1e4

# Gradient [m] of a loss by the log-probs of a part of the tokens, from these log-probs.
LossGradient = Callable[[Tensor, slice], Tensor]


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    tokens: Tensor,
    temperature: float,
    entropy_grad: bool = False,
    loss_gradient: LossGradient | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of sampled tokens and the entropy at them, float32 [M], in chunks of rows.

    The backward pass computes a chunk's logits again, so that only one chunk is in memory. With
    `loss_gradient` the forward pass computes the gradients too. Logits and the gradient of the head
    are accumulated in float32 whatever the dtype of the head is.

    Args:
        hidden: float [M, H], final hidden state at the position before each token.
        head: float [V, H], rows of the language-model head.
        tokens: int64 [M], the sampled ids.
        temperature: above 0, divides the logits.
        entropy_grad: whether the entropy has a gradient.
        loss_gradient: the gradient of the loss by the log-probs, if the caller knows it already.
            The backward pass uses it instead of the gradient that it gets; the entropy has none.

    Example:
        >>> token_logprobs(torch.eye(2), torch.zeros(4, 2), torch.tensor([0, 3]), 1.0)[0].exp()
        tensor([0.2500, 0.2500])
    """
    return _TokenLogprobs.apply(
        hidden, head, tokens.unsqueeze(-1), 1 / temperature, entropy_grad, loss_gradient
    )


class _TokenLogprobs(torch.autograd.Function):
    """`token_logprobs` with an explicit gradient: few passes over [m, V], all in place."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        tokens: Tensor,
        scale: float,
        entropy_grad: bool,
        loss_gradient: LossGradient | None,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.float64 if head.dtype == torch.float64 else torch.float32
        logprobs = hidden.new_empty(len(tokens), dtype=exact)  # [M]
        entropy = torch.empty_like(logprobs)  # [M]
        gradients = None if loss_gradient is None else _Gradients(hidden, head, scale)
        for part in _chunks(len(tokens), len(head)):
            logits = _logits(hidden, head, scale, part)  # [m, V]
            if loss_gradient is None or gradients is None:
                logprobs[part], entropy[part] = _logprob_and_entropy(logits, tokens[part])
                continue
            found = _logprob_entropy_slope(logits, tokens[part], head.dtype)
            logprobs[part], entropy[part], slope = found
            del logits, found
            gradients.add(part, slope, -loss_gradient(logprobs[part], part))
        ctx.gradients, ctx.scale = gradients, scale
        ctx.save_for_backward(hidden, head, tokens, entropy if entropy_grad else None)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, tokens, entropy = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            gradients = _Gradients(hidden, head, ctx.scale)
            for part in _chunks(len(tokens), len(head)):
                slope = _slope(
                    _logits(hidden, head, ctx.scale, part),
                    tokens[part],
                    grad[part, None],
                    None if entropy is None else entropy[part, None],
                    entropy_grad[part, None],
                    head.dtype,
                )
                gradients.add(part, slope, -grad[part] if entropy is None else None)
        return gradients.hidden, gradients.head.to(head.dtype), None, None, None, None


class _Gradients:
    """The gradients of hidden states [M, H] and of the head, float32 or wider [V, H]."""

    def __init__(self, hidden: Tensor, head: Tensor, scale: float) -> None:
        self._of, self._scale = (hidden, head), scale
        self.hidden = torch.empty_like(hidden)
        self.head = torch.zeros_like(head, dtype=torch.promote_types(head.dtype, torch.float32))

    def add(self, part: slice, slope: Tensor, factor: Tensor | None) -> None:
        """Those of a chunk: the gradient of its logits is slope [m, V] times factor [m] or -1."""
        hidden, head = self._of
        # A factor that all logits of a row share is applied to the narrow side of a product.
        factor = self.head.new_full((1,), -1.0) if factor is None else factor
        factor = factor.unsqueeze(-1) * self._scale
        self.hidden[part] = factor * _product(slope, head)
        _add_product(self.head, slope.T, (factor * hidden[part]).to(head.dtype))


@fused
def _logprob_entropy_slope(
    logits: Tensor, tokens: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`_logprob_and_entropy`, and `_slope` without a gradient of the entropy."""
    none = logits[:, :1]
    return *_logprob_and_entropy(logits, tokens), _slope(logits, tokens, none, None, none, dtype)


@fused
def _logprob_and_entropy(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits [m, V]: the log-prob of each token [m, 1], [m], and the entropy [m]."""
    logp = logits.log_softmax(-1)
    p = logp.exp()
    # -inf times its probability of 0 is NaN and is left out.
    return logp.gather(-1, tokens).squeeze(-1), -torch.where(p > 0, p * logp, 0.0).sum(-1)


@fused
def _slope(
    logits: Tensor,
    tokens: Tensor,
    grad: Tensor,
    entropy: Tensor | None,
    entropy_grad: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Negative gradient of the loss by the logits, [m, V]; without entropy, divided by `grad`."""
    logp = logits.log_softmax(-1)
    slope = logp.exp()
    own: Tensor | float = 1.0
    if entropy is not None:
        own = grad
        slope = slope * (grad + entropy_grad * (logp.clamp_min(LEAST_LOGPROB) + entropy))
    chosen = torch.arange(logits.shape[-1], device=logits.device) == tokens
    return torch.where(chosen, slope - own, slope).to(dtype)


def _chunks(rows: int, vocab_size: int) -> list[slice]:
    size = max(1, CHUNK_LOGITS // vocab_size)
    return [slice(start, start + size) for start in range(0, rows, size)]


def _logits(hidden: Tensor, head: Tensor, scale: float, part: slice) -> Tensor:
    logits = _product(hidden[part], head.T)  # [m, V]
    return logits if scale == 1 else logits.mul_(scale)  # [m, V]; a factor of 1 costs no pass


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 or wider; on a GPU the accumulator is not rounded to half precision."""
    if a.dtype not in (torch.float16, torch.bfloat16):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += _product(a, b)
