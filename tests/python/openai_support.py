"""The PyPI `openai` client against a running daemon."""

from __future__ import annotations

import openai

CODE = "def add(a, b):\n"
QUESTION = [{"role": "user", "content": "Write a function that adds two numbers."}]
MODES = [{"speculate": "off"}, {"speculate": "chain"}, {"speculate": "tree", "budget": 12}, {"speculate": "auto"}]


def client_of(daemon, key="none", kind=openai.OpenAI, **options):
  """Retries are off: a test sees the daemon's first answer."""
  return kind(base_url=f"http://{daemon.host}:{daemon.port}/v1", api_key=key, max_retries=0, timeout=120, **options)


def chat(client, messages=QUESTION, *, temperature=0, max_tokens=24, **settings):
  """`extra` has the fields the client does not know."""
  extra = settings.pop("extra", {})
  model = settings.pop("model", "tiny-k2")
  return client.chat.completions.create(model=model, messages=messages, temperature=temperature, max_tokens=max_tokens,
                                        extra_body=extra, **settings)


def complete(client, prompt=CODE, *, temperature=0, max_tokens=24, **settings):
  extra = settings.pop("extra", {})
  model = settings.pop("model", "tiny-k2")
  return client.completions.create(model=model, prompt=prompt, temperature=temperature, max_tokens=max_tokens,
                                   extra_body=extra, **settings)


def joined(stream):
  """What a streamed chat adds up to: text, reasoning, log-probabilities, pieces, finish reason, usage, kdtree."""
  out = {"text": "", "reasoning": "", "logprobs": [], "pieces": [], "finish": None, "usage": None, "kdtree": None}
  for chunk in stream:
    out["usage"] = chunk.usage or out["usage"]
    out["kdtree"] = (chunk.model_extra or {}).get("kdtree") or out["kdtree"]
    for choice in chunk.choices:
      assert out["finish"] is None, "a chunk after the last one"
      text = choice.delta.content or ""
      out["text"] += text
      out["reasoning"] += (choice.delta.model_extra or {}).get("reasoning_content") or ""
      if text:
        out["pieces"].append(text)
      if choice.logprobs:
        out["logprobs"] += [choice.logprobs.content]
      out["finish"] = choice.finish_reason
  return out
