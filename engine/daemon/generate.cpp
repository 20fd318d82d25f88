// kdtree-run generate: one prompt in, text out as it is generated.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "client.h"
#include "commands.h"
#include "failure.h"
#include "interrupt.h"
#include "openai_utf8.h"
#include "options.h"
#include "output.h"
#include "table.h"

namespace kdt {
namespace {

// More text than any context holds; a larger file is a mistake, not a prompt.
constexpr size_t kMaxPromptBytes = size_t{64} << 20;

enum class PromptKind { text, file, chat };

struct Prompt {
  PromptKind kind;
  std::string text;
};

struct GenerateCommand {
  explicit GenerateCommand(CLI::App& app) : flags(app, "generate", "Continue a prompt, or answer a chat turn") {}

  Flags flags;
  EngineFlags engine;
  SamplingFlags sampling;
  std::string prompt;
  std::string prompt_file;
  std::string chat;
  int32_t thinking = KDT_THINKING_DEFAULT;
  int32_t max_tokens = 128;
  int32_t speculate = KDT_SPECULATE_AUTO;
  int32_t budget = 0;
  bool ignore_eos = false;
  bool json = false;

  void declare();
  Prompt read() const;
  void settle_speculation();
  int run();
};

struct PromptSource {
  const char* flag;
  PromptKind kind;
};
constexpr PromptSource kPromptSources[] = {
    {"--prompt", PromptKind::text}, {"--prompt-file", PromptKind::file}, {"--chat", PromptKind::chat}};

void GenerateCommand::declare() {
  flags.value("--prompt", text_form(prompt, "TEXT", true), "none; one prompt is needed",
              "Raw text to continue; special-token strings in it are text");
  flags.value("--prompt-file", text_form(prompt_file, "FILE"), "none", "The same from a file; - is standard input");
  flags.value("--chat", text_form(chat, "TEXT", true), "none", "One user turn in the model's chat format");
  flags.value("--thinking", choice_form(thinking, {{"on", KDT_THINKING_ON}, {"off", KDT_THINKING_OFF}}),
              "off for the bundled model, on for K2.x checkpoints", "Whether a --chat answer starts with reasoning");
  flags.value("--max-tokens", integer_form(max_tokens, 1), std::to_string(max_tokens), "Tokens to generate");
  flags.value("--speculate",
              choice_form(speculate, {{"auto", KDT_SPECULATE_AUTO},
                                      {"off", KDT_SPECULATE_OFF},
                                      {"chain", KDT_SPECULATE_CHAIN},
                                      {"tree", KDT_SPECULATE_TREE}}),
              "auto; off with --model and no --draft", "How drafts are made. Changes no token of the output");
  flags.value("--budget", integer_form(budget, 1, 1024), "16 for tree, the block less one for chain, 63 for auto",
              "Draft nodes per round, without the root");
  sampling.declare(flags, "random, and reported");
  flags.toggle("--ignore-eos", ignore_eos, "Stop tokens are ordinary tokens");
  engine.declare(flags);
  flags.toggle("--json", json, "Print one JSON object instead of the text");
}

// The one prompt source that was given. One on the command line outweighs those in the environment.
const PromptSource& choose_source(const Flags& flags) {
  const PromptSource* chosen = nullptr;
  for (const bool on_command_line : {true, false}) {
    for (const PromptSource& source : kPromptSources) {
      if (!flags.given(source.flag)) continue;
      if (flags.on_command_line(source.flag) != on_command_line) continue;
      if (chosen) fail_usage(flags.source(source.flag), "given beside " + flags.source(chosen->flag), "one prompt");
      chosen = &source;
    }
    if (chosen) return *chosen;
  }
  fail_usage("--prompt", "not given", "a prompt: --prompt TEXT, --prompt-file FILE or --chat TEXT");
}

std::string read_file(const std::string& path) {
  const bool from_stdin = path == "-";
  struct Close {
    void operator()(FILE* file) const noexcept {
      if (file != stdin) std::fclose(file);
    }
  };
  const std::unique_ptr<FILE, Close> file(from_stdin ? stdin : std::fopen(path.c_str(), "rb"));
  if (!file) fail_run(path, std::strerror(errno), "a readable file");
  std::string text;
  char buffer[1 << 16];
  while (const size_t n = std::fread(buffer, 1, sizeof(buffer), file.get())) {
    text.append(buffer, n);
    if (text.size() > kMaxPromptBytes) fail_run(path, "more than 64 MiB", "a prompt that fits the context");
  }
  if (std::ferror(file.get())) fail_run(path, std::strerror(errno), "a readable file");
  return text;
}

Prompt GenerateCommand::read() const {
  const PromptSource& source = choose_source(flags);
  const bool from_file = source.kind == PromptKind::file;
  const std::string text = from_file ? read_file(prompt_file) : source.kind == PromptKind::chat ? chat : prompt;
  const std::string name = from_file ? prompt_file : flags.source(source.flag);
  if (text.empty()) fail_run(name, "", "at least one character");
  if (!openai::is_utf8(text)) fail_run(name, "other bytes", "UTF-8 text");
  return {source.kind, text};
}

void GenerateCommand::settle_speculation() {
  if (engine.has_drafter() || speculate == KDT_SPECULATE_OFF) return;
  if (speculate != KDT_SPECULATE_AUTO) {
    fail_usage(flags.source("--speculate"), speculate_name(speculate), "--draft DIR beside --model, or off");
  }
  std::cerr << "note: --model without --draft: speculation is off" << std::endl;
  speculate = KDT_SPECULATE_OFF;
}

// The token id or the stop string that ended the text; null when neither did.
nlohmann::ordered_json stop_reason(const Generation& generation) {
  if (!generation.stop_string.empty()) return generation.stop_string;
  if (generation.result.stop_token >= 0) return generation.result.stop_token;
  return nullptr;
}

nlohmann::ordered_json to_json(const GenerateCommand& command, const Generation& generation) {
  const kdt_result& result = generation.result;
  nlohmann::ordered_json timings = nlohmann::ordered_json::object();
  for (int32_t stage = 0; stage < KDT_N_STAGES; ++stage) timings[kdt_stage_name(stage)] = result.timings_ms[stage];
  nlohmann::ordered_json out;
  out["schema_version"] = 1;
  out["text"] = generation.text;
  out["token_ids"] = generation.ids;
  out["prompt_tokens"] = result.prompt_tokens;
  out["rounds"] = result.rounds;
  out["tokens_per_round"] = result.tokens_per_round;
  out["tokens_per_second"] = result.tokens_per_second;
  out["accepted_by_depth"] = generation.accepted_by_depth;
  out["finish_reason"] = kdt_finish_name(result.finish_reason);
  out["stop_reason"] = stop_reason(generation);
  out["seed"] = result.seed;
  out["timings_ms"] = timings;
  out["first_token_ms"] = result.first_token_ms;
  out["queue_ms"] = result.queue_ms;
  out["total_ms"] = result.total_ms;
  out["cached_tokens"] = result.cached_tokens;
  out["preemptions"] = result.preemptions;
  out["drafted_rounds"] = result.drafted_rounds;
  out["draft_nodes"] = result.draft_nodes;
  out["speculate"] = speculate_name(command.speculate);
  out["budget"] = command.budget > 0 ? nlohmann::ordered_json(command.budget) : nlohmann::ordered_json(nullptr);
  return out;
}

std::string summary(const Generation& generation, bool sampled) {
  const kdt_result& result = generation.result;
  return counted(static_cast<int64_t>(generation.ids.size()), "token") + ", " + fixed(result.tokens_per_second, 1) + " tokens/s, " +
         fixed(result.tokens_per_round, 2) + " tokens/round, " + kdt_finish_name(result.finish_reason) +
         (sampled ? ", seed " + std::to_string(result.seed) : "");
}

int GenerateCommand::run() {
  if (is_follower()) return follow(engine.to_options());
  // What can be refused without the model is refused before the wait for it.
  const Prompt input = read();
  settle_speculation();
  const Engine loaded(engine.to_options());
  const std::vector<int32_t> ids = input.kind == PromptKind::chat
                                       ? loaded.encode_chat(user_turn(input.text), thinking)
                                       : loaded.tokenize(input.text);

  kdt_request_options options = default_request_options();
  sampling.apply(options);
  options.prompt = ids.data();
  options.n_prompt = static_cast<int64_t>(ids.size());
  options.max_tokens = max_tokens;
  options.speculate = speculate;
  options.budget = budget;
  options.ignore_eos = ignore_eos ? 1 : 0;

  bool reader_left = false;
  const Generation generation = run_request(loaded, options, [&](std::string_view text) {
    if (!json) reader_left = !write_stdout(text);
    return !reader_left;
  });
  if (reader_left) return kExitOk;
  if (json) {
    constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
    write_stdout(to_json(*this, generation).dump(-1, ' ', false, kReplace) + "\n");
  } else {
    const bool is_open_line = !generation.text.empty() && generation.text.back() != '\n';
    if (stdout_is_terminal() && is_open_line) write_stdout("\n");
    // In a file or pipe of both the summary has a line of its own, too; standard output stays the text alone.
    const bool glued = is_open_line && !stdout_is_terminal() && stderr_is_stdout();
    std::cerr << (glued ? "\n" : "") << summary(generation, sampling.temperature > 0) << std::endl;
  }
  if (generation.result.finish_reason == KDT_FINISH_ERROR) throw Failure(kExitFailed, generation.error);
  return interrupted() && generation.result.finish_reason == KDT_FINISH_CANCELLED ? kExitInterrupted : kExitOk;
}

}  // namespace

Command add_generate(CLI::App& app) {
  const auto command = std::make_shared<GenerateCommand>(app);
  command->declare();
  return command_of(command);
}

}  // namespace kdt
