#include "checkpoint/shard_maker.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/error.h"
#include "checkpoint/int4_tiles.h"
#include "checkpoint/shard_manifest.h"

namespace kdt {
namespace {

constexpr int64_t kPieceBytes = 16 << 20;   // of all ranks together

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

const std::string& demand_no_shards(const std::string& directory, std::string_view expected) {
  if (is_shard_directory(directory)) fail(Status::invalid_argument, directory, "shards", expected);
  return directory;
}

// The name with the expert's number for `*`.
std::string name_of(const std::string& pattern, int64_t expert) {
  const size_t star = pattern.find('*');
  return star == std::string::npos ? pattern
                                   : pattern.substr(0, star) + std::to_string(expert) + pattern.substr(star + 1);
}

int64_t row_bytes(const SourceTensor& source) {
  return source.shape[1] * static_cast<int64_t>(dtype_size(source.dtype));
}

// How many rows of an expert's source a rank needs: its own, or its columns of all of them.
int64_t n_rows_of(const ShardTensor& tensor, const SourceTensor& source, int64_t tp) {
  return tensor.experts.by_rows ? source.shape[0] / tp : source.shape[0];
}

// The rank's rows of an expert, as read_expert has read them to `data`.
std::vector<const std::byte*> rank_rows(const ShardTensor& tensor, int64_t tp, int64_t rank, const std::byte* data) {
  std::vector<const std::byte*> rows;
  for (const SourceTensor& source : tensor.sources) {
    const int64_t bytes = row_bytes(source), n_rows = n_rows_of(tensor, source, tp);
    const std::byte* first = tensor.experts.by_rows ? data : data + rank * (bytes / tp);
    for (int64_t i = 0; i < n_rows; ++i) rows.push_back(first + i * bytes);
    data += n_rows * bytes;
  }
  return rows;
}

// What of a source a piece of a box needs, in elements.
struct Region {
  int64_t begin, end;
};

Region region_of(const Box& box, int64_t begin, int64_t end, int64_t rank) {
  const int64_t first = box.first + rank * box.rank_step;
  return {first + begin * box.stride[0], first + (end - 1) * box.stride[0] + (box.extent[1] - 1) * box.stride[1] +
                                             (box.extent[2] - 1) * box.stride[2] + 1};
}

// Whether the box is one run of the source, so that it needs no copying after it was read.
bool is_whole(const Box& box) {
  return box.stride == std::array<int64_t, 3>{box.extent[1] * box.extent[2], box.extent[2], 1};
}

// `from`: the element at the box's [begin][0][0].
void copy_box(const Box& box, int64_t n, size_t element, const std::byte* from, std::byte* to) {
  const auto at = [&](int64_t i, int64_t j) {
    return from + (i * box.stride[0] + j * box.stride[1]) * static_cast<int64_t>(element);
  };
  const size_t row = static_cast<size_t>(box.extent[2]) * element;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < box.extent[1]; ++j, to += row) {
      if (box.stride[2] == 1) {
        std::memcpy(to, at(i, j), row);
        continue;
      }
      const std::byte* one = at(i, j);
      const auto step = static_cast<size_t>(box.stride[2]) * element;
      for (size_t k = 0; k < row; k += element, one += step) std::memcpy(to + k, one, element);
    }
}

}  // namespace

// Memory of one call, kept for the next: fresh pages for every piece would cost as much as the piece.
class ShardMaker::Scratch {
 public:
  explicit Scratch(const ShardMaker& maker) : maker_(maker) {
    std::lock_guard lock(maker.mutex_);
    if (maker.buffers_.empty()) return;
    buffer_ = std::move(maker.buffers_.back());
    maker.buffers_.pop_back();
  }
  ~Scratch() {
    std::lock_guard lock(maker_.mutex_);
    maker_.buffers_.push_back(std::move(buffer_));
  }
  std::byte* of(int64_t bytes) {
    if (buffer_.size() < static_cast<size_t>(bytes)) buffer_.resize(static_cast<size_t>(bytes));
    return buffer_.data();
  }

 private:
  const ShardMaker& maker_;
  std::vector<std::byte> buffer_;
};

ShardMaker::ShardMaker(const std::string& directory, const std::string& draft_directory, int64_t tp)
    : config_(load_model_config(demand_no_shards(directory, "a checkpoint"))),
      draft_config_(draft_directory.empty() ? nullptr
                                            : std::make_unique<DraftConfig>(load_draft_config(
                                                  demand_no_shards(draft_directory, "a drafter's checkpoint")))),
      partition_(make_partition(config_, draft_config_.get(), tp)), checkpoint_(Checkpoint::open(directory)) {
  if (draft_config_) {
    check_draft_fits(*draft_config_, config_, draft_directory);
    draft_ = std::make_unique<Checkpoint>(Checkpoint::open_draft(draft_directory));
  }
  std::set<std::string> used, draft_used;
  for (const ShardTensor& tensor : partition_.tensors)
    tensors_.push_back(resolve(tensor, tensor.part == Part::drafter ? draft_used : used));
  check_all_used(checkpoint_, used);
  if (draft_) check_all_used(*draft_, draft_used);
  for (size_t i = 0; i < tensors_.size(); ++i)
    for (int64_t piece = 0; piece < n_pieces(i); ++piece)
      largest_piece_ = std::max(largest_piece_, piece_bytes(i, piece));
}

ShardMaker::~ShardMaker() {
  for (const auto& [path, descriptor] : descriptors_) ::close(descriptor);
}

ShardMaker::Tensor ShardMaker::resolve(const ShardTensor& tensor, std::set<std::string>& used) const {
  const Checkpoint& checkpoint = tensor.part == Part::drafter ? *draft_ : checkpoint_;
  Tensor out;
  const bool int4 = tensor.transform != Transform::copy;
  for (int64_t expert = 0; expert < (int4 ? tensor.experts.n_experts : 1); ++expert) {
    for (const SourceTensor& source : tensor.sources) {
      const std::string name = name_of(source.name, expert);
      out.sources.push_back(&checkpoint.require(name, source.dtype, source.shape));
      used.insert(name);
    }
    if (int4) out.pieces.push_back({0, expert, expert + 1});
  }
  for (size_t b = 0; b < tensor.boxes.size(); ++b) {
    const Box& box = tensor.boxes[b];
    const int64_t slice = box.extent[1] * box.extent[2] * static_cast<int64_t>(dtype_size(tensor.dtype));
    const int64_t step = std::max<int64_t>(1, kPieceBytes / partition_.tp / slice);
    for (int64_t begin = 0; begin < box.extent[0]; begin += step)
      out.pieces.push_back({b, begin, std::min(begin + step, box.extent[0])});
  }
  return out;
}

void ShardMaker::check_all_used(const Checkpoint& checkpoint, const std::set<std::string>& used) const {
  constexpr std::string_view kShape = ".weight_shape";
  for (const std::string& name : checkpoint.names()) {
    if (used.count(name) > 0) continue;
    const std::string packed = name.substr(0, name.size() - std::min(name.size(), kShape.size())) + ".weight_packed";
    if (ends_with(name, kShape) && used.count(packed) > 0) continue;
    fail(Status::unsupported, checkpoint.directory() + ": " + name, "a tensor that no shard would hold",
         "only the tensors that config.json calls for");
  }
}

int64_t ShardMaker::n_pieces(size_t tensor) const { return static_cast<int64_t>(tensors_.at(tensor).pieces.size()); }

const ShardMaker::Piece& ShardMaker::piece_at(size_t tensor, int64_t piece) const {
  check_argument(tensor < tensors_.size(), "tensor", std::to_string(tensor),
                 "less than " + std::to_string(tensors_.size()));
  check_argument(piece >= 0 && piece < n_pieces(tensor), "piece", std::to_string(piece),
                 "0 to " + std::to_string(n_pieces(tensor) - 1));
  return tensors_[tensor].pieces[static_cast<size_t>(piece)];
}

int64_t ShardMaker::piece_bytes(size_t tensor, int64_t piece) const {
  const Piece& of = piece_at(tensor, piece);
  const ShardTensor& shard = partition_.tensors[tensor];
  if (shard.transform != Transform::copy) return shard.bytes() / shard.experts.n_experts;
  const Box& box = shard.boxes[of.box];
  return (of.end - of.begin) * box.extent[1] * box.extent[2] * static_cast<int64_t>(dtype_size(shard.dtype));
}

std::vector<std::string> ShardMaker::files() const {
  std::set<std::string> names;
  for (const Tensor& tensor : tensors_)
    for (const TensorView* source : tensor.sources) names.insert(source->file);
  return {names.begin(), names.end()};
}

void ShardMaker::read(const TensorView& source, int64_t begin, int64_t bytes, std::byte* to) const {
  int descriptor = -1;
  {
    std::lock_guard lock(mutex_);
    const auto known = descriptors_.find(source.file);
    if (known != descriptors_.end()) {
      descriptor = known->second;
    } else {
      descriptor = ::open(source.file.c_str(), O_RDONLY | O_CLOEXEC);
      if (descriptor < 0) fail(Status::io, source.file, std::strerror(errno), "a readable file");
      descriptors_[source.file] = descriptor;
    }
  }
  auto at = static_cast<off_t>(source.offset) + begin;
  while (bytes > 0) {
    const ssize_t n = ::pread(descriptor, to, static_cast<size_t>(bytes), at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(Status::io, source.file + ": " + source.name, std::strerror(errno), "readable data");
    if (n == 0)
      fail(Status::bad_file, source.file + ": " + source.name, "truncated since it was opened",
           std::to_string(bytes) + " bytes more");
    to += n;
    at += n;
    bytes -= n;
  }
}

void ShardMaker::make(size_t tensor, int64_t piece, std::span<std::byte* const> out) const {
  const Piece& of = piece_at(tensor, piece);
  if (partition_.tensors[tensor].transform == Transform::copy) make_copy(tensor, of, out);
  else make_int4(tensor, of, out);
}

void ShardMaker::make_copy(size_t tensor, const Piece& piece, std::span<std::byte* const> out) const {
  const ShardTensor& shard = partition_.tensors[tensor];
  const Box& box = shard.boxes[piece.box];
  const auto element = static_cast<int64_t>(dtype_size(shard.dtype));
  const TensorView& source = *tensors_[tensor].sources[box.source];
  Scratch scratch(*this);
  // Columns of the same rows, or the same bytes for all: one reading serves every rank.
  const bool shared = box.rank_step < box.stride[0];
  Region have{0, 0};
  std::byte* data = nullptr;
  for (size_t rank = 0; rank < out.size(); ++rank) {
    if (!out[rank]) continue;
    const Region need = region_of(box, piece.begin, piece.end, static_cast<int64_t>(rank));
    if (!shared && is_whole(box)) {
      read(source, need.begin * element, (need.end - need.begin) * element, out[rank]);
      continue;
    }
    if (!data || !shared) {
      have = need;
      if (shared) have.end = region_of(box, piece.begin, piece.end, static_cast<int64_t>(out.size()) - 1).end;
      data = scratch.of((have.end - have.begin) * element);
      read(source, have.begin * element, (have.end - have.begin) * element, data);
    }
    copy_box(box, piece.end - piece.begin, static_cast<size_t>(element), data + (need.begin - have.begin) * element,
             out[rank]);
  }
}

const std::byte* ShardMaker::read_expert(size_t tensor, const Piece& piece, size_t rank, Scratch& scratch) const {
  const ShardTensor& shard = partition_.tensors[tensor];
  const auto bytes_of = [&](const SourceTensor& source) {
    return n_rows_of(shard, source, partition_.tp) * row_bytes(source);
  };
  int64_t total = 0;
  for (const SourceTensor& source : shard.sources) total += bytes_of(source);
  std::byte* const data = scratch.of(total);
  std::byte* to = data;
  for (size_t i = 0; i < shard.sources.size(); ++i) {
    const int64_t bytes = bytes_of(shard.sources[i]);
    read(*tensors_[tensor].sources[static_cast<size_t>(piece.begin) * shard.sources.size() + i],
         shard.experts.by_rows ? static_cast<int64_t>(rank) * bytes : 0, bytes, to);
    to += bytes;
  }
  return data;
}

void ShardMaker::make_int4(size_t tensor, const Piece& piece, std::span<std::byte* const> out) const {
  const ShardTensor& shard = partition_.tensors[tensor];
  const ExpertMatrix& matrix = shard.experts;
  Scratch scratch(*this);
  const std::byte* data = nullptr;
  for (size_t rank = 0; rank < out.size(); ++rank) {
    if (!out[rank]) continue;
    if (!data || matrix.by_rows) data = read_expert(tensor, piece, rank, scratch);
    const auto rows = rank_rows(shard, partition_.tp, static_cast<int64_t>(rank), data);
    if (shard.transform == Transform::int4_tiles) int4_to_tiles(rows, matrix.n_in, out[rank]);
    else scales_to_tiles(rows, matrix.n_in / kTileGroup, out[rank]);
  }
}

namespace {

std::string hexadecimal(std::byte value) {
  char text[8];
  std::snprintf(text, sizeof text, "0x%02x", std::to_integer<unsigned>(value));
  return text;
}

// Names the first byte in which the two differ; `begin`: where they begin in `what`.
void demand_equal(const std::string& file, const ShardTensor& tensor, int64_t begin, const std::string& what,
                  const std::byte* made, const std::byte* expected, size_t bytes) {
  if (std::memcmp(made, expected, bytes) == 0) return;
  const auto at = std::mismatch(made, made + bytes, expected).first - made;
  fail(Status::bad_file, file + ": " + tensor.name,
       "byte " + hexadecimal(made[at]) + " at " + std::to_string(begin + at) + " of " + what,
       hexadecimal(expected[at]) + ", as the checkpoint says");
}

}  // namespace

void ShardMaker::compare(size_t tensor, int64_t piece, std::span<const std::byte* const> made) const {
  const Piece& of = piece_at(tensor, piece);
  if (partition_.tensors[tensor].transform == Transform::copy) compare_copy(tensor, piece, made);
  else compare_int4(tensor, of, made);
}

void ShardMaker::compare_copy(size_t tensor, int64_t piece, std::span<const std::byte* const> made) const {
  const int64_t bytes = piece_bytes(tensor, piece);
  Scratch scratch(*this);
  std::byte* data = scratch.of(bytes * static_cast<int64_t>(made.size()));
  std::vector<std::byte*> expected;
  for (size_t rank = 0; rank < made.size(); ++rank) expected.push_back(data + static_cast<int64_t>(rank) * bytes);
  make_copy(tensor, piece_at(tensor, piece), expected);
  int64_t begin = 0;
  for (int64_t before = 0; before < piece; ++before) begin += piece_bytes(tensor, before);
  for (size_t rank = 0; rank < made.size(); ++rank)
    demand_equal(rank_file_name(static_cast<int64_t>(rank), partition_.tp), partition_.tensors[tensor], begin, "the tensor",
                 made[rank], expected[rank], static_cast<size_t>(bytes));
}

void ShardMaker::compare_int4(size_t tensor, const Piece& piece, std::span<const std::byte* const> made) const {
  const ShardTensor& shard = partition_.tensors[tensor];
  const ExpertMatrix& matrix = shard.experts;
  Scratch scratch(*this), restored(*this);
  const std::byte* data = nullptr;
  const size_t row = static_cast<size_t>(shard.transform == Transform::int4_tiles ? matrix.n_in / 2
                                                                                    : matrix.n_in / kTileGroup * 2);
  std::byte* back = restored.of(matrix.n_out * static_cast<int64_t>(row));
  std::vector<std::byte*> rows;
  for (int64_t i = 0; i < matrix.n_out; ++i) rows.push_back(back + i * static_cast<int64_t>(row));
  for (size_t rank = 0; rank < made.size(); ++rank) {
    if (shard.transform == Transform::int4_tiles) tiles_to_int4(made[rank], matrix.n_in, rows);
    else tiles_to_scales(made[rank], matrix.n_in / kTileGroup, rows);
    if (!data || matrix.by_rows) data = read_expert(tensor, piece, rank, scratch);
    const auto expected = rank_rows(shard, partition_.tp, static_cast<int64_t>(rank), data);
    const std::string file = rank_file_name(static_cast<int64_t>(rank), partition_.tp);
    for (size_t i = 0; i < rows.size(); ++i)
      demand_equal(file, shard, 0, "row " + std::to_string(i) + " of expert " + std::to_string(piece.begin), rows[i], expected[i], row);
  }
}

}  // namespace kdt
