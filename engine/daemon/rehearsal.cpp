#include "rehearsal.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "client.h"
#include "failure.h"
#include "load_bar.h"
#include "output.h"
#include "table.h"

namespace kdt {
namespace {

using Json = nlohmann::ordered_json;

// Lists that a run of every combination is for, and shorter ones for a run of a minute or two.
const std::vector<int32_t> kNodes{1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128}, kQuickNodes{1, 2, 4, 8, 16, 32, 64};
const std::vector<int32_t> kPrefixes{1024, 8192, 32768}, kQuickPrefixes{1024, 32768};
const std::vector<int32_t> kStreams{1, 4, 10}, kQuickStreams{1};
const std::vector<double> kOverlaps{0, 0.15, 0.3, 0.45, 0.6}, kQuickOverlaps{0, 0.3, 0.6};
const std::vector<int32_t> kRoundNodes{8}, kOpNodes{1, 8, 32};
const std::vector<int32_t> kPrompts{2048, 8192, 32768}, kQuickPrompts{2048};
const std::vector<int32_t> kChunks{512, 1024, 2048, 4096}, kQuickChunks{512, 2048};

std::string joined(const std::vector<int32_t>& values) {
  std::string text;
  for (const int32_t value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return text;
}

// "none": an empty list, where that is allowed.
ValueForm integers_form(std::vector<int32_t>& target, int64_t low, int64_t high, bool* none = nullptr) {
  const std::string range = "integers from " + std::to_string(low) + " to " + std::to_string(high) + ", between commas";
  return {"LIST", none ? range + ", or none" : range, [&target, low, high, none](const std::string& text) {
            target.clear();
            if (none) *none = text == "none";
            if (none && *none) return true;
            for (const std::string& item : split_list(text)) {
              const auto value = parse_integer(item, low, high);
              if (!value) return false;
              target.push_back(static_cast<int32_t>(*value));
            }
            return !target.empty() && target.size() <= 64;
          }};
}

ValueForm shares_form(std::vector<double>& target) {
  return {"LIST", "numbers from 0 to 1, between commas", [&target](const std::string& text) {
            target.clear();
            for (const std::string& item : split_list(text)) {
              double value = 0;
              const char* end = item.data() + item.size();
              const auto [stop, error] = std::from_chars(item.data(), end, value);
              if (error != std::errc() || stop != end || !(value >= 0 && value <= 1)) return false;
              target.push_back(value);
            }
            return !target.empty() && target.size() <= 64;
          }};
}

std::string ms(const Json& value) { return fixed(value.get<double>(), 3); }
std::string us(const Json& value) { return fixed(value.get<double>(), 1); }
std::string bytes(const Json& value) { return byte_count(value.get<double>()); }

std::string emulated(const Json& r) {
  return "sums over ranks waited for: " + fixed(r["collective_us"].get<double>(), 1) + " us each and their bytes at " +
         fixed(r["link_gbps"].get<double>(), 0) + " GB/s";
}

// The CPU backend takes address space, of which the machine's free memory says nothing.
std::string buffers(const Json& memory) {
  return memory["buffer_bytes"] == 0 ? "" : ", buffers " + bytes(memory["buffer_bytes"]);
}

std::string heading(const Json& r) {
  const Json& memory = r["memory"];
  std::string text = r["config"].get<std::string>() + ", rank " + r["rank"].dump() + " of " + r["tp"].dump() + ", " +
                     r["model"]["layers"].dump() + " layers, made-up weights, " +
                     (r["collectives"] == "none" ? "nothing summed over ranks" : emulated(r)) + "; experts " +
                     (r["routing"] == "router" ? "as the router chooses" : "drawn") + "\n";
  text += r["backend"].get<std::string>() + " " + r["instruction_set"].get<std::string>() + ", reads " +
          fixed(r["read_bandwidth"].get<double>() * 1e-9, 0) + " GB/s; weights " + bytes(memory["weight_bytes"]) + ", " +
          memory["pages"].dump() + " pages " + bytes(memory["page_bytes"]) + buffers(memory) + ", free " + bytes(memory["free_bytes"]) + "\n";
  return text + "loaded in " + fixed(r["load_seconds"].get<double>(), 1) + " s, all of it " + fixed(r["seconds"].get<double>(), 1) +
         " s; medians of " + r["replays"].dump() + "\n";
}

std::string steps_table(const Json& steps) {
  std::vector<std::string> header = {"streams", "prefix", "nodes", "overlap", "experts a layer", "of experts", "of weights", "of KV",
                                     "floor ms", "ms", "x floor", "host ms"};
  std::vector<std::string> stages;
  for (const Json& step : steps)
    for (const auto& [stage, value] : step["stages_ms"].items())
      if (std::find(stages.begin(), stages.end(), stage) == stages.end()) stages.push_back(stage);
  header.insert(header.end(), stages.begin(), stages.end());
  Table table(header);
  const Json* before = nullptr;
  for (const Json& step : steps) {
    if (before && ((*before)["prefix"] != step["prefix"] || (*before)["overlap"] != step["overlap"])) table.add_rule();
    before = &step;
    std::vector<std::string> row = {step["streams"].dump(),
                                    step["prefix"].dump(),
                                    step["nodes"].dump(),
                                    fixed(step["overlap"].get<double>(), 2),
                                    fixed(step["distinct_experts"].get<double>(), 1),
                                    bytes(step["expert_bytes"]),
                                    bytes(step["weight_bytes"]),
                                    bytes(step["kv_bytes"]),
                                    ms(step["floor_ms"]),
                                    ms(step["ms"]),
                                    fixed(step["times_floor"].get<double>(), 2),
                                    ms(step["host_ms"])};
    for (const std::string& stage : stages) row.push_back(step["stages_ms"].contains(stage) ? ms(step["stages_ms"][stage]) : "-");
    table.add(row);
  }
  return table.render(0);
}

std::string ops_table(const Json& of) {
  Table table({"op", "calls", "read", "floor us", "us", "us a call", "x floor", "saved us"});
  double floor = 0, taken = 0, saved = 0;
  for (const Json& op : of["ops"]) {
    const auto of_op = op["us"].get<double>(), least = op["floor_us"].get<double>();
    table.add({op["op"].get<std::string>(), op["calls"].dump(), bytes(op["bytes"]), us(op["floor_us"]), us(op["us"]),
               fixed(of_op / op["calls"].get<double>(), 2), least > 0.05 ? fixed(of_op / least, 2) : "-", us(op["saved_us"])});
    floor += least, taken += of_op, saved += op["saved_us"].get<double>();
  }
  table.add_rule();
  table.add({"all", "", "", fixed(floor, 1), fixed(taken, 1), "", fixed(taken / floor, 2), fixed(saved, 1)});
  return table.render(1);
}

std::string prefill_table(const Json& prefill) {
  Table table({"tokens", "chunk", "ms", "host ms", "tokens/s", "TFLOP", "TFLOP/s", "attention ms"});
  for (const Json& of : prefill)
    table.add({of["tokens"].dump(), of["chunk"].dump(), ms(of["ms"]), ms(of["host_ms"]), fixed(of["tokens_per_second"].get<double>(), 0),
               fixed(of["tflop"].get<double>(), 3), fixed(of["tflops"].get<double>(), 1), ms(of["attention_ms"])});
  return table.render(0);
}

std::string text_of(const Json& r) {
  std::string text = heading(r) + "\nSteps: a verify pass over given trees, and sampling\n\n" + steps_table(r["steps"]);
  if (!r["rounds"].empty()) text += "\nRounds: draft, build, verify, sample, accept, commit\n\n" + steps_table(r["rounds"]);
  for (const Json& of : r["ops"])
    text += "\nOperations of a step of " + of["nodes"].dump() + " nodes behind " + of["prefix"].dump() + " tokens, " + ms(of["step_ms"]) +
            " ms: each between two marks (" + fixed(of["marks_us"].get<double>(), 2) +
            " us of them taken off), and what a step without it saves\n\n" + ops_table(of);
  if (!r["prefill"].empty()) text += "\nPrefill: a prompt in chunks, to its first token\n\n" + prefill_table(r["prefill"]);
  if (!r["beyond_context"].empty())
    text += "\nLeft out, prefixes and prompts beyond the model's context: " + r["beyond_context"].dump() + "\n";
  if (r["left_out"] != 0) text += "\nThere was no time left for " + r["left_out"].dump() + " measurements.\n";
  return text;
}

}  // namespace

void RehearsalFlags::declare(Flags& flags) {
  flags.toggle("--synthetic", synthetic,
               "Time one rank of --preset or of the config in --model instead, with made-up weights; the flags below are for this");
  const auto value = [&](const char* name, const ValueForm& form, const std::string& by_default, const char* description) {
    flags.value(name, form, by_default, description);
    names_.push_back(name);
  };
  const auto toggle = [&](const char* name, bool& target, const char* description) {
    flags.toggle(name, target, description);
    names_.push_back(name);
  };
  value("--preset", text_form(preset, "NAME"), "none", "A published config: kimi-k2.6, with its drafter");
  value("--rank", integer_form(rank, 0, 63), "0", "Whose work is done, of --tp; ranks have equal shapes");
  value("--collectives", choice_form(collectives, {{"none", 0}, {"emulate", 1}}), "none",
        "Sums over ranks: none, or as long as they take, waited for");
  value("--collective-us", number_form(collective_us, 0, 1e6), "7", "Microseconds of each, beside its bytes, when emulated");
  value("--link-gbps", number_form(link_gbps, 0.001, 1e6), "350", "GB/s that a rank reads from all the others together");
  value("--layers", integer_form(layers, 1), "all", "Only the first so many layers");
  value("--nodes", integers_form(nodes, 1, 1024), joined(kNodes), "Nodes of each stream's tree, its root included");
  value("--prefixes", integers_form(prefixes, 1, kMaxInt32), joined(kPrefixes), "Tokens before them");
  value("--streams", integers_form(streams, 1, 64), joined(kStreams), "Streams of a step");
  value("--overlaps", shares_form(overlaps), "0,0.15,0.3,0.45,0.6",
        "Parts of a node's experts that are its parent's: the first everywhere, the others for the first prefix and streams");
  value("--round-nodes", integers_form(round_nodes, 1, 1024, &no_rounds), joined(kRoundNodes) + "; none without a drafter",
        "Whole rounds, with a draft, of so many nodes a stream");
  value("--op-nodes", integers_form(op_nodes, 1, 1024, &no_ops), joined(kOpNodes),
        "Time every operation of steps of so many nodes, for the first prefix and streams");
  value("--prompt-tokens", integers_form(prompts, 1, kMaxInt32, &no_prompts), joined(kPrompts) + "; or none",
        "Prefill of prompts of so many tokens");
  value("--chunk-tokens", integers_form(chunks, 1, 65536), joined(kChunks), "In chunks of so many tokens");
  toggle("--quick", quick, "Shorter lists where none is given");
  toggle("--routed", routed, "Experts are the router's own choice, not drawn");
  value("--replays", integer_form(replays, 1, 1000), "9", "Replays of each measurement, whose median counts");
  value("--limit", number_form(seconds, 0, 1e6), "0, none", "Seconds after loading from which no measurement begins");
}

void RehearsalFlags::check_unused(const Flags& flags) const {
  for (const std::string& name : names_)
    if (flags.on_command_line(name)) fail_usage(name, "no rehearsal", "--synthetic beside it");
}

void RehearsalFlags::check_others(const Flags& flags) const {
  static const std::vector<std::string> kShared{"--synthetic", "--json", "--model", "--draft", "--backend", "--device",
                                                "--threads",   "--tp",   "--cpu-target", "--replay"};
  const auto among = [](const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (const std::string& name : flags.on_command_line())
    if (!among(kShared, name) && !among(names_, name))
      fail_usage(name, "of no use", "none beside --synthetic, whose flags bench --help lists last");
}

int RehearsalFlags::run(const Flags& flags, const EngineFlags& engine, bool json) {
  check_others(flags);
  if (engine.model.empty() == preset.empty())
    fail_usage("--model and --preset", preset.empty() ? "neither" : "both", "one of them beside --synthetic");
  if (!engine.replay.empty()) fail_usage("--replay", engine.replay, "none beside --synthetic, which measures");
  const bool drafts = !preset.empty() || !engine.draft.empty();
  const auto settle = [this](auto& list, const auto& full, const auto& short_one) {
    if (list.empty()) list = quick ? short_one : full;
  };
  settle(nodes, kNodes, kQuickNodes);
  settle(prefixes, kPrefixes, kQuickPrefixes);
  settle(streams, kStreams, kQuickStreams);
  settle(overlaps, kOverlaps, kQuickOverlaps);
  if (!no_rounds && drafts) settle(round_nodes, kRoundNodes, kRoundNodes);
  if (!no_ops) settle(op_nodes, kOpNodes, kOpNodes);
  if (!no_prompts) {
    settle(prompts, kPrompts, kQuickPrompts);
    settle(chunks, kChunks, kQuickChunks);
  }
  if (!drafts && !round_nodes.empty()) fail_usage(flags.source("--round-nodes"), "rounds with a draft", "--draft DIR beside --model, or none");

  for (const char* name : {"--collective-us", "--link-gbps"})
    if (!collectives && flags.on_command_line(name)) fail_usage(name, "nothing to wait for", "--collectives emulate beside it");
  const kdt_engine_options backend = engine.to_options();
  kdt_rehearsal_options options;
  check(kdt_rehearsal_options_init(&options, sizeof options));
  options.model_path = engine.model.empty() ? nullptr : engine.model.c_str();
  options.preset = preset.empty() ? nullptr : preset.c_str();
  options.draft_path = engine.draft.empty() ? nullptr : engine.draft.c_str();
  options.backend = backend.backend;
  options.device = backend.device;
  options.threads = backend.threads;
  options.cpu_target = backend.cpu_target;
  options.tp = std::max(engine.tp, 1);
  options.rank = rank;
  options.layers = layers;
  options.replays = replays;
  options.routed = routed ? 1 : 0;
  options.seconds = seconds;
  if (collectives) {
    options.link_gbps = link_gbps;
    options.collective_us = collective_us;
  }
  const auto pass = [](const auto& list, const auto*& values, int64_t& n) {
    values = list.data();
    n = static_cast<int64_t>(list.size());
  };
  pass(nodes, options.nodes, options.n_nodes);
  pass(prefixes, options.prefixes, options.n_prefixes);
  pass(streams, options.streams, options.n_streams);
  pass(overlaps, options.overlaps, options.n_overlaps);
  pass(round_nodes, options.round_nodes, options.n_round_nodes);
  pass(op_nodes, options.op_nodes, options.n_op_nodes);
  pass(prompts, options.prompts, options.n_prompts);
  pass(chunks, options.chunks, options.n_chunks);
  const char* text = nullptr;
  {
    const LoadBar bar("measured", LoadBar::Unit::pieces);
    options.progress = bar.progress();
    check(kdt_rehearse(&options, &text));
  }
  const Json report = Json::parse(text);
  write_stdout(json ? report.dump(2, ' ', false, Json::error_handler_t::replace) + "\n" : text_of(report));
  if (report["steps"].empty()) fail_run(flags.source("--limit"), "nothing was measured", "more seconds");   // they come first
  return kExitOk;
}

}  // namespace kdt
