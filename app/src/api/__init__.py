"""REST over the service. Only this package imports fastapi, and only `errors` maps errors to HTTP statuses."""
