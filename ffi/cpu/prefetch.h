// Asking for memory before it is needed.
#pragma once

#include <cstdint>

#include "record.h"

namespace jaxquant {

// As _mm_prefetch, but it stays where it is written: in one burst the compiler would make the loads wait.
JAXQUANT_INLINE void prefetch(const uint8_t* p) { asm volatile("prefetcht0 %0" : : "m"(*p)); }

}  // namespace jaxquant
