// Where the keys of a row are split, as a function of its position alone (see canonical.cuh).
#pragma once

#include <cstdint>

#include "common/math.h"

namespace tlt {

constexpr int kTile = 64;      // keys a tile
constexpr int kStep = 16;      // keys an MMA step; tails begin at its multiples
constexpr int kTailKeys = 32;  // keys of a tail, at most

// Short contexts need small splits to fill the card; long contexts use large ones, which have fewer
// partials: 128 keys up to 1024, 512 up to 8192, then 1024. With 64 dimensions also 256 up to 4096,
// since a tile takes as long as one of 128 dimensions although it has half the bytes.
constexpr int kSmallEnd = 1024, kSmall = 128, kMediumEnd = 8192, kMedium = 512, kLarge = 1024;
constexpr int kMaxTileKeys = INT32_MAX - 2 * kLarge + 1;  // positions plus a split must fit an int

template <int kDim>
struct Cuts {
  static constexpr int kMidEnd = kDim <= 64 ? 4096 : kSmallEnd, kMid = 256;
  static constexpr int kSmallSplits = kSmallEnd / kSmall;
  static constexpr int kMidSplits = kSmallSplits + (kMidEnd - kSmallEnd) / kMid;
  static constexpr int kMediumSplits = kMidSplits + (kMediumEnd - kMidEnd) / kMedium;
  static_assert(kSmall % kTile == 0 && kMid % kTile == 0);

  template <typename Split>
  TLT_HD static Split split_begin(Split split) {
    if (split <= kSmallSplits) return split * kSmall;
    if (split <= kMidSplits) return kSmallEnd + (split - kSmallSplits) * kMid;
    if (split <= kMediumSplits) return kMidEnd + (split - kMidSplits) * kMedium;
    return kMediumEnd + (split - kMediumSplits) * kLarge;
  }

  // How many splits begin below `end`.
  template <typename Position>
  TLT_HD static Position splits_below(Position end) {
    if (end <= kSmallEnd) return (end + kSmall - 1) / kSmall;
    if (end <= kMidEnd) return kSmallSplits + (end - kSmallEnd + kMid - 1) / kMid;
    if (end <= kMediumEnd) return kMidSplits + (end - kMidEnd + kMedium - 1) / kMedium;
    return kMediumSplits + (end - kMediumEnd + kLarge - 1) / kLarge;
  }

  // Keys of a split at this position.
  TLT_HD static uint32_t split_keys(uint32_t key) {
    return key < kSmallEnd ? kSmall : key < kMidEnd ? kMid : key < kMediumEnd ? kMedium : kLarge;
  }

  TLT_HD static bool starts_split(uint32_t key) { return (key & (split_keys(key) - 1)) == 0; }

  // The first position from `key` on at which a split begins.
  TLT_HD static uint32_t next_split(uint32_t key) {
    const uint32_t keys = split_keys(key);
    return (key + keys - 1) & ~(keys - 1);
  }

  // Keys of each item but the last, if the items share `end` keys: a multiple of the size of most
  // of their splits, so that all items have the same number. `share` is the result of share_of.
  TLT_HD static uint32_t keys_of_item(uint32_t end, uint32_t share) {
    const uint32_t unit = split_keys(end / 2);
    const auto part = static_cast<uint32_t>(uint64_t{end} * share >> 32);
    return (part + unit) & ~(unit - 1);  // rounded up, at least one unit
  }

  // First key of an item, which takes the splits that begin before the next item. The first
  // `small_items`, 0 or kSmallSplits, take one small split each; the others share the rest of `end`
  // keys.
  TLT_HD static uint32_t item_begin(uint32_t end, uint32_t small_items, uint32_t share,
                                    uint32_t item) {
    if (item < small_items) return item * kSmall;
    const uint32_t before = small_items * kSmall, others = end > before ? end - before : 0;
    return next_split(before + (item - small_items) * keys_of_item(others, share));
  }
};

// The share of the keys for each of `items` (2 or more), as a fraction of 2^32. The last item takes
// the rest: in addition to its share a sixteenth of all keys, or one more share if there are more
// than 16 items. So a length just past a multiple is not split more coarsely than the multiple.
inline uint32_t share_of(int64_t items) {
  const int64_t parts = items < 16 ? 16 : items;
  return static_cast<uint32_t>((int64_t{1} << 32) * (parts - 1) / (parts * items));
}

// Blocks of a cluster that shares the keys of a row block in one launch.
constexpr int kClusterBlocks = 16;

// Partials that a cluster block stores: the first block folds all its splits from the left.
template <int kDim>
constexpr int kBlockPartials = kDim <= 64 ? 4 : 1;

// Which blocks of a cluster have which of the `end` tile keys of a row block; no block has more
// partials than it can store. If it can store one, each block has one split, the first block has
// all earlier splits as well, and the last block has none. Otherwise each block has a power of two
// of keys.
template <int kDim>
struct ClusterCuts {
  using C = Cuts<kDim>;
  static constexpr bool kSingle = kBlockPartials<kDim> == 1;
  static constexpr int kMaxKeys = kClusterBlocks * kLarge;  // if several partials are stored
  int end;
  int blocks;     // blocks that have keys
  int first = 0;  // index of the first block's last split
  int shift = 7;  // log2 of the keys of a block

  TLT_HD explicit ClusterCuts(int end) : end(end) {
    if constexpr (kSingle) {
      const int splits = C::splits_below(end);
      blocks = splits < kClusterBlocks ? splits : kClusterBlocks - 1;
      first = splits - blocks;
    } else {
      static_assert(kSmall == 1 << 7 && kLarge == 1 << 10);
      if (end > kSmallEnd) shift = 8;
      while (end > kClusterBlocks << shift) ++shift;
      blocks = (end + (1 << shift) - 1) >> shift;
    }
  }

  // First key of a block.
  TLT_HD int begin(int rank) const {
    const int at = kSingle && rank > 0 ? C::split_begin(first + rank) : rank << shift;
    return at < end ? at : end;
  }

  // How many partials there are, from the left.
  TLT_HD int partials() const {
    if (kSingle || blocks <= 1) return blocks;
    return C::splits_below(end) - C::splits_below(1 << shift) + 1;
  }

  // Location of a partial: kBlockPartials * block + index within the block.
  TLT_HD int location_of(int partial) const {
    if (kSingle || partial == 0) return partial;
    const int split = partial - 1 + C::splits_below(1 << shift);
    const int rank = C::split_begin(split) >> shift;
    return rank * kBlockPartials<kDim> + split - C::splits_below(rank << shift);
  }

  // The first block that computes tails: blocks without keys do; without any, the later half does
  // after its own splits.
  TLT_HD int first_tail() const { return blocks < kClusterBlocks ? blocks : kClusterBlocks / 2; }

  // The index under which that block stores tails: no block of the later half has as many partials.
  TLT_HD int tail_kept() const { return blocks < kClusterBlocks ? 0 : kBlockPartials<kDim> - 1; }
};

// First position of the tail of a row at `position`.
template <typename Position>
TLT_HD Position tail_begin(Position position) {
  return position < kTailKeys ? 0 : (position - kStep) & ~Position{kStep - 1};
}

}  // namespace tlt
