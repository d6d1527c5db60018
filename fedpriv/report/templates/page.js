"use strict";
(() => {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const isDark = (root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
    root.dataset.theme = isDark ? "light" : "dark";
  });

  const options = {
    ast: true, // expressions are interpreted: the page allows no eval
    renderer: "svg", // takes the colours of the page, on paper too
    config: { font: getComputedStyle(document.body).fontFamily },
    // By name, as others send a chart to a server.
    actions: { export: true, source: false, compiled: false, editor: false },
    tooltip: { disableDefaultStyle: true },
  };
  const draw = (plot) => {
    const { chart } = plot.dataset;
    const figure = JSON.parse(document.getElementById(`data-${chart}`).textContent);
    // On a phone the first chart is seen whole, below what warns of it.
    if (window.innerWidth < 600) figure.height *= 0.75;
    return vegaEmbed(plot, figure, { ...options, downloadFileName: chart });
  };
  const plots = [...document.querySelectorAll(".plot")];
  const drawAll = () => Promise.all(plots.map(draw));
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    // Legends have as many columns as fit; the height alone changes often on a phone.
    if (window.innerWidth !== width) drawAll();
    width = window.innerWidth;
  });
  drawAll().then(() => root.setAttribute("data-drawn", ""));
})();
