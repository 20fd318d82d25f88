// How many nodes of their trees the automatic streams of a round verify, all together: what a node is worth is its
// probability to be accepted, what it costs is time that every stream of the round waits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "spec/budget.h"

namespace kdt::spec {

constexpr int64_t kCalibrations = 3;   // greedy; temperature > 0, candidates ranked plainly or by noise

// Decided by the host before the round. Times in seconds.
struct CutTables {
  double lambda;                             // committed tokens a second
  double draft_seconds;                      // of this round's draft, the automatic streams' share
  double verify[CostTable::kEntries];        // of a pass, by CostTable::kRows
  Calibration::Counts calibration[kCalibrations];
  int32_t base_rows;                         // verified in any case: prompt rows and every stream's root
  int32_t n_roots;                           // streams with a tree: each has a bonus token
};

// One stream's tree, node 0 the root; calibration < 0: all of its nodes are verified.
struct CutTree {
  int64_t n_nodes;                           // without the root
  const int32_t* parent;
  const float* weight;                       // log of the path's probability
  int32_t calibration;
  bool drafted;
};

// Nodes of all automatic streams in one order, best first, each stream's in its own order; then the best beginning of it by
// choose_nodes. Lowers n_nodes of those trees. Returns what a draft was worth to each automatic stream: expected tokens less
// those that rounds without a draft yield in the same time, whatever λ was of late; 0 when there is no such stream. Allocates nothing once its memory has grown.
class JointCut {
 public:
  double operator()(std::span<CutTree> trees, const CutTables& tables);

 private:
  struct Head {
    double gain;
    size_t tree;
    size_t node;     // of gains_
  };
  std::vector<double> gains_, merged_;       // of all trees, one after the other; in the order they are taken
  std::vector<size_t> first_, taken_from_;   // first gain of each tree; whose node each merged one is
  std::vector<Head> heads_;
};

}  // namespace kdt::spec
