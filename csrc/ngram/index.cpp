// The suffix index on the host. Adding a token costs max_order table look-ups; a proposal looks at
// no more than kMaxOccurrences places an order and follows those that match, depth steps each.
#include "ngram/index.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/noise.h"

namespace tlt {
namespace {

uint64_t mix(uint64_t x) {
  x ^= x >> 32;
  x *= 0x9e3779b97f4a7c15u;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9u;
  return x ^ x >> 32;
}

// A node of the next level: `count` walkers of `parent` go on with `token`.
struct Candidate {
  int32_t parent, token, count;
  float score;  // cumulative
  float rank;   // among its siblings
};

// Sets score and rank of the children of one node, best first, and keeps top_k of them.
void rank_siblings(const ProposeParams& p, int64_t b, int32_t depth, size_t begin,
                   std::vector<Candidate>& level) {
  const bool greedy = !(p.temperature[b] >= kMinTemperature);
  const NoiseKey key = noise_key(p.seed, p.request[b], NoiseDomain::kTarget);
  int32_t total = 0;
  for (size_t i = begin; i < level.size(); ++i) total += level[i].count;
  const float log_total = log_f32(static_cast<float>(total + 1));
  for (size_t i = begin; i < level.size(); ++i) {
    Candidate& c = level[i];
    const float log_count = log_f32(static_cast<float>(c.count));
    c.score = p.nodes.score[b * p.nodes.capacity + c.parent] + (log_count - log_total);
    c.rank = log_count;
    if (greedy) continue;
    const Philox4 words = noise_words(key, p.root_position[b] + depth, c.token >> 2);
    c.rank = keyed_score(log_count, 1.0f, gumbel(words.word[c.token & 3]));
  }
  std::sort(level.begin() + begin, level.end(), [](const Candidate& x, const Candidate& y) {
    return x.rank != y.rank ? x.rank > y.rank : x.token < y.token;
  });
  level.resize(std::min<size_t>(level.size(), begin + p.top_k));
}

// Keeps the top_k best of a level by (score desc, order), in the order they have.
void keep_best(std::vector<Candidate>& level, size_t top_k) {
  if (level.size() <= top_k) return;
  std::vector<size_t> order(level.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t x, size_t y) { return level[x].score > level[y].score; });
  order.resize(top_k);
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < top_k; ++i) level[i] = level[order[i]];
  level.resize(top_k);
}

}  // namespace

void NgramIndex::clear() {
  sequences_.clear();
  groups_.clear();
  num_tokens_ = 0;
  for (auto* array : {&token_, &previous_, &next_, &group_key_, &link_}) array->clear();
  owner_.clear();
  table_.assign(max_order_, std::vector<int32_t>(64, -1));
  used_.assign(max_order_, 0);
}

bool NgramIndex::same_ngram(int32_t a, int32_t b, int64_t order) const {
  if (group_key_[a] != group_key_[b]) return false;
  for (; order > 0; --order, a = previous_[a], b = previous_[b]) {
    if (a < 0 || b < 0 || token_[a] != token_[b]) return false;
  }
  return true;
}

// Writes the hashes of the n-grams that end at `place`, shortest first; returns how many.
int64_t NgramIndex::suffix_hashes(int32_t place, uint64_t* hashes) const {
  uint64_t hash = mix(static_cast<uint32_t>(group_key_[place]));
  int64_t count = 0;
  for (int32_t at = place; at >= 0 && count < max_order_; at = previous_[at]) {
    hash = mix(hash + static_cast<uint32_t>(token_[at]) + 1);
    hashes[count++] = hash;
  }
  return count;
}

// The slot of the n-gram that ends at `place`, or the empty one where it belongs.
size_t NgramIndex::find_slot(int64_t order, uint64_t hash, int32_t place) const {
  const std::vector<int32_t>& table = table_[order - 1];
  size_t slot = hash & (table.size() - 1);
  while (table[slot] >= 0 && !same_ngram(table[slot], place, order)) {
    slot = (slot + 1) & (table.size() - 1);
  }
  return slot;
}

void NgramIndex::grow_table(int64_t order) {
  std::vector<int32_t> old(2 * table_[order - 1].size(), -1);
  old.swap(table_[order - 1]);
  uint64_t hashes[kMaxOrder];
  for (int32_t place : old) {
    if (place < 0) continue;
    suffix_hashes(place, hashes);
    table_[order - 1][find_slot(order, hashes[order - 1], place)] = place;
  }
}

void NgramIndex::index_place(int32_t place) {
  link_.resize(link_.size() + max_order_, -1);
  uint64_t hashes[kMaxOrder];
  const int64_t count = suffix_hashes(place, hashes);
  for (int64_t order = 1; order <= count; ++order) {
    if (2 * used_[order - 1] >= static_cast<int64_t>(table_[order - 1].size())) grow_table(order);
    int32_t& newest = table_[order - 1][find_slot(order, hashes[order - 1], place)];
    used_[order - 1] += newest < 0;
    link_[place * max_order_ + order - 1] = newest;
    newest = place;
  }
}

void NgramIndex::append(int64_t handle, Sequence& sequence, int32_t token) {
  const auto place = static_cast<int32_t>(token_.size());
  token_.push_back(token);
  previous_.push_back(sequence.last);
  next_.push_back(-1);
  group_key_.push_back(sequence.group_key);
  owner_.push_back(handle);
  if (sequence.last >= 0) next_[sequence.last] = place;
  sequence.last = place;
  ++sequence.length;
  ++num_tokens_;
  index_place(place);
}

void NgramIndex::forget(int64_t handle) {
  const Sequence& sequence = sequences_.at(handle);
  const auto group = groups_.find(sequence.group);
  std::vector<int64_t>& handles = group->second.handles;
  handles.erase(std::find(handles.begin(), handles.end(), handle));
  if (handles.empty()) groups_.erase(group);
  num_tokens_ -= sequence.length;
  sequences_.erase(handle);
}

// Forgets sequences, least recently extended first, until a quarter of the pool is free, then
// rebuilds it. So a rebuild is paid for by capacity / 4 tokens.
void NgramIndex::make_room() {
  const int64_t wanted = capacity_ - (capacity_ + 3) / 4;
  std::vector<std::pair<int64_t, int64_t>> by_age;
  for (const auto& [handle, sequence] : sequences_) by_age.emplace_back(sequence.touched, handle);
  std::sort(by_age.begin(), by_age.end());
  for (const auto& [touched, handle] : by_age) {
    if (num_tokens_ <= wanted) break;
    forget(handle);
  }
  const std::vector<int32_t> tokens = std::move(token_);
  const std::vector<int64_t> owners = std::move(owner_);
  auto sequences = std::move(sequences_);
  auto groups = std::move(groups_);
  clear();
  for (auto& [handle, sequence] : sequences) {
    sequence.last = -1;
    sequence.length = 0;
  }
  sequences_ = std::move(sequences);
  groups_ = std::move(groups);
  for (size_t i = 0; i < tokens.size(); ++i) {  // in the old order, so recency stays as it was
    const auto found = sequences_.find(owners[i]);
    if (found != sequences_.end()) append(owners[i], found->second, tokens[i]);
  }
}

// Places that end the longest suffix of the sequence seen elsewhere with something after it.
std::vector<int32_t> NgramIndex::occurrences(const Sequence& sequence, int64_t min_order) const {
  std::vector<int32_t> places;
  uint64_t hashes[kMaxOrder];
  int64_t order = suffix_hashes(sequence.last, hashes);
  for (; order >= min_order && places.empty(); --order) {
    int32_t at = table_[order - 1][find_slot(order, hashes[order - 1], sequence.last)];
    for (int looked = 0; at >= 0 && looked < kMaxOccurrences; ++looked) {
      if (next_[at] >= 0) places.push_back(at);  // not so at the suffix itself
      at = link_[at * max_order_ + order - 1];
    }
  }
  return places;
}

// Moves every walker to the token that follows; those whose sequence ends drop out. Afterwards
// siblings stand together, by token.
void NgramIndex::advance(std::vector<Walker>& walkers) const {
  for (Walker& w : walkers) w.place = next_[w.place];
  walkers.erase(
      std::remove_if(walkers.begin(), walkers.end(), [](const Walker& w) { return w.place < 0; }),
      walkers.end());
  std::sort(walkers.begin(), walkers.end(), [&](const Walker& x, const Walker& y) {
    return x.node != y.node ? x.node < y.node : token_[x.place] < token_[y.place];
  });
}

void NgramIndex::propose_one(const ProposeParams& p, int64_t b) const {
  const int64_t first = b * p.nodes.capacity;
  int32_t& count = p.nodes.count[b];
  const auto add_node = [&](int32_t token, int32_t parent, float score, int32_t depth) {
    p.nodes.token[first + count] = token;
    p.nodes.parent[first + count] = parent;
    p.nodes.score[first + count] = score;
    p.nodes.depth[first + count] = depth;
    return count++;
  };
  count = 0;
  const auto found = sequences_.find(p.handle[b]);
  const bool known = found != sequences_.end() && found->second.length > 0;
  add_node(known ? token_[found->second.last] : p.nodes.token[first], -1, 0.0f, 0);
  if (!known) return;

  std::vector<Walker> walkers;
  for (int32_t place : occurrences(found->second, p.min_order)) walkers.push_back({0, place});
  std::vector<Candidate> level;
  for (int32_t depth = 1; depth <= p.depth && !walkers.empty(); ++depth) {
    advance(walkers);
    level.clear();
    for (size_t i = 0, eldest = 0; i < walkers.size(); ++i) {
      const int32_t parent = walkers[i].node, token = token_[walkers[i].place];
      if (i == 0 || parent != walkers[i - 1].node) eldest = level.size();
      if (level.size() == eldest || level.back().token != token) {
        level.push_back({parent, token, 0, 0.0f, 0.0f});
      }
      ++level.back().count;
      const bool last = i + 1 == walkers.size() || walkers[i + 1].node != parent;
      if (last) rank_siblings(p, b, depth, eldest, level);
    }
    keep_best(level, p.top_k);
    // Walkers go on from their new nodes; those whose node was not kept stop.
    std::vector<Walker> kept;
    for (const Candidate& c : level) {
      const int32_t node = add_node(c.token, c.parent, c.score, depth);
      for (const Walker& w : walkers) {
        if (w.node == c.parent && token_[w.place] == c.token) kept.push_back({node, w.place});
      }
    }
    walkers.swap(kept);
  }
}

}  // namespace tlt
