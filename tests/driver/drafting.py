"""A small random target with its drafter, for tests of drafting."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from driver.config.sections import DrafterConfig, SpotConfig
from driver.config.strategy import Strategy
from driver.drafter.attention import Segments
from driver.drafter.buffer import Document
from driver.drafter.loss import DraftBatch, Teacher
from driver.drafter.trainer import SpotTrainer
from driver.model.drafter import Drafter, DraftSpec
from driver.model.kv_cache import KvCache
from driver.model.target import TargetModel
from driver.rollout.draft_runner import DraftRunner
from driver.rollout.request import RunningRequest
from driver.rollout.state import Batch, BatchState
from driver.rollout.token_store import TokenStore
from driver.rollout.tree import Tree
from driver.session.load import spec_of
from tests.driver.hugging_face import random_model
from tests.kit import randn

PAGE = 8
SEED = 11


@dataclass
class Parts:
    model: PreTrainedModel  # of transformers, the same weights as `target`
    target: TargetModel
    cache: KvCache
    drafter: Drafter
    runner: DraftRunner
    state: BatchState

    def batch(self, requests: list[RunningRequest]) -> Batch:
        """The requests in the rows of a batch."""
        store = self.state.store
        for request in {*requests, *self.state.running}:
            store.release(request, keep=False)  # its tokens may have changed
        return self.state.fill(requests)

    def propose(self, requests: list[RunningRequest], strategy: Strategy) -> tuple[Tree, Batch]:
        """A draft tree for the requests, and their batch."""
        batch = self.batch(requests)
        lengths = self.runner.prepare(batch, strategy, self.state.store)
        if lengths is not None:
            for request, length in zip(batch.running, lengths, strict=True):
                request.draft_len, request.draft_version = length, self.runner.version
            self.state.fill(requests)
        return self.runner.propose(batch, strategy, self.state.store), batch

    def trainer(self, **settings) -> SpotTrainer:
        """A spot trainer; `unroll` and `lr` are settings of the drafter."""
        learning = {"unroll": 3, "lr": 1e-2}
        learning = {name: settings.pop(name, value) for name, value in learning.items()}
        spot = {"mode": "serial", "tokens_per_step": 64, "buffer_tokens": 4096, **settings}
        return SpotTrainer(
            self.drafter,
            self.runner,
            self.target,
            self.cache,
            SpotConfig(**{"every": 1, **spot}),
            DrafterConfig(**learning),
            SEED,
        )

    def document(self, length: int, seed: int, version: int = 0) -> Document:
        """Random tokens with features computed by transformers."""
        vocab = self.target.spec.vocab_size
        tokens = torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed))
        return Document(tokens, self.features(tokens[:-1]), version)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """float32 [n, 4H] of transformers: three layers' outputs, the last before the norm."""
        states = []
        hooks = [
            layer.register_forward_hook(
                lambda _module, _inputs, out: states.append(out[0] if type(out) is tuple else out)
            )
            for layer in self.model.model.layers
        ]
        self.model(tokens[None])
        for hook in hooks:
            hook.remove()
        chosen = [states[i] for i in (*self.target.feature_layers, -1)]
        return torch.cat([state.view(len(tokens), -1) for state in chosen], -1)


def packed_batch(
    embedded: torch.Tensor,
    features: torch.Tensor,
    final: torch.Tensor,
    position: torch.Tensor,
    lengths: Sequence[int],
    teachers: Sequence[Teacher],
) -> DraftBatch:
    """Pieces of these lengths, each with the policy that recorded it."""
    left = torch.cat([torch.arange(n, 0, -1, dtype=torch.int32) for n in lengths])
    spans: list[tuple[int, int, Teacher]] = []
    end = 0
    for length, teacher in zip(lengths, teachers, strict=True):
        begin, end = end, end + length
        if spans and spans[-1][2] is teacher:
            begin = spans.pop()[0]
        spans.append((begin, end, teacher))
    segments = Segments.of(tuple(lengths), position.device)
    left = left.to(position.device)
    return DraftBatch(embedded, features, final, position, left, segments, tuple(spans))


def finish(trainer: SpotTrainer) -> None:
    """Ends the training of a step: final steps, new vocabulary, new weights in the runner."""
    trainer.begin_final_steps()
    trainer.end_final_steps()


def build_parts(
    variant: str = "llama-tied-llama3", draft_vocab: int = 24, num_pages: int = 64
) -> Parts:
    """Random weights; version 1 of the drafter is loaded in the runner."""
    model = random_model(variant)
    spec = spec_of(model)
    target = TargetModel(spec, model.state_dict(), dtype=torch.float32, max_rows=256)
    cache = KvCache(spec, num_pages=num_pages, page_size=PAGE, feature_size=target.feature_size)
    shape = DraftSpec.of(spec, intermediate_size=40, draft_vocab=draft_vocab)
    drafter = Drafter(shape, SEED)
    with torch.no_grad():
        for index, weight in enumerate(drafter.trainable()):
            if weight.dim() == 1:
                weight.add_(0.2 * randn(*weight.shape, seed=index))
    step = spec.vocab_size // draft_vocab
    drafter.set_vocabulary(torch.arange(draft_vocab) * step + (step > 1))
    drafter.refresh_head(target.head)
    runner = DraftRunner(shape, target, cache, SEED, 0.0)
    runner.load(drafter.state_dict(), 1)
    store = TokenStore(4, spec.max_position, torch.device("cpu"))
    state = BatchState(4, num_pages, PAGE, store, torch.device("cpu"), 1.0)
    return Parts(model, target, cache, drafter, runner, state)
