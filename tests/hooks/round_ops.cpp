// Draft trees of a round's streams, from build to accept.
#include "hooks.h"

using namespace kdt;
using hooks::Array;
using hooks::Backend;
using hooks::CountArgument;
using hooks::guarded;
using hooks::Staged;

namespace {

struct NodesArgument {
  Array token, parent, depth, weight;
};

TreeNodes nodes_out(Staged& s, const NodesArgument* nodes) {
  return {s.out<int32_t>(&nodes->token), s.out<int32_t>(&nodes->parent), s.out<int32_t>(&nodes->depth),
          s.out<float>(&nodes->weight)};
}

// The seam has one type for trees that are written and trees that are read: these are read.
TreeNodes nodes_in(Staged& s, const NodesArgument* nodes) {
  const auto ids = [&s](const Array& array) { return const_cast<int32_t*>(s.in<int32_t>(&array)); };
  return {ids(nodes->token), ids(nodes->parent), ids(nodes->depth), const_cast<float*>(s.in<float>(&nodes->weight))};
}

}  // namespace

// Sizes of the structs that the caller lays out itself.
KDT_HOOK void kdt_hook_struct_bytes(int64_t* sampling, int64_t* plan, int64_t* counts, int64_t* tables) {
  *sampling = sizeof(Sampling);
  *plan = sizeof(StreamPlan);
  *counts = sizeof(RoundCounts);
  *tables = sizeof(spec::CutTables);
}

KDT_HOOK const char* kdt_hook_build_trees(Backend* b, const CountArgument* n_streams, const Array* plan, int64_t depths,
                                          int64_t k, const Array* token, const Array* log_q, const NodesArgument* nodes,
                                          const Array* n_nodes) {
  return guarded([&] {
    Staged s(*b);
    const BuildTreesArgs args{s.count(n_streams), s.in<StreamPlan>(plan), depths, k, s.in<int32_t>(token),
                              s.in<float>(log_q), nodes_out(s, nodes), s.out<int32_t>(n_nodes)};
    s.run([&](Ops& ops) { ops.build_trees(args); });
  });
}

KDT_HOOK const char* kdt_hook_cut(Backend* b, const CountArgument* n_streams, const Array* plan, const NodesArgument* nodes,
                                  const Array* tables, const Array* n_nodes, const Array* outlook) {
  return guarded([&] {
    Staged s(*b);
    const CutArgs args{s.count(n_streams), s.in<StreamPlan>(plan), nodes_in(s, nodes), s.in<spec::CutTables>(tables),
                       s.out<int32_t>(n_nodes), s.out<double>(outlook)};
    s.run([&](Ops& ops) { ops.cut(args); });
  });
}

// live: out [3], rows, rows of logits and those of them that are sampled.
KDT_HOOK const char* kdt_hook_lay_rows(Backend* b, const CountArgument* n_streams, const Array* plan, const Array* counts,
                                       const NodesArgument* nodes, const Array* n_nodes, const Array* token,
                                       const Array* position, const Array* stream, const Array* parent,
                                       const Array* visible, const Array* logits_row, const Array* sample_token,
                                       const Array* sample_position, const Array* sample_stream,
                                       const Array* sample_parent, const Array* first_row, const Array* live) {
  return guarded([&] {
    Staged s(*b);
    auto* n = s.out<int32_t>(live);
    const LayRowsArgs args{s.count(n_streams), s.in<StreamPlan>(plan), s.in<RoundCounts>(counts), nodes_in(s, nodes),
                           s.in<int32_t>(n_nodes), s.out<int32_t>(token), s.out<int32_t>(position),
                           s.out<int32_t>(stream), s.out<int32_t>(parent), s.out<int32_t>(visible),
                           s.out<int32_t>(logits_row), s.out<int32_t>(sample_token), s.out<int32_t>(sample_position),
                           s.out<int32_t>(sample_stream), s.out<int32_t>(sample_parent), s.out<int32_t>(first_row),
                           n, n + 1, n + 2};
    s.run([&](Ops& ops) { ops.lay_rows(args); });
  });
}

// live: out [2], rows that are kept and entries of scored_row.
KDT_HOOK const char* kdt_hook_accept(Backend* b, const CountArgument* n_streams, const Array* plan, const Array* counts,
                                     const NodesArgument* nodes, const Array* n_nodes, const Array* first_row,
                                     const Array* position, const Array* sample, const Array* path, const Array* token,
                                     const Array* n_path, const Array* kept_row, const Array* kept_position,
                                     const Array* kept_stream, const Array* scored_row, const Array* scored_token,
                                     const Array* live) {
  return guarded([&] {
    Staged s(*b);
    auto* n = s.out<int32_t>(live);
    const AcceptArgs args{s.count(n_streams), s.in<StreamPlan>(plan), s.in<RoundCounts>(counts), nodes_in(s, nodes),
                          s.in<int32_t>(n_nodes), s.in<int32_t>(first_row), s.in<int32_t>(position),
                          s.in<int32_t>(sample), s.out<int32_t>(path), s.out<int32_t>(token), s.out<int32_t>(n_path),
                          s.out<int32_t>(kept_row), s.out<int32_t>(kept_position), s.out<int32_t>(kept_stream), n,
                          s.out<int32_t>(scored_row), s.out<int32_t>(scored_token), n + 1};
    s.run([&](Ops& ops) { ops.accept(args); });
  });
}
