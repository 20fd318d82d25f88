#include "spec/tree_build.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace kdt::spec {
namespace {

// A prefix that may become a node: a child of `parent` with candidate `rank` at its depth.
struct Entry {
  float weight;
  int32_t parent;
  int32_t rank;
};

class Builder {
  // Heap order: the top is the heaviest, and of equals the one with the least rank tuple.
  auto after() const {
    return [this](const Entry& a, const Entry& b) {
      if (a.weight != b.weight) return a.weight < b.weight;
      std::array<int32_t, kMaxDepths> ranks_a, ranks_b;
      const int64_t n_a = ranks(a, ranks_a.data()), n_b = ranks(b, ranks_b.data());
      return std::lexicographical_compare(ranks_b.begin(), ranks_b.begin() + n_b, ranks_a.begin(), ranks_a.begin() + n_a);
    };
  }

 public:
  Builder(const Candidates& candidates, const Nodes& nodes) : candidates_(candidates), nodes_(nodes) {
    nodes_.parent[0] = -1;
    nodes_.depth[0] = 0;
    nodes_.weight[0] = 0.0f;
  }

  int64_t count() const { return count_; }
  bool empty() const { return size_ == 0; }

  void push(int32_t parent, int32_t rank) {
    const int64_t depth = nodes_.depth[parent];
    if (depth >= candidates_.depths || rank >= candidates_.k) return;
    const float log_q = candidates_.log_q[depth * candidates_.k + rank];
    const float weight = std::isnan(log_q) ? -std::numeric_limits<float>::infinity() : nodes_.weight[parent] + log_q;
    heap_[size_++] = {weight, parent, rank};
    std::push_heap(heap_.begin(), heap_.begin() + size_, after());
  }

  Entry pop() {
    std::pop_heap(heap_.begin(), heap_.begin() + size_, after());
    return heap_[--size_];
  }

  int32_t add(const Entry& entry) {
    const auto node = static_cast<int32_t>(++count_);
    const int64_t depth = nodes_.depth[entry.parent];
    nodes_.token[node] = candidates_.token[depth * candidates_.k + entry.rank];
    nodes_.parent[node] = entry.parent;
    nodes_.depth[node] = static_cast<int32_t>(depth + 1);
    nodes_.weight[node] = entry.weight;
    rank_[static_cast<size_t>(node)] = entry.rank;
    return node;
  }

 private:
  int64_t ranks(const Entry& entry, int32_t* out) const {
    const int64_t n = nodes_.depth[entry.parent] + 1;
    out[n - 1] = entry.rank;
    int32_t node = entry.parent;
    for (int64_t i = n - 2; i >= 0; --i, node = nodes_.parent[node]) out[i] = rank_[static_cast<size_t>(node)];
    return n;
  }

  const Candidates& candidates_;
  const Nodes& nodes_;
  int64_t count_ = 0;
  // Every node leaves at most two new entries for the one it takes; the spine leaves one a node.
  std::array<Entry, 2 * kMaxBudget + 2> heap_;
  int64_t size_ = 0;
  std::array<int32_t, kMaxBudget + 1> rank_;
};

}  // namespace

int64_t build_tree(const Candidates& candidates, int64_t budget, bool spine, const Nodes& nodes) {
  Builder builder(candidates, nodes);
  if (budget <= 0 || candidates.depths <= 0 || candidates.k <= 0) return 0;
  int32_t tip = 0;
  if (spine) {
    // The siblings and the extension of spine nodes wait in the heap, where the rest of the tree comes from.
    for (int64_t depth = 0; depth < std::min(candidates.depths, budget); ++depth) {
      const float log_q = candidates.log_q[depth * candidates.k];
      const float weight = std::isnan(log_q) ? -std::numeric_limits<float>::infinity() : nodes.weight[tip] + log_q;
      const int32_t parent = tip;
      tip = builder.add({weight, parent, 0});
    }
    for (int32_t node = 1; node <= tip; ++node) builder.push(nodes.parent[node], 1);
  }
  builder.push(tip, 0);
  while (builder.count() < budget && !builder.empty()) {
    const Entry best = builder.pop();
    const int32_t node = builder.add(best);
    builder.push(best.parent, best.rank + 1);
    builder.push(node, 0);
  }
  return builder.count();
}

}  // namespace kdt::spec
