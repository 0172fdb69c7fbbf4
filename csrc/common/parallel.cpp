#include "common/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace tlt {
namespace {

constexpr int64_t kMinWorkPerThread = 100'000;  // about 30 us: less is not worth waking a thread
constexpr int kMaxThreads = 1024;

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
  // Keeps the workers that started: a container may limit processes or memory.
  explicit Pool(int workers) {
    threads_.reserve(workers);
    try {
      while (size() < workers) threads_.emplace_back([this] { work(); });
    } catch (const std::exception&) {  // system_error, or bad_alloc under a memory limit
    }
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return static_cast<int>(threads_.size()); }

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
      busy_ = size();
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
      wake_.wait(lock, [&] { return stop_ || job_ != seen; });
      if (stop_) return;
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
  int busy_ = 0;
  bool stop_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
};

// The process's pool. It is never destroyed at exit, when other threads may still use it.
struct Shared {
  std::mutex mutex;
  std::shared_ptr<Pool> pool;  // null until first use
  int thread_count = 0;
};

Shared& shared() {
  static Shared* const instance = new Shared;
  return *instance;
}

// A forked child has no workers: it leaks the parent's pool and makes its own on first use.
void forget_pool() {
  new (&shared().mutex) std::mutex;
  new (&shared().pool) std::shared_ptr<Pool>;
}

// The caller's copy keeps the pool alive while set_num_threads replaces it.
std::shared_ptr<Pool> get_pool() {
  std::lock_guard<std::mutex> lock(shared().mutex);
  if (shared().thread_count == 0) {
    shared().thread_count = available_cores();
    pthread_atfork(nullptr, nullptr, forget_pool);
  }
  if (shared().pool == nullptr) shared().pool = std::make_shared<Pool>(shared().thread_count - 1);
  return shared().pool;
}

}  // namespace

int num_threads() { return 1 + get_pool()->size(); }

void set_num_threads(int count) {
  if (count < 0 || count > kMaxThreads) {
    throw std::invalid_argument("set_num_threads: count: expected 0 to " +
                                std::to_string(kMaxThreads) + ", got " + std::to_string(count));
  }
  std::shared_ptr<Pool> previous = get_pool();  // its last user stops its workers
  std::lock_guard<std::mutex> lock(shared().mutex);
  const int wanted = count == 0 ? available_cores() : count;
  if (wanted == shared().thread_count) return;
  shared().thread_count = wanted;
  shared().pool.reset();
}

void parallel_for(int64_t count, int64_t work_per_item,
                  const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  const int64_t work = count * std::max<int64_t>(1, work_per_item);
  if (work >= 2 * kMinWorkPerThread && count > 1 && !Pool::inside()) {
    const std::shared_ptr<Pool> workers = get_pool();
    const int64_t threads = 1 + workers->size();
    const int64_t chunks = std::min<int64_t>({count, work / kMinWorkPerThread, 4 * threads});
    if (threads > 1 && workers->try_run(count, (count + chunks - 1) / chunks, body)) return;
  }
  body(0, count);
}

}  // namespace tlt
