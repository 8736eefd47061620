#include "core/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

namespace replayssm {
namespace {

/// One call of parallel_for in progress.
struct Loop {
  const std::function<void(std::int64_t)>& body;
  const std::int64_t count;
  int places;  ///< how many more threads may join
  std::atomic<std::int64_t> next{0};
  int working = 0;  ///< threads that have joined and not left
  std::exception_ptr failure;

  bool open() const { return places > 0 && next.load(std::memory_order_relaxed) < count; }
};

/// The threads of the process, made as they are asked for. Everything but Loop::next is guarded by the mutex.
class Pool {
 public:
  static Pool& instance() {
    static Pool pool;
    return pool;
  }

  void run(std::int64_t count, int threads, const std::function<void(std::int64_t)>& body) {
    std::unique_lock lock(mutex_);
    while (std::ssize(workers_) < threads - 1) workers_.emplace_back([this] { serve(); });
    const auto loop = loops_.emplace(loops_.end(), body, count, threads);
    if (sleeping_ > 0) changed_.notify_all();
    join(*loop, lock);
    // What is left is in the hands of others. Help them with loops that they started inside it: later ones, never
    // earlier ones, which could take long.
    while (loop->working > 0) {
      const auto later = std::find_if(std::next(loop), loops_.end(), [](const Loop& l) { return l.open(); });
      later != loops_.end() ? join(*later, lock) : sleep(lock);
    }
    const std::exception_ptr failure = loop->failure;
    loops_.erase(loop);
    lock.unlock();
    if (failure) std::rethrow_exception(failure);
  }

 private:
  ~Pool() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void serve() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      const auto open = std::find_if(loops_.begin(), loops_.end(), [](const Loop& l) { return l.open(); });
      open != loops_.end() ? join(*open, lock) : sleep(lock);
    }
  }

  void sleep(std::unique_lock<std::mutex>& lock) {
    ++sleeping_;
    changed_.wait(lock);
    --sleeping_;
  }

  /// Takes bodies of a loop until there are none left.
  void join(Loop& loop, std::unique_lock<std::mutex>& lock) {
    --loop.places;
    ++loop.working;
    lock.unlock();
    std::exception_ptr failure;
    for (std::int64_t i; (i = loop.next++) < loop.count;) {
      try {
        loop.body(i);
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    }
    lock.lock();
    if (failure && !loop.failure) loop.failure = failure;
    if (--loop.working == 0 && sleeping_ > 0) changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Loop> loops_;  // in the order of their start
  std::vector<std::thread> workers_;
  int sleeping_ = 0;
  bool stopping_ = false;
};

}  // namespace

void parallel_for(std::int64_t n, int threads, const std::function<void(std::int64_t)>& body) {
  if (threads <= 1 || n <= 1) {
    for (std::int64_t i = 0; i < n; ++i) body(i);
  } else {
    Pool::instance().run(n, threads, body);
  }
}

}  // namespace replayssm
