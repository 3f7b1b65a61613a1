// Which kernels run: the best this CPU has, unless one is forced through the C entries below.
#include <atomic>
#include <cstring>

#include "kernels.h"

namespace jaxquant {
namespace {

bool supported(const Kernels& candidate) {
#if defined(__x86_64__)
  if (&candidate == &kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && supported(kAvx2);
  }
  if (&candidate == &kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#endif
  return &candidate == &kPortable;
}

// The best first.
constexpr const Kernels* kAll[] = {
#if defined(__x86_64__)
    &kAvx512, &kAvx2,
#endif
    &kPortable};

const Kernels* best() {
  for (const Kernels* candidate : kAll) {
    if (supported(*candidate)) return candidate;
  }
  return &kPortable;
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> table(best());
  return table;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

}  // namespace jaxquant

#pragma GCC visibility push(default)
extern "C" {

// The name of the instruction set in use.
const char* jaxquant_isa() { return jaxquant::kernels().isa; }

// The name of the i-th instruction set that this library and this CPU have, the best first; null past the last.
const char* jaxquant_supported_isa(int i) {
  for (const jaxquant::Kernels* candidate : jaxquant::kAll) {
    if (jaxquant::supported(*candidate) && i-- == 0) return candidate->isa;
  }
  return nullptr;
}

// Forces an instruction set from the next call on; 0 if done, 1 if there is none such here.
int jaxquant_force_isa(const char* isa) {
  for (const jaxquant::Kernels* candidate : jaxquant::kAll) {
    if (std::strcmp(candidate->isa, isa) == 0 && jaxquant::supported(*candidate)) {
      jaxquant::current().store(candidate, std::memory_order_relaxed);
      return 0;
    }
  }
  return 1;
}

}  // extern "C"
#pragma GCC visibility pop
