#!/bin/bash
# The whole recipe, step by step; README.md explains it.
#
#   run_all.sh prepare    corpus, tokenizer, data.npz                       CPU, about 1 minute
#   run_all.sh train      target, then drafter                              one CUDA GPU, about 8 minutes
#   run_all.sh finish     export, evaluation, golden vectors                CPU, about 15 minutes
#   run_all.sh verify     the exported pair against transformers            CPU, about 1 minute
#   run_all.sh rehearse   prepare, train and finish at a toy size           CPU, a few minutes
#
# Environment: PYTHON  Python 3.11 with requirements.txt installed   (default python3)
#              BUILD   folder for everything that is written         (default ./build-train-tiny)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
build=${BUILD:-build-train-tiny}
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"

# Sizes of the bundled pair are the steps' defaults; a rehearsal overrides them below.
corpus_args=() target_args=() draft_args=() prompt_args=() loss_args=() spec_args=() long_args=() sample_args=()

toy_sizes() {
  corpus_args=(--thin 40)
  target_args=(--steps 3 --batch 2 --window 64 --eval-windows 2)
  draft_args=(--steps 3 --passes 1 --write-batch 8 --max-prompt 32 --new 24 --rows 4 --anchors 2)
  prompt_args=(--per-kind 2)
  loss_args=(--window 64 --max-tokens 256)
  spec_args=(--new 4 --budgets 4)
  long_args=(--start 0 --length 300)
  sample_args=(--new 4)
}

step() {
  echo "== $1" >&2
  "${PYTHON:-python3}" -m "train_tiny.$1" "${@:2}"
}

fetch_docs() {
  [ -d "$build/doc" ] && return
  if ! command -v apt-get >/dev/null; then
    echo "error: $build/doc: missing: expected the unpacked Debian package python3.11-doc" >&2
    exit 1
  fi
  (cd "$build" && apt-get download python3.11-doc)
  dpkg -x "$build"/python3.11-doc_*.deb "$build/doc"
}

prepare() {
  mkdir -p "$build"
  fetch_docs
  step corpus --docs "$build/doc/usr/share/doc/python3.11/html/_sources" --out "$build/corpus.jsonl" \
    "${corpus_args[@]}"
  step train_tokenizer --corpus "$build/corpus.jsonl" --out "$build/tokenizer"
  step pack_data --corpus "$build/corpus.jsonl" --tokenizer "$build/tokenizer" --out "$build/data.npz"
}

train() {
  step train_target --data "$build/data.npz" --out "$build/run" "${target_args[@]}"
  step train_drafter --target "$build/run/target_q.safetensors" --data "$build/data.npz" \
    --out "$build/run" "${draft_args[@]}"
}

finish() {
  local pair=(--model "$build/models/tiny-k2" --draft "$build/models/tiny-k2-dflash")
  local golden=$build/golden
  step export_target --checkpoint "$build/run/target_q.safetensors" --tokenizer "$build/tokenizer" \
    --out "$build/models/tiny-k2"
  step export_drafter --checkpoint "$build/run/drafter.safetensors" --out "$build/models/tiny-k2-dflash"
  step evaluate_loss --model "$build/models/tiny-k2" --data "$build/data.npz" --out "$build/loss.json" \
    "${loss_args[@]}"
  step choose_prompts --corpus "$build/corpus.jsonl" --tokenizer "$build/tokenizer" \
    --out "$golden/eval_prompts.json" "${prompt_args[@]}"
  step evaluate_speculation "${pair[@]}" --prompts "$golden/eval_prompts.json" \
    --out "$build/speculation.json" --acceptance "$golden/acceptance.json" "${spec_args[@]}"
  step sample --model "$build/models/tiny-k2" "${sample_args[@]}"
  step golden "${pair[@]}" --prompts "$golden/eval_prompts.json" --out "$golden"
  step golden_long "${pair[@]}" --data "$build/data.npz" --out "$golden/long.npz" "${long_args[@]}"
  step golden_text --model "$build/models/tiny-k2" --out "$golden"
}

verify() {
  step verify_hf --model "$build/models/tiny-k2" --draft "$build/models/tiny-k2-dflash" \
    --data "$build/data.npz"
}

case "${1:-}" in
  prepare | train | finish | verify) "$1" ;;
  rehearse)
    build=${BUILD:-build-train-tiny-rehearsal}
    toy_sizes
    prepare
    train
    finish
    ;;
  *)
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
