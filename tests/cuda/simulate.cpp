// The kernels of ffi/cuda on the simulated multiprocessor, for ctypes (tests/cuda/simulate.py).
#include <string>

#include "axes.h"
#include "plan.h"

namespace jaxquant {
namespace {

std::string error_message;

template <typename Run>
int guarded(const Run& run) {
  simulation::Machine machine;
  simulation::machine() = &machine;
  try {
    run(machine);
    return 0;
  } catch (const std::exception& error) {
    error_message = error.what();
    return 1;
  }
}

void run_dot(Kernel kernel, const Problem& problem, uint8_t* shared, int64_t block, int thread) {
  switch (kernel) {
    case Kernel::kBytes:
      return dot_block<1, ByBytes>(problem, block, thread);
    case Kernel::kDot1:
      return dot_block<1, ByWords>(problem, block, thread);
    case Kernel::kDot2:
      return dot_block<2, ByWords>(problem, block, thread);
    case Kernel::kDot4:
      return dot_block<4, ByWords>(problem, block, thread);
    case Kernel::kNarrow8:
      return Narrow8::run(problem, shared, block, thread);
    case Kernel::kNarrow16:
      return Narrow16::run(problem, shared, block, thread);
    case Kernel::kWide64:
      return Wide64::run(problem, shared, block, thread);
    case Kernel::kWide192:
      return Wide192::run(problem, shared, block, thread);
  }
}

}  // namespace
}  // namespace jaxquant

extern "C" {

const char* simulation_error() { return jaxquant::error_message.c_str(); }

// Each of these returns 0, or 1 for an error that simulation_error() then tells. `seed` is the order of threads.

int simulate_quantize(const uint8_t* values, int64_t records, uint8_t* out, int by_bytes, unsigned seed) {
  using namespace jaxquant;
  return guarded([&](simulation::Machine& machine) {
    machine.readable = {{values, records * kBlock * 4}};
    machine.writable = {out, records * q8k::kBytes};
    machine.written.assign(static_cast<size_t>(records) * q8k::kBytes, 0);
    for (int64_t block = 0; block * kQuantizeWarps < records; ++block) {
      machine.run_block(kQuantizeWarps * kWarp, 0, seed, [&](uint8_t*, int thread) {
        if (by_bytes != 0) {
          quantize_block<ByBytes>(values, out, records, block, thread);
        } else {
          quantize_block<ByWords>(values, out, records, block, thread);
        }
      });
    }
  });
}

// `kernel` is a number of Kernel, or -1 for the one that a device would choose; *kernel is then what it was.
int simulate_dot(int* kernel, int capability, int processors, int shared_bytes, const uint8_t* w,
                 const int64_t* w_shape, int w_rank, const int64_t* w_dims, const uint8_t* x, const int64_t* x_shape,
                 int x_rank, const int64_t* x_dims, float* out, const int64_t* shape, int rank, unsigned seed) {
  using namespace jaxquant;
  const auto elements = [](const int64_t* extents, int count) {
    int64_t product = 1;
    for (int i = 0; i < count; ++i) product *= extents[i];
    return product;
  };
  return guarded([&](simulation::Machine& machine) {
    machine.readable = {{w, elements(w_shape, w_rank)}, {x, elements(x_shape, x_rank)}};
    machine.writable = {reinterpret_cast<uint8_t*>(out), elements(shape, rank) * 4};
    machine.written.assign(static_cast<size_t>(machine.writable.bytes), 0);
    const Contraction all = contraction({shape, static_cast<size_t>(rank)}, {w_shape, static_cast<size_t>(w_rank)},
                                        w_dims, {x_shape, static_cast<size_t>(x_rank)}, x_dims);
    const Problem problem = problem_of(all, w, x, out);
    const Kernel chosen =
        *kernel >= 0 ? static_cast<Kernel>(*kernel) : choose(problem, {capability, processors, shared_bytes});
    *kernel = static_cast<int>(chosen);
    const Tiling by = tiling(chosen);
    for (int64_t block = 0; block < blocks_of(problem, chosen); ++block) {
      machine.run_block(by.threads, by.shared, seed,
                        [&](uint8_t* shared, int thread) { run_dot(chosen, problem, shared, block, thread); });
    }
    if (problem.records == 0 && machine.global_reads != 0) throw std::runtime_error("read records that are not there");
  });
}

// Deliberate mistakes, to see that the simulation finds them.
int simulate_mistake(int which) {
  using namespace jaxquant;
  const std::vector<uint8_t> bytes(64);
  const uint8_t* memory = bytes.data();
  return guarded([&](simulation::Machine& machine) {
    machine.readable = {{memory, static_cast<int64_t>(bytes.size())}};
    machine.run_block(2 * kWarp, 1024, 0, [&](uint8_t* shared, int thread) {
      const int lane = thread % kWarp;
      switch (which) {
        case 0:  // no barrier between a write and the read of it by another warp
          write_shared<uint32_t>(shared + 4 * thread, 1);
          sync_warp();
          read_shared<uint32_t>(shared + 4 * (thread ^ kWarp));
          break;
        case 1:  // a shuffle is no barrier
          write_shared<uint32_t>(shared + 4 * thread, 1);
          shuffle(0, 0);
          read_shared<uint32_t>(shared + 4 * (thread ^ 1));
          break;
        case 2:  // a write over what another thread reads
          read_shared<uint32_t>(shared);
          if (thread == 1) write_shared<uint32_t>(shared, 1);
          break;
        case 3:
          read_word(memory + 2);
          break;
        case 4:
          read_word(memory + bytes.size());
          break;
        case 5:  // half of a warp is missing
          if (lane < 16) shuffle(0, 0);
          break;
        case 6:  // a copy that is read before it has landed, and before a barrier
          copy_async<4>(shared + 4 * thread, memory);
          commit_copies();
          sync_block();
          wait_for_copies<0>();
          read_shared<uint32_t>(shared + 4 * (thread ^ 1));
          break;
        case 7:
          read_shared<uint32_t>(shared + 1024);
          break;
        default:  // none: the same with barriers
          write_shared<uint32_t>(shared + 4 * thread, 1);
          sync_block();
          read_shared<uint32_t>(shared + 4 * (thread ^ kWarp));
          sync_block();
          copy_async<4>(shared + 4 * thread, memory);
          commit_copies();
          wait_for_copies<0>();
          sync_warp();
          read_shared<uint32_t>(shared + 4 * (thread ^ 1));
      }
    });
  });
}

// What of `fragments.h` kernels build operands and results by.
int fragment_index(int what, int lane, int i) {
  using namespace jaxquant;
  switch (what) {
    case 0:
      return operand_row(lane, i);
    case 1:
      return operand_column(lane);
    case 2:
      return operand_byte(lane);
    case 3:
      return result_row(lane, i);
    default:
      return result_column(lane, i);
  }
}

}  // extern "C"
