#include "metrics_page.h"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "figures.h"
#include "openai_utf8.h"

namespace kdt {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

constexpr const char* kPrefix = "kdtree:";

struct Series {
  std::string_view name;
  Labels labels;
};

// `name{label="value",…}`; in a value \ escapes \, " and n.
Series parse_series(std::string_view text) {
  const size_t open = std::min(text.find('{'), text.size());
  Series series{text.substr(0, open), {}};
  for (size_t at = open + 1; at < text.size() && text[at] != '}';) {
    const size_t equals = text.find("=\"", at);
    if (equals == std::string_view::npos) break;
    ClientMetric::Label label{std::string(text.substr(at, equals - at)), {}};
    for (at = equals + 2; at < text.size() && text[at] != '"'; ++at) {
      const bool escape = text[at] == '\\' && at + 1 < text.size();
      if (escape) ++at;
      label.value += escape && text[at] == 'n' ? '\n' : text[at];
    }
    series.labels.push_back(std::move(label));
    at = text.find_first_not_of("\",", at);
  }
  return series;
}

// What follows the family's name in a series of it: "", or a histogram's "_bucket", "_sum", "_count".
std::optional<std::string_view> suffix_of(const FigureFamily& family, std::string_view name) {
  if (name.substr(0, family.name.size()) != family.name) return std::nullopt;
  const std::string_view suffix = name.substr(family.name.size());
  const bool of_histogram = suffix == "_bucket" || suffix == "_sum" || suffix == "_count";
  return (family.kind == KDT_FIGURE_HISTOGRAM ? of_histogram : suffix.empty()) ? std::optional(suffix) : std::nullopt;
}

class Page {
 public:
  explicit Page(const std::string& model_name) : model_label_{"model_name", openai::mended_utf8(model_name)} {}

  void open(std::string_view name, std::string_view help, MetricType type) {
    families_.push_back({kPrefix + std::string(name), std::string(help), type, {}});
  }

  void add(Labels labels, double value) {
    ClientMetric& metric = metric_of(std::move(labels));
    (families_.back().type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  }

  void add_histogram(std::string_view suffix, Labels labels, double value) {
    double bound = 0;
    for (size_t i = 0; i < labels.size(); ++i) {
      if (labels[i].name != "le") continue;
      bound = labels[i].value == "+Inf" ? std::numeric_limits<double>::infinity() : std::stod(labels[i].value);
      labels.erase(labels.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
    ClientMetric::Histogram& histogram = metric_of(std::move(labels)).histogram;
    if (suffix == "_bucket") {
      histogram.bucket.push_back({});
      histogram.bucket.back().cumulative_count = static_cast<uint64_t>(value);
      histogram.bucket.back().upper_bound = bound;
    } else if (suffix == "_sum") {
      histogram.sample_sum = value;
    } else {
      histogram.sample_count = static_cast<uint64_t>(value);
    }
  }

  std::string text() const { return prometheus::TextSerializer().Serialize(families_); }

 private:
  // The last family's metric of these labels: series of one histogram share one.
  ClientMetric& metric_of(Labels labels) {
    labels.insert(labels.begin(), model_label_);
    std::vector<ClientMetric>& metrics = families_.back().metric;
    const auto is_it = [&](const ClientMetric& each) { return each.label == labels; };
    const auto found = std::find_if(metrics.rbegin(), metrics.rend(), is_it);
    if (found != metrics.rend()) return *found;
    metrics.emplace_back();
    metrics.back().label = std::move(labels);
    return metrics.back();
  }

  ClientMetric::Label model_label_;
  std::vector<MetricFamily> families_;
};

void add_engine(Page& page, kdt_engine* engine) {
  const Figures figures = Figures::read(engine);
  std::vector<Series> series;
  for (const char* name : figures.names) series.push_back(parse_series(name));
  for (const FigureFamily& family : figure_families()) {
    page.open(family.name, family.help,
              family.kind == KDT_FIGURE_COUNTER  ? MetricType::Counter
              : family.kind == KDT_FIGURE_GAUGE ? MetricType::Gauge
                                                 : MetricType::Histogram);
    for (size_t i = 0; i < series.size(); ++i) {
      const std::optional<std::string_view> suffix = suffix_of(family, series[i].name);
      if (!suffix) continue;
      if (family.kind == KDT_FIGURE_HISTOGRAM) {
        page.add_histogram(*suffix, series[i].labels, figures.values[i]);
      } else {
        page.add(series[i].labels, figures.values[i]);
      }
    }
  }
}

void add_http(Page& page, const HttpFigures& http) {
  page.open("http_requests_total", "HTTP requests answered, by route and status; 499: the client left before.",
            MetricType::Counter);
  for (const auto& [key, count] : http.requests) {
    page.add({{"route", std::string(key.first)}, {"code", std::to_string(key.second)}}, static_cast<double>(count));
  }
  page.open("http_connections_refused_total", "Connections refused because too many were open.", MetricType::Counter);
  page.add({}, static_cast<double>(http.connections_refused));
  page.open("http_connections", "Open connections.", MetricType::Gauge);
  page.add({}, static_cast<double>(http.open_connections));
  page.open("http_requests_in_progress", "HTTP requests being answered, besides this one.", MetricType::Gauge);
  page.add({}, static_cast<double>(http.open_requests));
}

}  // namespace

std::string metrics_page(kdt_engine* engine, const std::string& model_name, const HttpFigures& http) {
  Page page(model_name);
  add_engine(page, engine);
  add_http(page, http);
  return page.text();
}

}  // namespace kdt
