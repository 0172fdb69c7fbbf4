"""The same requests in our engine and in others by turns: wall times, accept lengths, tokens."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from driver.rollout.request import Request, SamplingParams, request_id
from driver.session.parts import Rollout
from profiling.peers.vllm import Vllm
from profiling.rig import timing
from profiling.rig.bench import Bench
from profiling.rig.subjects import fix_bandit

ROUNDS = 3
START_LIMIT_S = 300
GRAPH_BATCHES = [
    *range(1, 9),
    *range(10, 17, 2),
    *range(20, 33, 4),
    40,
    48,
    56,
    64,
    80,
    96,
    112,
    128,
]
GRAPH_BATCHES += [160, 192, 224, 256]
LEARNING = ("ucb", "beg")


@dataclass(frozen=True)
class Batch:
    """Requests that both engines get."""

    prompts: list[tuple[int, ...]]
    limits: list[int]
    temperature: float = 1.0
    stops: tuple[int, ...] = ()

    def cut(self, limit: int) -> Batch:
        return replace(self, limits=[min(limit, own) for own in self.limits])

    def requests(self) -> list[Request]:
        """For our engine; equal prompts are a group."""
        groups = {ids: number for number, ids in enumerate(dict.fromkeys(self.prompts))}
        params = SamplingParams(self.temperature, stop_ids=self.stops)
        return [
            Request(
                request_id("eval", 0, f"peers/{i}", 0),
                groups[ids],
                ids,
                replace(params, max_new_tokens=limit),
            )
            for i, (ids, limit) in enumerate(zip(self.prompts, self.limits, strict=True))
        ]


@dataclass(frozen=True)
class Made:
    """What an engine made of a batch."""

    seconds: float
    lengths: list[int]
    accept_length: float = 1.0
    tokens: tuple[tuple[int, ...], ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return sum(self.lengths) / self.seconds


Arm = Callable[[Batch], Made]


def ours(rollout: Rollout, policy: str) -> Arm:
    """Our engine with a policy of the bandit. One that learns keeps its state."""
    states: list[Any] = []

    def generate(batch: Batch) -> Made:
        recorder = fix_bandit(rollout, policy=policy)
        if states:
            recorder.bandit.load_state_dict(states[0])
        engine = rollout.engine
        engine.forget()
        requests = batch.requests()
        begin = time.perf_counter()
        responses = engine.generate(requests, record=False)
        seconds = time.perf_counter() - begin
        if policy in LEARNING:
            states[:] = [recorder.bandit.state_dict()]
        tokens = tuple(tuple(response.token_ids) for response in responses)
        return Made(seconds, [*map(len, tokens)], engine.stats.accept_length or 1.0, tokens)

    return generate


def theirs(engine: Vllm, *, counted: bool = False, tokens: bool = False) -> Arm:
    """A vLLM engine; `counted`: with accept lengths, which cost it time."""

    def generate(batch: Batch) -> Made:
        made = engine.generate(
            batch.prompts,
            batch.limits,
            temperature=batch.temperature,
            stops=batch.stops,
            counted=counted,
            tokens=tokens,
        )
        ids = tuple(map(tuple, made.get("tokens", ())))
        return Made(made["seconds"], made["lengths"], made.get("accept_length", 1.0), ids)

    return generate


class Peers:
    """The vLLM engines of a part, started side by side.

    Args:
        bench: takes a row for each start.
        folder: that holds the package.
        logs: folder for what they print.
        scratch: folder for caches.
    """

    def __init__(self, bench: Bench, folder: str, logs: Path, scratch: Path) -> None:
        self.bench, self.folder, self.logs, self.scratch = bench, folder, logs, scratch
        self.logs.mkdir(parents=True, exist_ok=True)
        self.engines: dict[str, Vllm] = {}

    def start(
        self,
        name: str,
        model: Path,
        *,
        kv_gib: int,
        k: int = 0,
        most: int = 256,
        invariant: bool = False,
        **more: Any,
    ) -> None:
        """Begins to start an engine.

        Args:
            name: of the engine.
            model: folder.
            kv_gib: size of its cache.
            k: drafted tokens.
            most: requests of the largest batch with a graph.
            invariant: results do not depend on the batch.
            **more: settings of `vllm.LLM`, over those below.
        """
        label = re.sub(r"\W+", "-", name)
        variables = {"VLLM_CACHE_ROOT": str(self._cache(label))}
        if invariant:
            variables["VLLM_BATCH_INVARIANT"] = "1"
        settings = {
            "model": str(model),
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "gpu_memory_utilization": 0.1,  # must be free; the cache is as follows
            "kv_cache_memory_bytes": kv_gib << 30,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 16384,
            "enable_prefix_caching": False,
            "attention_backend": "FLASH_ATTN",
            **more,
        }
        if k and not settings.get("enforce_eager"):  # its own sizes are many for long chains
            sizes = [(k + 1) * batch for batch in GRAPH_BATCHES if batch <= most]
            settings["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        log = self.logs / f"vllm-{label}.log"
        self.engines[name] = Vllm(name, self.folder, log, variables, **settings)

    def _cache(self, label: str) -> Path:
        """A folder for what an engine compiles: side by side they must not share one.

        They share the records of kinds of models, for each of which vLLM else imports itself again.
        """
        folder, records = self.scratch / f"cache-{label}", self.logs.resolve() / "modelinfos"
        folder.mkdir()
        records.mkdir(exist_ok=True)
        (folder / "modelinfos").symlink_to(records)
        return folder

    def ready(self) -> None:
        """Waits for all of them; one that fails is reported and left out."""
        for name, engine in list(self.engines.items()):
            with self.bench.part(f"vLLM {name}"):
                try:
                    with timing.time_limit(START_LIMIT_S):
                        about = engine.ready()
                except BaseException:
                    self.engines.pop(name).close()
                    raise
                load = round(os.getloadavg()[0], 1)
                row = {**about, "load": load}
                self.bench.add_row(f"start of vLLM, {name}", 1e6 * about["start_s"], **row)
        if not self.engines:
            raise RuntimeError(f"no vLLM engine was started; see {self.logs}")

    def close(self, kept: Sequence[str] = ()) -> None:
        """Ends the engines, but those to keep."""
        for name in self.engines.keys() - set(kept):
            self.engines.pop(name).close()


@dataclass(frozen=True)
class Speed:
    """Of one arm at one batch."""

    tokens_per_s: float
    accept_length: float
    spread: float


def speeds(arms: Mapping[str, Arm], counted: Mapping[str, Arm], batch: Batch) -> dict[str, Speed]:
    """Tokens a second after the first token.

    Args:
        arms: timed, every other round in reverse.
        counted: run once before, for accept lengths and warm caches.
        batch: with equal limits.
    """
    accepted = {name: arm(batch).accept_length for name, arm in counted.items()}
    whole, first = defaultdict(list), defaultdict(list)
    for index in range(ROUNDS):
        for name in arms if index % 2 == 0 else reversed(list(arms)):
            first[name].append(arms[name](batch.cut(1)).seconds)
            whole[name].append(arms[name](batch).seconds)
    out, tokens = {}, sum(batch.limits) - len(batch.limits)
    for name in arms:
        seconds = statistics.median(whole[name]) - statistics.median(first[name])
        spread = (max(whole[name]) - min(whole[name])) / statistics.median(whole[name])
        out[name] = Speed(tokens / seconds, accepted[name], spread)
    return out


def compare(
    bench: Bench,
    case: str,
    found: Mapping[str, Speed],
    own: Sequence[str],
    peer: Sequence[str],
    **more: Any,
) -> None:
    """A row for each arm, and one for our best over vLLM's best."""
    for name in (*own, *peer):
        speed = found[name]
        bench.add_row(
            f"{case}, {name}",
            1e6 / speed.tokens_per_s,
            tokens_per_s=round(speed.tokens_per_s, 1),
            accept_length=round(speed.accept_length, 3),
            spread=round(speed.spread, 3),
            load=round(os.getloadavg()[0], 1),
        )
    best, other = (max(names, key=lambda n: found[n].tokens_per_s) for names in (own, peer))
    bench.add_row(
        case,
        1e6 / found[best].tokens_per_s,
        ours=best,
        tokens_per_s=round(found[best].tokens_per_s, 1),
        vllm=other,
        vllm_tokens_per_s=round(found[other].tokens_per_s, 1),
        over_vllm=round(found[best].tokens_per_s / found[other].tokens_per_s, 3),
        **more,
    )


def equal_share(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Share of the tokens before the first difference of each response.

    Example:
        >>> equal_share([[1, 2], [3, 4]], [[1, 2], [3, 5]])
        0.75
    """
    equal = total = 0
    for one, other in zip(some, others, strict=True):
        longest = max(len(one), len(other))
        same = [i for i in range(longest) if one[i : i + 1] != other[i : i + 1]]
        equal += same[0] if same else longest
        total += longest
    return round(equal / total, 6)
