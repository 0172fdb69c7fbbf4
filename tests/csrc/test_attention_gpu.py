"""The tensor-core attention: bits of a row are its own, whatever runs beside it and wherever.

Every row of a batch is compared with the same text decoded by itself: one request, one row, keys in
consecutive slots.
"""

import pytest
import torch

import tlt_ext
from tests import kit, reference
from tests.csrc.paged import make_batch, random_tree
from tests.grouping import flat
from tlt_ext import Status
from tlt_ext.limits import GPU_HEAD_DIMS, GPU_MAX_GROUP, GPU_PAGE_SIZES

pytestmark = [kit.gpu, kit.needs_gpu]

ROWS = [1, 2, 4, 5, 8, 16, 17, 33, 64]
BATCHES = [1, 3, 8, 32, 128]
CUTS = [0, 16, 32, 64, 128, 192, 1024, 1536, 4096, 8192, 9216]  # steps, tiles, pages, all splits
ROOTS = sorted({max(0, cut + d) for cut in CUTS for d in (-17, -16, -15, -1, 0, 1, 15, 16, 17)})
SHAPES = {  # heads, kv heads, head_dim, page size, dtype; groups of 1 to 8
    "32/8x128": (32, 8, 128, 16, torch.bfloat16),
    "14/2x64": (14, 2, 64, 64, torch.float16),
    "9/3x64": (9, 3, 64, 32, torch.bfloat16),
    "8/1x128": (8, 1, 128, 128, torch.float16),
    "4/4x128": (4, 4, 128, 16, torch.bfloat16),
    "28/4x128": (28, 4, 128, 32, torch.bfloat16),
    "4/2x64": (4, 2, 64, 128, torch.float16),
    "10/2x128": (10, 2, 128, 64, torch.bfloat16),
    "12/2x64": (12, 2, 64, 16, torch.float16),
}


def make_case(contexts, rows, shape, *, tree=True, seed=0):
    """Arguments on the GPU; cache slots that no row may read hold NaN."""
    heads, kv_heads, head_dim, page_size, dtype = shape
    batch = make_batch(contexts, rows, page_size, seed=seed)
    position, ancestors, filled = [], [], []
    for request, (context, count) in enumerate(zip(contexts, rows, strict=True)):
        depths, slots = random_tree(count, seed=seed + request)
        position += [context + d for d in (depths if tree else range(count))]
        ancestors.append(slots)
        pages = batch.block_table[request].long()
        slot = torch.arange(context + count)
        filled.append(pages[slot // page_size] * page_size + slot % page_size)
    filled = torch.cat(filled).cuda()
    noise = torch.Generator("cuda").manual_seed(seed)
    caches = []
    for _ in range(2):
        size = (batch.num_pages * page_size, kv_heads, head_dim)
        cache = torch.full(size, float("nan"), dtype=dtype, device="cuda")
        values = torch.randn(len(filled), kv_heads, head_dim, generator=noise, device="cuda")
        cache[filled] = values.to(dtype)
        caches.append(cache.unflatten(0, (batch.num_pages, page_size)))
    q = torch.randn(batch.num_rows, heads, head_dim, generator=noise, device="cuda").to(dtype)
    return {
        "q": q,
        "k_cache": caches[0],
        "v_cache": caches[1],
        "row_start": batch.row_start.cuda(),
        "context_len": batch.context_len.cuda(),
        "position": torch.tensor(position, dtype=torch.int32).cuda(),
        "block_table": batch.block_table.cuda(),
        "ancestors": torch.cat(ancestors).cuda() if tree else None,
    }


def workspace_for(case):
    rows, heads, head_dim = case["q"].shape
    requests, pages = case["block_table"].shape
    size = tlt_ext.attention_workspace_bytes(
        num_requests=requests,
        num_rows=rows,
        num_heads=heads,
        num_kv_heads=case["k_cache"].shape[2],
        head_dim=head_dim,
        max_slots=pages * case["k_cache"].shape[1],
    )
    return torch.full((size,), 255, dtype=torch.uint8, device="cuda")  # NaN wherever it is read


def attend(case, *, share=True, pdl=False, **changes):
    """Runs the op; `share` gives it a workspace. Returns out, lse and status."""
    case = case | changes
    q = case["q"]
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:2], float("nan"), device="cuda")
    status = torch.zeros(len(case["row_start"]) - 1, dtype=torch.int32, device="cuda")
    workspace = workspace_for(case) if share else None
    flat.tree_attention(**case, out=out, lse=lse, status=status, workspace=workspace, pdl=pdl)
    return out, lse, status


def one_by_one(case):
    """The same rows, each a request of its own that decodes one token: a chain, other slots."""
    starts, contexts = case["row_start"].tolist(), case["context_len"].tolist()
    table, position = case["block_table"].cpu().tolist(), case["position"].tolist()
    ancestors = None if case["ancestors"] is None else case["ancestors"].cpu().tolist()
    pages, page_size = case["k_cache"].shape[:2]
    tables, source, target = [], [], []
    for request, context in enumerate(contexts):
        whole = context // page_size  # these pages can be shared
        for row in range(starts[request], starts[request + 1]):
            depth = position[row] - context
            path = range(depth) if ancestors is None else ancestors[row][:depth]
            own = context + row - starts[request]
            slots = [*range(whole * page_size, context), *(context + a for a in path), own]
            fresh = range(pages, pages + -(-len(slots) // page_size))
            pages = fresh.stop
            tables.append([*table[request][:whole], *fresh])
            source += [table[request][s // page_size] * page_size + s % page_size for s in slots]
            target += range(fresh.start * page_size, fresh.start * page_size + len(slots))
    twin = {}
    for name in ("k_cache", "v_cache"):
        cache = case[name]
        larger = torch.full(
            (pages, *cache.shape[1:]), float("nan"), dtype=cache.dtype, device="cuda"
        )
        larger[: cache.shape[0]] = cache
        flat = larger.flatten(0, 1)
        flat[torch.tensor(target).cuda()] = flat[torch.tensor(source).cuda()]
        twin[name] = larger
    width = max(map(len, tables))
    rows = len(position)
    return twin | {
        "q": case["q"],
        "row_start": torch.arange(rows + 1, dtype=torch.int32).cuda(),
        "context_len": case["position"].clone(),
        "position": case["position"],
        "block_table": torch.tensor(
            [[*t, *[-1] * (width - len(t))] for t in tables], dtype=torch.int32
        ).cuda(),
        "ancestors": None,
    }


def alone(case, row):
    """One request of a batch of one-row requests, called by itself."""
    names = ("q", "context_len", "position", "block_table")
    starts = torch.tensor([0, 1], dtype=torch.int32).cuda()
    return case | {n: case[n][row : row + 1] for n in names} | {"row_start": starts}


def assert_rows_are_their_own(case, draw):
    twin = one_by_one(case)
    expected, expected_lse, status = attend(twin, share=False)
    assert not status.any() and not expected.isnan().any()
    for share, pdl in ((False, False), (True, False), (True, True)):
        out, lse, status = attend(case, share=share, pdl=pdl)
        assert not status.any()
        assert kit.same_bits(out, expected), (out != expected).any(-1).any(-1).nonzero().tolist()
        assert kit.same_bits(lse, expected_lse)
    for row in torch.randint(len(expected), (2,), generator=draw).tolist():
        out, lse, _ = attend(alone(twin, row))
        assert kit.same_bits(out[0], expected[row]) and kit.same_bits(lse[0], expected_lse[row])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_are_their_own(rows, batch):
    """Design's invariance: roots on both sides of every cut, all row counts and batches."""
    draw = kit.generator(rows + batch)
    roots = torch.tensor(ROOTS)[torch.randperm(len(ROOTS), generator=draw)]
    roots = roots.repeat(-(-batch // len(roots)))
    if batch == 1:
        roots = roots[rows % 3 :: 3]  # a third of them each, all of them over three row counts
    for i in range(len(roots) // batch):
        contexts = roots[i * batch : (i + 1) * batch].tolist()
        case = make_case(
            contexts, [rows] * batch, SHAPES["32/8x128"], tree=i % 4 != 3, seed=100 * rows + i
        )
        assert_rows_are_their_own(case, draw)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tree", [True, False])
def test_rows_are_their_own_in_ragged_batches(shape, tree):
    draw = kit.generator(0)
    counts = [*ROWS, 0, 128, 31, 65]
    for batch in (2, 13):
        picked = torch.randint(len(ROOTS), (batch,), generator=draw).tolist()
        contexts = [ROOTS[i] for i in picked]
        rows = [counts[i] for i in torch.randperm(len(counts), generator=draw)[:batch].tolist()]
        assert_rows_are_their_own(make_case(contexts, rows, SHAPES[shape], tree=tree), draw)


@pytest.mark.parametrize("shape", ["28/4x128", "9/3x64"])
def test_rows_of_a_long_chain_are_their_own(shape):
    """A prefill pass has more rows of a request than a tree has."""
    case = make_case([5, 40, 0], [300, 1, 400], SHAPES[shape], tree=False)
    assert_rows_are_their_own(case, kit.generator(0))


# Row blocks of few requests whose tables are short: clusters do it all in one launch.
CLUSTERS = {
    "one row": ("9/3x64", [1]),
    "rows of four requests": ("9/3x64", [16, 1, 0, 5]),
    "a request with turns": ("14/2x64", [40, 1, 1, 1, 0, 2, 1]),
    "a last turn of few pairs": ("14/2x64", [19, 1, 1, 1]),
    "128 dimensions": ("32/8x128", [16]),
    "turns of 128 dimensions": ("8/1x128", [8, 3, 9, 8]),
    "three requests": ("28/4x128", [9, 1, 4]),
}
ENDS = [0, 16, 17, 100, 144, 500, 1024, 1040, 1536, 3700, 4000, 4600, 5800, 8000, 8192]
LONGEST = {64: 8192, 128: 5800}


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("tree", [True, False])
def test_rows_of_one_launch_are_their_own(name, tree):
    """All numbers of splits that a cluster may have, up to those that its first block folds."""
    shape, rows = CLUSTERS[name]
    draw = kit.generator(len(name))
    for end in [e for e in ENDS if e <= LONGEST[SHAPES[shape][2]]]:
        others = torch.randint(end + 1, (len(rows),), generator=draw).tolist()
        case = make_case([end, *others[1:]], rows, SHAPES[shape], tree=tree, seed=end)
        assert_rows_are_their_own(case, draw)


# At most eight requests with few pairs of 128 dimensions, and one with more pairs among them.
FEW = {
    "one row": ("32/8x128", [1], 9000),
    "eight pairs": ("32/8x128", [2], 16000),
    "seven of a group": ("28/4x128", [1], 7000),
    "eight requests": ("32/8x128", [1, 2, 1, 0, 1, 2, 2, 1], 2100),
    "one with more pairs": ("32/8x128", [1, 1, 6, 1, 1, 1, 1, 1], 2100),
    "one with many rows": ("8/1x128", [1] * 3 + [4] + [0] * 4, 9000),
}


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("tree", [True, False])
def test_rows_of_few_pairs_of_128_dimensions_are_their_own(name, tree):
    shape, rows, longest = FEW[name]
    draw = kit.generator(len(name))
    for cut in (0, 15, 129, 1025, longest // 2, longest):
        others = torch.randint(longest + 1, (len(rows),), generator=draw).tolist()
        case = make_case([min(cut, longest), *others[1:]], rows, SHAPES[shape], tree=tree, seed=cut)
        own = case["block_table"]
        width = -(-(longest + 64) // SHAPES[shape][3])  # a long table: no clusters
        table = torch.nn.functional.pad(own, (0, max(0, width - own.shape[1])), value=-1)
        assert_rows_are_their_own(case | {"block_table": table}, draw)


@pytest.mark.parametrize("batch", [89, 132, 190])
@pytest.mark.parametrize("tree", [True, False])
def test_rows_of_many_requests_are_their_own(tree, batch):
    """More blocks of 64 dimensions than a card has room for at a time."""
    draw = kit.generator(batch)
    few = batch != 132  # else requests have up to three row blocks
    counts = torch.tensor([1, 2, 5, 0, 8, 13] if few else [1, 21, 22, 43, 2, 5])
    rows = counts[torch.randint(len(counts), (batch,), generator=draw)].tolist()
    roots = torch.tensor(ROOTS)[torch.randint(len(ROOTS), (batch,), generator=draw)].tolist()
    assert_rows_are_their_own(make_case(roots, rows, SHAPES["9/3x64"], tree=tree), draw)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tree", [True, False])
def test_equals_reference(shape, tree):
    """Fault 27 and 32: row counts at the edges, none at all, over several splits."""
    case = make_case([1300, 0, 40, 513], [33, 65, 0, 4], SHAPES[shape], tree=tree)
    cpu = {name: x if x is None else x.cpu() for name, x in case.items()}
    expected, expected_lse = reference.tree_attention(**cpu)
    for share in (False, True):
        out, lse, status = attend(case, share=share)
        assert not status.any()
        kit.assert_close(out, expected)
        tolerance = kit.TOLERANCE[out.dtype]
        assert (lse.cpu() - expected_lse).abs().max() <= tolerance * expected_lse.abs().max()


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", kit.DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("contexts", "rows"),
    [([700, 20], [16, 5]), ([40] * 8, [2] * 8), ([100], [17]), ([70, 20] * 70, [5, 1] * 70)],
    ids=["one launch", "four warps and a merge", "eight warps and a merge", "many requests"],
)
def test_equals_the_cpu_op(contexts, rows, head_dim, dtype):
    """Each kernel of 16-bit attention, sharing keys and not."""
    case = make_case(contexts, rows, (8, 2, head_dim, 16, dtype))
    cpu = {name: x if x is None else x.cpu() for name, x in case.items()}
    host = {"out": torch.empty_like(cpu["q"]), "lse": torch.empty(cpu["q"].shape[:2])}
    flat.tree_attention(**cpu, **host, status=torch.zeros(len(rows), dtype=torch.int32))
    tolerance = kit.TOLERANCE[dtype]
    for share in (True, False):
        out, lse, _ = attend(case, share=share)
        assert kit.relative_error(out, host["out"]) <= tolerance
        assert kit.relative_error(lse, host["lse"]) <= tolerance


@pytest.mark.parametrize("share", [False, True])
def test_a_poisoned_row_hurts_its_descendants_alone(share):
    """A NaN in a key and value in flight: no other row sees it, in a tree or behind it in a chain.

    In the chain the poisoned row's keys are tile keys of later rows in the same MMA.
    """
    shape = SHAPES["4/4x128"]
    for tree, rows, poisoned in ((True, 64, 3), (False, 128, 50)):
        case = make_case([200], [rows], shape, tree=tree)
        expected, _, _ = attend(case, share=share)
        slot = 200 + poisoned
        page = int(case["block_table"][0, slot // 16])
        for name in ("k_cache", "v_cache"):
            case[name][page, slot % 16] = float("nan")
        out, _, _ = attend(case, share=share)
        for row in range(rows):
            depth = int(case["position"][row]) - 200
            path = case["ancestors"][row, :depth].tolist() if tree else range(depth)
            if poisoned in [*path, row]:
                assert out[row].isnan().all(), row
            else:
                assert kit.same_bits(out[row], expected[row]), row


@pytest.mark.parametrize("shape", ["32/8x128", "4/4x128"])  # two launches, and one
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("where", [0, 5, 11, 12])
def test_bad_pages_of_a_long_context_are_reported(where, share, shape):
    """Huge and negative ids among tile keys and tail keys; the other request is healthy."""
    case = make_case([190, 190], [5, 5], SHAPES[shape])
    expected, _, _ = attend(case, share=share)
    for page in (-1, 2**31 - 1, -(2**31)):
        case["block_table"][1, where] = page
        out, lse, status = attend(case, share=share)
        assert status.tolist() == [Status.OK, Status.BAD_PAGE]
        assert kit.same_bits(out[:5], expected[:5])
        if where < 12:  # page 12 holds in-flight slots 2 and later
            assert (out[5:] == 0).all() and (lse[5:] == -torch.inf).all()


@pytest.mark.parametrize("slots", [9216, 16384], ids=["one launch", "two launches"])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("where", [0, 50, 92, 93])  # tile keys in pages 0 to 92, the tail in 93
@pytest.mark.parametrize("name", ["9/3x64", "28/4x128"])
def test_bad_pages_of_few_pairs_are_reported(name, where, share, slots):
    """Six or seven (row, head) pairs of a request, whose tiles four warps share."""
    rows = 2 if name == "9/3x64" else 1
    case = make_case([3000, 3000], [rows] * 2, SHAPES[name])
    table = torch.full((2, slots // 32), -1, dtype=torch.int32, device="cuda")
    table[:, : case["block_table"].shape[1]] = case["block_table"]
    case["block_table"] = table
    expected, _, status = attend(case, share=share)
    assert not status.any() and not expected.isnan().any()
    for page in (-1, 2**31 - 1, -(2**31)):
        table[1, where] = page
        out, lse, status = attend(case, share=share)
        assert status.tolist() == [Status.OK, Status.BAD_PAGE]
        assert kit.same_bits(out[:rows], expected[:rows])
        assert (out[rows:] == 0).all() and (lse[rows:] == -torch.inf).all()


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("heads", "times"),  # one launch, many requests, two launches, eight warps
    [((12, 2, 64), 1), ((12, 2, 64), 70), ((4, 4, 128), 1), ((32, 8, 128), 1), ((8, 1, 128), 1)],
)
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("tree", [True, False])
def test_bad_rows_do_not_hurt_others_of_their_block(tree, share, heads, times):
    """Rows with a bad position, bad ancestors or a bad page in the tail alone, and good ones."""
    shape = (*heads, 16, torch.bfloat16)
    case = make_case([197, 40] * times, [13, 5] * times, shape, tree=tree)
    expected, expected_lse, _ = attend(case, share=share)
    case["position"][torch.tensor([0, 6, 13]).cuda()] += 40
    case["block_table"][0, 13] = -1  # from slot 208 on, of rows 11 and 12
    bad, bits = [0, 6, 11, 12, 13], Status.BAD_LENGTH | Status.BAD_PAGE
    if tree:
        case["position"][9], case["ancestors"][9, 0] = 198, 255
        bad, bits = [*bad, 9], bits | Status.BAD_TREE
    hurt = torch.zeros(len(expected), dtype=torch.bool, device="cuda")
    hurt[bad] = True
    out, lse, status = attend(case, share=share)
    assert status.tolist() == [bits, Status.BAD_LENGTH] + [Status.OK] * (2 * times - 2)
    assert (out[hurt] == 0).all() and (lse[hurt] == -torch.inf).all()
    assert kit.same_bits(out[~hurt], expected[~hurt])
    assert kit.same_bits(lse[~hurt], expected_lse[~hurt])
    bare = torch.full_like(out, float("nan"))
    workspace = workspace_for(case) if share else None
    flat.tree_attention(**case, out=bare, status=status, workspace=workspace)  # without lse
    assert kit.same_bits(bare, out)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("shape", ["12/2x64", "32/8x128"])
@pytest.mark.parametrize(
    ("context", "base"),
    [(-1, 0), (2**31 - 1, 0), (2**31 - 1, 1), (197, -1), (197, 2**31 - 1), (9000, 0), (197, 9000)],
)
def test_lengths_are_checked_as_on_the_cpu(context, base, shape, share):
    case = make_case([40, 197], [5, 13], SHAPES[shape])
    expected, _, _ = attend(case, share=share)
    case["context_len"][1], case["position"][5:] = context, context
    case["slot_base"] = torch.tensor([0, base], dtype=torch.int32).cuda()
    on_cpu = {name: x.cpu() for name, x in case.items()}
    wanted = torch.zeros(2, dtype=torch.int32)
    flat.tree_attention(**on_cpu, out=torch.empty_like(on_cpu["q"]), status=wanted)
    out, lse, status = attend(case, share=share)
    assert status.tolist() == wanted.tolist() == [Status.OK, Status.BAD_LENGTH]
    assert kit.same_bits(out[:5], expected[:5])
    assert (out[5:] == 0).all() and (lse[5:] == -torch.inf).all()


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("shape", ["12/2x64", "32/8x128"])
def test_arrays_may_be_strided(shape, share):
    """q, out and both caches inside larger arrays full of NaN; the caches' strides differ."""
    case = make_case([197, 40], [13, 5], SHAPES[shape])

    def inside(x, spare):
        larger = torch.full([n + spare for n in x.shape], float("nan"), dtype=x.dtype).cuda()
        return larger[tuple(slice(spare, None) for _ in x.shape)].copy_(x)

    expected, expected_lse, _ = attend(case, share=share)
    spares = {"q": 8, "k_cache": 8, "v_cache": 16}
    strided = case | {name: inside(case[name], spare) for name, spare in spares.items()}
    out, lse = inside(torch.zeros_like(expected), 8), torch.empty_like(expected_lse)
    status = torch.zeros(2, dtype=torch.int32, device="cuda")
    workspace = workspace_for(case) if share else None
    flat.tree_attention(**strided, out=out, lse=lse, status=status, workspace=workspace)
    assert not status.any()
    assert kit.same_bits(out, expected) and kit.same_bits(lse, expected_lse)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("shape", ["9/3x64", "32/8x128"])
def test_no_page_of_an_empty_cache_is_read(shape, share):
    case = make_case([300], [2], SHAPES[shape])
    empty = {name: case[name][:0] for name in ("k_cache", "v_cache")}
    out, lse, status = attend(case, share=share, **empty)
    assert status.tolist() == [Status.BAD_PAGE]
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("length", [300, 3000])
def test_a_bad_page_hurts_one_of_many_requests_that_are_merged(length):
    """Eight rows per merge block; with few partials, those of several rows are read together."""
    lengths = [length, 17, length + 1, 3, length - 16, 129, 0, length]
    case = make_case(lengths, [16] * 8, SHAPES["32/8x128"])
    expected, expected_lse, _ = attend(case, share=False)
    case["block_table"][2, 5] = -1
    out, lse, status = attend(case, share=True)
    assert status.tolist() == [Status.BAD_PAGE if i == 2 else Status.OK for i in range(8)]
    hurt = torch.arange(len(out)).cuda() // 16 == 2
    assert (out[hurt] == 0).all() and (lse[hurt] == -torch.inf).all()
    assert kit.same_bits(out[~hurt], expected[~hurt])
    assert kit.same_bits(lse[~hurt], expected_lse[~hurt])


@pytest.mark.parametrize("rows", [2, 5])
def test_a_bad_page_hurts_one_of_many_requests(rows):
    """Six pairs, whose tiles four warps share, and fifteen; the second page and the last."""
    case = make_case([100] * 100, [rows] * 100, SHAPES["9/3x64"])
    expected, expected_lse, _ = attend(case)
    for page in (1, 3):
        broken = case["block_table"].clone()
        broken[97, page] = -1
        out, lse, status = attend(case, block_table=broken)
        assert status.tolist() == [Status.BAD_PAGE if i == 97 else Status.OK for i in range(100)]
        hurt = torch.arange(len(out)).cuda() // rows == 97
        assert (out[hurt] == 0).all() and (lse[hurt] == -torch.inf).all()
        assert kit.same_bits(out[~hurt], expected[~hurt])
        assert kit.same_bits(lse[~hurt], expected_lse[~hurt])


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(
    ("name", "batch", "longest", "rows"),
    [
        ("32/8x128", 3, 2100, 8),
        ("9/3x64", 3, 8192, 8),
        ("32/8x128", 1, 5900, 8),
        ("9/3x64", 3, 8192, 2),
        ("9/3x64", 12, 5000, 1),
        ("32/8x128", 1, 9000, 2),
        ("32/8x128", 8, 3000, 1),
        ("9/3x64", 96, 900, 5),
    ],
    ids=[
        "two launches",
        "one launch",
        "one launch of 128 dimensions",
        "one launch, few pairs",
        "two launches, few pairs",
        "few pairs of 128 dimensions",
        "few pairs of 128 dimensions, eight requests",
        "many requests",
    ],
)
@pytest.mark.parametrize("tree", [True, False])
def test_a_graph_serves_any_lengths(tree, name, batch, longest, rows, pdl):
    """1,000 replays with changing lengths, tables and tails; nothing is allocated."""
    shape = SHAPES[name]
    largest = make_case([longest] * batch, [rows] * batch, shape, tree=tree)
    out = torch.empty_like(largest["q"])
    status = torch.zeros(batch, dtype=torch.int32, device="cuda")
    static = largest | {
        "out": out,
        "status": status,
        "workspace": workspace_for(largest),
        "pdl": pdl,
    }
    flat.tree_attention(**static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flat.tree_attention(**static)
    draw = kit.generator(0)
    depth = static["position"] - static["context_len"].repeat_interleave(rows)
    table = static["block_table"].clone()
    lengths = torch.randint(0, longest + 1, (1000, batch), generator=draw, dtype=torch.int32).cuda()
    lengths[::10, 0] = 0
    wanted = torch.empty_like(out)
    before = None
    for step in range(1000):
        static["context_len"].copy_(lengths[step])
        torch.add(depth, lengths[step].repeat_interleave(rows), out=static["position"])
        static["block_table"].copy_(table.roll(step % 3, 0))
        if step == 10:
            before = torch.cuda.memory_stats()["reserved_bytes.all.allocated"]
        graph.replay()
        if step % (20 if rows > 2 else 2) == 0:  # few pairs: warps of a block share a tile
            flat.tree_attention(**static | {"out": wanted, "workspace": None})
            assert kit.same_bits(out, wanted), step
    assert torch.cuda.memory_stats()["reserved_bytes.all.allocated"] == before
    assert not status.any()


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(
    ("name", "rows", "longest"),
    [("32/8x128", 16, 9000), ("32/8x128", 64, 3000), ("9/3x64", 20, 5000), ("28/4x128", 33, 1100)],
)
def test_calls_of_a_graph_share_a_workspace(name, rows, longest, pdl):
    """A call uses no partials of the previous call, of a replay or of another length."""
    case = make_case([longest], [rows], SHAPES[name], tree=False)
    arrays = ("q", "k_cache", "v_cache")
    layers = [case | {name: torch.randn_like(case[name]) for name in arrays} for _ in range(6)]
    outs = [torch.empty_like(case["q"]) for _ in layers]
    workspace = workspace_for(case)
    status = torch.zeros(1, dtype=torch.int32, device="cuda")

    def run():
        for layer, out in zip(layers, outs, strict=True):
            flat.tree_attention(**layer, out=out, status=status, workspace=workspace, pdl=pdl)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    draw = kit.generator(rows)
    wanted = torch.empty_like(case["q"])
    for step in range(100):
        length = longest if step % 5 == 0 else int(torch.randint(longest + 1, (), generator=draw))
        case["context_len"].fill_(length)
        case["position"].copy_(torch.arange(length, length + rows))
        workspace.fill_(255 if step % 2 else 0)
        graph.replay()
        for layer, out in zip(layers, outs, strict=True):
            flat.tree_attention(**layer, out=wanted, status=status)
            assert kit.same_bits(out, wanted), (step, length)
    assert not status.any()


def test_unsupported_shapes_are_rejected():
    sizes = list(zip(*SHAPES.values(), strict=True))  # all of them run
    assert set(sizes[2]) == set(GPU_HEAD_DIMS) and set(sizes[3]) == set(GPU_PAGE_SIZES)
    assert max(h // kv for h, kv in zip(*sizes[:2], strict=True)) == GPU_MAX_GROUP

    def case(**changes):
        kwargs = {"heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 16} | changes
        return make_case([20], [3], (*kwargs.values(), torch.bfloat16))

    for changes, match in (
        ({"head_dim": 80}, "q: expected head_dim 64 or 128 on a GPU, got 80"),
        ({"heads": 18}, "q: expected at most 8 heads a kv head on a GPU, got 9"),
        ({"page_size": 8}, "k_cache: expected a page size of 16, 32, 64 or 128 on a GPU, got 8"),
    ):
        with pytest.raises(ValueError, match="tree_attention: " + match):
            attend(case(**changes))
    good = case()
    odd = torch.empty(3 * 4 * 64 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(3, 4, 64)
    with pytest.raises(ValueError, match="q: expected data and strides that are multiples of 16"):
        attend(good, q=odd)
    args = {"out": torch.empty_like(good["q"]), "status": torch.zeros(1).int().cuda()}
    with pytest.raises(ValueError, match="workspace: expected .* bytes, aligned to 16"):
        flat.tree_attention(
            **make_case([300], [3], (4, 2, 64, 16, torch.bfloat16)),
            **args,
            workspace=torch.empty(16, dtype=torch.uint8, device="cuda"),
        )
    with pytest.raises(TypeError, match="workspace: expected dtype uint8"):
        flat.tree_attention(**good, **args, workspace=torch.empty(16, device="cuda"))
