// The prompts of `kdtree-run bench`: a JSON array of {"kind", "name", "text" or "messages"}.
#pragma once

#include <string>
#include <vector>

#include "bench_samples.h"

namespace kdt {

// `path` empty: the set that lies beside the program. `kinds` empty: all of them; `per_kind` 0: all of each kind.
// Throws Failure naming the file and the prompt.
std::vector<BenchPrompt> load_bench_prompts(const Engine& engine, const std::string& path,
                                            const std::vector<std::string>& kinds, int32_t per_kind);

}  // namespace kdt
