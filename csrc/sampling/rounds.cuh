// Loads a row of logits into the shared memory of a cluster.
//
// A row is cut into steps of kStep ids; the cut depends on the vocabulary alone. A block owns
// consecutive steps and takes them in rounds of one step per warp. The copies of all rounds of a
// row are issued at once, each into a place of shared memory. There the row stays for top-k and
// top-p, or the rounds of the next row replace it one by one. (A row that is too large uses the
// places as a ring, and is read again from global memory.) On Hopper a round is one bulk copy per
// four warps, issued by one of them: issuing stalls while the memory pipe is full, and the warps
// that compute must not stall.
#pragma once

#include "common/tma.cuh"
#include "sampling/gumbel_max.cuh"

namespace tlt {

constexpr int kWarps = kThreads / kWarpSize;
constexpr int kShareWarps = 4;            // their steps of a round are copied together
constexpr int kStepGroups = kLaneGroups;  // groups of a step that a lane takes
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
constexpr int depth_of(bool hopper) {  // steps that a warp holds
  return slots_of(hopper) / (kStepGroups * kParts<T>);
}
template <typename T>
constexpr int kDepth = kSlots / (kStepGroups * kParts<T>);  // the same in device code

template <typename T>
class Rounds {
 public:
  // `shared` has the size that row_launch computes.
  __device__ Rounds(Cluster<kThreads>& cluster, uint4* shared, int64_t vocab_size)
      : cluster_(cluster),
        num_steps_(ceil_div(static_cast<int32_t>(vocab_size), kStep)),
        first_step_(cluster.rank() * ceil_div(num_steps_, cluster.size()) +
                    threadIdx.x / kWarpSize),
        end_(min((cluster.rank() + 1) * ceil_div(num_steps_, cluster.size()), num_steps_)),
        rounds_(ceil_div(ceil_div(num_steps_, cluster.size()), kWarps)),
        slots_(shared + threadIdx.x / kWarpSize * kStepSlots +
               threadIdx.x % kWarpSize * kParts<T>) {
    const int lane = threadIdx.x % kWarpSize;
    if (warp_issues() && lane < kDepth<T>) {
      *num_released(lane) = 0;
      init_barrier(full_barrier(lane), kArrivals);
      fence_barriers();
      fence_copies();
    }
    __syncwarp();
  }

  // Starts the copies of a row. All threads of the block call it.
  __device__ __forceinline__ void start(const RowData<T>& row) {
    drain();
    if (ready_ || !kBulk) __syncthreads();  // no thread reads the previous row any more
    in_flight_ = min(rounds_, kDepth<T>);
    const int lane = threadIdx.x % kWarpSize;
    if (warp_issues() && lane < in_flight_) issue_copy(row, lane, lane);
#pragma unroll 1
    for (int round = 0; round < in_flight_; ++round) fill(row, round, round);
  }

  // Waits for copies that turned out not to be needed; none may be in flight at the end of the
  // kernel.
  __device__ __forceinline__ void drain() {
    if (in_flight_ > 0) wait_for_cluster_start();
#pragma unroll 1
    for (int place = 0; place < in_flight_; ++place) wait_for(place);
    in_flight_ = 0;
  }

  // Whether a row fits into shared memory. Then it can be read again, and the copies of the next
  // row can start.
  __device__ bool keeps_row() const { return rounds_ <= kDepth<T>; }

  // Only where keeps_row(): one of this thread's ids of the row that was scored last, and its
  // logit. Place 0 is the last id.
  __device__ __forceinline__ int32_t id_at(int place, float* logit) const {
    constexpr int kOfSlot = sizeof(uint4) / sizeof(T);
    const int steps = (end_ - 1 - first_step_) / kWarps + 1;  // steps that contain ids
    const int group = steps * kStepGroups - 1 - place / kGroup;
    const int at = kGroup - 1 - place % kGroup;
    const uint4* const slot = slots_ + group / kStepGroups * kStageSlots +
                              group % kStepGroups * kGroupSlots + at / kOfSlot;
    *logit = as_float32(reinterpret_cast<const T*>(slot)[at % kOfSlot]);
    return first_id(first_step_ + group / kStepGroups * kWarps, group % kStepGroups) + at;
  }

  // Calls f(first id, bits of kAtOnce groups) for this thread's groups of the row that was scored
  // last. The groups are kApart ids apart; NaN and +inf are read as -inf. All lanes of a warp take
  // part in every call.
  template <int kAtOnce = kStepGroups, typename F>
  __device__ __forceinline__ void for_each_step(const Row<T>& row, F&& f) const {
    const uint4* slot = slots_;
#pragma unroll 1
    for (int32_t step = first_step_; step < end_; step += kWarps, slot += kStageSlots) {
#pragma unroll 1
      for (int first = 0; first < kStepGroups; first += kAtOnce) {
        Raw<T> raw[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int group = first + i;
          if (keeps_row()) {
            raw[i] = RowData<T>::read(slot + group * kGroupSlots);
            continue;  // bad logits were replaced there
          }
          raw[i] = row.load(first_id(step, group));
          if (row.is_bad(largest_of(raw[i]))) row.drop_bad(raw[i]);
        }
        f(first_id(step, first), raw);
      }
    }
  }

 protected:
  static constexpr int kGroupSlots = kParts<T> * kWarpSize;
  static constexpr int kStepSlots = kStepGroups * kGroupSlots;  // of a warp
  static constexpr int kStageSlots = kWarps * kStepSlots;       // of a step of each warp
  static_assert(kDepth<T> <= kWarpSize);
  static constexpr bool kBulk = kSlots == slots_of(true);  // else each lane copies its own ids
  static constexpr int kArrivals = kBulk ? 1 : kShareWarps * kWarpSize;

  // The first id of the lane's `group` of a step.
  __device__ __forceinline__ static int32_t first_id(int32_t step, int group) {
    const int32_t lane = threadIdx.x % kWarpSize;
    return step * kStep + (group * kWarpSize + lane) * kGroup;
  }

  // Waits until all blocks of the cluster run and have initialised their scratch memory.
  __device__ __forceinline__ void wait_for_cluster_start() {
    if (!ready_) cluster_.wait();
    ready_ = true;
  }

  __device__ int num_warps() const { return cluster_.size() * kWarps; }  // of the cluster

  // Refills a place that this warp has read: the last warp of the share that is done issues the
  // copy. No barrier is needed after fill(): a lane writes to its own slots, outside the bulk copy,
  // and GumbelMax::update has a barrier before it reads those of other lanes.
  __device__ __forceinline__ void refill(const RowData<T>& row, int round, int place) const {
    __syncwarp();  // lanes have read each other's slots
    fill(row, round, place);
    if constexpr (kBulk) {
      if (threadIdx.x % kWarpSize != 0) return;
      constexpr uint32_t kLast = kShareWarps - 1;
      if (count_up(num_released(place), kLast) == kLast) issue_copy(row, round, place);
    }
  }

  // Waits for the last copy into a place.
  __device__ __forceinline__ void wait_for(int place) {
    wait_barrier(full_barrier(place), phases_ >> place & 1);
    phases_ ^= 1u << place;
  }

  Cluster<kThreads>& cluster_;
  const int32_t num_steps_;         // of the row
  const int32_t first_step_, end_;  // first step of this warp, end of the block's steps
  const int rounds_;
  uint4* const slots_;
  uint32_t phases_ = 0;  // phase parities of the places' barriers, one bit each
  int in_flight_ = 0;    // places whose copies were not waited for yet
  bool ready_ = false;

 private:
  static constexpr int kShares = kWarps / kShareWarps;
  static_assert(kShares * kShareWarps == kWarps);
  struct Scratch {
    uint64_t full_barrier[kDepth<T>][kShares];  // mbarriers: a share's part of a round has arrived
    uint32_t num_released[kDepth<T>][kShares];  // warps that have read it
  };
  __device__ static Scratch& scratch() {
    __shared__ Scratch shared;
    return shared;
  }

  // A share is four warps of the block. One of them issues its copies, in each share a warp of
  // another scheduler.
  __device__ static int share() { return threadIdx.x / (kShareWarps * kWarpSize); }
  __device__ static int warp_of_share() { return threadIdx.x / kWarpSize % kShareWarps; }
  __device__ static bool warp_issues() { return warp_of_share() == share() % kShareWarps; }
  __device__ static uint64_t* full_barrier(int place) {
    return &scratch().full_barrier[place][share()];
  }
  __device__ static uint32_t* num_released(int place) {
    return &scratch().num_released[place][share()];
  }

  // The share's first step of a round; and the number of ids from there on that a bulk copy covers.
  __device__ __forceinline__ int32_t first_of(int round) const {
    return first_step_ - warp_of_share() + round * kWarps;
  }
  __device__ __forceinline__ int32_t copied(const RowData<T>& row, int round) const {
    const int32_t first = first_of(round), end = min(first + kShareWarps, end_);
    const int32_t ids = min(end * kStep, row.vocab_size) - first * kStep;
    return row.aligned ? max(ids, 0) / kGroup * kGroup : 0;
  }

  // Issues the copy of a round. Several lanes of a warp may issue one each; lower lanes come first.
  __device__ __forceinline__ void issue_copy(const RowData<T>& row, int round, int place) const {
    if constexpr (kBulk) {
      const int32_t bytes = copied(row, round) * static_cast<int32_t>(sizeof(T));
      arrive_expecting(full_barrier(place), bytes);
      if (bytes > 0) {
        const int lane = threadIdx.x % kWarpSize;
        const uint4* const to = slots_ - warp_of_share() * kStepSlots - lane * kParts<T>;
        copy_bytes(shared_address(to + place * kStageSlots), row.logits + first_of(round) * kStep,
                   bytes, full_barrier(place));
      }
    }
  }

  // Each lane copies the ids of a round that it will read and that no bulk copy covers.
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
      arrive_copied(full_barrier(place));
    }
  }
};

}  // namespace tlt
