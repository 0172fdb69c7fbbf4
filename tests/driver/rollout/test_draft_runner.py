"""The drafter at inference equals its training forward pass, entry by entry."""

import copy

import pytest
import torch

import tlt_ext
from driver.config.strategy import Strategy
from driver.drafter.loss import Teacher, unroll
from driver.model import target as model
from driver.rollout import draft_runner
from driver.rollout.request import Request, RunningRequest, SamplingParams
from tests.driver.drafting import PAGE, Parts, build_parts, packed_batch
from tests.kit import generator, randn, same_bits

EXACT = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def parts() -> Parts:
    parts = build_parts(num_pages=160)
    parts.cache.features.copy_(randn(*parts.cache.features.shape, seed=8))
    return parts


def request_of(parts: Parts, length: int, seed: int, first_page: int) -> RunningRequest:
    """A running request of `length` tokens, all but the last committed, pages in odd order."""
    count = length // PAGE + 6
    order = torch.randperm(count, generator=generator(seed)) + first_page
    tokens = torch.randint(97, (length,), generator=generator(seed)).tolist()
    request = Request(1000 + seed, 0, tuple(tokens[:2]), SamplingParams())
    return RunningRequest(request, tokens, pages=order.tolist(), context_len=length - 1)


def slots(request: RunningRequest, count: int) -> torch.Tensor:
    places = [request.pages[t // PAGE] * PAGE + t % PAGE for t in range(count)]
    return torch.tensor(places, dtype=torch.int64)


def twin(parts: Parts, request: RunningRequest, drafted: list[int]) -> list[torch.Tensor]:
    """The training forward pass at the last committed entry and at the drafted ones after it."""
    last = request.context_len - 1
    tokens = torch.tensor(request.tokens + drafted)
    features = parts.cache.features.flatten(0, 1)[slots(request, last + 1)]
    features = torch.cat([features, torch.full((len(drafted), features.shape[1]), 9.0)])
    entries = last + 1 + len(drafted)
    batch = packed_batch(
        parts.target.embedding[tokens[1 : entries + 1]],
        features[:, : 3 * parts.target.spec.hidden_size],
        torch.empty(0),
        torch.arange(entries),
        (entries,),
        (Teacher(parts.target.final_norm, parts.drafter.lm_head.weight),),
    )
    with torch.no_grad():
        steps = list(unroll(parts.drafter, batch, parts.target.cos_sin, len(drafted) + 1))
    return [hidden[last] for hidden in steps]


class Recorder:
    """Keeps each level's drafted tokens, ancestors and hidden states."""

    def __init__(self, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
        self.levels: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = []
        self.logits: list[torch.Tensor] = []
        runner = parts.runner
        next_level, logits = runner._next_level, runner._logits

        def record_level(batch, level, index, hidden):
            out = next_level(batch, level, index, hidden)
            frontier = level.frontiers[index]
            ids = level.nodes.token.gather(1, frontier.node.clamp_min(0).long())
            ancestors = frontier.ancestors.flatten(0, 1)
            self.levels.append((ids.flatten(), ancestors.clone(), out.clone()))
            return out

        def record_logits(hidden):
            self.first = hidden.clone() if not self.logits else self.first
            self.logits.append(logits(hidden))
            return self.logits[-1]

        monkeypatch.setattr(runner, "_next_level", record_level)
        monkeypatch.setattr(runner, "_logits", record_logits)


@pytest.mark.parametrize("length", [2, 9, 40, 250])
def test_a_drafted_chain_equals_the_unroll_steps(parts, monkeypatch, length):
    """Feature of t with token t + 1 on both sides (fault 37), to the last position (fault 38)."""
    recorder = Recorder(parts, monkeypatch)
    request = request_of(parts, length, seed=1, first_page=3)
    _, batch = parts.propose([request], Strategy("learned", 6, 1, 7))
    drafted = [int(ids[0]) for ids, _, _ in recorder.levels]
    assert len(drafted) == 5
    hidden = [recorder.first[0], *(out[0] for _, _, out in recorder.levels)]
    for level, expected in enumerate(twin(parts, request, drafted)):
        torch.testing.assert_close(hidden[level], expected, **EXACT)
        logits = parts.drafter.lm_head(parts.drafter.norm(expected)).detach()
        torch.testing.assert_close(recorder.logits[level][0], logits, **EXACT)
    assert batch.status.tolist() == [0]


@pytest.mark.parametrize("lengths", [(9,), (9, 21, 33)])
def test_attention_over_all_rows_gives_the_same_last_row(parts, monkeypatch, lengths):
    """A GPU does this for few rows; the bits equal those of selecting the last rows first."""
    drawn = []
    for few in (0, 64):
        requests = [request_of(parts, n, seed=n, first_page=40 * i) for i, n in enumerate(lengths)]
        for request in requests:
            request.draft_version = parts.runner.version
            request.draft_len = request.context_len - 3
        parts.runner.few_rows = few
        recorder = Recorder(parts, monkeypatch)
        parts.propose(requests, Strategy("learned", 4, 2, 8))
        drawn.append(recorder.first)
    assert same_bits(*drawn)


def test_many_rows_go_op_by_op_with_the_same_bits(parts, monkeypatch):
    drawn, apart, append_kv = [], [], tlt_ext.append_kv
    monkeypatch.setattr(tlt_ext, "append_kv", lambda *a, **k: apart.append(append_kv(*a, **k)))
    for fuses, appended_rows, many in ((True, 64, False), (True, 0, True), (False, 64, True)):
        requests = [request_of(parts, n, seed=n, first_page=40 * i) for i, n in enumerate((9, 21))]
        monkeypatch.setattr(parts.target, "fuses", lambda *_, fuses=fuses: fuses)
        monkeypatch.setattr(model, "APPENDED_ROWS", appended_rows)
        recorder = Recorder(parts, monkeypatch)
        apart.clear()
        parts.propose(requests, Strategy("learned", 4, 3, 12))
        assert bool(apart) == many
        drawn.append([out for _, _, out in recorder.levels] + recorder.logits)
    assert all(same_bits(a, b) and same_bits(a, c) for a, b, c in zip(*drawn, strict=True))


def test_every_node_of_a_tree_equals_the_chain_of_its_path(parts, monkeypatch):
    recorder = Recorder(parts, monkeypatch)
    keep, depth = 3, 4
    requests = [request_of(parts, n, seed=n, first_page=40 * i) for i, n in enumerate((9, 21, 14))]
    parts.propose(requests, Strategy("learned", depth, keep, 16))
    branched = 0
    for row, request in enumerate(requests):
        token_at: dict[int, int] = {}  # in-flight drafter slot -> token
        for level, (ids, ancestors, out) in enumerate(recorder.levels):
            for node in range(row * keep, (row + 1) * keep):
                above = ancestors[node, :level].tolist()
                path = [token_at[slot] for slot in above] + [int(ids[node])]
                expected = twin(parts, request, path)[-1]
                torch.testing.assert_close(out[node], expected, **EXACT)
                branched += above != [keep * j for j in range(level)]
            for index in range(keep):
                token_at[level * keep + index] = int(ids[row * keep + index])
    assert branched > 3  # also paths off the first branch


def test_the_tree_proposes_the_best_children_under_the_shared_noise(parts, monkeypatch):
    """The children of the root are the top of draft logit / T + the target's noise."""
    recorder = Recorder(parts, monkeypatch)
    request = request_of(parts, 12, seed=5, first_page=0)
    tree, batch = parts.propose([request], Strategy("learned", 1, 4, 5))
    ids = parts.drafter.target_ids.to(torch.int32)
    logits = torch.full((1, 97), float("-inf"))
    logits[0, ids.long()] = recorder.logits[0][0]
    best = []
    for _ in range(4):  # plain sampling at the next position, without replacement
        tokens, logprobs = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
        tlt_ext.sample(
            logits,
            batch.sampling,
            position=torch.tensor([request.context_len + 1], dtype=torch.int32),
            tokens=tokens,
            logprobs=logprobs,
            status=batch.status,
            seed=parts.runner.seed,
        )
        best.append(int(tokens[0]))
        logits[0, best[-1]] = float("-inf")
    assert sorted(tree.tokens[1:].tolist()) == sorted(best)
    assert tree.position.tolist() == [11, 12, 12, 12, 12]


def written(parts: Parts, request: RunningRequest) -> tuple[torch.Tensor, torch.Tensor]:
    index = slots(request, request.context_len)
    return parts.runner.k.flatten(0, 1)[index], parts.runner.v.flatten(0, 1)[index]


def assert_rewritten(parts: Parts, request: RunningRequest) -> None:
    """The committed K/V of the drafter have the bits that recomputing them gives."""
    found = [x.clone() for x in written(parts, request)]
    for cache in (parts.runner.k, parts.runner.v):
        cache.flatten(0, 1)[slots(request, request.context_len)] = 0
    request.draft_len = 0
    parts.propose([request], Strategy("learned", 1, 1, 2))
    fresh = written(parts, request)
    assert all(float(x.abs().min(0).values.sum()) > 0 for x in fresh)
    assert all(same_bits(a, b) for a, b in zip(found, fresh, strict=True))


@pytest.mark.parametrize("accepted", [1, 3, 7])
def test_entries_are_rewritten_from_features_after_each_pass(parts, accepted):
    """Faults 29 and 30: also after all drafts were accepted, including the bonus token."""
    request = request_of(parts, 20, seed=2, first_page=0)
    strategy = Strategy("learned", 6, 1, 7)
    parts.propose([request], strategy)
    assert parts.runner.late_rows == 18
    request.tokens += list(range(accepted))
    request.context_len += accepted
    request.draft_len = request.context_len - accepted
    assert request.num_new == accepted
    parts.propose([request], strategy)
    assert parts.runner.late_rows == 18
    request.draft_len = request.context_len
    assert_rewritten(parts, request)


def test_all_entries_are_rewritten_after_a_swap_and_after_plain_passes(parts, monkeypatch):
    """Several chunks for the longer request."""
    monkeypatch.setattr(draft_runner, "CATCH_UP_ROWS", 16)
    request = request_of(parts, 57, seed=2, first_page=0)
    late = request_of(parts, 5, seed=3, first_page=100)
    strategy = Strategy("learned", 2, 2, 4)
    both = [request, late]
    parts.propose(both, strategy)
    with torch.no_grad():
        for weight in parts.drafter.trainable():
            weight.mul_(1.5)
    parts.runner.load(parts.drafter.state_dict(), 2)
    parts.propose(both, strategy)
    for one in both:
        assert one.draft_version == 2
        assert_rewritten(parts, one)


def test_a_swap_between_passes_reaches_short_requests(parts):
    """The next pass writes all entries of these requests, more than were new before the swap."""
    request = request_of(parts, 5, seed=3, first_page=0)
    strategy = Strategy("learned", 6, 1, 7)
    parts.propose([request], strategy)
    request.draft_len = request.context_len - 1
    with torch.no_grad():
        for weight in parts.drafter.trainable():
            weight.mul_(1.5)
    parts.runner.load(parts.drafter.state_dict(), 2)
    _, batch = parts.propose([request], strategy)
    assert batch.num_new.tolist() == [4]
    assert_rewritten(parts, request)


def test_a_batch_row_drafts_as_it_does_alone(parts):
    strategy = Strategy("learned", 4, 3, 12)
    requests = [request_of(parts, n, seed=n, first_page=40 * i) for i, n in enumerate((9, 30, 2))]
    together = copy.deepcopy(parts.propose(requests, strategy)[0])
    for row, request in enumerate(requests):
        alone, _ = parts.propose([request], strategy)
        rows = slice(int(together.row_start[row]), int(together.row_start[row + 1]))
        assert together.tokens[rows].tolist() == alone.tokens.tolist()
        assert together.parents[rows].tolist() == alone.parents.tolist()


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.self_attn.k_proj.weight", "norm.weight"])
def test_nan_weights_propose_nothing_and_raise_nothing(parts, name):
    """Fault 4: the tree is the root alone and the request is flagged; others are unaffected."""
    state = {key: value.clone() for key, value in parts.drafter.state_dict().items()}
    state[name].fill_(float("nan"))
    parts.runner.load(state, 2)
    requests = [request_of(parts, n, seed=n, first_page=40 * i) for i, n in enumerate((9, 30))]
    tree, batch = parts.propose(requests, Strategy("learned", 4, 2, 8))
    assert tree.tokens.tolist() == [s.tokens[-1] for s in requests]
    assert tree.row_start.tolist() == [0, 1, 2]
    assert all(bits & tlt_ext.Status.NAN_DRAFT for bits in batch.status.tolist())


def test_loading_writes_no_tensor_of_the_target(parts):
    """Fault 36: with the head tied to the embedding."""
    target = parts.target.state_dict()
    before = {name: weight.clone() for name, weight in target.items()}
    for version in (2, 3):
        state = {k: v + 1 for k, v in parts.drafter.state_dict().items() if v.is_floating_point()}
        parts.runner.load({**parts.drafter.state_dict(), **state}, version)
        assert all(same_bits(before[name], weight) for name, weight in target.items())
    theirs = {weight.data_ptr() for weight in target.values()}
    own = [*parts.runner.weights.values(), parts.runner.k, parts.runner.v]
    assert not theirs & {tensor.data_ptr() for tensor in own}


def test_a_new_policy_reaches_the_drafter_only_by_a_refresh(parts):
    """Fault 36, in the other direction."""
    runner, target = parts.runner, parts.target
    before = {name: weight.clone() for name, weight in runner.weights.items()}
    target.load_weights({name: w + 1 for name, w in target.state_dict().items()})
    assert all(same_bits(before[name], weight) for name, weight in runner.weights.items())
    runner.refresh_head()
    assert torch.equal(runner.weights["head"], target.head[parts.drafter.target_ids])
    del before["head"]
    assert all(same_bits(weight, runner.weights[name]) for name, weight in before.items())


def test_weights_are_swapped_in_place(parts):
    places = {name: weight.data_ptr() for name, weight in parts.runner.weights.items()}
    parts.runner.load(parts.drafter.state_dict(), 5)
    assert parts.runner.version == 5
    assert {name: weight.data_ptr() for name, weight in parts.runner.weights.items()} == places


def test_rope_of_the_drafter_reaches_as_far_as_the_target(parts):
    """Fault 38: both use one table."""
    assert parts.target.spec.max_position == 256
    request = request_of(parts, 256, seed=1, first_page=0)
    strategy = Strategy("learned", 6, 1, 7)
    _, batch = parts.propose([request], strategy)
    hidden = parts.runner._catch_up(batch, strategy)
    torch.testing.assert_close(hidden[0], twin(parts, request, [])[0], **EXACT)
    assert batch.status.tolist() == [0]
