// The fold of latent attention on sm_90a for passes of many rows, such as chunks of prompts are: latent_wide.cuh's, with the same bits,
// but that no warp that brings or folds waits for the plan.
//
// A block takes units in turn: queries of one stream x up to eight tiles of its positions, several segments where they are short. Its
// queries are brought once. Or a draft node x a segment of its own. Tiles have the two slots in turn, whatever segment they are of, and
// the warpgroup that folds in a slot's turn scores and weighs them.
//
// Of the first warpgroup one warp plans, and posts a record of every segment; the other three bring what records say.
//
//   posted, done    a record is there; all who read it are done with it      summed   both have shown their part of a segment's l
#pragma once

#include "cuda/latent_wide.cuh"

namespace kdt::cuda {

constexpr int kUnitTiles = 8, kUnitPositions = kUnitTiles * kTile;   // of a unit, from a multiple of so many positions on
constexpr int kRecords = 4, kBringWarps = 3;
constexpr int64_t kMostManyRows = 2048;
constexpr int kMostPlans = kMostManyRows / kWarp;

struct Record {
  Item item;                            // first and n: the rows that the queries are of
  int32_t n_tiles, fresh, last;         // kDone: no more. Whether queries are others than the record's before; than the next one's
  int32_t end[kColumns], column[kColumns];
  int64_t pages[kUnitTiles];
};

struct ManyShared : WideTurns {
  uint64_t posted[kRecords], done[kRecords], summed[2];
  Record records[kRecords];
  int32_t first_unit[kMostPlans + 1];   // of every 32 rows
};
constexpr int64_t kManyBytes = 3 * kSlotBytes + static_cast<int64_t>(sizeof(ManyShared));

__device__ inline int unit_of(int segment) { return LatentSegments::begin(segment) / kUnitPositions; }
__device__ inline int first_segment(int unit) { return LatentSegments::of(unit * kUnitPositions); }

// The units of 32 rows, a lane each: of draft nodes' own segments one each, then of runs of rows of one stream. A unit of a run is
// group (i - begin) % groups of its rows, the last positions first.
struct UnitPlan {
  LanePlan rows;
  int own, begin, end, n_units;
  __device__ UnitPlan(const MlaFold& p, int index) {
    Pass pass = p.pass;
    pass.first += index * kWarp, pass.rows = min(kWarp, p.pass.rows - index * kWarp);
    rows = plan_of_lane(pass, p.group_rows, p.streams);
    own = __shfl_sync(0xffffffffu, rows.plan.own_end, kWarp - 1);
    const int n = rows.plan.n_rows > 0 && rows.plan.last >= 0 ? rows.plan.groups * (unit_of(rows.plan.last) + 1) : 0;
    end = own + running_sum_of_warp(n), begin = end - n;
    n_units = __shfl_sync(0xffffffffu, end, kWarp - 1);
  }
};

// By a block: how many units there are before every 32 rows.
__device__ inline void count_units(const MlaFold& p, ManyShared& shared) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, n_plans = (p.pass.rows + kWarp - 1) / kWarp;
  for (int i = warp; i < n_plans; i += kWideThreads / kWarp) {
    const int n = UnitPlan(p, i).n_units;
    if (lane == 0) shared.first_unit[i + 1] = n;
  }
  __syncthreads();
  if (warp == 0) {
    int before = 0;
    for (int i = lane; i < (n_plans + kWarp - 1) / kWarp * kWarp; i += kWarp) {
      const int sum = before + running_sum_of_warp(i < n_plans ? shared.first_unit[i + 1] : 0);
      if (i < n_plans) shared.first_unit[i + 1] = sum;
      before = __shfl_sync(0xffffffffu, sum, kWarp - 1);
    }
    if (lane == 0) shared.first_unit[0] = 0;
  }
  __syncthreads();
}

// The warp that plans.
class Planner {
 public:
  __device__ Planner(const MlaFold& p, ManyShared& shared) : p_(p), shared_(shared) {}

  __device__ void run() {
    const int n_plans = (p_.pass.rows + kWarp - 1) / kWarp, n_units = shared_.first_unit[n_plans] * p_.head_blocks;
    wait_for_previous();
    let_next_start();
    for (int number = blockIdx.x; number < n_units;) {
      int next = 0;                     // is on its way meanwhile
      if (lane() == 0) next = static_cast<int>(gridDim.x) + atomicAdd(p_.taken, 1);
      unit(n_plans, number / p_.head_blocks, number % p_.head_blocks);
      number = __shfl_sync(0xffffffffu, next, 0);
    }
    barrier_wait(&shared_.done[place_.at], place_.phase ^ 1);
    if (lane() == 0) shared_.records[place_.at].n_tiles = kDone, barrier_arrive(&shared_.posted[place_.at]);
  }

 private:
  __device__ static int lane() { return threadIdx.x % kWarp; }

  __device__ void unit(int n_plans, int number, int head_block) {
    int index = 0;
    for (int first = 0; first < n_plans; first += kWarp)
      index += __popc(__ballot_sync(0xffffffffu, first + lane() < n_plans && shared_.first_unit[first + lane() + 1] <= number));
    const UnitPlan units(p_, index);
    const LanePlan& rows = units.rows;
    number -= shared_.first_unit[index];
    Item item;
    item.head_block = head_block;
    if (number < units.own) {
      int end = 0;
      if (find_item(rows, p_.group_rows, number, item, end)) post(item, index, end, pages_of(item), 0, true, true);
      return;
    }
    const int run = __ffs(__ballot_sync(0xffffffffu, number >= units.begin && number < units.end)) - 1;
    const auto of_run = [&](int value) { return __shfl_sync(0xffffffffu, value, run); };
    const int groups = of_run(rows.plan.groups), last = of_run(rows.plan.last), at = number - of_run(units.begin);
    const int unit = unit_of(last) - at / groups, group = at % groups;
    item.first = run + group * p_.group_rows, item.n = min(p_.group_rows, of_run(rows.plan.n_rows) - group * p_.group_rows);
    item.own = -1, item.visible = INT_MAX;
    item.page_table = reinterpret_cast<const int32_t*>(
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(rows.page_table), run));
    const bool mine = lane() >= item.first && lane() < item.first + item.n;
    const int sees = min(rows.position + 1, rows.visible), paged = mine ? min(rows.paged, LatentSegments::count(sees)) : 0;
    const int begin = first_segment(unit), end = min(__reduce_max_sync(0xffffffffu, paged), first_segment(unit + 1));
    if (begin >= end) return;
    const int tile = unit * kUnitTiles + lane();
    const int furthest = __reduce_max_sync(0xffffffffu, begin < paged ? sees : 0);
    const int64_t pages = lane() < kUnitTiles && tile * kTile < furthest ? item.page_table[tile] : 0;
    for (item.segment = begin; item.segment < end; ++item.segment) {
      const int of_lane = item.segment < paged ? sees : 0;
      item.begin = LatentSegments::begin(item.segment);
      item.end = min(LatentSegments::begin(item.segment + 1), __reduce_max_sync(0xffffffffu, of_lane));
      post(item, index, of_lane, pages, item.begin / kTile - unit * kUnitTiles, item.segment == begin, item.segment + 1 == end);
    }
  }

  // `end`: what the lane's row sees. Pages: lane first_page has that of the segment's first tile.
  __device__ void post(const Item& item, int index, int end, int64_t pages, int first_page, bool fresh, bool last) {
    Record& record = shared_.records[place_.at];
    barrier_wait(&shared_.done[place_.at], place_.phase ^ 1);
#pragma unroll
    for (int column = lane(); column < kColumns; column += kWarp) {
      const int row = item.first + column / p_.heads, head = p_.heads * item.head_block + column % p_.heads;
      const int sees = __shfl_sync(0xffffffffu, end, row % kWarp);
      const bool seen = column < item.n * p_.heads && head < p_.n_heads && sees > 0;
      record.end[column] = seen ? sees : 0, record.column[column] = seen ? (index * kWarp + row) * p_.n_heads + head : -1;
    }
    const int64_t page = __shfl_sync(0xffffffffu, pages, (first_page + lane()) % kWarp);
    if (lane() < kUnitTiles) record.pages[lane()] = page;
    if (lane() == 0) {
      record.item = item;
      record.item.first += index * kWarp;
      record.n_tiles = (item.end - item.begin + kTile - 1) / kTile, record.fresh = fresh, record.last = last;
    }
    __syncwarp();
    if (lane() == 0) barrier_arrive(&shared_.posted[place_.at]);
    place_.next();
  }

  const MlaFold& p_;
  ManyShared& shared_;
  Place<kRecords> place_;
};

// A tile that is not a whole page, by the warps that bring.
__device__ inline void copy_tile(const MlaFold& p, const WideMemory& memory, const Record& record, int slot, int t, int seen, int in_page) {
  constexpr int kThreadRows = kBringWarps * kWarp / 8, kRows = (kTile + kThreadRows - 1) / kThreadRows;   // at a time; of a thread
  const int chunk = threadIdx.x % 8, first_row = threadIdx.x / 8;
  int node[kRows] = {};                 // of the thread's rows, where they are not in a page
  if (in_page < seen) {
    int ancestor = p.pass.first + record.item.first, at = record.item.own - (record.item.begin + t * kTile);
    for (; at >= seen; --at) ancestor = p.pass.parent[ancestor];
    for (; at >= in_page; --at) {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        if (at == first_row + i * kThreadRows) node[i] = ancestor;
      ancestor = p.pass.parent[ancestor];
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = first_row + i * kThreadRows;
    if (r >= kTile) break;
    const std::byte* from = r < in_page ? p.pages + record.pages[t] * p.page_stride + r * p.row_bytes
                                        : p.scratch + static_cast<int64_t>(node[i]) * p.row_bytes;
    copy_row(latent_chunk(memory.slot(slot), kTile, 0, r, chunk), kTile, from, chunk, kDimGroups * 8, r < seen ? kDimGroups * 8 : 0);
  }
  cp_async_commit();
  cp_async_wait<0>();
  fence_shared();
}

// The warps that bring; the first thread has the copy engine bring whole pages, and queries.
__device__ inline void bring_many(const WideFold& wide, const WideMemory& memory, ManyShared& shared) {
  const MlaFold& p = wide.fold;
  Place<kRecords> place;
  int tile = 0, units = 0;
  wait_for_previous();
  for (;; place.next()) {
    barrier_wait(&shared.posted[place.at], place.phase);
    const Record& record = shared.records[place.at];
    const int n_tiles = record.n_tiles;
    if (n_tiles == kDone) return;
    if (record.fresh) {
      if (units > 0) barrier_wait(&shared.queries_empty, (units - 1) % 2);
      ++units;
      if (threadIdx.x == 0) {
        barrier_arrive(&shared.queries_full, kDimGroups * p.heads * p.group_rows * 128);
#pragma unroll
        for (int group = 0; group < kDimGroups; ++group)
          bring_box(memory.queries() + group * kGroupBytes, wide.queries, group * 64, p.heads * record.item.head_block,
                    record.item.first, &shared.queries_full);
      }
    }
    for (int t = 0; t < n_tiles; ++t, ++tile) {
      const int slot = tile % 2, first = record.item.begin + t * kTile, seen = min(record.item.end - first, kTile);
      const int in_page = min(max(record.item.visible - first, 0), seen);
      if (tile > 1) barrier_wait(&shared.empty[slot], (tile / 2 - 1) % 2);
      uint64_t* full = &shared.full[slot];
      if (in_page < kTile) {
        copy_tile(p, memory, record, slot, t, seen, in_page);
        leave(full);
      } else if (threadIdx.x == 0) {
        barrier_arrive(full, kSlotBytes);
#pragma unroll
        for (int group = 0; group < kDimGroups; ++group)
          bring_box(memory.slot(slot) + group * kGroupBytes, wide.pages, group * 64, 0, static_cast<int>(record.pages[t]), full);
      } else if (threadIdx.x % kWarp == 0) {
        barrier_arrive(full);
      }
    }
    leave(&shared.done[place.at]);
  }
}

// A warpgroup that folds.
template <int kGroup>
__device__ void fold_many(const MlaFold& p, const WideMemory& memory, ManyShared& shared) {
  Place<kRecords> place;
  int tile = 0, units = 0;
  for (int segments = 0;; ++segments, place.next()) {
    barrier_wait(&shared.posted[place.at], place.phase);
    const Record& record = shared.records[place.at];
    const int n_tiles = record.n_tiles, turn = segments % 2;
    if (n_tiles == kDone) return;
    units += record.fresh;
    WideSums sums(record.end, record.column);
    for (int t = 0; t < n_tiles; ++t, ++tile) {
      const int slot = tile % 2, phase = tile / 2 % 2;
      const bool of_segment = t + 1 == n_tiles, of_queries = of_segment && record.last;   // the last
      if (slot == kGroup) {
        barrier_wait(&shared.queries_full, (units - 1) % 2);
        barrier_wait(&shared.full[kGroup], phase);
        sums.score(memory, kGroup);
        wgmma_wait();
        if (of_queries) leave(&shared.queries_empty);
        sums.find_most(record.item.begin + t * kTile, p.scale);
        sums.weigh(shared, kGroup);
        sums.show_weights(memory, shared, kGroup);
        sums.add_own(memory, kGroup, kGroup);
        if (of_segment) sums.show_l(shared, kGroup, turn), leave(&shared.summed[turn]);
        sums.wait_own();
        leave(&shared.empty[kGroup]);
      } else {
        if (of_queries) leave(&shared.queries_empty);
        barrier_wait(&shared.scored[1 - kGroup], phase);
        barrier_wait(&shared.full[1 - kGroup], phase);
        sums.add_other(memory, shared, 1 - kGroup, kGroup);
        if (of_segment) sums.show_l(shared, kGroup, turn), leave(&shared.summed[turn]);
        sums.wait_other();
        leave(&shared.empty[1 - kGroup]);
      }
    }
    barrier_wait(&shared.summed[turn], segments / 2 % 2);
    sums.store_means(shared, p.means, p.extremes, p.n_segments, record.item.segment, kGroup, turn);
    leave(&shared.done[place.at]);
  }
}

__global__ void __launch_bounds__(kWideThreads, 1) many_fold_kernel(const __grid_constant__ WideFold wide) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) std::byte memory_bytes[];
  const MlaFold& p = wide.fold;
  const WideMemory memory{shared_address(memory_bytes)};
  auto& shared = *reinterpret_cast<ManyShared*>(memory_bytes + 3 * kSlotBytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared.full[i], kBringWarps);
      barrier_init(&shared.empty[i], 8);
      barrier_init(&shared.scored[i], 4);
      barrier_init(&shared.summed[i], 8);
    }
    for (int i = 0; i < kRecords; ++i) {
      barrier_init(&shared.posted[i], 1);
      barrier_init(&shared.done[i], kBringWarps + 8);
    }
    barrier_init(&shared.queries_full, 1);
    barrier_init(&shared.queries_empty, 8);
    fence_shared();                     // for the copy engine
  }
  count_units(p, shared);
  const int group = warpgroup();
  if (group == 0) {
    give_registers<72>();
    if (threadIdx.x < kBringWarps * kWarp) bring_many(wide, memory, shared);
    else Planner(p, shared).run();
  } else {
    take_registers<216>();
    if (group == 1) fold_many<0>(p, memory, shared);
    else fold_many<1>(p, memory, shared);
  }
#endif
}

}  // namespace kdt::cuda
