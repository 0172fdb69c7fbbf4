// Groups of arrays that an op takes as one argument: the named tuples of tlt_ext/groups.py, field
// by field, as tensors. Shapes and dtypes are documented there.
#pragma once

#include <array>

#include "common/tensor.h"

namespace tlt {

// The fields of a group, in the order of its named tuple, and which of them an op reads.
struct Group {
  bool reads(const Tensor*) const { return true; }
};

struct RowsArgs : Group {
  static constexpr const char* kName = "Rows";
  Tensor row_start, position, status, context_len, block_table, slot_base;
  auto fields() {
    return std::array{&row_start, &position, &status, &context_len, &block_table, &slot_base};
  }
};

struct SamplingArgs : Group {
  static constexpr const char* kName = "Sampling";
  Tensor temperature, request, top_k, top_p;
  auto fields() { return std::array{&temperature, &request, &top_k, &top_p}; }
};

struct TreeArgs : Group {
  static constexpr const char* kName = "Tree";
  Tensor tokens, parents, ancestors;
  auto fields() { return std::array{&tokens, &parents, &ancestors}; }
};

struct VerifyOutputArgs : Group {
  static constexpr const char* kName = "VerifyOutput";
  Tensor emitted, logprobs, num_emitted, finish, path, filtered_logprobs;
  auto fields() {
    return std::array{&emitted, &logprobs, &num_emitted, &finish, &path, &filtered_logprobs};
  }
};

struct NodesArgs : Group {
  static constexpr const char* kName = "Nodes";
  Tensor token, parent, score, depth, count;
  auto fields() { return std::array{&token, &parent, &score, &depth, &count}; }
};

struct FrontierArgs : Group {
  static constexpr const char* kName = "Frontier";
  Tensor node, row, ancestors;
  auto fields() { return std::array{&node, &row, &ancestors}; }
};

struct TokenTableArgs : Group {
  static constexpr const char* kName = "TokenTable";
  Tensor tokens, slot, length, group_slots;
  auto fields() { return std::array{&tokens, &slot, &length, &group_slots}; }
};

struct RequestsArgs : Group {
  static constexpr const char* kName = "Requests";
  Tensor context_len, status, last_token, remaining, num_new, granted;
  auto fields() {
    return std::array{&context_len, &status, &last_token, &remaining, &num_new, &granted};
  }
};

struct NewRowsArgs : Group {
  static constexpr const char* kName = "NewRows";
  Tensor ids, first, last, features;
  auto fields() { return std::array{&ids, &first, &last, &features}; }
};

struct DraftWeightsArgs : Group {
  static constexpr const char* kName = "DraftWeights";
  Tensor embedding, input_norm, hidden_norm;
  auto fields() { return std::array{&embedding, &input_norm, &hidden_norm}; }
};

// A group of which an op reads only the fields kRead. The other fields stay undefined: a conversion
// costs 2.6 us.
template <typename G, Tensor G::*... kRead>
struct Part : G {
  bool reads(const Tensor* field) const { return ((field == &(this->*kRead)) || ...); }
};

}  // namespace tlt
