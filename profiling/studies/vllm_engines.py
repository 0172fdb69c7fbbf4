"""The vLLM engines of a benchmark: their settings, caches and drafters."""

import contextlib
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driver.drafter.eagle3 import config_of_state, write_drafter
from driver.model.spec import read_json
from profiling.peers.vllm import Vllm
from profiling.rig import timing
from profiling.rig.bench import Bench
from profiling.rig.subjects import Subject

START_LIMIT_S = 300
# vLLM's own sizes of graphs are many for chains of drafts.
GRAPH_BATCHES = [*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8)]
GRAPH_BATCHES += [*range(80, 129, 16), *range(160, 257, 32)]


class Engines:
    """vLLM engines that are started side by side; each is stopped while another engine runs."""

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
        """Starts an engine, with more settings of `vllm.LLM`, without waiting for it.

        It drafts `k` tokens; `most` is the largest batch with a graph. `invariant`: results do not
        depend on the batch.
        """
        label = re.sub(r"\W+", "-", name)
        variables = {
            "VLLM_CACHE_ROOT": str(self._cache(label)),
            "VLLM_BATCH_INVARIANT": str(int(invariant)),
        }
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
        if k and not settings.get("enforce_eager"):
            sizes = [(k + 1) * batch for batch in GRAPH_BATCHES if batch <= most]
            settings["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        log = self.logs / f"vllm-{label}.log"
        self.engines[name] = Vllm(name, self.folder, log, variables, **settings)

    def _cache(self, label: str) -> Path:
        """A folder for what an engine compiles, but for the records of models, which they share."""
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
                self.bench.add_row(f"start of vLLM, {name}", 1e6 * about["start_s"], **about)
        if not self.engines:
            raise RuntimeError(f"no vLLM engine was started; see {self.logs}")

    def close(self, kept: Collection[str] = ()) -> None:
        for name in self.engines.keys() - set(kept):
            self.engines.pop(name).close()


@contextlib.contextmanager
def engines(bench: Bench, folder: str, logs: Path) -> Iterator[Engines]:
    """Engines that are closed at the end."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Engines(bench, folder, logs, Path(scratch))
        try:
            yield made
        finally:
            made.close()


def eagle3(drafter: Path, k: int, **more: Any) -> dict[str, Any]:
    """Settings of chains of k drafts by a drafter of `write_state`."""
    config = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": k, **more}
    return {"k": k, "speculative_config": config}


def write_state(
    state: Mapping[str, Tensor], subject: Subject, target: Mapping[str, Any], folder: Path
) -> None:
    write_drafter(folder, state, config_of_state(state, subject.spec, target, torch.bfloat16))


def export(subject: Subject, folder: Path) -> Path:
    """Writes the drafter of a warm start as `driver.export` does."""
    assert subject.drafter is not None and subject.folder is not None
    target = read_json(subject.folder / "config.json")
    write_state(subject.drafter["drafter"], subject, target, folder)
    return folder
