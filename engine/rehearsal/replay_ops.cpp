#include "rehearsal/replay_ops.h"

namespace kdt {

StageSeconds ReplayOps::wait() {
  real_->wait();
  StageSeconds out;
  if (drafts_ > 0) out[Stage::draft] = costs_.draft(static_cast<double>(drafts_));
  if (rows_ > prompt_rows_) out[Stage::verify] = costs_.verify(static_cast<double>(rows_ - prompt_rows_));
  if (streams_ > 0) out[Stage::commit] = costs_.finish(static_cast<double>(streams_));
  return out;
}

}  // namespace kdt
