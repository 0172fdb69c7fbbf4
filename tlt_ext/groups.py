"""Arrays that travel together through several ops: named tuples that an op takes as one argument.

An op reads or writes only the fields that its docstring names; the others may be None, and are not
converted. A group holds references, so one that is made of static arrays can be kept and reused.

Example:
    >>> import numpy as np
    >>> rows = Rows(row_start=np.int32([0, 2]), position=np.int32([7, 8]), status=np.int32([0]))
    >>> rows.context_len is None
    True
"""

from typing import NamedTuple

from tlt_ext.common import Array


class Rows(NamedTuple):
    """Query rows of several requests, packed one request after the other, and their KV pages.

    Slots, positions and rows in flight are described in `tlt_ext.kv`.

    Attributes:
        row_start: int32 [requests + 1]; request b owns rows row_start[b] .. row_start[b + 1] - 1.
            Rows from row_start[requests] on are padding: no op uses them.
        position: int32 [rows], absolute position of each row's token.
        status: int32 [requests], `Status` bits; ops OR bits in.
        context_len: int32 [requests], committed slots.
        block_table: int32 [requests, max_pages], page ids; entries past the last slot that is
            needed are never read. Rows may be strided.
        slot_base: int32 [requests], in-flight slot of each request's first row; None = 0.
    """

    row_start: Array
    position: Array
    status: Array
    context_len: Array | None = None
    block_table: Array | None = None
    slot_base: Array | None = None


class Sampling(NamedTuple):
    """What tokens are drawn from: logits / temperature, cut to the top-k, then to the top-p.

    n is the number of requests, in `sample` that of rows. `sample` and the verify ops need all
    fields, other ops the first two.

    Attributes:
        temperature: float32 [n]; below 1e-6 = greedy.
        request: int64 [n], the request's id, whose low 62 bits key its noise.
        top_k: int32 [n]; 0 or less = off.
        top_p: float32 [n]; 1 or more = off.
    """

    temperature: Array
    request: Array
    top_k: Array | None = None
    top_p: Array | None = None


class Tree(NamedTuple):
    """Draft trees as packed rows: in each request its root first, parents before children.

    Attributes:
        tokens: int32 [rows].
        parents: int32 [rows], row of the parent within the request, -1 for the root.
        ancestors: uint8 [rows, 16]; entries 0 .. d - 1 of a row at depth d are the in-flight slots
            of its ancestors, root first. Rows may be strided.
    """

    tokens: Array
    parents: Array
    ancestors: Array | None = None


class VerifyOutput(NamedTuple):
    """What a verify pass writes. Entries past `num_emitted` keep the values that they had.

    Attributes:
        emitted: int32 [requests, E], E at least 17; the tokens. Rows may be strided, as in the
            other arrays of this shape.
        logprobs: float32 [requests, E], `log_softmax(logits / temperature)` at the token, without
            top-k and top-p.
        num_emitted: int32 [requests].
        finish: int32 [requests]: 0 running, 1 stop id emitted, 2 limit reached.
        path: int32 [requests, E], row within the request at which each token was drawn, root first.
        filtered_logprobs: float32 [requests, E] or None: over the ids that top-k and top-p keep.
    """

    emitted: Array
    logprobs: Array
    num_emitted: Array
    finish: Array
    path: Array | None = None
    filtered_logprobs: Array | None = None


class Nodes(NamedTuple):
    """A store of candidate nodes, C a request. Entry 0 is the root, parents precede children.

    The caller writes entry 0 (the last emitted token; parent -1, score 0, depth 0) and sets count
    to 1; entries from count on are scratch. C = `tree_capacity(depth, top_k)` always suffices.

    Attributes:
        token: int32 [requests, C].
        parent: int32 [requests, C], store index; -1 at the root.
        score: float32 [requests, C], cumulative log-probability; at most the parent's.
        depth: int32 [requests, C], 0 at the root.
        count: int32 [requests].
    """

    token: Array
    parent: Array
    score: Array
    depth: Array
    count: Array  # type: ignore[assignment]  # tuple.count, which nothing here calls


class Frontier(NamedTuple):
    """The nodes of one level that are expanded next, F a request.

    Attributes:
        node: int32 [requests, F], store index; -1 = no node.
        row: int32 [requests, F], row of the draft logits that each node came from; 0 without one.
        ancestors: uint8 [requests, F, 16], in-flight drafter slots of each node's ancestors; None
            in the first level, where the root's drafter entry is committed.
    """

    node: Array
    row: Array | None = None
    ancestors: Array | None = None


class TokenTable(NamedTuple):
    """The tokens of sequences, and which of them each request reads.

    Attributes:
        tokens: int32 [slots, L], the token at each absolute position, prompt included.
        slot: int32 [requests], the request's own row of `tokens`; negative = inert.
        length: int32 [slots], how many tokens of a row are known. That of a request's own row is
            not read: it is context_len + 1.
        group_slots: int32 [requests, G], rows of `tokens` in which a request looks for n-grams, its
            own among them; -1 = none.
    """

    tokens: Array
    slot: Array
    length: Array | None = None
    group_slots: Array | None = None


class Requests(NamedTuple):
    """Counters of the requests of a batch, which `advance_batch` keeps up to date.

    Attributes:
        context_len: int32 [batch], committed slots.
        status: int32 [batch], `Status` bits; ops OR bits in.
        last_token: int32 [batch], root of the next pass.
        remaining: int32 [batch], tokens that it may still emit.
        num_new: int32 [batch], tokens of the last pass.
        granted: int32 [batch], KV slots that its pages hold.
    """

    context_len: Array
    status: Array
    last_token: Array
    remaining: Array
    num_new: Array
    granted: Array


class NewRows(NamedTuple):
    """What a drafter has yet to write, M entries a request at most; see `gather_new_rows`.

    Attributes:
        ids: int32 [requests * M], the token after each row's position; 0 in rows of no request.
        first: int32 [requests], position of the first entry, `context_len` where there is none:
            the drafter's own committed length.
        last: int32 [requests], row of the newest entry; 0 where there is none.
        features: [requests * M, dim], dtype of the features; rows may be strided. Rows of no
            request keep their values.
    """

    ids: Array
    first: Array
    last: Array
    features: Array


class DraftWeights(NamedTuple):
    """Weights of a drafter's input rows, all of one dtype.

    Attributes:
        embedding: [vocab, dim], float32, float16 or bfloat16; rows may be strided.
        input_norm: [dim], weight of the norm of the embedding.
        hidden_norm: [dim], weight of the norm of the hidden state.
    """

    embedding: Array
    input_norm: Array
    hidden_norm: Array
