"""The sum of exponentials of csrc/tree/exp_sum.h has one value, whatever the split of a row."""

import ctypes
import math
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests import kit
from tests.csrc.test_tree import Store

each_device = kit.each_device

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = """
#include "tree/exp_sum.h"
using tlt::ExpSum;
extern "C" ExpSum group(float reference, float mass) { return ExpSum::of_group(reference, mass); }
extern "C" ExpSum group_of_ids(const float* x) {
  float most = x[0], w[8];
  for (int i = 1; i < 8; ++i) most = x[i] > most ? x[i] : most;
  const float reference = ExpSum::reference_of(most);
  for (int i = 0; i < 8; ++i) w[i] = tlt::exp_f32(x[i] - reference);
  return group(reference, ((w[0] + w[1]) + (w[2] + w[3])) + ((w[4] + w[5]) + (w[6] + w[7])));
}
extern "C" ExpSum sum(ExpSum a, ExpSum b) { a.add(b); return a; }
extern "C" float log_of(ExpSum a) { return a.log(); }
"""


class ExpSum(ctypes.Structure):
    _fields_ = [("reference", ctypes.c_float), ("part", ctypes.c_int64 * 3)]

    def words(self):
        return self.reference, list(self.part)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The header, compiled for the host with the flags of the build."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("exp_sum")
    source, out = folder / "library.cpp", folder / "library.so"
    source.write_text(LIBRARY)
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-I", ROOT / "csrc"]
    subprocess.run([compiler, *flags, source, "-o", out], check=True)
    found = ctypes.CDLL(str(out))
    for function in (found.group, found.group_of_ids, found.sum):
        function.restype = ExpSum
    found.group.argtypes = [ctypes.c_float, ctypes.c_float]
    found.group_of_ids.argtypes = [ctypes.c_void_p]
    found.sum.argtypes = [ExpSum, ExpSum]
    found.log_of.argtypes, found.log_of.restype = [ExpSum], ctypes.c_float
    return found


def merge(library, sums, draw):
    """Adds two of the sums at random until one is left."""
    sums = list(sums)
    while len(sums) > 1:
        at = int(torch.randint(len(sums), (), generator=draw))
        sums[at], sums[-1] = sums[-1], sums[at]
        other = sums.pop()
        at = int(torch.randint(len(sums), (), generator=draw))
        sums[at] = library.sum(sums[at], other)
    return sums[0]


REFERENCES = {
    "near": [16.0 * n for n in range(-4, 4)],
    "negative zero": [-0.0, 0.0, 16.0, -16.0],
    "with gaps": [-64.0, -48.0, -16.0, 0.0, 48.0, 64.0, 112.0],
    "none": [-math.inf],
    "none and others": [-math.inf, -math.inf, 32.0, 64.0],
    "steps of 16 and of 32": [2.0**28 + 16 * n for n in (-3, -2, -1, 0, 2, 4)],
    "largest": [-(2.0**127), -32.0, 0.0, 2.0**127, 1.5 * 2.0**127],
    "overflowed": [0.0, 16.0, math.inf],
}


@pytest.mark.parametrize("name", REFERENCES)
def test_every_order_of_additions_gives_the_same_words(library, name):
    draw = kit.generator(len(name))
    references = REFERENCES[name]
    for count in (1, 2, 3, 60):
        chosen = [references[i] for i in torch.randint(len(references), (count,), generator=draw)]
        masses = torch.rand(count, generator=draw).mul(20).exp2().tolist()  # to 8 e^8 and above
        masses = [m if math.isfinite(r) else 0.0 for r, m in zip(chosen, masses, strict=True)]
        groups = [library.group(r, m) for r, m in zip(chosen, masses, strict=True)]
        mass = Counter()
        for reference, of_group in zip(chosen, masses, strict=True):
            if of_group > 0:
                mass[int(reference)] += int(of_group * 2**30)
        highest = max(chosen)
        parts = [mass[int(highest) - 16 * k] if math.isfinite(highest) else 0 for k in range(3)]
        for _ in range(12):
            assert merge(library, groups, draw).words() == (highest, parts)


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("score_temperature", [0.0, 0.7])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("vocab", [3, 7, 8, 9, 60, 64, 65, 1037])
def test_scores_are_those_of_any_split(library, vocab, reduced, score_temperature):
    """The op's scores, bit for bit: groups of consecutive draft ids, the last one not full, groups
    of -inf, far apart or without a target id."""
    draw = kit.generator(vocab)
    logits = 3 * kit.randn(12, vocab, seed=vocab) + torch.arange(-44.0, 44.0, 7.4)[:, None]
    group = torch.arange(vocab) // 8
    logits[::2] -= 13.0 * (group % 5)
    logits[::3, group % 4 == 1] = -math.inf
    logits[-1] = torch.arange(vocab).remainder(2).sub(0.5) * 0.0  # of both signs
    d2t, kept = None, torch.ones(vocab, dtype=torch.bool)
    if reduced:
        d2t = torch.randperm(vocab, generator=draw).int()
        kept = (torch.arange(vocab) % 5 != 1) & (group % 7 != 2)
        d2t[~kept] = -1
    store = Store(len(logits), 3, 2, temperature=0.0)
    store.expand(logits, d2t=d2t, score_temperature=score_temperature)
    inverse = torch.ones(()) / (score_temperature or 1.0)
    values = torch.where(kept, logits, -math.inf) * inverse
    padded = torch.nn.functional.pad(values, (0, -vocab % 8), value=-math.inf)
    for b in range(len(logits)):
        groups = [library.group_of_ids(x.data_ptr()) for x in padded[b].view(-1, 8)]
        total = merge(library, groups, draw)
        log_sum = torch.tensor(library.log_of(total))
        best = values[b].topk(2).values
        wanted = ((best - total.reference) - log_sum).clamp(max=0.0)
        assert kit.same_bits(store.score[b, 1:3] + 0.0, wanted + 0.0)
