// Where the keys of a row are cut, from its position alone (see canonical.cuh).
#pragma once

#include <cstdint>

#include "common/math.h"

namespace tlt {

constexpr int kTile = 64;      // keys a tile
constexpr int kStep = 16;      // keys an MMA step: tails begin at multiples of it
constexpr int kTailKeys = 32;  // at most

// Short contexts need small splits to fill the card, long ones large splits, whose partials cost
// less: 128 keys up to 1024, 512 up to 8192, then 1024.
constexpr int kSmallEnd = 1024, kSmall = 128, kMediumEnd = 8192, kMedium = 512, kLarge = 1024;
constexpr int kSmallSplits = kSmallEnd / kSmall;
constexpr int kMediumSplits = kSmallSplits + (kMediumEnd - kSmallEnd) / kMedium;
static_assert(kSmall % kTile == 0 && kMedium % kTile == 0 && kLarge % kTile == 0);

TLT_HD int64_t split_begin(int64_t split) {
  if (split <= kSmallSplits) return split * kSmall;
  if (split <= kMediumSplits) return kSmallEnd + (split - kSmallSplits) * kMedium;
  return kMediumEnd + (split - kMediumSplits) * kLarge;
}

// How many splits begin below `end`.
TLT_HD int64_t splits_below(int64_t end) {
  if (end <= kSmallEnd) return (end + kSmall - 1) / kSmall;
  if (end <= kMediumEnd) return kSmallSplits + (end - kSmallEnd + kMedium - 1) / kMedium;
  return kMediumSplits + (end - kMediumEnd + kLarge - 1) / kLarge;
}

// How many of the splits below `end` one block takes that is to have `share` of their keys, in
// kWholeShare parts.
constexpr int kWholeShare = 1024;
TLT_HD int64_t splits_of_first_item(int64_t end, int64_t share) {
  const int64_t splits = splits_below(end * share / kWholeShare);
  return splits < 1 ? 1 : splits;
}

TLT_HD bool starts_split(int64_t key) {
  return key % (key <= kSmallEnd ? kSmall : key <= kMediumEnd ? kMedium : kLarge) == 0;
}

// First position of the tail of a row at `position`.
TLT_HD int64_t tail_begin(int64_t position) {
  return position < kTailKeys ? 0 : (position - kStep) / kStep * kStep;
}

}  // namespace tlt
