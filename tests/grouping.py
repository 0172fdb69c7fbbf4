"""Calls ops with flat arguments, one array a name, which tests change one at a time."""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import tlt_ext

# Fields of a group whose flat name is not their own, by the op's argument.
FLAT_NAMES = {
    "nodes": {f: f"node_{f}" for f in ("token", "parent", "score", "depth", "count")},
    "frontier": {"node": "frontier", "row": "row", "ancestors": "frontier_ancestors"},
    "next_frontier": {"node": "next_frontier", "row": "next_row", "ancestors": "next_ancestors"},
    "out": {"features": "new_features"},
}


@functools.cache
def groups_of(op: Callable[..., Any]) -> dict[str, type]:
    """Argument -> class, of an op's arguments that are groups."""
    hints = typing.get_type_hints(op)
    return {name: hint for name, hint in hints.items() if hasattr(hint, "_fields")}


def grouped(op: Callable[..., Any], flat: dict[str, Any]) -> dict[str, Any]:
    """The op's arguments from flat ones: fields of groups go into their group, None where missing.

    A name that is both a field and an argument (`top_k` of `ngram_propose`) is the argument.

    Args:
        op: of `tlt_ext`.
        flat: arguments, and fields of groups under their own or their flat name.
    """
    own = inspect.signature(op).parameters.keys() - groups_of(op).keys()
    groups, taken = {}, set()
    for argument, group in groups_of(op).items():
        if isinstance(flat.get(argument), group):
            continue
        names = [FLAT_NAMES.get(argument, {}).get(field, field) for field in group._fields]
        groups[argument] = group(*(None if name in own else flat.get(name) for name in names))
        taken.update(set(names) - own)
    return {name: value for name, value in flat.items() if name not in taken} | groups


def call(op: Callable[..., Any], *args: Any, **flat: Any) -> Any:
    """Calls an op with flat arguments; the first of them that are no groups may be positional."""
    return op(*args, **grouped(op, flat))


class FlatOps:
    """The ops of `tlt_ext` with flat arguments: `flat.append_kv(**case)`."""

    def __getattr__(self, name: str) -> Any:
        return functools.partial(call, getattr(tlt_ext, name))


flat = FlatOps()
