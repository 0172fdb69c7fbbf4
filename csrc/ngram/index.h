#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "common/tensor.h"
#include "ngram/index_params.h"

namespace tlt {

// Suffix index over the tokens of many sequences; sequences of one group see each other.
//
// A place is one token in the pool. Tokens of a sequence are linked both ways, since sequences grow
// in turns. For each order n a hash table maps the n-gram that ends at a place to the most recent
// such place, and links lead from there to the earlier ones. A table holds places only: an n-gram
// is compared token by token, so there are no false matches.
class NgramIndex {
 public:
  NgramIndex(int64_t max_order, int64_t capacity);

  int64_t start(int64_t group, const std::vector<int32_t>& tokens);
  void extend(int64_t handle, const std::vector<int32_t>& tokens);
  void drop(int64_t group);
  void clear();
  int64_t num_tokens() const { return num_tokens_; }

  void propose(const Tensor& handles, const Tensor& node_token, const Tensor& node_parent,
               const Tensor& node_score, const Tensor& node_depth, const Tensor& node_count,
               const Tensor& temperature, const Tensor& request, const Tensor& root_position,
               uint64_t seed, int64_t depth, int64_t top_k, int64_t min_order) const;

 private:
  struct Sequence {
    int64_t group;
    int32_t group_key;    // differs between a dropped group and a later one of the same name
    int32_t last = -1;    // place of the newest token
    int64_t length = 0;   // tokens
    int64_t touched = 0;  // when it was last extended
  };
  struct Walker {   // a place that continues some node of a proposal
    int32_t node;   // store index
    int32_t place;  // where that node's token stands in this continuation
  };
  struct Group {
    int32_t key;
    std::vector<int64_t> handles;
  };

  void check_handle(const char* op, int64_t handle) const;
  void append(int64_t handle, Sequence& sequence, int32_t token);
  void forget(int64_t handle);
  void make_room();
  bool same_ngram(int32_t a, int32_t b, int64_t order) const;
  size_t find_slot(int64_t order, uint64_t hash, int32_t place) const;
  void index_place(int32_t place);
  void grow_table(int64_t order);
  int64_t suffix_hashes(int32_t place, uint64_t* hashes) const;
  std::vector<int32_t> occurrences(const Sequence& sequence, int64_t min_order) const;
  void advance(std::vector<Walker>& walkers) const;
  void propose_one(const ProposeParams& p, int64_t b) const;

  int64_t max_order_, capacity_, num_tokens_ = 0;
  int64_t next_handle_ = 0, clock_ = 0;
  int32_t next_group_key_ = 0;
  std::unordered_map<int64_t, Sequence> sequences_;
  std::unordered_map<int64_t, Group> groups_;
  // Of each place. Those of forgotten sequences stay until the pool is full.
  std::vector<int32_t> token_, previous_, next_, group_key_;
  std::vector<int64_t> owner_;  // handle
  std::vector<int32_t> link_;   // [place, order - 1], the earlier place with the same n-gram
  std::vector<std::vector<int32_t>> table_;  // of each order; -1 = empty
  std::vector<int64_t> used_;                // slots of each table
};

}  // namespace tlt
