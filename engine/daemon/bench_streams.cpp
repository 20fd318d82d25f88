// kdtree-run bench-streams: many streams at once: tokens/s of all together, the host's share of a round, prefix hits.
#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench_prompts.h"
#include "bench_samples.h"
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
using Clock = std::chrono::steady_clock;

constexpr int64_t kMostStreams = 64;
// A page, which the prefix cache keeps, and a token.
constexpr int32_t kLeastPrefill = 65;

struct Sample {
  double tokens_per_second, round_ms, host_us, acceptance;
};

struct Row {
  int64_t streams;
  Mode mode;
  std::vector<Sample> samples;

  // The middle of `of` over the samples.
  double median(double Sample::*of) const {
    std::vector<double> values;
    for (const Sample& sample : samples) values.push_back(sample.*of);
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }
};

struct StreamsBench {
  explicit StreamsBench(CLI::App& app) : flags(app, "bench-streams", "Measure many streams at once, and prefix hits") {}

  Flags flags;
  EngineFlags engine;
  std::vector<int64_t> streams{1, 10, 64};
  std::vector<Mode> modes;
  std::vector<std::string> kinds;
  SamplingFlags sampling;
  int32_t max_tokens = 96;
  int32_t repeat = 3;
  int32_t prefill = 512;
  bool json = false;

  void declare();
  int run();
};

void StreamsBench::declare() {
  flags.value("--streams", {"LIST", "counts from 1 to 64, between commas", [this](const std::string& text) {
                streams.clear();
                for (const std::string& item : split_list(text)) {
                  const auto count = parse_integer(item, 1, kMostStreams);
                  if (!count) return false;
                  streams.push_back(*count);
                }
                return !streams.empty();
              }}, "1,10,64", "Streams that run together");
  flags.value("--modes", {"LIST", "off, auto, chain or tree, the last three with or without :BUDGET (1 to 1024)",
                          [this](const std::string& text) {
                            modes.clear();
                            for (const std::string& item : split_list(text)) {
                              const auto mode = parse_mode(item);
                              if (!mode) return false;
                              modes.push_back(*mode);
                            }
                            return !modes.empty();
                          }}, "off,auto; off with --model and no --draft", "Speculation modes, between commas");
  flags.value("--max-tokens", integer_form(max_tokens, 2), std::to_string(max_tokens), "Tokens to generate per stream");
  flags.value("--repeat", integer_form(repeat, 1, 1000), std::to_string(repeat), "Runs of every row");
  flags.value("--prefill", integer_form(prefill, kLeastPrefill, 262144), std::to_string(prefill) + ", or the context but two",
              "Tokens of the prompt whose first token is timed, cold and from the prefix cache");
  flags.value("--kinds", list_form(kinds, "LIST"), "all of the set", "Kinds of prompts, between commas: code,prose,chat");
  sampling.declare(flags, "0; the n-th stream's is n more");
  engine.declare(flags);
  engine.declare_replay(flags);
  flags.toggle("--json", json, "Print one JSON object instead of the table");
}

struct RequestShape {
  Mode mode;
  int32_t max_tokens;
  const SamplingFlags* sampling = nullptr;   // null: greedy
};

// `index`: of the stream, which has a seed of its own.
RequestHandle submit(const Engine& engine, const std::vector<int32_t>& ids, const RequestShape& shape, uint64_t index = 0) {
  kdt_request_options options = default_request_options();
  if (shape.sampling) {
    shape.sampling->apply(options);
    options.has_seed = 1;
    options.seed = shape.sampling->seed.value_or(0) + index;
  }
  options.prompt = ids.data();
  options.n_prompt = static_cast<int64_t>(ids.size());
  options.max_tokens = shape.max_tokens;
  options.ignore_eos = 1;
  options.speculate = shape.mode.speculate;
  options.budget = shape.mode.budget;
  kdt_request* raw = nullptr;
  check(kdt_request_submit(engine.get(), &options, &raw));
  return RequestHandle(raw);
}

// Reads to the end: one reader, like a server's.
kdt_result finish(const RequestHandle& request) {
  kdt_event events[64];
  for (int64_t n = 1; n > 0;) {
    const kdt_status status = kdt_request_next(request.get(), events, 64, &n, 100);
    if (interrupted()) throw Failure(kExitInterrupted, "bench-streams: interrupted: expected to run to its end");
    if (status == KDT_ERR_TIMEOUT) n = 1;
    else check(status);
  }
  kdt_result result = {};
  result.struct_size = sizeof(result);
  check(kdt_request_result(request.get(), &result));
  if (result.finish_reason == KDT_FINISH_ERROR) throw Failure(kExitFailed, result.error);
  return result;
}

// Of draft to commit, as the engine counts them: under --replay, what they would take there.
double seconds_of_rounds(const Figures& figures) {
  double seconds = 0;
  for (const char* phase : {"draft", "build", "verify", "sample", "accept", "commit"})
    seconds += figures.at("step_seconds_sum{phase=\"" + std::string(phase) + "\"}");
  return seconds;
}

Sample measure(const Engine& engine, const std::vector<BenchPrompt>& prompts, const Row& row, const RequestShape& shape,
               bool replayed) {
  const Figures before = Figures::read(engine.get());
  std::vector<RequestHandle> requests;
  const auto start = Clock::now();
  for (size_t i = 0; i < static_cast<size_t>(row.streams); ++i)
    requests.push_back(submit(engine, prompts[i % prompts.size()].ids, shape, i));
  double decode_rounds = 0, committed = 0;
  for (const RequestHandle& request : requests) {
    const kdt_result result = finish(request);
    decode_rounds += static_cast<double>(result.rounds);
    committed += result.tokens_per_round * static_cast<double>(result.rounds);
  }
  const double on_clock = std::chrono::duration<double>(Clock::now() - start).count();
  const Figures after = Figures::read(engine.get());
  const auto grown = [&](const char* name) { return after.at(name) - before.at(name); };
  const double n_rounds = grown("rounds_total");
  const double seconds = replayed ? seconds_of_rounds(after) - seconds_of_rounds(before) : on_clock;
  return {static_cast<double>(row.streams) * shape.max_tokens / seconds, seconds / n_rounds * 1e3,
          grown("host_seconds_total") / n_rounds * 1e6, committed / decode_rounds};
}

// Medians of the first token's milliseconds: cold, and with all whole pages but the last token's known.
std::pair<double, double> measure_first_token(const Engine& engine, const std::vector<BenchPrompt>& prompts,
                                              int32_t n_tokens, int32_t repeat) {
  std::vector<int32_t> text;
  while (text.size() < static_cast<size_t>(n_tokens))
    for (const BenchPrompt& prompt : prompts) text.insert(text.end(), prompt.ids.begin(), prompt.ids.end());
  text.resize(static_cast<size_t>(n_tokens));
  const RequestShape shape{{"off", KDT_SPECULATE_OFF, 0}, 2};
  std::vector<double> cold, hit;
  for (int32_t i = 0; i < repeat + 2; ++i) {
    check(kdt_engine_reset_prefix_cache(engine.get(), nullptr));
    cold.push_back(finish(submit(engine, text, shape)).first_token_ms);
    hit.push_back(finish(submit(engine, text, shape)).first_token_ms);
  }
  std::sort(cold.begin(), cold.end());
  std::sort(hit.begin(), hit.end());
  return {cold[cold.size() / 2], hit[hit.size() / 2]};
}

int StreamsBench::run() {
  if (is_follower()) return follow(engine.to_options());
  const bool chosen = !modes.empty();
  if (!chosen) modes = {*parse_mode("off"), *parse_mode("auto")};
  if (!engine.has_drafter()) {
    const auto speculates = [](const Mode& mode) { return mode.speculate != KDT_SPECULATE_OFF; };
    if (chosen && std::any_of(modes.begin(), modes.end(), speculates))
      fail_usage(flags.source("--modes"), "speculation", "--draft DIR beside --model, or off");
    modes = {*parse_mode("off")};
  }
  const Engine loaded(engine.to_options());
  const auto context = loaded.info().at("max_context").get<int64_t>();
  if (!flags.given("--prefill")) prefill = static_cast<int32_t>(std::min<int64_t>(prefill, context - 2));
  if (prefill < kLeastPrefill)
    fail_usage(flags.source("--max-context"), std::to_string(context), "at least " + std::to_string(kLeastPrefill + 2) +
               ": a whole page, a token and two that follow");
  if (prefill + 2 > context)
    fail_usage(flags.source("--prefill"), std::to_string(prefill), "at most " + std::to_string(context - 2) +
               ": two tokens follow in a context of " + std::to_string(context));
  const InterruptScope scope;
  const std::vector<BenchPrompt> prompts = load_bench_prompts(loaded, "", kinds, 0);
  std::vector<Row> rows;
  for (const Mode& mode : modes)
    for (const int64_t count : streams) rows.push_back({count, mode, {}});
  // Interleaved, so that whatever else the machine does falls on all rows alike.
  for (int32_t i = 0; i < repeat; ++i) {
    for (Row& row : rows) {
      if (stderr_is_terminal())
        std::cerr << "\rrepeat " << i + 1 << "/" << repeat << ", " << counted(row.streams, "stream") << ", " << row.mode.name
                  << "   " << std::flush;
      row.samples.push_back(measure(loaded, prompts, row, {row.mode, max_tokens, &sampling}, !engine.replay.empty()));
    }
  }
  if (stderr_is_terminal()) std::cerr << "\r\x1b[K" << std::flush;
  const auto [cold, hit] = measure_first_token(loaded, prompts, prefill, repeat);

  Table table({"mode", "streams", "tokens/s", "x first row", "ms/round", "host us/round", "tokens/round"});
  Json list = Json::array();
  for (const Row& row : rows) {
    const double rate = row.median(&Sample::tokens_per_second), first = rows.front().median(&Sample::tokens_per_second);
    table.add({row.mode.name, std::to_string(row.streams), fixed(rate, 0), fixed(rate / first, 2),
               fixed(row.median(&Sample::round_ms), 2), fixed(row.median(&Sample::host_us), 1),
               fixed(row.median(&Sample::acceptance), 2)});
    list.push_back({{"mode", row.mode.name},
                    {"streams", row.streams},
                    {"tokens_per_second", rate},
                    {"round_ms", row.median(&Sample::round_ms)},
                    {"host_us_per_round", row.median(&Sample::host_us)},
                    {"tokens_per_round", row.median(&Sample::acceptance)}});
  }
  if (json) {
    const Json report = {{"schema_version", 1},
                         {"rows", list},
                         {"prefill_tokens", prefill},
                         {"first_token_ms_cold", cold},
                         {"first_token_ms_prefix_hit", hit},
                         {"engine", loaded.info()}};
    write_stdout(report.dump(2) + "\n");
  } else {
    write_stdout(table.render(1) + "\nfirst token of " + counted(prefill, "token") + ": cold " + fixed(cold, 1) +
                 " ms, prefix hit " + fixed(hit, 1) + " ms (medians of " + std::to_string(repeat + 2) +
                 ")\nmedians of " + counted(repeat, "run") + " of " + counted(max_tokens, "token") + " a stream\n");
  }
  return kExitOk;
}

}  // namespace

Command add_bench_streams(CLI::App& app) {
  const auto command = std::make_shared<StreamsBench>(app);
  command->declare();
  return command_of(command);
}

}  // namespace kdt
