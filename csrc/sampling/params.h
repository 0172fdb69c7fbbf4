// Arguments of the sampling kernels. Strides are in elements, of a row; vectors are dense.
#pragma once

#include <cstdint>

#include "common/limits.h"
#include "common/noise.h"
#include "common/tensor.h"

namespace tlt {

// What a request draws from: logits / temperature, cut to its top-k, then to its top-p.
struct SamplingArrays {
  const float* temperature;  // [n]; 0 = greedy
  const int32_t* top_k;      // [n]; <= 0 or >= vocab_size = off
  const float* top_p;        // [n]; >= 1 = off
  const int64_t* request;    // [n]; 62-bit id, keys the noise
  uint64_t seed;
  RoundKeys round_keys;  // of the seed
};

struct SampleParams {
  const void* logits;  // [rows, >= vocab_size], dtype
  int64_t logits_stride;
  DType dtype;
  int64_t rows, vocab_size;
  SamplingArrays sampling;   // n = rows
  const int32_t* position;   // [rows], of the token to be sampled
  int32_t* tokens;           // [rows]
  float* logprobs;           // [rows]
  float* filtered_logprobs;  // [rows], may be null
  int32_t* status;           // [rows]
};

// Draft trees as packed rows: the root of each request first, parents before children.
struct TreeArrays {
  const int32_t* tokens;   // [num_rows]
  const int32_t* parents;  // [num_rows], row within the request, -1 for its root
};

struct VerifyOutputArrays {
  int32_t* emitted;          // [num_requests, max_emitted]
  float* logprobs;           // [num_requests, max_emitted]
  float* filtered_logprobs;  // [num_requests, max_emitted], may be null
  int32_t* path;             // [num_requests, max_emitted], row within the request of each draw
  int64_t emitted_stride, logprobs_stride, filtered_stride, path_stride, max_emitted;
  int32_t* num_emitted;  // [num_requests]
  int32_t* finish;       // [num_requests], Finish
};

struct VerifyParams {
  const void* logits;  // [num_rows, >= vocab_size], dtype
  int64_t logits_stride;
  DType dtype;
  int64_t num_rows, vocab_size;
  const float* draft_probs;  // [num_rows, >= vocab_size]; null in verify_tree and if deterministic
  int64_t draft_stride;
  bool deterministic;  // verify_rejection: children are one-hot proposals
  TreeArrays tree;
  const int32_t* position;  // [num_rows], of the node itself
  int64_t num_requests;
  const int32_t* row_start;  // [num_requests + 1]
  int32_t* status;           // [num_requests]
  SamplingArrays sampling;   // n = num_requests
  const int32_t* stop_ids;   // [num_requests, num_stop_ids], -1 = unused
  int64_t stop_stride, num_stop_ids;
  const int32_t* limit;  // [num_requests], most tokens to emit now
  VerifyOutputArrays out;
  void* workspace;  // sampling_workspace_bytes(num_rows); null, or GPU only
};

enum Finish : int32_t { kRunning = 0, kStopId = 1, kLimit = 2 };

constexpr int64_t kNodeBytes = 16;  // scratch of verify_tree for a row on a GPU

constexpr int64_t kMaxGpuVocabulary = 1 << 19;  // the sums of a row's steps fit shared memory

}  // namespace tlt
