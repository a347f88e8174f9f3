// Applies the chosen theme before the page is drawn. Not a module, because modules run too late.
"use strict";
try {
  const theme = localStorage.getItem("owl-sap.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is blocked: the system's theme applies.
}
