"""pyclient.metrics: the engine's figures as Prometheus metrics, exactly."""

import re
import shutil
import subprocess

import pytest

from pyclient import SessionClosed

client = pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from pyclient import Session
from pyclient.metrics import SessionCollector

PROMPT = "def add(a, b):\n"


@pytest.fixture(scope="module")
def own():
  """A session that no other test uses, after some work."""
  with Session(threads=1) as opened:
    opened.generate(PROMPT, max_tokens=24, ignore_eos=True)
    opened.generate(PROMPT, max_tokens=24, ignore_eos=True, speculate="tree")
    opened.generate(PROMPT, max_tokens=3000, ignore_eos=True, timeout=0.05)
    yield opened


def page_of(session, name="tiny"):
  registry = client.CollectorRegistry()
  registry.register(SessionCollector(session, model_name=name))
  return client.generate_latest(registry).decode()


def test_every_series_has_its_value_and_labels(own):
  lines = page_of(own).splitlines()
  samples = {}
  for line in lines:
    if not line.startswith("#"):
      series, _, value = line.rpartition(" ")
      name, _, labels = series.partition("{")
      samples[name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels))] = float(value)
  stats = own.stats()
  assert len(samples) == len(stats) > 50
  for series, value in stats.items():
    name, _, labels = series.partition("{")
    key = f"kdtree:{name}", frozenset([*re.findall(r'(\w+)="([^"]*)"', labels), ("model_name", "tiny")])
    assert samples[key] == value


def test_every_family_has_help_type_and_series(own):
  page = page_of(own)
  families = own.figure_families()
  for name, (kind, help_line) in families.items():
    assert f"# HELP kdtree:{name} {help_line}\n# TYPE kdtree:{name} {kind}\n" in page
    assert kind != "counter" or name.endswith("_total")
    series = [s.partition("{")[0] for s in own.stats()]
    assert (name if kind != "histogram" else f"{name}_count") in series
  for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
               "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
               "request_success_total", "iteration_tokens_total", "time_to_first_token_seconds",
               "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
               "spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_per_pos_total"):
    assert name in families


def test_a_parser_reads_it_and_histograms_add_up(own):
  families = {family.name: family for family in text_string_to_metric_families(page_of(own, 'a "b"\\c\n'))}
  assert {label for family in families.values() for sample in family.samples
          for label in [sample.labels["model_name"]]} == {'a "b"\\c\n'}
  histograms = [family for family in families.values() if family.type == "histogram"]
  assert histograms
  for family in histograms:
    by_labels = {}
    for sample in family.samples:
      labels = frozenset((k, v) for k, v in sample.labels.items() if k != "le")
      by_labels.setdefault(labels, {}).setdefault(sample.name.rpartition("_")[2], []).append(sample)
    for parts in by_labels.values():
      buckets = parts["bucket"]
      assert [float(b.labels["le"]) for b in buckets] == sorted(float(b.labels["le"]) for b in buckets)
      counts = [b.value for b in buckets]
      assert counts == sorted(counts) and buckets[-1].labels["le"] == "+Inf"
      assert [s.value for s in parts["count"]] == counts[-1:]
      assert len(parts["sum"]) == 1


def test_counters_say_what_was_done(own):
  before = own.stats()
  own.generate(PROMPT, max_tokens=10, ignore_eos=True)
  after = own.stats()
  grown = {name: after[name] - before.get(name, 0.0) for name in after}
  assert grown["generation_tokens_total"] == 10
  assert grown['request_success_total{finished_reason="length"}'] == 1
  assert grown["time_to_first_token_seconds_count"] == 1 == grown["e2e_request_latency_seconds_count"]
  assert after["num_requests_running"] == 0 == after["num_requests_waiting"]
  assert after['request_success_total{finished_reason="abort"}'] == 1


def test_promtool_has_nothing_else_to_say(own):
  promtool = shutil.which("promtool")
  if promtool is None:
    pytest.skip("promtool is not installed")
  done = subprocess.run([promtool, "check", "metrics"], input=page_of(own), capture_output=True, text=True, timeout=60)
  complaints = [line for line in (done.stdout + done.stderr).splitlines()
                if "should not contain ':'" not in line and "iteration_tokens_total" not in line]
  assert complaints == []


def test_a_closed_session_leaves_the_other_metrics_alone():
  registry = client.CollectorRegistry()
  client.Gauge("other", "Of the host program.", registry=registry).set(7)
  opened = Session(threads=1)
  registry.register(SessionCollector(opened, model_name="tiny"))
  assert b"kdtree:num_requests_running" in client.generate_latest(registry)
  opened.close()
  page = client.generate_latest(registry)
  assert b"other 7.0" in page and b"kdtree:" not in page
  with pytest.raises(SessionClosed):
    opened.stats()
