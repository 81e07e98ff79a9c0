// Draws the table of a flow as a graph: nodes by level, laid out by dagre. Without it, the table is
// open. All of a node is taken from its row, so that the graph is as fresh as the table.
"use strict";
(() => {
  const graph = document.getElementById("graph"), live = document.getElementById("live");
  const space = "http://www.w3.org/2000/svg", width = 176, height = 44;
  let zoom = 0, drawn = "", picked = "";

  const svgPart = (name, attributes, text) => {
    const e = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
    if (text !== undefined) e.textContent = text;
    return e;
  };
  const part = (name, attributes, text) => {
    const e = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
    if (text !== undefined) e.textContent = text;
    return e;
  };
  const number = (n) => Number(n).toLocaleString("en-US");
  const clip = (text) => text.length > 22 ? text.slice(0, 21) + "…" : text;

  const tools = part("p", { class: "flow-tools" }), out = part("button", { type: "button", "aria-label": "Smaller" }, "−");
  const fit = part("button", { type: "button" }, "Fit"), into = part("button", { type: "button", "aria-label": "Larger" }, "+");
  const box = part("div", { class: "scroll flow-box" }), card = part("div", { class: "flow-card", id: "picked", role: "region", "aria-label": "The chosen node", hidden: "" });
  tools.append(out, fit, into, part("small", {}, "Tab and the arrow keys go from node to node; Enter shows what can be done."));
  graph.append(tools, box, card);

  const rows = () => [...live.querySelectorAll("#nodes tbody tr")];
  const list = (text) => text.trim().split(/\s+/).filter(Boolean);

  const scale = () => {
    const svg = box.querySelector("svg");
    if (!svg) return;
    const { width: w, height: h } = svg.viewBox.baseVal;
    const by = zoom || Math.min(1, Math.max(0.9, (box.clientWidth - 2) / w));
    svg.setAttribute("width", String(Math.round(w * by)));
    svg.setAttribute("height", String(Math.round(h * by)));
    return by;
  };
  const change = (factor) => {
    zoom = Math.min(4, Math.max(0.1, scale() * factor));
    scale();
  };
  out.addEventListener("click", () => change(1 / 1.4));
  into.addEventListener("click", () => change(1.4));
  fit.addEventListener("click", () => { zoom = 0; scale(); });
  addEventListener("resize", scale);

  // pick shows a node's row below the graph.
  const pick = (key) => {
    const row = document.getElementById(key);
    picked = row ? key : "";
    card.hidden = !row;
    card.replaceChildren();
    for (const cell of row ? [...row.cells].slice(1) : []) {
      const copy = part("div", {});
      copy.append(...cell.cloneNode(true).childNodes);
      card.append(copy);
    }
    for (const a of box.querySelectorAll("a.node")) a.classList.toggle("on", a.dataset.node === key);
  };

  const draw = () => {
    const all = rows(), now = all.map((r) => JSON.stringify(r.dataset) + r.innerHTML).join("");
    if (now === drawn) return;
    drawn = now;
    const g = new dagre.graphlib.Graph();
    g.setGraph({ rankdir: "LR", nodesep: 12, ranksep: 56, marginx: 4, marginy: 4, ranker: all.length > 60 ? "longest-path" : "network-simplex" });
    g.setDefaultEdgeLabel(() => ({}));
    for (const r of all) g.setNode(r.id, { width, height });
    for (const r of all) {
      for (const to of list(r.dataset.to)) g.setEdge(r.id, "node-" + to, {});
      for (const to of list(r.dataset.calls)) g.setEdge(r.id, "node-" + to, { calls: true });
    }
    dagre.layout(g);
    const size = g.graph(), focused = document.activeElement.closest?.("a.node")?.dataset.node;
    const svg = svgPart("svg", { viewBox: "0 0 " + Math.ceil(size.width) + " " + Math.ceil(size.height), role: "group", "aria-label": "The flow: " + all.length + " nodes" });
    const tip = svgPart("marker", { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" });
    tip.append(svgPart("path", { d: "M0 0L8 4L0 8z" }));
    const defs = svgPart("defs", {});
    defs.append(tip);
    svg.append(defs);
    for (const e of g.edges()) {
      const { points, calls } = g.edge(e), from = g.node(e.v), to = g.node(e.w);
      const by = [{ x: from.x + width / 2, y: from.y }, ...points.slice(1, -1), { x: to.x - width / 2, y: to.y }];
      let d = "M" + by[0].x + " " + by[0].y;
      by.slice(1).forEach((p, i) => { d += "C" + [(by[i].x + p.x) / 2, by[i].y, (by[i].x + p.x) / 2, p.y, p.x, p.y].map((n) => n.toFixed(1)).join(" "); });
      svg.append(svgPart("path", { class: calls ? "edge calls" : "edge", "marker-end": "url(#tip)", d }));
    }
    for (const r of all) {
      const { x, y } = g.node(r.id), d = r.dataset, folded = d.count !== "1";
      const name = r.querySelector(".name").textContent.trim() || "not kept";
      const text = folded ? number(d.count) + " " + d.state : d.state + " " + d.short;
      const a = svgPart("a", { href: "#" + r.id, class: "node " + d.state + (d.self ? " self" : "") + (folded ? " folded" : ""), "data-node": r.id });
      const at = { x: (x - width / 2).toFixed(1), y: (y - height / 2).toFixed(1), width, height, rx: 5 };
      if (folded) a.append(svgPart("rect", { ...at, class: "behind", x: (x - width / 2 + 4).toFixed(1), y: (y - height / 2 + 4).toFixed(1) }));
      a.append(svgPart("title", {}, text + ", " + name + (d.self ? ", this task" : "")), svgPart("rect", at));
      a.append(svgPart("text", { x: (x - width / 2 + 9).toFixed(1), y: (y - 4).toFixed(1), class: "what" }, text));
      a.append(svgPart("text", { x: (x - width / 2 + 9).toFixed(1), y: (y + 13).toFixed(1) }, clip(name)));
      svg.append(a);
    }
    box.replaceChildren(svg);
    scale();
    if (picked) pick(picked);
    if (focused) box.querySelector(`a.node[data-node="${focused}"]`)?.focus();
  };

  box.addEventListener("click", (e) => {
    const a = e.target.closest("a.node");
    if (!a) return;
    e.preventDefault();
    pick(a.dataset.node);
  });
  // An arrow key goes to the nearest node in its direction.
  box.addEventListener("keydown", (e) => {
    const from = e.target.closest("a.node"), way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[e.key];
    if (!from || !way || e.ctrlKey || e.altKey || e.metaKey) return;
    e.preventDefault();
    const place = (a) => { const r = a.querySelector("rect:last-of-type").getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; };
    const [x, y] = place(from);
    let best = null, least = Infinity;
    for (const a of box.querySelectorAll("a.node")) {
      const [dx, dy] = [place(a)[0] - x, place(a)[1] - y], ahead = dx * way[0] + dy * way[1], beside = Math.abs(dx * way[1]) + Math.abs(dy * way[0]);
      if (ahead > 1 && ahead + 3 * beside < least) [best, least] = [a, ahead + 3 * beside];
    }
    if (best) best.focus();
  });

  graph.hidden = false;
  document.getElementById("levels").open = false;
  draw();
  const self = box.querySelector("a.self");
  if (self) {
    const a = self.getBoundingClientRect(), b = box.getBoundingClientRect();
    box.scrollBy(a.x + a.width / 2 - b.x - b.width / 2, a.y + a.height / 2 - b.y - b.height / 2);
    pick(self.dataset.node);
  }
  new MutationObserver(draw).observe(live, { subtree: true, childList: true, attributes: true, characterData: true });
})();
