// A forward pass over a tree that is given, and the measurements at start.
#include <algorithm>

#include "runtime/round.h"

namespace kdt {

Round::Shape Round::lay_given(const Stream& stream, const Tree& tree) {
  Shape shape;
  Stream copy = stream;
  const DecodeTask task{&copy, {}};
  lay_streams({{&task, 1}, {}}, shape);
  const auto root = static_cast<int32_t>(stream.length);
  for (int64_t i = 0; i <= tree.n_nodes; ++i) {
    const auto node = static_cast<size_t>(i);
    in_.token[i] = tree.token[node];
    in_.position[i] = root + tree.depth[node];
    in_.stream[i] = 0;
    in_.parent[i] = i == 0 ? -1 : tree.parent[node];
    in_.visible[i] = root + 1;
    in_.logits_row[i] = static_cast<int32_t>(i);
  }
  *in_.n_given.host = static_cast<int32_t>(tree.n_nodes + 1);
  shape.rows = shape.logits = std::min(ops_.capacity(tree.n_nodes + 1), limits_.max_rows);
  return shape;
}

void Round::run_given(const Shape& shape, bool sample) {
  const Rows rows{{shape.rows, in_.n_given.device}, in_.token.device, in_.position.device, in_.stream.device,
                  in_.parent.device, in_.visible.device};
  forward(rows, {shape.rows, in_.n_given.device}, nullptr);
  if (sample)
    ops_.sample({rows, vocab_, logits_.as<float>(), in_.sampling.device, nullptr, vocabulary_work_.data(),
                 out_.sample.device});
  ops_.mark(Stage::verify);
}

double Round::measure_verify(const Stream& stream, int64_t rows) {
  // A bushy tree of tokens that differ, so that rows route to different experts.
  const auto n = static_cast<size_t>(rows);
  std::vector<int32_t> token(n), parent(n), depth(n);
  const std::vector<float> weight(n);
  for (size_t i = 0; i < n; ++i) {
    token[i] = static_cast<int32_t>((stream.root + 7919 * static_cast<int64_t>(i)) % vocab_);
    parent[i] = i == 0 ? -1 : static_cast<int32_t>((i - 1) / 2);
    depth[i] = i == 0 ? 0 : depth[static_cast<size_t>(parent[i])] + 1;
  }
  const Shape shape = lay_given(stream, {rows - 1, token, parent, depth, weight});
  return execute(Work::given, shape)[Stage::verify];
}

double Round::measure_draft(const Stream& stream, int64_t depths) {
  Stream copy = stream;
  DecodeTask task{&copy, {}};
  task.plan.budget = 2 * depths;
  task.plan.depths = depths;
  const Shape shape = lay_plan({{&task, 1}, {}});
  return execute(Work::draft, shape)[Stage::draft];
}

std::span<const float> Round::verify(const Stream& stream, const Tree& given, bool poison_scratch) {
  const Shape shape = lay_given(stream, given);
  execute(poison_scratch ? Work::poisoned_verify : Work::verify, shape);
  given_logits_.resize(static_cast<size_t>((given.n_nodes + 1) * vocab_));
  ops_.copy_out(logits_, 0, given_logits_.data(), given_logits_.size() * sizeof(float));
  return given_logits_;
}

}  // namespace kdt
