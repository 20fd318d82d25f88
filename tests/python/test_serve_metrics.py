"""The page Prometheus reads, and the log lines that say the same."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request

import pytest
from conftest import ROOT
from serve_support import Daemon, completion, long_stream, open_stream

SERVING = ROOT / "docs" / "serving"
TYPES = {"counter", "gauge", "histogram"}


@pytest.fixture(scope="module")
def daemon():
  with Daemon("--log-interval", 0.5) as started:
    yield started


def page(daemon):
  status, headers, text = daemon.request("GET", "/metrics")
  assert status == 200 and headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
  return text.decode()


def families(text):
  """{family: type}; each has one HELP, one TYPE, then its series."""
  from prometheus_client.parser import text_string_to_metric_families
  helps = re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE)
  types = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
  assert [name for name, _ in helps] == [name for name, _ in types] and len(set(types)) == len(types)
  assert list(text_string_to_metric_families(text))
  return dict(types)


def test_every_family_has_help_and_type(daemon):
  daemon.post("/v1/completions", completion())
  text = page(daemon)
  found = families(text)
  assert set(found.values()) <= TYPES and all(name.startswith("kdtree:") for name in found)
  for line in text.splitlines():
    if not line.startswith("#"):
      name = re.match(r"[\w:]+", line).group()
      family = next(each for each in (name, re.sub(r"_(bucket|sum|count)$", "", name)) if each in found)
      assert 'model_name="' in line and (family == name) == (found[family] != "histogram"), line
  for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
               "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
               "request_success_total", "time_to_first_token_seconds", "inter_token_latency_seconds",
               "e2e_request_latency_seconds", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
               "spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total",
               "http_requests_total"):
    assert "kdtree:" + name in found


def test_promtool_accepts_the_page(daemon):
  promtool = shutil.which("promtool")
  if not promtool:
    pytest.skip("promtool is not installed (Debian's package prometheus)")
  daemon.post("/v1/completions", completion())
  done = subprocess.run([promtool, "check", "metrics"], input=page(daemon), capture_output=True, text=True)
  said = (done.stdout + done.stderr).strip().splitlines()
  complaints = [line for line in said if "metric names should not contain ':'" not in line
                and not line.startswith("kdtree:iteration_tokens_total ")]
  assert not complaints, complaints


@pytest.fixture(scope="module")
def prometheus(daemon, tmp_path_factory):
  """A Prometheus that scrapes the daemon by docs/serving/prometheus.yml, every second: query(expression)."""
  if not shutil.which("prometheus"):
    pytest.skip("prometheus is not installed (Debian's package prometheus)")
  folder = tmp_path_factory.mktemp("prometheus")
  config = (SERVING / "prometheus.yml").read_text()
  assert "127.0.0.1:8000" in config and "scrape_interval: 5s" in config
  config = config.replace("127.0.0.1:8000", f"127.0.0.1:{daemon.port}").replace("interval: 5s", "interval: 1s")
  (folder / "prometheus.yml").write_text(config)
  with socket.create_server(("127.0.0.1", 0)) as probe:
    address = f"127.0.0.1:{probe.getsockname()[1]}"
  process = subprocess.Popen(["prometheus", f"--config.file={folder}/prometheus.yml", f"--web.listen-address={address}",
                              f"--storage.tsdb.path={folder}/data"], stderr=subprocess.DEVNULL)

  def query(expression):
    url = f"http://{address}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(url, timeout=20) as response:
      return json.load(response)["data"]["result"]

  try:
    for _ in range(300):
      try:
        if query('up{job="kdtree"} == 1'):
          break
      except OSError:
        pass
      time.sleep(0.1)
    yield query
  finally:
    process.terminate()
    process.wait(20)


def test_prometheus_reads_the_page(daemon, prometheus):
  daemon.post("/v1/completions", completion())
  wanted = daemon.until_idle()["kdtree:generation_tokens_total"]
  name = daemon.get("/v1/models")[1]["data"][0]["id"]
  for _ in range(100):
    result = prometheus(f'kdtree:generation_tokens_total{{model_name="{name}"}}')
    if result and float(result[0]["value"][1]) == wanted:
      break
    time.sleep(0.1)
  else:
    raise AssertionError((result, wanted))
  assert prometheus("histogram_quantile(0.5, sum by (le) (kdtree:e2e_request_latency_seconds_bucket))")


def test_the_dashboard_asks_for_what_there_is(daemon, prometheus):
  daemon.post("/v1/completions", completion())
  found = set(families(page(daemon)))
  dashboard = json.loads((SERVING / "grafana-dashboard.json").read_text())
  expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
  assert len(expressions) > 20
  for expression in expressions:
    for name in re.findall(r"kdtree:\w+", expression):
      assert name in found or re.sub(r"_(bucket|sum|count)$", "", name) in found, name
    for variable, value in (("$model_name", ".*"), ("$instance", ".*"), ("$__rate_interval", "1m")):
      expression = expression.replace(variable, value)
    prometheus(expression)  # an error of its syntax is status 400


def test_gauges_move_and_return(daemon):
  before = daemon.until_idle()
  clients = [open_stream(daemon) for _ in range(3)]
  during = daemon.until_running(3)
  assert during["kdtree:kv_cache_usage_perc"] > 0 and during["kdtree:http_requests_in_progress"] == 3
  assert during["kdtree:http_connections"] >= 3
  for client in clients:
    client.close()
  after = daemon.until_idle()
  assert after["kdtree:generation_tokens_total"] > before["kdtree:generation_tokens_total"]


def test_counters_are_live_and_exact(daemon):
  before = daemon.until_idle()
  body = daemon.post("/v1/completions", completion(max_tokens=33, ignore_eos=True))[1]
  after = daemon.until_idle()

  def grown(name):
    return after["kdtree:" + name] - before.get("kdtree:" + name, 0)

  assert grown("generation_tokens_total") == body["usage"]["completion_tokens"] == 33
  assert grown("prompt_tokens_total") + grown("prompt_tokens_cached_total") == body["usage"]["prompt_tokens"]
  assert grown('request_success_total{finished_reason="length"}') == 1
  for settings in ({"max_tokens": 2}, {"max_tokens": 40, "stop": ["e"]}):  # what the end cuts off was no answer
    before = daemon.until_idle()
    body = daemon.post("/v1/completions", completion(speculate="tree", **settings))[1]
    after = daemon.until_idle()
    assert grown("generation_tokens_total") == body["usage"]["completion_tokens"]
    assert grown("request_generation_tokens_sum") == body["usage"]["completion_tokens"]
  assert grown('http_requests_total{route="/v1/completions",code="200"}') == 1
  tokens = "kdtree:generation_tokens_total"
  with open_stream(daemon):  # while it runs, not at its end
    for more in (5, 50):
      assert daemon.until(lambda m, more=more: m[tokens] >= after[tokens] + more)["kdtree:num_requests_running"] == 1
  daemon.until_idle()


def test_histograms_are_whole(daemon):
  daemon.post("/v1/completions", completion())
  metrics = daemon.until_idle()
  for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
    buckets = [value for key, value in metrics.items() if key.startswith(f"kdtree:{name}_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == metrics[f"kdtree:{name}_count"] > 0


def logged(daemon, pattern):
  """The first match of the pattern in the daemon's log, which may still be to come."""
  end = time.monotonic() + 30
  while not (line := re.search(pattern, daemon.log())):
    assert time.monotonic() < end, daemon.log()
    time.sleep(0.05)
  return line


def test_throughput_lines(daemon):
  with open_stream(daemon, long_stream(speculate="chain")):
    line = logged(daemon, r"Engine 000: Avg prompt throughput: [\d.]+ tokens/s, Avg generation throughput: ([\d.]+) tokens/s, "
                          r"Running: 1 reqs, Waiting: 0 reqs, KV cache usage: [\d.]+%, Prefix cache hit rate: [\d.]+%")
    spec = logged(daemon, r"SpecDecoding metrics: Mean acceptance length: ([\d.]+), Accepted throughput: [\d.]+ tokens/s, "
                          r"Drafted throughput: [\d.]+ tokens/s, Accepted: \d+ tokens, Drafted: \d+ tokens, "
                          r"Per-position acceptance rate: [\d., ]+, Avg Draft acceptance rate: [\d.]+%")
  assert float(line.group(1)) > 0 and float(spec.group(1)) >= 1
  daemon.until_idle()
  time.sleep(1.2)
  n_lines = len(daemon.lines)
  time.sleep(1.2)
  assert not [each for each in daemon.lines[n_lines:] if "throughput" in each]  # quiet while idle


def test_a_draft_of_which_nothing_was_accepted_has_a_rate_too():
  # The drafter knows nothing of the bias, until the text is full of that token.
  with Daemon("--log-interval", 0.3) as daemon:
    daemon.post("/v1/completions", completion(speculate="chain", logit_bias={"65": 100}, max_tokens=3, ignore_eos=True))
    time.sleep(0.7)
  assert re.search(r"Accepted: 0 tokens, .*Per-position acceptance rate: 0.000, Avg", daemon.log()), daemon.log()


def test_json_log_lines():
  with Daemon("--log-json", "--log-interval", 0.3) as daemon:
    with open_stream(daemon, long_stream(max_tokens=200)):
      time.sleep(0.7)
    daemon.request("GET", "/\"quoted\\")
    daemon.until_idle()
  lines = [json.loads(line) for line in daemon.lines]
  assert all({"time", "level", "message"} <= set(line) for line in lines)
  assert any("generation_tokens_per_second" in line for line in lines)
  request = next(line for line in lines if line.get("status") == 404)
  assert request["method"] == "GET" and request["seconds"] >= 0 and request["request_id"]
  assert request["error"] == "not_found"
  serving = next(line for line in lines if "url" in line)
  assert serving["tp"] == 1 and serving["threads"] >= 1 and "rank" not in serving["message"]


def test_the_log_says_what_was_refused_and_what_ended_early():
  with Daemon("--tp", 2) as daemon:
    assert re.search(r"Serving .*, 2 ranks with \d+ threads? each\)", daemon.log())
    daemon.post("/v1/completions", completion(temperature=9))
    line = logged(daemon, r'"POST /v1/completions" 400 [\d.]+ s \S+ (.*)')
    assert line.group(1) == "error=invalid_value param=temperature"
    daemon.raw(b"nonsense\r\n\r\n")
    logged(daemon, r'" 400 [\d.]+ s error=bad_request')
    daemon.request("POST", "/v1/completions", long_stream(timeout=0.2))
    logged(daemon, r'" 200 [\d.]+ s \S+ cmpl-\S+ prompt_tokens=\d+ completion_tokens=\d+ error=timeout')
    with open_stream(daemon, first=b'"id"') as client:
      identity = re.search(rb'"id": ?"([^"]+)"', client.recv(65536)).group(1).decode()
      daemon.post("/v1/abort", {"id": identity})
      logged(daemon, r'" 200 [\d.]+ s \S+ cmpl-\S+ prompt_tokens=\d+ completion_tokens=\d+ error=request_aborted')
    daemon.post("/v1/completions", completion())
    assert re.search(r"completion_tokens=8$", daemon.lines[-1]), daemon.lines[-1]
