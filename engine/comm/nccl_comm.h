// Ranks with a GPU each, over NCCL: a mover of bytes. What is added is added by us, in the order of ranks.
//
// Not on the engine's path yet: ranks as processes meet over MPI. It is for ranks that have devices of their own.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "comm/communicator.h"

namespace kdt {

// A stream of the rank's device and memory there. Everything goes in order on the stream; errors of the device are
// Error(engine_failed).
class DeviceStream {
 public:
  virtual ~DeviceStream() = default;
  virtual void enter() = 0;              // makes the device the calling thread's
  virtual void* handle() = 0;            // cudaStream_t
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* memory) noexcept = 0;
  virtual bool holds(const void* memory) = 0;   // whether it is a device's memory
  virtual void to_device(void* to, const void* from, size_t bytes) = 0;
  virtual void to_host(void* to, const void* from, size_t bytes) = 0;
  virtual bool done() = 0;               // whether everything on the stream has been done
};

// Error(unsupported) when the engine was built without NCCL's header or CUDA, Error(io) without a device.
std::unique_ptr<DeviceStream> make_cuda_stream(int device);

// A collective call: every rank makes one. `control` joins the same ranks on the host: it carries NCCL's id at the start, and
// when a call does not end within the deadline it is by `control` that the missing rank is known by name. `library`: a name
// or path; empty: that of the environment's KDTREE_NCCL, or libnccl.so.2.
//
// Memory given to calls may be the host's, which goes through memory on the device, or a device's, which nothing on another
// stream may be writing. Error(unsupported) when not built in or NCCL is too old, Error(io) when its library is not there.
std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> control,
                                                     std::unique_ptr<DeviceStream> stream,
                                                     const std::string& library = "");

}  // namespace kdt
