// Draws the charts of a page with uPlot. Without it, the table of their values says the same.
"use strict";
(() => {
  const place = document.getElementById("charts");
  if (!place || !place.dataset.src || typeof uPlot === "undefined") return;
  const figures = [...place.querySelectorAll("figure.chart")];
  const plots = new Map(), every = { "5m": 2, "1h": 20, "24h": 60 };
  let data = null, asking = false;

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const count = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const precise = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
  const span = (s) => {
    if (s < 60) return precise.format(s) + " s";
    if (s < 3600) return precise.format(s / 60) + " min";
    if (s < 86400) return precise.format(s / 3600) + " h";
    return precise.format(s / 86400) + " d";
  };
  const text = (unit, v) => {
    if (v === null || v === undefined) return "–";
    if (unit === "seconds") return span(v);
    return unit === "rate" ? precise.format(v) + "/s" : count.format(v);
  };
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200]; // s
  for (let s = 86400; s < 2 ** 33; s *= 2) steps.push(s);
  const valuesOf = (chart) => [data.Times, ...chart.Series.map((s) => s.Values)];

  // say shows the values under the pointer, or the newest ones.
  const format = (options) => new Intl.DateTimeFormat(undefined, options);
  const dates = {
    full: format({ dateStyle: "short", timeStyle: "medium" }), fullDay: format({ dateStyle: "medium", timeZone: "UTC" }),
    second: format({ hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" }), minute: format({ hour: "2-digit", minute: "2-digit", hourCycle: "h23" }),
    day: format({ day: "numeric", month: "short" }), utc: format({ day: "numeric", month: "short", timeZone: "UTC" }),
  };
  const say = (figure, chart, at) => {
    const under = at !== null && at !== undefined, now = [];
    figure.querySelectorAll(".key b").forEach((b, i) => {
      const values = chart.Series[i].Values || [];
      b.parentElement.hidden = chart.Series[i].Class === "before" && !values.some((v) => v !== null); // no such day
      b.textContent = text(chart.Unit, under ? values[at] : values.findLast((v) => v !== null));
      now.push(chart.Series[i].Name + " " + b.textContent);
    });
    const shown = under ? at : data.Times.findLastIndex((_, i) => chart.Series.some((s) => s.Class !== "before" && s.Values && s.Values[i] !== null));
    const day = chart.Unit === "day", said = shown >= 0 && (under || day || data.To - data.Times[shown] > 60); // else it is now
    figure.querySelector(".when-at").textContent = said ? (day ? dates.fullDay : dates.full).format(data.Times[shown] * 1000) : "";
    if (!under) figure.querySelector(".plot").setAttribute("aria-label", figure.querySelector("figcaption").firstChild.data.trim() + ": " + now.join(", "));
  };

  const draw = (figure, chart) => {
    const box = figure.querySelector(".plot"), dim = color("--dim"), rule = color("--rule");
    const axis = { stroke: dim, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 }, font: "11px system-ui, sans-serif" };
    const day = chart.Unit === "day";
    box.replaceChildren();
    return new uPlot({
      width: box.clientWidth, height: 150,
      tzDate: day ? (at) => uPlot.tzDate(new Date(at * 1000), "Etc/UTC") : undefined,
      scales: {
        x: { range: () => [data.From, Math.max(data.To, data.From + 1)] },
        y: { range: (_, __, top) => [0, top > 0 ? top * 1.05 : 1] },
      },
      cursor: { sync: { key: "charts" }, drag: { x: false, y: false }, points: { size: 5 } },
      legend: { show: false },
      hooks: { setCursor: [(u) => say(figure, chart, u.cursor.idx)] },
      axes: [{ ...axis, size: 26, space: 48, values: (_, ticks, __, ___, step) => ticks.map((at) => (step >= 86400 ? (day ? dates.utc : dates.day) : step >= 60 ? dates.minute : dates.second).format(at * 1000)) }, { ...axis, size: 64, incrs: chart.Unit === "seconds" ? steps : undefined, values: (_, ticks) => ticks.map((v) => text(chart.Unit, v)) }],
      series: [{}, ...chart.Series.map((s) => ({
        stroke: color("--" + s.Class), width: s.Class === "before" ? 1 : 1.5, dash: s.Class === "before" ? [4, 3] : undefined, spanGaps: false,
      }))],
    }, valuesOf(chart), box);
  };

  const show = (anew) => {
    for (const figure of figures) {
      const chart = data.Charts.find((c) => "chart-" + c.ID === figure.id);
      if (!chart) continue;
      const plot = plots.get(figure);
      if (anew || !plot) {
        if (plot) plot.destroy();
        plots.set(figure, draw(figure, chart));
      } else plot.setData(valuesOf(chart));
      say(figure, chart, plots.get(figure).cursor.idx);
    }
  };

  const ask = async () => {
    if (asking || document.hidden) return;
    asking = true;
    try {
      const answer = await fetch(place.dataset.src);
      if (answer.ok) {
        data = await answer.json();
        data.Times = data.Times || [];
        show(false);
        place.dataset.drawn = data.Span;
      }
    } catch {
      // the line beside the search says that nothing is live
    } finally {
      asking = false;
    }
  };

  let ticks = 0;
  document.addEventListener("codeq-tick", () => {
    const wait = every[data && data.Span] || 300;
    if (++ticks % wait === 0) ask();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => data && show(true));
  new ResizeObserver(() => {
    for (const [figure, plot] of plots) {
      const width = figure.querySelector(".plot").clientWidth;
      if (width > 0 && width !== plot.width) plot.setSize({ width, height: 150 });
    }
  }).observe(place);
  ask();
})();
