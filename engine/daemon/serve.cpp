// kdtree-run serve: the daemon. One io thread, the calling one, does everything but decoding and long bodies.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <ctime>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "auth.h"
#include "client.h"
#include "commands.h"
#include "failure.h"
#include "routes.h"
#include "serve_log.h"
#include "serve_options.h"
#include "shutdown.h"
#include "table.h"
#include "throughput_log.h"
#include "workers.h"

namespace kdt {
namespace {

Clock::duration duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

HttpLimits http_limits(const ServeOptions& options) {
  HttpLimits limits;
  limits.max_body_bytes = static_cast<uint64_t>(options.max_body_bytes);
  limits.max_connections = options.max_connections;
  limits.header = duration(options.header_timeout);
  limits.body = duration(options.body_timeout);
  limits.idle = duration(options.idle_timeout);
  limits.write = duration(options.write_timeout);
  return limits;
}

// A connection and each request of it take a descriptor; 1024, the usual soft limit, is soon used up.
void raise_descriptor_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

openai::ServedModel served_model(const ServeOptions& options, const nlohmann::ordered_json& info) {
  openai::ServedModel model;
  model.names = options.served_model_names;
  if (model.names.empty()) {
    std::filesystem::path path(info.value("model_path", std::string("model")));
    if (!path.has_filename()) path = path.parent_path();   // a slash at the end
    model.names.push_back(path.filename().string());
  }
  model.max_context = info.at("max_context").get<int64_t>();
  model.vocab_size = info.at("target").at("vocab_size").get<int64_t>();
  model.max_budget = info.at("max_budget").get<int32_t>();
  model.has_drafter = options.engine.has_drafter();
  model.created = static_cast<int64_t>(std::time(nullptr));
  return model;
}

openai::RequestLimits request_limits(const ServeOptions& options) {
  openai::RequestLimits limits;
  limits.n = options.max_n;
  // What could never be taken at once is not asked to come again later.
  const int64_t places = int64_t{options.max_streams} + options.max_waiting;
  limits.sequences = std::min(std::max<int64_t>(limits.sequences, options.max_n), places);
  limits.n = std::min<int64_t>(limits.n, places);
  return limits;
}

// Calls `act` every `interval` until stop().
class Repeat {
 public:
  Repeat(asio::io_context& io, Clock::duration interval, std::function<void()> act)
      : timer_(io), interval_(interval), act_(std::move(act)) {}
  void start() {
    timer_.expires_after(interval_);
    timer_.async_wait([this](boost::system::error_code error) {
      if (error || stopped_) return;
      act_();
      start();
    });
  }
  // A handler that is queued already comes without an error.
  void stop() {
    stopped_ = true;
    timer_.cancel();
  }

 private:
  asio::steady_timer timer_;
  Clock::duration interval_;
  std::function<void()> act_;
  bool stopped_ = false;
};

struct ServeCommand {
  explicit ServeCommand(CLI::App& app)
      : flags(app, "serve", "Serve the model to OpenAI's clients over HTTP; the default command") {}

  Flags flags;
  ServeOptions options;

  int run() const;
};

int ServeCommand::run() const {
  if (is_follower()) return follow(options.to_engine_options());
  const ApiKeys keys = ApiKeys::load(options.api_key_file);
  ServeLog log(options.log_json);
  raise_descriptor_limit();
  asio::io_context io(1);
  HttpServer server(io, http_limits(options));
  server.bind(options.host, options.port);

  if (!options.engine.has_drafter()) log.warning("--model without --draft: speculation is off");
  const Engine engine(options.to_engine_options());
  const nlohmann::ordered_json info = engine.info();
  const openai::Protocol protocol(served_model(options, info), request_limits(options));
  const openai::EngineText text(engine.get());

  const auto request_timeout = std::chrono::duration_cast<std::chrono::milliseconds>(duration(options.request_timeout));
  Workers workers(io);
  Generations generations(io, workers, engine.get(), protocol, text, request_timeout);
  ThroughputLog throughput(engine.get(), log);
  Repeat report(io, duration(options.log_interval), [&throughput] { throughput.write(); });
  Shutdown shutdown(io, engine.get(), server, generations, log, duration(options.shutdown_timeout),
                    [&report] { report.stop(); });
  Routes routes({options, engine.get(), protocol, keys, generations, workers, server, shutdown, log});

  shutdown.start();
  if (options.log_interval > 0) report.start();
  server.listen(routes);
  if (!server.is_loopback() && !keys.required()) {
    log.warning("listening beyond loopback without an API key: whoever reaches this address may use the model "
                "(--api-key-file, KDTREE_API_KEY)");
  }
  const std::string url = server.url();
  const std::string name = protocol.model().names.front();
  const std::string backend = info.value("backend", std::string()) + " " + info.value("cpu_target", std::string());
  const int64_t n_ranks = info.value("tp", int64_t{1}), n_threads = info.value("threads", int64_t{0});
  const std::string ranks = n_ranks > 1 ? counted(n_ranks, "rank") + " with " : "";
  log.info("Serving " + name + " on " + url + " (kdtree-run " + kdt_version() + ", " + backend + ", " + ranks +
               counted(n_threads, "thread") + (n_ranks > 1 ? " each)" : ")"),
           {{"url", url}, {"model", name}, {"version", kdt_version()}, {"tp", n_ranks}, {"threads", n_threads}});
  try {
    io.run();
  } catch (const std::exception& error) {
    // Connections are open that point to what would be unwound here.
    log.error(std::string("internal error, and the daemon ends: ") + error.what());
    _exit(kExitFailed);
  }
  log.info("stopped");
  return shutdown.exit_code();
}

}  // namespace

Command add_serve(CLI::App& app) {
  const auto command = std::make_shared<ServeCommand>(app);
  command->options.declare(command->flags);
  return command_of(command);
}

}  // namespace kdt
