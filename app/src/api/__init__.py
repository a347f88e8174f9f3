"""REST over the service. The only place that imports fastapi; only `errors` has HTTP statuses."""
