"""Times an op on inputs of a run: `python -m profiling.kernels.replay runs/tiny/captures`.

The files come from `driver.train run.capture=OP:STEP`. On a card the calls are timed as
in a benchmark, on the CPU as the median of plain calls. Integers that the op changes (lengths,
counts) are restored before every call, and the time includes these copies.
"""

from __future__ import annotations

import argparse
import math
import pickle
import re
import sys
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tlt_ext
from profiling.rig import timing
from profiling.rig.bench import Bench, say

CPU_ROUNDS = 20
UNREADABLE = (OSError, RuntimeError, EOFError, pickle.UnpicklingError)


@dataclass
class Call:
    """A captured call on a device, which can run any number of times."""

    name: str
    op: Callable[..., Any]
    arguments: dict[str, Any]
    restored: dict[str, Tensor]  # the arrays that a call changes, as they were

    @staticmethod
    def load(path: Path, device: str) -> Call:
        """Reads a file of `driver.run.capture`.

        Raises:
            ValueError: the file holds no captured call; the message is one line.
        """
        try:
            saved = torch.load(path, map_location="cpu")
            op, arguments = getattr(tlt_ext, saved["op"]), saved["arguments"]
        except (*UNREADABLE, LookupError, AttributeError, TypeError) as error:
            raise ValueError(f"{path}: no captured call ({type(error).__name__})") from None
        moved = {n: _moved(v, device) if isinstance(v, Tensor) else v for n, v in arguments.items()}
        call = Call(path.stem, op, moved | _workspace(saved["op"], moved), {})
        whole = {n: v for n, v in call.arrays().items() if not v.is_floating_point()}
        before = {name: value.clone() for name, value in whole.items()}
        call()
        call.restored = {n: before[n] for n, v in whole.items() if not v.equal(before[n])}
        return call

    def arrays(self) -> dict[str, Tensor]:
        return {n: v for n, v in self.arguments.items() if isinstance(v, Tensor)}

    def __call__(self) -> None:
        for name, before in self.restored.items():
            self.arguments[name].copy_(before)
        call_flat(self.op, self.arguments)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, each once."""
        return sum(array.numel() * array.element_size() for array in self.arrays().values())

    @property
    def shape(self) -> str:
        """Names and shapes of two arrays."""
        large = {n: v for n, v in self.arrays().items() if v.dim() > 1}
        return " ".join([f"{n} {'x'.join(map(str, v.shape))}" for n, v in large.items()][:2])


def call_flat(op: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Calls an op with arguments as `driver.run.capture` saves them: `rows.position` and the like.

    Args:
        op: of `tlt_ext`.
        arguments: name -> value; a group's fields are named `argument.field`.
    """
    plain = {name: value for name, value in arguments.items() if "." not in name}
    fields: dict[str, dict[str, Any]] = {}
    for name in arguments.keys() - plain.keys():
        argument, _, field = name.partition(".")
        fields.setdefault(argument, {})[field] = arguments[name]
    groups = typing.get_type_hints(op)
    op(**plain, **{name: groups[name](**values) for name, values in fields.items()})


def _moved(value: Tensor, device: str) -> Tensor:
    if 0 in value.stride():
        return value.to(device)
    out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return out.copy_(value)


def _workspace(op: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The workspace that the engine gives an op on a card."""
    first = next(value for value in arguments.values() if isinstance(value, Tensor))
    if not first.is_cuda:
        return {}
    if op == "tree_attention":
        q, cache, table = (arguments[name] for name in ("q", "k_cache", "rows.block_table"))
        size = tlt_ext.attention_workspace_bytes(
            num_requests=len(table),
            num_rows=len(q),
            num_heads=q.shape[1],
            num_kv_heads=cache.shape[2],
            head_dim=q.shape[2],
            max_slots=table.shape[1] * cache.shape[1],
        )
    elif op == "verify_tree":
        size = tlt_ext.sampling_workspace_bytes(len(arguments["logits"]))
    else:
        return {}
    return {"workspace": torch.empty(size, dtype=torch.uint8, device=first.device)}


def measured(call: Call, device: str) -> timing.Timing:
    """The time of one call."""
    if device != "cpu":
        return timing.measure({"ours": call})["ours"]
    call()
    times = []
    for _ in range(CPU_ROUNDS):
        begin = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begin))
    return timing.summary(times)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.kernels.replay", description=__doc__)
    parser.add_argument("folder", type=Path, help="runs/<name>/captures")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="files that match this regular expression")
    parser.add_argument(
        "--profile", action="store_true", help="run each call once, for ncu: nothing is timed"
    )
    args = parser.parse_args(argv)
    paths = [p for p in sorted(args.folder.glob("*.pt")) if re.search(args.only, p.name)]
    if not paths:
        sys.stderr.write(f"profiling.kernels.replay: {args.folder}: no captured calls\n")
        return 2
    timing.profiling = args.profile
    cuda = args.device != "cpu" and not args.profile
    bench = Bench("replay", timing.copy_bandwidth() if cuda else math.nan)
    for path in paths:
        try:
            call = Call.load(path, args.device)
        except ValueError as error:
            sys.stderr.write(f"profiling.kernels.replay: {error}\n")
            return 2
        say(f"{call.name}: {call.shape}")
        bench.add(call.name, measured(call, args.device), call.num_bytes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
