// Which kernels run: the best this CPU has, unless one is forced through the C entries below.
#include <atomic>
#include <cstring>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace jaxquant {
namespace {

#if defined(__x86_64__)
// Compilers learnt the name of this one late.
bool has_avx_vnni() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1) != 0;
}
#endif

bool supported(const Kernels& candidate) {
#if defined(__x86_64__)
  if (&candidate == &kAvx512Vnni) return __builtin_cpu_supports("avx512vnni") && supported(kAvx512);
  if (&candidate == &kAvxVnni) return has_avx_vnni() && supported(kAvx2);
  if (&candidate == &kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && supported(kAvx2);
  }
  if (&candidate == &kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kDotprod = 1ul << 20;  // of HWCAP
  constexpr unsigned long kI8mm = 1ul << 13;     // of HWCAP2
  const bool dotprod = (getauxval(AT_HWCAP) & kDotprod) != 0;
  if (&candidate == &kNeonDotprod) return dotprod;
  if (&candidate == &kNeonI8mm) return dotprod && (getauxval(AT_HWCAP2) & kI8mm) != 0;
#endif
  return &candidate == &kPortable;
}

// The best first.
constexpr const Kernels* kAll[] = {
#if defined(__x86_64__)
    &kAvx512Vnni, &kAvx512, &kAvxVnni, &kAvx2,
#elif defined(__aarch64__)
    &kNeonI8mm, &kNeonDotprod,
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

namespace {
std::atomic<int64_t> packed_panels{0};
}  // namespace

void count_packed_panel() { packed_panels.fetch_add(1, std::memory_order_relaxed); }

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

// How many panels of weights, of all records of a few rows each, were packed since the library was loaded.
int64_t jaxquant_packed_panels() { return jaxquant::packed_panels.load(std::memory_order_relaxed); }

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
