#include "text/tokenizer.h"

#include <functional>
#include <queue>

#include "base/error.h"
#include "base/file.h"
#include "text/split.h"
#include "text/utf8_stream.h"
#include "text/vocabulary.h"

namespace kdt {
namespace {

constexpr int32_t kNoRank = -1;
constexpr uint32_t kNoPart = static_cast<uint32_t>(-1);

// Byte-pair merging of one piece, O(n log n): the pair of the lowest rank is merged first, the leftmost among equals.
class PairMerger {
 public:
  explicit PairMerger(const Vocabulary& vocabulary) : vocabulary_(vocabulary) {}

  // Appends the ids of a piece of at most 4 * kChunkCharacters bytes.
  void encode(std::string_view piece, std::vector<int32_t>& ids) {
    if (int32_t whole = rank(piece); whole != kNoRank) {
      ids.push_back(whole);
      return;
    }
    uint32_t n = static_cast<uint32_t>(piece.size());
    parts_.resize(n);
    for (uint32_t i = 0; i < n; i++) parts_[i] = {i - 1, i + 1, rank(piece.substr(i, 1)), kNoRank};
    for (uint32_t i = 0; i + 1 < n; i++) offer(piece, i);
    while (!pairs_.empty()) {
      Pair pair = pairs_.top();
      pairs_.pop();
      if (parts_[pair.start].pair_rank == pair.rank) merge(piece, pair.start);
    }
    for (uint32_t i = 0; i < n; i = parts_[i].next) ids.push_back(parts_[i].id);
  }

 private:
  struct Part {          // at the index of its first byte
    uint32_t previous, next;
    int32_t id;
    int32_t pair_rank;   // of this part and the next together; kNoRank also once the part is merged away
  };
  struct Pair {
    int32_t rank;
    uint32_t start;
    bool operator>(const Pair& other) const { return rank != other.rank ? rank > other.rank : start > other.start; }
  };

  int32_t rank(std::string_view bytes) const {
    if (bytes.size() > vocabulary_.longest_rank) return kNoRank;
    auto found = vocabulary_.ranks.find(bytes);
    return found == vocabulary_.ranks.end() ? kNoRank : found->second;
  }

  // Ranks the pair that starts at a part. An older entry of that part no longer agrees with pair_rank, and is skipped.
  void offer(std::string_view piece, uint32_t start) {
    Part& part = parts_[start];
    part.pair_rank = part.next == piece.size() ? kNoRank : rank(piece.substr(start, parts_[part.next].next - start));
    if (part.pair_rank != kNoRank) pairs_.push({part.pair_rank, start});
  }

  void merge(std::string_view piece, uint32_t start) {
    Part& part = parts_[start];
    Part& gone = parts_[part.next];
    part.id = part.pair_rank;
    part.next = gone.next;
    gone.pair_rank = kNoRank;
    if (part.next < piece.size()) parts_[part.next].previous = start;
    offer(piece, start);
    if (part.previous != kNoPart) offer(piece, part.previous);
  }

  const Vocabulary& vocabulary_;
  std::vector<Part> parts_;
  std::priority_queue<Pair, std::vector<Pair>, std::greater<Pair>> pairs_;
};

}  // namespace

struct Tokenizer::Impl {
  Vocabulary vocabulary;
};

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer Tokenizer::load(const std::string& directory) {
  std::string model = read_text_file(directory + "/tiktoken.model", kMaxModelBytes);
  std::string config = read_text_file(directory + "/tokenizer_config.json", kMaxTokenizerConfigBytes);
  return parse(model, config, directory);
}

Tokenizer Tokenizer::parse(std::string_view tiktoken_model, std::string_view tokenizer_config_json,
                           const std::string& name) {
  auto impl = std::make_unique<Impl>();
  parse_vocabulary(tiktoken_model, tokenizer_config_json, name, impl->vocabulary);
  return Tokenizer(std::move(impl));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  if (size_t at = find_invalid_utf8(text); at != std::string_view::npos) {
    fail(Status::invalid_argument, "text", "byte " + std::to_string(at), "valid UTF-8");
  }
  std::vector<int32_t> ids;
  PairMerger merger(impl_->vocabulary);
  while (!text.empty()) {
    SplitChunk chunk(text);
    for (std::string_view piece = chunk.next(); !piece.empty(); piece = chunk.next()) merger.encode(piece, ids);
  }
  return ids;
}

std::string_view Tokenizer::bytes(int32_t id) const {
  return id >= 0 && id < size() ? impl_->vocabulary.token(id) : std::string_view();
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string text;
  for (size_t i = 0; i < ids.size(); i++) {
    if (ids[i] < 0 || ids[i] >= size()) {
      fail(Status::invalid_argument, "token_ids[" + std::to_string(i) + "]", std::to_string(ids[i]),
           "an id from 0 to " + std::to_string(size() - 1));
    }
    text += impl_->vocabulary.token(ids[i]);
  }
  return text;
}

std::optional<int32_t> Tokenizer::special(std::string_view name) const {
  auto found = impl_->vocabulary.specials.find(name);
  if (found == impl_->vocabulary.specials.end()) return std::nullopt;
  return found->second;
}

bool Tokenizer::is_special(int32_t id) const { return id >= impl_->vocabulary.n_ranks() && id < size(); }

int32_t Tokenizer::size() const { return impl_->vocabulary.size(); }

}  // namespace kdt
