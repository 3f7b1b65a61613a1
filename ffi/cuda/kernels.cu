// The kernels and how they are started. What they do is in the headers, which also compile for a CPU.
#include "launch.h"
#include "plan.h"

namespace jaxquant {
namespace {

template <typename Read>
__global__ void __launch_bounds__(kQuantizeWarps* kWarp)
    quantize_kernel(const uint8_t* values, uint8_t* out, int64_t records) {
  quantize_block<Read>(values, out, records, blockIdx.x, static_cast<int>(threadIdx.x));
}

template <int kColumns, typename Read, int kMinimumBlocks>
__global__ void __launch_bounds__(kDotWarps* kWarp, kMinimumBlocks)
    dot_kernel(const __grid_constant__ Problem problem) {
  dot_block<kColumns, Read>(problem, blockIdx.x, static_cast<int>(threadIdx.x));
}

template <typename Matmul>
__global__ void __launch_bounds__(Matmul::kThreads, Matmul::kBlocks)
    matmul_kernel(const __grid_constant__ Problem problem) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) uint8_t shared[];
  Matmul::run(problem, shared, blockIdx.x, static_cast<int>(threadIdx.x));
#endif
}

using DotFunction = void (*)(Problem);

DotFunction function_of(Kernel kernel) {
  switch (kernel) {
    case Kernel::kBytes:
      return dot_kernel<1, ByBytes, 1>;
    case Kernel::kDot1:
      return dot_kernel<1, ByWords, 3>;
    case Kernel::kDot2:
      return dot_kernel<2, ByWords, 2>;
    case Kernel::kDot4:
      return dot_kernel<4, ByWords, 2>;
    case Kernel::kNarrow8:
      return matmul_kernel<Narrow8>;
    case Kernel::kNarrow16:
      return matmul_kernel<Narrow16>;
    case Kernel::kWide64:
      return matmul_kernel<Wide64>;
    case Kernel::kWide192:
      return matmul_kernel<Wide192>;
  }
  return nullptr;
}

constexpr int64_t kMostBlocks = 0x7FFFFFFF;

cudaError_t this_device(Device& device) {
  int index = 0;
  int major = 0;
  int minor = 0;
  cudaError_t error = cudaGetDevice(&index);
  const auto ask = [&](cudaDeviceAttr what, int& answer) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&answer, what, index);
  };
  ask(cudaDevAttrComputeCapabilityMajor, major);
  ask(cudaDevAttrComputeCapabilityMinor, minor);
  ask(cudaDevAttrMultiProcessorCount, device.processors);
  ask(cudaDevAttrMaxSharedMemoryPerBlockOptin, device.shared_bytes);
  device.capability = 10 * major + minor;
  return error;
}

}  // namespace

cudaError_t launch_quantize(const uint8_t* values, uint8_t* out, int64_t records, cudaStream_t stream) {
  const int64_t blocks = (records + kQuantizeWarps - 1) / kQuantizeWarps;
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  const bool aligned = reinterpret_cast<uintptr_t>(values) % 16 == 0;
  const auto function = aligned ? quantize_kernel<ByWords> : quantize_kernel<ByBytes>;
  function<<<static_cast<unsigned>(blocks), kQuantizeWarps * kWarp, 0, stream>>>(values, out, records);
  return cudaGetLastError();
}

cudaError_t launch_quantized_dot(const Contraction& all, const uint8_t* w, const uint8_t* x, float* out,
                                 cudaStream_t stream) {
  Device device = {};
  const Problem problem = problem_of(all, w, x, out);
  if (const cudaError_t error = this_device(device); error != cudaSuccess) return error;
  const Kernel kernel = choose(problem, device);
  const DotFunction function = function_of(kernel);
  const Tiling by = tiling(kernel);
  const int64_t blocks = blocks_of(problem, kernel);
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMostBlocks) return cudaErrorInvalidConfiguration;
  if (by.shared > 0) {
    const cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, by.shared);
    if (error != cudaSuccess) return error;
  }
  function<<<static_cast<unsigned>(blocks), static_cast<unsigned>(by.threads), static_cast<size_t>(by.shared),
             stream>>>(problem);
  return cudaGetLastError();
}

}  // namespace jaxquant
