// A button that copies code is no landmark of its own: screen readers would list one for every block.
new MutationObserver(() => {
  for (const nav of document.querySelectorAll("nav.md-code__nav:not([role])")) nav.setAttribute("role", "none")
}).observe(document.body, {childList: true, subtree: true})
