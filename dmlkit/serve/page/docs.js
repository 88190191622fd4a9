// The documentation of the HTTP interface, by Swagger UI from the package fastapi-offline.
window.SwaggerUIBundle({ url: "/openapi.json", dom_id: "#interface", deepLinking: true, validatorUrl: null });
