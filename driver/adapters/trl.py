"""Rollouts of TRL's `GRPOTrainer`, for its argument `rollout_func`."""

import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from ..common.errors import UserError
from ..rollout.request import Request, SamplingParams, request_id
from ..session import Session
from ..session.inbox import OnEnd
from ..session.pretrained import check_words

Trainer = Any  # `trl.GRPOTrainer`, whose annotations lack what its constructor assures
HALF = {"bf16": "bfloat16", "fp16": "float16"}  # dtypes of mixed precision
# What TRL's generation takes from the model's generation_config, and the value without effect.
DECODING: dict[str, Any] = {"typical_p": 1, "num_beams": 1, "guidance_scale": 1}
DECODING |= dict.fromkeys(("min_p", "min_length", "min_new_tokens", "no_repeat_ngram_size"), 0)
DECODING |= dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), 0)
DECODING |= dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens"))
DECODING |= dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "sequence_bias"))
DECODING |= dict.fromkeys(("stop_strings", "exponential_decay_length_penalty"))


class TltRollout:
    """Generates the completions of TRL's GRPO trainer in place of its own `generate`.

    The session is built at the first call, on the device of the process, and gets the weights of
    the policy whenever the trainer has changed them. Prompts, chat template, end tokens and
    sampling are those of the trainer. The noise of a completion is keyed by (seed, step, prompt,
    sample), so a run with the same seed has the same tokens, with any number of processes.

    Args:
        drafter: folder of a drafter's checkpoint.
        train_drafter: whether a drafter is trained during the tails of rollouts.
        on_end: answers the end of a turn with tokens of a tool or None, see `Session.submit`. TRL
            leaves these tokens out of the loss.
        max_batch: completions that run at once; None: the default of `Session`.
        max_len: most tokens of a prompt and its completion; None: the context of the model.
        settings: words such as `engine.strategies=[off,ngram:4,1,5]`, as on the command line.

    Attributes:
        session: None before the first call.
        updates: number of times that the session got new weights.

    Example:
        >>> from tlt_ext.driver.adapters.trl import TltRollout                   # doctest: +SKIP
        >>> rollout = TltRollout()                                               # doctest: +SKIP
        >>> trainer = GRPOTrainer(model, rewards, rollout_func=rollout, ...)     # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        drafter: str | None = None,
        train_drafter: bool = False,
        on_end: OnEnd | None = None,
        max_batch: int | None = None,
        max_len: int | None = None,
        settings: Sequence[str] = (),
    ) -> None:
        check_words(settings)
        self.drafter, self.train_drafter, self.on_end = drafter, train_drafter, on_end
        self.max_batch, self.max_len, self.settings = max_batch, max_len, tuple(settings)
        self.session: Session | None = None
        self.updates = 0
        self._trainer: weakref.ref[Trainer] | None = None  # that of the session
        self._state: tuple[object, ...] = ()  # of the weights that the session has
        self._calls: Counter[tuple[str, int]] = Counter()  # by phase and step

    def __call__(self, prompts: list[Any], trainer: Trainer) -> dict[str, list[Any]]:
        """The completions of the prompts of this process.

        Args:
            prompts: texts or conversations, each repeated for every completion.
            trainer: has the tokenizer, the policy and the settings of its generation.

        Returns:
            `prompt_ids`, `completion_ids` and `logprobs` of each prompt, with `on_end` also the
            `env_mask`, 0 at tokens of tools. A completion ends with its end token, or was cut at
            `max_completion_length`; nothing is appended.

        Raises:
            UserError: a setting of the trainer that the engine does not have.
        """
        check_trainer(trainer)
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise UserError("TltRollout: the prompts have images; the engine generates text only")
        session = self._synced(trainer)
        longest = max(map(len, prompt_ids)) + trainer.max_completion_length
        if longest > (room := session.rollout.target.spec.max_position):
            raise UserError(
                f"TltRollout: a prompt with max_completion_length={trainer.max_completion_length}"
                f" has {longest} tokens, at most {room} fit; lower it, shorten the prompt, raise"
                " max_len, or use a model with a longer context"
            )
        params = SamplingParams(
            trainer.temperature,
            trainer.top_k or 0,
            trainer.top_p,
            trainer.max_completion_length,
            tuple(trainer.eos_token_ids),
        )
        groups: dict[tuple[int, ...], int] = {}
        requests = []
        for id, ids in zip(self._keys(trainer, len(prompts)), prompt_ids, strict=True):
            prompt = tuple(ids)
            requests.append(Request(id, groups.setdefault(prompt, len(groups)), prompt, params))
        responses = session.generate(requests, on_end=self.on_end)
        accepted = [r.accept_length for r in responses if r.accept_length is not None]
        if accepted:  # otherwise no pass speculated
            mean = sum(accepted) / len(accepted)
            trainer._metrics[_phase(trainer)]["tlt/accept_length"].append(mean)
        out = {
            "prompt_ids": prompt_ids,
            "completion_ids": [response.token_ids for response in responses],
            "logprobs": [response.logprobs for response in responses],
        }
        if self.on_end is not None:
            out["env_mask"] = [[int(own) for own in response.generated] for response in responses]
        return out

    def close(self) -> None:
        """Frees the engine; a further call builds another one."""
        if self.session is not None:
            self.session.close()
        self.session = self._trainer = None
        self._calls.clear()
        gc.collect()  # parts of an engine refer to each other

    def _synced(self, trainer: Trainer) -> Session:
        """The session, with the weights that the policy has now."""
        policy = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        # Torch counts changes in place, so a checkpoint that was loaded is seen, too. It does not
        # count writes to `Tensor.data`, with which averaged weights are put in for an evaluation.
        weights, step = policy.state_dict(), trainer.state.global_step
        state = _phase(trainer), step, *(weight._version for weight in weights.values())
        if self._trainer is None or self._trainer() is not trainer:  # it has settings of its own
            self.close()
        if self.session is None:
            device = trainer.accelerator.device  # of this process; "cpu:0" among several
            # In mixed precision the policy has float32 weights and computes in another type.
            half = HALF.get(trainer.accelerator.mixed_precision)
            words = [f"model.dtype={half}"] if half else []
            self.session = Session.from_pretrained(
                policy,
                tokenizer=trainer.processing_class,
                drafter=self.drafter,
                train_drafter=self.train_drafter,
                device="cpu" if device.type == "cpu" else str(device),
                seed=trainer.args.seed,
                max_batch=self.max_batch,
                max_len=self.max_len,
                settings=[*words, *self.settings],
            )
        elif state != self._state:
            self.session.update_weights(weights, version=step)
            self.updates += 1
        self._trainer, self._state = weakref.ref(trainer), state
        return self.session

    def _keys(self, trainer: Trainer, count: int) -> list[int]:
        """Ids of the requests of this process, by their place in the batch of all processes."""
        args, phase, step = trainer.args, _phase(trainer), trainer.state.global_step
        call = self._calls[phase, step]  # gradient accumulation: several rollouts of one step
        self._calls[phase, step] += 1
        train = phase == "train"
        samples = trainer.num_generations if train else trainer.num_generations_eval
        rows = args.generation_batch_size // args.world_size if train else args.eval_batch_size
        first = trainer.accelerator.process_index * rows
        # Evaluations have the same noise at every step, so that they differ only by the policy.
        noise_step = step if train else 0
        return [
            request_id(phase, noise_step, f"{call}.{row // samples}", row % samples)
            for row in range(first, first + count)
        ]


def check_trainer(trainer: Trainer) -> None:
    """Raises UserError for a setting of the trainer that would be ignored."""
    args = trainer.args
    policy = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    refused = {
        "max_completion_length=None": trainer.max_completion_length is None,
        f"min_p={trainer.min_p}": trainer.min_p,
        f"repetition_penalty={trainer.repetition_penalty}": trainer.repetition_penalty != 1.0,
        f"generation_kwargs={args.generation_kwargs}": args.generation_kwargs,
        f"cache_implementation={args.cache_implementation}": args.cache_implementation,
        "use_transformers_continuous_batching": args.use_transformers_continuous_batching,
        "cast_lm_head_to_fp32": args.cast_lm_head_to_fp32,
        "use_vllm": trainer.use_vllm,
        "tools": trainer.tools,
        "environment_factory": trainer.environment_factories,
        "a PEFT model": hasattr(trainer.model, "peft_config"),
        "FSDP": trainer.is_fsdp_enabled,
        "DeepSpeed": trainer.is_deepspeed_enabled,
    }
    for name, neutral in DECODING.items():
        value = getattr(policy.generation_config, name, None)
        refused[f"{name}={value} of the model's generation_config"] = value not in (None, neutral)
    for name, used in refused.items():
        if used:
            raise UserError(
                f"TltRollout: the trainer uses {name}, which the engine does not have;"
                " leave it out or train without rollout_func"
            )
    if None in trainer.eos_token_ids:
        raise UserError("TltRollout: the tokenizer has no end token; set its eos_token")


def _phase(trainer: Trainer) -> Literal["train", "eval"]:
    return "train" if trainer.model.training else "eval"
