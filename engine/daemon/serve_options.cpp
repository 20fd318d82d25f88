#include "serve_options.h"

#include <algorithm>

#include "openai_utf8.h"

namespace kdt {
namespace {

// A day: longer is no timeout any more.
constexpr double kLongest = 86400;

// Names appear in JSON and on the metrics page: both are UTF-8.
ValueForm names_form(std::vector<std::string>& target) {
  ValueForm form = list_form(target, "NAME,...");
  form.expected += ", of UTF-8 text";
  form.set = [&target, read = form.set](const std::string& text) {
    return read(text) && std::all_of(target.begin(), target.end(), openai::is_utf8);
  };
  return form;
}

}  // namespace

void ServeOptions::declare(Flags& flags) {
  flags.value("--host", text_form(host, "ADDRESS"), host, "Where to listen. Beyond loopback set an API key");
  flags.value("--port", integer_form(port, 0, 65535), std::to_string(port), "Port; 0 takes a free one and logs it");
  flags.value("--served-model-name", names_form(served_model_names), "the checkpoint directory's name",
              "Names by which requests may ask for the model");
  flags.value("--api-key-file", text_form(api_key_file, "FILE"), "none",
              "API keys, one a line, at most 1 MiB; KDTREE_API_KEY may hold some too. Without any, everyone may use "
              "the daemon");
  flags.value("--allow-origin", list_form(allowed_origins, "ORIGIN,..."), "none",
              "Web pages that may call the daemon (CORS); * is all");
  engine.declare(flags);
  flags.value("--max-streams", integer_form(max_streams, 1, 64), std::to_string(max_streams),
              "Requests decoded together");
  flags.value("--max-waiting", integer_form(max_waiting, 1, 65536), std::to_string(max_waiting),
              "Requests that may wait; more get status 429");
  flags.value("--kv-tokens", integer_form(kv_tokens, 1, INT64_MAX),
              "a context for every stream, within a quarter of the memory",
              "Tokens the KV pages hold, all streams and the prefix cache together");
  flags.toggle("--no-prefix-cache", no_prefix_cache,
               "Never share pages between requests. Changes no bit of the output");
  flags.value("--max-n", integer_form(max_n, 1, 1024), std::to_string(max_n), "Choices one request may ask for");
  flags.value("--max-body-bytes", integer_form(max_body_bytes, 1024, int64_t{1} << 30), std::to_string(max_body_bytes),
              "Longest request body; longer ones get status 413");
  flags.value("--max-connections", integer_form(max_connections, 1, 65536), std::to_string(max_connections),
              "Open connections; more get status 503");
  flags.value("--header-timeout", number_form(header_timeout, 0, kLongest, true), "10",
              "Seconds a request's header may take to arrive");
  flags.value("--body-timeout", number_form(body_timeout, 0, kLongest, true), "60",
              "Seconds a request's body may take to arrive");
  flags.value("--idle-timeout", number_form(idle_timeout, 0, kLongest, true), "75",
              "Seconds a connection may stay open between requests");
  flags.value("--write-timeout", number_form(write_timeout, 0, kLongest, true), "30",
              "Seconds a client may leave what it was sent unread; then its requests are cancelled");
  flags.value("--request-timeout", number_form(request_timeout, 0, kLongest), "0, none",
              "Seconds a generation may take, its wait included");
  flags.value("--stall-timeout", number_form(stall_timeout, 0, kLongest, true), "60",
              "Seconds without progress on pending work after which /health is 503");
  flags.value("--shutdown-timeout", number_form(shutdown_timeout, 0, kLongest), "30",
              "Seconds that open requests get to finish after SIGTERM or SIGINT");
  flags.value("--log-interval", number_form(log_interval, 0, kLongest), "10, and nothing while idle",
              "Seconds between lines about throughput; 0 is never");
  flags.toggle("--log-json", log_json, "Log one JSON object a line");
}

kdt_engine_options ServeOptions::to_engine_options() const {
  kdt_engine_options options = engine.to_options();
  options.max_streams = max_streams;
  options.max_waiting = max_waiting;
  options.kv_tokens = kv_tokens;
  options.no_prefix_cache = no_prefix_cache ? 1 : 0;
  return options;
}

}  // namespace kdt
