// kdtree-run bench: speculation modes side by side on the same prompts, in one process, interleaved; with --synthetic a
// rehearsal of one rank.
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
#include "interrupt.h"
#include "options.h"
#include "output.h"
#include "rehearsal.h"

namespace kdt {
namespace {

constexpr int32_t kWarmUpTokens = 16;
// Prefill is short: a few more runs than the decode repeats cost little and steady the best one.
constexpr int32_t kLeastPrefillRuns = 5;
// The longest context of the model family.
constexpr int64_t kMostPrefill = 262144;

const char* const kDefaultModes = "off,chain,tree:8,tree:16,auto";

struct BenchCommand {
  explicit BenchCommand(CLI::App& app) : flags(app, "bench", "Compare speculation modes on the same prompts") {}

  Flags flags;
  EngineFlags engine;
  SamplingFlags sampling;
  RehearsalFlags rehearsal;
  std::vector<Mode> modes;
  std::vector<std::string> kinds;
  std::string prompts;
  int32_t prompts_per_kind = 0;
  int32_t max_tokens = 96;
  int32_t repeat = 3;
  int32_t prefill = 512;
  bool ignore_eos = true;
  bool json = false;

  void declare();
  void settle_modes();
  int run();
};

void BenchCommand::declare() {
  const auto set_modes = [this](const std::string& text) {
    modes.clear();
    for (const std::string& item : split_list(text)) {
      const std::optional<Mode> mode = parse_mode(item);
      if (!mode) return false;
      modes.push_back(*mode);
    }
    return !modes.empty();
  };
  flags.value("--modes",
              {"LIST", "off, auto, chain or tree, the last three with or without :BUDGET (1 to 1024)", set_modes},
              std::string(kDefaultModes) + "; off with --model and no --draft",
              "Speculation modes, between commas");
  flags.value("--kinds", list_form(kinds, "LIST"), "all of the set",
              "Kinds of prompts, between commas: code,prose,chat");
  flags.value("--prompts", text_form(prompts, "FILE"), "the bundled set of 18",
              "JSON array of {\"kind\", \"name\", \"text\" or \"messages\"}");
  flags.value("--prompts-per-kind", integer_form(prompts_per_kind, 1), "all", "Only the first N prompts of each kind");
  flags.value("--max-tokens", integer_form(max_tokens, 2), std::to_string(max_tokens), "Tokens to generate per prompt");
  flags.value("--repeat", integer_form(repeat, 1, 1000), std::to_string(repeat), "Runs of every prompt in every mode");
  flags.value("--prefill", integer_form(prefill, 0, kMostPrefill), std::to_string(prefill) + ", or the context but one",
              "Tokens of the prompt whose time to first token is measured; 0: none");
  flags.toggle("--ignore-eos", ignore_eos, "Decode past stop tokens, so that every mode does the same fixed work");
  sampling.declare(flags, "0");
  engine.declare(flags);
  engine.declare_replay(flags);
  flags.toggle("--json", json, "Print one JSON object instead of the tables");
  rehearsal.declare(flags);
}

void BenchCommand::settle_modes() {
  const auto speculates = [](const Mode& mode) { return mode.speculate != KDT_SPECULATE_OFF; };
  const bool asked = !modes.empty();
  if (!asked) {
    for (const std::string& item : split_list(kDefaultModes)) modes.push_back(*parse_mode(item));
  }
  if (engine.has_drafter() || std::none_of(modes.begin(), modes.end(), speculates)) return;
  if (asked) fail_usage(flags.source("--modes"), "speculation", "--draft DIR beside --model, or off");
  std::cerr << "note: --model without --draft: speculation is off" << std::endl;
  modes.erase(std::remove_if(modes.begin(), modes.end(), speculates), modes.end());
}

// One run of the bench: requests go to the engine one at a time, from this thread.
class Bench {
 public:
  Bench(const BenchCommand& command, const Engine& engine, std::vector<BenchPrompt> prompts)
      : command_(command), engine_(engine), prompts_(std::move(prompts)), reference_(prompts_.size()) {}

  BenchReport run();

 private:
  Generation generate(const std::vector<int32_t>& ids, const Mode& mode, int32_t max_tokens) const;
  void run_prompt(size_t prompt, size_t repeat);
  void compare(size_t prompt, const Mode& mode, const std::vector<int32_t>& ids);
  void measure_prefill();
  void make_rows();

  // Tallies of one kind and one repeat, a mode each.
  using Cell = std::vector<Tally>;

  const BenchCommand& command_;
  const Engine& engine_;
  const std::vector<BenchPrompt> prompts_;
  std::vector<std::vector<int32_t>> reference_;  // per prompt, the ids its first run gave
  std::vector<std::string> kinds_;               // in the order of the prompts
  std::vector<std::vector<Cell>> cells_;         // [kind][repeat]
  BenchReport report_;
};

Generation Bench::generate(const std::vector<int32_t>& ids, const Mode& mode, int32_t max_tokens) const {
  kdt_request_options options = default_request_options();
  command_.sampling.apply(options);
  options.has_seed = 1;
  options.prompt = ids.data();
  options.n_prompt = static_cast<int64_t>(ids.size());
  options.max_tokens = max_tokens;
  options.speculate = mode.speculate;
  options.budget = mode.budget;
  options.ignore_eos = command_.ignore_eos ? 1 : 0;
  Generation generation = run_request(engine_, options, nullptr);
  if (interrupted()) throw Failure(kExitInterrupted, "bench: interrupted: expected to run to its end");
  if (generation.result.finish_reason == KDT_FINISH_ERROR) throw Failure(kExitFailed, generation.error);
  return generation;
}

void Bench::compare(size_t prompt, const Mode& mode, const std::vector<int32_t>& ids) {
  std::vector<int32_t>& reference = reference_[prompt];
  if (reference.empty()) reference = ids;
  if (ids == reference || !report_.difference.empty()) return;
  const auto at = std::mismatch(ids.begin(), ids.end(), reference.begin(), reference.end()).first - ids.begin();
  report_.difference = "prompt " + std::to_string(prompt) + " (" + prompts_[prompt].name + "), mode " + mode.name +
                       ", token " + std::to_string(at);
}

void Bench::run_prompt(size_t prompt, size_t repeat) {
  const size_t kind = static_cast<size_t>(
      std::find(kinds_.begin(), kinds_.end(), prompts_[prompt].kind) - kinds_.begin());
  const size_t n_modes = command_.modes.size();
  for (size_t i = 0; i < n_modes; ++i) {
    // Another mode goes first each time: none always follows the same neighbour.
    const size_t at = (i + prompt + repeat) % n_modes;
    const Mode& mode = command_.modes[at];
    const Generation generation = generate(prompts_[prompt].ids, mode, command_.max_tokens);
    compare(prompt, mode, generation.ids);
    cells_[kind][repeat][at].add(generation, !command_.engine.replay.empty());
  }
}

void Bench::measure_prefill() {
  if (command_.prefill == 0) return;
  std::vector<int32_t> text;
  const auto wanted = static_cast<size_t>(command_.prefill);
  const size_t n_runs = static_cast<size_t>(std::max(command_.repeat, kLeastPrefillRuns));
  while (text.size() < wanted + n_runs) {
    for (const BenchPrompt& prompt : prompts_) text.insert(text.end(), prompt.ids.begin(), prompt.ids.end());
  }
  report_.prefill.tokens = command_.prefill;
  for (size_t i = 0; i < n_runs; ++i) {
    if (stderr_is_terminal()) {
      std::cerr << "\rfirst token of " << wanted << ", run " << i + 1 << "/" << n_runs << " " << std::flush;
    }
    // Each run starts one token later, so that nothing of an earlier one can be reused.
    const auto begin = text.begin() + static_cast<std::ptrdiff_t>(i);
    const std::vector<int32_t> ids(begin, begin + command_.prefill);
    report_.prefill.first_token_ms.push_back(generate(ids, Mode{"off", KDT_SPECULATE_OFF, 0}, 1).result.first_token_ms);
  }
  if (stderr_is_terminal()) std::cerr << "\r\x1b[K" << std::flush;
}

void Bench::make_rows() {
  std::vector<std::vector<Cell>> cells = cells_;
  std::vector<std::string> kinds = kinds_;
  if (kinds.size() > 1) {
    std::vector<Cell> all = cells_.front();
    for (size_t kind = 1; kind < cells_.size(); ++kind) {
      for (size_t repeat = 0; repeat < all.size(); ++repeat) {
        for (size_t mode = 0; mode < all[repeat].size(); ++mode) all[repeat][mode].add(cells_[kind][repeat][mode]);
      }
    }
    cells.push_back(std::move(all));
    kinds.push_back("all");
  }
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    for (size_t mode = 0; mode < command_.modes.size(); ++mode) {
      BenchRow row{kinds[kind], command_.modes[mode], {}};
      for (const Cell& repeat : cells[kind]) row.repeats.push_back(repeat[mode]);
      report_.rows.push_back(std::move(row));
    }
  }
}

BenchReport Bench::run() {
  for (const BenchPrompt& prompt : prompts_) {
    if (std::find(kinds_.begin(), kinds_.end(), prompt.kind) == kinds_.end()) kinds_.push_back(prompt.kind);
  }
  const auto n_repeats = static_cast<size_t>(command_.repeat);
  cells_.assign(kinds_.size(), std::vector<Cell>(n_repeats, Cell(command_.modes.size())));

  for (const Mode& mode : command_.modes) {
    generate(prompts_.front().ids, mode, std::min(kWarmUpTokens, command_.max_tokens));
  }
  const bool show_progress = stderr_is_terminal();
  for (size_t repeat = 0; repeat < n_repeats; ++repeat) {
    for (size_t prompt = 0; prompt < prompts_.size(); ++prompt) {
      if (show_progress) {
        std::cerr << "\rrepeat " << repeat + 1 << "/" << n_repeats << ", prompt " << prompt + 1 << "/"
                  << prompts_.size() << " " << std::flush;
      }
      run_prompt(prompt, repeat);
    }
  }
  if (show_progress) std::cerr << "\r\x1b[K" << std::flush;
  measure_prefill();
  make_rows();
  return report_;
}

int BenchCommand::run() {
  if (rehearsal.synthetic) return rehearsal.run(flags, engine, json);
  rehearsal.check_unused(flags);
  if (is_follower()) return follow(engine.to_options());
  settle_modes();
  const Engine loaded(engine.to_options());
  const auto context = loaded.info().at("max_context").get<int64_t>();
  if (!flags.given("--prefill")) prefill = static_cast<int32_t>(std::min<int64_t>(prefill, context - 1));
  if (prefill >= context)
    fail_usage(flags.source("--prefill"), std::to_string(prefill), "less than the context, " + std::to_string(context));
  std::vector<BenchPrompt> set = load_bench_prompts(loaded, prompts, kinds, prompts_per_kind);
  const uint64_t seed = sampling.seed.value_or(0);
  const BenchSettings settings{max_tokens, repeat, sampling.temperature, seed, ignore_eos, set.size()};
  const auto start = std::chrono::steady_clock::now();
  BenchReport report = Bench(*this, loaded, std::move(set)).run();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const nlohmann::ordered_json info = loaded.info();
  write_stdout(json ? bench_json(report, settings, info).dump(2) + "\n" : bench_text(report, settings, info));
  if (!report.difference.empty()) fail_run("token ids", report.difference, "the same in every mode");
  return kExitOk;
}

}  // namespace

Command add_bench(CLI::App& app) {
  const auto command = std::make_shared<BenchCommand>(app);
  command->declare();
  return command_of(command);
}

}  // namespace kdt
