// What building a reply needs of the engine's text functions, as an interface: tests put their own in its place.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kdtree.h"

namespace kdt::openai {

// A kdt_part that owns its text.
struct Part {
  int32_t kind = KDT_PART_CONTENT;
  int32_t tool_index = -1;
  std::string text;
  std::string id;
  std::string name;
};

class TurnReader {
 public:
  virtual ~TurnReader() = default;
  virtual std::vector<Part> push(int32_t token_id, std::string_view text) = 0;
  virtual std::vector<Part> finish() = 0;
};

class ModelText {
 public:
  virtual ~ModelText() = default;
  // Not always whole UTF-8 characters.
  virtual std::string bytes(std::span<const int32_t> ids) const = 0;
  virtual std::unique_ptr<TurnReader> read_turn(int32_t thinking, bool tools) const = 0;
};

// Over kdtree.h. `engine` must outlive it.
class EngineText final : public ModelText {
 public:
  explicit EngineText(kdt_engine* engine) : engine_(engine) {}
  std::string bytes(std::span<const int32_t> ids) const override;
  std::unique_ptr<TurnReader> read_turn(int32_t thinking, bool tools) const override;

 private:
  kdt_engine* engine_;
};

}  // namespace kdt::openai
