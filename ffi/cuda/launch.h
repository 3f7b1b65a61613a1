// The kernels, as the XLA handlers start them.
#pragma once

#include <cuda_runtime_api.h>

#include "axes.h"

namespace jaxquant {

cudaError_t launch_quantize(const uint8_t* values, uint8_t* out, int64_t records, cudaStream_t stream);
cudaError_t launch_quantized_dot(const Contraction& all, const uint8_t* w, const uint8_t* x, float* out,
                                 cudaStream_t stream);

}  // namespace jaxquant
