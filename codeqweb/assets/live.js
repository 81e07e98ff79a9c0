// The page follows the queue, and has keys. Every page works without it.
"use strict";
(() => {
  const body = document.body, live = document.getElementById("live"), state = document.getElementById("live-state");
  const refresh = Number(body.dataset.refresh || 0), parser = new DOMParser();
  let source = null, stopped = false, gone = false, ticks = 0, fetching = false, timer = 0;

  const show = (on, text) => {
    state.className = "live-state " + (on ? "on" : "off");
    state.textContent = text;
  };

  // morph makes an element like another one, and changes only what differs, so that focus, open
  // details and filled fields stay. Rows with an ID are known again wherever they are.
  let changed = new Set();
  const isFilled = (e) => e.tagName === "SELECT" ? [...e.options].some((o) => o.selected !== o.defaultSelected) :
    /^(INPUT|TEXTAREA)$/.test(e.tagName) && (e.value !== e.defaultValue || e.checked !== e.defaultChecked);
  const callbacks = {
    beforeNodeMorphed: (from, to) => {
      if (from.nodeType === Node.ELEMENT_NODE) return !("keep" in from.dataset) && !isFilled(from); // kept: by its own script
      if (from.nodeValue !== to.nodeValue && from.parentElement.closest("td, dd")) changed.add(from.parentElement);
    },
    beforeAttributeUpdated: (name, _, how) => name !== "open" && (how === "update" || name !== "class" && name !== "tabindex"),
  };
  const morph = (from, to) => Idiomorph.morph(from, to, { callbacks });

  // What is read or filled in stays: fields with the focus, selected text, and the rows of a table
  // under the pointer, which would change their order. Parts with data-follows are outside of the live
  // one, and follow with it.
  const parts = (page) => [...page.querySelectorAll("#live, [data-follows]")];
  let pointed = null;
  const busy = () => {
    const at = document.activeElement, selected = getSelection(), has = (e) => parts(document).some((p) => p.contains(e));
    return has(at) && /^(INPUT|SELECT|TEXTAREA)$/.test(at.tagName) ||
      !selected.isCollapsed && has(selected.anchorNode) || pointed !== null && pointed.isConnected;
  };
  document.addEventListener("pointermove", (e) => {
    pointed = e.pointerType === "mouse" && e.target.closest("#live, [data-follows]") ? e.target.closest("tbody, form") : null;
  }, { passive: true });
  document.documentElement.addEventListener("pointerleave", () => { pointed = null; });
  // take reports whether it has taken the parts of a page.
  const take = (page) => {
    if (!live || busy()) return false;
    const at = document.activeElement;
    changed.forEach((e) => e.classList.remove("changed"));
    changed = new Set();
    for (const part of parts(page)) {
      const old = document.getElementById(part.id);
      if (old) morph(old, part);
    }
    if (at.isConnected && at !== document.activeElement) at.focus({ preventScroll: true }); // it was moved
    changed.forEach((e) => e.classList.add("changed"));
    reach();
    return true;
  };
  // A part that scrolls sideways takes the keyboard.
  const reach = () => document.querySelectorAll(".scroll").forEach((e) => { e.tabIndex = e.scrollWidth > e.clientWidth ? 0 : -1; });
  addEventListener("resize", reach);
  reach();
  const parse = (html) => {
    const page = parser.parseFromString(html, "text/html");
    if (window.localTimes) window.localTimes(page); // before it is shown
    return page;
  };
  const fromText = (html) => parse('<div id="live">' + html + "</div>");

  // again fetches the page, and takes an element of it: the live part, or a folded one.
  let tag = "";
  const again = async (folded) => {
    if (fetching && folded) setTimeout(again, 300, folded);
    if (fetching || document.hidden) return;
    fetching = true;
    try {
      const answer = await fetch(location.href, { headers: folded ? {} : { "If-None-Match": tag } });
      if (answer.ok) {
        const page = parse(await answer.text());
        if (folded) morph(folded, page.getElementById(folded.id));
        tag = !folded && take(page) && answer.headers.get("ETag") || ""; // "": ask for all of it again
      } else if (answer.status === 404) { // what the page shows is gone: say so, and leave it
        if (!gone) live.before(...parse(await answer.text()).querySelectorAll("#main > p"));
        gone = stopped = true;
        stop();
        return show(false, "gone");
      } else if (answer.status !== 304) return show(false, "not live");
      if (source?.readyState === EventSource.OPEN) show(true, "live");
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
      document.dispatchEvent(new Event("codeq-tick"));
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

  document.addEventListener("toggle", (e) => {
    if (e.target.open && "again" in e.target.dataset) again(e.target);
  }, true);

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
