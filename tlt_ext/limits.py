"""Limits that the ops share. The native core states them (`csrc/common/limits.h`)."""

from tlt_ext import _C

MAX_DEPTH = _C.MAX_DEPTH  # levels below a tree's root; also the length of an ancestor list
MAX_EMITTED = _C.MAX_EMITTED  # tokens of a request in a verify pass
MAX_TOP_K = _C.MAX_TOP_K  # children of a node
MAX_TREE_ROWS = _C.MAX_TREE_ROWS  # rows of a request in a verify pass, root included
MAX_DRAFT_SLOTS = _C.MAX_DRAFT_SLOTS  # rows of a drafter in flight, root included
MAX_HEAD_DIM = _C.MAX_HEAD_DIM
MAX_FOLD_BLOCKS = _C.MAX_FOLD_BLOCKS  # rows of the flags of `fold_partials`
# What `tree_attention` takes on a GPU in 16 bits (`csrc/attention/op.cpp`). float32 has the limits
# of the CPU.
GPU_HEAD_DIMS, GPU_PAGE_SIZES, GPU_MAX_GROUP = (64, 128), (16, 32, 64, 128), 8
CONTROL_WORDS = _C.CONTROL_WORDS  # of a `control` array
