// Tasks taken one by one, so that a thread that is held up leaves the rest to the others.
#pragma once

#include <omp.h>

#include <cstddef>
#include <cstdint>

namespace manta::MANTA_ISA {

template <class F>
void run_tasks(int64_t count, int threads, F task) {
  if (threads > count) threads = static_cast<int>(count);
  if (threads <= 1) {
    for (int64_t i = 0; i < count; i++) task(i);
    return;
  }
  int64_t next = 0;
#pragma omp parallel num_threads(threads)
  for (;;) {
    const int64_t i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    if (i >= count) break;
    task(i);
  }
}

// The same where a task goes on reading where the one before it stopped: each thread has a share of
// neighbours, and those that are done take what is left of the others' shares. (With single tasks in
// turns, memory gives two threads 24 GB/s instead of 33.)
template <class F>
void run_shares(int64_t count, int threads, F task) {
  constexpr int kThreads = 64;
  if (threads > count) threads = static_cast<int>(count);
  if (threads <= 1 || threads > kThreads) return run_tasks(count, threads, task);
  struct alignas(64) Share {
    int64_t next, end;
  } shares[kThreads];
  for (int t = 0; t < threads; t++) shares[t] = {count * t / threads, count * (t + 1) / threads};
#pragma omp parallel num_threads(threads)
  {
    const int own = omp_get_thread_num();
    for (int n = 0; n < threads; n++) {
      Share& share = shares[(own + n) % threads];
      for (;;) {
        const int64_t i = __atomic_fetch_add(&share.next, 1, __ATOMIC_RELAXED);
        if (i >= share.end) break;
        task(i);
      }
    }
  }
}

// Tasks of [0, count) in ranges of `size`: task(begin, end).
template <class F>
void run_ranges(int64_t count, int64_t size, int threads, F task) {
  run_tasks((count + size - 1) / size, threads, [&](int64_t i) {
    task(i * size, (i + 1) * size < count ? (i + 1) * size : count);
  });
}

// Memory of the calling thread that is kept between calls; each `Purpose` has its own.
template <class Purpose>
uint32_t* own_memory(int64_t count) {
  static thread_local uint32_t* memory = nullptr;
  static thread_local int64_t room = 0;
  if (room < count) {
    delete[] memory;
    memory = new uint32_t[static_cast<size_t>(count)];
    room = count;
  }
  return memory;
}

}  // namespace manta::MANTA_ISA
