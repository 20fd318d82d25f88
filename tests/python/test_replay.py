"""`--replay`: rounds that count as long as a rehearsal elsewhere says. Tokens are the engine's own, times the report's to the last
digit, and mode auto goes by them."""

import json

import pytest

from conftest import kdtree_run


def report(row_ms=0.1, draft_ms=2.0):
  """Of a machine where a pass takes 5 ms and row_ms a row, a draft with its build draft_ms, and the rest of a round 0.25 ms."""
  steps = [{"prefix": 1024, "overlap": 0.0, "rows": rows, "ms": 5 + row_ms * rows} for rows in (1, 2, 4, 8, 16, 64, 128, 640)]
  rounds = [{"prefix": 1024, "nodes": 8, "streams": n, "stages_ms": {"draft": draft_ms, "build": 0.0, "accept": 0.05, "commit": 0.2}}
            for n in (1, 4, 10)]
  return {"steps": steps, "rounds": rounds}


def run(command, path, *arguments):
  done = kdtree_run(command, "--replay", str(path), "--backend", "cpu", "--json", *map(str, arguments))
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def rates(path, *arguments):
  found = run("bench", path, "--prompts-per-kind", 1, "--max-tokens", 64, "--repeat", 1, "--prefill", 0, *arguments)
  return {(row["kind"], row["mode"]): row for row in found["rows"]}


def test_rounds_count_as_in_the_report(tmp_path):
  path = tmp_path / "there.json"
  path.write_text(json.dumps(report()))
  rows = rates(path, "--modes", "off,tree:8", "--ignore-eos")
  plain, tree = rows["all", "off"], rows["all", "tree:8"]
  assert plain["tokens_per_second"]["median"] == pytest.approx(1e3 / (5.1 + 0.25))
  assert tree["tokens_per_second"]["median"] == pytest.approx(tree["tokens_per_round"] * 1e3 / (5.9 + 2 + 0.25), rel=0.05)


def test_auto_goes_by_the_times_there(tmp_path):
  dear, cheap = tmp_path / "dear.json", tmp_path / "cheap.json"
  dear.write_text(json.dumps(report(row_ms=4.0, draft_ms=20.0)))
  cheap.write_text(json.dumps(report(row_ms=0.0, draft_ms=0.5)))
  rows = rates(dear, "--modes", "off,auto")
  assert rows["all", "auto"]["tokens_per_second"]["median"] >= 0.9 * rows["all", "off"]["tokens_per_second"]["median"]
  rows = rates(cheap, "--modes", "off,auto")
  assert rows["all", "auto"]["tokens_per_second"]["median"] >= 1.3 * rows["all", "off"]["tokens_per_second"]["median"]


def test_streams_together(tmp_path):
  path = tmp_path / "there.json"
  path.write_text(json.dumps(report()))
  found = run("bench-streams", path, "--streams", "1,8", "--modes", "off", "--max-tokens", 48, "--repeat", 1, "--kinds", "code",
              "--temperature", 1, "--prefill", 65)
  one, eight = found["rows"]
  assert one["tokens_per_second"] == pytest.approx(48 / 47 * 1e3 / (5.1 + 0.25), rel=0.01)
  assert 4 * one["tokens_per_second"] < eight["tokens_per_second"] <= 1.05 * 8e3 / (5.8 + 0.25)


@pytest.mark.parametrize("text, named", [
  ("{", "steps"), ("[]", "steps"), ("{}", "steps"), ('{"steps": []}', "steps"), ('{"steps": [{}]}', "prefix"),
  ('{"steps": [{"prefix": 8, "overlap": 0, "rows": "x", "ms": 1}]}', "rows"),
  ('{"steps": [{"prefix": 8, "overlap": 0, "rows": 1, "ms": -1}]}', "ms"),
  ('{"steps": [{"prefix": 8, "overlap": 0, "rows": 1, "ms": 1}]}', "rounds"),
  ('{"steps": [{"prefix": 8, "overlap": 0, "rows": 1, "ms": 1}], "rounds": [{"prefix": 9, "nodes": 8}]}', "rounds"),
  ('{"steps": [{"prefix": 8, "overlap": 0, "rows": 1, "ms": 1}], "rounds": [{"prefix": 8, "nodes": 8, "streams": 1}]}', "stages_ms"),
])
def test_what_is_no_report_is_refused(tmp_path, text, named):
  path = tmp_path / "there.json"
  path.write_text(text)
  done = kdtree_run("bench", "--replay", str(path), "--backend", "cpu")
  assert done.returncode == 1 and str(path) in done.stderr.decode() and named in done.stderr.decode(), done.stderr


def test_where_it_does_not_fit(tmp_path):
  path = tmp_path / "there.json"
  path.write_text(json.dumps(report()))
  done = kdtree_run("bench", "--replay", str(path), "--tp", "2", "--backend", "cpu")
  assert done.returncode != 0 and b"replay" in done.stderr
  done = kdtree_run("bench", "--synthetic", "--preset", "kimi-k2.6", "--replay", str(path))
  assert done.returncode == 2 and b"--replay" in done.stderr
  done = kdtree_run("bench", "--replay", str(tmp_path / "none.json"), "--backend", "cpu")
  assert done.returncode != 0 and b"none.json" in done.stderr
