// How a row of logits comes to a team of blocks, and where its ids then are.
//
// A row is cut into steps of kStep ids, a cut that depends on the vocabulary alone. A block has a
// run of them and takes a round at a time: a step for each of its warps. All rounds of a row are
// asked for at once and land in shared memory in their order; there the row stays for top-k and
// top-p, or the next row follows it round by round. (A row that is too large goes through the
// rounds' places as through a ring, and is read again from memory.) On Hopper a round is a bulk
// copy for each four warps, of which one asks for all: a warp that asks waits until the memory pipe
// has room, and those that compute must not.
#pragma once

#include "common/tma.cuh"
#include "sampling/row.cuh"

namespace tlt {

constexpr int kWarps = kThreads / kWarpSize;
constexpr int kShareWarps = 4;  // whose steps of a round come together
constexpr int kStepGroups = 2;  // that a lane takes of a step
constexpr int32_t kStep = kWarpSize * kGroup * kStepGroups;

// Shared memory that holds a row, in slots of 16 bytes a thread: 192 KiB a block on Hopper.
constexpr int slots_of(bool hopper) { return hopper ? 24 : 8; }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kSlots = slots_of(false);
#else
constexpr int kSlots = slots_of(true);
#endif

template <typename T>
constexpr int kParts = static_cast<int>(sizeof(Raw<T>) / sizeof(uint4));  // slots of a group
template <typename T>
constexpr int depth_of(bool hopper) {  // steps a warp holds
  return slots_of(hopper) / (kStepGroups * kParts<T>);
}
template <typename T>
constexpr int kDepth = kSlots / (kStepGroups * kParts<T>);  // the same on the card

template <typename T>
class Rounds {
 public:
  // `shared` is what row_launch asks for.
  __device__ Rounds(Team<kThreads>& team, uint4* shared, int64_t vocab_size)
      : team_(team),
        num_steps_(ceil_div(static_cast<int32_t>(vocab_size), kStep)),
        first_step_(team.rank() * ceil_div(num_steps_, team.size()) + threadIdx.x / kWarpSize),
        end_(min((team.rank() + 1) * ceil_div(num_steps_, team.size()), num_steps_)),
        rounds_(ceil_div(ceil_div(num_steps_, team.size()), kWarps)),
        slots_(shared + threadIdx.x / kWarpSize * kStepSlots +
               threadIdx.x % kWarpSize * kParts<T>) {
    const int lane = threadIdx.x % kWarpSize;
    if (warp_asks() && lane < kDepth<T>) {
      *taken(lane) = 0;
      init_barrier(landed(lane), kArrivals);
      fence_barriers();
      fence_copies();
    }
    __syncwarp();
  }

  // Starts the copies of a row. All threads of the block call it.
  __device__ __forceinline__ void start(const RowData<T>& row) {
    drain();
    if (ready_ || !kBulk) __syncthreads();  // nobody reads the row before
    under_way_ = min(rounds_, kDepth<T>);
    const int lane = threadIdx.x % kWarpSize;
    if (warp_asks() && lane < under_way_) ask(row, lane, lane);
#pragma unroll 1
    for (int round = 0; round < under_way_; ++round) fill(row, round, round);
  }

  // Waits for copies that nobody asked for after all; before the end there must be none.
  __device__ __forceinline__ void drain() {
    if (under_way_ > 0) meet();
#pragma unroll 1
    for (int place = 0; place < under_way_; ++place) await(place);
    under_way_ = 0;
  }

  // Whether a row fits, so that it may be looked at again, or a next row may follow it.
  __device__ bool keeps_row() const { return rounds_ <= kDepth<T>; }

  // Where keeps_row(), one of this thread's ids of the row scored last, and its logit; place 0 is
  // the last id.
  __device__ __forceinline__ int32_t id_at(int place, float* logit) const {
    constexpr int kOfSlot = sizeof(uint4) / sizeof(T);
    const int steps = (end_ - 1 - first_step_) / kWarps + 1;  // that have an id
    const int group = steps * kStepGroups - 1 - place / kGroup;
    const int at = kGroup - 1 - place % kGroup;
    const uint4* const slot = slots_ + group / kStepGroups * kStageSlots +
                              group % kStepGroups * kGroupSlots + at / kOfSlot;
    *logit = as_float32(reinterpret_cast<const T*>(slot)[at % kOfSlot]);
    return first_id(first_step_ + group / kStepGroups * kWarps, group % kStepGroups) + at;
  }

  // Calls f(first id, bits of the groups) on this thread's steps of the row scored last, whose
  // groups are kApart ids apart; NaN and +inf come as -inf. All lanes of a warp take part in every
  // call.
  static constexpr int32_t kApart = kWarpSize * kGroup;
  template <typename F>
  __device__ __forceinline__ void for_each_step(const Row<T>& row, F&& f) const {
    const uint4* slot = slots_;
#pragma unroll 1
    for (int32_t step = first_step_; step < end_; step += kWarps, slot += kStageSlots) {
      Raw<T> raw[kStepGroups];
#pragma unroll
      for (int group = 0; group < kStepGroups; ++group) {
        if (keeps_row()) {
          raw[group] = RowData<T>::read(slot + group * kGroupSlots);
          continue;  // it is clean
        }
        raw[group] = row.load(first_id(step, group));
        if (row.is_bad(largest_of(raw[group]))) row.drop_bad(raw[group]);
      }
      f(first_id(step, 0), raw);
    }
  }

 protected:
  static constexpr int kGroupSlots = kParts<T> * kWarpSize;
  static constexpr int kStepSlots = kStepGroups * kGroupSlots;  // of a warp
  static constexpr int kStageSlots = kWarps * kStepSlots;       // of a step of each warp
  static_assert(kDepth<T> <= kWarpSize);
  static constexpr bool kBulk = kSlots == slots_of(true);  // else each lane copies its own ids
  static constexpr int kArrivals = kBulk ? 1 : kShareWarps * kWarpSize;

  // Of a step, the lane's `group`.
  __device__ __forceinline__ static int32_t first_id(int32_t step, int group) {
    const int32_t lane = threadIdx.x % kWarpSize;
    return step * kStep + (group * kWarpSize + lane) * kGroup;
  }

  // All blocks run, with their scratch set.
  __device__ __forceinline__ void meet() {
    if (!ready_) team_.wait();
    ready_ = true;
  }

  __device__ int num_warps() const { return team_.size() * kWarps; }  // of the team

  // Brings a round to a place that this warp has read: the last warp that has asks for it.
  __device__ __forceinline__ void pass_on(const RowData<T>& row, int round, int place) const {
    fill(row, round, place);
    if constexpr (kBulk) {
      __syncwarp();
      if (threadIdx.x % kWarpSize != 0) return;
      constexpr uint32_t kLast = kShareWarps - 1;
      if (count_up(taken(place), kLast) == kLast) ask(row, round, place);
    }
  }

  // Waits for what was copied to a place last.
  __device__ __forceinline__ void await(int place) {
    wait_barrier(landed(place), phases_ >> place & 1);
    phases_ ^= 1u << place;
  }

  Team<kThreads>& team_;
  const int32_t num_steps_;         // of the row
  const int32_t first_step_, end_;  // of this warp, and where the block's end
  const int rounds_;
  uint4* const slots_;
  uint32_t phases_ = 0;  // parities of the places' barriers, a bit each
  int under_way_ = 0;    // places whose copies nobody waited for yet
  bool ready_ = false;

 private:
  static constexpr int kShares = kWarps / kShareWarps;
  static_assert(kShares * kShareWarps == kWarps);
  struct Scratch {
    uint64_t landed[kDepth<T>][kShares];  // barriers of the shares' rounds
    uint32_t taken[kDepth<T>][kShares];   // warps that are done with them
  };
  __device__ static Scratch& scratch() {
    __shared__ Scratch shared;
    return shared;
  }

  // A share: four warps of the block, and this one's place among them. One asks for its copies,
  // that of another scheduler in each share.
  __device__ static int share() { return threadIdx.x / (kShareWarps * kWarpSize); }
  __device__ static int warp_of_share() { return threadIdx.x / kWarpSize % kShareWarps; }
  __device__ static bool warp_asks() { return warp_of_share() == share() % kShareWarps; }
  __device__ static uint64_t* landed(int place) { return &scratch().landed[place][share()]; }
  __device__ static uint32_t* taken(int place) { return &scratch().taken[place][share()]; }

  // The share's first step of a round, and ids that a bulk copy brings from there on.
  __device__ __forceinline__ int32_t first_of(int round) const {
    return first_step_ - warp_of_share() + round * kWarps;
  }
  __device__ __forceinline__ int32_t copied(const RowData<T>& row, int round) const {
    const int32_t first = first_of(round), end = min(first + kShareWarps, end_);
    const int32_t ids = min(end * kStep, row.vocab_size) - first * kStep;
    return row.aligned ? max(ids, 0) / kGroup * kGroup : 0;
  }

  // Asks for a round. The lanes of a warp may ask for one each: the lower lanes' come first.
  __device__ __forceinline__ void ask(const RowData<T>& row, int round, int place) const {
    if constexpr (kBulk) {
      const int32_t bytes = copied(row, round) * static_cast<int32_t>(sizeof(T));
      arrive_expecting(landed(place), bytes);
      if (bytes > 0) {
        const int lane = threadIdx.x % kWarpSize;
        const uint4* const to = slots_ - warp_of_share() * kStepSlots - lane * kParts<T>;
        copy_bytes(shared_address(to + place * kStageSlots), row.logits + first_of(round) * kStep,
                   bytes, landed(place));
      }
    }
  }

  // Each lane brings what it will read of a round and no bulk copy brings.
  __device__ __forceinline__ void fill(const RowData<T>& row, int round, int place) const {
    const int32_t step = first_step_ + round * kWarps;
    if (kBulk && row.aligned && step != num_steps_ - 1) return;
    const int32_t from = first_of(round) * kStep + copied(row, round);
#pragma unroll 1
    for (int group = 0; group < (step < end_ ? kStepGroups : 0); ++group) {
      const int32_t id = first_id(step, group);
      uint4* const slot = slots_ + place * kStageSlots + group * kGroupSlots;
      if constexpr (!kBulk) {
        row.stage(id, slot);
      } else if (id >= from) {
        RowData<T>::write(row.load(id), slot);
      }
    }
    if constexpr (kBulk) {
      fence_copies();
    } else {
      arrive_copied(landed(place));
    }
  }
};

}  // namespace tlt
