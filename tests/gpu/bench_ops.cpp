// What each op takes on the first CUDA device, for the shapes of one of eight ranks of Kimi K2.6: microseconds, bytes that
// must be read, and the share of the card's measured read bandwidth.
//
//   bench_ops [PART OF AN OP'S NAME]
#include <cstdio>
#include <exception>

#include "bench.h"
#include "cuda/cuda_ops.h"

int main(int argc, char** argv) {
  try {
    using namespace kdt;
    const CudaDevice device = cuda_devices().front();
    const auto ops = make_cuda_ops(0);
    const double bandwidth = ops->read_bandwidth();
    std::printf("%s, sm_%d%d, reads %.0f GB/s; medians of %d graph replays, weights of several layers in turn\n",
                device.name.c_str(), device.major, device.minor, bandwidth * 1e-9, bench::kReplays);
    bench::Bench bench(*ops, bandwidth, argc > 1 ? argv[1] : "");
    for (const auto part : {bench::bench_dense, bench::bench_experts, bench::bench_attention, bench::bench_vocabulary}) {
      part(bench);
      bench.forget_memory();
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
