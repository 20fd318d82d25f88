// Draft trees on the CPU, from build to accept: the work is in engine/spec, here it is done for every stream.
#include <algorithm>
#include <utility>

#include "cpu/cpu_backend.h"
#include "spec/accept.h"
#include "spec/tree_build.h"

namespace kdt::cpu {

void CpuOps::build_trees(const BuildTreesArgs& args) {
  for (int64_t i = 0; i < args.n_streams.now(); ++i) {
    const StreamPlan& plan = args.plan[i];
    const TreeNodes nodes = args.nodes.from(plan.first);
    nodes.token[0] = plan.root;
    nodes.parent[0] = -1;
    nodes.depth[0] = 0;
    nodes.weight[0] = 0;
    args.n_nodes[i] = 0;
    if (plan.budget <= 0) continue;
    const int64_t candidates = plan.draft * args.depths * args.k;
    args.n_nodes[i] = static_cast<int32_t>(
        spec::build_tree({args.token + candidates, args.log_q + candidates, plan.depths, args.k}, plan.budget,
                         plan.spine != 0, {nodes.token, nodes.parent, nodes.depth, nodes.weight}));
  }
}

void CpuOps::cut(const CutArgs& args) {
  cut_trees_.clear();
  for (int64_t i = 0; i < args.n_streams.now(); ++i) {
    const StreamPlan& plan = args.plan[i];
    const TreeNodes nodes = args.nodes.from(plan.first);
    cut_trees_.push_back({args.n_nodes[i], nodes.parent, nodes.weight, plan.calibration, plan.budget > 0});
  }
  const spec::Outlook outlook = joint_cut_(cut_trees_, *args.tables);
  std::copy(outlook.tokens.begin(), outlook.tokens.end(), args.outlook);
  for (size_t i = 0; i < cut_trees_.size(); ++i) args.n_nodes[i] = static_cast<int32_t>(cut_trees_[i].n_nodes);
}

void CpuOps::lay_rows(const LayRowsArgs& args) {
  const RoundCounts& counts = *args.counts;
  int32_t row = counts.n_prompt, sampled = counts.n_prompt_samples;
  for (int32_t i = 0; i < args.n_streams.now(); ++i) {
    const StreamPlan& plan = args.plan[i];
    const TreeNodes nodes = args.nodes.from(plan.first);
    const int32_t first_row = row, first_sampled = sampled;
    args.first_row[i] = first_row;
    for (int32_t node = 0; node <= args.n_nodes[i]; ++node, ++row, ++sampled) {
      const bool root = node == 0;
      args.token[row] = args.sample_token[sampled] = nodes.token[node];
      args.position[row] = args.sample_position[sampled] = plan.length + nodes.depth[node];
      args.stream[row] = args.sample_stream[sampled] = i;
      args.parent[row] = root ? -1 : first_row + nodes.parent[node];
      args.sample_parent[sampled] = root ? -1 : first_sampled + nodes.parent[node];
      args.visible[row] = plan.length + 1;
      args.logits_row[counts.n_scored + sampled] = row;
    }
  }
  *args.n_rows = row;
  *args.n_sampled = sampled;
  *args.n_logits = counts.n_scored + sampled;
}

void CpuOps::accept(const AcceptArgs& args) {
  const RoundCounts& counts = *args.counts;
  int32_t kept = counts.n_prompt, scored = counts.n_scored + counts.n_prompt_samples;
  for (int32_t i = counts.n_scored; i < scored; ++i)
    if (args.scored_token[i] >= 0) args.scored_token[i] = args.sample[i - counts.n_scored];
  for (int32_t i = 0; i < args.n_streams.now(); ++i) {
    const StreamPlan& plan = args.plan[i];
    const TreeNodes nodes = args.nodes.from(plan.first);
    const int32_t sampled = counts.n_prompt_samples + args.first_row[i] - counts.n_prompt;
    const int32_t* sample = args.sample + sampled;
    int32_t* path = args.path + plan.first;
    args.n_path[i] = static_cast<int32_t>(spec::accept(args.n_nodes[i], nodes.token, nodes.parent, sample, path));
    for (int32_t step = 0; step < args.n_path[i]; ++step, ++kept, ++scored) {
      const int32_t node = path[step], row = args.first_row[i] + node;
      args.token[plan.first + step] = sample[node];
      args.kept_row[kept] = row;
      args.kept_position[kept] = args.position[row];
      args.kept_stream[kept] = i;
      args.scored_row[scored] = counts.n_scored + sampled + node;
      args.scored_token[scored] = plan.wants_logprobs ? sample[node] : -1;
    }
  }
  *args.n_kept = kept;
  *args.n_logprobs = scored;
}

void CpuOps::count_experts(const CountExpertsArgs& args) {
  auto* seen = reinterpret_cast<uint8_t*>(scratch(0));
  std::fill_n(seen, args.n_experts, uint8_t{0});
  int32_t distinct = 0;
  for (int64_t i = 0; i < args.n.now() * args.k; ++i) distinct += !std::exchange(seen[args.expert[i]], uint8_t{1});
  *args.distinct = distinct;
}

}  // namespace kdt::cpu
