"""`python -m profiling.peers.vllm SETTINGS`: a vLLM engine that another process drives.

vLLM is no dependency. It runs in this process, with its own PYTHONPATH, and nothing here imports
the driver. `Vllm` starts the process and talks to it: a line of JSON to its stdin is a batch, a
line of JSON from its stdout the answer. The first answer says how the engine was started. Seconds
are of `LLM.generate` with token ids in and out. Between batches the process is stopped, so that it
takes no time of the host from the engine that is measured.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOW_TO_GET = "needs vLLM: pip install --target FOLDER vllm==0.24.0, then --vllm FOLDER"
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is for top-k and top-p, which are not used
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}
COUNTERS = "vllm:spec_decode_num_"
STOPPING_S = 2
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
VLLM = "--vllm"


def lacks_vllm(folder: str) -> str:
    """Why vLLM cannot be started from a folder, or from where Python finds it; "" = it can."""
    if folder:
        found = (Path(folder) / "vllm").is_dir()
        return "" if found else f"--vllm {folder}: holds no folder named vllm"
    return "" if importlib.util.find_spec("vllm") else HOW_TO_GET


def environment(folder: str) -> dict[str, str]:
    """The variables of a process that imports vLLM from a folder; see `lacks_vllm`."""
    path = [str(Path(folder).resolve())] if folder else []
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)}


class Vllm:
    """A vLLM engine in a process of its own, with settings of `vllm.LLM`, which prints to `log`."""

    def __init__(
        self, name: str, folder: str, log: Path, variables: dict[str, str], **settings: Any
    ) -> None:
        self.name, self.log = name, log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "profiling.peers.vllm", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, **environment(folder), **variables},
                start_new_session=True,
            )

    def ready(self) -> dict[str, Any]:
        """Waits for the start; how the engine was started."""
        return self._answer()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended
            os.killpg(self.process.pid, number)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        *,
        temperature: float = 1.0,
        stops: Sequence[int] = (),
        counted: bool = False,
        tokens: bool = False,
    ) -> dict[str, Any]:
        """Generates one batch: `seconds`, `lengths`, and what is asked for.

        Without `stops` the end tokens of the model do not end a response. `counted` asks for
        `accept_length`, which costs time, `tokens` for the ids.
        """
        batch = {
            "prompts": [list(ids) for ids in prompts],
            "limits": list(limits),
            "temperature": temperature,
            "stops": list(stops),
            "counted": counted,
            "tokens": tokens,
        }
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # its answer says why it ended
            self.process.stdin.write(json.dumps(batch) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOPPING_S)
        self._signal(signal.SIGKILL)  # the group, which may outlive its first process
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            raise RuntimeError(f"vLLM {self.name}: {answer['error']}; see {self.log}")
        self._signal(signal.SIGSTOP)
        return answer


class Server:
    """The engine in its process, with settings of `vllm.LLM`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        begin = time.perf_counter()
        import vllm

        self.vllm: Any = vllm
        spec = settings.get("speculative_config") or {}
        if load := spec.pop("draft_load_format", ""):
            from vllm.config import LoadConfig

            spec["draft_load_config"] = LoadConfig(load_format=load)
        self.llm = vllm.LLM(**settings, seed=0, disable_log_stats=not spec)
        self.seconds = time.perf_counter() - begin
        engine = self.llm.llm_engine
        core = getattr(engine.engine_core, "engine_core", None)
        holders: tuple[Any, ...] = (
            engine,
            engine.output_processor,
            core,
            getattr(core, "scheduler", None),
        )
        self.counting = [holder for holder in holders if hasattr(holder, "log_stats")]
        self.logger = engine.logger_manager
        self.count(False)

    def about(self) -> dict[str, Any]:
        """Version, seconds of the start, and what vLLM chose."""
        config = self.llm.llm_engine.vllm_config
        compiled = config.compilation_config
        return {
            "vllm": self.vllm.__version__,
            "start_s": round(self.seconds, 1),
            "runner": "v2" if config.use_v2_model_runner else "v1",
            "graphs": str(compiled.cudagraph_mode),
            "largest_graph": compiled.max_cudagraph_capture_size,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
        }

    def count(self, on: bool) -> None:
        """Turns the statistics on or off: they cost host time."""
        for holder in self.counting:
            holder.log_stats = on
        self.llm.llm_engine.logger_manager = self.logger if on else None

    def counters(self) -> dict[str, Any]:
        return {
            metric.name.removeprefix(COUNTERS): metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith(COUNTERS) and hasattr(metric, "value")
        }

    def generate(self, batch: dict[str, Any]) -> dict[str, Any]:
        stops = batch["stops"]
        params = [
            self.vllm.SamplingParams(
                temperature=batch["temperature"],
                max_tokens=limit,
                stop_token_ids=stops,
                ignore_eos=not stops,
                detokenize=False,
            )
            for limit in batch["limits"]
        ]
        prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
        if batch["counted"]:
            self.count(True)
            before = self.counters()
        begin = time.perf_counter()
        made = self.llm.generate(prompts, params, use_tqdm=False)
        answer: dict[str, Any] = {"seconds": time.perf_counter() - begin}
        if batch["counted"]:
            after = self.counters()
            self.count(False)
            drafts, accepted = (
                after.get(name, 0) - before.get(name, 0) for name in ("drafts", "accepted_tokens")
            )
            answer["accept_length"] = 1 + accepted / drafts if drafts else 1.0
        tokens = [list(one.outputs[0].token_ids) for one in made]
        answer["lengths"] = [len(ids) for ids in tokens]
        return answer | ({"tokens": tokens} if batch["tokens"] else {})


def serve(settings: dict[str, Any]) -> None:
    """Starts the engine and answers batches until stdin ends."""
    # A stopped process would outlive one that was killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints goes to the log

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        server = Server(settings)
        answer(server.about())
        for line in sys.stdin:
            answer(server.generate(json.loads(line)))
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"[:1000]})


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
    sys.stderr.flush()
    os._exit(0)  # the engine's threads would hold the exit
