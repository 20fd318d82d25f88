#include "checkpoint/rank_slices.h"

#include "base/error.h"
#include "checkpoint/shard_maker.h"

namespace kdt {
namespace {

// The rank's tensors of one part of the partition, in order of use. Names are a shard's.
std::shared_ptr<const RankTensors> make_tensors(const ShardMaker& maker, bool draft, const std::string& file,
                                                int64_t rank) {
  auto out = std::make_shared<RankTensors>();
  const Partition& partition = maker.partition();
  std::vector<size_t> chosen;
  int64_t total = 0;
  for (size_t i = 0; i < partition.tensors.size(); ++i) {
    if ((partition.tensors[i].part == Part::drafter) != draft) continue;
    chosen.push_back(i);
    total += partition.tensors[i].bytes();
  }
  out->memory.resize(static_cast<size_t>(total));
  std::byte* at = out->memory.data();
  std::vector<std::byte*> place(static_cast<size_t>(partition.tp), nullptr);   // of the other ranks nothing is made
  for (const size_t i : chosen) {
    const ShardTensor& tensor = partition.tensors[i];
    out->tensors.push_back({tensor.name, tensor.dtype, tensor.shape, at, static_cast<size_t>(tensor.bytes()), file, 0});
    for (int64_t piece = 0; piece < maker.n_pieces(i); ++piece) {
      place[static_cast<size_t>(rank)] = at;
      maker.make(i, piece, place);
      at += maker.piece_bytes(i, piece);
    }
  }
  return out;
}

void check_size(const Checkpoint& checkpoint, int64_t tp) {
  const auto bytes = static_cast<int64_t>(checkpoint.bytes());
  if (bytes > kMostSlicedBytes)
    fail(Status::unsupported, checkpoint.directory(), std::to_string(bytes) + " bytes in one piece for " +
         std::to_string(tp) + " ranks", "shards (tools/shard_weights.py CHECKPOINT OUT --tp " + std::to_string(tp) +
         "), or at most " + std::to_string(kMostSlicedBytes) + " bytes");
}

}  // namespace

RankCheckpoints open_rank(const std::string& model, const std::string& draft, const LoadOptions& options) {
  RankCheckpoints out;
  if (options.tp == 1 || is_shard_directory(model)) {
    if (options.tp > 1 && !draft.empty() && !is_shard_directory(draft))
      fail(Status::unsupported, draft, "no shards", "shards of " + std::to_string(options.tp) + " ranks, as the model's are");
    out.target = Checkpoint::open(model, options);
    if (!draft.empty()) out.draft = Checkpoint::open_draft(draft, options);
    return out;
  }
  check_size(Checkpoint::open(model), options.tp);
  if (!draft.empty()) check_size(Checkpoint::open_draft(draft), options.tp);
  const ShardMaker maker(model, draft, options.tp);
  out.target = Checkpoint::of_tensors(model, make_tensors(maker, false, model, options.rank), options);
  if (!draft.empty()) out.draft = Checkpoint::of_tensors(draft, make_tensors(maker, true, draft, options.rank), options);
  return out;
}

}  // namespace kdt
