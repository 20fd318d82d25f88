"""The daemon against its own OpenAPI document: schemathesis makes requests that fit it and requests that do not."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from conftest import FULL, clean_environment
from serve_support import Daemon

KEY = "schema-key"


@pytest.fixture(scope="module")
def daemon():
  # A chat without max_tokens has all of the context, for each of its choices: bounds that keep every answer short.
  with Daemon("--max-context", 256, "--max-n", 8, "--request-timeout", 20, env={"KDTREE_API_KEY": KEY}) as running:
    yield running


def schemathesis(daemon, tmp_path, *options):
  command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://{daemon.host}:{daemon.port}/openapi.json",
             "--header", f"Authorization: Bearer {KEY}", "--phases", "coverage,fuzzing", "--continue-on-failure",
             "--generation-deterministic", "--max-examples", "200" if FULL else "15",
             "--request-timeout", "120", *options]
  done = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                        env=clean_environment() | {"COLUMNS": "200", "PYTHONIOENCODING": "utf-8"}, timeout=1800)
  assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
  assert int(re.search(r"Tested: (\d+)", done.stdout).group(1)) >= 6


def test_requests_that_break_the_document_are_refused_and_answers_fit_it(daemon, tmp_path):
  # Whether a prompt and its max_tokens fit the context is nothing a schema can say.
  schemathesis(daemon, tmp_path, "--exclude-checks", "positive_data_acceptance")
  status, _ = daemon.get("/health")
  assert status == 200
  daemon.until_idle()


def test_requests_that_fit_the_document_are_taken(daemon, tmp_path):
  schemathesis(daemon, tmp_path, "--include-path-regex", "tokenize|models|health|ready|version|metrics")
