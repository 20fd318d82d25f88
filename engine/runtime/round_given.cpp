// A forward pass over a tree that is given, and the measurements at start.
#include <algorithm>

#include "runtime/round.h"

namespace kdt {

Round::Shape Round::lay_given(std::span<const GivenTree> trees) {
  std::vector<Stream> streams;
  std::vector<DecodeTask> tasks;
  for (const GivenTree& given : trees) streams.push_back(*given.stream);
  for (Stream& stream : streams) tasks.push_back({&stream, {}});
  Shape shape;
  lay_streams({tasks, {}}, shape);
  int64_t row = 0;
  for (size_t i = 0; i < trees.size(); ++i) {
    const Tree& tree = trees[i].tree;
    const auto root = static_cast<int32_t>(streams[i].length), first = static_cast<int32_t>(row);
    for (int64_t n = 0; n <= tree.n_nodes; ++n, ++row) {
      const auto node = static_cast<size_t>(n);
      in_.token[row] = tree.token[node];
      in_.position[row] = root + tree.depth[node];
      in_.stream[row] = static_cast<int32_t>(i);
      in_.parent[row] = n == 0 ? -1 : first + tree.parent[node];
      in_.visible[row] = root + 1;
      in_.logits_row[row] = static_cast<int32_t>(row);
    }
  }
  *in_.n_given.host = static_cast<int32_t>(row);
  shape.rows = shape.logits = std::min(ops_.capacity(row), limits_.max_rows);
  return shape;
}

void Round::run_given(const Shape& shape, bool sample) {
  const Rows rows{{shape.rows, in_.n_given.device}, in_.token.device, in_.position.device, in_.stream.device,
                  in_.parent.device, in_.visible.device};
  forward(rows, {shape.rows, in_.n_given.device}, shape.count_experts ? out_.distinct_experts.device : nullptr);
  ops_.mark(Stage::verify);
  if (!sample) return;
  ops_.sample({rows, vocab_, logits_.as<float>(), in_.sampling.device, nullptr, vocabulary_work_.data(),
               out_.sample.device});
  ops_.mark(Stage::sample);
  if (shape.count_experts) ops_.fetch(out_.arrays.memory(), out_.arrays.bytes());
}

StageSeconds Round::verify_given(std::span<const GivenTree> trees, bool count_experts) {
  Shape shape = lay_given(trees);
  shape.count_experts = count_experts;
  return execute(Work::given, shape);
}

void Round::fill_pages(std::span<const std::byte> pattern) {
  for (Buffer* pages : {&latent_pages_, &draft_pages_})
    for (size_t at = 0; pages->data() && at < pages->bytes(); at += pattern.size())
      ops_.copy_in(*pages, at, pattern.data(), std::min(pattern.size(), pages->bytes() - at));
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
  const GivenTree given{&stream, {rows - 1, token, parent, depth, weight}};
  const StageSeconds stages = verify_given({&given, 1}, false);
  return stages[Stage::verify] + stages[Stage::sample];
}

double Round::measure_draft(const Stream& stream, int64_t depths, int64_t n_streams) {
  std::vector<Stream> copies(static_cast<size_t>(n_streams), stream);
  std::vector<DecodeTask> tasks;
  for (Stream& copy : copies) {
    DecodeTask& task = tasks.emplace_back(DecodeTask{&copy, {}});
    task.plan.budget = 2 * depths;
    task.plan.depths = depths;
  }
  const Shape shape = lay_plan({tasks, {}});
  return execute(Work::draft, shape)[Stage::draft];
}

std::span<const float> Round::verify(const Stream& stream, const Tree& given, bool poison_scratch) {
  const GivenTree one{&stream, given};
  const Shape shape = lay_given({&one, 1});
  execute(poison_scratch ? Work::poisoned_verify : Work::verify, shape);
  given_logits_.resize(static_cast<size_t>((given.n_nodes + 1) * vocab_));
  ops_.copy_out(logits_, 0, given_logits_.data(), given_logits_.size() * sizeof(float));
  return given_logits_;
}

}  // namespace kdt
