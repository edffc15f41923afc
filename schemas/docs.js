SwaggerUIBundle({
  // Like every address of the page it is relative, so that any prefix will do.
  url: 'openapi.json',
  dom_id: '#page',
  tryItOutEnabled: true,
  // Otherwise the page would offer to send the description to somebody else's server.
  validatorUrl: 'none',
});
