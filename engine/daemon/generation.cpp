#include "generation.h"

#include <array>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <optional>

#include "openai_response.h"

namespace kdt {
namespace {

using boost::system::error_code;

// A stream whose client reads slower than it is made stops taking events from the engine here; the engine's own queue
// of the request is bounded too, and then this request alone waits.
constexpr size_t kMostUnwritten = size_t{256} << 10;

struct DestroyRequest {
  void operator()(kdt_request* request) const noexcept { kdt_request_destroy(request); }
};
using RequestHandle = std::unique_ptr<kdt_request, DestroyRequest>;

// Read, tokenised and submitted.
struct Submitted {
  std::shared_ptr<const openai::GenerationRequest> request;
  std::vector<std::vector<int32_t>> prompts;
  std::vector<RequestHandle> choices;   // [n_choices]
};

void check(kdt_status status) {
  if (status != KDT_OK) throw openai::from_status(status, kdt_last_error());
}

// Any thread. All choices are submitted or none.
Submitted submit(kdt_engine* engine, const openai::Protocol& protocol, openai::RequestKind kind, std::string_view body,
                 std::chrono::milliseconds timeout) {
  auto request = std::make_shared<openai::GenerationRequest>(
      kind == openai::RequestKind::chat ? protocol.parse_chat(body) : protocol.parse_completion(body));
  const auto limit = static_cast<int32_t>(timeout.count());
  if (limit > 0 && (request->timeout_ms == 0 || request->timeout_ms > limit)) request->timeout_ms = limit;
  Submitted out;
  out.prompts = openai::encode_prompts(engine, *request);
  for (const std::vector<int32_t>& prompt : out.prompts) {
    for (int64_t choice = 0; choice < request->n; ++choice) {
      const openai::ChoiceOptions options = openai::choice_options(*request, prompt, choice);
      kdt_request* handle = nullptr;
      check(kdt_request_submit(engine, &options.options, &handle));
      out.choices.emplace_back(handle);
    }
  }
  out.request = std::move(request);
  return out;
}

}  // namespace

// The engine requests of one reply, and what their events have become. The io thread.
class LiveReply final : public std::enable_shared_from_this<LiveReply> {
 public:
  LiveReply(asio::io_context& io, Submitted submitted, const openai::ModelText& text)
      : reply_(submitted.request, std::move(submitted.prompts), text),
        is_stream_(submitted.request->stream),
        changed_(io, Clock::time_point::max()) {
    for (RequestHandle& handle : submitted.choices) choices_.emplace_back(io, std::move(handle));
  }

  void start() {
    openai::Payloads payloads;
    reply_.begin(payloads);
    append(payloads);
    for (Choice& choice : choices_) {
      int32_t descriptor = -1;
      check(kdt_request_fd(choice.handle.get(), &descriptor));
      choice.ready.assign(descriptor);
    }
    for (size_t i = 0; i < choices_.size(); ++i) await_events(i);
  }

  // Until something can be written or nothing more comes.
  asio::awaitable<void> wait() {
    const auto self = shared_from_this();
    while (unwritten_.empty() && !is_over()) {
      error_code ignored;
      co_await changed_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    }
  }

  // What has not been written yet of a stream.
  std::string take() {
    std::string text = std::move(unwritten_);
    unwritten_.clear();
    for (size_t i = 0; i < choices_.size(); ++i) {
      if (choices_[i].is_held) await_events(i);
    }
    return text;
  }

  void fail(const openai::ApiError& error) {
    openai::Payloads payloads;
    reply_.fail(error, payloads);
    append(payloads);
    cancel();
  }

  // The client has left.
  void leave() {
    is_left_ = true;
    cancel();
  }

  // No event is taken any more; the engine's requests end.
  void stop() {
    is_stopped_ = true;
    for (Choice& choice : choices_) {
      if (choice.ready.is_open()) choice.ready.release();   // the request's own, and closed by its destroy
      choice.handle.reset();
    }
  }

  bool is_over() const { return reply_.done() || is_left_; }
  bool is_left() const { return is_left_; }
  bool is_stream() const { return is_stream_; }
  const openai::Reply& reply() const { return reply_; }

 private:
  struct Choice {
    Choice(asio::io_context& io, RequestHandle handle_) : handle(std::move(handle_)), ready(io) {}
    RequestHandle handle;
    asio::posix::stream_descriptor ready;   // readable while events are there
    bool is_held = false;                   // its events wait until what is unwritten has been written
  };

  void await_events(size_t i) {
    choices_[i].is_held = is_stream_ && unwritten_.size() > kMostUnwritten;
    if (choices_[i].is_held) return;
    auto ready = [self = shared_from_this(), i](error_code error) {
      if (!error && !self->is_stopped_ && !self->is_over()) self->take_events(i);
    };
    choices_[i].ready.async_wait(asio::posix::stream_descriptor::wait_read, std::move(ready));
  }

  void take_events(size_t i) {
    try {
      if (!read_events(i)) await_events(i);
    } catch (const openai::ApiError& error) {
      fail(error);
    } catch (const std::exception&) {
      fail(openai::ApiError(500, "internal_error", "The server failed to build this reply."));
    }
    // One choice's failure is the reply's: the others are not needed.
    if (reply_.failure()) cancel();
  }

  // One batch, so that every connection gets its turn. True: that was the last.
  bool read_events(size_t i) {
    kdt_request* request = choices_[i].handle.get();
    std::array<kdt_event, 64> events;
    int64_t n = 0;
    const kdt_status status = kdt_request_next(request, events.data(), events.size(), &n, 0);
    if (status == KDT_ERR_TIMEOUT) return false;
    check(status);
    openai::Payloads payloads;
    bool finished = n == 0;
    for (int64_t e = 0; e < n; ++e) {
      const kdt_event& event = events[static_cast<size_t>(e)];
      reply_.event(static_cast<int64_t>(i), event, payloads);
      finished = finished || event.kind == KDT_EVENT_FINISHED;
    }
    if (finished) {
      kdt_result result = {};
      result.struct_size = sizeof(result);
      check(kdt_request_result(request, &result));
      reply_.finish(static_cast<int64_t>(i), result, payloads);
    }
    append(payloads);
    return finished;
  }

  void append(const openai::Payloads& payloads) {
    for (const std::string& payload : payloads) {
      unwritten_ += "data: ";
      unwritten_ += payload;
      unwritten_ += "\n\n";
    }
    changed_.cancel();
  }

  void cancel() {
    for (Choice& choice : choices_) {
      if (choice.handle) kdt_request_cancel(choice.handle.get());
    }
    changed_.cancel();
  }

  openai::Reply reply_;
  const bool is_stream_;
  asio::steady_timer changed_;   // cancelled when wait() has to look again
  std::vector<Choice> choices_;
  std::string unwritten_;        // events of a stream
  bool is_left_ = false;
  bool is_stopped_ = false;
};

asio::awaitable<void> Generations::serve(Exchange& exchange, openai::RequestKind kind) {
  // The watch outlives this frame: an error is answered after it, and that write may wait for the client.
  const auto watched = std::make_shared<std::shared_ptr<LiveReply>>();
  exchange.watch([watched] {
    if (*watched) (*watched)->leave();
  });

  Submitted submitted;
  std::function<void()> work = [&] { submitted = submit(engine_, protocol_, kind, exchange.request().body, timeout_); };
  if (exchange.request().body.size() < kLongBody) {
    work();
  } else {
    co_await workers_.run(std::move(work));
  }
  exchange.request().body = {};
  if (exchange.gone()) co_return;

  const auto generation = std::make_shared<LiveReply>(io_, std::move(submitted), text_);
  *watched = generation;
  // However this ends, the engine's requests end with it.
  struct Entry {
    Entry(std::unordered_map<std::string, LiveReply*>& open_, LiveReply& generation_)
        : open(open_), generation(generation_) {
      open[generation.reply().id()] = &generation;
    }
    ~Entry() {
      open.erase(generation.reply().id());
      generation.stop();
    }
    std::unordered_map<std::string, LiveReply*>& open;
    LiveReply& generation;
  };
  const Entry entry(open_, *generation);
  const openai::Reply& reply = generation->reply();
  generation->start();
  if (generation->is_stream()) {
    co_await stream(exchange, *generation);
  } else {
    while (!generation->is_over()) co_await generation->wait();
  }
  exchange.request().note = reply.id() + " prompt_tokens=" + std::to_string(reply.prompt_tokens()) +
                            " completion_tokens=" + std::to_string(reply.completion_tokens());
  if (generation->is_stream() && reply.failure()) {
    exchange.request().error_code = reply.failure()->code;
    exchange.request().error_param = reply.failure()->param;
  }
  if (generation->is_stream() || generation->is_left()) co_return;
  if (reply.failure()) throw openai::ApiError(*reply.failure());
  HttpResponse response;
  response.body = reply.body();
  co_await exchange.respond(std::move(response));
}

asio::awaitable<void> Generations::stream(Exchange& exchange, LiveReply& generation) {
  bool open = co_await exchange.begin_events();
  while (open && !generation.is_left()) {
    co_await generation.wait();
    const bool last = generation.is_over();
    std::string text = generation.take();
    if (last) text += "data: [DONE]\n\n";
    open = co_await exchange.write_events(std::move(text));
    if (last) break;
  }
  if (open && !generation.is_left()) co_await exchange.end_events();
}

bool Generations::abort(std::string_view id) {
  const auto found = open_.find(std::string(id));
  if (found == open_.end()) return false;
  found->second->fail(openai::ApiError(400, "request_aborted", "The request was aborted by its id."));
  return true;
}

void Generations::fail_all(const openai::ApiError& error) {
  for (const auto& [id, generation] : open_) generation->fail(error);
}

}  // namespace kdt
