// The palette, by / or ctrl-k: screens, the actions of the page, and the search, by the keyboard.
"use strict";
(() => {
  const dialog = document.getElementById("palette"), field = document.getElementById("palette-text"), list = document.getElementById("palette-list");
  const searchURL = document.getElementById("top-search").getAttribute("action");
  let shown = [], at = 0;

  // words returns what an element does: for a button, with the heading or the row that it is for.
  const words = (e) => {
    const row = e.closest("tr")?.querySelector("a, th, td")?.textContent.trim();
    const text = (e.getAttribute("aria-label") || e.textContent).trim();
    return row && row !== text ? text + " " + row : text;
  };
  const entries = () => {
    const all = [...document.querySelectorAll("#nav a:not(.brand)")].map((a) => ({ text: "Go to " + a.textContent.trim(), run: () => a.click() }));
    for (const e of document.querySelectorAll("main button, main summary, main .tabs a")) {
      const hidden = e.closest("details:not([open])");
      if (hidden && hidden.querySelector("summary") !== e || !e.checkVisibility() && !hidden) continue;
      all.push({ text: (e.matches(".tabs a") ? "Show " : "") + words(e), run: () => { e.scrollIntoView({ block: "center" }); e.focus(); e.click(); } });
    }
    return all.filter((entry) => entry.text);
  };

  const render = () => {
    const wanted = field.value.trim().toLowerCase().split(/\s+/);
    shown = entries().filter((entry) => wanted.every((word) => entry.text.toLowerCase().includes(word))).slice(0, 12);
    if (field.value.trim()) {
      const url = searchURL + "?q=" + encodeURIComponent(field.value.trim());
      shown.push({ text: "Search for " + field.value.trim(), run: () => location.assign(url) });
    }
    at = 0;
    list.replaceChildren(...shown.map((entry, i) => {
      const item = document.createElement("li");
      item.id = "palette-" + i;
      item.setAttribute("role", "option");
      item.textContent = entry.text;
      item.addEventListener("click", () => choose(i));
      return item;
    }));
    mark();
  };
  const mark = () => {
    [...list.children].forEach((item, i) => item.setAttribute("aria-selected", String(i === at)));
    list.children[at]?.scrollIntoView({ block: "nearest" });
    field.setAttribute("aria-activedescendant", shown.length ? "palette-" + at : "");
  };
  const choose = (i) => {
    dialog.close();
    shown[i]?.run();
  };
  field.addEventListener("input", render);
  field.addEventListener("keydown", (e) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[e.key];
    if (by && shown.length) {
      e.preventDefault();
      at = (at + by + shown.length) % shown.length;
      mark();
    } else if (e.key === "Enter") {
      e.preventDefault();
      choose(at);
    }
  });
  dialog.addEventListener("click", (e) => { if (e.target === dialog) dialog.close(); });
  document.addEventListener("keydown", (e) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName);
    if (!((e.ctrlKey || e.metaKey) && e.key === "k" || e.key === "/" && !typing && !e.ctrlKey && !e.metaKey && !e.altKey)) return;
    e.preventDefault();
    if (dialog.open) return;
    field.value = "";
    dialog.showModal();
    render();
  });
})();
