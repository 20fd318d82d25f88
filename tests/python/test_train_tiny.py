"""The training recipe's model code against the bundled pair and its golden vectors (needs PyTorch)."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: see tools/train_tiny/requirements.txt")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from train_tiny import checkpoint, export_drafter, export_target, files, int4  # noqa: E402
from train_tiny.reference_run import ReferenceRun, reference_run  # noqa: E402

TARGET = ROOT / "models" / "tiny-k2"
DRAFTER = ROOT / "models" / "tiny-k2-dflash"
# the order of fp32 sums differs between CPUs and thread counts; logits reach 41
MAX_DIFFERENCE, MAX_MEAN_DIFFERENCE = 1e-4, 1e-5


def assert_close(ours: np.ndarray, golden: np.ndarray, name: str) -> None:
    difference = np.abs(ours - golden)
    assert difference.max() <= MAX_DIFFERENCE, name
    assert difference.mean() <= MAX_MEAN_DIFFERENCE, name


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(ROOT / "tests" / "golden" / "code.npz"))


@pytest.fixture(scope="module")
def run(golden: dict[str, np.ndarray]) -> ReferenceRun:
    target, drafter = checkpoint.load_target(TARGET), checkpoint.load_drafter(DRAFTER)
    return reference_run(target, drafter, golden["ids"].tolist())


def test_target_reproduces_golden(run: ReferenceRun, golden: dict[str, np.ndarray]) -> None:
    for name in ("logits", "hidden_last", "expert_weights", "router_gap", "margin"):
        assert_close(getattr(run, name), golden[name], name)
    np.testing.assert_array_equal(run.experts, golden["experts"])
    np.testing.assert_array_equal(run.greedy, golden["greedy"])


def test_drafter_and_tree_reproduce_golden(run: ReferenceRun, golden: dict[str, np.ndarray]) -> None:
    arrays = run.draft_arrays()
    for name in ("draft_root", "draft_start", "tree16_tokens", "tree16_parents", "tree16_depths"):
        np.testing.assert_array_equal(arrays[name], golden[name], err_msg=name)
    for name in ("draft_logits", "tree16_logits"):
        assert_close(arrays[name], golden[name], name)


def assert_same_tensors(ours: dict[str, "torch.Tensor"], theirs: dict[str, "torch.Tensor"]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert ours[name].shape == value.shape, name
        assert torch.equal(ours[name].view(torch.uint8), value.view(torch.uint8)), name


def stored_tensors(folder: Path) -> dict[str, "torch.Tensor"]:
    index = json.loads((folder / checkpoint.INDEX_FILE).read_text())
    tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        shard = files.read_tensors(folder / file)
        assert all(index["weight_map"][name] == file for name in shard)
        tensors.update(shard)
    assert tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    return tensors


def test_target_export_round_trip(tmp_path: Path) -> None:
    training_file = tmp_path / "target_q.safetensors"
    checkpoint.save_training_file(training_file, checkpoint.load_quantised(TARGET))
    out = tmp_path / "tiny-k2"
    export_target.export_target(training_file, TARGET, out, wrap=False, trained_context=4096)
    assert_same_tensors(stored_tensors(out), stored_tensors(TARGET))
    for file in ("config.json", "generation_config.json", "chat_template.jinja", "README.md"):
        assert (out / file).read_bytes() == (TARGET / file).read_bytes(), file


def test_wrapped_export(tmp_path: Path) -> None:
    export_target.export_target(TARGET, TARGET, tmp_path, wrap=True, trained_context=4096)
    plain = stored_tensors(TARGET)
    assert_same_tensors(stored_tensors(tmp_path), {"language_model." + n: t for n, t in plain.items()})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "kimi_k25"
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert config["text_config"] == json.loads((TARGET / "config.json").read_text())
    assert "quantization_config" not in config
    wrapped, bundled = checkpoint.load_target(tmp_path), checkpoint.load_target(TARGET)
    assert_same_tensors(wrapped.state_dict(), bundled.state_dict())


def test_drafter_export_round_trip(tmp_path: Path) -> None:
    export_drafter.export_drafter(DRAFTER / "model.safetensors", tmp_path, row_tokens=768)
    ours, theirs = (files.read_tensors(folder / "model.safetensors") for folder in (tmp_path, DRAFTER))
    assert_same_tensors(ours, theirs)
    assert (tmp_path / "config.json").read_bytes() == (DRAFTER / "config.json").read_bytes()


def test_int4_packing_is_lossless() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-8, 8, (37, 96), generator=generator).to(torch.int8)
    q[0], q[1] = -8, 7
    assert torch.equal(int4.unpack_words(int4.pack_words(q), q.shape[1]), q)
    assert torch.equal(int4.unpack_bytes(int4.pack_bytes(q)), q)


def test_fake_int4_is_what_the_export_holds() -> None:
    w = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(int4.fake_int4(w), int4.int4_dequant(*int4.int4_quant(w)))
