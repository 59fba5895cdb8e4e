// Tasks taken one by one, so that a thread that is held up leaves the rest to the others.
#pragma once

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

}  // namespace manta::MANTA_ISA
