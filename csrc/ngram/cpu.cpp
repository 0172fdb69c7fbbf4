// The n-gram drafter on the CPU.
//
// A match is a position in the sequences of the request's group that ends with the same tokens as
// the request. The continuations of the kMaxMatches best matches form a trie of weighted counts.
#include <algorithm>
#include <functional>
#include <iterator>
#include <vector>

#include "common/noise.h"
#include "common/parallel.h"
#include "common/status.h"
#include "ngram/op.h"

namespace tlt {
namespace {

struct Text {
  const int32_t* token;
  int32_t length;  // 0: empty
};

// A match and its current node of the trie.
struct Match {
  Text text;
  int32_t position;  // of the match; depth d continues with position + d
  int32_t weight;
  int32_t node;  // store index

  // Below 0 at the end of the text.
  int32_t next(int32_t depth) const {
    return position + depth < text.length ? text.token[position + depth] : -1;
  }
};

// A node of the next level: the matches of `parent` whose next token is `token`.
struct Child {
  int32_t parent, token, count;
  float score;  // cumulative
  float rank;   // among its siblings
};

class Drafter {
 public:
  Drafter(const NgramProposeParams& params, int64_t request) : p(params), b(request) {}

  void run() {
    int32_t& count = p.nodes.count[b];
    if (!p.keep_unmatched) count = 0;
    const int32_t own_slot = p.slot[b], root = p.context_len[b];
    if (own_slot == -1) return;
    if (own_slot < 0 || own_slot >= p.num_slots || root < 0 || root >= p.max_len) {
      p.status[b] |= kStatusBadLength;
      return;
    }
    own = {p.tokens + own_slot * p.max_len, root + 1};
    find_matches(own_slot);
    if (p.keep_unmatched && matches.empty()) return;
    count = 0;
    add_node({-1, own.token[root], 0, 0.0f, 0.0f}, 0);
    for (int32_t depth = 1; depth <= p.depth && !matches.empty(); ++depth) grow(depth);
  }

 private:
  void find_matches(int32_t own_slot) {
    std::vector<uint32_t> best;  // keys, largest first
    std::vector<Text> group;
    for (int64_t g = 0; g < p.group_size; ++g) {
      const int32_t slot = p.group_slots[b * p.group_size + g];
      group.push_back(slot == own_slot ? own : text_of(slot));
      find_in(group.back(), static_cast<int32_t>(g), best);
    }
    for (uint32_t key : best) {
      int32_t g, position;
      place_of(key, static_cast<int32_t>(p.max_len), &g, &position);
      matches.push_back({group[g], position, match_weight(matched_of(key)), 0});
    }
  }

  Text text_of(int32_t slot) {
    if (slot == -1) return {nullptr, 0};
    const bool valid = slot >= 0 && slot < p.num_slots;
    const int32_t length = valid ? p.length[slot] : -1;
    if (length >= 0 && length <= p.max_len) return {p.tokens + slot * p.max_len, length};
    p.status[b] |= kStatusBadLength;
    return {nullptr, 0};
  }

  // Length of the common suffix, at most max_ngram, of the text up to `position` and the request.
  int32_t matched(const Text& text, int32_t position) const {
    const int32_t root = own.length - 1;
    const int32_t most = std::min({static_cast<int32_t>(p.max_ngram), position + 1, root + 1});
    int32_t n = 0;
    while (n < most && text.token[position - n] == own.token[root - n]) ++n;
    return n;
  }

  // Latest position first, so that of equally long matches the first ones found are the best.
  void find_in(const Text& text, int32_t g, std::vector<uint32_t>& best) const {
    const int32_t last = own.token[own.length - 1];
    for (int32_t position = text.length - 2; position >= 0; --position) {
      if (text.token[position] != last) continue;
      const int32_t n = matched(text, position);
      if (n < p.min_ngram) continue;
      const uint32_t key = match_key(n, g, position, static_cast<int32_t>(p.max_len));
      if (best.size() == kMaxMatches) {
        if (key < best.back()) continue;
        best.pop_back();
      }
      best.insert(std::upper_bound(best.begin(), best.end(), key, std::greater<uint32_t>()), key);
    }
  }

  int32_t add_node(const Child& child, int32_t depth) {
    const int64_t at = b * p.nodes.capacity + p.nodes.count[b];
    p.nodes.token[at] = child.token;
    p.nodes.parent[at] = child.parent;
    p.nodes.score[at] = child.score;
    p.nodes.depth[at] = depth;
    return p.nodes.count[b]++;
  }

  // One level: siblings are grouped by parent, in rank order; matches move to their new nodes.
  void grow(int32_t depth) {
    std::vector<Child> level;
    for (size_t i = 0; i < matches.size(); ++i) {
      const int32_t parent = matches[i].node;  // matches are sorted by node
      if (i == 0 || matches[i - 1].node != parent) add_children(parent, depth, level);
    }
    keep_best(level);
    std::vector<Match> moved;
    for (const Child& child : level) {
      const int32_t node = add_node(child, depth);
      for (const Match& match : matches) {
        if (match.node != child.parent || match.next(depth) != child.token) continue;
        moved.push_back(match);
        moved.back().node = node;
      }
    }
    matches = std::move(moved);
  }

  // The top_k children of one node by log count + noise.
  void add_children(int32_t parent, int32_t depth, std::vector<Child>& level) const {
    std::vector<Child> siblings;
    int32_t total = 0;
    for (const Match& match : matches) {
      const int32_t token = match.next(depth);
      if (match.node != parent || token < 0) continue;
      const auto same = [&](const Child& c) { return c.token == token; };
      auto child = std::find_if(siblings.begin(), siblings.end(), same);
      if (child == siblings.end()) child = siblings.insert(child, {parent, token, 0, 0.0f, 0.0f});
      child->count += match.weight;
      total += match.weight;
    }
    const bool greedy = !(p.temperature[b] >= kMinTemperature);
    const NoiseKey key = noise_key(p.seed, p.request[b], NoiseDomain::kTarget);
    for (Child& c : siblings) {
      c.score = add_rn(p.nodes.score[b * p.nodes.capacity + parent], log_share(c.count, total));
      c.rank = log_f32(static_cast<float>(c.count));
      if (greedy) continue;
      c.rank = keyed_score(c.rank, 1.0f, target_noise(key, p.context_len[b] + depth, c.token));
    }
    std::sort(siblings.begin(), siblings.end(), [](const Child& x, const Child& y) {
      return x.rank != y.rank ? x.rank > y.rank : x.token < y.token;
    });
    siblings.resize(std::min<size_t>(siblings.size(), p.top_k));
    level.insert(level.end(), siblings.begin(), siblings.end());
  }

  // The top_k best nodes of a level by (score desc, order), in their original order.
  void keep_best(std::vector<Child>& level) const {
    while (level.size() > static_cast<size_t>(p.top_k)) {
      const auto last_of_the_lowest =
          std::min_element(level.rbegin(), level.rend(),
                           [](const Child& x, const Child& y) { return x.score < y.score; });
      level.erase(std::next(last_of_the_lowest).base());
    }
  }

  const NgramProposeParams& p;
  const int64_t b;
  Text own{};
  std::vector<Match> matches;
};

}  // namespace

void ngram_propose_cpu(const NgramProposeParams& p) {
  const int64_t work = p.group_size * std::min<int64_t>(p.max_len, 1024) + 10'000;  // rough
  parallel_for(p.num_requests, work, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) Drafter(p, b).run();
  });
}

}  // namespace tlt
