#include "text/vocabulary.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "text/json_text.h"

namespace kdt {
namespace {

// Kimi K2 has 163,584 ranks of at most a few hundred bytes.
constexpr size_t kMaxRanks = 1u << 20;
constexpr size_t kMaxTokenBytes = 4096;

constexpr std::array<int8_t, 256> base64_values() {
  std::array<int8_t, 256> values{};
  values.fill(-1);
  std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (size_t i = 0; i < digits.size(); i++) values[static_cast<unsigned char>(digits[i])] = static_cast<int8_t>(i);
  return values;
}

// Appends the decoded bytes. False for anything but canonical base64 of at least one byte.
bool decode_base64(std::string_view text, std::string& out) {
  static constexpr std::array<int8_t, 256> kValues = base64_values();
  if (text.empty() || text.size() % 4 != 0) return false;
  size_t n_pad = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  uint32_t bits = 0;
  int n_bits = 0;
  for (char c : text.substr(0, text.size() - n_pad)) {
    int8_t value = kValues[static_cast<unsigned char>(c)];
    if (value < 0) return false;
    bits = (bits << 6 | static_cast<uint32_t>(value)) & 0xffff;
    n_bits += 6;
    if (n_bits >= 8) {
      n_bits -= 8;
      out += static_cast<char>(bits >> n_bits & 0xff);
    }
  }
  return (bits & ((1u << n_bits) - 1)) == 0;
}

bool parse_number(std::string_view text, uint64_t& value) {
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

struct RankLines {
  std::string pool;                   // decoded tokens in the order of the lines
  std::vector<uint64_t> offsets{0};   // [n lines + 1] into pool
  std::vector<uint64_t> ranks;        // [n lines]
};

RankLines read_lines(std::string_view model, const std::string& file) {
  RankLines lines;
  size_t n_line = 0;
  while (!model.empty()) {
    size_t end = std::min(model.find('\n'), model.size());
    std::string_view line = model.substr(0, end);
    model.remove_prefix(std::min(end + 1, model.size()));
    n_line++;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    auto bad = [&](std::string_view expected) {
      fail(Status::bad_file, file + ":" + std::to_string(n_line), line, expected);
    };
    size_t space = line.find(' ');
    uint64_t rank = 0;
    if (space == std::string_view::npos || !parse_number(line.substr(space + 1), rank)) {
      bad("a token in base64, a space and its rank");
    }
    if (!decode_base64(line.substr(0, space), lines.pool)) bad("a token in base64");
    if (lines.pool.size() - lines.offsets.back() > kMaxTokenBytes) {
      bad("a token of at most " + std::to_string(kMaxTokenBytes) + " bytes");
    }
    if (lines.ranks.size() == kMaxRanks) bad("at most " + std::to_string(kMaxRanks) + " ranks");
    lines.offsets.push_back(lines.pool.size());
    lines.ranks.push_back(rank);
  }
  return lines;
}

void parse_ranks(std::string_view model, const std::string& file, Vocabulary& out) {
  RankLines lines = read_lines(model, file);
  size_t n = lines.ranks.size();
  std::vector<size_t> line_of(n, n);
  for (size_t i = 0; i < n; i++) {
    uint64_t rank = lines.ranks[i];
    auto bad = [&](std::string_view expected) {
      fail(Status::bad_file, file, "rank " + std::to_string(rank), expected);
    };
    if (rank >= n) bad("every rank from 0 to " + std::to_string(n - 1) + " once");
    if (line_of[rank] != n) bad("to be given once");
    line_of[rank] = i;
  }
  out.pool.reserve(lines.pool.size());
  for (size_t line : line_of) {
    out.offsets.push_back(out.pool.size());
    out.pool.append(lines.pool, lines.offsets[line], lines.offsets[line + 1] - lines.offsets[line]);
  }
  out.offsets.push_back(out.pool.size());
}

std::vector<std::string> special_names(std::string_view config, const std::string& file, int32_t n_ranks) {
  std::vector<std::string> names(kReservedSpecials);
  nlohmann::ordered_json json = parse_json(config, file, Status::bad_file, kMaxTokenizerConfigBytes);
  const std::string field = file + ": added_tokens_decoder";
  auto decoder = json.is_object() ? json.find("added_tokens_decoder") : json.end();
  if (decoder == json.end() || !decoder->is_object()) fail(Status::bad_file, field, "", "an object of special tokens");
  for (const auto& [key, value] : decoder->items()) {
    uint64_t id = 0;
    if (!parse_number(key, id) || id < static_cast<uint64_t>(n_ranks) ||
        id >= static_cast<uint64_t>(n_ranks) + kReservedSpecials) {
      fail(Status::bad_file, field, key,
           "an id from " + std::to_string(n_ranks) + " to " + std::to_string(n_ranks + kReservedSpecials - 1));
    }
    auto content = value.is_object() ? value.find("content") : value.end();
    if (content == value.end() || !content->is_string() || content->get_ref<const std::string&>().empty()) {
      fail(Status::bad_file, field + "." + key + ".content", "", "a name");
    }
    names[id - static_cast<uint64_t>(n_ranks)] = content->get<std::string>();
  }
  for (int32_t i = 0; i < kReservedSpecials; i++) {
    if (names[i].empty()) names[i] = "<|reserved_token_" + std::to_string(n_ranks + i) + "|>";
  }
  return names;
}

}  // namespace

void parse_vocabulary(std::string_view tiktoken_model, std::string_view tokenizer_config, const std::string& name,
                      Vocabulary& out) {
  const std::string model_file = name + "/tiktoken.model";
  const std::string config_file = name + "/tokenizer_config.json";
  if (tiktoken_model.size() > kMaxModelBytes) {
    fail(Status::bad_file, model_file, std::to_string(tiktoken_model.size()) + " bytes", "at most 64 MiB");
  }
  parse_ranks(tiktoken_model, model_file, out);
  int32_t n_ranks = out.size();
  std::vector<std::string> names = special_names(tokenizer_config, config_file, n_ranks);
  for (const std::string& special : names) {
    out.pool += special;
    out.offsets.push_back(out.pool.size());
  }

  out.ranks.reserve(static_cast<size_t>(n_ranks));
  for (int32_t id = 0; id < n_ranks; id++) {
    std::string_view token = out.token(id);
    auto [other, is_new] = out.ranks.emplace(token, id);
    if (!is_new) {
      fail(Status::bad_file, model_file, "rank " + std::to_string(id),
           "a token other than that of rank " + std::to_string(other->second));
    }
    out.longest_rank = std::max(out.longest_rank, token.size());
  }
  for (int byte = 0; byte < 256; byte++) {
    char c = static_cast<char>(byte);
    if (!out.ranks.contains(std::string_view(&c, 1))) {
      fail(Status::bad_file, model_file, "byte " + std::to_string(byte), "a rank for every single byte");
    }
  }
  for (int32_t id = n_ranks; id < out.size(); id++) {
    if (!out.specials.emplace(out.token(id), id).second) {
      fail(Status::bad_file, config_file + ": added_tokens_decoder", out.token(id), "each name once");
    }
  }
}

}  // namespace kdt
