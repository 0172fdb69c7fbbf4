"""Rollout `tlt` of verl: a Ray actor with a session, its replica, and the trainer's side.

Importing this module registers the rollout. The installed package does it through the entry point
`verl.plugins`; in a checkout set `VERL_USE_EXTERNAL_MODULES=driver.adapters.verl`.
"""

import asyncio
import hashlib
import os
from functools import cached_property
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name, get_resource_name, is_support_ipc
from verl.workers.config import HFModelConfig
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import (
    RolloutMode,
    RolloutReplica,
    RolloutReplicaRegistry,
    TokenOutput,
)

from ..common.errors import UserError
from ..rollout.request import Request, SamplingParams
from ..session import Session
from .buckets import collect, transfer

NAME = "tlt"
MAX_BATCH = 256  # requests that run at once, where `max_num_seqs` is larger
# Values that change nothing.
NEUTRAL = {"repetition_penalty": 1.0, "min_p": 0.0, "presence_penalty": 0, "frequency_penalty": 0}


class Server:
    """Serves one replica: a Ray actor with one engine, whose methods verl calls.

    `config` and `model_config` are verl's `RolloutConfig` and `HFModelConfig`. `engine_kwargs.tlt`
    may have `settings`, `drafter` and `train_drafter`, as for `Session.from_pretrained`. `mode`
    says whether the trainer shares the device.
    """

    def __init__(
        self, config: Any, model_config: Any, mode: RolloutMode, visible_devices: str
    ) -> None:
        os.environ[get_platform().visible_devices_envvar()] = visible_devices
        self.config, self.mode = omega_conf_to_dataclass(config), mode
        model: HFModelConfig = omega_conf_to_dataclass(model_config, HFModelConfig)
        own = dict(self.config.engine_kwargs.get(NAME) or {})
        own["settings"] = [f"model.dtype={self.config.dtype}", *own.get("settings", ())]
        kind = get_device_name()
        self.device = torch.device(kind if kind == "cpu" else f"{kind}:0")
        self.session = Session.from_pretrained(
            str(model.local_path),
            tokenizer=model.tokenizer,
            device=str(self.device),
            seed=self.config.seed,
            max_batch=min(self.config.max_num_seqs, MAX_BATCH),
            max_len=self.max_len,
            **own,
        )
        self.version = 0
        self._open = asyncio.Event()  # whether requests are admitted
        self._open.set()
        self._rejects = False  # requests that arrive while they are not
        self._running: set[str] = set()  # ids of requests

    @property
    def max_len(self) -> int:
        return self.config.max_model_len or self._trained_len

    @property
    def _trained_len(self) -> int:
        return self.config.prompt_length + self.config.response_length

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        **media: Any,
    ) -> TokenOutput:
        """The response to a prompt, to which the tokens of an aborted request are appended.

        The noise is keyed by the version of the weights and the id, so equal ids and prompts get
        equal tokens. Raises UserError for a setting that the engine does not have, if there is no
        room for a token, or if a request with this id runs.
        """
        if given := [name for name, value in media.items() if value]:
            raise UserError(f"rollout {NAME}: it generates from texts alone, got {given}")
        while not self._open.is_set():  # it may be closed again before this request goes on
            if self._rejects:
                fields = {"global_steps": self.version}
                return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=fields)
            await self._open.wait()
        wanted = dict(sampling_params)
        with_logprobs = wanted.pop("logprobs", False)
        params = self._params(len(prompt_ids), wanted)
        if request_id in self._running:
            raise UserError(
                f"rollout {NAME}: request {request_id} runs already, and equal ids draw equal"
                " tokens; give each request its own, or set rollout.full_determinism=False"
            )
        key = noise_key(f"{self.version}/{request_id}")
        self._running.add(request_id)
        try:
            request = Request(key, 0, tuple(prompt_ids), params)
            response = await asyncio.wrap_future(self.session.submit(request))
        finally:
            self._running.discard(request_id)
        return TokenOutput(
            token_ids=response.token_ids,
            log_probs=response.logprobs if with_logprobs else None,
            stop_reason="aborted" if response.finish == "abort" else "completed",
            extra_fields={
                "global_steps": response.version,
                "accept_length": response.accept_length,
            },
        )

    def _params(self, prompt_len: int, wanted: dict[str, Any]) -> SamplingParams:
        room = self.max_len - prompt_len
        if room < 1:
            raise UserError(
                f"rollout {NAME}: a prompt of {prompt_len} tokens leaves no room in max_model_len="
                f"{self.max_len}; raise it or shorten the prompt"
            )
        # In later turns the prompt contains those before, which count as response.
        most = min(self.config.response_length, self._trained_len - prompt_len)
        limit = wanted.pop("max_tokens", wanted.pop("max_new_tokens", most))
        temperature, top_p = wanted.pop("temperature", 1.0), wanted.pop("top_p", 1.0)
        top_k = max(0, wanted.pop("top_k", 0))  # -1: all tokens
        ignore_eos = wanted.pop("ignore_eos", self.config.ignore_eos)
        stops = () if ignore_eos else self.session.params.stop_ids
        stops = (*stops, *(wanted.pop("stop_token_ids", None) or ()))  # of a tool's call
        if unknown := {k: v for k, v in wanted.items() if v != NEUTRAL.get(k)}:
            raise UserError(f"rollout {NAME}: the engine has no sampling settings {unknown}")
        return SamplingParams(temperature, top_k, top_p, max(1, min(limit, room)), stops)

    # ---- weights --------------------------------------------------------------------------------

    async def update_weights(self, handle: str, use_shm: bool, version: int | None) -> None:
        """Receives what `ServerAdapter.update_weights` sends, by CUDA IPC or host memory.

        The version is written into responses; None: unchanged.
        """
        await asyncio.to_thread(self._receive, handle, use_shm, version)

    def _receive(self, handle: str, use_shm: bool, version: int | None) -> None:
        weights = collect(transfer().BucketedWeightReceiver(handle, self.device, use_shm))
        version = self.version if version is None else version
        self.session.update_weights(weights, version)
        self.version = version

    async def set_global_steps(self, global_steps: int) -> None:
        """The version of the weights, if it changed and they did not."""
        self.version = global_steps

    async def save_drafter(self, folder: str) -> None:
        """See `Session.save_drafter`; the folder is on the server's node."""
        await asyncio.to_thread(self.session.save_drafter, folder)

    # ---- memory ---------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Frees the KV cache, if the trainer shares the device."""
        if self.config.free_cache_engine and self.mode != RolloutMode.STANDALONE:
            await self.release_kv_cache()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Gets the KV cache back. The weights stay on the device, in the engine's own copy."""
        if tags is None or "kv_cache" in tags:
            await self.resume_kv_cache()

    async def release_kv_cache(self) -> None:
        await asyncio.to_thread(self.session.sleep)

    async def resume_kv_cache(self) -> None:
        await asyncio.to_thread(self.session.wake)

    async def clear_kv_cache(self) -> None:
        """Nothing: no KV is kept after its request."""

    # ---- requests -------------------------------------------------------------------------------

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Ends all requests with the tokens so far; later ones wait for `resume_generation`.

        With `reject_request` later requests do not wait and get an empty response.
        """
        self._open.clear()
        self._rejects = reject_request
        ended = await asyncio.to_thread(self.session.abort)
        ids = [response.request.id for response in ended]
        return {"aborted_count": len(ids), "request_ids": ids}

    async def resume_generation(self) -> None:
        self._rejects = False
        self._open.set()

    async def start_profile(self, **_: Any) -> None:
        """Nothing: `tlt report` and `profiling/` measure the engine."""

    async def stop_profile(self) -> None:
        """Nothing."""


class Replica(RolloutReplica):
    """One server beside one worker; verl makes one replica for each device."""

    async def launch_servers(self) -> None:
        """Starts the server on the node and the device of its worker."""
        check_config(self.config)
        if self.is_reward_model or self.is_teacher_model:
            raise UserError(
                f"rollout {NAME}: it serves the policy, no reward model and no teacher; give those"
                " another rollout.name"
            )
        resource = get_resource_name()
        node, devices = await self.workers[0].__ray_call__.remote(
            lambda self: (
                ray.get_runtime_context().get_node_id(),
                ray.get_runtime_context().get_accelerator_ids()[resource],
            )
        )
        platform = get_platform()
        variables = {name: "1" for name in platform.ray_noset_envvars()}
        server: Any = (
            ray.remote(Server)
            .options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                runtime_env={"env_vars": {**variables, **platform.rollout_env_vars()}},
                name=server_name(self.replica_rank),
                max_concurrency=self.max_concurrency,
            )
            .remote(self.config, self.model_config, self.rollout_mode, ",".join(devices))
        )
        await server.clear_kv_cache.remote()  # its engine is built
        self.servers, self._server_handle = [server], server
        # There is no HTTP server; the load balancer tells replicas apart by this name.
        self._server_address = f"{NAME}-{self.replica_rank}"


class ServerAdapter(BaseRollout):
    """The trainer's side: sends memory commands and weights to the server of its device."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        job = ray.get_runtime_context().get_job_id()
        self.handle = f"ipc:///tmp/{NAME}-{job}-{self.replica_rank}.sock"

    @cached_property
    def server(self) -> Any:
        """The server's actor, which starts after the trainer's workers."""
        return ray.get_actor(server_name(self.replica_rank))

    async def resume(self, tags: list[str]) -> None:
        """Gets memory back: `weights` or `kv_cache`."""
        if self.config.free_cache_engine:
            await self.server.wake_up.remote(tags)

    async def release(self) -> None:
        """Frees the KV cache."""
        if self.config.free_cache_engine:
            await self.server.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Sends whole tensors to the server: by CUDA IPC, or through host memory elsewhere.

        Raises UserError for deltas (another `wire_format`) or unmerged LoRA weights
        (`peft_config`).
        """
        if wire_format != "named_tensors" or peft_config is not None:
            raise UserError(
                f"rollout {NAME}: it takes whole weights, not wire_format={wire_format} or a LoRA"
                " adapter; use checkpoint_engine.backend=naive and model.lora.merge=True"
            )
        use_shm = not is_support_ipc()
        done = self.server.update_weights.remote(self.handle, use_shm, global_steps)
        bucket = self.config.checkpoint_engine.update_weights_bucket_megabytes
        sender = transfer().BucketedWeightSender(self.handle, bucket, use_shm)
        await sender.async_send_weights(weights)
        await done


def check_config(config: Any) -> None:
    """Raises UserError for a setting of verl's `RolloutConfig` that would be ignored."""
    sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    refused = {f"{name}={getattr(config, name)}": getattr(config, name) > 1 for name in sizes}
    refused |= {
        f"quantization={config.quantization}": config.quantization,
        "qat": (config.qat or {}).get("enable"),
        "mtp": config.mtp and config.mtp.enable and config.mtp.enable_rollout,
        "enable_rollout_routing_replay": config.enable_rollout_routing_replay,
        "prometheus": config.prometheus.enable,
        f"scheduling_policy={config.scheduling_policy}": config.scheduling_policy != "fcfs",
    }
    if given := [name for name, used in refused.items() if used]:
        raise UserError(f"rollout {NAME}: the engine does not have {given}; leave them out")
    # The engine's log-probs are those of the logits over the temperature.
    equal = {
        "processed_logprobs": config.top_k <= 0 and config.top_p == 1,
        "raw_logprobs": config.temperature == 1,
    }
    if config.calculate_log_probs and not equal.get(config.logprobs_mode):
        raise UserError(
            f"rollout {NAME}: logprobs_mode={config.logprobs_mode} with temperature="
            f"{config.temperature}, top_k={config.top_k}, top_p={config.top_p}: log-probs are those"
            " after the temperature and before top-k and top-p; set top_k=-1 and top_p=1, or"
            " calculate_log_probs=False"
        )


def server_name(replica_rank: int) -> str:
    return f"{NAME}_server_{replica_rank}"


def noise_key(name: str) -> int:
    """The 62-bit id of a request."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


_ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{ServerAdapter.__name__}"
RolloutReplicaRegistry.register(NAME, lambda: Replica)
