// A pasted error line is words, not a query: lunr reads "RuntimeError: ..." as a field and finds nothing.
document.addEventListener(
  "input",
  (event) => {
    const box = event.target;
    if (box.matches('[data-md-component="search-query"]') && /[:^~*+"]/.test(box.value)) {
      box.value = box.value.replace(/[:^~*+"]+/g, " ");
    }
  },
  true,
);
