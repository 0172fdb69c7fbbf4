"""The drafter: one Llama-shaped decoder layer in the EAGLE-3 layout, as a trainable module.

Entry t joins the target's features of position t with the embedding of token t + 1, and predicts
token t + 2. `driver/rollout/draft_runner.py` is the same model at inference.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test" (2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .spec import ModelSpec


@dataclass(frozen=True)
class DraftSpec:
    """Shape of a drafter; all but the last two fields are those of the target."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    vocab_size: int
    intermediate_size: int
    draft_vocab: int

    @staticmethod
    def of(target: ModelSpec, intermediate_size: int = 0, draft_vocab: int = 0) -> DraftSpec:
        """The drafter of a target; 0 = its MLP, or its whole vocabulary."""
        return DraftSpec(
            target.hidden_size,
            target.num_heads,
            target.num_kv_heads,
            target.head_dim,
            target.rms_norm_eps,
            target.vocab_size,
            intermediate_size or target.intermediate_size,
            min(draft_vocab or target.vocab_size, target.vocab_size),
        )


class RmsNorm(nn.RMSNorm):
    """A norm whose weight may have another dtype than its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class DraftAttention(nn.Module):
    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        width, size = 2 * spec.hidden_size, spec.head_dim
        self.q_proj = nn.Linear(width, spec.num_heads * size, bias=False)
        self.k_proj = nn.Linear(width, spec.num_kv_heads * size, bias=False)
        self.v_proj = nn.Linear(width, spec.num_kv_heads * size, bias=False)
        self.o_proj = nn.Linear(spec.num_heads * size, spec.hidden_size, bias=False)


class DraftMlp(nn.Module):
    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.self_attn = DraftAttention(spec)
        self.mlp = DraftMlp(spec)
        self.input_layernorm = RmsNorm(spec.hidden_size, spec.rms_eps)
        self.hidden_norm = RmsNorm(spec.hidden_size, spec.rms_eps)
        self.post_attention_layernorm = RmsNorm(spec.hidden_size, spec.rms_eps)


class Drafter(nn.Module):
    """Parameters under the names that serving engines load.

    The head holds the rows of the target's head that `d2t` selects. It is refreshed after every
    policy update and never trained, so a new vocabulary loses nothing that was learned.
    """

    def __init__(self, spec: DraftSpec, seed: int = 0) -> None:
        super().__init__()
        self.spec = spec
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.fc = nn.Linear(3 * spec.hidden_size, spec.hidden_size, bias=False)
            self.midlayer = DraftLayer(spec)
            self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab, bias=False)
        self.norm = RmsNorm(spec.hidden_size, spec.rms_eps)
        self.lm_head.weight.requires_grad_(False)
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", torch.zeros(spec.draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(spec.vocab_size, dtype=torch.bool))
        self.set_vocabulary(torch.arange(spec.draft_vocab))

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Chooses the drafted tokens, int64 [draft_vocab], rising; refresh the head afterwards."""
        self.d2t.copy_(target_ids - torch.arange(self.spec.draft_vocab))
        self.t2d.zero_()
        self.t2d[target_ids] = True

    @property
    def target_ids(self) -> Tensor:
        """int64 [draft_vocab]: the target id of each draft id."""
        return self.d2t + torch.arange(self.spec.draft_vocab, device=self.d2t.device)

    def refresh_head(self, target_head: Tensor) -> None:
        """Gathers the draft head from the target's [V, H]."""
        rows = target_head.detach().index_select(0, self.target_ids)
        self.lm_head.weight.data.copy_(rows)

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]
