"""Keyed sampling and the verification of draft trees.

A token's noise is a function of (seed, request, position, token) alone, so the same token is drawn
in any batch, with or without speculation. Sampling parameters are per request: temperature (below
1e-6 = greedy), then top-k (<= 0 = off), then top-p (>= 1 = off). NaN and +inf logits lose and set
`Status.NAN_LOGITS`; a row without any finite logit gives token 0 with log-prob -inf. A vocabulary
has at most 2^19 ids on a GPU, 2^22 on a CPU.
"""

from tlt_ext import _C
from tlt_ext.common import Array, current_stream, seed_word
from tlt_ext.groups import Rows, Sampling, Tree, VerifyOutput

# Of the definition of the noise (`csrc/common/noise.h`). Another version draws other tokens.
NOISE_VERSION = _C.NOISE_VERSION


def sampling_workspace_bytes(rows: int) -> int:
    """Bytes of scratch for `verify_tree` on a GPU, for so many rows of logits.

    Example:
        >>> sampling_workspace_bytes(64)
        1024
    """
    return _C.sampling_workspace_bytes(rows)


def sample(
    logits: Array,
    sampling: Sampling,
    *,
    position: Array,
    tokens: Array,
    logprobs: Array,
    status: Array,
    seed: int,
    vocab_size: int | None = None,
    filtered_logprobs: Array | None = None,
    stream: int | None = None,
) -> None:
    """Draws one token a row: the argmax of `logits / temperature + keyed Gumbel noise`.

    Args:
        logits: [rows, >= vocab_size], float32, float16 or bfloat16; rows may be strided.
        sampling: of each row.
        position: [rows] int32, absolute position of the token to be sampled.
        tokens: [rows] int32, out.
        logprobs: [rows] float32, out: `log_softmax(logits / temperature)` at the token, unfiltered.
        status: [rows] int32, bits are ORed in.
        seed: the run's 64-bit seed.
        vocab_size: ids at or past it are padding and never read; default is the width of logits.
        filtered_logprobs: [rows] float32, out: the same over the ids that top-k and top-p keep.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        >>> import numpy as np
        >>> tokens, logprobs = np.zeros(1, np.int32), np.zeros(1, np.float32)
        >>> greedy = Sampling(temperature=np.float32([0]), request=np.int64([0]),
        ...                   top_k=np.int32([0]), top_p=np.float32([1]))
        >>> sample(np.float32([[0, 2, 1]]), greedy, position=np.int32([0]), tokens=tokens,
        ...        logprobs=logprobs, status=np.zeros(1, np.int32), seed=0)
        >>> print(tokens, logprobs.round(4))   # temperature 0: of the logits as they are
        [1] [-0.4076]

    Source: Gumbel-max sampling; the noise is Philox 4x32-10 (Salmon et al., SC'11).
    Reference: `tests/reference.py::sample`.
    """
    _C.sample(
        logits,
        sampling,
        position,
        tokens,
        logprobs,
        status,
        seed_word(seed),
        vocab_size,
        filtered_logprobs,
        current_stream(logits, stream),
    )


def verify_tree(
    logits: Array,
    tree: Tree,
    rows: Rows,
    sampling: Sampling,
    out: VerifyOutput,
    *,
    stop_ids: Array,
    limit: Array,
    seed: int,
    vocab_size: int | None = None,
    workspace: Array | None = None,
    stream: int | None = None,
) -> None:
    """Follows the target's keyed samples through a draft tree and emits them.

    At each node the token is what `sample` draws there, bit for bit, whatever was drafted. The
    path goes on at the first child that carries it; it ends without one, at a stop id, or at the
    limit.

    Args:
        logits: [rows, >= vocab_size], float32, float16 or bfloat16: the target's, at each node.
        tree: tokens and parents.
        rows: row_start, position and status; 128 rows a request at most. A request without rows
            emits nothing. status: BAD_TREE (a parent that is not an earlier row, never followed),
            BAD_TOKEN (a draft outside the vocabulary), BAD_LENGTH (row_start out of range or too
            many rows: nothing is emitted), NAN_LOGITS (at a row of the path).
        sampling: of each request.
        out: written.
        stop_ids: [requests, any] int32, -1 = unused.
        limit: [requests] int32, the most tokens to emit now; 0 emits nothing.
        seed: the run's 64-bit seed.
        vocab_size: ids at or past it are padding and never read; default is the width of logits.
        workspace: [>= sampling_workspace_bytes(rows)] uint8, aligned to 16 bytes, scratch with
            which a GPU draws all rows at once if there are at most 64 (of a small vocabulary, as
            many as the card has multiprocessors). Without it, or with more rows, each request draws
            along its path, one row after another; the bits are the same. The CPU needs none.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong.

    Example:
        Greedy target, root with children 5 and 7 (rows 1, 2); the target says 7, then 3:

        >>> import numpy as np
        >>> logits = np.zeros((3, 8), np.float32)
        >>> logits[0, 7] = logits[2, 3] = 1
        >>> emitted, path = np.zeros((2, 1, 17), np.int32)
        >>> num_emitted, finish = np.zeros((2, 1), np.int32)
        >>> verify_tree(
        ...     logits,
        ...     Tree(tokens=np.int32([1, 5, 7]), parents=np.int32([-1, 0, 0])),
        ...     Rows(row_start=np.int32([0, 3]), position=np.int32([4, 5, 5]),
        ...          status=np.zeros(1, np.int32)),
        ...     Sampling(temperature=np.float32([0]), request=np.int64([0]),
        ...              top_k=np.int32([0]), top_p=np.float32([1])),
        ...     VerifyOutput(emitted, np.zeros((1, 17), np.float32), num_emitted, finish, path),
        ...     stop_ids=np.int32([[-1]]), limit=np.int32([17]), seed=0)
        >>> print(emitted[0, :2], path[0, :2], num_emitted, finish)
        [7 3] [0 2] [2] [0]

    Source: speculative decoding with shared Gumbel noise; exact for any draft.
    Reference: `tests/reference.py::verify_tree`.
    """
    _C.verify_tree(
        logits,
        tree,
        rows,
        sampling,
        out,
        stop_ids,
        limit,
        seed_word(seed),
        vocab_size,
        workspace,
        current_stream(logits, stream),
    )


def verify_rejection(
    logits: Array,
    draft_probs: Array | None,
    tree: Tree,
    rows: Rows,
    sampling: Sampling,
    out: VerifyOutput,
    *,
    stop_ids: Array,
    limit: Array,
    seed: int,
    vocab_size: int | None = None,
    deterministic: bool = False,
    stream: int | None = None,
) -> None:
    """Classical rejection sampling of a draft tree: chain (one child a node) or multi-round.

    Child x is accepted with probability min(1, target(x) / draft(x)). A rejection replaces the
    target distribution by the normalised max(target - draft, 0) and takes x out of the draft
    distribution; after the last child the token is drawn from what is left. The emitted tokens
    follow the target distribution if the children were drawn from `draft_probs`, without
    replacement, in row order.

    Args:
        logits: [rows, >= vocab_size], float32, float16 or bfloat16: the target's, at each node.
        draft_probs: [rows, >= vocab_size] float32: row n is the distribution that node n's children
            were drawn from; None if deterministic.
        tree, sampling, out, stop_ids, limit: as in `verify_tree`.
        rows: as in `verify_tree`. status: also NAN_DRAFT (a draft row of the path with a NaN or an
            entry outside [0, 1]: its children are ignored).
        seed: the run's 64-bit seed.
        vocab_size: ids at or past it are padding and never read; default is the width of logits.
        deterministic: children were chosen, not drawn (argmax, n-gram): each is a one-hot proposal.
        stream: CUDA stream; default is the array library's current one.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a device, layout, shape or value is wrong, or draft_probs is missing.

    Example:
        A chain of drafts 0 and 1. The target is (.5, .5) at the root: child 0, drawn with .4 from
        the draft, is accepted always. It is (1, 0) at row 1: child 1 never is, and the residual
        (.6, 0) gives token 0.

        >>> import numpy as np
        >>> emitted, path = np.zeros((2, 1, 17), np.int32)
        >>> num_emitted, finish = np.zeros((2, 1), np.int32)
        >>> verify_rejection(
        ...     np.float32([[0, 0], [99, -99], [0, 0]]), np.float32([[0.4, 0.6]] * 3),
        ...     Tree(tokens=np.int32([1, 0, 1]), parents=np.int32([-1, 0, 1])),
        ...     Rows(row_start=np.int32([0, 3]), position=np.int32([4, 5, 6]),
        ...          status=np.zeros(1, np.int32)),
        ...     Sampling(temperature=np.float32([1]), request=np.int64([0]),
        ...              top_k=np.int32([0]), top_p=np.float32([1])),
        ...     VerifyOutput(emitted, np.zeros((1, 17), np.float32), num_emitted, finish, path),
        ...     stop_ids=np.int32([[-1]]), limit=np.int32([17]), seed=0)
        >>> print(emitted[0, :2], path[0, :2], num_emitted, finish)
        [0 0] [0 1] [2] [0]

    Source: Leviathan et al. (2023); Chen et al. (2023); multi-round: Miao et al., "SpecInfer".
    Reference: `tests/reference.py::verify_rejection`.
    """
    _C.verify_rejection(
        logits,
        draft_probs,
        tree,
        rows,
        sampling,
        out,
        stop_ids,
        limit,
        seed_word(seed),
        vocab_size,
        deterministic,
        current_stream(logits, stream),
    )
