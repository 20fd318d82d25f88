// In place of nccl_comm.cpp and cuda_stream.cpp where CUDA or NCCL's header was not there to build with.
#include "base/error.h"
#include "comm/nccl_comm.h"

namespace kdt {
namespace {

[[noreturn]] void refuse() {
  fail(Status::unsupported, "NCCL", "not built in",
       "an engine built with CUDA where PyPI's nvidia-nccl-cu13 (or nccl.h) is installed");
}

}  // namespace

std::unique_ptr<DeviceStream> make_cuda_stream(int) { refuse(); }

std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator>, std::unique_ptr<DeviceStream>,
                                                     const std::string&) {
  refuse();
}

}  // namespace kdt
