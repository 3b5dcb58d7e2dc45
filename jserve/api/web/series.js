// The arithmetic behind the drawings: windows, rates, scales. Pure: no document, no network.

/** Values over time, the latest `seconds` of them. */
export class Series {
  constructor(seconds) {
    this.seconds = seconds;
    this.points = []; // {at, values}
  }

  push(at, values) {
    this.points.push({ at, values });
    while (this.points[0].at < at - this.seconds) this.points.shift();
  }

  /** The largest value in sight; 0 where there is none. */
  get top() {
    return this.points.reduce((top, { values }) => Math.max(top, ...values.map((v) => v ?? 0)), 0);
  }

  /** An SVG path of value number `i` in a box of 100 by 100; breaks where there is no value. */
  path(i, now, top) {
    let pen = "M";
    let d = "";
    for (const { at, values } of this.points) {
      if (values[i] === null || values[i] === undefined) {
        pen = "M";
        continue;
      }
      const x = 100 - (100 * (now - at)) / this.seconds;
      const y = 100 - (100 * values[i]) / top;
      d += `${pen}${x.toFixed(2)} ${y.toFixed(2)}`;
      pen = "L";
    }
    return d;
  }
}

/** 1, 2 or 5 times a power of ten, at or above `value`. */
export function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((m) => m * power).find((top) => top >= value * 0.999999);
}

/** Growth per second of a total between two answers; null without a past, 0 where it began anew. */
export function perSecond(before, after, total) {
  if (!before || after.now <= before.now) return null;
  return Math.max(0, total(after) - total(before)) / (after.now - before.now);
}

/** One path of bars in a box of 100 by 100: the k-th of `n` is `heights[k]` of `top` high; 0 is left out. */
export function bars(heights, n, top) {
  const width = 100 / n;
  const body = width * 0.82;
  return heights
    .map((h, k) => {
      if (!(h > 0)) return "";
      const y = Math.min(100, Math.max(1, (100 * h) / top));
      return `M${(k * width).toFixed(3)} 100v${(-y).toFixed(2)}h${body.toFixed(3)}v${y.toFixed(2)}z`;
    })
    .join("");
}

/** A number with about three figures: 0.42, 7.3, 128, 12.4k, 3.1M. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 999_500) return `${(value / 1e6).toFixed(size < 99_500_000 ? 1 : 0)}M`;
  if (size >= 9_995) return `${(value / 1e3).toFixed(size < 99_500 ? 1 : 0)}k`;
  if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return value.toFixed(size >= 10 ? 1 : 2);
}
