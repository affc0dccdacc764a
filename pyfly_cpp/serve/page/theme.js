"use strict";
// Dark or light: the system's choice until the switch is used. Loaded before the page is drawn, so that it does not flash.
{
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("pyfly.theme"); } catch { /* the browser keeps nothing */ }

  const isDark = () => chosen === null ? system.matches : chosen === "dark";
  const show = () => {
    if (chosen !== null) root.dataset.theme = chosen;
    document.getElementById("theme")?.setAttribute("aria-pressed", isDark());
  };
  show();
  system.addEventListener("change", show);
  document.addEventListener("DOMContentLoaded", () => {
    show();
    document.getElementById("theme").addEventListener("click", () => {
      chosen = isDark() ? "light" : "dark";
      try { localStorage.setItem("pyfly.theme", chosen); } catch { /* until the page is closed, then */ }
      show();
    });
  });
}
