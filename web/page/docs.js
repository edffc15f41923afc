SwaggerUIBundle({
  // Relative, like every address of the page, so that it works under any prefix.
  url: document.getElementById('page').dataset.description,
  dom_id: '#page',
  tryItOutEnabled: true,
  // By default Swagger UI sends the description to a public server to validate it.
  validatorUrl: 'none',
});
