#include "runtime/round_memory.h"

#include <algorithm>

namespace kdt {

RoundInput::RoundInput(Ops& ops, const RoundSizes& sizes) {
  for (auto* one : {&n_drafts, &n_block_rows, &n_candidate_rows, &n_given}) arrays.add(*one, 1);
  arrays.add(counts, 1);
  arrays.add(cut, 1);
  arrays.add(pages, sizes.streams);
  arrays.add(sampling, sizes.streams);
  arrays.add(adjust, sizes.streams);
  arrays.add(plan, sizes.streams);
  arrays.add(draft_pages, sizes.streams);
  arrays.add(draft_sampling, sizes.streams);
  arrays.add(block_token, sizes.streams * sizes.block);
  arrays.add(block_start, sizes.streams);
  arrays.add(candidate_row, sizes.streams * sizes.block);
  arrays.add(candidate_position, sizes.streams * sizes.block);
  for (auto* rows : {&token, &position, &stream, &parent, &visible, &logits_row, &sample_token, &sample_position,
                     &sample_stream, &sample_parent, &kept_row, &kept_position, &kept_stream, &scored_row, &scored_token})
    arrays.add(*rows, sizes.rows);
  arrays.allocate(ops);
}

RoundOutput::RoundOutput(Ops& ops, const RoundSizes& sizes) {
  arrays.add(outlook, spec::Outlook::kPoints);
  for (auto* one : {&n_rows, &n_logits, &n_sampled, &n_kept, &n_logprobs}) arrays.add(*one, 1);
  arrays.add(distinct_experts, sizes.layers);
  for (auto* streams : {&n_nodes, &n_path, &first_row}) arrays.add(*streams, sizes.streams);
  for (auto* rows : {&sample, &path, &path_token, &node_token, &node_parent, &node_depth}) arrays.add(*rows, sizes.rows);
  arrays.add(node_weight, sizes.rows);
  arrays.allocate(ops);
}

RoundLogprobs::RoundLogprobs(Ops& ops, const RoundSizes& sizes) {
  arrays.add(logprob, sizes.rows);
  arrays.add(top_token, sizes.rows * kMaxTopLogprobs);
  arrays.add(top_logprob, sizes.rows * kMaxTopLogprobs);
  arrays.allocate(ops);
}

void RoundLists::begin(size_t bytes) {
  used_ = 0;
  if (bytes > memory_.bytes()) memory_ = ops_.exchange(std::max(bytes, 2 * memory_.bytes()));
}

}  // namespace kdt
