// Sets the theme before the first paint, so that the page does not flash. The choice is kept in
// localStorage: "light", "dark", or nothing, which follows the system.
(() => {
  const apply = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  };
  const read = () => {
    try {
      return localStorage.getItem("jserve.theme");
    } catch {
      return null; // storage is switched off: the system's theme
    }
  };
  apply(read());
  const dark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-theme-toggle]")) return;
    const theme = dark() ? "light" : "dark";
    apply(theme);
    try {
      localStorage.setItem("jserve.theme", theme);
    } catch {
      // not kept, still shown
    }
  });
})();
