"use strict";

(() => {
  const collator = new Intl.Collator("en", { numeric: true });

  /** Compares two cells; missing values sort last in both directions. */
  const compare = (a, b, numeric, sign) => {
    if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
    return sign * (numeric ? a - b : collator.compare(a, b));
  };

  const sort = (table, header) => {
    const numeric = header.dataset.kind === "number";
    const [first, second] = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
    const direction = header.ariaSort === first ? second : first;
    for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
    header.ariaSort = direction;
    const value = (row) => row.cells[header.cellIndex].dataset.value;
    const sign = direction === "ascending" ? 1 : -1;
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b), numeric, sign)));
  };

  const button = (act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.addEventListener("click", act);
    return made;
  };

  const copier = (label, text) => {
    const made = button(async () => {
      let message = "Copied";
      try {
        await navigator.clipboard.writeText(text());
      } catch {
        message = "Not allowed";
      }
      made.textContent = message;
      setTimeout(() => { made.textContent = label; }, 2000);
    });
    made.textContent = label;
    made.className = "copy";
    made.setAttribute("aria-live", "polite");
    return made;
  };

  for (const table of document.querySelectorAll("table.results")) {
    for (const header of table.querySelectorAll("th[data-kind]")) {
      const made = button(() => sort(table, header));
      made.append(...header.childNodes);
      header.append(made);
    }
  }

  if (navigator.clipboard) {
    const commands = [...document.querySelectorAll("pre.command")];
    for (const command of commands) command.after(copier("Copy", () => command.textContent));
    const all = document.getElementById("commands");
    if (all && commands.length > 1) {
      all.append(copier("Copy all commands", () => commands.map((command) => command.textContent).join("\n")));
    }
  }
})();
