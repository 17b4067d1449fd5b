// The field above the table of models shows the rows whose text holds each word of it.
document$.subscribe(() => {
  const field = document.getElementById("find-model");
  if (!field) return;
  const rows = [...document.querySelectorAll(".models tbody tr")];
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  });
});
