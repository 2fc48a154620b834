// Shares the work of an op among threads: parallel_for, in place of at::parallel_for.
//
// Threads of OpenMP meet at the end of every loop, and spin until all are there. On a machine that others use too, one of
// them is often kept from its core for milliseconds, and meanwhile the others wait for it and waste their own cores' time.
// Here the thread that calls does the work itself, and helpers take parts of it:
//
//   - Parts are small and are taken one by one, so a fast thread takes more of them than a slow one.
//   - When none is left, the caller waits only for helpers that are at work on a part, not for those that never came.
//   - Who waits spins for a moment, since the next loop is mostly microseconds away; then it lets other programs have the
//     core whenever one wants it; then it sleeps.
//
// Which thread computes a part must not change its bits.

#pragma once

#include <ATen/Parallel.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <linux/sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>

namespace team {

using Clock = std::chrono::steady_clock;
inline std::chrono::microseconds env_us(const char* n, int d) { return std::chrono::microseconds(getenv(n) ? atoi(getenv(n)) : d); }
static const std::chrono::microseconds kSpin = env_us("T_SPIN", 20);  // alone on its core
static const std::chrono::microseconds kYield = env_us("T_YIELD", 200); // while nobody else wants the core
static const std::chrono::microseconds kTurn = env_us("T_TURN", 100);
struct sattr{uint32_t size,policy;uint64_t flags;int32_t nice;uint32_t prio;uint64_t runtime,deadline,period;};
static int set_slice(uint64_t ns){sattr a{};a.size=sizeof a;syscall(SYS_sched_getattr,0,&a,sizeof a,0);a.runtime=ns;return syscall(SYS_sched_setattr,0,&a,0);}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `value` is no longer `old`.
template <class T>
void wait_while(const std::atomic<T>& value, T old) {
  const auto changed = [&] { return value.load(std::memory_order_acquire) != old; };
  const auto start = Clock::now();
  for (auto spent = Clock::duration(0); spent < kYield; spent = Clock::now() - start) {
    for (int i = 0; i < 16; ++i) {
      if (changed()) return;
      pause();
    }
    if (spent >= kSpin) std::this_thread::yield();
  }
  while (!changed()) value.wait(old, std::memory_order_acquire);
}

// A caller and its helpers, who live as long as the process. One loop at a time.
class Team {
 public:
  // `work(context)` on up to `count` threads, this one among them. False: the team is busy, and nothing was done.
  bool run(int64_t count, void (*work)(void*), void* context) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    for (; helpers_ < count - 1; ++helpers_) start_helper();
    work_ = work;
    context_ = context;
    error_ = nullptr;
    done_.store(0, std::memory_order_relaxed);
    const uint32_t loop = loop_.load(std::memory_order_relaxed) + 1;
    door_.store({loop, static_cast<uint16_t>(count - 1), 0}, std::memory_order_release);
    loop_.store(loop, std::memory_order_seq_cst);
    loop_.notify_all();
    attempt();
    Door door = door_.load(std::memory_order_relaxed);
    while (!door_.compare_exchange_weak(door, {loop, 0, door.entered}, std::memory_order_acq_rel)) continue;
    for (uint32_t done; (done = done_.load(std::memory_order_acquire)) != door.entered;) wait_while(done_, done);
    const std::exception_ptr error = error_;
    busy_.store(false, std::memory_order_release);
    if (error) std::rethrow_exception(error);
    return true;
  }

  // The team after this one, for a caller that finds this one busy.
  Team& next() {
    std::call_once(next_is_made_, [this] { next_ = new Team; });
    return *next_;
  }

 private:
  struct Door {  // of a loop: how many helpers may still enter, and how many have
    uint32_t loop;
    uint16_t room, entered;
  };

  void start_helper() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of the program
    std::thread([this] { help(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void help() {
    if (getenv("T_SLICE")) set_slice(atof(getenv("T_SLICE"))*1000);
    auto last = Clock::now();
    for (uint32_t seen = 0;;) {
      wait_while(loop_, seen);
      seen = loop_.load(std::memory_order_acquire);
      Door door = door_.load(std::memory_order_relaxed);
      while (door.room > 0)
        if (door_.compare_exchange_weak(door, {door.loop, static_cast<uint16_t>(door.room - 1),
                                               static_cast<uint16_t>(door.entered + 1)}, std::memory_order_acq_rel)) {
          attempt();
          done_.fetch_add(1, std::memory_order_acq_rel);
          done_.notify_one();
          break;
        }
      if (kTurn.count() && Clock::now() - last > kTurn) { std::this_thread::yield(); last = Clock::now(); }
    }
  }

  void attempt() {
    try {
      work_(context_);
    } catch (...) {
      const std::lock_guard lock(error_mutex_);
      error_ = std::current_exception();
    }
  }

  std::atomic<bool> busy_ = false;
  int64_t helpers_ = 0;
  alignas(64) std::atomic<uint32_t> loop_ = 0;
  std::atomic<Door> door_ = Door{};
  void (*work_)(void*) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> done_ = 0;
  std::exception_ptr error_;
  std::mutex error_mutex_;
  std::once_flag next_is_made_;
  Team* next_ = nullptr;
};

// The first team of the process: g++ makes this one object for all libraries that are loaded.
[[gnu::visibility("default")]] inline Team& first_team() {
  static Team* team = new Team;  // for good: its helpers use it until the process ends
  return *team;
}

// work(begin, end) for parts of 0..count of at least `grain`, on up to at::get_num_threads() threads.
template <class Work>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Work& work) {
  const int64_t count = end - begin, wanted = at::get_num_threads();
  const int64_t threads = std::min({wanted, (count + grain - 1) / std::max<int64_t>(grain, 1), int64_t{1} << 15});
  if (threads <= 1) {
    if (count > 0) work(begin, end);
    return;
  }
  const int64_t part = std::max(grain, count / (8 * threads));
  std::atomic<int64_t> free = begin;
  auto take = [&] {
    for (int64_t i; (i = free.fetch_add(part, std::memory_order_relaxed)) < end;) work(i, std::min(end, i + part));
  };
  const auto call = [](void* context) { (*static_cast<decltype(take)*>(context))(); };
  for (Team* team = &first_team(); !team->run(threads, call, &take);) team = &team->next();
}

}  // namespace team
