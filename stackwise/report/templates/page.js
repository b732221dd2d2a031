"use strict";
(() => {
  const folds = [...document.querySelectorAll("details")];
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = folds.filter((fold) => !fold.open);
    for (const fold of folded) fold.open = true;
  });
  addEventListener("afterprint", () => {
    for (const fold of folded) fold.open = false;
  });

  // Only a region that scrolls needs the focus of the keyboard.
  const focusable = () => {
    for (const region of document.querySelectorAll(".scroll")) {
      if (region.scrollWidth > region.clientWidth) region.tabIndex = 0;
      else region.removeAttribute("tabindex");
    }
  };
  addEventListener("resize", focusable);
  for (const fold of folds) fold.addEventListener("toggle", focusable);
  focusable();

  for (const button of navigator.clipboard ? document.querySelectorAll(".repeat button") : []) {
    button.hidden = false;
    const label = button.getAttribute("aria-label");
    const say = (text, spoken) => {
      button.textContent = text;
      button.setAttribute("aria-label", spoken);
    };
    button.setAttribute("aria-live", "polite");
    button.addEventListener("click", () => {
      navigator.clipboard.writeText(button.previousElementSibling.textContent).then(
        () => say("Copied", "Copied"),
        () => say("Not copied", "Not copied"),
      );
      setTimeout(() => say("Copy", label), 3000);
    });
  }

  const form = document.getElementById("filter");
  if (!form) return;
  const search = document.getElementById("search");
  const shown = document.getElementById("shown");
  const nothing = document.getElementById("nothing");
  const boxes = [...form.querySelectorAll("input[type=checkbox]")];
  const sections = [...document.querySelectorAll("main section")];
  const entries = [...document.querySelectorAll("[data-entry]")].map((element) => ({
    element,
    status: element.dataset.status,
    isCounted: element.tagName !== "FIGURE" && !("again" in element.dataset),
    text: element.textContent.toLowerCase().replace(/\s+/g, " "),
  }));
  const opened = new Set();

  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    const narrowed = words.length > 0 || chosen.size < boxes.length;
    let count = 0, all = 0;
    for (const entry of entries) {
      const matches = words.every((word) => entry.text.includes(word));
      // A status without a box cannot be hidden.
      const kept = chosen.has(entry.status) || !boxes.some((box) => box.value === entry.status);
      entry.element.hidden = !(matches && kept);
      if (entry.isCounted) {
        all += 1;
        count += entry.element.hidden ? 0 : 1;
      }
    }
    for (const table of document.querySelectorAll("table")) {
      const rows = [...table.querySelectorAll("tbody tr")];
      table.parentElement.hidden = rows.length > 0 && rows.every((row) => row.hidden);
    }
    for (const section of sections) {
      const inside = [...section.querySelectorAll("[data-entry]")];
      section.hidden = narrowed && !inside.some((element) => !element.hidden);
      const fold = section.querySelector("details");
      if (!fold) continue;
      if (words.length > 0 && !section.hidden && !fold.open) {
        fold.open = true;
        opened.add(fold);
      }
    }
    if (words.length === 0) {
      for (const fold of opened) fold.open = false;
      opened.clear();
    }
    nothing.hidden = count > 0 || all === 0;
    shown.textContent = narrowed ? `${count} of ${all} results shown` : `${all} results`;
  };

  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", apply);
  apply();
})();
