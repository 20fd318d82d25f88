// The reply to one chat or completion request: events of its choices in, SSE payloads or one body out.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "openai_error.h"
#include "openai_request.h"
#include "openai_text.h"

namespace kdt::openai {

// JSON texts, each the payload of one SSE event (without "data: "), in order.
using Payloads = std::vector<std::string>;

// One thread at a time. Use:
//   begin once when every choice has been submitted; event for each kdt_event of each choice, FINISHED included;
//   finish with its kdt_result after FINISHED. When done(): a streamed reply ends with [DONE]; else failure() has the
//   status and body, or body() is the 200. A reply that is not streamed leaves every `out` empty. An ApiError thrown by
//   any of them is for fail.
class Reply {
 public:
  // `prompts`: what encode_prompts gave. `text` must outlive the reply.
  Reply(std::shared_ptr<const GenerationRequest> request, std::vector<std::vector<int32_t>> prompts,
        const ModelText& text);
  ~Reply();

  void begin(Payloads& out);
  void event(int64_t choice, const kdt_event& event, Payloads& out);
  // A failed or cancelled choice fails the whole reply: its error is the last payload. The caller cancels the others.
  void finish(int64_t choice, const kdt_result& result, Payloads& out);
  // Ends the reply with this error, unless it is done: the engine failed, the server shuts down. Later events are
  // ignored.
  void fail(const ApiError& error, Payloads& out);

  bool done() const noexcept;
  const std::optional<ApiError>& failure() const noexcept;
  std::string body() const;
  const std::string& id() const noexcept;
  int64_t prompt_tokens() const noexcept;
  int64_t completion_tokens() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kdt::openai
