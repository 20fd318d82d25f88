// What the fold of latent attention has to do, from the rows of a pass alone, and how a block finds its part of it.
//
// An item is up to group_rows rows of one stream x one segment of its positions; or a draft node x a segment of its own, from
// that of `visible` on. Draft nodes' items come first, which are short, then every run of rows of one stream, the last segments,
// which are long, first.
#pragma once

#include <climits>

#include "cuda/attention.cuh"

namespace kdt::cuda {

static_assert(kMaxPassRows <= kFoldThreads);

// What a block folds: rows [first, first + n) of the pass over positions [begin, end).
struct Item {
  int first, n, segment, begin, end;
  int head_block;
  int own;                        // a draft node's position, or -1
  int visible;                    // positions from here on are in scratch: of a draft node's own segments
  const int32_t* page_table;
};

// The segments a row reads from pages, from the first on.
__device__ inline int paged_segments(const Pass& pass, int row) {
  return pass.parent[row] < 0 ? LatentSegments::of(pass.position[row]) + 1 : LatentSegments::of(pass.visible[row]);
}

// The sum of the values of threads up to this one.
__device__ inline int running_sum(int value, int* of_warps) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += below;
  }
  __syncthreads();                // of_warps may be in use
  if (lane == kWarp - 1) of_warps[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; ++w) value += of_warps[w];
  return value;
}

// What the fold of latent attention is given.
struct MlaFold {
  Pass pass;
  const StreamPages* streams;
  const std::byte* pages;
  int64_t page_stride;
  const std::byte* scratch;
  int32_t row_bytes;              // of a page and of scratch
  int32_t query_dims, value_tiles;
  int32_t n_heads, heads, head_blocks;   // heads of an item, and how many items make up all
  int32_t group_rows, columns, stages;
  float scale;                    // into powers of 2
  int32_t* taken;                 // items that blocks have taken besides their first: 0 when absorb has ended
  const bf16* queries;
  uint16_t* means;                // fp16 [rows][heads][segments][width]: o / l
  float2* extremes;               // [rows][heads][segments] m, l
  int32_t n_segments;
};

// What the thread of a row knows of the items: those of its own segments, if it is a draft node, and those of the run of rows
// of one stream that it begins. An item of a run is group (i - begin) % groups of its rows, of segment last - (i - begin) / groups.
struct RowPlan {
  int own_begin, own_end, own_last;
  int begin, end, n_rows, groups, last;
};
struct Plan : RowPlan {
  int n_items;                    // of all
};

struct PlanShared {
  int of_warps[kWarp], totals[2];
  int run_begin[kMaxPassRows + 1], run_segments[kMaxPassRows];
};
static_assert(sizeof(PlanShared) <= kWeightsBytes);

// By a block, of at least as many threads as a pass has rows.
__device__ inline Plan make_plan(const Pass& pass, int group_rows, PlanShared& shared) {
  Plan plan{};
  const int i = threadIdx.x, last = static_cast<int>(blockDim.x) - 1, row = pass.first + i, live = pass.live();
  const bool here = i < live, draft = here && pass.parent[row] >= 0;
  const int own_first = draft ? LatentSegments::of(pass.visible[row]) : 0;
  plan.own_last = draft ? LatentSegments::of(pass.position[row]) : -1;
  const int n_own = draft ? plan.own_last - own_first + 1 : 0;
  plan.own_end = running_sum(n_own, shared.of_warps);
  plan.own_begin = plan.own_end - n_own;
  const bool begins = here && (i == 0 || pass.stream[row] != pass.stream[row - 1]);
  const int run = running_sum(begins, shared.of_warps) - 1;
  if (i < kMaxPassRows) shared.run_segments[i] = 0;
  if (i == last) shared.totals[0] = plan.own_end, shared.run_begin[run + 1] = max(live, 0);
  __syncthreads();
  if (begins) shared.run_begin[run] = i;
  if (here) atomicMax(&shared.run_segments[run], paged_segments(pass, row));
  __syncthreads();
  plan.n_rows = begins ? shared.run_begin[run + 1] - i : 0;
  plan.groups = (plan.n_rows + group_rows - 1) / group_rows;
  const int segments = begins ? shared.run_segments[run] : 0, n = plan.groups * segments;
  plan.last = segments - 1;
  plan.end = shared.totals[0] + running_sum(n, shared.of_warps);
  plan.begin = plan.end - n;
  if (i == last) shared.totals[1] = plan.end;
  __syncthreads();
  plan.n_items = shared.totals[1];
  return plan;
}

// The same in every warp, for as many rows as it has lanes, and what a lane knows of its row.
struct LanePlan {
  Plan plan;
  int position, visible, paged;
  const int32_t* page_table;
};

__device__ inline int running_sum_of_warp(int value) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, value, step);
    if (static_cast<int>(threadIdx.x) % kWarp >= step) value += below;
  }
  return value;
}

__device__ inline LanePlan plan_of_lane(const Pass& pass, int group_rows, const StreamPages* streams) {
  LanePlan of{};
  Plan& plan = of.plan;
  const int lane = threadIdx.x % kWarp, row = pass.first + lane, live = max(pass.live(), 0);
  const bool here = lane < live;
  int parent = -1, stream = -1;
  if (here) parent = pass.parent[row], stream = pass.stream[row], of.position = pass.position[row], of.visible = pass.visible[row];
  const bool draft = parent >= 0;
  const int first_own = LatentSegments::of(of.visible);
  plan.own_last = LatentSegments::of(of.position);
  if (here) of.paged = draft ? first_own : plan.own_last + 1, of.page_table = streams[stream].page_table;
  const int n_own = draft ? plan.own_last - first_own + 1 : 0;
  plan.own_end = running_sum_of_warp(n_own);
  plan.own_begin = plan.own_end - n_own;

  const int stream_before = __shfl_up_sync(0xffffffffu, stream, 1);
  const bool begins = here && (lane == 0 || stream != stream_before);
  const unsigned later = __ballot_sync(0xffffffffu, begins) & ~(0xffffffffu >> (kWarp - 1 - lane));
  const int run_end = later ? __ffs(later) - 1 : live;
  int segments = of.paged;        // the most of the run's rows from here on
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int further = __shfl_down_sync(0xffffffffu, segments, step);
    if (lane + step < run_end) segments = max(segments, further);
  }
  plan.n_rows = begins ? run_end - lane : 0;
  plan.groups = (plan.n_rows + group_rows - 1) / group_rows;
  plan.last = segments - 1;
  const int n = begins ? plan.groups * segments : 0;
  plan.end = __shfl_sync(0xffffffffu, plan.own_end, kWarp - 1) + running_sum_of_warp(n);
  plan.begin = plan.end - n;
  plan.n_items = __shfl_sync(0xffffffffu, plan.end, kWarp - 1);
  return of;
}

// What `row` of the pass sees of an item's segment, as the end of its positions; 0 where another item has them.
__device__ inline int seen_end(int position, int visible, int paged, const Item& item) {
  if (item.own >= 0) return position + 1;
  return item.segment < paged ? min(position + 1, visible) : 0;
}
__device__ inline int seen_end(const Pass& pass, int row, const Item& item) {
  row += pass.first;
  return seen_end(pass.position[row], pass.visible[row], paged_segments(pass, row), item);
}

// The row's part of an item of the plan: rows [first, first + n), the segment, whether it is a draft node's own; false: none.
__device__ inline bool item_of_row(const RowPlan& plan, int row, int group_rows, int number, int (&part)[4]) {
  if (number >= plan.own_begin && number < plan.own_end) {
    part[0] = row, part[1] = 1, part[2] = plan.own_last - (number - plan.own_begin), part[3] = 1;
    return true;
  }
  if (number < plan.begin || number >= plan.end) return false;
  const int at = number - plan.begin, group = at % plan.groups;
  part[0] = row + group * group_rows, part[1] = min(group_rows, plan.n_rows - group * group_rows);
  part[2] = plan.last - at / plan.groups, part[3] = 0;
  return true;
}

// Finds an item below n_items. False: nothing of it is seen. All threads call it, and agree. By lanes: `end` becomes what the
// lane's row sees of it.
__device__ inline bool find_item(const LanePlan& of, int group_rows, int number, Item& item, int& end) {
  const int lane = threadIdx.x % kWarp;
  int part[4] = {};
  const unsigned found = __ballot_sync(0xffffffffu, item_of_row(of.plan, lane, group_rows, number, part));
#pragma unroll
  for (int i = 0; i < 4; ++i) part[i] = __shfl_sync(0xffffffffu, part[i], __ffs(found) - 1);
  const int first = part[0];
  item.segment = part[2], item.own = part[3] ? 0 : -1;
  end = lane >= first && lane < first + part[1] ? seen_end(of.position, of.visible, of.paged, item) : 0;
  const unsigned rows = __ballot_sync(0xffffffffu, end > 0);
  if (rows == 0) return false;
  item.first = __ffs(rows) - 1, item.n = kWarp - __clz(rows) - item.first;
  item.begin = LatentSegments::begin(item.segment);
  item.end = min(LatentSegments::begin(item.segment + 1), __reduce_max_sync(0xffffffffu, end));
  const int position = __shfl_sync(0xffffffffu, of.position, item.first), visible = __shfl_sync(0xffffffffu, of.visible, item.first);
  item.own = part[3] ? position : -1, item.visible = part[3] ? visible : INT_MAX;
  item.page_table = reinterpret_cast<const int32_t*>(
      __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(of.page_table), item.first));
  return true;
}

// What `part`, of item_of_row, is of a pass. All lanes call it.
__device__ inline bool item_of_part(const Pass& pass, const StreamPages* streams, const int (&part)[4], Item& item) {
  const int lane = threadIdx.x % kWarp, first = part[0], n = part[1];
  item.segment = part[2], item.own = part[3] ? 0 : -1;
  // Every warp finds the rows that take part, the first and the last of them, and how far they see.
  const int end[2] = {lane < n ? seen_end(pass, first + lane, item) : 0,
                      lane + kWarp < n ? seen_end(pass, first + lane + kWarp, item) : 0};
  const uint64_t rows = __ballot_sync(0xffffffffu, end[0] > 0) |
                        static_cast<uint64_t>(__ballot_sync(0xffffffffu, end[1] > 0)) << kWarp;
  if (rows == 0) return false;
  const int lowest = __ffsll(static_cast<long long>(rows)) - 1;
  item.first = first + lowest;
  item.n = kWarp * 2 - __clzll(static_cast<long long>(rows)) - lowest;
  item.begin = LatentSegments::begin(item.segment);
  item.end = min(LatentSegments::begin(item.segment + 1), __reduce_max_sync(0xffffffffu, max(end[0], end[1])));
  const int row = pass.first + item.first;
  item.visible = INT_MAX;
  if (item.own >= 0) item.own = pass.position[row], item.visible = pass.visible[row];
  item.page_table = streams[pass.stream[row]].page_table;
  return true;
}

// By a block, whose threads know their rows' plans. `shared`: four numbers.
__device__ inline bool find_item(const Pass& pass, const Plan& plan, int group_rows, const StreamPages* streams, int number,
                                 int32_t* shared, Item& item) {
  int part[4];
  if (item_of_row(plan, threadIdx.x, group_rows, number, part)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) shared[i] = part[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) part[i] = shared[i];
  return item_of_part(pass, streams, part, item);
}

// Pages of an item's tiles, lane i the i-th's.
__device__ inline int64_t pages_of(const Item& item) {
  const int tile = item.begin / kTile + static_cast<int>(threadIdx.x) % kWarp;
  return tile * kTile < min(item.end, item.visible) ? item.page_table[tile] : 0;
}

// Asks for the pages of an item's first two tiles.
__device__ inline void ask_for_pages(const MlaFold& p, const Item& item, int64_t pages) {
  const int lane = threadIdx.x % kWarp;
  if (lane < 2 && item.begin + lane * kTile < min(item.end, item.visible))
    ask_for(p.pages + pages * p.page_stride, kTile * p.row_bytes);
}

// Copies every eighth chunk of a row from `chunk` on, asynchronously: zeros, and nothing is read, from chunk `real` on.
__device__ inline void copy_row(SharedAddress to, int rows, const void* row, int chunk, int chunks, int real) {
  const std::byte* from = static_cast<const std::byte*>(row) + chunk * 16;
  const int group_bytes = latent_group_bytes(rows);
#pragma unroll 3
  for (int c = chunk; c < chunks; c += 8) {
    cp_async16(to, from, c < real);
    to += group_bytes, from += 128;
  }
}

}  // namespace kdt::cuda
