// Reads the text format of Prometheus, and figures from two readings of it.

/** Returns {name: [{labels, value}]}. */
export function readMetrics(text) {
  const metrics = {}
  for (const line of text.split("\n")) {
    const sample = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line)
    if (!sample) continue
    const [, name, labels = "", value] = sample
    const pairs = [...labels.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, key, text]) => [key, text])
    ;(metrics[name] ??= []).push({ labels: Object.fromEntries(pairs), value: Number(value) })
  }
  return metrics
}

export const total = (metrics, name) => (metrics[name] ?? []).reduce((sum, each) => sum + each.value, 0)

/** What a counter grew per second between two readings. A restarted server counts from 0 again. */
export function rate(before, after, name, seconds) {
  const grown = total(after, name) - total(before, name)
  return (grown < 0 ? total(after, name) : grown) / seconds
}

/** The quantile of what a histogram took in between two readings, or null without any. Linear within a bucket. */
export function quantile(before, after, name, q) {
  const counts = new Map()
  const collect = (metrics, sign) => {
    for (const { labels, value } of metrics[`${name}_bucket`] ?? []) {
      const edge = labels.le === "+Inf" ? Infinity : Number(labels.le)
      counts.set(edge, (counts.get(edge) ?? 0) + sign * value)
    }
  }
  collect(after, 1)
  collect(before, -1)
  const edges = [...counts.keys()].sort((a, b) => a - b)
  const num = edges.length ? counts.get(edges.at(-1)) : 0
  if (!(num > 0)) return null
  let low = 0
  let below = 0
  for (const edge of edges) {
    const upTo = counts.get(edge)
    if (upTo >= q * num) {
      if (edge === Infinity) return low
      return low + ((edge - low) * (q * num - below)) / Math.max(upTo - below, 1e-9)
    }
    low = edge
    below = upTo
  }
  return low
}
