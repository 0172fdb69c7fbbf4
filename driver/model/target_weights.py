"""The weights of the target: fused, on one device, loaded by their Hugging Face names."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.errors import UserError
from .checkpoint import check_dense, check_shapes
from .families import EMBEDDING, FINAL_NORM, GATE_UP, HEAD, JOINED_GATE_UP, JOINED_QKV, LAYER, QKV
from .shards import Shard
from .spec import ModelSpec

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]  # by Hugging Face name


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer; q, k, v and gate, up are fused. None if the family does not have it."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(num_heads + 2 num_kv_heads) head_dim, H]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    output: Tensor  # [H, num_heads head_dim]
    output_bias: Tensor | None
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 intermediate, H]
    down: Tensor  # [H, intermediate]


class TargetWeights:
    """A model's weights, or those that a rank of a tensor-parallel group holds (`shard`).

    Embedding, head and norms are whole on every rank.
    """

    def __init__(
        self, spec: ModelSpec, shard: Shard, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.spec, self.shard, self.device, self.dtype = spec, shard, device, dtype
        self._named: dict[str, Tensor] = {}
        self._indices: dict[str, tuple[int, Tensor]] = {}  # as in the shard, by whole name
        self._shapes = spec.shapes()
        shape = spec.vocab_size, spec.hidden_size
        self.embedding = self._weight(EMBEDDING, *shape)
        self.layers = [self._allocate_layer(LAYER.format(i)) for i in range(spec.num_layers)]
        self.final_norm = self._weight(FINAL_NORM, spec.hidden_size)
        self.head = self.embedding if spec.tie_word_embeddings else self._weight(HEAD, *shape)

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank holds, by Hugging Face name, as views of the fused storage."""
        return dict(self._named)

    def load_weights(self, weights: Weights) -> None:
        """Copies weights in place: addresses stay, so captured graphs stay valid.

        A stream of (name, tensor) is read tensor by tensor, so that it needs no second copy of the
        weights. After an error in a mapping the old weights are unchanged; after one in a stream
        they are a mixture, and all must be loaded again. Tensors have any float dtype and device; a
        tied head may be among them. Raises UserError if a tensor is missing, has the wrong shape,
        or does not belong to the model, or if the head of a tied model is not its embedding.
        """
        if isinstance(weights, Mapping):
            self._check(weights)
            weights = weights.items()
        shapes: dict[str, torch.Size] = {}
        tied = None
        with torch.no_grad():
            for name, weight in weights:
                shapes[name] = weight.shape
                own = self._named.get(name)
                if own is not None and weight.shape == self._shapes[name]:
                    self._check_values(name, weight)
                    own.copy_(self._part(name, weight))
                elif name == HEAD:
                    self._check_values(name, weight)
                    tied = weight.to(self.embedding)  # the embedding may come later
        check_shapes(self.spec, shapes, "weights")
        if tied is not None and not torch.equal(tied, self.embedding):
            raise UserError(f"weights: {HEAD} is not {EMBEDDING}, which the config ties")

    def _part(self, name: str, weight: Tensor) -> Tensor:
        if name not in self._indices:
            return weight
        axis, index = self._indices[name]
        part = weight.index_select(axis, index.clamp(min=0).to(weight.device))
        return part.index_fill_(axis, torch.nonzero(index < 0).flatten().to(weight.device), 0)

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        check_shapes(self.spec, {name: w.shape for name, w in weights.items()}, "weights")
        for name in self._named:
            self._check_values(name, weights[name])
        if HEAD in weights and HEAD not in self._named:
            head, embedding = weights[HEAD], weights[EMBEDDING]
            if head.data_ptr() != embedding.data_ptr() and not torch.equal(head, embedding):
                raise UserError(f"weights: {HEAD} is not {EMBEDDING}, which the config ties")

    def _check_values(self, name: str, weight: Tensor) -> None:
        if self.device.type != "meta":  # a memory estimate
            check_dense(name, weight, "weights")
        if not weight.is_floating_point() or weight.itemsize == 1:  # 8 bits need scales
            raise UserError(f"weights: {name} is {weight.dtype}; expected floats, 16 bits or more")

    def _allocate_layer(self, prefix: str) -> DecoderLayer:
        shapes = self.shard.spec.layer_shapes()
        self._indices |= {prefix + name: part for name, part in self.shard.chosen.items()}

        def weight(name: str) -> Tensor:
            return self._weight(prefix + name, *shapes[name])

        def optional(name: str) -> Tensor | None:
            return weight(name) if name in shapes else None

        def fused(parts: Sequence[str], kind: str) -> Tensor:
            """One tensor whose consecutive rows are those of the named parts that there are."""
            names = [name for part in parts if (name := f"{part}.{kind}") in shapes]
            rows = [shapes[name][0] for name in names]
            columns = shapes[names[0]][1:]
            whole = torch.empty(sum(rows), *columns, dtype=self.dtype, device=self.device)
            for name, part in zip(names, whole.split(rows), strict=True):
                self._named[prefix + name] = part
            return whole

        return DecoderLayer(
            input_norm=weight("input_layernorm.weight"),
            qkv=fused((*QKV, JOINED_QKV), "weight"),
            qkv_bias=fused(QKV, "bias") if f"{QKV[0]}.bias" in shapes else None,
            q_norm=optional("self_attn.q_norm.weight"),
            k_norm=optional("self_attn.k_norm.weight"),
            output=weight("self_attn.o_proj.weight"),
            output_bias=optional("self_attn.o_proj.bias"),
            post_norm=weight("post_attention_layernorm.weight"),
            gate_up=fused((*GATE_UP, JOINED_GATE_UP), "weight"),
            down=weight("mlp.down_proj.weight"),
        )

    def _weight(self, name: str, *shape: int) -> Tensor:
        self._named[name] = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self._named[name]
