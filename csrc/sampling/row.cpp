#include "sampling/row.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/dtype.h"
#include "common/simd.h"
#include "common/status.h"

namespace tlt {
namespace {

constexpr int kBlock = 64;  // rows are padded to a multiple
constexpr int kLanes = 16;
constexpr float kInf = std::numeric_limits<float>::infinity();

// Copies a row as float32; a logit that is NaN or not below +inf once divided by T becomes -inf.
template <typename T>
TLT_HD bool clean(const T* logits, float* out, int64_t n, float inv_temperature) {
  int32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float x = to_float(logits[i]);
    const bool good = mul_rn(x, inv_temperature) < kInf;
    out[i] = good ? x : -kInf;
    bad |= !good;
  }
  return bad != 0;
}

TLT_SIMD bool clean_float32(const float* in, float* out, int64_t n, float inv_temperature) {
  return clean(in, out, n, inv_temperature);
}
TLT_SIMD bool clean_float16(const Float16* in, float* out, int64_t n, float inv_temperature) {
  return clean(in, out, n, inv_temperature);
}
TLT_SIMD bool clean_bfloat16(const BFloat16* in, float* out, int64_t n, float inv_temperature) {
  return clean(in, out, n, inv_temperature);
}

TLT_HD int64_t weight_of(float scaled, float max) {
  return static_cast<int64_t>(mul_rn(exp_f32(add_rn(scaled, -max)), kWeightScale));
}

TLT_SIMD int64_t mass_of(const float* x, int64_t n, float inv_temperature, float max) {
  int64_t mass = 0;
  for (int64_t i = 0; i < n; ++i) mass += weight_of(mul_rn(x[i], inv_temperature), max);
  return mass;
}

TLT_SIMD void exp_all(const float* x, float* out, int64_t n, float inv_temperature, float max) {
  for (int64_t i = 0; i < n; ++i) out[i] = exp_f32(add_rn(mul_rn(x[i], inv_temperature), -max));
}

TLT_HD float score_of(float logit, float inv_temperature, const NoiseKey& key, int32_t position,
                      int32_t id) {
  return keyed_score(logit, inv_temperature,
                     target_noise(key, position, static_cast<uint32_t>(id)));
}

// The largest of kBlock values.
TLT_HD float block_max(const float* x) {
  float lane[kLanes];
  for (int j = 0; j < kLanes; ++j) lane[j] = x[j];
  for (int i = kLanes; i < kBlock; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) lane[j] = lane[j + width] > lane[j] ? lane[j + width] : lane[j];
  }
  return lane[0];
}

// n is a multiple of kBlock.
TLT_SIMD float max_of(const float* x, int64_t n) {
  float max = -kInf;
  for (int64_t i = 0; i < n; i += kBlock) max = std::max(max, block_max(x + i));
  return max;
}

constexpr int kGroups = 4 * kNoiseSpan;      // whose words are computed together
constexpr int kIds = kGroups * kNoiseGroup;  // of them

// Words of the first `groups` groups from id `begin` on, a multiple of kIds, and a bound of the
// scores in each.
TLT_SIMD void bound_groups(const float* x, int groups, float inv_temperature, const NoiseKey& key,
                           int32_t position, int64_t begin, uint32_t* word, float* bound) {
  const uint32_t first = static_cast<uint32_t>(begin / kIds) * kNoiseSpan;
  const int calls = std::min<int>(groups, kNoiseSpan);
  for (int i = 0; i < calls; ++i) {
    const Philox4 r = noise_words(key, position, first + i);
    for (int k = 0; k < 4; ++k) word[k * kNoiseSpan + i] = r.word[k];
  }
  for (int group = 0; group < groups; ++group) {
    const float* of = x + group * kNoiseGroup;
    float largest = of[0];
    for (uint32_t i = 1; i < kNoiseGroup; ++i) largest = of[i] > largest ? of[i] : largest;
    bound[group] = keyed_score(largest, inv_temperature, group_bound(word[group]));
  }
}

// The scores of a group's ids.
TLT_SIMD void score_group(const float* x, float inv_temperature, const NoiseKey& key,
                          int32_t position, uint32_t first, uint32_t word, float* score) {
  uint32_t rest[kNoiseGroup];
  for (uint32_t quad = 0; quad < kNoiseGroup / 4; ++quad) {
    const Philox4 r = noise_words(rest_key(key), position, first / 4 + quad);
    for (int i = 0; i < 4; ++i) rest[4 * quad + i] = r.word[i];
  }
  for (uint32_t i = 0; i < kNoiseGroup; ++i) {
    const float noise = -log_f32(group_exponential(word, rest[i], i));
    score[i] = keyed_score(x[i], inv_temperature, noise);
  }
}

// Winner over all ids; n is a multiple of kBlock and padding is -inf. `first` is the id of the
// largest logit: starting from its score, few groups of a peaked distribution are scored.
int32_t best_score(const float* x, int64_t n, float inv_temperature, const NoiseKey& key,
                   int32_t position, int32_t first) {
  int32_t best_id = first;
  float best = score_of(x[first], inv_temperature, key, position, first);
  for (int64_t begin = 0; begin < n; begin += kIds) {
    const int groups = static_cast<int>(std::min<int64_t>(n - begin, kIds) / kNoiseGroup);
    if (keyed_score(max_of(x + begin, groups * kNoiseGroup), inv_temperature, kMaxNoise) < best)
      continue;
    uint32_t word[kGroups];
    float bound[kGroups];
    bound_groups(x + begin, groups, inv_temperature, key, position, begin, word, bound);
    for (int group = 0; group < groups; ++group) {
      if (bound[group] < best) continue;
      const int64_t ids = begin + group * kNoiseGroup;
      float score[kNoiseGroup];
      score_group(x + ids, inv_temperature, key, position, static_cast<uint32_t>(ids), word[group],
                  score);
      for (uint32_t i = 0; i < kNoiseGroup; ++i) {
        const int32_t id = static_cast<int32_t>(ids + i);
        if (!(score[i] > best || (score[i] == best && id < best_id))) continue;
        best = score[i];
        best_id = id;
      }
    }
  }
  return best_id;
}

// Sort keys: ascending order of the key is (logit descending, id ascending).
uint64_t sort_key(float logit, int64_t id) {
  const uint32_t bits = as_bits(logit + 0.0f);  // -0 ties with +0
  const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(id);
}

int32_t id_of(uint64_t key) { return static_cast<int32_t>(key & 0xffffffffu); }

}  // namespace

LogitsRow& thread_row() {
  thread_local LogitsRow row;
  return row;
}

void LogitsRow::read(const void* logits, DType dtype, int64_t vocab_size,
                     const RowSetting& setting) {
  vocab_size_ = vocab_size;
  greedy_ = is_greedy(setting.temperature);
  inv_temperature_ = inverse_temperature(setting.temperature);
  top_k_ = setting.top_k;
  top_p_ = setting.top_p;
  has_filter_ = (top_k_ > 0 && top_k_ < vocab_size) || top_p_ < 1.0f;
  is_cut_ = false;
  const int64_t padded = (vocab_size + kBlock - 1) / kBlock * kBlock;
  if (static_cast<int64_t>(logits_.size()) < padded) logits_.resize(padded);
  float* x = logits_.data();
  std::fill(x + vocab_size, x + padded, -kInf);
  bool bad = false;
  if (dtype == DType::kFloat32) {
    bad = clean_float32(static_cast<const float*>(logits), x, vocab_size, inv_temperature_);
  } else if (dtype == DType::kFloat16) {
    bad = clean_float16(static_cast<const Float16*>(logits), x, vocab_size, inv_temperature_);
  } else {
    bad = clean_bfloat16(static_cast<const BFloat16*>(logits), x, vocab_size, inv_temperature_);
  }
  const float largest = max_of(x, padded);
  max_ = scaled(largest);
  best_ = 0;
  mass_ = 0;
  if (!has_no_finite()) {
    best_ = static_cast<int32_t>(std::find(x, x + vocab_size, largest) - x);
    mass_ = mass_of(x, padded, inv_temperature_, max_);
  }
  status_ = bad || has_no_finite() ? kStatusNanLogits : kStatusOk;
}

bool LogitsRow::has_no_finite() const { return max_ == -kInf; }

int64_t LogitsRow::weight(float logit) const { return weight_of(scaled(logit), max_); }

// Leaves the kept ids in kept_ and their weight in kept_mass_.
void LogitsRow::filter() {
  if (is_cut_) return;
  is_cut_ = true;
  kept_.resize(vocab_size_);
  for (int64_t id = 0; id < vocab_size_; ++id) kept_[id] = sort_key(logits_[id], id);
  kept_mass_ = mass_;
  if (top_k_ > 0 && top_k_ < vocab_size_) {
    std::nth_element(kept_.begin(), kept_.begin() + (top_k_ - 1), kept_.end());
    kept_.resize(top_k_);
    kept_mass_ = 0;
    for (uint64_t key : kept_) kept_mass_ += weight(logits_[id_of(key)]);
  }
  if (!(top_p_ < 1.0f)) return;
  // float64 gives the same result everywhere, and less than the whole mass as top_p < 1
  const double wanted = static_cast<double>(top_p_) * static_cast<double>(kept_mass_);
  kept_mass_ = 0;
  int64_t count = 0;
  // Sorts in pieces: the prefix is short where the distribution is peaked.
  for (int64_t piece = 256, end = 0; end < static_cast<int64_t>(kept_.size()); piece *= 4) {
    const auto begin = kept_.begin() + end;
    end = std::min<int64_t>(end + piece, kept_.size());
    if (end < static_cast<int64_t>(kept_.size())) {
      std::nth_element(begin, kept_.begin() + end, kept_.end());
    }
    std::sort(begin, kept_.begin() + end);
    while (count < end && (count == 0 || static_cast<double>(kept_mass_) < wanted)) {
      kept_mass_ += weight(logits_[id_of(kept_[count++])]);
    }
    if (count < end || static_cast<double>(kept_mass_) >= wanted) break;
  }
  kept_.resize(count);
}

int32_t LogitsRow::sample(const NoiseKey& key, int32_t position) {
  if (has_no_finite()) return 0;
  if (greedy_) return best_;
  if (!has_filter_) {
    const int64_t padded = (vocab_size_ + kBlock - 1) / kBlock * kBlock;
    return best_score(logits_.data(), padded, inv_temperature_, key, position, best_);
  }
  filter();
  int32_t best_id = best_;  // always kept
  float best = score_of(logits_[best_], inv_temperature_, key, position, best_);
  for (uint64_t kept : kept_) {
    const int32_t id = id_of(kept);
    const float bound =
        group_bound(group_word(key, position, static_cast<uint32_t>(id) / kNoiseGroup));
    if (keyed_score(logits_[id], inv_temperature_, bound) < best) continue;
    const float score = score_of(logits_[id], inv_temperature_, key, position, id);
    if (score > best || (score == best && id < best_id)) {
      best = score;
      best_id = id;
    }
  }
  return best_id;
}

float LogitsRow::log_ratio(int32_t token, int64_t mass) const {
  if (has_no_finite()) return -kInf;
  const float total = mul_rn(static_cast<float>(mass), 1.0f / kWeightScale);
  return add_rn(add_rn(scaled(logits_[token]), -max_), -log_f32(total));
}

float LogitsRow::logprob(int32_t token) const { return log_ratio(token, mass_); }

float LogitsRow::filtered_logprob(int32_t token) {
  if (!has_filter_ || has_no_finite()) return logprob(token);
  filter();
  return log_ratio(token, kept_mass_);
}

void LogitsRow::distribution(float* probs) {
  if (!has_no_finite() && !greedy_ && !has_filter_) {
    return exp_all(logits_.data(), probs, vocab_size_, inv_temperature_, max_);
  }
  std::fill(probs, probs + vocab_size_, 0.0f);
  if (has_no_finite() || greedy_) {
    probs[best_] = 1.0f;
    return;
  }
  filter();
  for (uint64_t key : kept_) {
    const int32_t id = id_of(key);
    probs[id] = exp_f32(add_rn(scaled(logits_[id]), -max_));
  }
}

}  // namespace tlt
