// DDTree's draft tree (Ringel et al., arXiv 2604.12989): the `budget` most probable prefixes of the drafter's factorised
// distribution, best first.
//
// A node's weight is fp32(parent's weight + log q). Nodes come in order of weight, descending; ties in lexicographic order
// of rank tuples (the path's ranks from the root, a prefix before its extensions). So the tree is prefix-closed, trees
// of smaller budgets are prefixes of larger ones, and equal inputs give equal trees on every backend.
#pragma once

#include <cstdint>

namespace kdt::spec {

constexpr int64_t kMaxBudget = 1024;
constexpr int64_t kMaxDepths = 255;   // block size - 1

struct Candidates {
  const int32_t* token;   // [depths, k], best first
  const float* log_q;     // [depths, k], descending; NaN counts as -inf
  int64_t depths, k;
};

// Arrays of budget + 1; index 0 is the root, whose token is left alone.
struct Nodes {
  int32_t* token;
  int32_t* parent;   // index of the parent; -1 for the root
  int32_t* depth;
  float* weight;     // log-probability of the path; 0 for the root
};

// Nodes built, without the root: budget, or fewer when there are no more prefixes. 0 <= budget <= kMaxBudget,
// depths <= kMaxDepths. With `spine` the first min(depths, budget) nodes are the top-1 chain, whatever its weight, and
// the best of the rest follow: still nested over budgets.
int64_t build_tree(const Candidates& candidates, int64_t budget, bool spine, const Nodes& nodes);

}  // namespace kdt::spec
