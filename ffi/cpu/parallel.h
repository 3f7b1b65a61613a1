// A parallel for over XLA's intra-op pool that cannot deadlock: the caller works too and waits only for
// chunks that another thread has already begun.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>

#include "float_environment.h"
#include "xla/ffi/api/ffi.h"

namespace jaxquant {

// Calls body(begin, end) for pieces of [0, items) of `chunk` items each, on all threads of the pool.
template <typename Body>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t items, int64_t chunk, const Body& body) {
  const int64_t chunks = (items + chunk - 1) / chunk;
  const int64_t threads = std::min<int64_t>(pool.num_threads(), chunks);
  if (threads <= 1) {
    const FloatEnvironment environment;
    if (items > 0) body(0, items);
    return;
  }
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  // A helper may start after the caller has returned: it then finds no chunk and touches only this.
  auto state = std::make_shared<State>();
  const auto work = [state, items, chunk, chunks, &body] {
    const FloatEnvironment environment;
    for (;;) {
      const int64_t i = state->next.fetch_add(1, std::memory_order_relaxed);
      if (i >= chunks) return;
      body(i * chunk, std::min(items, (i + 1) * chunk));
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 1; i < threads; ++i) pool.Schedule(std::decay_t<decltype(work)>(work));
  work();
  while (state->done.load(std::memory_order_acquire) < chunks) std::this_thread::yield();
}

}  // namespace jaxquant
