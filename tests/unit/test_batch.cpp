// Many requests at once: each has the output it has alone without speculation, and no page is ever lost.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "model_support.h"
#include "runtime/batch.h"

using namespace kdt;
using namespace kdt::test;

namespace {

using Ids = std::vector<int32_t>;

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint32_t>(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool percent(int64_t p) { return below(100) < p; }
  template <class T>
  T pick(std::initializer_list<T> of) { return of.begin()[below(static_cast<int64_t>(of.size()))]; }

 private:
  std::mt19937 engine_;
};

struct Output {
  Ids ids;
  std::string text;
  std::vector<float> logprobs;
  Finish finish;
  bool operator==(const Output& other) const {
    return ids == other.ids && text == other.text && finish == other.finish && same_bits(logprobs, other.logprobs);
  }
};

// What has come so far; true once it has ended.
bool read(Request& request, Output& out) {
  for (;;) {
    std::vector<Event> events;
    try {
      events = request.next(1000, 0);
    } catch (const std::exception&) {
      return false;
    }
    if (events.empty()) return true;
    for (const Event& event : events) {
      out.text += event.text;
      if (event.kind == EventKind::finished) out.finish = request.result().finish;
      if (event.kind == EventKind::token) out.ids.push_back(event.token);
      if (event.kind != EventKind::finished && !std::isnan(event.logprob)) {
        out.logprobs.push_back(event.logprob);
        out.logprobs.insert(out.logprobs.end(), event.top_logprobs.begin(), event.top_logprobs.end());
      }
    }
  }
}

class Server {
 public:
  Server(Bundled& model, int64_t n_pages, bool prefix_cache, int64_t max_streams, int64_t chunk)
      : tokenizer_(Tokenizer::load(models_directory() + "tiny-k2")), pages(n_pages, prefix_cache) {
    Stream stream;
    pages.take(1, stream.pages);
    costs_.measure(*model.round, stream, 0.1);
    pages.give_back(stream.pages);
    stop_ids_ = model.target->config().eos_ids;
    batch = std::make_unique<Batch>(*model.round, costs_, pages, figures, tokenizer_, stop_ids_,
                                    BatchLimits{max_streams, chunk, 0, 0});
  }

  std::shared_ptr<Request> submit(RequestSettings settings) {
    auto request = std::make_shared<Request>(std::move(settings), ++serial_);
    batch->add(request);
    return request;
  }
  // One step; every page is where it should be after it.
  bool step() {
    const bool moved = batch->step(0);
    const auto fault = batch->find_fault();
    REQUIRE_MESSAGE(!fault, fault.value_or(""));   // -s prints it either way
    return moved;
  }
  Output run_alone(RequestSettings settings) {
    const auto request = submit(std::move(settings));
    Output out{};
    while (!read(*request, out)) step();
    return out;
  }

 private:
  Tokenizer tokenizer_;
  RoundCosts costs_;
  std::vector<int32_t> stop_ids_;
  uint64_t serial_ = 0;

 public:
  Pages pages;
  Figures figures;
  std::unique_ptr<Batch> batch;
};

RequestSettings random_request(Random& random, const Ids& shared, int64_t vocab) {
  RequestSettings s;
  // Some prompts begin alike, over several pages.
  const int64_t n_shared = random.percent(50) ? random.pick<int64_t>({63, 64, 65, 128, 200, 256}) : 0;
  s.prompt.assign(shared.begin(), shared.begin() + n_shared);
  for (int64_t i = random.between(1, 90); i > 0; --i) s.prompt.push_back(static_cast<int32_t>(random.below(vocab)));
  s.max_tokens = random.percent(30) ? random.between(200, 350) : random.between(1, 60);
  s.sampling.temperature = random.pick({0.0, 0.7, 1.0});
  s.sampling.seed = static_cast<uint64_t>(random.below(1000));
  s.sampling.top_k = static_cast<int32_t>(random.pick<int64_t>({0, 0, 5, 40}));
  s.sampling.top_p = random.pick({1.0, 1.0, 0.9});
  s.sampling.choice = static_cast<uint32_t>(random.below(3));
  if (random.percent(30)) {
    s.repetition_penalty = random.pick({1.0f, 1.3f, 0.8f});
    s.presence_penalty = random.pick({0.0f, 0.7f, -0.5f});
    s.frequency_penalty = random.pick({0.0f, 0.4f});
    s.bias_tokens = {static_cast<int32_t>(random.below(vocab))};
    s.bias_values = {random.pick({5.0f, -100.0f})};
  }
  if (random.percent(30)) s.min_tokens = std::min<int64_t>(s.max_tokens, random.between(1, 20));
  if (random.percent(30)) s.stop = {random.pick({" ", "e", "th", "\n", "self"}), "zz"};
  if (random.percent(20)) s.stop_tokens = {static_cast<int32_t>(random.below(vocab)), 100, 101};
  if (random.percent(30)) s.logprobs = random.pick<int64_t>({0, 3});
  if (random.percent(10)) s.prompt_logprobs = 2;
  s.ignore_eos = random.percent(50);
  s.speculate = random.pick({Speculate::automatic, Speculate::off, Speculate::chain, Speculate::tree});
  s.budget = random.pick<int64_t>({0, 1, 5, 33});
  s.spine = random.percent(20);
  s.priority = static_cast<int32_t>(random.between(-1, 1));
  return s;
}

}  // namespace

TEST_CASE("streams of all kinds together have the output of each alone without speculation, and keep every page") {
  Bundled model(2, 8);
  const int64_t vocab = model.vocab(), n_rounds = full_run() ? 6 : 2;
  int64_t preemptions = 0, cached = 0, cancelled = 0;
  for (int64_t round = 0; round < n_rounds; ++round) {
    Random random(static_cast<uint32_t>(100 + round));
    Ids shared;
    for (int i = 0; i < 256; ++i) shared.push_back(static_cast<int32_t>(random.below(vocab)));
    std::vector<RequestSettings> settings;
    for (int i = 0; i < 64; ++i) settings.push_back(random_request(random, shared, vocab));
    std::vector<Output> alone;
    {
      Server server(model, 16, false, 1, 512);
      for (RequestSettings s : settings) {
        s.speculate = Speculate::off;
        alone.push_back(server.run_alone(std::move(s)));
      }
    }
    // Few pages: streams are preempted; many: prefixes stay.
    for (const auto& [n_pages, max_streams, chunk] : {std::tuple{18, 8, 64}, std::tuple{128, 8, 100}}) {
      Server server(model, n_pages, true, max_streams, chunk);
      std::vector<std::shared_ptr<Request>> requests;
      std::vector<Output> out(settings.size());
      std::vector<bool> ended(settings.size(), false), dropped(settings.size(), false);
      for (int64_t step = 0; std::count(ended.begin(), ended.end(), true) < static_cast<int64_t>(settings.size()); ++step) {
        REQUIRE(step < 20000);
        while (requests.size() < settings.size() && random.percent(40)) requests.push_back(server.submit(settings[requests.size()]));
        server.step();
        for (size_t i = 0; i < requests.size(); ++i) {
          if (!ended[i] && random.percent(90)) ended[i] = read(*requests[i], out[i]);
          if (!ended[i] && random.below(2000) == 0) {
            requests[i]->cancel();
            dropped[i] = true;
          }
        }
      }
      for (size_t i = 0; i < settings.size(); ++i) {
        CAPTURE(i);
        CAPTURE(n_pages);
        preemptions += requests[i]->result().preemptions;
        cached += requests[i]->result().cached_tokens;
        if (out[i].finish == Finish::cancelled) {
          ++cancelled;
          CHECK(dropped[i]);
          CHECK(out[i].ids.size() <= alone[i].ids.size());
          CHECK(std::equal(out[i].ids.begin(), out[i].ids.end(), alone[i].ids.begin()));
        } else {
          CHECK(out[i] == alone[i]);
        }
      }
      CHECK(server.batch->n_running() + server.batch->n_waiting() == 0);
      CHECK(server.pages.n_in_use() == 0);
      CHECK(server.pages.forget_idle() > 0);
      CHECK(server.pages.n_free() == n_pages);
    }
  }
  CHECK(preemptions > 0);
  CHECK(cached > 1000);
  CHECK(cancelled > 0);
}

// Streams that grow together, and pages for one of them when it is long. (That streams in a batch have the output of each alone
// is the test above.)
TEST_CASE("streams that are preempted at any point have the output that they have with pages enough") {
  Bundled model(2, 8);
  Random random(7);
  const Ids shared(256, 11);
  std::vector<RequestSettings> settings;
  for (int i = 0; i < 36; ++i) {
    RequestSettings s = random_request(random, shared, model.vocab());
    s.prompt.resize(static_cast<size_t>(random.between(40, 62)), 5);
    s.max_tokens = 3 * kPageTokens + random.between(1, 20) - static_cast<int64_t>(s.prompt.size());   // a fourth page
    s.prompt_logprobs = -1;
    s.ignore_eos = true;
    s.stop.clear();
    s.stop_tokens.clear();
    s.bias_values.clear();
    s.bias_tokens.clear();
    s.repetition_penalty = 1;
    s.presence_penalty = s.frequency_penalty = 0;
    settings.push_back(std::move(s));
  }
  const auto outputs = [&](Server& server, bool speculate, int64_t& preemptions) {
    std::vector<std::shared_ptr<Request>> requests;
    for (RequestSettings s : settings) {
      if (!speculate) s.speculate = Speculate::off;
      requests.push_back(server.submit(std::move(s)));
    }
    std::vector<Output> out(settings.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      while (!read(*requests[i], out[i])) REQUIRE(server.step());
      preemptions += requests[i]->result().preemptions;
    }
    CHECK(server.pages.n_in_use() == 0);
    return out;
  };
  int64_t none = 0, preemptions = 0;
  Server wide(model, 128, false, 8, 64);
  const std::vector<Output> expected = outputs(wide, false, none);
  CHECK(none == 0);
  for (const bool prefix_cache : {true, false}) {
    Server narrow(model, 5, prefix_cache, 8, 64);
    const std::vector<Output> out = outputs(narrow, true, preemptions);
    for (size_t i = 0; i < out.size(); ++i) {
      CAPTURE(i);
      CHECK(out[i] == expected[i]);
    }
  }
  CHECK(preemptions >= 50);
}

TEST_CASE("a long prompt does not hold decoding streams up for more than a chunk a round") {
  Bundled model(2, 8);
  Server server(model, 128, true, 8, 64);
  RequestSettings decoding;
  decoding.prompt = {1, 2, 3};
  decoding.max_tokens = 200;
  decoding.ignore_eos = true;
  decoding.speculate = Speculate::off;
  const auto a = server.submit(decoding);
  Output out{};
  while (out.ids.empty()) {
    server.step();
    read(*a, out);
  }
  RequestSettings longer;
  for (int i = 0; i < 800; ++i) longer.prompt.push_back(i);
  longer.max_tokens = 1;
  const auto b = server.submit(longer);
  Output other{};
  int64_t steps = 0;
  while (!read(*b, other)) {
    const size_t before = out.ids.size();
    server.step();
    read(*a, out);
    CHECK(out.ids.size() == before + 1);
    ++steps;
  }
  CHECK(steps >= 800 / 64);
}

TEST_CASE("requests that begin alike compute what they share once, though they come together") {
  Bundled model(2, 8);
  Server server(model, 128, true, 8, 64);
  RequestSettings s;
  for (int i = 0; i < 300; ++i) s.prompt.push_back(i);
  s.max_tokens = 5;
  s.sampling.temperature = 1;
  s.ignore_eos = true;
  std::vector<Output> alone;
  for (uint32_t choice = 0; choice < 5; ++choice) {
    Server other(model, 128, false, 8, 64);
    s.sampling.choice = choice;
    alone.push_back(other.run_alone(s));
  }
  std::vector<std::shared_ptr<Request>> requests;
  for (uint32_t choice = 0; choice < 5; ++choice) {
    s.sampling.choice = choice;
    requests.push_back(server.submit(s));
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    Output out{};
    while (!read(*requests[i], out)) server.step();
    CHECK(out == alone[i]);
    CHECK(requests[i]->result().cached_tokens == (i == 0 ? 0 : 256));
  }
}

TEST_CASE("a reader that does not read is left out, and slows nobody; its stream goes on where it was") {
  Bundled model(2, 8);
  Server server(model, 128, true, 8, 512);
  RequestSettings s;
  s.prompt = {5, 6, 7};
  s.prompt.resize(600, 9);
  s.max_tokens = 400;
  s.prompt_logprobs = 0;
  s.ignore_eos = true;
  s.speculate = Speculate::off;
  const Output alone = server.run_alone(s);
  std::vector<std::shared_ptr<Request>> silent;
  for (int i = 0; i < 2; ++i) silent.push_back(server.submit(s));
  for (int i = 0; i < 1500; ++i) server.step();
  CHECK(server.run_alone(s) == alone);
  for (const auto& request : silent) {
    Output out{};
    while (!read(*request, out)) server.step();
    CHECK(out == alone);
  }
}

TEST_CASE("who sees that nothing runs any more finds every end counted") {
  Bundled model(2, 8);
  Server server(model, 128, true, 8, 512);
  RequestSettings s;
  s.prompt = {5, 6, 7};
  std::atomic<int64_t> n_submitted = 0, n_uncounted = 0;
  std::atomic<bool> over = false;
  std::thread reader([&] {
    while (!over) {
      const int64_t submitted = n_submitted;
      const StateFigures state = server.figures.state();
      if (state.running + state.waiting > 0) continue;
      double ended = 0;
      for (const Figure& figure : server.figures.read())
        if (figure.series.starts_with("request_success_total")) ended += figure.value;
      if (ended < static_cast<double>(submitted)) ++n_uncounted;
    }
  });
  // So many end in one step that the reader looks in the middle of it.
  for (int round = 0; round < 80; ++round) {
    std::vector<std::shared_ptr<Request>> requests;
    for (int i = 0; i < 2000; ++i) requests.push_back(server.submit(s));
    server.step();
    n_submitted += 2000;
    for (const auto& request : requests) request->cancel();
    server.step();
  }
  over = true;
  reader.join();
  CHECK(n_uncounted == 0);
}

TEST_CASE("stop strings end the text where they begin, inside an accepted block and across tokens") {
  Bundled model(2, 8);
  Server server(model, 128, true, 8, 512);
  RequestSettings s;
  const Tokenizer tokenizer = Tokenizer::load(models_directory() + "tiny-k2");
  s.prompt = tokenizer.encode("import os\n\ndef main(argv):\n    for name in ");
  s.max_tokens = 60;
  s.ignore_eos = true;
  const Output whole = server.run_alone(s);
  REQUIRE(whole.text.size() > 30);
  int64_t across = 0;
  for (size_t at = 1; at + 5 < whole.text.size(); ++at) {
    const std::string stop = whole.text.substr(at, 5);
    if (stop.find('\xEF') != std::string::npos || (stop.front() & 0xC0) == 0x80) continue;
    for (const Speculate mode : {Speculate::off, Speculate::tree}) {
      RequestSettings with = s;
      with.speculate = mode;
      with.stop = {"never seen", stop};
      const Output out = server.run_alone(with);
      CAPTURE(stop);
      CHECK(out.finish == Finish::stop);
      CHECK(out.text == whole.text.substr(0, whole.text.find(stop)));
      CHECK(std::equal(out.ids.begin(), out.ids.end(), whole.ids.begin()));
      // Ids go as far as the text does.
      std::string of_ids = tokenizer.decode(out.ids);
      CHECK(of_ids.size() >= out.text.size());
      CHECK(of_ids.substr(0, out.text.size()) == out.text);
      across += of_ids.size() > out.text.size();
    }
  }
  CHECK(across > 0);
}
