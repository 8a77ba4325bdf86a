// validatorUrl: the badge would have the document checked by a server on the internet.
SwaggerUIBundle({ url: "openapi.json", dom_id: "#docs", deepLinking: true, validatorUrl: null });
