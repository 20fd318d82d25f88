"""A session's running figures as Prometheus metrics; needs prometheus-client (the extra `metrics`).

    prometheus_client.REGISTRY.register(SessionCollector(session, model_name="tiny-k2"))
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .session import Session


class SessionCollector(Collector):
  """Yields `kdtree:<figure>` for every figure of `session.stats()`: a counter when it ends in _total, else a gauge.

  model_name: the value of the label of that name. Once the session is closed, collecting raises SessionClosed.
  """

  def __init__(self, session: Session, model_name: str) -> None:
    self._session = session
    self._model_name = model_name

  def collect(self) -> Iterator[Metric]:
    for figure, value in self._session.stats().items():
      family = CounterMetricFamily if figure.endswith("_total") else GaugeMetricFamily
      metric = family(f"kdtree:{figure}", f"The engine's figure {figure}.", labels=["model_name"])
      metric.add_metric([self._model_name], value)
      yield metric
