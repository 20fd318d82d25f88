"""tools/check_real_weights.py on checkpoints whose answers are known."""

import importlib.util
import json
import sys

import pytest

from checkpoint_edits import config, copy_of, put, read_safetensors, replace_tensors
from conftest import ROOT, golden
from shard_support import DRAFT, MODEL, SYNTHETIC, tool

CHECK = ROOT / "tools" / "check_real_weights.py"
sys.path.insert(0, str(ROOT / "tools"))
from sharding import real_checks  # noqa: E402

# The pattern list as the published tokenization_kimi.py has it, around nothing else.
TOKENIZATION = '''
class TikTokenTokenizer:
    pat_str = "|".join(
        [
            r"""[\\p{Han}]+""",
            r"""[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""\\p{N}{1,3}""",
            r""" ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*""",
            r"""\\s*[\\r\\n]+""",
            r"""\\s+(?!\\S)""",
            r"""\\s+""",
        ]
    )
'''


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
  """A narrow checkpoint laid out as the published one, with the bundled tokenizer."""
  out = tmp_path_factory.mktemp("synthetic") / "model"
  sizes = [item for key, value in {**real_checks.SMALL, "num_hidden_layers": 3, "n_routed_experts": 6,
                                   "vocab_size": 2048}.items()
           for item in ("--set", f"{key}={value}")]
  done = tool(SYNTHETIC, out, *sizes, "--no-vision")
  assert done.returncode == 0, done.stderr
  (out / "tokenization_kimi.py").write_text(TOKENIZATION)
  return out


def outcome(done, name):
  lines = [line for line in done.stdout.splitlines() if line[8:].startswith(name + ":")]
  assert len(lines) == 1, (done.stdout, done.stderr)
  return lines[0]


def test_a_checkpoint_as_it_should_be(synthetic):
  done = tool(CHECK, synthetic)
  for name in ("tensors", "values", "tokenizer", "template"):
    assert outcome(done, name).startswith("ok"), done.stdout
  assert "Traceback" not in done.stderr


def test_the_bundled_template():
  with real_checks.small_session(MODEL) as session:
    assert real_checks.check_template(MODEL, session) == "6 conversations as chat_template.jinja has them"


def test_a_tensor_that_is_not_as_published(synthetic, tmp_path):
  folder = copy_of(synthetic, tmp_path / "model")
  file = "model-00001-of-000004.safetensors"
  name = next(name for name in read_safetensors(folder / file)[0] if name.endswith("q_a_layernorm.weight"))
  replace_tensors(folder, file, lambda tensors: tensors.update({name: ("F32", [32], bytes(128))}))
  done = tool(CHECK, folder)
  assert done.returncode == 1
  assert f"{file}: {name}: ('F32', (32,)): expected ('BF16', (32,))" in outcome(done, "tensors")


def test_a_file_that_is_missing_is_named_once(synthetic, tmp_path):
  folder = copy_of(synthetic, tmp_path / "model")
  (folder / "tokenization_kimi.py").unlink()
  line = outcome(tool(CHECK, folder), "tokenizer")
  path = f"{folder}/tokenization_kimi.py"
  assert line == f"FAILED  tokenizer: {path}: No such file or directory: expected the checkpoint's tokenizer"


def test_the_bench_of_a_peer_says_what_it_lacks():
  done = tool(ROOT / "tools" / "bench_gpu_peer", "--help")
  if importlib.util.find_spec("torch") is None:
    assert done.returncode == 1 and done.stderr.startswith("error: torch: not installed: expected pip install torch ")
  else:
    assert done.returncode == 0


def test_a_weight_of_minus_eight_is_found(synthetic, tmp_path):
  folder = copy_of(synthetic, tmp_path / "model")
  file = "model-00002-of-000004.safetensors"
  name = next(name for name in read_safetensors(folder / file)[0] if name.endswith("experts.0.gate_proj.weight_packed"))

  def zero(tensors):
    dtype, shape, data = tensors[name]
    tensors[name] = (dtype, shape, b"\x10" + data[1:])

  replace_tensors(folder, file, zero)
  done = tool(CHECK, folder, "--per-layer", "0")
  assert done.returncode == 1 and "1 weights of -8" in outcome(done, "values")


def test_the_drafters_fields(tmp_path):
  assert "block 8, taps [1, 2, 3], mask 2046" in real_checks.check_drafter(MODEL, DRAFT)
  folder = copy_of(DRAFT, tmp_path / "draft")
  config(put("hidden_size", 128))(folder)
  with pytest.raises(real_checks.CheckFailed, match="hidden_size: 128: expected the target's 256"):
    real_checks.check_drafter(MODEL, folder)


def test_amplitudes(tmp_path):
  kimi = json.loads((ROOT / "models" / "presets" / "kimi-k2.6-dflash" / "config.json").read_text())
  assert real_checks.amplitude(kimi) == ("deepseek_yarn", 1.0)
  for full, expected in ((False, 1.0), (True, 1.4158883)):
    config_of = {**kimi, "rope_scaling": {**kimi["rope_scaling"], "mscale_all_dim": 0.0 if full else 1.0}}
    assert real_checks.amplitude(config_of)[1] == pytest.approx(expected)


def test_acceptance_and_agreement_of_the_bundled_pair(tmp_path):
  text = golden("golden.json")["code"]
  prompt = text["prompt"]
  from pyclient import Session
  with Session() as session:
    ids = session.tokenize(prompt)[-64:]
    greedy = session.generate(ids, max_tokens=16).token_ids
  fixture = tmp_path / "fixture.json"
  fixture.write_text(json.dumps({"prompts": [{"prompt_ids": ids, "token_ids": greedy}]}))
  done = tool(CHECK, MODEL, "--draft", DRAFT, "--run", "--fixture", fixture, "--max-tokens", "24")
  assert outcome(done, "agreement").startswith("ok") and "16 tokens of 1 prompts agree" in outcome(done, "agreement")
  assert outcome(done, "acceptance").startswith("ok") and outcome(done, "acceptance").count("tokens a round") == 2
  wrong = [(token + 1) % 2048 if i == 5 else token for i, token in enumerate(greedy)]
  fixture.write_text(json.dumps({"prompts": [{"prompt_ids": ids, "token_ids": wrong}]}))
  with pytest.raises(real_checks.CheckFailed, match="prompt 0, token 5: "):
    real_checks.check_agreement(MODEL, None, fixture, 1e-3)


@pytest.mark.parametrize("text", ["{", "{}", '{"prompts": [{}]}', '{"prompts": 3}'])
def test_bad_fixtures(tmp_path, text):
  fixture = tmp_path / "fixture.json"
  fixture.write_text(text)
  with pytest.raises(real_checks.CheckFailed, match="expected prompts with prompt_ids"):
    real_checks.check_agreement(MODEL, None, fixture, 1e-3)


def test_usage(tmp_path):
  assert tool(CHECK, MODEL, "--fixture", tmp_path / "x").returncode == 2
  assert tool(CHECK, MODEL, "--per-layer", "-1").returncode == 2
  done = tool(CHECK, tmp_path / "absent")
  assert done.returncode == 1 and "Traceback" not in done.stderr
