// Shows times in the viewer's zone, with UTC under the pointer, and sends those of fields as UTC.
// Without it, all times are in UTC, and say so.
"use strict";
(() => {
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  const short = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });
  const full = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "medium", hourCycle: "h23" });
  const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3, hourCycle: "h23" });
  const minute = 60000, day = 24 * 60 * minute;

  // ahead returns how far the clock of the zone is ahead of UTC at a time, in ms.
  const ahead = (t) => -new Date(t).getTimezoneOffset() * minute;
  const offset = (t) => {
    const minutes = Math.abs(ahead(t)) / minute, rest = Math.round(minutes % 60);
    return "UTC" + (ahead(t) < 0 ? "\u2212" : "+") + Math.floor(minutes / 60) + (rest ? ":" + String(rest).padStart(2, "0") : "");
  };
  const iso = (t) => new Date(t).toISOString().replace(".000Z", "Z");
  const utc = (t) => iso(t).replace("T", " ").replace("Z", " UTC");

  // localTimes rewrites the times below an element. It is called for each part that is loaded,
  // before that is shown: the page never has the text of the server again.
  window.localTimes = (root) => {
    for (const e of root.querySelectorAll("time:not([data-local])")) {
      const t = Date.parse(e.dateTime);
      if (isNaN(t)) continue;
      e.dataset.local = "";
      const lines = [full.format(t) + ", " + zone + ", " + offset(t), utc(t)];
      if (e.title.startsWith("since ")) lines[0] = "since " + lines[0];
      if (e.classList.contains("at")) {
        e.textContent = short.format(t);
        lines.push(e.title); // how long ago
      }
      if (e.classList.contains("clock")) e.textContent = clock.format(t);
      e.title = lines.join("\n");
    }
    root.querySelectorAll(".here").forEach((e) => { e.hidden = e.dataset.zone === zone; });
  };

  // moments returns when the clock of the zone shows a time: never if the clock is set forward over
  // it, twice if it is set back. shown is that time as if it were in UTC.
  const moments = (shown) => {
    const all = [shown - ahead(shown - day), shown - ahead(shown + day)];
    return [...new Set(all)].filter((t) => t + ahead(t) === shown).sort((a, b) => a - b);
  };
  const hours = (ms) => (ms % (60 * minute) ? ms / minute + " min" : ms / (60 * minute) + " h");

  // A field has a note beside it, and a choice between the two moments of a doubled time.
  const fields = new Map();
  const read = (field) => Date.parse(field.value + "Z");
  const sent = (field) => {
    const shown = read(field), all = moments(shown);
    if (isNaN(shown)) return NaN;
    const { choice } = fields.get(field);
    return all.length === 0 ? shown - ahead(shown - day) : all[choice.value === "second" ? all.length - 1 : 0];
  };
  const tell = (field) => {
    const { note, choice, where } = fields.get(field), shown = read(field);
    const all = isNaN(shown) ? [0] : moments(shown), clock = field.value.slice(11);
    note.textContent = "";
    if (all.length === 0) {
      const by = hours(ahead(shown + day) - ahead(shown - day));
      note.textContent = clock + " does not exist on this day in " + zone + ": the clock is set forward by " + by + ". Choose another time.";
    } else if (all.length === 2) {
      note.textContent = clock + " comes twice on this day in " + zone + ": the clock is set back by " + hours(all[1] - all[0]) + ".";
      [...choice.options].forEach((o, i) => { o.textContent = "the " + o.value + ", " + offset(all[i]); });
    }
    field.setCustomValidity(all.length === 0 ? note.textContent : "");
    note.hidden = !note.textContent;
    choice.hidden = all.length !== 2;
    const t = isNaN(shown) ? NaN : sent(field);
    where.textContent = isNaN(t) || all.length === 0 ? "in " + zone : "in " + zone + ", " + offset(t) + ": " + utc(t);
  };
  const adopt = (field) => {
    const label = field.closest("label") || field.parentElement, note = document.createElement("small"), choice = document.createElement("select");
    let where = label.querySelector(".zone");
    if (!where) {
      where = document.createElement("small");
      field.after(" ", where);
    }
    note.className = "clock-note";
    note.setAttribute("role", "status");
    for (const value of ["first", "second"]) choice.add(new Option(value, value));
    choice.ariaLabel = "which of the two";
    where.after(" ", note, " ", choice);
    fields.set(field, { note, choice, where });
    const t = read(field);
    if (!isNaN(t)) { // of the server, in UTC
      field.defaultValue = field.value = new Date(t + ahead(t)).toISOString().replace(/(:00)?\.000Z|Z/, "");
      const all = moments(t + ahead(t));
      if (all.length === 2 && all[1] === t) choice.value = "second";
    }
    field.addEventListener("input", () => tell(field));
    choice.addEventListener("change", () => tell(field));
    tell(field);
  };

  window.localTimes(document);
  const footer = document.getElementById("zone");
  if (footer) footer.textContent = zone === "UTC" ? "Times are in UTC." : "Times are in " + zone + ", now " + offset(Date.now()) + "; the pointer shows them in UTC.";
  if (!("FormDataEvent" in window)) return; // the fields stay in UTC
  document.querySelectorAll("input[type=datetime-local]").forEach(adopt);
  document.addEventListener("formdata", (e) => {
    for (const [field] of fields) {
      if (field.form !== e.target || !field.name || field.disabled) continue;
      const t = sent(field);
      if (!isNaN(t)) e.formData.set(field.name, iso(t));
    }
  });
})();
