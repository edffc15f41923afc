// Swagger UI has dark colours, and leaves it to the page to choose them.
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
