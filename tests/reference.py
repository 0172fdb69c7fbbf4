"""Float64 references in plain torch, one per op, written to be read."""

import math

import numpy as np
import torch

# ---- layers ----------------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def linear_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    out = x.double() @ weight.double().T
    if bias is not None:
        out = out + bias.double()
    return out if residual is None else out + residual.double()


def columns_of(k: int, rank: int, ranks: int) -> torch.Tensor:
    """The columns of K that a rank holds: those of the blocks of 64 of its parts."""
    column = torch.arange(k)
    return column[column // 64 % 8 // (8 // ranks) == rank]


def fold_partials(
    partials: list[torch.Tensor],
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.stack([partial.double() for partial in partials]).sum(0)
    if bias is not None:
        out = out + bias.double()
    return out if residual is None else out + residual.double()


# ---- attention and kv ------------------------------------------------------------------------


def places(block_table: torch.Tensor, request: int, slots: list[int], page_size: int):
    """Page ids and offsets of a request's slots, to index a cache with."""
    pages = [int(block_table[request, slot // page_size]) for slot in slots]
    return pages, [slot % page_size for slot in slots]


def append_kv(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    position: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rotated q, rotated k and v of every row, [rows, heads, head_dim] each."""
    heads = qkv.double().unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q = q if q_norm is None else rms_norm(q, q_norm, eps)
    k = k if k_norm is None else rms_norm(k, k_norm, eps)
    cos, sin = cos_sin.double()[position.long(), None].chunk(2, dim=-1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    return rotate(q), rotate(k), v


def row_slots(
    row: int, request: int, row_start, context_len, position, ancestors=None, slot_base=None
) -> list[int]:
    """The slots a row attends to, in position order; the last is its own."""
    context = int(context_len[request])
    base = 0 if slot_base is None else int(slot_base[request])
    own = context + base + row - int(row_start[request])
    if ancestors is None:
        return list(range(own + 1))
    depth = int(position[row]) - context
    return [*range(context), *(context + int(a) for a in ancestors[row, :depth]), own]


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    row_start: torch.Tensor,
    context_len: torch.Tensor,
    position: torch.Tensor,
    block_table: torch.Tensor,
    ancestors: torch.Tensor | None = None,
    slot_base: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [rows, num_heads, head_dim] and log-sum-exps [rows, num_heads]."""
    group = q.shape[1] // k_cache.shape[2]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out, lse = torch.zeros(q.shape).double(), torch.zeros(q.shape[:2]).double()
    for request in range(len(row_start) - 1):
        for row in range(int(row_start[request]), int(row_start[request + 1])):
            slots = row_slots(row, request, row_start, context_len, position, ancestors, slot_base)
            where = places(block_table, request, slots, k_cache.shape[1])
            k, v = (c[where].double().repeat_interleave(group, 1) for c in (k_cache, v_cache))
            scores = torch.einsum("hd,khd->hk", q[row].double(), k) * scale
            lse[row] = scores.logsumexp(-1)
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
    return out, lse


def commit_path(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    features: torch.Tensor,
    feature_rows: torch.Tensor,
    row_start: torch.Tensor,
    path: torch.Tensor,
    num_emitted: torch.Tensor,
    context_len: torch.Tensor,
    block_table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """New k_cache, v_cache, features and context_len."""
    k, v, f = k_cache.clone(), v_cache.clone(), features.clone()
    for request, count in enumerate(num_emitted.tolist()):
        context, kept = int(context_len[request]), path[request, :count].tolist()
        source = places(block_table, request, [context + slot for slot in kept], k.shape[2])
        target = places(block_table, request, [context + i for i in range(count)], k.shape[2])
        k[:, target[0], target[1]] = k_cache[:, source[0], source[1]]
        v[:, target[0], target[1]] = v_cache[:, source[0], source[1]]
        f[target] = feature_rows[[int(row_start[request]) + slot for slot in kept]]
    return k, v, f, context_len + num_emitted


def copy_pages(cache: torch.Tensor, source: list[int], destination: list[int]) -> torch.Tensor:
    out = cache.clone()
    out[:, destination] = cache[:, source]
    return out


def gather_new_rows(
    features: torch.Tensor,
    tokens: torch.Tensor,
    slot: list[int],
    context_len: list[int],
    num_new: list[int],
    block_table: torch.Tensor,
) -> tuple[list[int], list[int], list[int], torch.Tensor]:
    """Row starts, token ids, positions and features of the packed rows."""
    row_start, ids, position, rows = [0], [], [], []
    for request, (context, count) in enumerate(zip(context_len, num_new, strict=True)):
        entries = range(context - count, context) if slot[request] >= 0 else range(0)
        ids += [int(tokens[slot[request], t + 1]) for t in entries]
        position += entries
        rows.append(features[places(block_table, request, list(entries), features.shape[1])])
        row_start.append(len(ids))
    return row_start, ids, position, torch.cat(rows)


# ---- graphs ----------------------------------------------------------------------------------


def advance_batch(
    emitted: list[list[int]],
    finish: list[int],
    context_len: list[int],
    slot: list[int],
    tokens: torch.Tensor,
    granted: list[int],
    lookahead: int,
) -> tuple[torch.Tensor, int]:
    """The token store after a pass, and the reasons to stop that its rows have."""
    tokens, reason = tokens.clone(), 0
    for b, row in enumerate(emitted):
        if slot[b] < 0:
            continue
        for i, token in enumerate(row):
            tokens[slot[b], context_len[b] - len(row) + 1 + i] = token
        if not row:
            reason |= 16
        if finish[b]:
            reason |= 1
        elif context_len[b] + lookahead > granted[b]:
            reason |= 2
    return tokens, reason


# ---- sampling --------------------------------------------------------------------------------

TARGET, ACCEPT, RESIDUAL, REST = range(4)  # domains of the noise


def noise_words(
    seed: int, request: int, position: int, count: int, domain: int = TARGET
) -> np.ndarray:
    """The uint32 words 0 .. count - 1 of a domain: Philox 4x32-10 in 64-bit integers."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0 = np.arange((count + 3) // 4, dtype=np.uint64)
    c1 = np.full_like(c0, position)
    c2 = np.full_like(c0, request & 0xFFFFFFFF)
    c3 = np.full_like(c0, (request >> 32) & 0x3FFFFFFF | domain << 30)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            b >> half ^ c1 ^ np.uint64(k0),
            b & low,
            a >> half ^ c3 ^ np.uint64(k1),
            a & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], 1).reshape(-1)[:count].astype(np.uint32)


def exponential(words: np.ndarray, bits: int = 32) -> torch.Tensor:
    u = (torch.from_numpy(words.astype(np.float64)) + 0.5) / 2.0**bits
    return -(-u).log1p()


def gumbel(words: np.ndarray) -> torch.Tensor:
    return -exponential(words).log()


def target_noise(seed: int, request: int, position: int, vocab_size: int) -> torch.Tensor:
    """Gumbel noise of ids 0 .. vocab_size - 1, by the minima of groups of eight ids.

    Four groups share a call of Philox: g, g + 32, g + 64, g + 96.
    """
    spans = (vocab_size + 1023) // 1024
    words = noise_words(seed, request, position, 128 * spans)
    words = words.reshape(spans, 32, 4).transpose(0, 2, 1).reshape(-1)  # by group
    rest = exponential(noise_words(seed, request, position, 1024 * spans, REST)).reshape(-1, 8)
    smallest = exponential(words >> 3, bits=29)[:, None] / 8
    has_it = torch.from_numpy(words.astype(np.int64) & 7)[:, None] == torch.arange(8)
    return -torch.where(has_it, smallest, smallest + rest).flatten()[:vocab_size].log()


def clean_logits(logits: torch.Tensor) -> torch.Tensor:
    """NaN and +inf lose to everything."""
    x = logits.double()
    return torch.where(x < torch.inf, x, -torch.inf)


def kept_ids(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> list[int]:
    """Best first: sorted by (logit descending, id ascending), cut to top-k, then to top-p."""
    x = clean_logits(logits)
    ids = x.argsort(descending=True, stable=True).tolist()
    if 0 < top_k < len(ids):
        ids = ids[:top_k]
    if top_p < 1.0:
        mass = torch.softmax(x[ids] / (temperature or 1.0), -1).cumsum(-1)
        ids = ids[: 1 + int((mass < top_p).sum())]
    return ids


def target_probs(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    """The distribution of the token; all on token 0 where no logit is finite."""
    x = clean_logits(logits)
    probs = torch.zeros_like(x)
    if temperature == 0.0 or bool((x == -torch.inf).all()):
        probs[x.argmax()] = 1.0
    else:
        ids = kept_ids(logits, temperature, top_k, top_p)
        probs[ids] = torch.softmax(x[ids] / temperature, -1)
    return probs


def logprob(logits: torch.Tensor, temperature: float, token: int) -> float:
    x = clean_logits(logits) / (temperature or 1.0)
    return float(torch.log_softmax(x, -1)[token]) if bool((x > -torch.inf).any()) else -math.inf


def filtered_logprob(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, token: int
) -> float:
    kept = torch.full_like(logits.double(), -torch.inf)
    ids = kept_ids(logits, temperature, top_k, top_p)
    kept[ids] = clean_logits(logits)[ids]
    return logprob(kept, temperature, token)


def sample(
    logits: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    request: int,
    position: int,
    *,
    seed: int,
) -> int:
    """One row's token."""
    score = target_probs(logits, temperature, top_k, top_p).log()
    if temperature > 0.0:
        score = score + target_noise(seed, request, position, len(score))
    return int(score.argmax())


def verify_tree(
    logits: torch.Tensor,
    tokens: list[int],
    parents: list[int],
    position: int,
    setting: tuple[float, int, float],
    request: int,
    stop_ids: list[int],
    limit: int,
    *,
    seed: int,
) -> tuple[list[int], list[int], int]:
    """One request's (emitted, path, finish); `position` is its root's."""
    emitted, path, node = [], [], 0
    for depth in range(limit):
        token = sample(logits[node], *setting, request, position + depth + 1, seed=seed)
        emitted.append(token)
        path.append(node)
        if token in stop_ids:
            return emitted, path, 1
        rows = range(node + 1, len(tokens))
        children = [row for row in rows if parents[row] == node and tokens[row] == token]
        if not children:
            break
        node = children[0]
    return emitted, path, 2 if len(emitted) == limit else 0


def verify_rejection(
    probs: torch.Tensor,
    draft: torch.Tensor | None,
    children: list[int],
    uniforms: list[float],
) -> tuple[int | None, torch.Tensor]:
    """One node: index of the accepted child or None, and the distribution to draw from then.

    `draft` None means that the children are one-hot proposals.
    """
    probs = probs.double()
    draft = None if draft is None else draft.double()
    for place, (child, u) in enumerate(zip(children, uniforms, strict=True)):
        proposal = torch.zeros_like(probs) if draft is None else draft / draft.sum()
        if draft is None:
            proposal[child] = 1.0
        if u * proposal[child] < probs[child]:
            return place, probs
        probs = (probs - proposal).clamp_min(0.0)
        probs = probs / probs.sum()
        if draft is not None:
            draft = draft.clone()
            draft[child] = 0.0
    return None, probs


# ---- tree ------------------------------------------------------------------------------------


def expand_tree(
    nodes: list[dict],
    frontier: list[int],
    draft_logits: torch.Tensor,
    *,
    top_k: int,
    temperature: float,
    seed: int,
    request: int,
    root_position: int,
    vocab_size: int,
    d2t: list[int] | None = None,
    score_temperature: float = 0.0,
) -> list[int]:
    """One level of one request; nodes are {token, parent, score, depth} and `nodes` grows.

    Returns the next frontier. With one frontier row and `top_k` = 1, the child of a chain has the
    score of its parent.
    """
    first_new, is_chain = len(nodes), len(frontier) == top_k == 1
    for row, parent in enumerate(frontier):
        if parent < 0:
            continue
        depth = nodes[parent]["depth"] + 1
        logits = draft_logits[row].double()
        ids = list(range(len(logits))) if d2t is None else d2t
        below = (logits < torch.inf).tolist()
        usable = [i for i, v in enumerate(ids) if 0 <= v < vocab_size and below[i]]
        value = logits[usable] / (temperature or 1.0)
        score = value.clone()
        if temperature > 0:
            noise = target_noise(seed, request, root_position + depth, vocab_size)
            score += noise[[ids[i] for i in usable]]
        probs = (score / score_temperature if score_temperature else value).log_softmax(0)
        scores = score.tolist()
        ranked = sorted(range(len(usable)), key=lambda j: (-scores[j], ids[usable[j]]))
        for j in [j for j in ranked if scores[j] > -math.inf][:top_k]:
            nodes.append(
                dict(
                    token=ids[usable[j]],
                    parent=parent,
                    score=nodes[parent]["score"] + (0.0 if is_chain else probs[j].item()),
                    depth=depth,
                )
            )
    new = range(first_new, len(nodes))
    return sorted(new, key=lambda i: (-nodes[i]["score"], i))[:top_k]


def select_nodes(nodes: list[dict], num_verify: int) -> tuple[list[int], list[int], list[list]]:
    """Store index, parent row and ancestor rows of each row, by the plain definition."""
    taken = [0]
    for i in sorted(range(1, len(nodes)), key=lambda i: (-nodes[i]["score"], i)):
        siblings = [nodes[j]["token"] for j in taken if nodes[j]["parent"] == nodes[i]["parent"]]
        if (
            len(taken) < num_verify
            and nodes[i]["parent"] in taken
            and nodes[i]["token"] not in siblings
        ):
            taken.append(i)
    source = sorted(taken, key=lambda i: (nodes[i]["depth"], i))
    parents = [-1 if i == 0 else source.index(nodes[i]["parent"]) for i in source]
    ancestors: list[list] = []
    for parent in parents:
        ancestors.append([] if parent < 0 else [*ancestors[parent], parent])
    return source, parents, ancestors


# ---- draft -----------------------------------------------------------------------------------


def draft_inputs(
    embedding: torch.Tensor,
    ids: list[int],
    hidden: torch.Tensor,
    input_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """[rows, 2 * dim]; `hidden` holds the row of each."""
    embedded = rms_norm(embedding[ids], input_norm, eps)
    return torch.cat([embedded, rms_norm(hidden, hidden_norm, eps)], dim=-1)


# ---- ngram -----------------------------------------------------------------------------------


def ngram_propose(
    own: list[int],
    group: list[list[int]],
    *,
    depth: int,
    top_k: int,
    max_ngram: int,
    min_ngram: int,
    temperature: float,
    seed: int,
    request: int,
) -> list[dict]:
    """One request's nodes; `group`: the texts that it searches, in order."""
    matches = []
    for order, text in enumerate(group):
        for end in range(1, len(text)):  # text[:end] has something after it
            n = 0
            while n < min(max_ngram, end, len(own)) and text[end - 1 - n] == own[-1 - n]:
                n += 1
            if n >= min_ngram:
                matches.append((-n, order, -end, text[end:]))
    followed = [(4 ** (-n - 1), rest) for n, _, _, rest in sorted(matches)[:32]]
    nodes = [dict(token=own[-1], parent=-1, score=0.0, depth=0)]
    here = {0: followed}  # matches at each node of the level
    for level in range(1, depth + 1):
        candidates = []
        for parent, rests in here.items():
            counts: dict[int, int] = {}
            for weight, rest in rests:
                if len(rest) >= level and min(rest[:level]) >= 0:
                    counts[rest[level - 1]] = counts.get(rest[level - 1], 0) + weight
            ranked = []
            for token, count in counts.items():
                rank = math.log(count)
                if temperature > 0:
                    noise = target_noise(seed, request, len(own) - 1 + level, token + 1)
                    rank += noise[token].item()
                score = nodes[parent]["score"] + math.log(count / (sum(counts.values()) + 1))
                ranked.append((-rank, token, parent, score))
            candidates += sorted(ranked)[:top_k]
        order = sorted(range(len(candidates)), key=lambda i: (-round(candidates[i][3], 5), i))
        before, here = here, {}
        for i in sorted(order[:top_k]):
            _, token, parent, score = candidates[i]
            here[len(nodes)] = [m for m in before[parent] if m[1][level - 1 : level] == [token]]
            nodes.append(dict(token=token, parent=parent, score=score, depth=level))
    return nodes
