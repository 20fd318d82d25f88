// Stop strings, compared with a search of the whole text.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <random>

#include "text/stop_strings.h"
#include "text_support.h"

using namespace kdt;

namespace {

using Strings = std::vector<std::string>;

std::optional<StopMatch> search(const Strings& strings, std::string_view text) {
  std::optional<StopMatch> best;
  for (size_t i = 0; i < strings.size(); i++) {
    const size_t at = text.find(strings[i]);
    if (at == std::string_view::npos) continue;
    const auto begin = static_cast<int64_t>(at), end = static_cast<int64_t>(at + strings[i].size());
    if (!best || std::pair(begin, end) < std::pair(best->begin, best->end)) best = {begin, end, static_cast<int>(i)};
  }
  return best;
}

// The least offset from which on the text may be the beginning of a match, or is one.
int64_t held_from(const Strings& strings, std::string_view text) {
  for (size_t at = 0; at < text.size(); at++) {
    for (const std::string& string : strings) {
      const std::string_view rest = text.substr(at);
      if (string.starts_with(rest) || rest.starts_with(string)) return static_cast<int64_t>(at);
    }
  }
  return static_cast<int64_t>(text.size());
}

bool same(const std::optional<StopMatch>& a, const std::optional<StopMatch>& b) {
  return a.has_value() == b.has_value() && (!a || (a->begin == b->begin && a->end == b->end));
}

class Random {
 public:
  size_t below(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(engine_); }
  std::string text(size_t most, char letters) {
    std::string out(below(most + 1), ' ');
    for (char& c : out) c = static_cast<char>('a' + below(static_cast<size_t>(letters)));
    return out;
  }

 private:
  std::mt19937 engine_{7};
};

}  // namespace

TEST_CASE("any cut of a text finds what a search of all of it finds") {
  Random random;
  int n_found = 0, n_waited = 0;
  for (int round = 0; round < 4000; round++) {
    const char letters = static_cast<char>(1 + random.below(3));
    Strings strings;
    for (size_t i = random.below(6); i > 0; i--) strings.push_back(random.text(6, letters) + "a");
    const std::string text = random.text(40, letters);
    StopStrings matcher(strings);
    std::optional<StopMatch> found;
    size_t at = 0;
    int64_t safe = 0;
    while (at < text.size() && !found) {
      const size_t n = std::min(random.below(5), text.size() - at);
      found = matcher.push(std::string_view(text).substr(at, n));
      at += n;
      CHECK(matcher.safe() >= safe);
      safe = matcher.safe();
      if (!found) CHECK(safe == held_from(strings, std::string_view(text).substr(0, at)));
    }
    n_waited += !found;
    if (!found) found = matcher.interrupt();
    n_waited -= !found;
    const auto expected = search(strings, text);
    CHECK(same(found, expected));
    n_found += found.has_value();
    CHECK(matcher.safe() == (found ? found->begin : static_cast<int64_t>(text.size())));
    if (found) {
      CHECK(strings[static_cast<size_t>(found->index)] ==
            text.substr(static_cast<size_t>(found->begin), static_cast<size_t>(found->end - found->begin)));
      CHECK(!matcher.push("aaaaaaaaaa"));
      CHECK(matcher.safe() == found->begin);
    }
  }
  CHECK(n_found > 1000);
  CHECK(n_waited > 0);
}

TEST_CASE("no match spans a special token") {
  Random random;
  for (int round = 0; round < 2000; round++) {
    const Strings strings = {random.text(4, 2) + "ab", random.text(3, 2) + "b"};
    StopStrings matcher(strings);
    // Names of special tokens hold a letter of no stop string, so the whole stream can be searched.
    std::string stream;
    std::optional<StopMatch> found;
    while (!found && stream.size() < 60) {
      const std::string piece = random.text(6, 2);
      stream += piece;
      found = matcher.push(piece);
      if (found || random.below(2)) continue;
      found = matcher.interrupt(3);
      if (!found) CHECK(matcher.safe() == static_cast<int64_t>(stream.size() + 3));
      stream += "<x>";
    }
    if (!found) found = matcher.interrupt();
    CHECK(same(found, search(strings, stream)));
  }
}

TEST_CASE("before min_tokens a string does not end the text, but one that began there may") {
  StopStrings matcher(Strings{"ab", "cd"});
  CHECK(!matcher.push("xabx", false));
  CHECK(matcher.safe() == 4);
  CHECK(!matcher.push("c", false));
  CHECK(matcher.safe() == 4);
  const auto found = matcher.push("d");
  REQUIRE(found);
  CHECK(found->begin == 4);
  CHECK(found->end == 6);
  CHECK(found->index == 1);
  matcher.reset();
  CHECK(matcher.safe() == 0);
  CHECK(matcher.push("ab")->index == 0);
}

TEST_CASE("a match waits for a longer string that began before it") {
  StopStrings matcher(Strings{"bc", "abcd"});
  CHECK(!matcher.push("xabc"));
  CHECK(matcher.safe() == 1);
  CHECK(matcher.push("d")->index == 1);
  matcher.reset();
  CHECK(!matcher.push("xabc"));
  CHECK(matcher.push("e")->begin == 2);
  matcher.reset();
  CHECK(!matcher.push("xabc"));
  CHECK(matcher.interrupt(9)->end == 4);
}

TEST_CASE("characters stay whole") {
  StopStrings matcher(Strings{"é漢"});
  CHECK(!matcher.push("aé"));
  CHECK(matcher.safe() == 1);
  CHECK(!matcher.push("è漣é"));
  CHECK(matcher.safe() == 8);
  CHECK(matcher.push("漢")->begin == 8);
}

TEST_CASE("bad stop strings are named") {
  auto error = [](const Strings& strings) {
    return message_of(Status::invalid_argument, [&] { StopStrings matcher(strings); });
  };
  CHECK(error(Strings(33, "a")) == "stop: 33 strings: expected at most 32");
  CHECK(error({"a", ""}) == "stop[1]: 0 bytes: expected 1 to 1024");
  CHECK(error({repeat("a", 1025)}) == "stop[0]: 1025 bytes: expected 1 to 1024");
  CHECK(error({"\xff"}).starts_with("stop[0]: "));
  StopStrings none{std::span<const std::string>()};
  CHECK(!none.push("abc"));
  CHECK(none.safe() == 3);
}

TEST_CASE("repeated text takes linear time") {
  Strings strings;
  for (size_t i = 0; i < kMaxStopStrings; i++) strings.push_back(repeat("a", kMaxStopBytes - 1 - i) + "b");
  StopStrings matcher(strings);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 200000; i++) {
    CHECK_FALSE(matcher.push(i % 1000 == 999 ? "c" : "a"));
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  // 6.4 million steps; comparing every suffix anew would be thousands of times that.
  CHECK(seconds.count() < 20);
}
