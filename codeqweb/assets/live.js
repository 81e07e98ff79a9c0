// Lets the page follow the queue, and adds keys. Every page works without it.
"use strict";
(() => {
  const body = document.body, live = document.getElementById("live"), state = document.getElementById("live-state");
  const refresh = Number(body.dataset.refresh || 0), parser = new DOMParser();
  let source = null, stopped = false, ticks = 0, fetching = false, timer = 0;

  const show = (on, text) => {
    state.className = "live-state " + (on ? "on" : "off");
    state.textContent = text;
  };

  // morph makes the children of an element like those of another one, and changes only what
  // differs, so that focus, selection and open details stay.
  const morphChildren = (from, to) => {
    const old = [...from.childNodes], next = [...to.childNodes];
    next.forEach((node, i) => {
      if (i < old.length) morph(old[i], node);
      else from.appendChild(document.importNode(node, true));
    });
    old.slice(next.length).forEach((node) => node.remove());
  };
  const morph = (from, to) => {
    if (from.nodeType !== to.nodeType || from.nodeName !== to.nodeName || from.id !== to.id) {
      from.replaceWith(document.importNode(to, true));
      return;
    }
    if (from.nodeType !== Node.ELEMENT_NODE) {
      if (from.data !== to.data) from.data = to.data;
      return;
    }
    for (const a of [...from.attributes]) {
      if (!to.hasAttribute(a.name) && a.name !== "open" && a.name !== "class" && a.name !== "tabindex") from.removeAttribute(a.name);
    }
    for (const a of to.attributes) {
      if (a.name !== "open" && from.getAttribute(a.name) !== a.value) from.setAttribute(a.name, a.value);
    }
    morphChildren(from, to);
  };

  const busy = () => {
    const at = document.activeElement;
    return live.contains(at) && /^(INPUT|SELECT|TEXTAREA)$/.test(at.tagName);
  };
  const take = (element) => {
    if (element && live && !busy()) morphChildren(live, element);
  };
  const fromText = (html) => parser.parseFromString('<div id="live">' + html + "</div>", "text/html").getElementById("live");

  const again = async () => {
    if (fetching || document.hidden) return;
    fetching = true;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      if (answer.ok) take(parser.parseFromString(await answer.text(), "text/html").getElementById("live"));
      else show(false, "not live");
    } catch {
      show(false, "not live");
    } finally {
      fetching = false;
    }
  };

  const follow = () => {
    if (!live || stopped || source || !(body.dataset.live || refresh)) return;
    source = new EventSource("live?" + (body.dataset.live || ""));
    source.onopen = () => show(true, "live");
    source.addEventListener("live", (e) => take(fromText(e.data)));
    source.addEventListener("tick", () => {
      body.dataset.ticks = String(++ticks);
      if (refresh && ticks % refresh === 0) again();
    });
    source.onerror = () => {
      show(false, "not live");
      if (source && source.readyState === EventSource.CLOSED) { // refused: look at times
        source = null;
        clearTimeout(timer);
        timer = setTimeout(() => { again(); follow(); }, 10000);
      }
    };
  };
  const stop = () => {
    clearTimeout(timer);
    if (source) source.close();
    source = null;
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) stop();
    else follow();
  });
  addEventListener("pagehide", stop);
  addEventListener("pageshow", follow);
  follow();

  document.addEventListener("submit", (e) => {
    const text = e.target.dataset.confirm;
    if (text && !confirm(text)) e.preventDefault();
  });

  let row = -1;
  const move = (by) => {
    const rows = [...document.querySelectorAll("table.rows tbody tr")];
    if (rows.length === 0) return;
    row = Math.max(0, Math.min(rows.length - 1, row + by));
    rows.forEach((r, i) => r.classList.toggle("on", i === row));
    const link = rows[row].querySelector("a");
    rows[row].scrollIntoView({ block: "nearest" });
    if (link) link.focus();
  };
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName)) return;
    const keys = document.getElementById("keys");
    if (e.key === "j") move(1);
    else if (e.key === "k") move(-1);
    else if (e.key === "?") { if (keys.open) keys.close(); else keys.showModal(); }
    else if (e.key === "/") { e.preventDefault(); document.getElementById("find-id").focus(); }
    else if (e.key === "n") { const next = document.getElementById("next"); if (next) next.click(); }
    else if (e.key === "l") {
      stopped = !stopped;
      if (stopped) { stop(); show(false, "stopped"); } else follow();
    } else if (e.key >= "1" && e.key <= "9") {
      const link = document.querySelectorAll("#nav a:not(.brand)")[Number(e.key) - 1];
      if (link) link.click();
    }
  });
})();
