"""`runs/<name>/`: the files of a run, and how a resumed run continues them."""

import dataclasses
import json
import math
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from ..common.errors import UserError, after_error
from ..common.storage import FolderLock, storage_errors, user_path, write_text
from ..config.load import Config, load_config, preset_title, to_yaml
from ..config.sections import RunConfig
from ..model.spec import read_json
from ..rollout.request import Response
from . import checkpoint as run_checkpoint

# Sections and settings that a resumed run may change. They affect speed, memory and the handling of
# failures. Micro-batches, shards, ranks, threads and the device also change an update's last bits.
_FREE = {
    "bandit",
    "engine",
    "reward",
    "run",
    "spot",
    "grpo.checkpointing",
    "grpo.micro_batch_tokens",
    "grpo.offload",
    "grpo.shard",
    "model.cache",
}
_FIXED = {"engine.verify", "run.seed"}  # of sections in `_FREE`
WARM_STARTS = "warm"  # subfolder of `run.root`, which is no run, or of a run
LOGS = ("metrics.jsonl", "rollouts.jsonl", "samples.jsonl")  # set back by a resumed run


@dataclass(frozen=True)
class Sample:
    """One logged response; `num_tokens` includes EOS."""

    prompt_id: str
    prompt: str
    response: str
    reward: float
    num_tokens: int
    finish: str  # "stop" or "length"
    parts: tuple[str, ...] = ()  # of a response with tools: turn, answer, turn, ...


class RunFolder:
    """Metrics, samples, checkpoints and summary of one run.

    The folder contains `metrics.jsonl` (one object for each step), the same values under
    `tensorboard/`, `rollouts.jsonl`, `samples.jsonl` and `samples.txt`, `config.yaml`,
    `summary.json`, `trace.json`, `checkpoints/step-NNNNNN/` and `report.html`. A run with a warm-up
    of its own also has `warm/`, a resumed one `trace-<step>.json` of the process before.
    Methods that write raise a UserError if the disk is full or unwritable, the constructor also if
    the folder exists, is in use, or has no run to resume.
    """

    def __init__(self, config: Config) -> None:
        self.path = _choose(config.run, config.preset)
        self.checkpoints = self.path / "checkpoints"
        if config.run.resume:
            _check_same(config, self.path / "config.yaml")
        try:
            with storage_errors(self.path):
                self._open(config)
        except BaseException:
            # An incomplete folder must not block the name; without the lock it is another run's.
            if not config.run.resume and hasattr(self, "_lock"):
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def _open(self, config: Config) -> None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.path)  # two processes would mix their records
        run_checkpoint.clean_checkpoints(self.checkpoints)
        self.resumed = run_checkpoint.latest_checkpoint(self.checkpoints)
        done = self.resumed.step if self.resumed else 0
        write_text(self.path / "config.yaml", to_yaml(config))
        if (trace := self.path / "trace.json").exists():  # of the process that ended there
            trace.rename(self.path / f"trace-{done}.json")
        # The evaluation before the first step, which no checkpoint contains, is made again.
        before = [_count_lines(self.path / name) for name in LOGS]
        metrics, _, samples = kept = [_set_back(self.path / name, done or -1) for name in LOGS]
        counts = zip(LOGS, before, map(len, kept), strict=True)
        if dropped := [f"{old - new} of {name}" for name, old, new in counts if old > new]:
            warnings.warn(
                f"{self.path}: dropped lines that are incomplete or whose step runs again:"
                f" {', '.join(dropped)}; complete ones are kept in *.replaced.jsonl",
                stacklevel=3,
            )
        with run_checkpoint.earlier_versions(f"{self.path / LOGS[2]}", "remove it"):
            write_text(self.path / "samples.txt", "".join(map(_sample_text, samples)))
        # TensorBoard purges by file name, so the kept records are written again instead.
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
        self._board = SummaryWriter(self.path / "tensorboard")
        for record in metrics:
            self._show_on_board(record["step"], record)

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one step, 0 before training, to `metrics.jsonl` (NaN as null) and TensorBoard."""
        plain = {name: float(value) for name, value in values.items()}
        _append(self.path / "metrics.jsonl", _line({"step": step, **plain}))
        with storage_errors(self.path / "tensorboard"):
            self._show_on_board(step, plain)
            self._board.flush()

    def _show_on_board(self, step: int, values: Mapping[str, float | None]) -> None:
        shown = [
            Summary.Value(tag=name, simple_value=math.nan if value is None else value)
            for name, value in values.items()
            if name != "step"
        ]
        # One event for all values: a hundred events take as long as the rest of a step's records.
        self._board._get_file_writer().add_summary(Summary(value=shown), step)

    def log_rollout(
        self, step: int, responses: Sequence[Response], passes: Sequence[tuple[float, int, str]]
    ) -> None:
        """Appends the responses and active requests of a rollout to `rollouts.jsonl`.

        Of each response there are its length and a checksum of its tokens and log-probs, so that
        runs can be compared bit by bit. `passes` are (seconds since the start, active requests,
        strategy) of each pass and of the end; repeated values are left out.
        """
        active = [
            [round(at, 6), count, strategy]
            for (at, count, strategy), before in zip(passes, [None, *passes], strict=False)
            if before is None or before[1:] != (count, strategy)
        ]
        record = {
            "step": step,
            "lengths": [len(response.token_ids) for response in responses],
            "checksums": [response.checksum for response in responses],
            "active": active,
        }
        _append(self.path / "rollouts.jsonl", _line(record))

    def log_samples(self, step: int, samples: Iterable[Sample]) -> None:
        """Appends responses of a step to `samples.jsonl` and, as text, to `samples.txt`."""
        records = [{"step": step, **dataclasses.asdict(sample)} for sample in samples]
        for record in records:
            if not record["parts"]:
                del record["parts"]
        _append(self.path / "samples.jsonl", *map(_line, records))
        _append(self.path / "samples.txt", *map(_sample_text, records))

    def check_inputs(self, fingerprints: Mapping[str, str]) -> None:
        """Rejects a resume with data or a model whose hash in `inputs.json` is another one."""
        path = self.path / "inputs.json"
        if not path.exists():  # a new run, or one of an earlier version
            return write_text(path, json.dumps(dict(fingerprints)) + "\n")
        for name, began_with in read_json(path).items():
            if fingerprints[name] != began_with:
                raise UserError(
                    f"{name}: its contents have changed since the run in {self.path} started;"
                    " restore them, or start a run with another name"
                )

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replaces `summary.json`; NaN and infinities become null."""
        write_text(self.path / "summary.json", json.dumps(_json_safe(summary), indent=2) + "\n")

    def discard(self) -> None:
        """Closes the folder of a failed run; removes it if it has no metrics and no checkpoint."""
        with after_error():
            self.close()
        logged = (self.path / "metrics.jsonl").stat().st_size > 0
        if not logged and run_checkpoint.latest_checkpoint(self.checkpoints) is None:
            shutil.rmtree(self.path)

    def close(self) -> None:
        """Closes TensorBoard's file and gives up the folder; logged records are on disk."""
        with storage_errors(self.path):
            self._lock.close()
            self._board.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a log without a last line that a crash cut; UserError for other damage."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    records = []
    # A complete line ends with a newline, so the text after the last one is incomplete.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not (isinstance(record, dict) and isinstance(record.get("step"), int)):
            raise UserError(f"{path}:{number}: not a JSON object with a step; fix or remove it")
        records.append(record)
    return records


def _choose(run: RunConfig, preset: str) -> Path:
    """The run's folder: the named one, or the preset's name, numbered."""
    root, stem = user_path(run.root), preset_title(preset)
    if run.name == WARM_STARTS:
        raise UserError(f"run.name={run.name}: is the folder of warm starts; choose another name")
    if run.name:
        path = root / run.name
        if run.resume and not (path / "config.yaml").exists():
            raise UserError(f"run.resume: {path} contains no run; check run.root and run.name")
        if not run.resume and path.is_dir() and any(path.iterdir()):
            if (path / "config.yaml").exists():
                raise UserError(
                    f"run.name: {path} already contains a run; set run.resume=true to continue it,"
                    " or choose another name"
                )
            raise UserError(
                f"run.name: {path} contains other files and no run; choose another name or"
                " remove it"
            )
        return path
    taken, number = [], 2 if stem == WARM_STARTS else 1
    while (path := root / (stem if number == 1 else f"{stem}-{number}")).exists():
        taken.append(path)
        number += 1
    if not run.resume:
        return path
    if not taken:
        raise UserError(f"run.resume: no run {stem} under {root}; set run.name")
    return taken[-1]


def _check_same(config: Config, saved: Path) -> None:
    """Rejects a resume with other settings, except those in `_FREE`, which do not change tokens."""
    before = dataclasses.asdict(load_config([f"preset={saved}"], saved=True))
    now = dataclasses.asdict(config)
    for section, values in now.items():
        if section == "preset":
            continue
        for name, value in values.items():
            key, old = f"{section}.{name}", before[section][name]
            if name == "path" and user_path(old).resolve() == user_path(value).resolve():
                continue
            fixed = key in _FIXED or not _FREE & {section, key}
            if fixed and old != value:
                raise UserError(
                    f"{key}: {value} now, {old} in {saved}; a resumed run keeps its settings:"
                    " repeat them, or start a run with another name"
                )


def _set_back(path: Path, last_step: int) -> list[dict[str, Any]]:
    """The records up to a step; later ones, which run again, go to `<name>.replaced.jsonl`."""
    records = read_jsonl(path)
    kept = [record for record in records if record["step"] <= last_step]
    if replaced := [record for record in records if record["step"] > last_step]:
        _append(path.with_suffix(".replaced.jsonl"), *map(_line, replaced))
    write_text(path, "".join(map(_line, kept)))
    return kept


def _count_lines(path: Path) -> int:
    """Lines of a file, an incomplete last one included; 0 if it does not exist."""
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def _append(path: Path, *texts: str) -> None:
    with storage_errors(path), path.open("a", encoding="utf-8") as file:
        file.writelines(texts)


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_json_safe(record)) + "\n"


def _json_safe(value: Any) -> Any:
    """The value with NaN and infinities, which JSON lacks, replaced by None."""
    if isinstance(value, Mapping):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sample_text(record: Mapping[str, Any]) -> str:
    head = (
        f"step {record['step']}  {record['prompt_id']}  reward {record['reward']}"
        f"  {record['num_tokens']} tokens ({record['finish']})"
    )
    parts = record.get("parts") or [record["response"]]
    names = [("--- response", "--- tool")[i % 2] for i in range(len(parts))]
    body = "".join(f"{name}\n{text}\n" for name, text in zip(names, parts, strict=True))
    return f"=== {head}\n{record['prompt']}\n{body}\n"
