// How many nodes of their trees the automatic streams of a round verify, all together: what a node is worth is its
// probability to be accepted, what it costs is time that every stream of the round waits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "spec/budget.h"
#include "spec/outlook.h"

namespace kdt::spec {

constexpr int64_t kCalibrations = 3;   // greedy; temperature > 0, candidates ranked plainly or by noise

// Decided by the host before the round. Times in seconds.
struct CutTables {
  double lambda;                             // committed tokens a second
  double verify[CostTable::kEntries];        // of a pass, by CostTable::kRows
  Calibration::Counts calibration[kCalibrations];
  int32_t base_rows;                         // verified in any case: prompt rows and every stream's root
  int32_t n_roots;                           // streams with a tree: each has a bonus token
  int32_t most_rows;                         // that the pass has room for, base_rows and all
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
// choose_nodes, as far as there is room. Lowers n_nodes of those trees. Returns what verifying more or fewer of them was expected to
// bring, a mean over the automatic streams; zeros when there is none. Allocates nothing once its memory has grown.
class JointCut {
 public:
  Outlook operator()(std::span<CutTree> trees, const CutTables& tables);

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
