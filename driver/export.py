"""`python -m driver.export drafter=runs/tiny/checkpoints/step-000028 out=my-drafter`.

Writes the drafter of a training run's checkpoint as a folder that serving engines load as an
EAGLE-3 draft model, checks it by name and shape, reads it back into our engine, and writes a model
card with the accept lengths measured there: on the task it was trained on, and on one it never saw.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from driver.assemble import build_rollout, load_policy, longest_prompt, spec_of, stop_ids
from driver.bandit import Bandit
from driver.checkpoint import ModelSpec, read_json
from driver.command import read_options, run_command
from driver.config import Config, load_config
from driver.drafter import DraftSpec
from driver.errors import UserError
from driver.model import default_feature_layers
from driver.rollout.request import Request, Response, SamplingParams, request_id
from driver.storage import storage_errors
from driver.strategy import Strategy
from driver.tasks import make_task
from driver.warm import drafter_state

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
KIND = "LlamaForCausalLMEagle3"


@dataclass
class Options:
    """Options of the command."""

    drafter: str = ""  # a checkpoint of a training run
    out: str = ""  # the folder to write
    strategy: str = "learned:8,4,32"  # measured for the card
    unseen: str = "multiplication"  # task that the drafter was not trained on
    prompts: int = 16  # of each task
    device: str = "cpu"


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Every tensor of an exported drafter: its shape, and for the maps its dtype.

    Args:
        config: the folder's `config.json`.

    Returns:
        Name to (shape, dtype); weights are listed as float32 and may be of any float dtype.

    Source: the EAGLE-3 draft layout that vLLM and SGLang load.
    """
    hidden, middle, size = (
        config[k] for k in ("hidden_size", "intermediate_size", "draft_vocab_size")
    )
    heads, kv, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (size, hidden),
        "midlayer.self_attn.q_proj.weight": (heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * dim),
        "midlayer.mlp.gate_proj.weight": (middle, hidden),
        "midlayer.mlp.up_proj.weight": (middle, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, middle),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
    }
    return {
        **{name: (shape, torch.float32) for name, shape in shapes.items()},
        "d2t": ((size,), torch.int64),
        "t2d": ((config["vocab_size"],), torch.bool),
    }


def drafter_config(
    shape: DraftSpec, target: Mapping[str, Any], layers: Sequence[int], dtype: torch.dtype
) -> dict[str, Any]:
    """The `config.json` of a drafter.

    Args:
        shape: of the drafter.
        target: the policy's `config.json`; what concerns positions is taken from it, so that the
            drafter reaches as far as its target.
        layers: whose outputs feed the drafter.
        dtype: of the weights.
    """
    rope = {k: target[k] for k in ("rope_parameters", "rope_theta", "rope_scaling") if k in target}
    parameters = rope.get("rope_parameters") or {}
    if "rope_theta" in parameters:  # older loaders look for it here
        rope.setdefault("rope_theta", parameters["rope_theta"])
    if parameters.get("rope_type", "default") != "default":
        rope.setdefault("rope_scaling", parameters)
    ends = {k: target[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in target}
    return {
        "architectures": [KIND],
        "model_type": "llama",
        "attention_bias": False,
        "draft_vocab_size": shape.draft_vocab,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(layers),
            "use_aux_hidden_state": True,
        },
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": target["max_position_embeddings"],
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_eps,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": shape.vocab_size,
        **rope,
        **ends,
    }


def write_drafter(folder: Path, state: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Writes weights and configuration.

    Args:
        folder: made if it is not there.
        state: of `driver.drafter.Drafter`.
        config: from `drafter_config`.

    Raises:
        UserError: the file system refused.
    """
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {
        name: (value.to(dtype) if value.is_floating_point() else value).contiguous()
        for name, value in state.items()
    }
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_drafter(folder: Path, target: ModelSpec | None = None) -> dict[str, Tensor]:
    """Reads an exported drafter, checked by name, shape and content.

    Args:
        folder: that `write_drafter` wrote, or an EAGLE-3 drafter from elsewhere.
        target: the model that it is to draft for; None = not checked against one.

    Returns:
        A state for `driver.drafter.Drafter` and `DraftRunner.load`.

    Raises:
        UserError: what is missing, unknown, misshapen or of another model, by name.
    """
    problems = check_drafter(folder, target)
    if problems:
        raise UserError(f"{folder}: {'; '.join(problems)}")
    return load_file(folder / WEIGHTS)


def check_drafter(folder: Path, target: ModelSpec | None = None) -> list[str]:
    """What a serving loader would miss in a drafter's folder; [] where all is there.

    Args:
        folder: of the drafter.
        target: the model that it is to draft for.

    Raises:
        UserError: a file is missing or unreadable.
    """
    config = read_json(folder / CONFIG)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS}: cannot be read ({error})") from error
    problems = _config_problems(config, target)
    if problems:
        return problems
    expected = expected_tensors(config)
    problems += [f"tensor {name} is missing" for name in expected.keys() - tensors.keys()]
    problems += [f"tensor {name} is unknown" for name in tensors.keys() - expected.keys()]
    for name in expected.keys() & tensors.keys():
        shape, dtype = expected[name]
        value = tensors[name]
        same_kind = value.is_floating_point() if dtype.is_floating_point else value.dtype == dtype
        if tuple(value.shape) != shape or not same_kind:
            problems.append(f"tensor {name}: wanted {list(shape)}, got {list(value.shape)}")
    if not problems:
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        if not torch.equal(tensors["t2d"].nonzero()[:, 0], ids.sort().values):
            problems.append("t2d does not mark the tokens that d2t names")
    return sorted(problems)


def _config_problems(config: Mapping[str, Any], target: ModelSpec | None) -> list[str]:
    fixed = {
        "architectures": [KIND],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    sizes = (
        "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim"
        " vocab_size draft_vocab_size max_position_embeddings"
    ).split()
    problems = [
        f"config.json: {key} is {config.get(key)!r}, wanted {value!r}"
        for key, value in fixed.items()
        if config.get(key) != value
    ]
    problems += [f"config.json: {key} is missing" for key in sizes if key not in config]
    layers = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids", [])
    if len(layers) != 3:
        problems.append("config.json: eagle_config names no three layers")
    if target is not None and not problems:
        wanted = {
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "head_dim": target.head_dim,
        }
        problems += [
            f"config.json: {key} is {config[key]}, the target's {value}"
            for key, value in wanted.items()
            if config[key] != value
        ]
        if config["max_position_embeddings"] < target.max_position:  # its RoPE would be clamped
            problems.append(
                f"config.json: max_position_embeddings is {config['max_position_embeddings']},"
                f" fewer than the target's {target.max_position}"
            )
    return problems


# ---- the command --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """What a drafter did on one task."""

    task: str
    accept_length: float
    tokens: int
    seen: bool


class _Bench:
    """The checkpoint's policy with the exported drafter in our engine."""

    def __init__(self, options: Options, checkpoint: Path, state: Mapping[str, Tensor]) -> None:
        self.config = run_config(checkpoint, options)
        self.options = options
        self.policy, self.tokenizer = load_policy(self.config, checkpoint)
        self.spec = spec_of(self.policy)
        tasks = (self.config.task.name, options.unseen)
        self.tasks = [
            make_task(**asdict(replace(self.config.task, name=name)))
            for name in dict.fromkeys(tasks)
        ]
        longest = max(longest_prompt(task, self.tokenizer) for task in self.tasks)
        limit = self.config.sampling.max_new_tokens
        self.rollout = build_rollout(
            self.config,
            self.spec,
            self.policy.state_dict(),
            min(longest + limit, self.spec.max_position),
        )
        runner = self.rollout.engine.proposers["learned"]
        runner.load(state, 1)

    def measure(self) -> list[Measurement]:
        return [self._measure(task, seen=index == 0) for index, task in enumerate(self.tasks)]

    def _measure(self, task: Any, seen: bool) -> Measurement:
        params = SamplingParams(
            temperature=self.config.sampling.temperature,
            max_new_tokens=self.config.sampling.max_new_tokens,
            stop_ids=stop_ids(self.spec, task, self.tokenizer),
        )
        requests = []
        for i in range(self.options.prompts):
            prompt = task.prompt("eval", i)
            ids = self.tokenizer.encode(prompt.text, add_special_tokens=False)
            requests.append(Request(request_id("eval", 0, prompt.id, 0), i, tuple(ids), params))
        drafted = self._generate(requests, Strategy.parse(self.options.strategy))
        stats = self.rollout.engine.stats
        if drafted != self._generate(requests, Strategy("off")):
            raise UserError(f"{task.name}: the drafter changed a token; please report this")
        return Measurement(task.name, stats.accept_length or 1.0, stats.emitted, seen)

    def _generate(self, requests: Sequence[Request], strategy: Strategy) -> list[list[int]]:
        fixed = replace(self.config.bandit, policy="static", static=str(strategy))
        arms = [Strategy("off"), *({strategy} - {Strategy("off")})]
        engine = self.rollout.engine
        engine.bandit = Bandit(arms, fixed, self.config.engine.spec_max_batch)
        responses: list[Response] = engine.generate(requests, record=False)
        return [response.token_ids for response in responses]


def check_out(folder: Path) -> None:
    """Refuses a folder with anything but an earlier export, such as a checkpoint with weights."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    ours = names <= {WEIGHTS, CONFIG, CARD} and CONFIG in names
    if names and not (ours and read_json(folder / CONFIG).get("architectures") == [KIND]):
        raise UserError(f"out={folder}: holds other files; choose an empty or a new folder")


def run_config(checkpoint: Path, options: Options) -> Config:
    """The configuration of the checkpoint's run, with one strategy and the device asked for."""
    recorded = checkpoint.parent.parent / "config.yaml"
    if not recorded.exists():
        raise UserError(f"drafter={checkpoint}: wanted runs/<name>/checkpoints/step-<n> of a run")
    return load_config(
        [
            f"preset={recorded}",
            f"run.device={options.device}",
            f"engine.strategies=off {options.strategy}",
            f"engine.max_batch={options.prompts}",
            f"engine.spec_max_batch={options.prompts}",
            "spot.mode=off",
            "bandit.policy=static",
            "bandit.static=off",
        ]
    )


def card(config: Mapping[str, Any], run: str, version: int, rows: Sequence[Measurement]) -> str:
    """The model card, in Markdown."""
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    text = (
        "A one-layer EAGLE-3 draft model, trained beside the rollouts of a reinforcement learning"
        f" run (version {version}). It reads the outputs of layers {', '.join(map(str, layers))} of"
        f" its target and drafts {config['draft_vocab_size']} of {config['vocab_size']} tokens. It"
        " suits the policy it was trained beside, and drafts worse for any other."
    )
    lines = [
        f"# Draft model of {run}",
        "",
        *textwrap.wrap(text, 100),
        "",
        "| task | trained on it | mean tokens per verify pass | tokens measured |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {r.task} | {'yes' if r.seen else 'no'} | {r.accept_length:.2f} | {r.tokens} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
    options = read_options(Options, argv)
    for name in ("drafter", "out"):
        if not getattr(options, name):
            raise UserError(f"{name}: missing; give {name}=<folder>")
    if Strategy.parse(options.strategy).kind != "learned":
        raise UserError(f"strategy={options.strategy}: wanted learned:depth,top_k,num_verify")
    checkpoint, out = Path(options.drafter).expanduser(), Path(options.out).expanduser()
    check_out(out)
    saved = drafter_state(checkpoint)
    if saved is None or not saved["version"]:
        raise UserError(f"drafter={checkpoint}: wanted a checkpoint with a trained drafter")
    run, spec = run_config(checkpoint, options), ModelSpec.from_folder(checkpoint)
    make_task(**asdict(replace(run.task, name=options.unseen)))  # if mistyped, says so now
    state, target = saved["drafter"], read_json(checkpoint / CONFIG)
    middle, size = len(state["midlayer.mlp.gate_proj.weight"]), len(state["d2t"])
    shape = DraftSpec.of(spec, middle, size)
    layers = run.drafter.feature_layers or default_feature_layers(spec.num_layers)
    config = drafter_config(shape, target, layers, getattr(torch, run.model.dtype))
    write_drafter(out, state, config)
    rows = _Bench(options, checkpoint, read_drafter(out, spec)).measure()
    text = card(config, checkpoint.parent.parent.name, saved["version"], rows)
    with storage_errors(out):
        (out / CARD).write_text(text, encoding="utf-8")
    names = expected_tensors(config)
    for name, (sizes, _) in names.items():
        sys.stdout.write(f"{name:<44}{'x'.join(map(str, sizes))}\n")
    sys.stdout.write(f"{out}: {len(names)} tensors, all that the loaders ask for\n")
    for row in rows:
        sys.stdout.write(f"{row.task}: accept length {row.accept_length:.2f}\n")


if __name__ == "__main__":
    run_command(main)
