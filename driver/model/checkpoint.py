"""Checkpoints in Hugging Face layout: checked by their headers, then read.

The engine and the trainer load through this module, so that both see the same tensors: rows past
the vocabulary are cut, and whether the head is tied follows from the tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..common.errors import UserError, library_errors
from .families import EMBEDDING, HEAD
from .spec import CONFIG, GENERATION_CONFIG, ModelSpec, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "BF16", "F16")  # dtypes in a safetensors header


def check_checkpoint(folder: Path) -> ModelSpec:
    """The spec of a folder whose headers show whole files of a known family; else UserError."""
    spec = ModelSpec.from_folder(folder)
    shapes = {}
    for name, (path, (dtype, shape)) in _entries(folder).items():
        if name in (EMBEDDING, HEAD):  # padded rows are cut when the file is read
            shape[:1] = [min(rows, spec.vocab_size) for rows in shape[:1]]
        if dtype not in FLOATS:
            raise UserError(f"{path}: {name} is {dtype}; wanted {', '.join(FLOATS)}")
        shapes[name] = shape
    check_shapes(spec, shapes, str(folder))
    return spec


def check_shapes(spec: ModelSpec, shapes: Mapping[str, Sequence[int]], where: str) -> None:
    """Rejects a tensor that is missing, has another shape, or does not belong to the model.

    A tied head may be there too, and so may RoPE frequencies, which old checkpoints hold.
    """
    needed = spec.shapes()
    for name, shape in needed.items():
        if name not in shapes:
            # Wrappers such as DDP put a prefix before each name.
            hint = next((f"; remove the prefix of {n}" for n in shapes if n.endswith(name)), "")
            raise UserError(
                f"{where}: {name} is missing; {spec.family} needs it by its {CONFIG}{hint}"
            )
        if list(shapes[name]) != list(shape):
            raise UserError(
                f"{where}: {name} has shape {list(shapes[name])}, {CONFIG} makes it {list(shape)}"
            )
    for name in shapes:
        if name not in needed and name != HEAD and "rotary_emb" not in name:
            raise UserError(f"{where}: {name} is not a tensor of {spec.family}")


def check_dense(name: str, weight: object, where: str) -> None:
    """Rejects what is not a whole dense tensor with values; `where` is named in messages."""
    if not isinstance(weight, Tensor):
        raise UserError(f"{where}: {name} is a {type(weight).__name__}; expected tensors")
    if weight.is_meta:
        raise UserError(f"{where}: {name} is on the meta device, without values; load it first")
    if hasattr(weight, "full_tensor"):
        raise UserError(f"{where}: {name} is a DTensor, a part of it is here; give full_tensor()")
    if weight.layout is not torch.strided:
        raise UserError(f"{where}: {name} is {weight.layout}; give to_dense()")


@torch.no_grad()
def check_finite(weights: Mapping[str, Tensor], dtype: torch.dtype, where: str) -> None:
    """Rejects weights that are not finite in a dtype; waits once for each device."""
    ends: dict[torch.device, list[Tensor]] = {}
    for name, weight in weights.items():
        check_dense(name, weight, where)
        if weight.is_floating_point() and weight.itemsize > 1 and weight.numel():
            ends.setdefault(weight.device, []).extend(weight.aminmax())  # NaN if any weight is
    most = torch.finfo(dtype).max
    if all(float(torch.stack(of).abs().max()) <= most for of in ends.values()):
        return
    name = next(n for n, w in weights.items() if not bool((w.abs() <= most).all()))
    raise UserError(
        f"{where}: {name} holds a weight that is not finite in"
        f" {str(dtype).removeprefix('torch.')}; use other weights or another dtype"
    )


def load_checkpoint(
    folder: str | Path, dtype: torch.dtype | None = None, mapped: bool = False
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """Reads a checkpoint; raises as `check_checkpoint`, or if a weight is not finite.

    Returns the spec, and the tensors by name, as `ModelSpec.shapes` lists them, on the CPU. If the
    config ties the head but the file holds another one, the spec is of an untied model.
    `dtype=None` is the dtype of the config. With `mapped`, tensors that have this dtype in the file
    are mapped to it, so that the processes of a machine share their memory; the caller must not
    change them.
    """
    folder = Path(folder)
    spec = check_checkpoint(folder)
    dtype = dtype or spec.dtype
    wanted, weights = {*spec.shapes(), HEAD}, {}
    with ExitStack() as opened:
        files: dict[Path, Any] = {}
        for name, (path, _) in _entries(folder).items():
            if name not in wanted:
                continue
            if path not in files:
                files[path] = opened.enter_context(_opened(path))
            tensor = files[path].get_tensor(name)
            weights[name] = tensor[: spec.vocab_size] if name in (EMBEDDING, HEAD) else tensor
            weights[name] = weights[name].to(dtype, copy=not mapped)
            check_finite({name: weights[name]}, dtype, str(path))
    if spec.tie_word_embeddings and HEAD in weights:
        if torch.equal(weights[HEAD], weights[EMBEDDING]):
            del weights[HEAD]
        else:
            spec = replace(spec, tie_word_embeddings=False)
    return spec, weights


def load_model(folder: Path, dtype: torch.dtype, mapped: bool = False) -> PreTrainedModel:
    """Reads a checkpoint as a transformers model on the CPU, with the tensors of `load_checkpoint`.

    Raises as `load_checkpoint`, or if transformers refuses a value of the config. Code that comes
    with a checkpoint is never run.
    """
    import transformers

    spec, weights = load_checkpoint(folder, dtype, mapped)
    family = getattr(transformers, spec.family)
    content = read_json(folder / CONFIG) | {"tie_word_embeddings": spec.tie_word_embeddings}
    kind = family.config_class.model_type
    if content.setdefault("model_type", kind) != kind:
        raise UserError(
            f"{folder / CONFIG}: model_type is {content['model_type']!r}, that of {spec.family} is"
            f" {kind!r}; correct one of the two"
        )
    generation, settings = folder / GENERATION_CONFIG, None
    if generation.exists():
        with library_errors(generation):
            settings = transformers.GenerationConfig.from_pretrained(folder)
            settings.validate(strict=True)  # as when it is saved
    with library_errors(folder / CONFIG):
        config = family.config_class.from_dict(content)
        model = family.from_pretrained(
            None, config=config, state_dict=weights, dtype=dtype, attn_implementation="sdpa"
        )
    model.config._name_or_path = str(folder)
    if settings is not None:
        model.generation_config = settings
    return model


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; its header and its size are checked."""
    try:
        path.open("rb").close()  # safetensors calls any file that it cannot open a missing one
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except SafetensorError as error:
        raise UserError(f"{path}: not a whole safetensors file ({error}); copy it again") from None


def read_header(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of each tensor of a safetensors file; UserError for a broken one."""
    with _opened(path) as file:
        parts = {name: file.get_slice(name) for name in file.keys()}
        return {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}


def _entries(folder: Path) -> dict[str, tuple[Path, tuple[str, list[int]]]]:
    """Tensor name -> its file, and its dtype and shape there."""
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        return {name: (single, entry) for name, entry in read_header(single).items()}
    if not index.exists():
        other = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"{other[0]} must be saved as safetensors" if other else "copy it there"
        raise UserError(f"{single}: missing; {hint}")
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise UserError(f"{index}: no weight_map; copy the checkpoint again")
    headers: dict[str, dict[str, tuple[str, list[int]]]] = {}
    for name, file in files.items():
        if not isinstance(file, str):
            raise UserError(f"{index}: {name}: wanted the name of a file, got {file!r}")
        if file not in headers:
            if not (folder / file).exists():
                raise UserError(f"{folder / file}: shard missing; copy it there")
            headers[file] = read_header(folder / file)
        if name not in headers[file]:
            raise UserError(f"{folder / file}: tensor {name} of the index is not in it")
    return {name: (folder / file, headers[file][name]) for name, file in files.items()}


def folder_fingerprint(folder: Path) -> str:
    """A hash of a model: its settings, and names, sizes and starts of its weights."""
    digest = hashlib.blake2b(digest_size=8)
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    for path in [folder / "config.json", *sorted(weights)]:
        if path.exists():
            with path.open("rb") as file:
                digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(1 << 20))
    return digest.hexdigest()
