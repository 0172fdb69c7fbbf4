// One row of target logits under the sampling parameters of one request. On a CPU every token that
// is drawn and every log-prob that is reported is computed here, so plain decoding and verification
// agree bit for bit. On a GPU scan.cuh draws the same tokens; its sums for log-probs are float32.
//
//   score(v)   = keyed_score(logit_v, 1/T, noise_v), winner = highest, ties by the lower id
//   weight(v)  = floor(2^40 * exp(logit_v / T - max)), an integer: sums have no order
//   kept       = best top_k by (logit desc, id asc), then the shortest prefix of them whose weight
//                reaches top_p of theirs
//   logprob(v) = (logit_v / T - max) - log(2^-40 * sum of weights), over all ids or the kept ones
//
// NaN and +inf logits (or logits that overflow when divided by T) lose and set the status.
#pragma once

#include <cstdint>
#include <vector>

#include "common/noise.h"
#include "common/tensor.h"

namespace tlt {

struct RowSetting {
  float temperature;
  int32_t top_k;
  float top_p;
};

constexpr float kWeightScale = 0x1p40f;

// Reused from row to row: the buffers grow to the largest vocabulary and are kept.
class LogitsRow {
 public:
  void read(const void* logits, DType dtype, int64_t vocab_size, const RowSetting& setting);

  int32_t status() const { return status_; }
  int32_t sample(const NoiseKey& key, int32_t position);
  float logprob(int32_t token) const;
  float filtered_logprob(int32_t token);  // equal to logprob where no filter is set
  void distribution(float* probs);        // [vocab_size], not normalised

 private:
  void filter();
  float scaled(float logit) const { return mul_rn(logit, inv_temperature_); }
  int64_t weight(float logit) const;
  bool has_no_finite() const;
  float log_ratio(int32_t token, int64_t mass) const;

  std::vector<float> logits_;   // cleaned; padded with -inf to whole blocks
  std::vector<uint64_t> kept_;  // sort keys of the kept ids, once is_cut_
  int64_t vocab_size_ = 0;
  int32_t top_k_ = 0;
  float top_p_ = 1, inv_temperature_ = 1, max_ = 0;
  bool greedy_ = false, has_filter_ = false, is_cut_ = false;
  int32_t best_ = 0;  // id of the largest logit
  int32_t status_ = 0;
  int64_t mass_ = 0, kept_mass_ = 0;
};

// One row buffer per thread.
LogitsRow& thread_row();

}  // namespace tlt
