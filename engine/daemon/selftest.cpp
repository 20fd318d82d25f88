// kdtree-run selftest: on the user's own machine and weights, is speculation lossless to the bit, and how fast is
// memory?
//
// Every prompt is generated plainly first. Then by chain, by trees and by auto, from the prefix cache, and all at once:
// token ids and the log-probabilities' bits must be the same each time.
#include <chrono>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench_prompts.h"
#include "client.h"
#include "commands.h"
#include "failure.h"
#include "figures.h"
#include "interrupt.h"
#include "options.h"
#include "output.h"
#include "table.h"

namespace kdt {
namespace {

using Json = nlohmann::ordered_json;

constexpr int32_t kTokens = 64, kTop = 5;
constexpr double kMostSeconds = 25;   // no further prompt is begun after it; the whole stays under a minute

struct Output {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;   // of every token and the top beside it
  bool same_ids(const Output& other) const { return ids == other.ids; }
  bool same_bits(const Output& other) const {
    return logprobs.size() == other.logprobs.size() &&
           std::memcmp(logprobs.data(), other.logprobs.data(), logprobs.size() * sizeof(float)) == 0;
  }
};

const Mode kSpeculations[] = {{"chain", KDT_SPECULATE_CHAIN, 0},  {"tree, 1 node", KDT_SPECULATE_TREE, 1},
                                  {"tree, 8 nodes", KDT_SPECULATE_TREE, 8}, {"tree, 64 nodes", KDT_SPECULATE_TREE, 64},
                                  {"auto", KDT_SPECULATE_AUTO, 0}};

// A check by name: how often it was made and how often it failed.
struct Comparison {
  int64_t made = 0, failed = 0;
  void add(bool good) {
    ++made;
    failed += !good;
  }
};

class SelfTest {
 public:
  explicit SelfTest(const Engine& engine) : engine_(engine) {}

  void run(const std::vector<BenchPrompt>& prompts, bool has_drafter);
  Table table() const;
  Json json() const;
  bool passed() const;

 private:
  struct Case {
    std::vector<int32_t> ids;
    double temperature;
    Output plain;
  };
  RequestHandle submit(const Case& one, const Mode& mode) const;
  Output read(const RequestHandle& request);
  void compare(const std::string& name, const Case& one, const Output& got);

  const Engine& engine_;
  std::vector<Case> cases_;
  std::vector<std::string> order_;
  std::map<std::string, Comparison> ids_, bits_;
  size_t left_out_ = 0;          // prompts there was no time for
  double tokens_per_second_ = 0, bytes_per_second_ = 0, together_ = 0;
};

RequestHandle SelfTest::submit(const Case& one, const Mode& mode) const {
  kdt_request_options options = default_request_options();
  options.prompt = one.ids.data();
  options.n_prompt = static_cast<int64_t>(one.ids.size());
  options.max_tokens = kTokens;
  options.temperature = one.temperature;
  options.has_seed = 1;
  options.seed = 20260401;
  options.ignore_eos = 1;
  options.logprobs = kTop;
  options.speculate = mode.speculate;
  options.budget = mode.budget;
  kdt_request* raw = nullptr;
  check(kdt_request_submit(engine_.get(), &options, &raw));
  return RequestHandle(raw);
}

Output SelfTest::read(const RequestHandle& request) {
  Output out;
  kdt_event events[64];
  for (int64_t n = 1; n > 0;) {
    const kdt_status status = kdt_request_next(request.get(), events, 64, &n, 100);
    if (interrupted()) throw Failure(kExitInterrupted, "selftest: interrupted: expected to run to its end");
    if (status == KDT_ERR_TIMEOUT) {
      n = 1;
      continue;
    }
    check(status);
    for (int64_t i = 0; i < n; ++i) {
      if (events[i].kind != KDT_EVENT_TOKEN) continue;
      out.ids.push_back(events[i].token_id);
      out.logprobs.push_back(events[i].logprob);
      out.logprobs.insert(out.logprobs.end(), events[i].top_logprobs, events[i].top_logprobs + events[i].n_top);
    }
  }
  kdt_result result;
  result.struct_size = sizeof(result);
  check(kdt_request_result(request.get(), &result));
  if (result.finish_reason == KDT_FINISH_ERROR) throw Failure(kExitFailed, result.error);
  return out;
}

void SelfTest::compare(const std::string& name, const Case& one, const Output& got) {
  if (ids_.count(name) == 0) order_.push_back(name);
  ids_[name].add(got.same_ids(one.plain));
  bits_[name].add(got.same_bits(one.plain));
}

void SelfTest::run(const std::vector<BenchPrompt>& prompts, bool has_drafter) {
  using Clock = std::chrono::steady_clock;
  const InterruptScope scope;
  const auto start = Clock::now();
  const auto seconds = [](Clock::time_point from) {
    return std::chrono::duration<double>(Clock::now() - from).count();
  };
  const Mode off{"off", KDT_SPECULATE_OFF, 0};
  double plain_tokens = 0, plain_seconds = 0;
  double bytes = 0;
  for (const BenchPrompt& prompt : prompts) {
    if (!cases_.empty() && seconds(start) > kMostSeconds) break;
    for (const double temperature : {0.0, 0.8}) {
      if (stderr_is_terminal())
        std::cerr << "\rprompt " << cases_.size() / 2 + 1 << "/" << prompts.size() << " " << std::flush;
      Case one{prompt.ids, temperature, {}};
      check(kdt_engine_reset_prefix_cache(engine_.get(), nullptr));
      const double bytes_before = Figures::read(engine_.get()).at("estimated_read_bytes_total");
      const auto before = Clock::now();
      one.plain = read(submit(one, off));
      plain_seconds += seconds(before);
      plain_tokens += static_cast<double>(one.plain.ids.size());
      bytes += Figures::read(engine_.get()).at("estimated_read_bytes_total") - bytes_before;
      if (has_drafter)
        for (const Mode& mode : kSpeculations) compare(mode.name, one, read(submit(one, mode)));
      // By now the prompt's whole pages are known.
      compare("prefix cache", one, read(submit(one, off)));
      cases_.push_back(std::move(one));
    }
  }
  if (stderr_is_terminal()) std::cerr << "\r\x1b[K" << std::flush;
  left_out_ = prompts.size() - cases_.size() / 2;
  tokens_per_second_ = plain_tokens / plain_seconds;
  bytes_per_second_ = bytes / plain_seconds;

  std::vector<RequestHandle> requests;
  const auto before = Clock::now();
  for (size_t i = 0; i < cases_.size(); ++i)
    requests.push_back(submit(cases_[i], has_drafter ? kSpeculations[i % std::size(kSpeculations)] : off));
  for (size_t i = 0; i < cases_.size(); ++i) compare("all at once", cases_[i], read(requests[i]));
  together_ = plain_tokens / seconds(before);
}

bool SelfTest::passed() const {
  for (const std::string& name : order_)
    if (ids_.at(name).failed + bits_.at(name).failed > 0) return false;
  return !order_.empty();
}

Table SelfTest::table() const {
  Table table({"compared with plain decoding", "runs", "token ids", "log-probability bits"});
  const auto verdict = [](const Comparison& tally) {
    return tally.failed == 0 ? std::string("same") : std::to_string(tally.failed) + " differ";
  };
  for (const std::string& name : order_)
    table.add({name, std::to_string(ids_.at(name).made), verdict(ids_.at(name)), verdict(bits_.at(name))});
  return table;
}

Json SelfTest::json() const {
  Json checks = Json::array();
  for (const std::string& name : order_)
    checks.push_back({{"name", name},
                      {"runs", ids_.at(name).made},
                      {"different_ids", ids_.at(name).failed},
                      {"different_logprob_bits", bits_.at(name).failed}});
  return {{"schema_version", 1},
          {"passed", passed()},
          {"checks", checks},
          {"prompts", cases_.size() / 2},
          {"prompts_left_out", left_out_},
          {"plain_tokens_per_second", tokens_per_second_},
          {"together_tokens_per_second", together_},
          {"plain_read_gb_per_second", bytes_per_second_ / 1e9}};
}

struct SelfTestCommand {
  explicit SelfTestCommand(CLI::App& app)
      : flags(app, "selftest", "Check on this machine that speculation changes no bit; under a minute") {}

  Flags flags;
  EngineFlags engine;
  bool json = false;

  int run() const;
};

int SelfTestCommand::run() const {
  if (is_follower()) return follow(engine.to_options());
  const Engine loaded(engine.to_options());
  const std::vector<BenchPrompt> prompts = load_bench_prompts(loaded, "", {}, 2);
  SelfTest test(loaded);
  test.run(prompts, engine.has_drafter());
  const Json report = test.json();
  if (json) {
    write_stdout(report.dump(2) + "\n");
  } else {
    const auto number = [&](const char* name, int digits) { return fixed(report[name].get<double>(), digits); };
    const char* verdict = test.passed() ? "selftest: passed\n"
                                        : "selftest: FAILED: this build is not lossless here; please report it\n";
    const auto left_out = report["prompts_left_out"].get<int64_t>();
    const std::string note = left_out == 0 ? "" : "after " + fixed(kMostSeconds, 0) + " s there was no time for " + counted(left_out, "more prompt") + "\n";
    const std::string together = counted(2 * report["prompts"].get<int64_t>(), "request") + " at once, prompts included, " +
                                 (engine.has_drafter() ? "chain, trees and auto by turns: " : "plain: ");
    write_stdout(test.table().render(1) + note + "\nplain decoding, one request at a time: " + number("plain_tokens_per_second", 0) +
                 " tokens/s, reading " + number("plain_read_gb_per_second", 2) +
                 " GB/s of weights (estimate)\n" + together + number("together_tokens_per_second", 0) +
                 " tokens/s\n" + verdict);
  }
  return test.passed() ? kExitOk : kExitFailed;
}

}  // namespace

Command add_selftest(CLI::App& app) {
  const auto command = std::make_shared<SelfTestCommand>(app);
  command->engine.declare(command->flags);
  command->flags.toggle("--json", command->json, "Print one JSON object instead of a table");
  return command_of(command);
}

}  // namespace kdt
