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
constexpr int kMaxTileKeys = INT32_MAX - 2 * kLarge + 1;  // positions may be counted up in int

template <typename Split>
TLT_HD Split split_begin(Split split) {
  if (split <= kSmallSplits) return split * kSmall;
  if (split <= kMediumSplits) return kSmallEnd + (split - kSmallSplits) * kMedium;
  return kMediumEnd + (split - kMediumSplits) * kLarge;
}

// How many splits begin below `end`.
template <typename Position>
TLT_HD Position splits_below(Position end) {
  if (end <= kSmallEnd) return (end + kSmall - 1) / kSmall;
  if (end <= kMediumEnd) return kSmallSplits + (end - kSmallEnd + kMedium - 1) / kMedium;
  return kMediumSplits + (end - kMediumEnd + kLarge - 1) / kLarge;
}

// Keys of the splits at a position.
TLT_HD uint32_t split_keys(uint32_t key) {
  return key < kSmallEnd ? kSmall : key < kMediumEnd ? kMedium : kLarge;
}

TLT_HD bool starts_split(uint32_t key) { return (key & (split_keys(key) - 1)) == 0; }

// The first position from `key` on where a split begins.
TLT_HD uint32_t next_split(uint32_t key) {
  const uint32_t keys = split_keys(key);
  return (key + keys - 1) & ~(keys - 1);
}

// What each of `items` (2 or more) takes of the keys, as a fraction of 2^32. The last one takes
// what is left, a sixteenth of all or one item more, so that a length just past a multiple is cut
// no coarser than the multiple.
inline uint32_t share_of(int64_t items) {
  const int64_t parts = items < 16 ? 16 : items;
  return static_cast<uint32_t>((int64_t{1} << 32) * (parts - 1) / (parts * items));
}

// Keys of each item but the last where they share `end` keys: a multiple of the size that most of
// their splits have, so that all items have as many.
TLT_HD uint32_t keys_of_item(uint32_t end, uint32_t share) {
  const uint32_t unit = split_keys(end / 2);
  const auto part = static_cast<uint32_t>(uint64_t{end} * share >> 32);
  return (part + unit) & ~(unit - 1);  // up, to one unit at least
}

// Blocks of a cluster that shares all keys of a row block in one launch. One at least computes
// tails, so that the others have at most kClusterSplits: one each, the first one all before those
// too.
constexpr int kClusterBlocks = 16;
constexpr int kClusterSplits = kClusterBlocks - 1;

// The split of the cluster's first block that it has as well as block 1 has the next one.
TLT_HD int cluster_first(int splits) {
  return splits > kClusterSplits ? splits - kClusterSplits : 0;
}

// First position of the tail of a row at `position`.
template <typename Position>
TLT_HD Position tail_begin(Position position) {
  return position < kTailKeys ? 0 : (position - kStep) & ~Position{kStep - 1};
}

}  // namespace tlt
