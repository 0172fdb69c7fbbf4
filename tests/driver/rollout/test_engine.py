"""The rollout engine: the same tokens on every path through it, and no leaks."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from driver.common.errors import UserError
from driver.config.load import load_config
from driver.config.strategy import MAX_DRAFTED, OFF, Strategy
from driver.rollout import proposers, token_store
from driver.rollout.observer import RolloutObserver
from driver.rollout.pages import pages_for
from driver.rollout.proposers import OracleProposer
from driver.rollout.request import Request, SamplingParams
from driver.session.load import spec_of
from driver.session.parts import build_rollout
from tests import kit, reference
from tests.driver.hugging_face import random_model
from tlt_ext.limits import MAX_DEPTH

STRATEGIES = [
    "ngram:4,1,5",
    "ngram:6,4,16",
    "learned:3,1,4",
    "learned:4,3,12",
    "learned:8,4,32",
    "hybrid:4,3,12",
    "hybrid:2,1,17",  # chains of 16 levels, an ancestor list's last slot
]
SETTINGS = [(1.0, 0, 1.0), (0.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 7, 1.0), (0.9, 0, 0.8)]
SEED = 7


class Choose:
    """A stand-in for the bandit: a fixed strategy, or a random one every `horizon` passes."""

    def __init__(self, *menu, seed=0, horizon=1):
        self.horizon = horizon
        self.menu = [Strategy.parse(m) if isinstance(m, str) else m for m in menu]
        self.random = random.Random(seed)

    def choose(self, batch, usable, step_s=None):
        arm = self.random.choice(self.menu)
        return arm if usable(arm) else OFF

    def record(self, *_):
        pass


def observer(on_finish=None, on_pass=None):
    """Hooks of a rollout from functions."""
    made = RolloutObserver()
    made.on_finish = on_finish or made.on_finish
    made.on_pass = on_pass or made.on_pass
    return made


@pytest.fixture(scope="module")
def policy():
    return random_model("llama-tied-llama3")


def make_rollout(policy, *words, longest=256, parallel=None):
    config = load_config(
        [
            f"engine.strategies=off {' '.join(STRATEGIES)}",
            "engine.max_batch=8",
            "engine.spec_max_batch=8",
            "engine.page_size=4",
            f"run.seed={SEED}",
            *words,
        ]
    )
    return build_rollout(config, spec_of(policy), policy.state_dict(), longest, parallel)


@pytest.fixture(scope="module")
def rollout(policy):
    """An engine whose drafter has random weights; some of its drafts are accepted."""
    made = make_rollout(policy)
    made.spot.swap()
    return made


def requests(count=12, new=24, settings=SETTINGS, stop=(3, 5)):
    rng = random.Random(1)
    prompts = [[rng.randrange(6, 97) for _ in range(n)] for n in (2, 5, 9, 17)]
    return [
        Request(
            1000 + i,
            i % 4,
            tuple(prompts[i % 4]),
            SamplingParams(*settings[i % len(settings)], new, tuple(stop)),
        )
        for i in range(count)
    ]


def generate(rollout, jobs, *menu, seed=0, page_limit=None, horizon=1):
    engine = rollout.engine
    engine.bandit = Choose(*(menu or ["off"]), seed=seed, horizon=horizon)
    engine.page_limit = page_limit
    engine.forget()
    try:
        return engine.generate(jobs, record=False)
    finally:
        engine.page_limit = None


def same(a, b):
    """Tokens, lengths, finish reasons and log-prob bits."""
    return [(r.token_ids, r.finish, np.array(r.logprobs, np.float32).tobytes()) for r in a] == [
        (r.token_ids, r.finish, np.array(r.logprobs, np.float32).tobytes()) for r in b
    ]


@pytest.fixture(scope="module")
def plain(rollout):
    return generate(rollout, requests())


def test_plain_decoding_is_the_keyed_sample_of_the_model(policy, plain):
    """An independent forward, float64 scores and the key of the noise give the same tokens."""
    for response in plain[:5]:
        params, request = response.request.params, response.request
        ids = list(request.prompt_ids)
        for token, logprob in zip(response.token_ids, response.logprobs, strict=True):
            with torch.no_grad():
                logits = policy(torch.tensor([ids])).logits[0, -1].double()
            temperature = params.temperature or 1.0
            expected = (logits / temperature).log_softmax(-1)
            assert logprob == pytest.approx(float(expected[token]), abs=2e-4)
            if params.top_k == 0 and params.top_p == 1.0:
                noise = reference.target_noise(SEED, request.id, len(ids), 97)
                score = logits / temperature + (noise if params.temperature else 0.0)
                assert token == int(score.argmax())
            ids.append(token)
        if response.finish == "stop":
            assert response.token_ids[-1] in params.stop_ids
        else:
            assert len(response.token_ids) == params.max_new_tokens
        assert not set(response.token_ids[:-1]) & set(params.stop_ids)


@pytest.mark.parametrize("strategy", ["off", "ngram:6,4,16", "learned:4,3,12"])
def test_a_response_has_the_accept_length_of_its_speculative_passes(rollout, strategy):
    responses = generate(rollout, requests(), strategy)
    assert all((r.accept_length is None) == (strategy == "off") for r in responses)
    assert all(r.accept_length is None or r.accept_length >= 1 for r in responses)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_gives_the_tokens_of_plain_decoding(rollout, plain, strategy):
    assert same(generate(rollout, requests(), strategy), plain)
    assert rollout.engine.stats.spec_passes > 0


def test_an_oracle_is_accepted_and_changes_nothing(rollout, plain):
    answers = {r.request.id: r.token_ids for r in plain}
    rollout.engine.proposers["oracle"] = OracleProposer(answers, 97, seed=3)
    assert same(generate(rollout, requests(), Strategy("oracle", 8, 4, 16)), plain)
    assert rollout.engine.stats.accept_length > 3.0


def test_a_perfect_oracle_is_accepted_to_its_depth(rollout, plain):
    oracle = OracleProposer({r.request.id: r.token_ids for r in plain}, 97, seed=3)
    oracle.missing = 0.0
    rollout.engine.proposers["oracle"] = oracle
    assert same(generate(rollout, requests(), Strategy("oracle", 3, 4, 13)), plain)
    passes = sum(-(-len(r.token_ids) // 4) for r in plain)
    assert rollout.engine.stats.spec_request_passes == passes


def test_switching_at_every_pass_reprefills_nothing(rollout, plain):
    """Faults 31 and 34: strategy and draft depth change during the rollout."""
    for seed in range(3):
        assert same(generate(rollout, requests(), "off", *STRATEGIES, seed=seed), plain)
        stats = rollout.engine.stats
        assert stats.switches > 5
        assert stats.reprefilled_tokens == 0
        assert stats.recomputed_tokens == 0


@pytest.mark.parametrize("strategy", ["off", "learned:4,3,12", "ngram:6,4,16", "hybrid:2,1,17"])
def test_preempted_requests_are_recomputed_to_the_same_tokens(rollout, strategy):
    jobs = requests(new=40, stop=())
    wanted = generate(rollout, jobs)
    assert same(generate(rollout, jobs, "off", strategy, page_limit=24), wanted)
    assert rollout.engine.stats.preemptions > 0
    assert rollout.engine.stats.recomputed_tokens > 0


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9])
def test_tokens_do_not_depend_on_batch_or_order(rollout, plain, count):
    """Faults 8, 23, 25, 26: other batch sizes and orders; a batch that drains to one, then none."""
    jobs = requests()[:count]
    random.Random(count).shuffle(jobs)
    by_id = {r.request.id: r for r in plain}
    got = generate(rollout, jobs, "learned:4,3,12")
    assert same(got, [by_id[job.id] for job in jobs])


def test_tokens_after_a_stop_or_the_limit_are_trimmed(rollout):
    """Fault 33: an accepted block that runs past the end."""
    jobs = requests(new=40, stop=())
    long = generate(rollout, jobs)
    for cut in (1, 2, 3, 10):
        # The token that plain decoding emits at `cut` becomes the stop id, inside accepted blocks.
        stops = [r.token_ids[cut] for r in long]
        stopped = [
            replace(job, params=replace(job.params, stop_ids=(stop,)))
            for job, stop in zip(jobs, stops, strict=True)
        ]
        answers = {r.request.id: r.token_ids for r in long}
        rollout.engine.proposers["oracle"] = OracleProposer(answers, 97, seed=cut)
        got = generate(rollout, stopped, Strategy("oracle", 8, 2, 16))
        for response, whole, stop in zip(got, long, stops, strict=True):
            end = whole.token_ids.index(stop) + 1
            assert response.token_ids == whole.token_ids[:end]
            assert response.logprobs == whole.logprobs[:end]
            assert response.finish == "stop"
        short = [replace(job, params=replace(job.params, max_new_tokens=cut)) for job in jobs]
        got = generate(rollout, short, Strategy("oracle", 8, 2, 16))
        assert [r.token_ids for r in got] == [r.token_ids[:cut] for r in long]
        assert {r.finish for r in got} == {"length"}


def test_a_limit_of_zero_and_an_empty_rollout(rollout):
    assert generate(rollout, []) == []
    got = generate(rollout, requests(count=3, new=0))
    assert [(r.token_ids, r.finish) for r in got] == [([], "length")] * 3


def test_a_prompt_of_one_token_starts_plain_and_then_speculates(rollout):
    jobs = [Request(5, 0, (9,), SamplingParams(max_new_tokens=12))]
    assert same(generate(rollout, jobs, "learned:3,1,4"), generate(rollout, jobs))


@pytest.mark.parametrize("damage", ["nan", "inf", "random"])
def test_a_broken_drafter_costs_passes_and_no_token(policy, plain, damage):
    made = make_rollout(policy)
    made.spot.swap()
    for tensor in made.spot.runner.weights.values():
        if damage == "random":
            tensor.normal_(generator=torch.Generator().manual_seed(0))
        else:
            tensor.fill_(float(damage))
    assert same(generate(made, requests(), "learned:4,3,12"), plain)


def test_prefixes_are_computed_once_and_pages_come_back(rollout):
    jobs = requests(count=12)
    generate(rollout, jobs, "learned:4,3,12")
    prompts = {job.prompt_ids for job in jobs}
    assert rollout.engine.stats.prefilled_tokens == sum(len(p) - 1 for p in prompts)


def test_a_prefix_of_whole_pages_is_freed_with_its_last_request(policy):
    """The last sibling shares its pages and copies none, so nothing is left to compute."""
    made = make_rollout(policy, "engine.max_batch=2")
    long = Request(1, 0, (9, 8), SamplingParams(max_new_tokens=30))  # needs 8 of the 9 pages
    short = [Request(i, 1, tuple(range(6, 15)), SamplingParams(max_new_tokens=1)) for i in (2, 3)]
    got = generate(made, [long, *short], page_limit=9)
    assert [len(r.token_ids) for r in got] == [30, 1, 1]
    assert made.engine.stats.preemptions == 0


def test_repeated_prefill_is_counted(rollout, monkeypatch):
    """The counter behind "zero re-prefilled tokens" counts unnecessary rows."""
    jobs = [*requests(count=4), *requests(count=1, new=0)]  # the last never runs
    generate(rollout, jobs[:-1] + [replace(jobs[-1], id=9, prompt_ids=(7, 8, 9))])
    assert rollout.engine.stats.reprefilled_tokens == 0
    once = rollout.engine.prefill.run
    monkeypatch.setattr(rollout.engine.prefill, "run", lambda work: (once(work), once(work)))
    generate(rollout, jobs[:-1])
    assert rollout.engine.stats.reprefilled_tokens > 0


def test_a_pass_that_emits_nothing_ends_the_rollout(rollout, monkeypatch):
    """A damaged page table is an error with the status of the request, not an endless loop."""
    none = property(lambda state: int(state.context_len == 0))  # from its first pass on
    monkeypatch.setattr("driver.rollout.request.RunningRequest.remaining", none)
    with pytest.raises(RuntimeError, match="request 1000 emitted nothing in a pass"):
        generate(rollout, requests(count=1))


def test_prefill_chunks_change_nothing(policy, plain):
    made = make_rollout(policy, "engine.prefill_chunk=3")
    assert same(generate(made, requests()), plain)


def test_a_pass_computes_as_many_rows_of_a_resumed_request_as_fit(policy, rollout, monkeypatch):
    """More than a tree can have; tokens, log-probs and recorded features have the same bits."""
    ids = tuple(random.Random(2).randrange(6, 97) for _ in range(170))
    whole = Request(5, 0, ids, SamplingParams(max_new_tokens=60))
    (plain,) = generate(rollout, [whole])
    begun = replace(plain, token_ids=plain.token_ids[:30], logprobs=plain.logprobs[:30])
    resumed = replace(whole, resume=replace(begun, finish="abort", drafter_versions=[]))
    features = []
    for chunk, passes in ((199, 1), (64, 4), (7, 29)):
        made = make_rollout(policy, f"engine.prefill_chunk={chunk}")
        forward, rows = made.target.forward, []

        def counted(ids, *args, forward=forward, rows=rows, **settings):
            rows.append(len(ids))
            return forward(ids, *args, **settings)

        monkeypatch.setattr(made.target, "forward", counted)
        made.engine.observer = observer(lambda s, made=made: features.append(gather(made, s)))
        made.engine.bandit = Choose("off")
        (got,) = made.engine.generate([resumed])
        assert same([got], [plain])
        assert len(rows) == passes + 30 and sum(rows[:passes]) == 199
        assert kit.same_bits(features[-1], features[0])


def test_new_weights_drop_what_the_old_ones_computed(policy):
    """Fault 35: pages of the old policy must not serve the new one."""
    other = random_model("llama-tied-llama3", seed=1)
    made = make_rollout(policy)
    generate(made, requests(), "ngram:4,1,5")
    made.update_weights(other.state_dict(), version=1)
    fresh = make_rollout(other)
    got = generate(made, requests(), "off", "ngram:4,1,5")
    assert same(got, generate(fresh, requests()))
    assert {r.version for r in got} == {1}


@pytest.mark.parametrize(("mode", "parts"), [("serial", 4), ("off", 3)])
def test_recorded_features_are_those_of_a_fresh_forward(policy, mode, parts):
    """Fault 37: the data that drafts and training read, against hidden states of transformers."""
    made = make_rollout(policy, f"spot.mode={mode}")
    taken = []
    made.engine.observer = observer(
        lambda s: taken.append((list(s.tokens), s.context_len, gather(made, s).clone()))
    )
    made.engine.bandit = Choose("off", "ngram:6,4,16", "learned:4,3,12")
    made.spot.swap()
    made.engine.generate(requests(count=4))
    layers = [*made.target.feature_layers, policy.config.num_hidden_layers - 1][:parts]
    assert len(taken) == 4
    for tokens, context_len, features in taken:
        assert context_len == len(tokens) - 1
        states = hidden_states(policy, layers, tokens[:-1])
        fresh = torch.cat([s.view(context_len, -1) for s in states], -1)
        assert torch.allclose(features, fresh, atol=2e-4)


def hidden_states(policy, layers, tokens):
    """Outputs of decoder layers, by hooks, since transformers' list has the last one normed."""
    states = []

    def keep(module, inputs, output):
        states.append(output[0] if isinstance(output, tuple) else output)

    hooks = [policy.model.layers[i].register_forward_hook(keep) for i in layers]
    with torch.no_grad():
        policy.model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return states


def gather(made, sequence):
    size = made.engine.cache.page_size
    places = [sequence.pages[t // size] * size + t % size for t in range(sequence.context_len)]
    return made.engine.cache.features.flatten(0, 1)[places]


@pytest.mark.parametrize("strategy", ["learned:4,3,12", "hybrid:4,3,12"])
def test_versions_are_stamped(rollout, plain, strategy):
    got = generate(rollout, requests(), strategy)
    assert all(r.drafter_versions == [rollout.spot.runner.version] for r in got)
    assert all(r.drafter_versions == [] for r in plain)


def looping_requests():
    """Ragged: greedy siblings of two prompts repeat each other; others, at T = 1, do not."""
    jobs = requests(count=12, new=40, settings=SETTINGS[:2], stop=())
    return [
        replace(job, params=replace(job.params, max_new_tokens=30 + 5 * i))
        for i, job in enumerate(jobs)
    ]


def test_a_batch_mixes_ngram_and_learned_trees(policy, monkeypatch):
    """Hybrid: each request has one kind of tree, and both kinds occur in one pass."""
    rollout, draft, written = make_rollout(policy), proposers.draft_ngrams, []
    rollout.spot.swap()
    jobs = looping_requests()
    plain = generate(rollout, jobs)

    def spy(nodes, *rest, **settings):
        before = nodes.score.clone()
        draft(nodes, *rest, **settings)
        written.append((nodes.score != before).any(1).float().mean())

    monkeypatch.setattr(proposers, "draft_ngrams", spy)
    passes = []
    for arm in ("learned:2,1,3", "hybrid:2,1,3", "hybrid:2,1,17"):
        assert same(generate(rollout, jobs, arm), plain)
        passes.append(rollout.engine.stats.spec_request_passes)
        most = rollout.engine.ring.num_emitted.max()
        assert (most > 8) if arm == "hybrid:2,1,17" else (most <= 3)
    assert sum(0 < share < 1 for share in written) > 20
    assert passes == sorted(passes, reverse=True) and len(set(passes)) == 3
    assert rollout.engine.stats.flagged == 0


def test_tables_are_as_long_as_the_longest_request(policy):
    """Not as the context of the model, which is 256."""
    rollout, reference = make_rollout(policy, longest=60), make_rollout(policy)
    engine = rollout.engine
    assert rollout.target.cos_sin.shape[0] == 60 + MAX_DEPTH
    assert engine.store.tokens.shape[1] == 60
    assert engine.state.block_table.shape[1] == pages_for(60 + MAX_DRAFTED, 4)
    fit = [replace(r, params=replace(r.params, max_new_tokens=43)) for r in requests(4)]
    assert same(generate(rollout, fit, *STRATEGIES), generate(reference, fit))
    with pytest.raises(UserError, match=r"tokens=44 exceed the 60 of .*; at most 43 .* raise eng"):
        generate(rollout, [replace(r, params=replace(r.params, max_new_tokens=44)) for r in fit])


def test_a_request_that_cannot_run_is_one_clear_line(rollout):
    long = [Request(1, 0, tuple(range(6, 90)) * 4, SamplingParams(max_new_tokens=8))]
    with pytest.raises(UserError, match="prompt of 336 tokens .* exceed the 256 of .* raise engi"):
        generate(rollout, long)


def test_families_with_bias_qk_norm_or_layers_without_rope_are_exact_too():
    for variant in ("qwen2", "qwen3", "smollm3"):
        made = make_rollout(random_model(variant))
        made.spot.swap()
        wanted = generate(made, requests(count=6))
        assert same(generate(made, requests(count=6), "off", *STRATEGIES), wanted)


def test_block_tables_follow_pages_freed_by_a_preemption(rollout):
    """The number of pages may stay equal although the pages changed."""
    jobs = requests(count=8, new=40, stop=())
    wanted = generate(rollout, jobs)
    for limit in range(18, 40):
        got = generate(rollout, jobs, "off", *STRATEGIES, seed=limit, page_limit=limit)
        assert same(got, wanted), limit


def test_finished_siblings_still_serve_drafts(policy, monkeypatch):
    """Within a rollout, and in the next one if it was recorded, while rows are free."""
    monkeypatch.setattr(token_store, "HISTORY", 6)
    rollout = make_rollout(policy, "engine.max_batch=1", "engine.spec_max_batch=1")
    job = Request(7, 0, tuple(range(6, 20)), SamplingParams(temperature=0.0, max_new_tokens=30))
    twins = [replace(job, id=i) for i in range(4)]  # greedy: each repeats the first
    rollout.engine.observer = None
    store = rollout.engine.state.store
    for record, passes, kept in ((False, 70, 0), (True, 70, 4), (True, 50, 6)):
        rollout.engine.bandit = Choose("ngram:8,1,9")
        rollout.engine.generate(twins, record=record)
        assert rollout.engine.stats.target_passes < passes
        assert len(store._past) == kept


def test_tokens_of_plain_passes_serve_ngram_drafts(policy):
    """The store has all tokens of a finished response, whatever arm it finished with."""
    rollout = make_rollout(policy, "engine.max_batch=1", "engine.spec_max_batch=1")
    job = Request(7, 0, tuple(range(6, 20)), SamplingParams(temperature=0.0, max_new_tokens=30))
    rollout.engine.observer = None
    for arm, passes in (("off", 30), ("ngram:8,1,9", 6)):
        rollout.engine.bandit = Choose(arm)
        rollout.engine.generate([job])
        assert rollout.engine.stats.target_passes <= passes


def test_a_nan_target_flags_its_responses_fault_3(policy):
    """Every id stays valid, each response finishes, and a warning names the fault."""
    rollout = make_rollout(policy)
    rollout.target.final_norm.fill_(float("nan"))
    rollout.engine.bandit = Choose("off", "ngram:4,1,5")
    with pytest.warns(UserWarning, match="4 of 4 responses are flagged .*NAN_LOGITS"):
        responses = rollout.engine.generate(requests(count=4, new=6))
    assert rollout.engine.stats.flagged == 4
    assert all(0 <= token < 97 for r in responses for token in r.token_ids)


@pytest.mark.parametrize("strategy", ["learned:4,3,12", "learned:3,1,4"])
def test_a_nan_drafter_flags_nothing_fault_4(policy, strategy):
    """A chain that ends early is followed by ids of earlier passes, here of a good drafter."""
    rollout = make_rollout(policy)
    rollout.spot.swap()
    jobs = requests(count=4, new=6)
    wanted = generate(rollout, jobs, "off")
    assert same(generate(rollout, jobs, strategy), wanted)
    for weight in rollout.spot.runner.weights.values():
        weight.fill_(float("nan"))
    assert same(generate(rollout, jobs, strategy), wanted)
    assert rollout.engine.stats.spec_passes > 0
    assert rollout.engine.stats.flagged == 0


def test_a_pass_keeps_to_its_largest_number_of_rows(policy, plain):
    """If trees for all running requests have too many rows, they decode plainly."""
    narrow = make_rollout(policy, "engine.spec_max_rows=20")
    assert narrow.target.max_logits == 20 and narrow.target.max_rows == 256
    assert make_rollout(policy, "engine.spec_max_rows=999999").target.max_logits == 256
    assert same(generate(narrow, requests(), "ngram:4,1,5"), plain)
    speculated = {active for _, active, arm in narrow.engine.stats.trace if arm != "off"}
    assert speculated and max(speculated) <= 4


def test_how_drafts_are_made_changes_no_token(policy, plain):
    drafts = []
    for draft_temperature, score_temperature in ((0.75, 1.0), (0.75, 0.0), (0.3, 1.0)):
        rollout = make_rollout(policy)
        rollout.engine.state.draft_temperature = draft_temperature
        rollout.spot.runner.score_temperature = score_temperature
        rollout.spot.swap()
        assert same(generate(rollout, requests(), "learned:4,3,12"), plain)
        drafts.append(rollout.engine.stats.accepted)
    assert len(set(drafts)) == 3
