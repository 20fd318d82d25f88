#include "cpu/cpu_backend.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>

#include <hwy/targets.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <mutex>
#include <numeric>

#include "base/error.h"
#include "checkpoint/cpu_packing.h"
#include "checkpoint/int4_tiles.h"
#include "cpu/cpu_ops.h"
#include "cpu/kernels.h"

namespace kdt {
namespace cpu {
namespace {

// Rows from which a cheap row-wise operation is worth waking the other threads for.
constexpr int64_t kForkRows = 16;
constexpr size_t kSlabBytes = 64 << 20;
constexpr size_t kHugeFrom = 4 << 20;

void unmap(void* data, size_t bytes) { munmap(data, bytes); }

template <class T>
RowSet<T> row_set(T* base, const RowLayout& rows, int64_t width) {
  return {base, rows.stride > 0 ? rows.stride : width, rows.index};
}

const float* floats(const Act* x) { return static_cast<const float*>(x); }
float* floats(Act* x) { return static_cast<float*>(x); }

}  // namespace

CpuOps::CpuOps(int threads, Communicator* comm) : pool_(threads) {
  if (comm) ranks_ = std::make_unique<RankMeeting>(*comm);
  instruction_set_ = hwy::TargetName(hwy::SupportedAndGeneratedTargets().front());   // the chosen one
  for (int t = 0; t < pool_.size(); ++t) scratch_.push_back(allocate(kScratchBytes));
}

Buffer CpuOps::allocate(size_t bytes) {
  const size_t size = std::max<size_t>(bytes, 1);
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED)
    throw Error(Status::out_of_memory, "memory", std::to_string(size) + " bytes", "that much address space to be free");
  // Weights and KV are streamed once a pass: with small pages much of it would be page walks. A wish; refusal is fine.
  if (size >= kHugeFrom) madvise(data, size, MADV_HUGEPAGE);
  return Buffer(data, size, unmap);
}

size_t CpuOps::free_bytes() const {
  std::ifstream meminfo("/proc/meminfo");
  for (std::string field, rest; meminfo >> field; std::getline(meminfo, rest)) {
    size_t kib = 0;
    if (field == "MemAvailable:" && meminfo >> kib) return kib << 10;
  }
  struct sysinfo memory {};
  sysinfo(&memory);
  return static_cast<size_t>(memory.freeram) * memory.mem_unit;
}

// All threads over memory that no cache holds; the best of several passes.
double CpuOps::read_bandwidth() {
  constexpr size_t kWords = (size_t{256} << 20) / sizeof(uint64_t);
  constexpr int kPasses = 3;
  const Buffer memory = allocate(kWords * sizeof(uint64_t));
  std::memset(memory.data(), 1, memory.bytes());
  std::vector<uint64_t> sums(static_cast<size_t>(pool_.size()));
  double best = 0;
  for (int i = 0; i < kPasses; ++i) {
    StageTimer timer;
    pool_.run([&](int t) {
      const auto share = pool_.share(static_cast<int64_t>(kWords), t);
      sums[static_cast<size_t>(t)] = std::accumulate(memory.as<uint64_t>() + share.begin, memory.as<uint64_t>() + share.end,
                                                     sums[static_cast<size_t>(t)]);
    });
    best = std::max(best, static_cast<double>(memory.bytes()) / timer.lap());
  }
  // The sums are what keeps the reads: a compiler cannot know that they are not zero.
  return std::accumulate(sums.begin(), sums.end(), uint64_t{0}) == 0 ? 0 : best;
}

// A quarter of the machine, all ranks together: others live on it too.
size_t CpuOps::spare_bytes() const {
  struct sysinfo memory {};
  sysinfo(&memory);
  const size_t n_ranks = ranks_ ? static_cast<size_t>(ranks_->comm.size()) : 1;
  return static_cast<size_t>(memory.totalram) * memory.mem_unit / 4 / n_ranks;
}

void CpuOps::copy_in(Buffer& to, size_t offset, const void* from, size_t bytes) {
  std::memcpy(to.as<std::byte>() + offset, from, bytes);
}

void CpuOps::copy_out(const Buffer& from, size_t offset, void* to, size_t bytes) {
  std::memcpy(to, from.as<std::byte>() + offset, bytes);
}

// Weights are cut from slabs: a mapping a tensor would exceed the kernel's limit on a model of this family.
uint32_t* CpuOps::weight_words(size_t bytes) {
  const size_t size = static_cast<size_t>(round_up(static_cast<int64_t>(bytes), 64));
  if (slabs_.empty() || slab_used_ + size > slabs_.back().bytes()) {
    slabs_.push_back(allocate(std::max(size, kSlabBytes)));
    slab_used_ = 0;
  }
  auto* words = reinterpret_cast<uint32_t*>(slabs_.back().as<std::byte>() + slab_used_);
  slab_used_ += size;
  weight_bytes_ += bytes;
  return words;
}

const void* CpuOps::upload_raw(const std::byte* source, size_t bytes) {
  uint32_t* to = weight_words(bytes);
  std::memcpy(to, source, bytes);
  return to;
}

Matrix CpuOps::upload_matrix(std::span<const MatrixSource> stacked) {
  int64_t n_out = 0;
  const int64_t n_in = stacked.front().n_in;
  for (const auto& source : stacked) n_out += source.n_out;
  uint32_t* panels = weight_words(static_cast<size_t>(n_panels(n_out) * bf16_panel_words(n_in)) * 4);
  int64_t row = 0;
  for (const auto& source : stacked) {
    pack_bf16(source.bf16, source.n_out, n_in, source.row_stride > 0 ? source.row_stride : n_in, row, 1, panels);
    row += source.n_out;
  }
  return {panels, nullptr, n_out, n_in, 0};
}

// Panels of gate and up take turns: a thread reads the columns it shares out in one stream.
Matrix CpuOps::upload_gate_up(const MatrixSource& gate, const MatrixSource& up) {
  const int64_t words = bf16_panel_words(gate.n_in);
  uint32_t* panels = weight_words(static_cast<size_t>(2 * n_panels(gate.n_out) * words) * 4);
  pack_bf16(gate.bf16, gate.n_out, gate.n_in, gate.n_in, 0, 2, panels);
  pack_bf16(up.bf16, up.n_out, up.n_in, up.n_in, 0, 2, panels + words);
  return {panels, nullptr, gate.n_out + up.n_out, gate.n_in, 0};
}

Matrix CpuOps::upload_int4(const Int4Source& source, int64_t group) {
  const int64_t n = n_panels(source.n_out);
  uint32_t* panels = weight_words(static_cast<size_t>(n * int4_panel_words(source.n_in)) * 4);
  auto* scales = reinterpret_cast<bf16*>(weight_words(static_cast<size_t>(n * int4_panel_scales(source.n_in, group)) * 2));
  pack_int4(source.packed, source.scale, source.n_out, source.n_in, group, 1, panels, scales);
  return {panels, scales, source.n_out, source.n_in, group};
}

Matrix CpuOps::upload_int4_gate_up(const Int4Source& gate, const Int4Source& up, int64_t group) {
  const int64_t n = 2 * n_panels(gate.n_out);
  uint32_t* panels = weight_words(static_cast<size_t>(n * int4_panel_words(gate.n_in)) * 4);
  auto* scales = reinterpret_cast<bf16*>(weight_words(static_cast<size_t>(n * int4_panel_scales(gate.n_in, group)) * 2));
  pack_int4(gate.packed, gate.scale, gate.n_out, gate.n_in, group, 2, panels, scales);
  pack_int4(up.packed, up.scale, up.n_out, up.n_in, group, 2, panels + int4_panel_words(up.n_in),
            scales + int4_panel_scales(up.n_in, group));
  return {panels, scales, gate.n_out + up.n_out, gate.n_in, group};
}

namespace {

// Tiles taken back to a checkpoint's form, whose words are those of panels.
struct Untiled {
  std::vector<std::byte> words, scales;
  explicit Untiled(const TileSource& source)
      : words(static_cast<size_t>(source.n_out * source.n_in / 2)),
        scales(static_cast<size_t>(source.n_out * source.n_in / kTileGroup * 2)) {
    const int64_t n_groups = source.n_in / kTileGroup;
    std::vector<std::byte*> row, scale_row;
    for (int64_t i = 0; i < source.n_out; ++i) {
      row.push_back(words.data() + i * source.n_in / 2);
      scale_row.push_back(scales.data() + i * n_groups * 2);
    }
    tiles_to_int4(source.words, source.n_in, row);
    tiles_to_scales(source.scales, n_groups, scale_row);
  }
};

}  // namespace

Matrix CpuOps::upload_tiles(const TileSource& source) {
  const Untiled rows(source);
  return upload_int4({rows.words.data(), rows.scales.data(), source.n_out, source.n_in}, kTileGroup);
}

Matrix CpuOps::upload_tiles_gate_up(const TileSource& both) {
  const Untiled rows(both);
  const int64_t width = both.n_out / 2, half = width * both.n_in / 2, scale_half = width * both.n_in / kTileGroup * 2;
  return upload_int4_gate_up({rows.words.data(), rows.scales.data(), width, both.n_in},
                             {rows.words.data() + half, rows.scales.data() + scale_half, width, both.n_in}, kTileGroup);
}

MatrixGroup CpuOps::group(std::span<const Matrix> matrices) {
  const auto& kept = groups_.emplace_back(matrices.begin(), matrices.end());
  return {kept.data(), kept.data(), static_cast<int64_t>(kept.size())};
}

void CpuOps::submit(const SubmitKey*, const std::function<void()>& work) {
  times_ = {};
  timer_.restart();
  work();
}

void CpuOps::mark(Stage stage) { times_[stage] += timer_.lap(); }

void CpuOps::embed(const EmbedArgs& args) {
  const auto* table = static_cast<const bf16*>(args.table);
  float* out = args.partial ? args.partial : floats(args.out);
  for (int64_t i = 0; i < args.rows.n.now(); ++i) {
    const int64_t token = args.rows.token[i] - args.first_token;
    float* to = out + i * args.hidden;
    if (args.partial && (token < 0 || token >= args.n_tokens)) {
      std::fill_n(to, args.hidden, 0.0f);
      continue;
    }
    const bf16* from = table + token * args.hidden;
    for (int64_t d = 0; d < args.hidden; ++d) to[d] = bf16_to_float(from[d]);
  }
}

void CpuOps::rms_norm(const RmsNormArgs& args) {
  const auto x = row_set(floats(args.x), args.x_rows, args.width);
  const auto out = row_set(floats(args.out), args.out_rows, args.width);
  for_rows(args.n.now(), kForkRows, [&](int64_t i, int) { rms_norm_row(x[i], args.width, args.weight, args.eps, out[i]); });
}

void CpuOps::linear(const LinearArgs& args) {
  const int64_t n = args.n.now();
  if (n == 0) return;
  const Matrix& w = *args.weight;
  const auto x = row_set(floats(args.x), args.x_rows, w.n_in);
  const auto out = args.partial ? RowSet<float>{args.partial, w.n_out} : row_set(floats(args.out), args.out_rows, w.n_out);
  const bool accumulate = args.accumulate && !args.partial;
  const int64_t panels = n_panels(w.n_out);
  if (panels == 1) return linear_panels({x, n, &w, 0, 1, out, accumulate, scratch(0)});
  pool_.run([&](int t) {
    const auto share = pool_.share(panels, t);
    linear_panels({x, n, &w, share.begin, share.end, out, accumulate, scratch(t)});
  });
}

void CpuOps::copy(const CopyArgs& args) {
  std::memcpy(args.to, args.from, static_cast<size_t>(args.n.now() * args.width) * sizeof(float));
}

void CpuOps::mlp(const MlpArgs& args) {
  const int64_t n = args.n.now();
  if (n == 0) return;
  const int64_t width = args.down->n_in;
  pool_.run([&](int t) {
    const auto share = pool_.share(n_panels(width), t);
    gated_panels({{floats(args.x), args.gate_up->n_in, args.index}, n, args.gate_up, share.begin, share.end,
                  {floats(args.scratch), width}, false, scratch(t)}, width);
  });
  linear({n, args.scratch, args.down, args.out, true, {}, {0, args.index}, args.partial});
}

}  // namespace cpu

namespace {

struct Target {
  std::string name;
  int64_t bit;
};

// Best first. Highway's own list shrinks to what was chosen, so it is taken before the first choice.
const std::vector<Target>& targets() {
  static const std::vector<Target> all = [] {
    std::vector<Target> found;
    for (int64_t bit : hwy::SupportedAndGeneratedTargets()) found.push_back({hwy::TargetName(bit), bit});
    return found;
  }();
  return all;
}

}  // namespace

std::vector<std::string> cpu_targets() {
  std::vector<std::string> names;
  for (const Target& target : targets()) names.push_back(target.name);
  return names;
}

std::unique_ptr<Ops> make_cpu_ops(int threads, const std::string& target, Communicator* comm) {
  const Target* chosen = target.empty() ? &targets().front() : nullptr;
  std::string known;
  for (const Target& candidate : targets()) {
    if (candidate.name == target) chosen = &candidate;
    known += (known.empty() ? "" : ", ") + candidate.name;
  }
  check_argument(chosen != nullptr, "cpu_target", target, "an instruction set of this CPU: " + known);
  // Ranks as threads make their backends at the same time, and one of them may compute already.
  static std::mutex mutex;
  static int64_t in_use = 0;
  {
    std::lock_guard lock(mutex);
    if (in_use != chosen->bit) {
      hwy::SetSupportedTargetsForTest(chosen->bit);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
      in_use = chosen->bit;
    }
  }
  return std::make_unique<cpu::CpuOps>(threads > 0 ? threads : ThreadPool::available_cpus(), comm);
}

}  // namespace kdt
