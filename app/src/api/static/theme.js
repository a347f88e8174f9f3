// Before the page is drawn: the theme that was chosen, if one was. Not a module, for those run too late.
"use strict";
try {
  const theme = localStorage.getItem("owl-sap.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is blocked: the system's theme it is.
}
