// Searches, copies and shows paths in the trees of payloads. Without it, the trees open and close.
"use strict";
(() => {
  const said = new WeakMap(); // how often: the answer to a copy does not replace what came later
  const say = (root, text, after = said.get(root)) => {
    if (after !== said.get(root)) return;
    said.set(root, (after || 0) + 1);
    root.querySelector("output").textContent = text;
  };

  // copy works without https, too: the clipboard of a page needs it.
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const field = document.createElement("textarea");
      field.value = text;
      document.body.append(field);
      field.select();
      const done = document.execCommand("copy");
      field.remove();
      if (!done) throw new Error("refused");
    }
  };

  // pathOf is the path of a part of a tree, such as $.lines[0].sku.
  const pathOf = (part, root) => {
    const steps = [];
    for (; part && part !== root; part = part.parentElement.closest(".leaf, details")) {
      const key = part.querySelector(":scope > .prop, :scope > summary > .prop");
      if (!key) continue;
      const text = key.textContent;
      if (key.classList.contains("index")) steps.unshift("[" + text + "]");
      else steps.unshift(/^[A-Za-z_$][\w$]*$/.test(text) ? "." + text : "[" + JSON.stringify(text) + "]");
    }
    return "$" + steps.join("");
  };

  const adopt = (root) => {
    const field = root.querySelector("input"), body = root.querySelector(".tree-body"), tools = root.querySelector(".tree-tools");
    const parts = [...body.querySelectorAll(".leaf, details")], opened = parts.map((p) => p.open);
    tools.hidden = false;

    field.addEventListener("input", () => {
      const text = field.value.trim().toLowerCase(), has = (e) => e && e.textContent.toLowerCase().includes(text);
      let hits = 0;
      parts.forEach((p, i) => {
        p.classList.remove("hit", "near");
        if (p.tagName === "DETAILS") p.open = opened[i];
      });
      body.classList.toggle("searched", text !== "");
      if (!text) return say(root, "");
      for (const p of parts) {
        if (!has(p.querySelector(":scope > .prop, :scope > summary > .prop")) && !has(p.querySelector(":scope > .value"))) continue;
        hits++;
        p.classList.add("hit");
        for (let up = p.parentElement.closest("details"); up && body.contains(up) && !up.classList.contains("near"); up = up.parentElement.closest("details")) {
          up.classList.add("near");
          up.open = true;
        }
      }
      say(root, hits === 1 ? "1 found" : hits.toLocaleString("en-US") + " found");
    });

    root.querySelector("[data-copy]").addEventListener("click", async (e) => {
      const before = said.get(root);
      try {
        const answer = await fetch(e.target.dataset.copy);
        if (!answer.ok) throw new Error(String(answer.status));
        await copy(await answer.text());
        say(root, "copied", before);
      } catch {
        say(root, "not copied: download it", before);
      }
    });

    for (const event of ["click", "focusin"]) {
      body.addEventListener(event, (e) => {
        const part = e.target.closest(".prop, .value, summary")?.closest(".leaf, details");
        if (part) say(root, pathOf(part, body));
      });
    }
  };
  // The result of a task may come later.
  const adoptAll = () => document.querySelectorAll(".tree:has(.tree-tools[hidden])").forEach(adopt);
  document.addEventListener("codeq-tick", adoptAll);
  adoptAll();
})();
