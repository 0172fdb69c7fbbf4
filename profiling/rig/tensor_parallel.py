"""A shape on ranks that share it, against one rank: equal tokens, and the time of a pass.

    torchrun --nproc-per-node=2 -m profiling.rig.tensor_parallel device=cuda shape=qwen2_7b tokens=1

`tokens` is the least number of tokens to compare, in whole rounds of a rollout a strategy. The last
line of the first rank is JSON: the share of equal tokens, and for each batch the microseconds of a
pass on one rank and on all, of an exchange, and of one by an all-gather. Weights are random.
`exchange=gather` exchanges by NCCL although the GPUs share memory. `graphs=` is `engine.graphs` of
the ranks.
"""

import json
import statistics
import sys
from dataclasses import replace
from typing import Any

import torch

from driver.common.tensor_parallel import TensorParallel
from driver.common.world import World
from driver.config.strategy import OFF, parse_strategies
from driver.model.exchange import Exchange
from driver.rollout.request import Response
from driver.run.comparison import SAMPLED, Arm, compare
from driver.session.parts import Rollout
from profiling.rig import timing
from profiling.rig.bench import say
from profiling.rig.subjects import QWEN2_7B, QWEN2_15B, SMOLLM2, Subject, of_shape

SHAPES: dict[str, Any] = {"smollm2": SMOLLM2, "qwen2_15b": QWEN2_15B, "qwen2_7b": QWEN2_7B}
BATCHES = (1, 16, 64)
TOKENS, TIMED_TOKENS, LONGEST = 256, 64, 320  # new tokens of a request; the longest request
STRATEGIES = ["ngram:4,1,5", "learned:4,2,8", "hybrid:4,2,8"]
WORDS = [
    "model.dtype=bfloat16",
    "drafter.draft_vocab=4096",
    f"engine.strategies=off {' '.join(STRATEGIES)}",
    f"engine.max_batch={BATCHES[-1]}",
    f"engine.spec_max_batch={BATCHES[-1]}",
    f"bandit.buckets={BATCHES[-1]}",
]
TIMEOUT_S = 20.0  # of a wait for another rank
EXCHANGES, REPLAYS = 64, 9  # in the graph that times one, and of it


def ignore(line: str) -> None:
    """The first rank reports."""


def responses(
    rollout: Rollout, subject: Subject, count: int, tokens: int, round: int = 0
) -> list[Response]:
    """Responses to the first prompts, with every kind of sampling."""
    requests = subject.requests([tokens] * count, stop=False, round=round)
    kinds = [SAMPLED[i % len(SAMPLED)] for i in range(count)]
    varied = [
        replace(r, params=replace(r.params, temperature=t, top_k=k, top_p=p))
        for r, (t, k, p) in zip(requests, kinds, strict=True)
    ]
    rollout.engine.forget()
    return rollout.engine.generate(varied, record=False)


def pass_us(rollout: Rollout, subject: Subject, batch: int) -> float:
    """Microseconds of a plain pass in a rollout of a full batch, by the device's clock."""
    responses(rollout, subject, batch, TIMED_TOKENS)
    stats = rollout.engine.stats
    return 1e6 * stats.passes_s / stats.target_passes


def exchanges_us(rollout: Rollout, batch: int) -> list[float]:
    """Microseconds of one exchange of a pass in a graph of many, and of one by an all-gather."""
    target = rollout.target
    out = target._hidden[:batch]
    gathered = Exchange(target.parallel, batch, out.shape[1], out.device)

    def microseconds(sums: Any) -> float:
        def many() -> None:
            for turn in range(EXCHANGES):
                sums[turn % 2].fold(batch, out, residual=out)

        many()
        replay = timing.record(many).replay
        times = [timing.elapsed_us(replay) for _ in range(REPLAYS)]
        return round(statistics.median(times) / EXCHANGES, 2)  # in the first one ranks meet

    return [microseconds(target._sums), microseconds((gathered, gathered))]


def measure(
    subject: Subject, parallel: TensorParallel, tokens: int, graphs: str = "auto"
) -> dict[str, Any]:
    """Compares this rank alone with its group, on `tokens` or more; a collective call."""
    world = parallel.world
    note = say if world.rank == 0 else ignore
    words = [*WORDS, f"run.device={world.device}"]
    own = f"engine.graphs={graphs}"
    shared = subject.rollout(*words, own, longest=LONGEST, parallel=parallel)
    one = subject.rollout(*words, longest=LONGEST)
    subject.weights = {}
    found: dict[str, Any] = {"us": {}}
    for batch in BATCHES:
        both = []
        for rollout in (one, shared):
            rollout.fix(OFF)
            pass_us(rollout, subject, batch)  # warm
            both.append(round(pass_us(rollout, subject, batch), 2))
        found["us"][batch] = both + (exchanges_us(shared, batch) if world.device != "cpu" else [])
        note(f"{batch} rows: {found['us'][batch]} us")
    equal, rounds = Arm("tensor parallel"), 0
    length = TOKENS if tokens > 1 else TOKENS // 2
    while equal.tokens < tokens:
        work = subject, BATCHES[-1], length, rounds
        wanted = responses(one, *work)
        for arm in (OFF, *parse_strategies(STRATEGIES)):
            shared.fix(arm)
            compare(equal, wanted, responses(shared, *work))
            note(f"{arm}: {equal.worst_share} of {equal.tokens} tokens")
        rounds += 1
    found |= {"tokens": equal.tokens, "identity": equal.worst_share}
    found["weights_gb"] = [
        round(sum(w.nbytes for w in r.target.state_dict().values()) / 1e9, 4) for r in (one, shared)
    ]
    return found


def main() -> None:
    options = dict(word.split("=", 1) for word in sys.argv[1:])
    world = World.join(options["device"], TIMEOUT_S)
    parallel = TensorParallel.of(world, world.size, options.get("exchange") != "gather")
    torch.set_grad_enabled(False)
    subject = of_shape(options["shape"], [], SHAPES[options["shape"]], world.device)
    graphs = options.get("graphs", "auto")
    found = measure(subject, parallel, int(options["tokens"]), graphs)
    identity = min(world.gather(found["identity"]))
    if world.rank == 0:
        say(json.dumps(found | {"identity": identity}))
    world.leave()


if __name__ == "__main__":
    main()
