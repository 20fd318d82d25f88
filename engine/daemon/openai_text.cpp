#include "openai_text.h"

#include "openai_library.h"

namespace kdt::openai {
namespace {

struct DestroyReply {
  void operator()(kdt_reply* reply) const noexcept { kdt_reply_destroy(reply); }
};

void check(kdt_status status) {
  if (status != KDT_OK) throw from_status(status, kdt_last_error());
}

class EngineTurnReader final : public TurnReader {
 public:
  EngineTurnReader(kdt_engine* engine, int32_t thinking, bool tools) {
    kdt_reply* reply = nullptr;
    check(kdt_reply_create(engine, thinking, tools ? 1 : 0, &reply));
    reply_.reset(reply);
  }

  std::vector<Part> push(int32_t token_id, std::string_view text) override {
    check(kdt_reply_push(reply_.get(), token_id, text.data(), static_cast<int64_t>(text.size())));
    return parts();
  }

  std::vector<Part> finish() override {
    check(kdt_reply_finish(reply_.get()));
    return parts();
  }

 private:
  std::vector<Part> parts() const {
    const auto raw = collect<std::vector<kdt_part>>(4, [&](kdt_part* parts, int64_t capacity, int64_t* n) {
      return kdt_reply_parts(reply_.get(), parts, capacity, n);
    });
    std::vector<Part> out;
    out.reserve(raw.size());
    for (const kdt_part& part : raw) {
      out.push_back({part.kind, part.tool_index, std::string(part.text, static_cast<size_t>(part.text_bytes)), part.id,
                     part.name});
    }
    return out;
  }

  std::unique_ptr<kdt_reply, DestroyReply> reply_;
};

}  // namespace

std::string EngineText::bytes(std::span<const int32_t> ids) const {
  return collect<std::string>(ids.size() * 8 + 16, [&](char* bytes, int64_t capacity, int64_t* n) {
    return kdt_detokenize(engine_, ids.data(), static_cast<int64_t>(ids.size()), bytes, capacity, n);
  });
}

std::unique_ptr<TurnReader> EngineText::read_turn(int32_t thinking, bool tools) const {
  return std::make_unique<EngineTurnReader>(engine_, thinking, tools);
}

}  // namespace kdt::openai
