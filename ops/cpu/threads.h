// Shares the work of an op among threads: parallel_for, in place of torch's.
//
// OpenMP's threads meet at the end of each loop, and spin until all are there. On a machine that others use too, one of them
// is often kept from its core for milliseconds, and the others wait for it and use up their own cores' time. Here the thread
// that calls does the work itself, and helpers take parts of it:
//
//   - Parts are small and taken one by one, so a fast thread takes more of them than a slow one.
//   - When none is left, the caller waits only for helpers that are at work on a part, not for those that never came.
//   - Who waits spins for a moment, since the next loop mostly is microseconds away, and then sleeps. It does not yield:
//     Linux gives a thread that yields less than its share, and one that wakes up its core at once.
//   - Helpers ask Linux for short turns. Then one that is taken from its core in the middle of a part is soon back.
//
// Which thread computes a part must not change its bits.

#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace team {

using Clock = std::chrono::steady_clock;
// A helper spins from one loop to the next, but not for long where a program prepares the next step. The caller waits for
// the rest of a part; that takes longer only where the helper has no core.
constexpr std::chrono::microseconds kHelperSpin(200), kCallerSpin(50);
constexpr std::chrono::microseconds kAloneSpin(800);  // more, of a helper whose core nobody else wants: until the next step
constexpr std::chrono::nanoseconds kTurn(100'000);  // the shortest that Linux grants
constexpr int64_t kPartsPerThread = 8;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits for a time until `value` is no longer `old`. False: it still is.
inline bool spin_while(const std::atomic<uint32_t>& value, uint32_t old, Clock::duration spin) {
  const auto end = Clock::now() + spin;
  do
    for (int i = 0; i < 16; ++i) {
      if (value.load(std::memory_order_acquire) != old) return true;
      pause();
    }
  while (Clock::now() < end);
  return false;
}

// How often this thread had to leave its core to another.
inline int64_t interruptions() {
  rusage use = {};
  getrusage(RUSAGE_THREAD, &use);
  return use.ru_nivcsw;
}

// Asks for turns of kTurn for this thread, if its scheduling is the usual one. Its share of the core stays as it is.
// Linux before 6.12 has no such wish, and does nothing.
inline void take_short_turns() {
#ifdef SYS_sched_setattr
  struct {  // as in sched_setattr(2); not all C libraries have it
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attributes = {};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0 || attributes.policy != SCHED_OTHER) return;
  attributes.runtime = kTurn.count();
  syscall(SYS_sched_setattr, 0, &attributes, 0);
#endif
}

// Helpers, and at any time at most one caller, whose loop they share.
class Team {
 public:
  // work(context) on up to `count` threads, the caller among them. False: another caller has the team, and nothing was done.
  bool run(int64_t count, void (*work)(void*), void* context) {
    if (taken_.exchange(true, std::memory_order_acquire)) return false;
    while (helpers_ < count - 1 && start_helper()) ++helpers_;
    work_ = work;
    context_ = context;
    error_ = nullptr;
    rests_.store(false, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint32_t loop = loop_.load(std::memory_order_relaxed) + 1;
    door_.store({loop, static_cast<uint16_t>(count - 1), 0}, std::memory_order_release);
    loop_.store(loop, std::memory_order_seq_cst);
    loop_.notify_all();
    attempt();
    Door door = door_.load(std::memory_order_relaxed);
    while (!door_.compare_exchange_weak(door, {loop, 0, door.entered}, std::memory_order_acq_rel)) continue;
    for (uint32_t done; (done = done_.load(std::memory_order_acquire)) != door.entered;)
      if (!spin_while(done_, done, kCallerSpin)) done_.wait(done, std::memory_order_acquire);
    const std::exception_ptr error = error_;
    taken_.store(false, std::memory_order_release);
    if (error) std::rethrow_exception(error);
    return true;
  }

  // Helpers that spin sleep at once, until the next loop: another process waits for their cores.
  void rest() {
    if (taken_.exchange(true, std::memory_order_acquire)) return;
    rests_.store(true, std::memory_order_relaxed);
    loop_.fetch_add(1, std::memory_order_seq_cst);  // a loop with no room for helpers, of which those that sleep hear nothing
    taken_.store(false, std::memory_order_release);
  }

  // The team after this one, for a caller that finds this one taken.
  Team& next() {
    std::call_once(next_is_made_, [this] { next_ = new Team; });
    return *next_;
  }

 private:
  struct Door {  // of a loop: how many helpers may still enter, and how many have
    uint32_t loop;
    uint16_t room, entered;
  };

  // False where the system grants no more threads: the loop then runs on those that there are.
  bool start_helper() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
    bool started = true;
    try {
      std::thread([this] { help(); }).detach();
    } catch (const std::system_error&) {
      started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
  }

  void help() {
    take_short_turns();
    int64_t before = 0;  // interruptions, when it last waited for long
    for (uint32_t seen = 0;;) {
      if (rests_.load(std::memory_order_relaxed)) {
        loop_.wait(seen, std::memory_order_acquire);
      } else if (!spin_while(loop_, seen, kHelperSpin)) {
        const int64_t now = interruptions();
        if (now != std::exchange(before, now) || !spin_while(loop_, seen, kAloneSpin))
          loop_.wait(seen, std::memory_order_acquire);
      }
      seen = loop_.load(std::memory_order_acquire);
      if (enter()) {
        attempt();
        done_.fetch_add(1, std::memory_order_acq_rel);
        done_.notify_one();
      }
    }
  }

  bool enter() {
    Door door = door_.load(std::memory_order_relaxed);
    while (door.room > 0) {
      const Door then = {door.loop, static_cast<uint16_t>(door.room - 1), static_cast<uint16_t>(door.entered + 1)};
      if (door_.compare_exchange_weak(door, then, std::memory_order_acq_rel)) return true;
    }
    return false;
  }

  void attempt() {
    try {
      work_(context_);
    } catch (...) {
      const std::lock_guard lock(error_is_set_);
      error_ = std::current_exception();
    }
  }

  std::atomic<bool> taken_ = false, rests_ = false;
  int64_t helpers_ = 0;
  void (*work_)(void*) = nullptr;
  void* context_ = nullptr;
  std::exception_ptr error_;
  std::mutex error_is_set_;
  std::once_flag next_is_made_;
  Team* next_ = nullptr;
  // What threads wait for is on lines of its own.
  alignas(64) std::atomic<uint32_t> loop_ = 0;
  std::atomic<Door> door_ = Door{};
  alignas(64) std::atomic<uint32_t> done_ = 0;
};

// The first team. g++ makes it one object for all libraries of the process; with another compiler each has its own.
[[gnu::visibility("default")]] inline Team& first_team() {
  static Team* const team = new Team;  // never deleted: its helpers live as long as the process
  return *team;
}

// work(begin, end) for parts of begin..end, of at least `grain` each but for the last, on up to `threads` threads. What it
// throws is thrown here when all threads have stopped.
template <class Work>
void parallel_for(int64_t threads, int64_t begin, int64_t end, int64_t grain, const Work& work) {
  if (begin >= end) return;
  const int64_t count = end - begin;
  grain = std::max<int64_t>(grain, 1);
  threads = std::min({threads, (count + grain - 1) / grain, int64_t{1} << 15});
  if (threads <= 1) return work(begin, end);
  const int64_t part = std::max(grain, count / (kPartsPerThread * threads));
  std::atomic<int64_t> free = begin;
  const auto take = [&] {
    for (int64_t first; (first = free.fetch_add(part, std::memory_order_relaxed)) < end;)
      work(first, std::min(end, first + part));
  };
  const auto call = [](void* context) { (*static_cast<decltype(take)*>(context))(); };
  for (Team* team = &first_team(); !team->run(threads, call, const_cast<void*>(static_cast<const void*>(&take)));)
    team = &team->next();
}

}  // namespace team
