"""A session's running figures as Prometheus metrics; needs prometheus-client (the extra `metrics`).

    prometheus_client.REGISTRY.register(SessionCollector(session, model_name="tiny-k2"))
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ._errors import SessionClosed
from .session import Session

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_HISTOGRAM_SUFFIX = re.compile(r"_(bucket|sum|count)$")


class SessionCollector(Collector):
  """Yields the families of `session.figure_families()` with the prefix `kdtree:`, their series with the label
  `model_name`: the metrics of `kdtree-run serve`, but those of HTTP. Values are the engine's own, read at each scrape.

  model_name: the value of the label. Once the session is closed it yields nothing: the other collectors of the registry
  are asked all the same.
  """

  def __init__(self, session: Session, model_name: str) -> None:
    self._session = session
    self._model_name = model_name

  def collect(self) -> Iterator[Metric]:
    try:
      families_of, stats = self._session.figure_families(), self._session.stats()
    except SessionClosed:
      return
    families: dict[str, Metric] = {}
    for name, (kind, help_line) in families_of.items():
      # prometheus-client writes a counter's family with _total by itself.
      plain = name.removesuffix("_total") if kind == "counter" else name
      families[name] = Metric(f"kdtree:{plain}", help_line, kind)
    for series, value in stats.items():
      name, _, labels = series.partition("{")
      family = families.get(name) or families[_HISTOGRAM_SUFFIX.sub("", name)]
      family.add_sample(f"kdtree:{name}", {"model_name": self._model_name, **_labels(labels)}, value)
    yield from families.values()


def _labels(text: str) -> dict[str, str]:
  """The labels of a series, `reason="stop",le="0.5"}`."""
  return {name: re.sub(r"\\(.)", lambda escape: "\n" if escape[1] == "n" else escape[1], value)
          for name, value in _LABEL.findall(text)}
