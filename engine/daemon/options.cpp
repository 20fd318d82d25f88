#include "options.h"

#include <algorithm>

#include "client.h"

namespace kdt {
namespace {

constexpr const char* kBackends[] = {"auto", "cpu", "cuda"};
constexpr const char* kChatFormats[] = {"auto", "json", "typescript"};
enum { kLoadMapped, kLoadDirect };

}  // namespace

void EngineFlags::declare(Flags& flags) {
  flags.value("--model", text_form(model, "DIR"), "the bundled model, with its drafter",
              "Checkpoint directory of the target. Without --draft it runs unspeculated");
  flags.value("--draft", text_form(draft, "DIR"), "the bundled drafter for the bundled model, else none",
              "Directory of a DFlash drafter");
  flags.value("--backend", choice_form(backend, {{"auto", 0}, {"cpu", 1}, {"cuda", 2}}),
              "auto, CUDA where the device is usable", "What the engine computes on");
  flags.value("--device", integer_form(device, 0, 1023), "0",
              "Index of the CUDA device, see --list-devices of info. Of ranks: the first's, the next ones have those after it");
  flags.value("--tp", integer_form(tp, 1, 64), "1; under mpirun its processes",
              "Tensor-parallel ranks: threads of this process, or (CPU) the processes of mpirun -n N");
  flags.value("--rank-deadline", number_form(rank_deadline, 0.1, 86400), "10",
              "Seconds a rank waits for another within a round before it is named and the engine fails");
  flags.value("--threads", integer_form(threads, 1, 256), "every CPU this process may run on",
              "Compute threads. Changes no bit of the output");
  flags.value("--prefill-chunk", integer_form(prefill_chunk, 1, 4096), "512",
              "Prompt tokens per round. Changes no bit of the output");
  flags.value("--max-context", integer_form(max_context, 1), "the model's own limit",
              "Tokens of prompt and output together");
  flags.value("--chat-format", choice_form(chat_format, {{"auto", 0}, {"json", 1}, {"typescript", 2}}),
              "auto, by the checkpoint's family", "How the chat format declares tools");
  flags.value("--cpu-target", text_form(cpu_target, "NAME"), "auto, the best of this CPU",
              std::string("Instruction set. Here: ") + kdt_cpu_targets());
  flags.value("--load", choice_form(load, {{"mapped", kLoadMapped}, {"direct", kLoadDirect}}), "mapped",
              "How shards are read: through the page cache, or past it (O_DIRECT), for cold starts");
  flags.value("--checksums", choice_form(checksums, {{"on", 1}, {"off", 0}}), "on", "Compare every tensor of shards with its checksum");
}

void EngineFlags::declare_replay(Flags& flags) {
  flags.value("--replay", text_form(replay, "FILE"), "none",
              "What bench --synthetic --json printed elsewhere: rounds count as long as there. CPU backend");
}

kdt_engine_options EngineFlags::to_options() const {
  kdt_engine_options options;
  check(kdt_engine_options_init(&options, sizeof(options)));
  options.backend = kBackends[backend];
  options.device = device;
  options.threads = threads;
  options.tp = tp;
  options.launched = 1;
  options.rank_deadline_ms = static_cast<int32_t>(std::min<double>(rank_deadline * 1e3, kMaxInt32));
  options.model_path = model.empty() ? nullptr : model.c_str();
  options.draft_path = draft.empty() ? nullptr : draft.c_str();
  options.max_context = max_context;
  options.prefill_chunk = prefill_chunk;
  options.chat_format = kChatFormats[chat_format];
  options.load_direct = load == kLoadDirect;
  options.no_checksums = checksums == 0;
  options.replay_path = replay.empty() ? nullptr : replay.c_str();
  options.cpu_target = cpu_target == "auto" ? nullptr : cpu_target.c_str();
  return options;
}

void SamplingFlags::declare(Flags& flags, const std::string& default_seed) {
  flags.value("--temperature", number_form(temperature, 0, 100), "0, greedy", "Sampling temperature");
  flags.value("--top-p", number_form(top_p, 0, 1, true), "1, off", "Nucleus sampling");
  flags.value("--top-k", integer_form(top_k, 0), "0, off", "Sample from the k likeliest tokens");
  flags.value("--min-p", number_form(min_p, 0, 1), "0, off", "Least share of the likeliest token's probability");
  flags.value("--seed", seed_form(seed), default_seed, "Equal seed and settings give equal text");
  flags.toggle("--spine", spine, "A tree always holds the drafter's likeliest chain, counted inside the budget");
  flags.value("--ranking",
              choice_form(ranking, {{"auto", KDT_RANKING_AUTO},
                                    {"plain", KDT_RANKING_PLAIN},
                                    {"noise", KDT_RANKING_NOISE}}),
              "auto, the one that measured better", "How candidates are ranked at a temperature above 0");
}

void SamplingFlags::apply(kdt_request_options& options) const {
  options.temperature = temperature;
  options.top_p = top_p;
  options.top_k = top_k;
  options.min_p = min_p;
  options.has_seed = seed.has_value() ? 1 : 0;
  options.seed = seed.value_or(0);
  options.spine = spine ? 1 : 0;
  options.ranking = ranking;
}

const char* speculate_name(int32_t speculate) {
  switch (speculate) {
    case KDT_SPECULATE_OFF: return "off";
    case KDT_SPECULATE_CHAIN: return "chain";
    case KDT_SPECULATE_TREE: return "tree";
    default: return "auto";
  }
}

kdt_request_options default_request_options() {
  kdt_request_options options;
  check(kdt_request_options_init(&options, sizeof(options)));
  return options;
}

}  // namespace kdt
