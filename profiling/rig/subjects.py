"""Models of the engine's benchmarks: the warmed policy, SmolLM2, shapes with random weights."""

import functools
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from driver.common.tensor_parallel import TensorParallel
from driver.config.load import load_config
from driver.config.strategy import parse_strategies
from driver.drafter.trainer import SpotTrainer
from driver.model import tiny
from driver.model.checkpoint import INDEX
from driver.model.spec import ModelSpec
from driver.rollout.bandit import Bandit
from driver.rollout.observer import RolloutObserver
from driver.rollout.request import Request, Response, SamplingParams, request_id
from driver.run.assemble import prompt_encoder, stop_ids
from driver.run.warm_start import warm_start
from driver.session.load import find_model, load_policy, spec_of
from driver.session.parts import Rollout, adopt_drafter, build_rollout, drafter_state
from driver.tasks import make_task
from profiling.rig.warm import warm_words

Note = Callable[[str], None]
PROMPT_LEN = 64  # tokens of a random prompt
GROUPS, SAMPLES = 32, 8  # of random responses
MEDIAN, SIGMA = 220, 0.9  # of their lengths before these are scaled

# By their published configurations.
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    eos_token_id=0,
)


def qwen2(
    hidden: int, intermediate: int, layers: int, heads: int, kv: int, **more: Any
) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        eos_token_id=151643,
        **{"vocab_size": 151936, "rope_theta": 1e6, "tie_word_embeddings": True, **more},
    )


QWEN2_05B = qwen2(896, 4864, 24, 14, 2)
QWEN2_15B = qwen2(1536, 8960, 28, 12, 2)
QWEN2_7B = qwen2(3584, 18944, 28, 28, 4, vocab_size=152064, tie_word_embeddings=False)


@dataclass
class Subject:
    """A policy with a drafter, ready for an engine."""

    name: str
    words: list[str]  # settings that it was made with
    spec: ModelSpec
    weights: dict[str, Tensor]  # by their Hugging Face names
    stops: tuple[int, ...]  # ids that end a response
    prompts: Callable[[int], list[tuple[int, ...]]]  # the ids of the first n prompts
    drafter: dict | None = None  # state of a checkpoint; None = random weights
    policy: PreTrainedModel | None = None  # of transformers, where there is one
    folder: Path | None = None  # of the policy; None = none is on the disk

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that a plain pass reads; an untied embedding is not read."""
        tied = self.spec.tie_word_embeddings
        unread = "lm_head.weight" if tied else "model.embed_tokens.weight"
        return sum(weight.nbytes for name, weight in self.weights.items() if name != unread)

    def rollout(self, *words: str, longest: int, parallel: TensorParallel | None = None) -> Rollout:
        """Builds an engine with the drafter, and with `words` over the settings of the subject."""
        config = load_config([*self.words, *words])
        rollout = build_rollout(config, self.spec, self.weights, longest, parallel)
        if rollout.spot is not None:
            adopt_drafter(rollout.spot, self.drafter, lambda line: None)
            if not rollout.spot.runner.version:
                rollout.spot.swap()  # random weights draft as fast as trained ones
        return rollout

    def requests(self, limits: Sequence[int], *, stop: bool, round: int = 0) -> list[Request]:
        """One request for each prompt and limit of new tokens; each round has other noise."""
        params = SamplingParams(stop_ids=self.stops if stop else ())
        return [
            Request(
                request_id("eval", round, f"{self.name}/{i}", 0),
                i,
                ids,
                replace(params, max_new_tokens=limit),
            )
            for i, (ids, limit) in enumerate(zip(self.prompts(len(limits)), limits, strict=True))
        ]


def fix_bandit(rollout: Rollout, **settings: Any) -> Bandit:
    """Gives the engine a new bandit with these fields of `BanditConfig` over the old one's."""
    engine = rollout.engine
    arms = parse_strategies(engine.config.strategies)
    config = replace(engine.bandit.config, **settings)
    engine.bandit = Bandit(arms, config, engine.config.spec_max_batch, engine.program.seed)
    return engine.bandit


def spot_of(rollout: Rollout) -> SpotTrainer:
    assert rollout.spot is not None
    return rollout.spot


def of_checkpoint(
    name: str, words: list[str], *, warmed: bool, note: Note, longest: bool = True
) -> Subject:
    """The model of some settings, or its warm start; `longest`: prompts with long answers."""
    config = load_config(words)
    folder: Path | None
    if warmed:
        folder = warm_start(load_config(warm_words(words)), note).path
    else:
        folder = find_model(config, note)
    policy, tokenizer = load_policy(config, folder)
    task, spec = make_task(**asdict(config.task)), spec_of(policy)
    encode = prompt_encoder(config, task, tokenizer)

    @functools.cache
    def prompts(count: int) -> list[tuple[int, ...]]:
        drawn = [task.prompt("eval", i) for i in range(4 * count if longest else count)]
        if longest:
            drawn.sort(key=lambda p: -len(task.demonstration(p) or ""))
        return encode.batch([p.text for p in drawn[:count]])

    return Subject(
        name,
        words,
        spec,
        policy.state_dict(),
        stop_ids(spec, task, encode),
        prompts,
        drafter_state(folder) if warmed else None,
        policy,
        folder,
    )


def empty_model(shape: Qwen2Config | LlamaConfig) -> PreTrainedModel:
    """A model of a shape without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)


def of_shape(name: str, words: list[str], shape: Qwen2Config | LlamaConfig, device: str) -> Subject:
    """A subject with random weights and prompts; only its times mean something."""
    empty = empty_model(shape)
    spec = spec_of(empty)
    draw = torch.Generator(device).manual_seed(0)
    weights = {}
    for tensor_name, value in empty.state_dict().items():
        if spec.tie_word_embeddings and tensor_name == "lm_head.weight":
            continue
        weight = torch.empty(value.shape, dtype=torch.bfloat16, device=device)
        weights[tensor_name] = weight.normal_(0, 0.02, generator=draw)

    def prompts(count: int) -> list[tuple[int, ...]]:
        ids = torch.randint(1000, (count, PROMPT_LEN), generator=torch.Generator().manual_seed(1))
        return [tuple(row) for row in ids.tolist()]

    return Subject(name, words, spec, weights, (), prompts)


def save_random(shape: Qwen2Config, folder: Path, device: str) -> None:
    """A checkpoint whose layers have the same random weights, which are drawn on the device."""
    tiny.build_tokenizer().save_pretrained(folder)
    empty = empty_model(shape)
    about = {"architectures": [type(empty).__name__], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**shape.to_dict(), **about}))
    drawn: dict[str, torch.Tensor] = {}
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, size in spec_of(empty).shapes().items():
        layer, kind = "".join(re.findall(r"\d+", name)), re.sub(r"\d+", "", name)
        if kind not in drawn:
            scale = 0.02 if len(size) > 1 else 1.0
            weight = torch.randn(size, device=device) if scale < 1 else torch.ones(size)
            drawn[kind] = (scale * weight).bfloat16().cpu()
        files.setdefault(f"model-{layer or 'rest'}.safetensors", {})[name] = drawn[kind]
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    places = {name: file for file, tensors in files.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


class PassTimes(RolloutObserver):
    """When the passes of a full batch ended: (passes so far, seconds)."""

    def __init__(self, batch: int) -> None:
        self.batch, self.passes = batch, 0
        self.ends: list[tuple[int, float]] = []

    def on_pass(self, active: int, passes: int = 1) -> None:
        self.passes += passes
        if active == self.batch:
            self.ends.append((self.passes, time.perf_counter()))

    def last(self, count: int) -> tuple[float, float]:
        """Seconds of a pass over about the last `count`, and the mean number of passes before."""
        end, end_s = self.ends[-1]
        begin, begin_s = next(item for item in self.ends if item[0] >= end - count)
        return (end_s - begin_s) / (end - begin), (begin + end) / 2


def responses_of(tokens: int, vocabulary: int) -> list[Response]:
    """Responses with prompts that have about so many tokens in all."""
    draw = random.Random(0)
    lengths = [MEDIAN * draw.lognormvariate(0, SIGMA) for _ in range(GROUPS * SAMPLES)]
    scale = (tokens - PROMPT_LEN * len(lengths)) / sum(lengths)
    params = SamplingParams(max_new_tokens=max(map(int, lengths)))
    made = []
    for i, length in enumerate(lengths):
        group, sample = divmod(i, SAMPLES)
        prompt = tuple(draw.choices(range(1000), k=PROMPT_LEN))
        ids = draw.choices(range(vocabulary), k=max(1, int(scale * length)))
        request = Request(request_id("train", 0, str(group), sample), group, prompt, params)
        made.append(Response(request, ids, [-10.0] * len(ids), "stop"))
    return made
