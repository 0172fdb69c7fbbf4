"""Kernels for speculative rollouts, on CUDA and on the CPU, for any DLPack array.

Importing this package imports no array library. Outputs and workspaces belong to the caller; an op
never allocates or synchronises. See `python -m tlt_ext` for what this build can do.
"""

import importlib.util

if importlib.util.find_spec("tlt_ext._C") is None:
    raise ImportError(
        f"tlt_ext: {__path__[0]} has no native core: build it there with `pip install -e .`, or"
        " start from another folder to use an installation",
        name="tlt_ext._C",
    )

from tlt_ext import _C
from tlt_ext.attention import attention_workspace_bytes, tree_attention
from tlt_ext.common import Status, num_threads, set_num_threads
from tlt_ext.draft import draft_inputs, draft_level_inputs
from tlt_ext.graph_pool import GraphError, GraphPool, GraphUsage, graph_bytes
from tlt_ext.graphs import Control, PassRing, StopReason, advance_batch, arm_passes
from tlt_ext.groups import (
    DraftWeights,
    Frontier,
    NewRows,
    Nodes,
    Requests,
    Rows,
    Sampling,
    TokenTable,
    Tree,
    VerifyOutput,
)
from tlt_ext.kv import append_kv, commit_path, copy_pages, gather_new_rows
from tlt_ext.layers import (
    fold_partials,
    linear_append,
    linear_rows,
    linear_silu_mul,
    rms_norm,
    silu_mul,
)
from tlt_ext.ngram import ngram_propose
from tlt_ext.sampling import sample, sampling_workspace_bytes, verify_rejection, verify_tree
from tlt_ext.tree import expand_tree, select_nodes, tree_capacity

__version__: str = _C.build_info()["version"]

OPS = (
    rms_norm,
    silu_mul,
    linear_rows,
    linear_silu_mul,
    linear_append,
    fold_partials,
    append_kv,
    tree_attention,
    commit_path,
    copy_pages,
    gather_new_rows,
    sample,
    verify_tree,
    verify_rejection,
    draft_inputs,
    draft_level_inputs,
    expand_tree,
    select_nodes,
    ngram_propose,
    arm_passes,
    advance_batch,
)


def op_places() -> dict[str, str]:
    """Where each op of this build can run: "cpu" or "cpu, cuda".

    Example:
        >>> "cpu" in op_places()["sample"]
        True
    """
    cuda = set(_C.cuda_ops())
    return {op.__name__: "cpu, cuda" if op.__name__ in cuda else "cpu" for op in OPS}


__all__ = [
    "Control",
    "DraftWeights",
    "Frontier",
    "GraphError",
    "GraphPool",
    "GraphUsage",
    "NewRows",
    "Nodes",
    "OPS",
    "PassRing",
    "Requests",
    "Rows",
    "Sampling",
    "Status",
    "StopReason",
    "TokenTable",
    "Tree",
    "VerifyOutput",
    "advance_batch",
    "append_kv",
    "arm_passes",
    "attention_workspace_bytes",
    "commit_path",
    "copy_pages",
    "draft_inputs",
    "draft_level_inputs",
    "expand_tree",
    "fold_partials",
    "gather_new_rows",
    "graph_bytes",
    "linear_append",
    "linear_rows",
    "linear_silu_mul",
    "ngram_propose",
    "num_threads",
    "op_places",
    "rms_norm",
    "sample",
    "sampling_workspace_bytes",
    "select_nodes",
    "set_num_threads",
    "silu_mul",
    "tree_attention",
    "tree_capacity",
    "verify_rejection",
    "verify_tree",
]
