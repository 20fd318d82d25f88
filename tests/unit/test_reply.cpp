// Reasoning, content and tool calls out of a stream of tokens.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "text/chat.h"
#include "text/reply_parser.h"
#include "text/utf8_stream.h"
#include "text_support.h"

using namespace kdt;

namespace {

const std::string kThink = "<think>", kThinkEnd = "</think>", kSection = "<|tool_calls_section_begin|>",
                  kSectionEnd = "<|tool_calls_section_end|>", kCall = "<|tool_call_begin|>",
                  kArguments = "<|tool_call_argument_begin|>", kCallEnd = "<|tool_call_end|>";
const std::vector<std::string> kMarkers = {kThink, kThinkEnd, kSection, kSectionEnd, kCall, kArguments, kCallEnd};

struct Event {
  int32_t token;
  std::string text;
};

Event marker(const std::string& name, const std::string& held = "") { return {*bundled().special(name), held + name}; }

// Names of control tokens are those tokens, other strings are text.
std::vector<Event> events(const std::vector<std::string>& pieces) {
  std::vector<Event> out;
  for (const std::string& piece : pieces) {
    const bool control = std::find(kMarkers.begin(), kMarkers.end(), piece) != kMarkers.end();
    out.push_back(control ? marker(piece) : Event{-1, piece});
  }
  return out;
}

struct Call {
  std::string id, name, arguments;
  bool operator==(const Call&) const = default;
};

struct Turn {
  std::string reasoning, content;
  std::vector<Call> calls;
  bool operator==(const Turn&) const = default;
};

Turn read(const std::vector<Event>& turn, bool thinking = false, bool tools = true) {
  ReplyParser parser(bundled(), thinking, tools);
  Turn out;
  auto take = [&] {
    const ReplyPart* before = nullptr;
    for (const ReplyPart& part : parser.parts()) {
      CHECK((part.text.empty() == (part.kind == PartKind::tool_begin)));
      CHECK(find_invalid_utf8(part.text) == std::string::npos);
      CHECK(find_invalid_utf8(part.id + part.name) == std::string::npos);
      if (before) CHECK((before->kind != part.kind || part.kind == PartKind::tool_begin));
      before = &part;
      switch (part.kind) {
        case PartKind::reasoning: out.reasoning += part.text; break;
        case PartKind::content: out.content += part.text; break;
        case PartKind::tool_begin:
          CHECK(part.tool_index == static_cast<int32_t>(out.calls.size()));
          out.calls.push_back({part.id, part.name, ""});
          continue;
        case PartKind::tool_arguments:
          REQUIRE(part.tool_index + 1 == static_cast<int32_t>(out.calls.size()));
          out.calls.back().arguments += part.text;
          continue;
      }
      CHECK(part.tool_index == -1);
    }
  };
  for (const Event& event : turn) {
    parser.push(event.token, event.text);
    take();
  }
  parser.finish();
  take();
  return out;
}

Turn read(const std::vector<std::string>& pieces, bool thinking = false, bool tools = true) {
  return read(events(pieces), thinking, tools);
}

}  // namespace

TEST_CASE("reasoning and content") {
  CHECK(read({"why", kThinkEnd, "so"}, true) == Turn{"why", "so", {}});
  CHECK(read({"so"}) == Turn{"", "so", {}});
  CHECK(read({kThink, "why", kThinkEnd, "so"}) == Turn{"why", "so", {}});
  CHECK(read({kThink, "why", kThinkEnd, "so"}, true) == Turn{"why", "so", {}});
  CHECK(read({"still why"}, true) == Turn{"still why", "", {}});
  CHECK(read({kThinkEnd, "so", kThink, "why", kThinkEnd, "!"}) == Turn{"why", "so!", {}});
  // Text that looks like a marker is text; a marker's event may begin with text that was held back.
  ReplyParser parser(bundled(), false, true);
  parser.push(65, kThink + kCall);
  CHECK(parser.parts()[0].text == kThink + kCall);
  CHECK(read({{-1, "a"}, marker(kThink, "\xef\xbf\xbd"), {-1, "b"}, marker(kThinkEnd, "é")}) ==
        Turn{"bé", "a\xef\xbf\xbd", {}});
  CHECK(read({{-1, "a"}, {*bundled().special(kThink), ""}, {-1, "b"}}) == Turn{"b", "a", {}});
}

TEST_CASE("tool calls") {
  const std::vector<std::string> call = {kSection, kCall, "functions.", "f:0", kArguments, "{\"a\"", ":1}", kCallEnd,
                                         kSectionEnd};
  const Call expected = {"functions.f:0", "f", "{\"a\":1}"};
  auto with = [&](std::vector<std::string> before, const std::vector<std::string>& after) {
    before.insert(before.end(), call.begin(), call.end());
    before.insert(before.end(), after.begin(), after.end());
    return before;
  };
  CHECK(read(call) == Turn{"", "", {expected}});
  CHECK(read(with({"I look.\n"}, {" Done."})) == Turn{"", "I look.\n Done.", {expected}});
  // The section opens inside reasoning that was never closed.
  CHECK(read(with({"hm"}, {}), true) == Turn{"hm", "", {expected}});
  CHECK(read(with({"hm", kThinkEnd}, {}), true) == Turn{"hm", "", {expected}});
  CHECK(read({"hm", kCall, "functions.f:0", kArguments, "{}", kCallEnd, "x"}, true) ==
        Turn{"hm", "x", {{"functions.f:0", "f", "{}"}}});
  // Several calls, with white space around ids and between calls, and words where none belong.
  CHECK(read({kSection, "\n", kCall, " \n", "functions.a:0\n", kArguments, "{}", kCallEnd, "\n", "\n", kCall,
              "functions.b:1", kArguments, "{\"x\": \"", kThinkEnd, "é\"}", kCallEnd, " then", " c", kSectionEnd}) ==
        Turn{"", "then c", {{"functions.a:0", "a", "{}"}, {"functions.b:1", "b", "{\"x\": \"é\"}"}}});
  // What is left open ends with the next call, the section, or the turn.
  CHECK(read({kSection, kCall, "f:0", kArguments, "{", kCall, "g:1", kArguments, "[", kSectionEnd, "t"}) ==
        Turn{"", "t", {{"f:0", "f", "{"}, {"g:1", "g", "["}}});
  CHECK(read({kSection, kCall, "functions.f:0", kArguments, "{\"a"}) == Turn{"", "", {{"functions.f:0", "f", "{\"a"}}});
  CHECK(read({kSection, kCall, "functions.f:0"}) == Turn{"", "", {{"functions.f:0", "f", ""}}});
  CHECK(read({kSection, kCall, " "}) == Turn{});
  CHECK(read({kSection}) == Turn{});
  // A call without arguments has none: an empty object.
  CHECK(read({kCall, "f", kCallEnd, kCall, "g", kArguments, kCallEnd, kCall, "h", kArguments, "\n", kCallEnd}) ==
        Turn{"", "", {{"f", "f", "{}"}, {"g", "g", "{}"}, {"h", "h", "\n{}"}}});
  // Markers that lead nowhere are dropped.
  CHECK(read({kArguments, "a", kCallEnd, "b", kSectionEnd, "c"}) == Turn{"", "abc", {}});
  // Without tools only the markers go.
  CHECK(read(with({"hm"}, {"!"}), true, false) == Turn{"hm", "functions.f:0{\"a\":1}!", {}});
}

TEST_CASE("tool names out of ids") {
  CHECK(tool_name("functions.get_weather:0") == "get_weather");
  CHECK(tool_name("functions.get_weather:12") == "get_weather");
  CHECK(tool_name("functions.get_weather") == "get_weather");
  CHECK(tool_name("get_weather:3") == "get_weather");
  CHECK(tool_name("get_weather") == "get_weather");
  CHECK(tool_name("functions.server.tool:0") == "server.tool");
  CHECK(tool_name("functions.server:tool:0") == "server:tool");
  CHECK(tool_name("functions.f :0") == "f");
  CHECK(tool_name("functions.f:") == "f");
  CHECK(tool_name("functions.:0") == "functions.:0");
  CHECK(tool_name(":0") == ":0");
  CHECK(tool_name("") == "");
}

TEST_CASE("ids and arguments without end") {
  const std::string id = "functions." + repeat("é", 2000);
  const Turn turn = read({kSection, kCall, id, id, kArguments, "1", kCallEnd});
  REQUIRE(turn.calls.size() == 1);
  CHECK(turn.calls[0].id.size() == 1024);
  CHECK(id.starts_with(turn.calls[0].id));
  // No cap on a section: arguments stream as they come.
  std::vector<std::string> long_call = {kSection, kCall, "functions.f:0", kArguments};
  for (int i = 0; i < 5000; i++) long_call.push_back("0123456789");
  CHECK(read(long_call).calls[0].arguments.size() == 50000);
}

TEST_CASE("a rendered turn reads back") {
  const std::string messages = R"([{"role":"user","content":"q"},{"role":"assistant","reasoning_content":"R 漢",
    "content":"let me see","tool_calls":[{"id":"functions.f:0","function":{"name":"f","arguments":"{\"a\":\"é\"}"}},
    {"id":"functions.g:1","function":{"name":"g","arguments":"{}"}}]}])";
  ChatOptions options;
  options.add_generation_prompt = false;
  std::vector<int32_t> ids = encode_chat(bundled(), render_chat(messages, "", options));
  const auto think = std::find(ids.begin(), ids.end(), *bundled().special(kThink));
  Utf8Stream characters;
  std::vector<Event> turn;
  for (auto id = think + 1; *id != *bundled().special("<|im_end|>"); ++id)
    turn.push_back({*id, characters.push(bundled().bytes(*id))});
  CHECK(read(turn, true) == Turn{"R 漢", "let me see",
                                 {{"functions.f:0", "f", "{\"a\":\"é\"}"}, {"functions.g:1", "g", "{}"}}});
}

TEST_CASE("how text is cut changes nothing, and no marker gets out") {
  std::mt19937 random(5);
  auto below = [&](size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); };
  const std::vector<std::string> words = {"a", " ", "\n", "{\"k\": 1}", "functions.f:0", "é漢🙂",
                                          ":", "<|tool", "think>"};
  for (int round = 0; round < 3000; round++) {
    std::vector<Event> turn, cut;
    std::string all_text;
    for (size_t n = below(14); n > 0; n--) {
      std::string text;
      for (size_t i = below(4); i > 0; i--) text += words[below(words.size())];
      all_text += text;
      const bool control = below(2);
      const std::string name = control ? kMarkers[below(kMarkers.size())] : "";
      // The same text before the marker, or in its event.
      turn.push_back(control ? marker(name, text) : Event{-1, text});
      Utf8Stream characters;
      while (!text.empty()) {
        const size_t bytes = 1 + below(text.size());
        cut.push_back({static_cast<int32_t>(below(3)) - 1, characters.push(text.substr(0, bytes))});
        text.erase(0, bytes);
      }
      if (control) cut.push_back(marker(name));
    }
    for (const bool thinking : {false, true}) {
      const Turn whole = read(turn, thinking);
      CHECK(whole == read(cut, thinking));
      std::string joined = whole.reasoning + whole.content;
      for (const Call& call : whole.calls) joined += call.id + call.name + call.arguments;
      for (const std::string& name : kMarkers) CHECK(joined.find(name) == std::string::npos);
      const Turn plain = read(turn, thinking, false);
      CHECK(plain.calls.empty());
      CHECK(plain == read(cut, thinking, false));
      CHECK(plain.reasoning.size() + plain.content.size() == all_text.size());
    }
  }
}

TEST_CASE("a checkpoint without the markers, and pushes after the end") {
  const Tokenizer unnamed = Tokenizer::parse(source_file("models/tiny-k2/tiktoken.model"), kNoNames, "test");
  ReplyParser parser(unnamed, true, true);
  parser.push(*bundled().special(kThinkEnd), "a");
  CHECK(parser.parts()[0].kind == PartKind::reasoning);
  parser.finish();
  CHECK(parser.parts().empty());
  parser.finish();
  CHECK(message_of(Status::invalid_argument, [&] { parser.push(1, "a"); }) ==
        "reply: finished: expected no token after its end");
}
