// Tokenizer and UTF-8 stream.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <ctime>
#include <random>
#include <thread>

#include <nlohmann/json.hpp>

#include "text/utf8_stream.h"
#include "text_support.h"

using namespace kdt;
using nlohmann::ordered_json;

namespace {

std::string base64(std::string_view bytes) {
  static constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t k = i; k < i + 3; k++) {
      bits = bits << 8 | (k < bytes.size() ? static_cast<unsigned char>(bytes[k]) : 0);
    }
    for (size_t k = 0; k < 4; k++) out += i + k > bytes.size() ? '=' : kDigits[bits >> (18 - 6 * k) & 63];
  }
  return out;
}

// A tiktoken.model of the 256 single bytes and then `more`.
std::string model_file(const std::vector<std::string>& more = {}) {
  std::string out;
  for (int byte = 0; byte < 256; byte++) {
    out += base64(std::string(1, static_cast<char>(byte))) + " " + std::to_string(byte) + "\n";
  }
  for (size_t i = 0; i < more.size(); i++) out += base64(more[i]) + " " + std::to_string(256 + i) + "\n";
  return out;
}

// The pieces that the splitting pattern makes, seen through a tokenizer that knows each whole candidate as a token.
std::vector<std::string> pieces(const std::string& text, const std::vector<std::string>& expected) {
  std::vector<std::string> more;
  for (const std::string& piece : expected) {
    if (piece.size() > 1 && std::find(more.begin(), more.end(), piece) == more.end()) more.push_back(piece);
  }
  Tokenizer tokenizer = Tokenizer::parse(model_file(more), kNoNames, "test");
  std::vector<std::string> out;
  for (int32_t id : tokenizer.encode(text)) out.emplace_back(tokenizer.bytes(id));
  return out;
}

}  // namespace

TEST_CASE("golden strings have tiktoken's ids, and decode to themselves") {
  for (const ordered_json& entry : ordered_json::parse(source_file("tests/golden/tokenizer.json"))) {
    std::string text = entry["text"];
    CAPTURE(text);
    std::vector<int32_t> ids = bundled().encode(text);
    CHECK(ids == entry["ids"].get<std::vector<int32_t>>());
    CHECK(bundled().decode(ids) == text);
  }
}

TEST_CASE("the pattern splits as a backtracking matcher does") {
  using Words = std::vector<std::string>;
  auto check = [](const Words& expected) {
    std::string text;
    for (const std::string& word : expected) text += word;
    CAPTURE(text);
    CHECK(pieces(text, expected) == expected);
  };
  check({"Hello", " World", "'x", "'"});
  check({"don't", " I'LL", " we'Ve", " it'ſ", "'"});
  check({"camel", "Case", " HTTPServer", "XML"});
  check({"中文漢字", "English", "々〇", "A\u02b0Bc", "国"});
  check({"!⺀", "中", "1〇2", "312", "34", " ", "1²3", "½4"});
  check({"  ", " x", "\t", "\tif"});
  check({"a", "\r\n\r\n", " ", " b", " \n\n \n", " ", " x"});
  check({"!?\r\n", "x", " ...", "  "});
  check({"e\u0301\u0301", "A\u0301\u0301x", " \u0301", "\n", "\u0301\u0301Ab"});
  check({"\U0001f469\u200d\U0001f4bb\ufe0f", "ok"});
  check({"ʰAAʰ", "B"});
  check({"\U00031350\U0002ebf0", "\U00010d50\U00010d70"});   // Han of Unicode 15 and 15.1, letters of 16
  check({"\u180ex", "\u3000", "\u3000y", "\u0085"});
}

TEST_CASE("random text round-trips, and equal text has equal ids on every thread") {
  std::mt19937 random(7);
  std::string text;
  for (int i = 0; i < 20000; i++) {
    uint32_t code = random() % (i % 2 ? 0x3000 : 0x110000);
    if (code >= 0xd800 && code < 0xe000) code = 'a';
    if (code < 0x80) {
      text += static_cast<char>(code);
    } else if (code < 0x800) {
      text += {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 63))};
    } else if (code < 0x10000) {
      text += {static_cast<char>(0xe0 | code >> 12), static_cast<char>(0x80 | (code >> 6 & 63)),
               static_cast<char>(0x80 | (code & 63))};
    } else {
      text += {static_cast<char>(0xf0 | code >> 18), static_cast<char>(0x80 | (code >> 12 & 63)),
               static_cast<char>(0x80 | (code >> 6 & 63)), static_cast<char>(0x80 | (code & 63))};
    }
  }
  std::vector<int32_t> ids = bundled().encode(text);
  CHECK(bundled().decode(ids) == text);
  std::vector<std::vector<int32_t>> others(4);
  std::vector<std::thread> threads;
  for (auto& other : others) threads.emplace_back([&] { other = bundled().encode(text); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& other : others) CHECK(other == ids);
}

TEST_CASE("merging takes the lowest rank first, the leftmost among equals") {
  Tokenizer tokenizer = Tokenizer::parse(model_file({"bc", "ab", "aa", "aaaa"}), kNoNames, "test");
  using Ids = std::vector<int32_t>;
  CHECK(tokenizer.encode("abc") == Ids{'a', 256});
  CHECK(tokenizer.encode("aaa") == Ids{258, 'a'});
  CHECK(tokenizer.encode("aaaaa") == Ids{259, 'a'});
  CHECK(tokenizer.encode("aaaa") == Ids{259});
  CHECK(tokenizer.encode("aab") == Ids{'a', 257});
  // A token that no sequence of merges reaches is still found when it is a whole piece.
  Tokenizer whole = Tokenizer::parse(model_file({"xyz"}), kNoNames, "test");
  CHECK(whole.encode("xyz") == Ids{256});
  CHECK(whole.encode("xyzx") == Ids{'x', 'y', 'z', 'x'});
}

TEST_CASE("Kimi's own cuts: runs of 25,000 and chunks of 400,000 characters") {
  // A pair of letters is one token unless a cut falls inside it.
  Tokenizer tokenizer = Tokenizer::parse(model_file({"aa", "  "}), kNoNames, "test");
  auto singles = [&](const std::string& text, char c) {
    std::vector<int32_t> ids = tokenizer.encode(text);
    CHECK(tokenizer.decode(ids) == text);
    return std::count(ids.begin(), ids.end(), static_cast<int32_t>(c));
  };
  CHECK(singles(repeat("a", 25000), 'a') == 0);
  CHECK(singles(repeat("a", 25001), 'a') == 1);
  CHECK(singles(" " + repeat("a", 25000), 'a') == 0);          // the run of letters starts after the space
  CHECK(singles("b" + repeat("a", 25000), 'a') == 2);          // `b` counts in the run: cut before the last letter
  CHECK(singles(repeat(" ", 25001), ' ') == 1);
  CHECK(singles("\x1c" + repeat(" ", 25000), ' ') == 2);       // str.isspace, though not \s
  // The first chunk ends after 39 of a line's letters.
  CHECK(singles("\n" + repeat(repeat("a", 9998) + "\n", 41), 'a') == 2);
}

TEST_CASE("long runs take linear time") {
  std::clock_t start = std::clock();
  for (const std::string& text :
       {repeat("a", 400000), repeat(" ", 400000), repeat("A", 400000), repeat("\u0301", 400000), repeat("\n", 400000),
        repeat("!", 200000) + repeat("\n", 200000), repeat("aB", 200000), repeat("'s", 200000), repeat("1", 400000),
        repeat("中", 400000), repeat(" \n", 200000)}) {
    CHECK(bundled().decode(bundled().encode(text)) == text);
  }
  CHECK(bundled().encode(repeat("1", 4000000)).size() >= 4000000 / 3);   // many pieces between two cuts
  // One piece of 25,000 characters in which every position can merge.
  std::vector<std::string> more;
  for (size_t n = 2; n <= 4096; n *= 2) more.push_back(repeat("a", n));
  Tokenizer tokenizer = Tokenizer::parse(model_file(more), kNoNames, "test");
  CHECK(tokenizer.encode(repeat("a", 25000)).size() == 6 + 4);   // 6 of 4,096, then 424 = 256 + 128 + 32 + 8
  // Processor time, sanitized builds included; a quadratic step takes far longer.
  CHECK((std::clock() - start) / CLOCKS_PER_SEC < 300);
}

TEST_CASE("special tokens come from the reserved range and never out of text") {
  const Tokenizer& t = bundled();
  CHECK(t.size() == 2048);
  CHECK(t.special("<|im_end|>") == 1794);
  CHECK(t.special("<|reserved_token_1797|>") == 1797);
  CHECK(!t.special("<|reserved_token_1792|>"));
  CHECK(!t.special("a"));
  CHECK(t.bytes(1794) == "<|im_end|>");
  CHECK(t.is_special(1792));
  CHECK(t.is_special(2047));
  CHECK(!t.is_special(1791));
  CHECK(!t.is_special(2048));
  CHECK(!t.is_special(-1));
  CHECK(t.bytes(2048).empty());
  CHECK(t.bytes(-1).empty());
  for (int32_t id : t.encode("<|im_end|>[BOS]<think></think><|reserved_token_1797|>")) CHECK(!t.is_special(id));
  std::vector<int32_t> ids{72, 2048};
  CHECK(message_of(Status::invalid_argument, [&] { t.decode(ids); }) ==
        "token_ids[1]: 2048: expected an id from 0 to 2047");
  CHECK(t.encode("").empty());
}

TEST_CASE("invalid UTF-8 is refused with its place") {
  for (std::string bad : {"\xff", "\xc3", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xc0\xaf", "\xe2\x82"}) {
    CHECK(message_of(Status::invalid_argument, [&] { bundled().encode("é中" + bad + "a"); }) ==
          "text: byte 5: expected valid UTF-8");
  }
  CHECK(bundled().decode(bundled().encode(std::string("a\0b", 3))) == std::string("a\0b", 3));
}

TEST_CASE("malformed tokenizer files are refused by name") {
  auto error = [](const std::string& model, const std::string& config) {
    return message_of(Status::bad_file, [&] { Tokenizer::parse(model, config, "dir"); });
  };
  const std::string good = model_file();
  CHECK(error("", kNoNames) == "dir/tiktoken.model: byte 0: expected a rank for every single byte");
  CHECK(error(good + "!!!! 256\n", kNoNames) == "dir/tiktoken.model:257: !!!! 256: expected a token in base64");
  for (std::string token : {"YWI", "YW=I", "Y===", "YWJ=", "====", "YW I", "YWI=YWI=", "\xff\xff\xff\xff"}) {
    CHECK(error(good + token + " 256\n", kNoNames).starts_with("dir/tiktoken.model:257: "));
  }
  for (std::string rank : {"", "x", "-1", "256x", "99999999999999999999999", " 256", "2 56"}) {
    CHECK(error(good + "YWI= " + rank + "\n", kNoNames).starts_with("dir/tiktoken.model:257: "));
  }
  CHECK(error(good + "YWI= 257\n", kNoNames) ==
        "dir/tiktoken.model: rank 257: expected every rank from 0 to 256 once");
  CHECK(error(good + "YWI= 18446744073709551615\n", kNoNames).find("expected every rank") != std::string::npos);
  CHECK(error(good + "YWI= 255\n", kNoNames) == "dir/tiktoken.model: rank 255: expected to be given once");
  CHECK(error(good + "YQ== 256\n", kNoNames) ==
        "dir/tiktoken.model: rank 256: expected a token other than that of rank 97");
  CHECK(error(model_file({std::string(4097, 'a')}), kNoNames).find("at most 4096 bytes") != std::string::npos);
  CHECK(error(std::string((64u << 20) + 1, '\n'), kNoNames).find("64 MiB") != std::string::npos);
  CHECK(error(good.substr(good.find('\n') + 1), kNoNames).find("rank 255") != std::string::npos);

  for (std::string config : {"", "[]", "{}", "nonsense", R"({"added_tokens_decoder":[]})",
                             R"({"added_tokens_decoder":3})",
                             R"({"added_tokens_decoder":{"255":{"content":"x"}}})",
                             R"({"added_tokens_decoder":{"512":{"content":"x"}}})",
                             R"({"added_tokens_decoder":{"-1":{"content":"x"}}})",
                             R"({"added_tokens_decoder":{"256":{"content":""}}})",
                             R"({"added_tokens_decoder":{"256":{"content":7}}})",
                             R"({"added_tokens_decoder":{"256":7}})",
                             R"({"added_tokens_decoder":{"256":{"content":"x"},"257":{"content":"x"}}})",
                             R"({"added_tokens_decoder":{"256":{"content":"<|reserved_token_300|>"}}})"}) {
    CAPTURE(config);
    CHECK(error(good, config).starts_with("dir/tokenizer_config.json"));
  }
  CHECK(error(good, repeat("[", 100000)).find("nesting") != std::string::npos);

  CHECK(Tokenizer::parse(repeat("\r\n", 3) + good, kNoNames, "dir").size() == 512);
  CHECK(message_of(Status::io, [] { Tokenizer::load("/nonexistent"); }) ==
        "/nonexistent/tiktoken.model: No such file or directory: expected a readable file");
}

TEST_CASE("a UTF-8 stream yields whole characters, however it is cut") {
  const std::string r = "\ufffd";
  const std::vector<std::pair<std::string, std::string>> cases = {   // right: Python's bytes.decode(errors="replace")
      {"", ""}, {"a\u00e9\u4e2d\U0001f600z", "a\u00e9\u4e2d\U0001f600z"},
      {"\xff", r}, {"\x80\x80", r + r}, {"\xc3", r}, {"\xc3(", r + "("}, {"\xc0\xaf", r + r}, {"\xc1\x80", r + r},
      {"\xe2\x82", r}, {"\xe2\x82z", r + "z"}, {"\xe2z", r + "z"}, {"\xe2\xe2\x82\xac", r + "\u20ac"},
      {"\xe0\x80\x80", r + r + r}, {"\xe0\x9f\xbf", r + r + r}, {"\xe0\xa0\x80", "\u0800"},
      {"\xed\xa0\x80", r + r + r}, {"\xed\x9f\xbf", "\ud7ff"}, {"\xed\xa0", r + r}, {"\xed", r},
      {"\xf0\x9f\x98", r}, {"\xf0\x9f\x98z", r + "z"}, {"\xf0\x9f\xf0\x9f\x98\x80", r + "\U0001f600"},
      {"\xf0\x8f\xbf\xbf", r + r + r + r}, {"\xf0\x90\x80\x80", "\U00010000"}, {"\xf4\x8f\xbf\xbf", "\U0010ffff"},
      {"\xf4\x90\x80\x80", r + r + r + r}, {"\xf5\x80\x80\x80", r + r + r + r}, {"\xf8\x88\x80\x80\x80", repeat(r, 5)},
      {"\xf0\x9f", r}, {"\xf1\x80\x80\xe2\x82\xc3", r + r + r}};
  for (const auto& [bytes, expected] : cases) {
    for (unsigned cuts = 0; cuts < 1u << bytes.size() && cuts < 4096; cuts++) {   // bit i: a cut after byte i
      Utf8Stream stream;
      std::string out, part;
      for (size_t i = 0; i < bytes.size(); i++) {
        part += bytes[i];
        if (cuts >> i & 1) {
          out += stream.push(part);
          part.clear();
          CHECK(find_invalid_utf8(out) == std::string::npos);
        }
      }
      out += stream.push(part);
      out += stream.flush();
      CHECK(out == expected);
      CHECK(stream.flush().empty());
    }
    CHECK((find_invalid_utf8(bytes) == std::string::npos) == (bytes == expected));
  }
  Utf8Stream stream;
  CHECK(stream.push("a\xf0\x9f") == "a");
  CHECK(stream.push("") == "");
  CHECK(stream.push("\x98\x80") == "\U0001f600");
  CHECK(find_invalid_utf8("ab\xe2\x82") == 2);
}
