// Swagger UI has dark colours, but the page must switch them on.
const dark = matchMedia('(prefers-color-scheme: dark)');
const choose = () => document.documentElement.classList.toggle('dark-mode', dark.matches);
dark.addEventListener('change', choose);
choose();

SwaggerUIBundle({
  // Relative, like every address of the page, so that it works under any prefix.
  url: document.getElementById('page').dataset.description,
  dom_id: '#page',
  tryItOutEnabled: true,
  // By default Swagger UI sends the description to a public server to validate it.
  validatorUrl: 'none',
});
