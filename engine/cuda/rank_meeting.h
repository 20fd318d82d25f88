// Where the ranks of one process meet on their devices: whose memory they read, and in what order their work runs.
//
// At a meeting every rank puts an event on its stream, and the other streams wait for it. In between the threads meet on the
// host, so that an event is recorded before anyone waits for it: no kernel waits for one that is not queued yet, and any number
// of ranks may share a device. Within work that is recorded the same calls make edges of one graph, rank 0's.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <map>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "ops/types.h"

namespace kdt::cuda {

constexpr int kMaxRanks = 64;

// The same place in every rank's memory, in the order of ranks.
using RankPointers = std::array<const void*, kMaxRanks>;

// What the ranks of one model own together: a rank that ends leaves behind what the others' queued work still reads.
class RankEstate;
std::shared_ptr<RankEstate> make_rank_estate();

class RankMeeting {
 public:
  // A collective call, on the device of this rank. Error(unsupported) naming ranks that cannot read each other's memory.
  RankMeeting(Communicator& comm, std::shared_ptr<RankEstate> estate, int device);

  int size() const { return comm_.size(); }
  int rank() const { return comm_.rank(); }
  bool first() const { return rank() == 0; }
  bool apart() const;                        // every rank has a device of its own
  bool of_first(bool mine) const;            // what rank 0 says. A collective call
  int sharers() const { return sharers_; }   // ranks on this device, this one among them

  // Of equal memory of every rank: a view of `mine` whose memory all ranks keep. A collective call.
  Buffer share(Buffer mine);
  // `mine`: within what share() returned.
  RankPointers everyones(const void* mine) const;

  // What is queued next on the stream of a rank that hears waits for what was queued on those of the ranks that tell.
  enum class Way { all, to_first, from_first };
  void meet(cudaStream_t stream, Way way);

  // Between these the ranks call CUDA one after the other, in their order, from meeting to meeting: a graph is recorded by one
  // thread at a time. Whoever does not end its turn is who the others miss.
  void begin_turns();
  void end_turns();
  // Of a rank other than 0 that cannot go on recording: rank 0 ends the recording before this one's stream goes.
  void abandon(cudaStream_t stream, const char* why) noexcept;

  // Until the stream is done; Error(engine_failed) when that takes longer than the ranks' deadline.
  void wait(cudaStream_t stream) const;

 private:
  struct Seat {
    uint64_t process;
    int64_t device;
    cudaEvent_t arrived[2];   // of two meetings running: nobody records one again before all have waited for it
  };
  void reach(int device) const;
  void start_turn();
  void finish_turn();

  Communicator& comm_;
  std::shared_ptr<RankEstate> estate_;
  int device_, sharers_ = 0;
  std::vector<Seat> seats_;   // [ranks]
  std::map<const std::byte*, std::vector<const std::byte*>> shared_;   // beginning of ours -> everyone's
  int meeting_ = 0;           // which of the two events
  bool in_turns_ = false;
};

}  // namespace kdt::cuda
