// Swagger UI has dark colours, but the page must switch them on.
const dark = matchMedia('(prefers-color-scheme: dark)');
const choose = () => document.documentElement.classList.toggle('dark-mode', dark.matches);
dark.addEventListener('change', choose);
choose();

// By default the type of a schema with allOf is shown as "object | (any)".
const plainTypes = ({ React }) => ({
  wrapComponents: {
    JSONSchema202012KeywordType: (Type) => ({ schema: { allOf, ...schema }, ...others }) =>
      React.createElement(Type, { schema, ...others }),
  },
});

SwaggerUIBundle({
  // Relative, like every address of the page, so that it works under any prefix.
  url: document.getElementById('page').dataset.description,
  dom_id: '#page',
  tryItOutEnabled: true,
  plugins: [plainTypes],
  // By default Swagger UI sends the description to a public server to validate it.
  validatorUrl: 'none',
});

// Swagger UI's dialog does not close with Escape, keeps no focus, and gives none back.
const page = document.getElementById('page');
const dialog = () => page.querySelector('.dialog-ux');
let isOpen = false;
let opener;

document.addEventListener('focusin', ({ target }) => {
  if (!dialog()) opener = target;
});

new MutationObserver(() => {
  const shown = dialog();
  if (shown && !shown.contains(document.activeElement)) {
    shown.querySelector('input, .btn-done').focus();
  } else if (isOpen && !shown && opener) {
    (opener.isConnected ? opener : page.querySelector('.auth-wrapper .authorize')).focus();
  }
  isOpen = Boolean(shown);
}).observe(page, { childList: true, subtree: true });

document.addEventListener('keydown', (event) => {
  const shown = dialog();
  if (!shown) return;
  if (event.key === 'Escape') {
    shown.querySelector('.close-modal').click();
  } else if (event.key === 'Tab') {
    const controls = [...shown.querySelectorAll('a[href], button, input')];
    const [first, last] = event.shiftKey ? [controls.at(-1), controls[0]] : [controls[0], controls.at(-1)];
    if (document.activeElement === last) {
      first.focus();
      event.preventDefault();
    }
  }
});
