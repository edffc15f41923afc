// Swagger UI has dark colours, but the page must switch them on.
const dark = matchMedia('(prefers-color-scheme: dark)');
const choose = () => document.documentElement.classList.toggle('dark-mode', dark.matches);
dark.addEventListener('change', choose);
choose();

// The link that a start prints has a token behind the #, which no server sees. It leaves
// the address bar at once, and stays in the state of the page for reloads.
const linked = () => /^#token=(.+)/.exec(location.hash)?.[1];
const token = linked() ?? history.state?.token;
history.replaceState({ token }, '', location.pathname + location.search);
addEventListener('hashchange', () => linked() && location.reload());

const ui = SwaggerUIBundle({
  // Relative, like every address of the page, so that it works under any prefix.
  url: document.getElementById('page').dataset.description,
  dom_id: '#page',
  tryItOutEnabled: true,
  // By default Swagger UI sends the description to a public server to validate it.
  validatorUrl: 'none',
  onComplete: () => token && ui.preauthorizeApiKey('bearerAuth', token),
});
