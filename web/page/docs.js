SwaggerUIBundle({
  // Like every address of the page it is relative, so that any prefix will do.
  url: document.getElementById('page').dataset.description,
  dom_id: '#page',
  tryItOutEnabled: true,
  // By default the page would send the description to the server of somebody else.
  validatorUrl: 'none',
});
