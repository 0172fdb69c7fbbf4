#include "common/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace tlt {
namespace {

constexpr int64_t kMinWorkPerThread = 100'000;  // about 30 us: what waking a thread is worth

int available_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

// Workers wait for a job number to change, take chunks from a shared counter and report back.
class Pool {
 public:
  explicit Pool(int workers) {
    for (int i = 0; i < workers; ++i) std::thread([this] { work(); }).detach();
    workers_ = workers;
  }

  bool try_run(int64_t count, int64_t chunk, const std::function<void(int64_t, int64_t)>& body) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner) return false;  // another Python thread is using the pool: run inline instead
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = &body;
      count_ = count;
      chunk_ = chunk;
      next_.store(0);
      error_ = nullptr;
      busy_ = workers_;
      ++job_;
    }
    wake_.notify_all();
    take_chunks();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    if (error_) std::rethrow_exception(error_);
    return true;
  }

 private:
  void take_chunks() {
    try {
      for (int64_t begin; (begin = next_.fetch_add(chunk_)) < count_;) {
        (*body_)(begin, std::min(count_, begin + chunk_));
      }
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      error_ = std::current_exception();
    }
  }

  void work() {
    inside() = true;
    for (uint64_t seen = 0;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return job_ != seen; });
      seen = job_;
      lock.unlock();
      take_chunks();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

 public:
  static bool& inside() {
    thread_local bool flag = false;
    return flag;
  }

 private:
  std::mutex owner_, mutex_;
  std::condition_variable wake_, done_;
  std::atomic<int64_t> next_{0};
  const std::function<void(int64_t, int64_t)>* body_ = nullptr;
  int64_t count_ = 0, chunk_ = 1;
  uint64_t job_ = 0;
  int workers_ = 0, busy_ = 0;
  std::exception_ptr error_;
};

std::mutex pool_mutex;
Pool* pool = nullptr;  // never freed: its threads live as long as the process
int thread_count = 0;

// A forked child has no workers: it forgets the parent's pool and makes its own on first use.
void forget_pool() {
  pool = nullptr;
  new (&pool_mutex) std::mutex;
}

Pool* get_pool() {
  std::lock_guard<std::mutex> lock(pool_mutex);
  if (thread_count == 0) {
    thread_count = available_cores();
    pthread_atfork(nullptr, nullptr, forget_pool);
  }
  if (pool == nullptr && thread_count > 1) pool = new Pool(thread_count - 1);
  return pool;
}

}  // namespace

int num_threads() {
  get_pool();
  return thread_count;
}

void set_num_threads(int count) {
  if (count < 0) throw std::invalid_argument("set_num_threads: count must be 0 or more");
  get_pool();
  std::lock_guard<std::mutex> lock(pool_mutex);
  const int wanted = count == 0 ? available_cores() : count;
  if (wanted == thread_count) return;
  thread_count = wanted;
  pool = nullptr;  // the old workers sleep for good; changing the count is rare
}

void parallel_for(int64_t count, int64_t work_per_item,
                  const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  const int64_t work = count * std::max<int64_t>(1, work_per_item);
  if (work >= 2 * kMinWorkPerThread && count > 1 && !Pool::inside()) {
    Pool* workers = get_pool();
    const int64_t by_work = work / kMinWorkPerThread;
    const int64_t chunks = std::min<int64_t>({count, by_work, int64_t{4} * thread_count});
    if (workers != nullptr && workers->try_run(count, (count + chunks - 1) / chunks, body)) return;
  }
  body(0, count);
}

}  // namespace tlt
